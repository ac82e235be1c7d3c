"""Hooks that a model's own code puts on what autograd saves (torch.autograd.graph.saved_tensors_hooks).

On ranks such hooks are given slices where one process has whole tensors. What they do with them is anybody's code: a
range over all elements, a file by shape, a sort. So a module that enters them runs whole; hooks that are torch's own
(save_on_cpu, checkpoint) give back, element by element, what they were given.
"""

import functools
from collections.abc import Callable
from typing import Any

from tpplan.core.errors import ModelError
from tpplan.trace.answers.planned_device import asking_line, is_foreign


def check_saved_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Raises ModelError where one of the hooks is neither torch's nor tpplan's code."""
    if _is_foreign(pack) or _is_foreign(unpack):
        raise ModelError(
            f"{asking_line()}: saved_tensors_hooks would be given slices of what the code saves; enter them around the "
            "training step, where that is meant"
        )


def _is_foreign(hook: object) -> bool:
    """True for code of others, and where no code tells whose it is (a partial of a C function, say)."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    called: object = vars(type(hook)).get("__call__")  # of an object that is called
    code = getattr(hook, "__code__", None) or getattr(called, "__code__", None)
    return code is None or is_foreign(code.co_filename)

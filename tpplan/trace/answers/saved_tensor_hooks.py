"""Hooks that a model's own code puts on what autograd saves (torch.autograd.graph.saved_tensors_hooks).

On ranks such hooks get slices where one process has whole tensors, and may do anything with them: take the range over
all elements, choose a file by shape, sort. So a module that enters such hooks runs whole. Hooks of torch's own
(save_on_cpu, checkpoint) give back each element as they got it, and may stay.
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
            f"{asking_line()}: the hooks of saved_tensors_hooks would be given slices of the tensors that this code "
            "saves. If they may be, enter them around the training step instead"
        )


def _is_foreign(hook: object) -> bool:
    """True for a hook of neither torch's nor tpplan's code, or of no Python code (a partial of a C function, say)."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    called: object = vars(type(hook)).get("__call__")
    code = getattr(hook, "__code__", None) or getattr(called, "__code__", None)
    return code is None or is_foreign(code.co_filename)

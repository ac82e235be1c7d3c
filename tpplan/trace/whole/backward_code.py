"""Notes where a module that runs whole puts code of its own into backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpplan.torch_internals.autograd import functions_run_by, gradient_hooks_seen_by
from tpplan.trace.answers.planned_device import asking_line

#: packages whose functions with a backward of their own are linear in the gradient
_OWN = ("torch", "tpplan")


@contextlib.contextmanager
def backward_code_noted(lines: dict[str, None]) -> Iterator[None]:
    """Adds to `lines` each line of code that calls an autograd.Function or puts a hook on a tensor's gradient."""

    def run(cls: type[torch.autograd.Function], apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] not in _OWN:
            lines[asking_line()] = None
        return apply(*args, **kwargs)

    def see() -> None:
        lines[asking_line()] = None

    with functions_run_by(run), gradient_hooks_seen_by(see):
        yield

"""Notes where a module that runs whole puts code of its own into backward, and whether that runs modules."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

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


#: the lists to which the calls of modules are added now, the innermost last
_noting: list[list[nn.Module] | None] = []


@contextlib.contextmanager
def modules_noted(called: list[nn.Module]) -> Iterator[None]:
    """Adds to `called` each module that is called, but under `unnoted`."""

    def see(module: nn.Module, _: Any) -> None:
        if _noting[-1] is not None:
            _noting[-1].append(module)

    _noting.append(called)
    handle = register_module_forward_pre_hook(see)
    try:
        yield
    finally:
        handle.remove()
        _noting.pop()


@contextlib.contextmanager
def unnoted(make_context: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """A new make_context(), in which no call of a module is noted."""
    _noting.append(None)
    try:
        with make_context():
            yield
    finally:
        _noting.pop()

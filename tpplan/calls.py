"""What a forward calls, module by module: the torch functions in order, as devices and batches agree on them.

A call is noted by its name and by those of its literals that are no sizes: flags, dtypes, names. Sizes follow the batch
and the plan, numbers may follow sizes, kernels follow the device, and so none of them is compared. Only code of modules
counts (the model's, a library's, torch's layers), and only inside of forwards: hooks are whoever's.
"""

import contextlib
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tpplan.known import DESCRIPTIONS, QUESTIONS
from tpplan.own_failure import is_layer
from tpplan.planned_device import is_foreign, is_ours
from tpplan.rewrite import is_own_code_running
from tpplan.torch_internals import pytree

#: calls that a trace, or a plan, puts others in the place of
_REPLACED = frozenset({"cross_entropy", "nll_loss", "split", "split_with_sizes", "boundary", "frame", "sibling"})
#: files of torch's that calls pass on their way: functions written in Python, and what gives them to modes
_BETWEEN = frozenset(
    str(Path(torch.__file__).parent / file) for file in ("overrides.py", "_tensor.py", "functional.py")
)
#: calls after which each has two digits of its own
_MOST_TOLD = 128

#: the calls of one forward
Calls = tuple[str, ...]


class Calling(TorchFunctionMode):
    """While it is on, the calls of each module's forward are noted under its name in `found`; `asked` counts what data
    decides, and modules in which it grows are in `unsure`."""

    def __init__(self, model: nn.Module, asked: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.asked = asked
        self.found: dict[str, set[Calls]] = {}
        self.unsure: set[str] = set()
        #: of the forwards that run, the innermost last; None between a module's call and its forward
        self._running: list[list[str] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._running[-1] if self._running else None
        if calls is not None and not is_own_code_running():
            name = getattr(func, "__name__", "")
            if name not in _REPLACED | QUESTIONS | DESCRIPTIONS and _is_code_of_modules():
                calls.append(_title(name, args, kwargs))
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """The mode, on, and modules say when they are called. It lasts for one forward of the model."""
        call = nn.Module.__call__

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self.names:
                return call(module, *args, **kwargs)
            self._running.append(None)
            try:
                with self._forward_noted(module):
                    return call(module, *args, **kwargs)
            finally:
                self._running.pop()

        nn.Module.__call__ = called  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _forward_noted(self, module: nn.Module) -> Iterator[None]:
        """The module's forward notes its calls."""
        own, forward = module.__dict__.get("forward"), module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self.forward_of(self.names[id(module)]):
                return forward(*args, **kwargs)

        noted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        module.__dict__["forward"] = noted
        try:
            yield
        finally:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own

    @contextlib.contextmanager
    def forward_of(self, name: str) -> Iterator[None]:
        """What is called inside is noted under a module's name."""
        calls: list[str] = []
        before = self.asked()
        self._running.append(calls)
        try:
            yield
        finally:
            self._running.pop()
        if self.asked() != before:
            self.unsure.add(name)
        if calls:
            self.found.setdefault(name, set()).add(tuple(calls))


def _is_code_of_modules() -> bool:
    """True where a call, modes and tpplan's own code on its way left out, is made by code of modules."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_on_the_way(frame.f_code.co_name, frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and (is_foreign(frame.f_code.co_filename) or is_layer(frame.f_code.co_filename))


def _is_on_the_way(function: str, file: str) -> bool:
    return function == "__torch_function__" or file in _BETWEEN or is_ours(file)


def _title(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A call's name, and its literals that are no numbers."""
    told = [str(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, bool | str | torch.dtype)]
    return f"{name}({', '.join(told)})"


def digest(calls: Calls) -> str:
    """Eight digits of all calls, and two of each of the first: a call changes those of all that follow."""
    running, each = hashlib.sha256(), []
    for call in calls:
        running.update(call.encode() + b"\0")
        each.append(running.hexdigest()[:2])
    return f"{running.hexdigest()[:8]} {''.join(each[:_MOST_TOLD])}"


def first_difference(calls: Calls, planned: str) -> int:
    """The place of the first call that is not as planned."""
    each = digest(calls).partition(" ")[2], planned.partition(" ")[2]
    pairs = zip(*(range(0, len(text), 2) for text in each), strict=False)
    place = next((i // 2 for i, _ in pairs if each[0][i : i + 2] != each[1][i : i + 2]), None)
    return min(map(len, each)) // 2 if place is None else place

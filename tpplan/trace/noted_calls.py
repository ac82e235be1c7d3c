"""What a forward calls, module by module: the torch functions in order, as devices and batches agree on them.

A call is noted by its name and by those of its literals that are no sizes: flags, dtypes, names, dims, and where a
view is given -1; a module that a forward calls by its own name. Sizes follow the batch and the plan, numbers may follow
sizes, kernels and names of devices follow the device, and so none of them is compared. Only code of modules counts (the
model's, a library's, torch's layers), and only inside of forwards: hooks are whoever's.
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

from tpplan.torch_internals import pytree
from tpplan.torch_internals.recording import is_function_mode_on, without_function_mode
from tpplan.trace.answers.concrete_values import DESCRIPTIONS, QUESTIONS
from tpplan.trace.answers.own_failure import is_layer
from tpplan.trace.answers.planned_device import is_foreign, is_ours
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: calls that a trace, or a plan, puts others in the place of
_REPLACED = frozenset({"cross_entropy", "nll_loss", "split", "split_with_sizes", "boundary", "frame", "sibling",
                       "whole"})  # fmt: skip
#: attributes of a tensor that are views of it
_VIEWS = {getattr(torch.Tensor, name).__get__: name for name in ("T", "mT", "H", "mH", "real", "imag")}
#: all integers that a call is given are dims
_TURNING = frozenset({"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "squeeze",
                      "flatten", "flip"})  # fmt: skip
#: where a dim stands among the arguments of a call that takes others, too
_PLACES = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp", "sum", "mean", "prod", "std", "var", "amax",
                     "amin", "argmax", "argmin", "max", "min", "median", "all", "any", "sort", "argsort", "cumsum",
                     "cumprod", "cummax", "logcumsumexp", "cat", "concat", "stack", "unbind", "select", "narrow",
                     "gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy", "glu", "size",
                     "unflatten"), 1),
    **dict.fromkeys(("chunk", "tensor_split", "topk", "kthvalue", "norm", "roll", "repeat_interleave", "normalize"), 2),
}  # fmt: skip
#: what dims are called
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "axis", "start_dim", "end_dim"})
#: calls that are given sizes, of which one may be left to follow from the others
_SHAPING = frozenset({"view", "reshape", "expand", "unflatten"})
#: files of torch's that calls pass on their way: functions written in Python, what gives them to modes, torch.no_grad
_BETWEEN = frozenset(
    str(Path(torch.__file__).parent / file)
    for file in ("overrides.py", "_tensor.py", "functional.py", "autograd/grad_mode.py", "utils/_contextlib.py")
)
#: what is not noted: calls of one name that others take the place of, and those that compute nothing
_UNNOTED = _REPLACED | QUESTIONS | DESCRIPTIONS | {""}
#: types of devices that code may name
_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu", "hpu", "mtia", "xla", "npu"})
#: calls after which each has two digits of its own
_MOST_TOLD = 128

#: the calls of one forward
Calls = tuple[str, ...]


class Calling(TorchFunctionMode):
    """While it is on, the calls of each module's forward are noted under its name in `found`, but for modules that
    are hidden; `asked` counts what data decides, and modules in which it grows are in `unsure`."""

    def __init__(
        self,
        model: nn.Module,
        is_hidden: Callable[[str], bool] = lambda _: False,
        asked: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self.is_hidden = is_hidden
        self.names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.asked = asked
        self.found: dict[str, set[Calls]] = {}
        self.unsure: set[str] = set()
        #: both branches of a choice have run, of which training runs one, compiled
        self.has_chosen = False
        #: of the forwards that run, the innermost last; None between a module's call and its forward
        self._running: list[list[str] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._running[-1] if self._running else None
        if calls is not None and not is_own_code_running():
            name = _name(func, args)
            if name not in _UNNOTED and _is_code_of_modules():
                calls.append(_title(name, args, kwargs))
        return func(*args, **kwargs)

    def choose(self) -> None:
        """Says that both branches of a choice run."""
        self.has_chosen = True

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """The mode, on, and modules say when they are called. It lasts for one forward of the model."""
        call = nn.Module.__call__

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self.names or torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            self._note_module(module)
            self._running.append(None)
            try:
                if self.is_hidden(self.names[id(module)]):
                    with without_function_mode(self):
                        return call(module, *args, **kwargs)
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

    def _note_module(self, module: nn.Module) -> None:
        """That the forward which runs calls a module: its last name, as layers that are like each other call theirs."""
        calls = self._running[-1] if self._running else None
        if calls is not None and is_function_mode_on(self) and not is_own_code_running():
            calls.append(f"module {self.names[id(module)].rpartition('.')[2]}")

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


def _name(func: Any, args: tuple[Any, ...]) -> str:
    """What a call is called, "" for a question about a tensor; of Tensor.type casts are calls, of attributes views."""
    if func is torch.Tensor.type and len(args) > 1:
        return "to"
    name = getattr(func, "__name__", "")
    return _VIEWS.get(func, "") if name == "__get__" else name


def _title(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A call's name, and its literals that are no numbers; of integers, those that are dims."""
    told = [str(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _is_told(leaf)]
    told += [f"{key}={number}" for key in sorted(_DIMS & kwargs.keys()) for number in _integers(kwargs[key])]
    if name in _TURNING:
        told += map(str, _integers(args))
    elif (place := _PLACES.get(name, len(args))) < len(args):
        told += map(str, _integers(args[place]))
    if name in _SHAPING:
        told += ("-1" if size == -1 else "n" for size in _integers(args[1:]))
    return f"{name}({', '.join(told)})"


def _is_told(leaf: object) -> bool:
    """True for a flag, a dtype and a name that is none of a device."""
    return isinstance(leaf, bool | torch.dtype) or (isinstance(leaf, str) and not _is_device(leaf))


def _is_device(text: str) -> bool:
    """True for "cpu", "cuda:0" and the like, and for what Tensor.type gives, "torch.cuda.FloatTensor"."""
    return text.partition(":")[0] in _DEVICES or (text.startswith("torch.") and text.endswith("Tensor"))


def _integers(value: object) -> Iterator[int]:
    """Those in a number, or in tuples and lists of any depth; tensors and others are none."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


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

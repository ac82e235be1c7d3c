"""The torch functions that each module's forward calls, in order, in a form that does not depend on device or batch.

A call is noted as its function's name and those literals that are no sizes: flags, dtypes, names, dims, and where a
view is given -1. A call of a submodule is noted as the submodule's name. Sizes follow the batch and the plan, other
numbers may follow sizes, kernels and device names follow the device: none of these is compared. Only code of modules
counts (the model's, a library's, torch's layers), and only inside of forwards, as hooks may be anybody's.
"""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tpplan.core.graph import enclosing
from tpplan.torch_internals import pytree
from tpplan.torch_internals.recording import calls_compiled_code, is_function_mode_on, without_function_mode
from tpplan.torch_internals.tensors import is_of_functorch
from tpplan.trace.answers.concrete_values import DESCRIPTIONS, QUESTIONS
from tpplan.trace.answers.own_failure import is_layer
from tpplan.trace.answers.planned_device import is_foreign, is_ours
from tpplan.trace.forward_arguments import signature_of
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: names of functions that a trace or an applied plan replaces by others
_REPLACED = frozenset({"cross_entropy", "nll_loss", "embedding_bag", "split", "split_with_sizes", "boundary", "frame",
                       "sibling", "whole", "arriving", "send_rows", "return_rows"})  # fmt: skip
#: the getters of tensor attributes that are views, and the attributes' names
_VIEWS = {getattr(torch.Tensor, name).__get__: name for name in ("T", "mT", "H", "mH", "real", "imag")}
#: functions whose integer arguments are all dims
_TURNING = frozenset({"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "squeeze",
                      "flatten", "flip"})  # fmt: skip
#: position of the dim among the arguments of functions that take other integers, too
_PLACES = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp", "sum", "mean", "prod", "std", "var", "amax",
                     "amin", "argmax", "argmin", "max", "min", "median", "all", "any", "sort", "argsort", "cumsum",
                     "cumprod", "cummax", "logcumsumexp", "cat", "concat", "stack", "unbind", "select", "narrow",
                     "gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy", "glu", "size",
                     "unflatten"), 1),
    **dict.fromkeys(("chunk", "tensor_split", "topk", "kthvalue", "norm", "roll", "repeat_interleave", "normalize"), 2),
}  # fmt: skip
#: names of keyword arguments that are dims
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "axis", "start_dim", "end_dim"})
#: functions that take sizes, one of which may be -1
_SHAPING = frozenset({"view", "reshape", "expand", "unflatten"})
#: files of torch's between a caller and a mode: functions written in Python, the dispatch to modes, torch.no_grad
_BETWEEN = frozenset(
    str(Path(torch.__file__).parent / file)
    for file in ("overrides.py", "_tensor.py", "functional.py", "autograd/grad_mode.py", "utils/_contextlib.py")
)
#: functions that are not noted: those that are replaced, and those that compute nothing
_UNNOTED = _REPLACED | QUESTIONS | DESCRIPTIONS | {""}
#: device types that code may name
_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu", "hpu", "mtia", "xla", "npu"})
#: calls of one forward that get two digits of their own in its digest, from the first on
_MOST_TOLD = 128

#: the calls of one forward
Calls = tuple[str, ...]


class CallNotes(TorchFunctionMode):
    """A mode that notes the calls of each module's forwards, under the module's name in `found`.

    is_hidden(name): whether to leave a module out. `asked`, which a trace sets, gives the number of questions so far
    that data decides; a module whose forward asks one is in `unsure`.
    """

    def __init__(self, model: nn.Module, is_hidden: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__()
        self.is_hidden = is_hidden
        self.names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.asked: Callable[[], int] = lambda: 0
        self.found: dict[str, set[Calls]] = {}
        self.unsure: set[str] = set()
        #: whether both branches of a torch.cond have run, of which training runs one, compiled
        self.has_chosen = False
        #: the calls so far of each forward that runs, the innermost last; None between a module's call and its forward
        self._running: list[list[str] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # the call that compiles, such as flex_attention, is the code's own
            return func(*args, **kwargs)
        calls = self._running[-1] if self._running else None
        if calls is not None and not is_own_code_running():
            name = _name(func, args)
            if name not in _UNNOTED and _is_code_of_modules() and not _is_inside_vmap(args):
                calls.append(_title(name, args, kwargs))
        return func(*args, **kwargs)

    def choose(self) -> None:
        """Notes that both branches of a torch.cond run."""
        self.has_chosen = True

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Switches the mode on, and notes modules as they are called, for one forward of the model."""
        call = nn.Module.__call__

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self.names or torch.compiler.is_compiling() or not is_function_mode_on(self):
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

        with patch.object(nn.Module, "__call__", called), self:
            yield

    def _note_module(self, module: nn.Module) -> None:
        """Notes in the running forward that it calls a module, by the last part of the module's name, which is equal
        for the submodules of like layers."""
        calls = self._running[-1] if self._running else None
        if calls is not None and not is_own_code_running():
            calls.append(f"module {self.names[id(module)].rpartition('.')[2]}")

    @contextlib.contextmanager
    def _forward_noted(self, module: nn.Module) -> Iterator[None]:
        """Makes the module's forward note its calls."""
        own, forward = module.__dict__.get("forward"), module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self.forward_of(self.names[id(module)]):
                return forward(*args, **kwargs)

        noted.__signature__ = signature_of(module)  # type: ignore[attr-defined]
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
        """Notes the calls made inside as one forward of the named module."""
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


def _is_inside_vmap(args: Any) -> bool:
    """True for a call in a function that torch.vmap runs, such as a mask's of flex_attention, which a trace follows
    apart."""
    return any(isinstance(leaf, torch.Tensor) and is_of_functorch(leaf) for leaf in pytree.tree_leaves(args))


def _is_code_of_modules() -> bool:
    """True where code of modules made the call; frames of modes and of tpplan on the way are skipped."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_on_the_way(frame.f_code.co_name, frame.f_code.co_filename):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    return (is_foreign(file) or is_layer(file)) and frame is not None and not _is_in_compiled_code(frame)


def _is_in_compiled_code(frame: FrameType | None) -> bool:
    """True in a function that the module's code has compiled: a trace runs it as it is written, training does not."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if calls_compiled_code(frame):
            return True
        frame = frame.f_back
    return False


def _is_on_the_way(function: str, file: str) -> bool:
    return function == "__torch_function__" or file in _BETWEEN or is_ours(file)


def _name(func: Any, args: tuple[Any, ...]) -> str:
    """The name by which a call is noted: "to" for a cast by Tensor.type, the attribute's name for a view such as `.T`,
    "" for any other attribute of a tensor."""
    if func is torch.Tensor.type and len(args) > 1:
        return "to"
    name = getattr(func, "__name__", "")
    return _VIEWS.get(func, "") if name == "__get__" else name


def _title(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A call as it is noted: `name(flags, dtypes, texts, dims, -1 or n for each size of a view)`."""
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
    """True for a flag, a dtype, and a text that is not a device's name."""
    return isinstance(leaf, bool | torch.dtype) or (isinstance(leaf, str) and not _is_device(leaf))


def _is_device(text: str) -> bool:
    """True for a device such as "cuda:0", and for a result of Tensor.type, such as "torch.cuda.FloatTensor"."""
    return text.partition(":")[0] in _DEVICES or (text.startswith("torch.") and text.endswith("Tensor"))


def _integers(value: object) -> Iterator[int]:
    """Yields the integers in a value: the value itself, or those in lists and tuples of any depth; booleans are
    none."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def digest(calls: Calls) -> str:
    """Eight hex digits of all calls, then two for each of the first 128: a call changes its digits and all after it."""
    running, each = hashlib.sha256(), []
    for call in calls:
        running.update(call.encode() + b"\0")
        each.append(running.hexdigest()[:2])
    return f"{running.hexdigest()[:8]} {''.join(each[:_MOST_TOLD])}"


def first_difference(calls: Calls, planned: str) -> int:
    """Position of the first call that differs from those of the `planned` digest."""
    each = digest(calls).partition(" ")[2], planned.partition(" ")[2]
    pairs = zip(*(range(0, len(text), 2) for text in each), strict=False)
    place = next((i // 2 for i, _ in pairs if each[0][i : i + 2] != each[1][i : i + 2]), None)
    return min(map(len, each)) // 2 if place is None else place


@contextlib.contextmanager
def naming_modules(
    model: nn.Module, running: list[str], is_hidden: Callable[[str], bool] = lambda _: False
) -> Iterator[set[tuple[str, str]]]:
    """Keeps in `running` the names of the modules that run, the innermost last. After an error the names remain. Gives
    what a graph has as `apart`, as it is noted."""
    apart: set[tuple[str, str]] = set()

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        around = enclosing(name)[1:]

        def hook(_module: nn.Module, _args: Any) -> None:
            apart.update((name, outer) for outer in around if outer not in running)
            running.append(name)

        return hook

    def leave(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, _output: Any) -> None:
            while running.pop() != name:  # modules inside, whose error was caught
                pass

        return hook

    handles = []
    for name, module in model.named_modules():
        if is_hidden(name):
            continue
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield apart
    finally:
        for handle in handles:
            handle.remove()

"""Makes a model's code see the planned device and ranks while it is traced on another machine.

A trace runs on meta tensors (a module that runs whole: on fake ones), on whatever machine plans. Code that asks where a
tensor is, whether there is a GPU, or whether ranks are running could silently take another branch than in training. So
inside `planning_for`, the model's code gets the answers that it will get on ranks: tensors of the trace say that they
are on the planned device, and tensors moved to that device stay where the trace runs. Code of torch and of tpplan gets
true answers. A question that no plan can answer, such as a process's own rank, raises ModelError.
"""

import contextlib
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError, PlanError
from tpplan.core.files import PACKAGE
from tpplan.machine.profile import HardwareProfile
from tpplan.torch_internals.fakes import FakeTensor
from tpplan.torch_internals.tensors import address_getters, plain_calls
from tpplan.trace.answers.unbacked_int import UnknownNumber

#: folders of torch and tpplan, whose code asks on behalf of other code
_NOT_ASKING = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, PACKAGE))
#: functions that give a tensor's address
ADDRESSES = address_getters()
#: characters of a line of code that a message shows
_MOST_OF_A_LINE = 90
#: files of tpplan in which a mode passes calls on
_MODES = (str(PACKAGE / "trace" / "layer_calls.py"),)
#: files of torch through which the call of a tensor's method reaches modes
_METHODS = tuple(str(Path(torch.__file__).parent / file) for file in ("_tensor.py", "overrides.py"))
#: NVIDIA's compute capability by a word of the device's name (CUDA C++ Programming Guide, compute capabilities)
_CAPABILITIES = {"V100": (7, 0), "A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}
#: the text of a PlannedDevice
_AS_TEXT = r"[a-z]+(?: [0-9]+\.[0-9]+)?"
#: functions of torch.distributed that answer differently from rank to rank, and those that one process cannot do
_ASKING_RANKS = ("get_rank", "get_world_size", "get_node_local_rank", "get_backend", "get_process_group_ranks")
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "barrier",
                "all_gather_object", "broadcast_object_list", "all_to_all_single", "all_to_all", "reduce", "send",
                "recv", "isend", "irecv", "gather", "scatter", "reduce_scatter", "new_group")  # fmt: skip
#: functions of torch.cuda and torch.accelerator whose answers no profile has; those in _NUMBERS give numbers, which
#: code may keep and print
_ASKING_GPUS = ("get_device_name", "get_device_properties", "mem_get_info", "memory_stats", "get_memory_info")
_NUMBERS = ("device_count", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_NOT_IN_PROFILE = ", which the profile does not say"
#: methods of tensors that take a device at any position, and those whose name is one
_MOVES = frozenset({"to", "type"})
_NAMED = {"cuda": "cuda", "cpu": "cpu"}
#: how the result of Tensor.type begins on a CPU and on a GPU
_TENSOR_TYPE = ("torch.", "torch.cuda.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """A device type, and for a GPU its compute capability where it is known; as text "cpu", "cuda", "cuda 9.0"."""

    type: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, profile: HardwareProfile) -> "PlannedDevice":
        """The device that a profile is of."""
        known = (_CAPABILITIES[word] for word in re.findall(r"\w+", profile.device) if word in _CAPABILITIES)
        return cls(type=profile.device_type, capability=next(known, None) if profile.device_type == "cuda" else None)

    @classmethod
    def parse(cls, text: str, *, plan_path: str) -> "PlannedDevice":
        """The device that str() gave as text, which stands at `plan_path` in a plan. Raises PlanError for any other
        text."""
        if re.fullmatch(_AS_TEXT, text) is None:
            raise PlanError(f"expected a device such as 'cpu', 'cuda' or 'cuda 9.0', got {text!r}", plan_path=plan_path)
        kind, _, capability = text.partition(" ")
        major, _, minor = capability.partition(".")
        return cls(type=kind, capability=(int(major), int(minor)) if capability else None)

    def __str__(self) -> str:
        return f"{self.type} {self.capability[0]}.{self.capability[1]}" if self.capability else self.type

    @property
    def device(self) -> torch.device:
        """The torch.device that tensors report: of GPUs, the first of a node."""
        return torch.device(self.type, 0) if self.type != "cpu" else torch.device("cpu")

    def own_capability(self, *_: object, **__: object) -> tuple[int, int]:
        """The answer to torch.cuda.get_device_capability. Raises ModelError where the profile does not give it."""
        if self.capability is None:
            raise ModelError(
                f"{asking_line()}: asks for the GPU's compute capability, which the profile does not say: let the "
                f"profile's `device` name one of {', '.join(_CAPABILITIES)}, or ask in the builder"
            )
        return self.capability


_planned: ContextVar[PlannedDevice | None] = ContextVar("planned", default=None)
_autocast: ContextVar[bool] = ContextVar("autocast", default=False)
_precision: ContextVar[str] = ContextVar("precision", default="")


@contextlib.contextmanager
def planning_for(device: PlannedDevice, *, autocast: bool = False, precision: str = "") -> Iterator[None]:
    """Makes models traced inside see this device, and run under autocast in bfloat16 where `autocast`. Errors name the
    `precision`."""
    token, casting, named = _planned.set(device), _autocast.set(autocast), _precision.set(precision)
    try:
        yield
    finally:
        _planned.reset(token)
        _autocast.reset(casting)
        _precision.reset(named)


def autocast_device() -> str | None:
    """The type of the device for which models run under autocast; None where they do not."""
    planned = _planned.get()
    return planned.type if planned is not None and _autocast.get() else None


def planned_precision() -> str:
    """The precision that the enclosing planning_for names; "" where it names none."""
    return _precision.get()


def planned_device() -> PlannedDevice | None:
    """The device of the enclosing planning_for; None outside of one."""
    return _planned.get()


def is_foreign(file: str) -> bool:
    """True for a file outside torch and tpplan: the model's, or another library's."""
    return not file.startswith(_NOT_ASKING)


def is_ours(file: str) -> bool:
    """True for a file of tpplan."""
    return file.startswith(_NOT_ASKING[1])


def asking_line() -> str:
    """The innermost running line of code outside torch and tpplan, as `file:line: text`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return line_of(frame, frame.f_lineno)


def line_of(frame: FrameType, number: int) -> str:
    """A line of a frame's code as `file:line: text`. The file is named as it is imported, `package/module.py`, so that
    it is the same wherever the package is installed."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    parts = Path(file).parts
    length = module.count(".") + 1 + (parts[-1] == "__init__.py")
    text = linecache.getline(file, number).strip()
    shown = text if len(text) <= _MOST_OF_A_LINE else f"{text[:_MOST_OF_A_LINE]}..."
    return f"{'/'.join(parts[-length:])}:{number}: {shown}"


def is_model_asking() -> bool:
    """True where the model's code made the call that a mode is handling."""
    return _is_from_model(sys._getframe(2), _MODES)


def is_model_calling() -> bool:
    """True where the model's code called the tensor method that a mode is handling, also one that torch has in
    Python."""
    return _is_from_model(sys._getframe(2), (*_MODES, *_METHODS))


def _is_from_model(frame: FrameType | None, passed: tuple[str, ...]) -> bool:
    """True where the innermost frame, from this one outwards, that is no mode's `__torch_function__` and in none of the
    `passed` files, is code outside torch and tpplan."""
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename in passed):
        frame = frame.f_back
    return frame is not None and is_foreign(frame.f_code.co_filename)


# ---- tensors


class DeviceAnswers:
    """Answers questions about a tensor's device as if tensors of the trace were on the planned device.

    stand_in: the device that the trace's tensors are on: "meta", or "cpu" for fake tensors.
    """

    def __init__(self, planned: PlannedDevice, stand_in: str) -> None:
        self.planned, self.stand_in = planned, stand_in
        kind = planned.type
        self.getters: dict[Any, object] = {
            Tensor.device.__get__: planned.device,
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cuda.__get__: kind == "cuda",  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: kind == "cpu",  # type: ignore[attr-defined]
            Tensor.get_device: 0 if kind != "cpu" else -1,
        }

    def is_there(self, tensor: object) -> bool:
        """True for a tensor of the trace."""
        if not isinstance(tensor, Tensor):
            return False
        with plain_calls():
            return tensor.is_meta if self.stand_in == "meta" else isinstance(tensor, FakeTensor)

    def answer(self, func: Any, args: tuple[Any, ...]) -> object:
        """The answer to a call of the model's code that asks for a tensor's device; NotImplemented for other calls."""
        try:
            found = self.getters.get(func, NotImplemented)
        except TypeError:  # not hashable
            return NotImplemented
        if func is Tensor.type and len(args) == 1 and self.is_there(args[0]) and is_model_asking():
            return _TENSOR_TYPE[self.planned.type == "cuda"] + str(func(*args)).rpartition(".")[2]
        if found is NotImplemented or not args or not self.is_there(args[0]) or not is_model_asking():
            return NotImplemented
        return found

    def placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """The (function, args, kwargs) to run for a call, with the stand-in in place of the planned device."""
        if "device" in kwargs:
            kwargs = kwargs | {"device": self._place(kwargs["device"])}
        name = getattr(func, "__name__", "")
        if name in _MOVES and len(args) > 1:
            args = (args[0], *(self._place(a) if isinstance(a, str | torch.device) else a for a in args[1:]))
        elif _NAMED.get(name) == self.planned.type and args and self.is_there(args[0]):
            return Tensor.to, (args[0], self.stand_in), {}
        return func, args, kwargs

    def _place(self, device: Any) -> Any:
        """The stand-in for the planned device; any other device as it is. An integer is the number of a GPU."""
        if isinstance(device, int) and not isinstance(device, bool):
            return self.stand_in if self.planned.type == "cuda" else device
        if isinstance(device, str):
            return self.stand_in if device.partition(":")[0] == self.planned.type else device
        return self.stand_in if isinstance(device, torch.device) and device.type == self.planned.type else device


def as_planned(stand_in: str, refused: Callable[[str], None]) -> contextlib.AbstractContextManager[object]:
    """A context in which tensors on the stand-in device answer as on the planned one.

    Asking for a tensor's address, which differs from rank to rank, calls refused(problem) and raises ModelError, which
    the code may catch.
    """
    planned = planned_device()
    return (
        _AsPlannedMode(DeviceAnswers(planned, stand_in), refused) if planned is not None else contextlib.nullcontext()
    )


class _AsPlannedMode(TorchFunctionMode):
    def __init__(self, answers: DeviceAnswers, refused: Callable[[str], None]) -> None:
        super().__init__()
        self.answers = answers
        self.refuse = _refusal("asks for the address of a tensor, which differs on each rank", refused)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDRESSES and is_model_calling():
            self.refuse()
        found = self.answers.answer(func, args)
        if found is not NotImplemented:
            return found
        func, args, kwargs = self.answers.placed(func, args, kwargs or {})
        return func(*args, **kwargs)


# ---- the machine and the ranks


@contextlib.contextmanager
def machine_as_planned(refused: Callable[[str], None]) -> Iterator[None]:
    """Makes the model's code find the planned GPUs, and torch.distributed initialized.

    A question that no plan can answer calls refused(problem) and raises ModelError, which the code may catch.
    """
    planned = planned_device()
    with contextlib.ExitStack() as stack:
        for owner, name, answer in _answers(planned, refused) if planned is not None else ():
            stack.enter_context(_answered(owner, name, answer))
        yield


def _answers(
    planned: PlannedDevice, refused: Callable[[str], None]
) -> Iterator[tuple[Any, str, Callable[..., object]]]:
    """Yields (owner, name, answer): a function that the model's code may call, and what answers in its place."""
    yield dist, "is_initialized", lambda: True
    for name in _ASKING_RANKS:
        yield dist, name, _refusal(f"asks torch.distributed.{name}(), which a plan cannot depend on", refused)
    for name in _COLLECTIVES:
        yield dist, name, _refusal(f"calls torch.distributed.{name}(), which one process cannot do", refused)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        asks = "asks for the address of a tensor's storage, which differs on each rank"
        yield storage, "data_ptr", _refusal(asks, refused)
    yield nn.Module, "to", _staying(planned.type)
    yield nn.Module, planned.type, lambda module, *_, **__: module
    is_gpu = planned.type == "cuda"
    yield torch.cuda, "is_available", lambda: is_gpu
    yield torch.accelerator, "is_available", lambda: is_gpu
    if is_gpu:
        yield torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    else:  # without check_available the answer is what torch was built for, on ranks as here
        built_for = torch.accelerator.current_accelerator()
        yield (
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: None if check_available else built_for,
        )
        yield torch.cuda, "device_count", lambda: 0
        yield torch.accelerator, "device_count", lambda: 0
        return
    for owner in (torch.cuda, torch.accelerator):
        for name in _ASKING_GPUS:
            yield owner, name, _refusal(f"asks {owner.__name__}.{name}(){_NOT_IN_PROFILE}", refused)
        for name in _NUMBERS:
            number = UnknownNumber(f"{owner.__name__}.{name}(){_NOT_IN_PROFILE}", refused)
            yield owner, name, lambda *_, number=number, **__: number
        yield owner, "synchronize", lambda *_, **__: None
        yield owner, "empty_cache", lambda: None
    yield torch.cuda, "current_device", lambda: 0
    yield torch.accelerator, "current_device_index", lambda: 0
    yield torch.cuda, "get_device_capability", planned.own_capability
    yield torch.cuda, "is_bf16_supported", lambda *_, **__: planned.own_capability() >= (8, 0)


def _refusal(what: str, refused: Callable[[str], None]) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        problem = f"{asking_line()}: {what}: do this in the builder, or outside the model"
        refused(problem)
        raise ModelError(problem)

    return refuse


def _staying(device_type: str) -> Callable[..., nn.Module]:
    """module.to(...), which leaves a module where it is that is moved to the device on which all are planned."""
    own = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        given = [*args, *(value for name, value in kwargs.items() if name != "non_blocking")]
        stays = len(given) == 1 and isinstance(given[0], torch.device | str) and _type_of(given[0]) == device_type
        return module if stays else own(module, *args, **kwargs)

    return to


def _type_of(device: torch.device | str) -> str:
    return str(device).partition(":")[0]


@contextlib.contextmanager
def _answered(owner: Any, name: str, answer: Callable[..., object]) -> Iterator[None]:
    """Replaces the function `name` of `owner` by `answer` for calls from the model's code; other code gets the
    original."""
    function = getattr(owner, name, None)
    if function is None:
        yield
        return

    def asked(*args: Any, **kwargs: Any) -> object:
        caller = sys._getframe(1).f_code.co_filename
        return answer(*args, **kwargs) if is_foreign(caller) else function(*args, **kwargs)

    setattr(owner, name, asked)
    try:
        yield
    finally:
        setattr(owner, name, function)

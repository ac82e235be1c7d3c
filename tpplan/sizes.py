"""Sizes written into a model's code, replaced by one rank's: `x.view(b, t, self.num_heads, d)` on a slice of the heads.

A module with such sizes gets a subclass whose forward runs under a mode that looks at the calls a plan names. A call
with another number in that place is left alone, so what follows from `x.shape` stays as it is, and so are the calls in
forwards of the modules inside it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.plan import SizePlan
from tpplan.subclass import subclass

_VIEW, _EXPAND = (Tensor.view, Tensor.reshape, torch.reshape), (Tensor.expand, torch.Tensor.broadcast_to)
_UNFLATTEN = (Tensor.unflatten, torch.unflatten)
_SPLIT = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)
_NARROW = (Tensor.narrow, torch.narrow)
#: which sizes a function takes: the kind of call, and the position of the first among its arguments
_TAKES: dict[Any, tuple[str, int]] = {
    **dict.fromkeys(_VIEW, ("view", 1)),
    **dict.fromkeys(_EXPAND, ("expand", 1)),
    **dict.fromkeys(_UNFLATTEN, ("unflatten", 2)),
    **dict.fromkeys(_SPLIT, ("split", 1)),
    **dict.fromkeys(_NARROW, ("narrow", 2)),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("groups", 6)),
    Tensor.__getitem__: ("slice", 1),
}


def use_local_sizes(sizes: Mapping[nn.Module, Iterable[SizePlan]]) -> None:
    """From now on these modules' own forwards see `local` where their code says `written`."""
    inside = {child for module in sizes for child in _called(module)} - sizes.keys()
    for module, own in sizes.items():
        module.__class__ = local_sizes_class(type(module), tuple(own))  # type: ignore[arg-type]
    for child in inside:
        child.__class__ = _as_written_class(type(child))  # type: ignore[arg-type]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The nearest modules inside that have a forward."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


@functools.cache
def _as_written_class(cls: type[nn.Module]) -> type[nn.Module]:
    return subclass(cls, {"forward": as_written(cls.forward)}, _as_written_class)


@functools.cache
def local_sizes_class(cls: type[nn.Module], sizes: tuple[SizePlan, ...]) -> type[nn.Module]:
    """The subclass of cls with these sizes. It bears cls's own name."""
    table = {(size.call, size.count, size.position, size.written): size.local for size in sizes}

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _LocalSizes(table):
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward}, local_sizes_class, (sizes,))


#: what sizes are called
_NAMES = ("size", "sizes", "shape", "split_size", "split_size_or_sections", "split_sizes", "start", "length", "groups")
#: modes whose forwards are running, the innermost last: it alone replaces. None: our own code runs
_running: list["_LocalSizes | None"] = []

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Code of ours that runs within a model's forward: its sizes are right as they are."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _running:
            return function(*args, **kwargs)
        _running.append(None)
        try:
            return function(*args, **kwargs)
        finally:
            _running.pop()

    return cast(F, run)


class _LocalSizes(TorchFunctionMode):
    """Replaces sizes in the calls of one forward."""

    def __init__(self, table: dict[tuple[str, int, int, int], int]) -> None:
        super().__init__()
        self.table = table

    def __enter__(self) -> "_LocalSizes":
        _running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _running.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _TAKES.get(func)
        if place is not None and _running[-1] is self:
            args, kwargs = self._replaced(*place, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _replaced(self, call: str, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call == "slice":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not any(isinstance(item, slice) for item in index):
                return args, kwargs
            return (args[0], tuple(map(self._slice, index))), kwargs
        sizes = args[first : first + 1] if call == "split" else args[first:]
        named = [name for name in _NAMES if name in kwargs]
        given = [*sizes, *(kwargs[name] for name in named)]
        flat = [size for item in given for size in (item if isinstance(item, tuple | list) else (item,))]
        local = iter([self._local(call, len(flat), position, size) for position, size in enumerate(flat)])
        found = [tuple(next(local) for _ in item) if isinstance(item, tuple | list) else next(local) for item in given]
        args = (*args[:first], *found[: len(sizes)], *args[first + len(sizes) :])
        return args, kwargs | dict(zip(named, found[len(sizes) :], strict=True))

    def _slice(self, item: Any) -> Any:
        if not isinstance(item, slice) or item.step not in (None, 1):
            return item
        return slice(self._local("slice", 2, 0, item.start), self._local("slice", 2, 1, item.stop), item.step)

    def _local(self, call: str, count: int, position: int, size: Any) -> Any:
        return self.table.get((call, count, position, size), size) if type(size) is int else size

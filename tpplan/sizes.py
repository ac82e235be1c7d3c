"""Sizes written into a model's code, replaced by one rank's: `x.view(b, t, self.num_heads, d)` on a slice of the heads.

A module with such sizes gets a subclass whose forward runs under a mode that looks at the calls a plan names. A call
with another number in that place is left alone, so what follows from `x.shape` stays as it is. Forwards inside it are
under it too, except those with sizes of their own.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.plan import SizePlan
from tpplan.subclass import subclass

#: told of each size that is replaced
Witness = Callable[[SizePlan], None]

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
    Tensor.__getitem__: ("slice", 1),
}


def use_local_sizes(module: nn.Module, sizes: Iterable[SizePlan], witness: Witness | None = None) -> None:
    """From now on the module's forward sees `local` where its code says `written`."""
    module.__class__ = local_sizes_class(type(module), tuple(sizes), witness)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def local_sizes_class(
    cls: type[nn.Module], sizes: tuple[SizePlan, ...], witness: Witness | None = None
) -> type[nn.Module]:
    """The subclass of cls with these sizes. It bears cls's own name."""
    table = {(size.call, size.position, size.written): size for size in sizes}

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _LocalSizes(table, witness):
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward}, local_sizes_class, (sizes, witness))


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

    def __init__(self, table: dict[tuple[str, int, int], SizePlan], witness: Witness | None) -> None:
        super().__init__()
        self.table = table
        self.witness = witness

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
            return (args[0], tuple(self._slice(item) for item in index)), kwargs
        position = 0

        def replace(value: Any) -> Any:
            nonlocal position
            if isinstance(value, tuple | list):
                return tuple(map(replace, value))
            position += 1
            return self._local(call, position - 1, value)

        stop = first + 1 if call == "split" else len(args)
        args = (*args[:first], *map(replace, args[first:stop]), *args[stop:])
        names = ("size", "sizes", "shape", "split_size", "split_size_or_sections", "split_sizes", "start", "length")
        return args, {name: replace(value) if name in names else value for name, value in kwargs.items()}

    def _slice(self, item: Any) -> Any:
        if not isinstance(item, slice) or item.step not in (None, 1):
            return item
        return slice(self._local("slice", 0, item.start), self._local("slice", 1, item.stop), item.step)

    def _local(self, call: str, position: int, value: Any) -> Any:
        size = self.table.get((call, position, value)) if type(value) is int else None
        if size is None:
            return value
        if self.witness is not None:
            self.witness(size)
        return size.local

"""Sizes in a model's code, replaced by those that the layouts imply: `x.view(b, t, self.num_heads, d)` on a slice of
the heads, or the length of a slice in a view of what was gathered.

A call with another number in that place, or about a tensor of another shape, is left alone, so what follows from
`x.shape` stays as it is. Where the number is a batch or a length, it is another in another batch: that the code gives
the whole's for a tensor that has a rank's, as it was planned for another size, is an error. Where it is a dim of the
tensor that the call is about, it is that dim at every batch and length; the code may give it, or give it in the planned
proportion, as the size of another layout. Anything else is an error.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpplan.core.errors import PlanMismatchError
from tpplan.plan.plan import SizePlan

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
    **dict.fromkeys(_NARROW, ("narrow", 1)),
    **dict.fromkeys((Tensor.repeat_interleave, torch.repeat_interleave), ("repeat_interleave", 1)),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("groups", 6)),
    Tensor.__getitem__: ("slice", 1),
}
#: what sizes are called
_NAMES = ("size", "sizes", "shape", "split_size", "split_size_or_sections", "split_sizes", "groups", "repeats")


@dataclass(frozen=True)
class LocalSizes:
    """Rewrites calls: `local` where the code says `written`."""

    sizes: tuple[SizePlan, ...]

    @cached_property
    def table(self) -> dict[tuple[str, int, int, int], list[SizePlan]]:
        """Sizes by kind of call, number of sizes, position and written size."""
        found: dict[tuple[str, int, int, int], list[SizePlan]] = {}
        for size in self.sizes:
            if size.dims is None:
                found.setdefault((size.call, size.count, size.position, size.written), []).append(size)
        return found

    @cached_property
    def by_dims(self) -> dict[tuple[str, int, int], list[SizePlan]]:
        """Sizes that are dims of the tensor, by kind of call, number of sizes and position."""
        found: dict[tuple[str, int, int], list[SizePlan]] = {}
        for size in self.sizes:
            if size.dims is not None:
                found.setdefault((size.call, size.count, size.position), []).append(size)
        return found

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        place = _TAKES.get(func)
        if place is None:
            return NotImplemented
        args, kwargs = self._replaced(*place, args, kwargs)
        return func(*args, **kwargs)

    def _replaced(self, call: str, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if call == "slice":
            return (x, self._sliced(x, args[1])), kwargs
        if call == "narrow" and args:
            names = ("dim", "start", "length")
            arguments = dict(zip(names, args[1:], strict=False)) | kwargs
            place = 2 * (arguments["dim"] % x.dim())
            bounds = (self._local(call, x, x.dim(), place + i, arguments[name]) for i, name in enumerate(names[1:]))
            return (x, arguments["dim"], *bounds), {}
        sizes = args[first : first + 1] if call in ("split", "repeat_interleave") else args[first:]
        named = [name for name in _NAMES if name in kwargs]
        given = [*sizes, *(kwargs[name] for name in named)]
        flat = [size for item in given for size in (item if isinstance(item, tuple | list) else (item,))]
        local = iter([self._local(call, x, len(flat), position, size) for position, size in enumerate(flat)])
        found = [tuple(next(local) for _ in item) if isinstance(item, tuple | list) else next(local) for item in given]
        args = (*args[:first], *found[: len(sizes)], *args[first + len(sizes) :])
        return args, kwargs | dict(zip(named, found[len(sizes) :], strict=True))

    def _sliced(self, x: Tensor, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(item, slice) for item in items):
            return index
        taken = [_num_dims(item) for item in items]
        dim, found = 0, []
        for item, num_dims in zip(items, taken, strict=True):
            found.append(self._slice(item, x, dim) if isinstance(item, slice) else item)
            dim += x.dim() - sum(taken) if item is Ellipsis else num_dims
        return tuple(found)

    def _slice(self, item: slice, x: Tensor, dim: int) -> slice:
        if item.step not in (None, 1):
            return item
        bounds = enumerate((item.start, item.stop))
        start, end = (self._local("slice", x, x.dim(), 2 * dim + i, size) for i, size in bounds)
        return slice(start, end, item.step)

    def _local(self, call: str, x: Tensor, count: int, position: int, size: Any) -> Any:
        for own in self.by_dims.get((call, count, position), ()) if type(size) is int and size != -1 else ():
            if _is_shape(x.shape, own.of):
                return _by_dims(call, x, own, size)
        planned = self.table.get((call, count, position, size), ()) if type(size) is int else ()
        local = next((own.local for own in planned if _is_shape(x.shape, own.of)), size)
        if local is size and type(size) is int:
            for own in self.sizes:
                is_here = own.dims is None and (own.call, own.count, own.position) == (call, count, position)
                if is_here and _is_scaled(x.shape, size, own):
                    raise PlanMismatchError(
                        f"{call} of a tensor of shape {list(x.shape)} with size {size}: the plan knows a rank's size "
                        f"for {own.written} and shape {list(own.of)} (0: any) alone; solve again for this batch and "
                        "length"
                    )
        return local


def _by_dims(call: str, x: Tensor, planned: SizePlan, size: int) -> int:
    """The size that the tensor's own dims say. Raises PlanMismatchError where the code gives neither that nor, in the
    planned proportion, another layout's."""
    own = prod(x.shape[dim] for dim in planned.dims or ())
    if size != own and size * planned.local != own * planned.written:
        raise PlanMismatchError(
            f"{call} of a tensor of shape {list(x.shape)} with size {size} in place {planned.position}: the plan knows "
            f"{own} there, which is the tensor's, or {planned.written} for each {planned.local} of it alone; solve "
            "again for this batch and length"
        )
    return own


def _is_shape(shape: torch.Size, of: tuple[int, ...]) -> bool:
    return len(shape) == len(of) and all(wanted in (0, size) for size, wanted in zip(shape, of, strict=True))


def _is_scaled(shape: torch.Size, size: int, planned: SizePlan) -> bool:
    """The size is to the one dim that is not as planned what the planned one is to the planned dim."""
    if len(shape) != len(planned.of):
        return False
    others = [(here, there) for here, there in zip(shape, planned.of, strict=True) if there not in (0, here)]
    return len(others) == 1 and others[0][1] == planned.local and size * planned.local == planned.written * others[0][0]


def _num_dims(item: Any) -> int:
    """How many dims an item of an index takes up."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1

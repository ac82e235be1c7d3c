"""Replaces sizes in a model's calls by the sizes of the local tensors.

Examples: `x.view(b, t, self.num_heads, d)` where x holds a slice of the heads, or a view of a gathered tensor that
takes its length from a slice.

A planned size that is an attribute of the module, or stands in one (`self.num_heads`, `self.config.heads[0]`), is read
as its local size by the module's forward.

A planned size of one number (SizePlan.local) is replaced where the call's tensor has the planned shape and the code
gives the planned number; other calls are left alone, so sizes that the code computes from `x.shape` pass. But a call
that differs from the planned one in scale only, as in another batch or length, raises: the plan knows no size for it.

A planned size that is a product of the tensor's dims (SizePlan.dims, .times) holds for every batch and length. The code
may give that size itself, or the planned multiple of it (the size in another layout); anything else raises.

Code that computes with a tensor's sizes, or takes another path for some of them (`if x.shape[1] == 1` of heads), may
need those of one process: with a planned size of SHAPE, `x.shape` and `x.size()` tell it these, and what it then gives
to calls is replaced as above.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpplan.core.errors import PlanMismatchError
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import ATTRIBUTE, SHAPE, SizePlan
from tpplan.trace.hooks.nested_integers import parse_path, value_at

_VIEW, _EXPAND = (Tensor.view, Tensor.reshape, torch.reshape), (Tensor.expand, torch.Tensor.broadcast_to)
_UNFLATTEN = (Tensor.unflatten, torch.unflatten)
_SPLIT = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)
_NARROW = (Tensor.narrow, torch.narrow)
_CONVOLUTIONS = (
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d
)  # fmt: skip
_NEW_OF_SIZE = (torch.empty, torch.zeros, torch.ones, torch.full)
_NEW_OF_TENSOR = (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
#: by function that takes sizes: the kind of call in a plan, and the position of the first size among the arguments
_TAKES: dict[Any, tuple[str, int]] = {
    **dict.fromkeys(_VIEW, ("view", 1)),
    **dict.fromkeys(_EXPAND, ("expand", 1)),
    **dict.fromkeys(_UNFLATTEN, ("unflatten", 2)),
    **dict.fromkeys(_SPLIT, ("split", 1)),
    **dict.fromkeys(_NARROW, ("narrow", 1)),
    **dict.fromkeys((Tensor.repeat_interleave, torch.repeat_interleave), ("repeat_interleave", 1)),
    **dict.fromkeys(_CONVOLUTIONS, ("groups", 6)),
    **dict.fromkeys((F.group_norm, torch.group_norm), ("groups", 1)),
    **dict.fromkeys(_NEW_OF_SIZE, ("new", 0)),
    **dict.fromkeys(_NEW_OF_TENSOR, ("new", 1)),
    Tensor.__getitem__: ("slice", 1),
}
#: functions by which code asks a tensor for its shape
_ASKS = (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]
#: keyword names of sizes
_NAMES = (
    "size", "sizes", "shape", "split_size", "split_size_or_sections", "split_sizes", "groups", "num_groups", "repeats"
)  # fmt: skip


@dataclass(frozen=True)
class LocalSizes:
    """A rewriter of a module's calls that replaces each planned size.

    `table` has planned sizes of one number, by the size in the code too; `by_dims` those that are products of the
    tensor's dims; `told` those that code is told, by a tensor's number of dims. torch.compile traces no
    functools.cached_property, which has a lock.
    """

    sizes: tuple[SizePlan, ...]
    table: Mapping[tuple[str, int, int, int], list[SizePlan]] = field(init=False, compare=False, repr=False)
    by_dims: Mapping[tuple[str, int, int], list[SizePlan]] = field(init=False, compare=False, repr=False)
    told: Mapping[int, list[SizePlan]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        table: dict[tuple[str, int, int, int], list[SizePlan]] = {}
        by_dims: dict[tuple[str, int, int], list[SizePlan]] = {}
        told: dict[int, list[SizePlan]] = {}
        for size in self.sizes:
            place = size.call, size.count, size.position
            if size.call == SHAPE:
                told.setdefault(size.count, []).append(size)
            elif size.dims is None:
                table.setdefault((*place, size.written), []).append(size)
            else:
                by_dims.setdefault(place, []).append(size)
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "by_dims", by_dims)
        object.__setattr__(self, "told", told)

    @property
    def attributes(self) -> Mapping[str, tuple[int, int]]:
        """Path of an integer in the module's attributes -> what it is, and what the module's code is to read."""
        sizes = (size for size in self.sizes if size.call.startswith(ATTRIBUTE))
        return {size.call.removeprefix(ATTRIBUTE): (size.written, size.local) for size in sizes}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        if self.told and func in _ASKS:
            return self._told(func(*args, **kwargs), *args, **kwargs)
        place = _TAKES.get(func)
        if place is None:
            return NotImplemented
        args, kwargs = self._replaced(*place, args, kwargs)
        return func(*args, **kwargs)

    def _told(self, found: Any, x: Tensor, dim: Any = None, *_: Any) -> Any:
        """Returns what code in one process gets where it asks x for its shape, or its size in a dim; here `found`.

        Raises PlanMismatchError in code that torch.compile traces, which does not come here for all that it asks.
        """
        if torch.compiler.is_compiling():
            raise PlanMismatchError(
                f"code asks a tensor of {x.dim()} dims for its shape, and is told that of one process, which "
                "torch.compile cannot do: leave the module out of what is compiled"
            )
        shape = x.shape
        told = {own.position: own.written for own in self.told.get(len(shape), ()) if _is_told(shape, own)}
        if isinstance(found, torch.Size):
            return torch.Size(told.get(place, size) for place, size in enumerate(shape))
        return told.get(dim % len(shape), found) if isinstance(dim, int) else found

    def _replaced(self, call: str, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Any = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        if call == "slice":
            return (x, self._sliced(x, args[1])), kwargs
        if call == "narrow" and args:
            names = ("dim", "start", "length")
            arguments = dict(zip(names, args[1:], strict=False)) | kwargs
            place = 2 * (arguments["dim"] % x.dim())
            bounds = (self._local(call, x, x.dim(), place + i, arguments[name]) for i, name in enumerate(names[1:]))
            return (x, arguments["dim"], *bounds), {}
        is_list = any(isinstance(size, tuple | list) for size in args[first : first + 1])
        sizes = args[first : first + 1] if is_list or call in ("split", "repeat_interleave", "groups") else args[first:]
        named = [name for name in _NAMES if name in kwargs]
        given = [*sizes, *(kwargs[name] for name in named)]
        flat = [size for item in given for size in (item if isinstance(item, tuple | list) else (item,))]
        local = iter([self._local(call, x, len(flat), position, size) for position, size in enumerate(flat)])
        found = [tuple(next(local) for _ in item) if isinstance(item, tuple | list) else next(local) for item in given]
        args = (*args[:first], *found[: len(sizes)], *args[first + len(sizes) :])
        return args, kwargs | dict(zip(named, found[len(sizes) :], strict=True))

    def _sliced(self, x: Tensor, index: Any) -> Any:
        """Returns the index of x with the bounds of its slices replaced."""
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

    def _local(self, call: str, x: Any, count: int, position: int, size: Any) -> Any:
        """Returns this rank's size for `size`, number `position` of the call's `count` sizes; `size` if not planned.

        x: the call's tensor, anything else if it has none. Raises PlanMismatchError for a call that differs from the
        planned one in scale only.
        """
        shape = x.shape if isinstance(x, Tensor) else torch.Size()
        if isinstance(size, torch.SymInt):
            size = int(size)  # torch.compile holds the code to this number
        planned = self.table.get((call, count, position, size), ()) if type(size) is int else ()
        for own in self.by_dims.get((call, count, position), ()) if type(size) is int and size != -1 else ():
            if _is_shape(shape, own.of):
                found = _by_dims(call, x, own, size)
                _refuse_another(call, shape, own, found, planned)
                return found
        number = next((own for own in planned if _is_shape(shape, own.of)), None)
        if number is not None:
            _refuse_own_size(shape, number)
            return number.local
        if type(size) is int:
            for own in self.sizes:
                is_here = own.dims is None and (own.call, own.count, own.position) == (call, count, position)
                if is_here and _is_scaled(shape, size, own):
                    raise PlanMismatchError(
                        f"{call} of a tensor of shape {list(shape)} with size {size}: the plan has a rank's size "
                        f"only for {own.written} and shape {list(own.of)} (0: any); solve again for this batch "
                        "and length"
                    )
        return size


def why_not_compiled(size: SizePlan) -> str:
    """Why torch.compile cannot follow what is done for a planned size; "" where it can."""
    if size.call == SHAPE:
        return f"is told {size.written} for {size.local} where it asks for a tensor's shape"
    if size.call.startswith(ATTRIBUTE) and len(parse_path(size.call.removeprefix(ATTRIBUTE))) > 1:
        return f"reads {size.call} as a rank's size from a copy of the attribute"
    return ""


def check_attributes(module: nn.Module, name: str, sizes: Iterable[SizePlan]) -> None:
    """Raises PlanMismatchError where a planned attribute is not the planned integer of the module."""
    for size in sizes:
        if not size.call.startswith(ATTRIBUTE):
            continue
        path = parse_path(size.call.removeprefix(ATTRIBUTE))
        value = value_at(vars(module).get(str(path[0][0])), path[1:]) if path else None
        if type(value) is not int or value != size.written:
            raise PlanMismatchError(
                f"module {name or ROOT}: the plan was made for {size.call} = {size.written}, and here it is {value!r}: "
                "solve again for this model"
            )


def _by_dims(call: str, x: Tensor, planned: SizePlan, size: int) -> int:
    """Returns the product of the planned dims of x, and of the number of times that they are taken.

    Raises PlanMismatchError where the code gives neither that nor its planned multiple, the size in another layout.
    """
    own = prod(x.shape[dim] for dim in planned.dims or ()) * (planned.times or 1)
    if size != own and size * planned.local != own * planned.written:
        raise PlanMismatchError(
            f"{call} of a tensor of shape {list(x.shape)} with size {size} in place {planned.position}: the plan knows "
            f"{own} there, the tensor's own size, or {planned.written} for each {planned.local} of it; solve again for "
            "this batch and length"
        )
    return own


def _refuse_another(call: str, shape: torch.Size, own: SizePlan, found: int, planned: Iterable[SizePlan]) -> None:
    """Raises PlanMismatchError where a planned number for a shape that is known in as many dims as that of `own` says
    another size: at another batch or length, tensors of two calls may look the same."""
    for other in planned:
        is_as_known = sum(map(bool, other.of)) >= sum(map(bool, own.of))
        if is_as_known and other.local != found and _is_shape(shape, other.of):
            raise PlanMismatchError(
                f"{call} of a tensor of shape {list(shape)} in place {own.position}: the plan has {found} there for "
                f"shape {list(own.of)} and {other.local} for shape {list(other.of)} (0: any), and cannot tell which is "
                "meant; solve again for this batch and length"
            )


def dim_of(size: SizePlan) -> int | None:
    """The dim of the call's tensor that stands where the planned size does; None where there is none."""
    match size.call:
        case "view":
            dim = size.position
        case "expand":
            dim = size.position - (size.count - len(size.of))
        case "slice" | "narrow":
            dim = size.position // 2
        case _:
            return None
    return dim if 0 <= dim < len(size.of) else None


def _refuse_own_size(shape: torch.Size, number: SizePlan) -> None:
    """Raises PlanMismatchError where a planned number is also the tensor's own size there, which another batch or
    length may have made so: the code may mean either."""
    dim = dim_of(number)
    if dim is not None and number.of[dim] == 0 and shape[dim] == number.written:
        raise PlanMismatchError(
            f"{number.call} of a tensor of shape {list(shape)} with size {number.written} in place {number.position}: "
            f"it is the tensor's own size, and {number.local} of {number.written} in the plan, which cannot tell which "
            "is meant; solve again for this batch and length"
        )


def _is_shape(shape: torch.Size, of: tuple[int, ...]) -> bool:
    """True where shape is the planned shape `of`, in which 0 stands for any size."""
    return len(shape) == len(of) and all(wanted in (0, size) for size, wanted in zip(shape, of, strict=True))


def _is_told(shape: torch.Size, size: SizePlan) -> bool:
    """True where a planned size that code is told is that of a tensor of this local shape."""
    return _is_shape(shape, size.of) and shape[size.position] == size.local


def _is_scaled(shape: torch.Size, size: int, planned: SizePlan) -> bool:
    """True where just one dim of the shape differs from the planned one, and the size grows with it as planned.

    That is, size / dim = planned.written / planned.local, and the planned dim is planned.local.
    """
    if len(shape) != len(planned.of):
        return False
    others = [(here, there) for here, there in zip(shape, planned.of, strict=True) if there not in (0, here)]
    return len(others) == 1 and others[0][1] == planned.local and size * planned.local == planned.written * others[0][0]


def _num_dims(item: Any) -> int:
    """Returns how many dims of the tensor an item of an index consumes; 0 for an Ellipsis."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1

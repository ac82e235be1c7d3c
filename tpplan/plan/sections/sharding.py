"""The sections on what an applied plan does to a model: layouts, conversions, sizes, FSDP, and modules left whole."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from tpplan.core.errors import PlanError
from tpplan.core.graph import enclosing
from tpplan.core.layout import LAYOUT_PATTERN, Conversion, Layout, R, parse_conversion, parse_layout
from tpplan.core.strict_json import Amount, Count, Size, Text

LayoutText = Annotated[Layout, Text(parse_layout, LAYOUT_PATTERN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """A parameter's placement on the tp axis, and the layout in which each module reads it."""

    placement: LayoutText
    reads: Mapping[str, LayoutText]
    shape: tuple[Size, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """The layout in which each module reads a buffer that some module reads as a slice; every rank has it whole."""

    reads: Mapping[str, LayoutText]
    shape: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class CrossingPlan:
    """The conversion of a tensor at a module's boundary, and the dtype in which it crosses: `S(1) -> R as float32`."""

    conversion: Conversion
    dtype: str

    def __str__(self) -> str:
        return f"{self.conversion} as {self.dtype}"


def parse_crossing(text: str) -> CrossingPlan:
    """The crossing from its str(). Raises PlanError for any other text."""
    conversion, separator, dtype = text.partition(" as ")
    if not separator or re.fullmatch(_DTYPE_PATTERN, dtype) is None:
        raise PlanError(f"expected a conversion and a dtype such as 'R -> S(1) as bfloat16', got {text!r}")
    return CrossingPlan(parse_conversion(conversion), dtype)


_DTYPE_PATTERN = "[a-z][a-z0-9_]*"
CrossingText = Annotated[
    CrossingPlan, Text(parse_crossing, f"(?:{LAYOUT_PATTERN}) -> (?:{LAYOUT_PATTERN}) as {_DTYPE_PATTERN}")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """Conversions of the tensors that enter and leave a module's forward, by path of the argument or output."""

    inputs: Mapping[str, CrossingText]
    outputs: Mapping[str, CrossingText]


#: how SizePlan.call begins for an attribute of the module
ATTRIBUTE = "self."
#: SizePlan.call where code asks a tensor for its shape
SHAPE = "shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """A size in a module's code, `written`, and the size that one rank needs in its place, `local`.

    With `call` "self.NAME" the size is this attribute of the module, which its forward reads as `local`; a path such as
    self.config.heads or self.axes[0][1] leads inside plain data that other modules may share. Else `call` is view
    (reshape too), unflatten, expand, repeat_interleave, split, slice, narrow, new (zeros, new_empty and the like), or
    groups (of a convolution). The call has `count` sizes, of which `position` counts from 0. A sliced or narrowed
    tensor has `count` dims; `position` is twice the dim for a start, and one more for an end or a length. `of` is the
    local shape of the tensor in the call, with 0 where any size matches, so that a call on another tensor with an equal
    number is left alone. With `dims`, the size is the product of these dims of the tensor, and of `times`, at every
    batch and length: where code gives a size in the proportion written to local, the local product replaces it.

    With `call` "shape" the code gives nothing, it asks: a tensor of the local shape `of`, of which dim `position` is
    `local`, has `written` there in one process, and says so to code that asks for its shape.
    """

    call: str
    of: tuple[Size, ...]
    count: Count
    position: Size
    written: int
    local: int
    dims: tuple[Size, ...] | None = None
    times: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPlan:
    """Modules that fully_shard wraps, in this order ("<root>" last), and whether they reshard after forward (ZeRO-3) or
    stay gathered until backward (ZeRO-2). Units in `exceptions` do the opposite. The root never reshards.

    `whole_gradients` is true where each rank keeps gradients whole between micro-batches, so that FSDP reduces them
    once a step; absent where FSDP reduces those of every micro-batch, and a rank keeps its shard of them.
    `gathered_once` is true where units that stay gathered until backward, and the root, stay so from the first forward
    of a step to its last backward, so that FSDP gathers them once a step; absent where once a micro-batch. `over_tp`
    are the units that are sharded over the shard and tp axes together: tp replicates all of their parameters. Others
    are sharded over the shard axis; absent where all are. `uneven_reads` is true where data decides what runs, so
    that data-parallel ranks may read different parameters: they exchange at the end of each backward which gradients
    there are; absent where all read the same.
    """

    units: tuple[str, ...]
    reshard_after_forward: bool
    exceptions: tuple[str, ...]
    whole_gradients: bool | None = None
    over_tp: tuple[str, ...] | None = None
    gathered_once: bool | None = None
    uneven_reads: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePlan:
    """A module that every tensor-parallel rank runs whole by its own code: the reason why it could not be traced, and
    its seconds per step. `bodies` are its loops and branches whose functions were counted once."""

    reason: str
    seconds: Amount
    bodies: tuple[str, ...]


def unit_of(name: str, units: Collection[str]) -> str:
    """The innermost FSDP unit around a parameter; `units` has "", the root."""
    return next(module for module in enclosing(name)[1:] if module in units)


def why_not_over_tp(
    units: Collection[str], parameters: Mapping[str, ParameterPlan], divided: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yields (unit, what it has) where an FSDP unit cannot be over shard and tp together: a parameter of which a rank
    keeps a part for tp or for experts, the modules in `divided`, or which another unit has too."""
    every = {*units, ""}
    for name, parameter in parameters.items():
        owners = {unit_of(label, every) for label in (name, *parameter.aliases)}
        for unit in sorted(owners - {""}):
            if parameter.placement != R:
                yield unit, f"{name}, which tp places as {parameter.placement}; expected R"
            if len(owners) > 1:
                yield unit, f"{name}, which is tied to a parameter of another unit"
            if any(module in divided for module in enclosing(name)[1:]):
                yield unit, f"{name}, which belongs to divided experts"

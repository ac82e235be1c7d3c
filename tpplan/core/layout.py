"""Layouts on the tensor-parallel axis: how a value and its gradient are distributed over t ranks.

| layout  | value on a rank                  | gradient on a rank |
|---------|----------------------------------|--------------------|
| R       | the whole                        | the whole          |
| R*      | the whole                        | a summand          |
| S(d)    | slice of dim d                   | slice of dim d     |
| S(d; a, b) | a slice of each of the adjacent parts (sizes a, b) of dim d, concatenated | the same slices |
| S(d; each n) | S(d; n, n, ...), with as many parts as dim d has: how a plan names it | the same slices |
| S(d)/m  | one of m slices of dim d, held by t/m neighbouring ranks | a summand of that slice's gradient |
| S(d, d+1) | slice of dims d and d + 1 taken as one dim | the same slice |
| P       | a summand                        | the whole          |
| rows    | result of a lookup in a slice of table rows: valid where the id is a local row, else garbage to be masked |

Key and value heads that are fewer than the t ranks are S(d)/m: ranks whose queries use the same head hold the same
slice. Repeated for each query, with the heads of a group in a dim of their own, they are S(d, d+1) until a reshape
joins both dims. S(d, d+1) occurs only within a module; plans never name it.

A value without a gradient has only the first column. A layout changes only by a conversion at a module boundary. A
conversion fixes both its forward and its backward collective (Megatron's f is R -> R*, its g is P -> R).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from tpplan.core.errors import PlanError
from tpplan.core.part_intervals import Parts


class LayoutKind(StrEnum):
    """The kinds of layouts, in the table of this module's docstring."""

    REPLICATE = "R"
    REPLICATE_PARTIAL_GRADIENT = "R*"
    SHARD = "S"
    COPIED = "S/m"
    JOINT = "S, S"
    PARTIAL = "P"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout. `dim` (0 or more) is set for SHARD, COPIED and JOINT (the first of its two dims).

    A SHARD of separately sharded parts has their sizes as `parts`, or the size of every part as `each`, where the
    tensor's dim gives their number. `slices` is the number of slices of a COPIED.
    """

    kind: LayoutKind
    dim: int | None = None
    parts: Parts = ()
    slices: int | None = None
    each: int | None = None

    def __post_init__(self) -> None:
        if (self.dim is not None) != (self.kind in _SLICED) or (self.dim or 0) < 0:
            raise ValueError(f"layout {self.kind} with dim {self.dim}")
        if self.parts and (self.kind is not LayoutKind.SHARD or len(self.parts) < 2 or min(self.parts) < 1):
            raise ValueError(f"layout {self.kind} of dim {self.dim} with parts {self.parts}")
        if self.each is not None and (self.kind is not LayoutKind.SHARD or self.parts or self.each < 1):
            raise ValueError(f"layout {self.kind} of dim {self.dim} with parts {self.parts} of {self.each} each")
        if (self.slices is not None) != (self.kind is LayoutKind.COPIED) or (self.slices or 2) < 2:
            raise ValueError(f"layout {self.kind} of dim {self.dim} with {self.slices} slices")

    @property
    def is_whole(self) -> bool:
        """True where every rank holds the whole value."""
        return self.kind in (LayoutKind.REPLICATE, LayoutKind.REPLICATE_PARTIAL_GRADIENT)

    @property
    def is_plain(self) -> bool:
        """True for R and S(d), the layouts that a DTensor placement can express."""
        return self.kind is LayoutKind.REPLICATE or (
            self.kind is LayoutKind.SHARD and not self.parts and self.each is None
        )

    def of(self, shape: tuple[int, ...]) -> "Layout":
        """The layout of a value of this shape: a layout that gives the size of `each` part lists all parts."""
        if self.each is None or self.dim is None or self.dim >= len(shape) or shape[self.dim] % self.each:
            return self
        count = shape[self.dim] // self.each
        return S(self.dim, *(self.each,) * count) if count > 1 else S(self.dim)

    def num_slices(self, tp: int) -> int:
        """Number of distinct slices of the value on tp ranks."""
        return 1 if self.dim is None else self.slices or tp

    def __str__(self) -> str:
        match self.kind:
            case LayoutKind.SHARD:
                parts = f"; {', '.join(map(str, self.parts))}" if self.parts else ""
                return f"S({self.dim}; each {self.each})" if self.each is not None else f"S({self.dim}{parts})"
            case LayoutKind.COPIED:
                return f"S({self.dim})/{self.slices}"
            case LayoutKind.JOINT:
                return f"S({self.dim}, {(self.dim or 0) + 1})"
            case _:
                return str(self.kind)


#: kinds whose ranks hold a slice of a dim
_SLICED = frozenset({LayoutKind.SHARD, LayoutKind.COPIED, LayoutKind.JOINT})

R = Layout(LayoutKind.REPLICATE)
R_STAR = Layout(LayoutKind.REPLICATE_PARTIAL_GRADIENT)
P = Layout(LayoutKind.PARTIAL)
ROWS = Layout(LayoutKind.ROWS)


def S(dim: int, *parts: int) -> Layout:  # noqa: N802 - the field's notation
    """The layout that shards `dim`, or each of its parts where sizes of parts are given."""
    return Layout(LayoutKind.SHARD, dim, parts)


def copied(dim: int, slices: int) -> Layout:
    """The layout S(dim)/slices: fewer slices of `dim` than ranks, each held by neighbouring ranks."""
    return Layout(LayoutKind.COPIED, dim, slices=slices)


def joint(dim: int) -> Layout:
    """The layout that shards `dim` and `dim + 1` taken as one dim."""
    return Layout(LayoutKind.JOINT, dim)


_DIM, _COUNT, _SIZE = r"(?:0|[1-9][0-9]?)", r"(?:[2-9]|[1-9][0-9]{1,17})", r"[1-9][0-9]{0,17}"
#: regular expression of a layout's text, for layouts that a plan may name
LAYOUT_PATTERN = rf"R\*?|P|rows|S\({_DIM}(?:\)|\)/{_COUNT}|; each {_SIZE}\)|; {_SIZE}(?:, {_SIZE})+\))"


def parse_layout(text: str) -> Layout:
    """The layout from its str(). Raises PlanError for any other text and for layouts that plans cannot name."""
    if re.fullmatch(LAYOUT_PATTERN, text) and text.startswith("S"):
        inner, _, slices = text[2:].partition(")")
        dim, _, parts = inner.partition("; ")
        if parts.startswith("each "):
            return Layout(LayoutKind.SHARD, int(dim), each=int(parts.removeprefix("each ")))
        if slices:
            return copied(int(dim), int(slices[1:]))
        return S(int(dim), *map(int, filter(None, parts.split(", "))))
    for layout in (R, R_STAR, P, ROWS):
        if text == str(layout):
            return layout
    raise PlanError(
        "expected a layout (R, R*, S(dim), S(dim; part, part), S(dim; each size), S(dim)/slices, P or rows), got "
        f"{text!r}"
    )


def local_shape(shape: tuple[int, ...], layout: Layout, tp: int) -> tuple[int, ...]:
    """Shape on one of tp ranks. Raises ValueError where the dim does not exist or is not divisible."""
    if layout.dim is None:
        return shape
    if not fits(shape, layout, tp):
        raise ValueError(f"{shape} cannot be {layout} on {tp} ranks")
    if layout.kind is LayoutKind.JOINT:
        pair = (1, shape[layout.dim] * shape[layout.dim + 1] // tp)
        return (*shape[: layout.dim], *pair, *shape[layout.dim + 2 :])
    return (*shape[: layout.dim], shape[layout.dim] // layout.num_slices(tp), *shape[layout.dim + 1 :])


def fits(shape: tuple[int, ...], layout: Layout, tp: int) -> bool:
    """True where tp ranks can hold a value of this shape in this layout."""
    if layout.dim is None:
        return True
    if (
        layout.dim >= len(shape)
        or (layout.each is not None and shape[layout.dim] % layout.each)
        or (layout.parts and sum(layout.parts) != shape[layout.dim])
    ):
        return False
    if layout.slices is not None:
        return layout.slices < tp and tp % layout.slices == 0 == shape[layout.dim] % layout.slices
    if layout.kind is LayoutKind.JOINT:
        pair = shape[layout.dim : layout.dim + 2]
        return len(pair) == 2 and 1 < pair[0] < tp and tp % pair[0] == 0 == prod(pair) % tp
    return all(part % tp == 0 for part in layout.parts or (layout.each or shape[layout.dim],))


class Step(StrEnum):
    """A local operation or a collective that changes a tensor's layout, forward or backward."""

    NONE = "none"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    PAD = "pad"
    DIVIDE = "divide"
    LOCAL_ROWS = "local_rows"
    MASK = "mask"


#: steps that communicate between ranks; all other steps are local
COLLECTIVE_STEPS = frozenset({Step.ALL_REDUCE, Step.ALL_GATHER, Step.REDUCE_SCATTER, Step.ALL_TO_ALL})
#: steps that sum or exchange over ranks, whose results a mode of recomputation that keeps WorkKind.SUM keeps
SUM_STEPS = frozenset({Step.ALL_REDUCE, Step.REDUCE_SCATTER, Step.ALL_TO_ALL})

_K = LayoutKind
#: (from, to) -> (forward, backward). Identities are left out; a pair that is missing cannot be converted.
_STEPS: dict[tuple[LayoutKind, LayoutKind], tuple[Step, Step]] = {
    (_K.REPLICATE, _K.REPLICATE_PARTIAL_GRADIENT): (Step.NONE, Step.ALL_REDUCE),
    (_K.REPLICATE, _K.SHARD): (Step.SLICE, Step.ALL_GATHER),
    (_K.REPLICATE, _K.PARTIAL): (Step.DIVIDE, Step.NONE),
    (_K.REPLICATE_PARTIAL_GRADIENT, _K.REPLICATE): (Step.NONE, Step.DIVIDE),
    (_K.REPLICATE_PARTIAL_GRADIENT, _K.SHARD): (Step.SLICE, Step.PAD),
    (_K.REPLICATE_PARTIAL_GRADIENT, _K.COPIED): (Step.SLICE, Step.PAD),
    (_K.REPLICATE_PARTIAL_GRADIENT, _K.PARTIAL): (Step.DIVIDE, Step.DIVIDE),
    (_K.SHARD, _K.REPLICATE_PARTIAL_GRADIENT): (Step.ALL_GATHER, Step.REDUCE_SCATTER),
    (_K.SHARD, _K.REPLICATE): (Step.ALL_GATHER, Step.SLICE),
    (_K.SHARD, _K.PARTIAL): (Step.PAD, Step.SLICE),
    (_K.PARTIAL, _K.REPLICATE): (Step.ALL_REDUCE, Step.NONE),
    (_K.PARTIAL, _K.REPLICATE_PARTIAL_GRADIENT): (Step.ALL_REDUCE, Step.ALL_REDUCE),
    (_K.PARTIAL, _K.SHARD): (Step.REDUCE_SCATTER, Step.ALL_GATHER),
    (_K.SHARD, _K.SHARD): (Step.ALL_TO_ALL, Step.ALL_TO_ALL),
}


def can_convert(source: Layout, target: Layout) -> bool:
    """True where source equals target or a conversion between them exists."""
    return source == target or (source.kind, target.kind) in _STEPS


@dataclass(frozen=True, slots=True)
class Conversion:
    """A change of layout at a boundary. `rows -> x` is a mask followed by `P -> x`."""

    source: Layout
    target: Layout

    def __post_init__(self) -> None:
        source = P if self.source == ROWS else self.source
        if self.target != ROWS and not can_convert(source, self.target):
            raise ValueError(f"no conversion {self} exists")
        if self.target == ROWS and self.source != R:
            raise ValueError(f"no conversion {self} exists: only ids in R can become local rows")

    @property
    def is_identity(self) -> bool:
        """True where source and target are the same layout."""
        return self.source == self.target

    def of(self, shape: tuple[int, ...]) -> "Conversion":
        """The conversion of a value of this whole shape: layouts that give the size of `each` part list all parts."""
        if self.source.each is None and self.target.each is None:
            return self
        return Conversion(self.source.of(shape), self.target.of(shape))

    @property
    def after_mask(self) -> "Conversion":
        """The rest of `rows -> x` after the rows of other ranks are masked: `P -> x`."""
        return Conversion(P, self.target)

    @property
    def forward(self) -> tuple[Step, ...]:
        """Steps of the forward pass, in order."""
        return self._steps(0)

    @property
    def backward(self) -> tuple[Step, ...]:
        """Steps of the backward pass, in order."""
        return self._steps(1)[::-1]

    def _steps(self, half: int) -> tuple[Step, ...]:
        if self.is_identity:
            return ()
        if self.target == ROWS:
            return (Step.LOCAL_ROWS,) if half == 0 else ()
        if self.source == ROWS:
            return (Step.MASK, *self.after_mask._steps(half))
        step = _STEPS[self.source.kind, self.target.kind][half]
        return () if step is Step.NONE else (step,)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


def parse_conversion(text: str) -> Conversion:
    """The conversion from its str(). Raises PlanError for any other text."""
    source, arrow, target = text.partition(" -> ")
    if not arrow:
        raise PlanError(f"expected a conversion such as 'R -> S(1)', got {text!r}")
    try:
        return Conversion(parse_layout(source), parse_layout(target))
    except ValueError as error:
        raise PlanError(str(error)) from error


def layouts_of(shape: tuple[int, ...], *, carries_gradient: bool, tp: int) -> tuple[Layout, ...]:
    """Every layout that a value of this shape may have on tp ranks, except `rows`, which only embeddings use."""
    shards = tuple(S(dim) for dim, size in enumerate(shape) if size % tp == 0 and size > 0)
    return (R, R_STAR, P, *shards) if carries_gradient else (R, *shards)


def conversions_between(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], *, carries_gradient: bool
) -> tuple[Conversion, ...]:
    """Every possible conversion, identities included. Values without a gradient are never partial."""
    found = []
    for source in sources:
        for target in targets:
            if not carries_gradient and LayoutKind.PARTIAL in (source.kind, target.kind):
                continue
            if can_convert(source, target):
                found.append(Conversion(source, target))
    return tuple(found)

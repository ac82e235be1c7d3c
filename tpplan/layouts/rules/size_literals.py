"""Literal arguments that count elements or groups, and their values on one rank."""

from collections.abc import Iterator
from dataclasses import replace

from tpplan.core.graph import Argument
from tpplan.core.layout import LayoutKind, local_shape
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.plan.plan import SizePlan

#: target -> position of the sizes, for ops that take the sizes of their result
SIZES = {
    "aten.view.default": 1,
    "aten.reshape.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.expand.default": 1,
    "aten.broadcast_to.default": 1,
    "aten.unflatten.int": 2,
}
#: target -> position of the sizes, for ops that make a tensor
CREATIONS = {
    "aten.empty.memory_format": 0,
    **{f"aten.{name}.default": 0 for name in ("zeros", "ones", "full")},
    **{f"aten.new_{name}.default": 1 for name in ("empty", "zeros", "ones", "full")},
}
#: target -> position of the dim, for ops that split a dim by given sizes
SPLITS = {"aten.split.Tensor": 2, "aten.split.sizes": 2, "aten.split_with_sizes.default": 2}
#: target -> position of the dim, for ops that slice a dim
SLICES = {"aten.slice.Tensor": 1, "aten.narrow.default": 1}

GROUP_NORM = "aten.group_norm.default"
#: target -> position of the number of groups of channels
GROUPS = {
    GROUP_NORM: 1,
    **{f"aten.conv{dims}d.{overload}": 6 for dims in (1, 2, 3) for overload in ("default", "padding")},
    **{f"aten.conv_transpose{dims}d.{'default' if dims == 1 else 'input'}": 6 for dims in (1, 2, 3)},
}
REPEATS = "aten.repeat_interleave.self_int"


def size_places(target: str) -> tuple[int, ...]:
    """The positions of an op's arguments that are sizes of its operand or result, or bounds within them."""
    if target in SLICES:
        return (2, 3)
    if target in SPLITS:
        return (1,)
    return tuple(places[target] for places in (SIZES, CREATIONS) if target in places)


def takes_sizes(target: str) -> bool:
    """True for an op that takes the sizes of its result, of which one may be -1."""
    return target in SIZES


def localized_arguments(call: Call, strategy: Strategy, tp: int) -> tuple[Argument, ...]:
    """The positional arguments with which the op makes one rank's results from one rank's operands."""
    if not call.results:
        return call.args
    if call.target not in CALLS:
        return call.args
    changed: dict[int, Argument] = {}
    result = local_shape(call.results[0].shape, strategy.results[0], tp)
    if call.target in SIZES:
        sizes = result
        if call.target == "aten.unflatten.int":
            rank = len(call.operands[0].shape)
            dim = call.integer(1, "dim") % rank
            sizes = result[dim : dim + 1 + len(result) - rank]
        changed[SIZES[call.target]] = sizes
    elif call.target in CREATIONS:
        changed[CREATIONS[call.target]] = result
    elif call.target in GROUPS and _shards_groups(call, strategy):
        num_slices = strategy.results[0].num_slices(tp)
        changed[GROUPS[call.target]] = call.integer(GROUPS[call.target], "groups", 1) // num_slices
    elif call.target == REPEATS and isinstance(repeated := call.argument(2, "dim"), int):
        given = local_shape(call.operands[0].shape, strategy.operands[0], tp)[repeated]
        changed[1] = result[repeated] // given if given else call.argument(1, "repeats")
    elif call.target in SPLITS or call.target in SLICES:
        changed = _local_cuts(call, strategy, tp)
    return tuple(changed.get(i, argument) for i, argument in enumerate(call.args))


def _local_cuts(call: Call, strategy: Strategy, tp: int) -> dict[int, Argument]:
    """Position -> local argument, for a split or slice of a sharded dim: sizes or bounds where the dim is sharded part
    by part; the local length of a narrow that takes all of the dim."""
    layout = strategy.operands[0]
    dim = call.integer((SPLITS | SLICES)[call.target], "dim", 0) % len(call.operands[0].shape)
    if layout.dim == dim and not layout.parts and call.target == "aten.narrow.default":
        return {3: local_shape(call.operands[0].shape, layout, tp)[dim]}
    if layout.dim != dim or not layout.parts:
        return {}
    if call.target in SPLITS:
        pairs = zip(call.results, strategy.results, strict=True)
        sizes = tuple(local_shape(value.shape, own, tp)[dim] for value, own in pairs)
        return {1: sizes[0] if call.target == "aten.split.Tensor" else sizes}
    size, is_narrow = sum(layout.parts), call.target == "aten.narrow.default"
    start, end = (bound // tp for bound in slice_bounds(call))  # exact: bounds are sums of parts, which tp divides
    if is_narrow:
        return {2: start, 3: end - start}
    written = {2: (call.argument(2, "start"), start), 3: (call.argument(3, "end"), end)}
    return {
        position: local - size // tp if bound < 0 else local
        for position, (bound, local) in written.items()
        if isinstance(bound, int) and bound < size
    }


def groups_divide(call: Call, strategy: Strategy, tp: int) -> bool:
    """False where a strategy would cut a group of channels, or shard groups of several channels part by part."""
    if call.target not in GROUPS or not _shards_groups(call, strategy):
        return True
    groups, layout = call.integer(GROUPS[call.target], "groups", 1), strategy.results[0]
    channels = call.results[0].shape[1] if call.target == GROUP_NORM else call.operands[1].shape[0]
    return groups % layout.num_slices(tp) == 0 and (not layout.parts or groups == channels)


def _shards_groups(call: Call, strategy: Strategy) -> bool:
    """True where channels are sharded, and with them their groups: of a grouped convolution those of input and output,
    and of a group norm."""
    if call.target == GROUP_NORM:
        return strategy.operands[0].dim == 1
    is_grouped = call.integer(GROUPS[call.target], "groups", 1) > 1
    return is_grouped and strategy.operands[1].dim == 0 and strategy.operands[0].dim is not None


#: target -> the name under which a plan's SizePlan gives the call
CALLS = {
    "aten.view.default": "view", "aten.reshape.default": "view", "aten._unsafe_view.default": "view",
    "aten.unflatten.int": "unflatten", "aten.expand.default": "expand", "aten.broadcast_to.default": "expand",
    "aten.split.Tensor": "split", "aten.split.sizes": "split", "aten.split_with_sizes.default": "split",
    "aten.slice.Tensor": "slice", "aten.narrow.default": "narrow", **dict.fromkeys(GROUPS, "groups"),
    REPEATS: "repeat_interleave", **dict.fromkeys(CREATIONS, "new"),
}  # fmt: skip


def written_sizes(call: Call, strategy: Strategy, tp: int) -> Iterator[SizePlan]:
    """Yields the literals of a call that are wrong on one rank, with their local values."""
    if call.target not in CALLS:
        return
    before, after = size_literals(call), size_literals(replace(call, args=localized_arguments(call, strategy, tp)))
    count = num_sizes(call)
    of = _sharded_sizes(call, strategy, tp) if call.operands else ()
    # The literal may be a product with a number of heads, which code takes from its config or from the tensor's shape.
    joined = next((own.dim for own in strategy.operands[:1] if own.kind is LayoutKind.JOINT), None)
    factors = (1,) if joined is None else (1, call.operands[0].shape[joined])
    for (position, written), local in zip(before.items(), after.values(), strict=True):
        if isinstance(written, int) and isinstance(local, int) and written not in (local, -1):
            for number in (written // factor for factor in factors):
                yield SizePlan(
                    call=CALLS[call.target], of=of, count=count, position=position, written=number, local=local
                )


def quotients(call: Call, strategy: Strategy, tp: int) -> Iterator[SizePlan]:
    """Yields the whole sizes that a view makes, as code computes them that divides a whole size by a rank's number:
    `dim // heads` where heads are a rank's."""
    if not takes_sizes(call.target):
        return
    local = size_literals(replace(call, args=localized_arguments(call, strategy, tp)))
    of, count = _sharded_sizes(call, strategy, tp), num_sizes(call)
    for (position, written), own in zip(size_literals(call).items(), local.values(), strict=True):
        if isinstance(written, int) and written == own and written > 1:
            yield SizePlan(
                call=CALLS[call.target], of=of, count=count, position=position, written=written * tp, local=written
            )


def size_literals(call: Call) -> dict[int, Argument]:
    """The literals of a call that a plan may replace, by their positions in a SizePlan; none where it knows no such
    call."""
    if call.target not in CALLS:
        return {}
    places = (2, 3) if call.target in SLICES else ((SIZES | CREATIONS | GROUPS).get(call.target, 1),)
    given = [argument for index, argument in enumerate(call.args) if index in places]
    flat = [size for argument in given for size in (argument if isinstance(argument, tuple) else (argument,))]
    first = 2 * (call.integer(SLICES[call.target], "dim", 0) % num_sizes(call)) if call.target in SLICES else 0
    return dict(enumerate(flat, first))


def num_sizes(call: Call) -> int:
    """The number of a call's sizes in a SizePlan: of a slice, the dims of its tensor."""
    return len(call.operands[0].shape) if call.target in SLICES else len(size_literals(call))


def _sharded_sizes(call: Call, strategy: Strategy, tp: int) -> tuple[int, ...]:
    """Local sizes of the first operand's sharded dims, the same at every batch and length; 0 for all other dims, and
    for a dim of several parts that a view takes apart, as there may be a part for each sample."""
    whole, layout = call.operands[0].shape, strategy.operands[0]
    if call.target in SIZES and layout.parts and not strategy.results[0].parts:
        return (0,) * len(whole)
    own = {layout.dim} | ({(layout.dim or 0) + 1} if layout.kind is LayoutKind.JOINT else set())
    local = local_shape(whole, layout, tp)
    return tuple(size if dim in own else 0 for dim, size in enumerate(local))


def slice_bounds(call: Call) -> tuple[int, int]:
    """(start, end) of a slice, counted from the front; end is exclusive."""
    size = call.operands[0].shape[call.integer(1, "dim", 0)]
    start = call.argument(2, "start")
    first = 0 if not isinstance(start, int) else max(start + size, 0) if start < 0 else min(start, size)
    return first, first + call.results[0].shape[call.integer(1, "dim", 0)]

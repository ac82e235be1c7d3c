"""Literals that count elements of a dim: what they are on one rank."""

from collections.abc import Iterator

from tpplan.core.graph import Argument
from tpplan.core.layout import LayoutKind, local_shape
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.plan.plan import SizePlan

#: position of the sizes among the arguments of ops that are given their result's sizes
SIZES = {
    "aten.view.default": 1,
    "aten.reshape.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.expand.default": 1,
    "aten.broadcast_to.default": 1,
    "aten.unflatten.int": 2,
}
#: ops that take a dim apart, with the position of the dim
SPLITS = {"aten.split.Tensor": 2, "aten.split.sizes": 2, "aten.split_with_sizes.default": 2}
SLICES = {"aten.slice.Tensor": 1, "aten.narrow.default": 1}

#: convolutions, with the position of their number of groups
GROUPS = {f"aten.conv{dims}d.{overload}": 6 for dims in (1, 2, 3) for overload in ("default", "padding")}
REPEATS = "aten.repeat_interleave.self_int"


def takes_sizes(target: str) -> bool:
    """True for an op that is given its result's sizes, which may be -1 where they follow from the others."""
    return target in SIZES


def localized_arguments(call: Call, strategy: Strategy, tp: int) -> tuple[Argument, ...]:
    """The positional arguments with which the op makes one rank's results."""
    if not call.results:
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
    """Sizes of a split, or bounds of a slice, where the dim that is cut is sharded part by part. Of a dim that is
    sharded as it is all is taken, for which a narrow needs to be told a rank's length."""
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
    start, end = (bound // tp for bound in slice_bounds(call))  # bounds lie between parts, each of which divides
    if is_narrow:
        return {2: start, 3: end - start}
    written = {2: (call.argument(2, "start"), start), 3: (call.argument(3, "end"), end)}
    return {
        position: local - size // tp if bound < 0 else local
        for position, (bound, local) in written.items()
        if isinstance(bound, int) and bound < size
    }


def groups_divide(call: Call, strategy: Strategy, tp: int) -> bool:
    """True unless this would cut a group of a convolution's channels, or take parts of the channels out of theirs."""
    if call.target not in GROUPS or not _shards_groups(call, strategy):
        return True
    groups, channels = call.integer(GROUPS[call.target], "groups", 1), call.operands[1].shape[0]
    return groups % strategy.results[0].num_slices(tp) == 0 and (not strategy.results[0].parts or groups == channels)


def _shards_groups(call: Call, strategy: Strategy) -> bool:
    """True where input and output channels of a grouped convolution are sharded, and so its groups."""
    is_grouped = call.integer(GROUPS[call.target], "groups", 1) > 1
    return is_grouped and strategy.operands[1].dim == 0 and strategy.operands[0].dim is not None


#: how code writes the ops
CALLS = {
    "aten.view.default": "view", "aten.reshape.default": "view", "aten._unsafe_view.default": "view",
    "aten.unflatten.int": "unflatten", "aten.expand.default": "expand", "aten.broadcast_to.default": "expand",
    "aten.split.Tensor": "split", "aten.split.sizes": "split", "aten.split_with_sizes.default": "split",
    "aten.slice.Tensor": "slice", "aten.narrow.default": "narrow", **dict.fromkeys(GROUPS, "groups"),
    REPEATS: "repeat_interleave",
}  # fmt: skip


def written_sizes(call: Call, strategy: Strategy, tp: int) -> Iterator[SizePlan]:
    """The numbers that would be wrong on one rank if they stood in the code as they stand in the graph."""
    if call.target not in CALLS:
        return
    places = (2, 3) if call.target in SLICES else ((SIZES | GROUPS).get(call.target, 1),)
    arguments = zip(call.args, localized_arguments(call, strategy, tp), strict=True)
    pairs = [
        pair
        for index, (before, after) in enumerate(arguments)
        if index in places
        for pair in (zip(before, after, strict=True) if isinstance(before, tuple) else ((before, after),))  # type: ignore[arg-type]
    ]
    count, first = len(pairs), 0
    if call.target in SLICES:
        count = len(call.operands[0].shape)
        first = 2 * (call.integer(SLICES[call.target], "dim", 0) % count)
    of = _sharded_sizes(call, strategy, tp)
    # Code that multiplies by a number of heads has that number from the code, or from the shape of the one it is given.
    joined = strategy.operands[0].dim if strategy.operands[0].kind is LayoutKind.JOINT else None
    factors = (1,) if joined is None else (1, call.operands[0].shape[joined])
    for position, (written, local) in enumerate(pairs, first):
        if isinstance(written, int) and isinstance(local, int) and written not in (local, -1):
            for number in (written // factor for factor in factors):
                yield SizePlan(
                    call=CALLS[call.target], of=of, count=count, position=position, written=number, local=local
                )


def _sharded_sizes(call: Call, strategy: Strategy, tp: int) -> tuple[int, ...]:
    """Sizes on a rank of the first operand's sharded dims, which no batch or length changes; 0 for the others."""
    whole, layout = call.operands[0].shape, strategy.operands[0]
    own = {layout.dim} | ({(layout.dim or 0) + 1} if layout.kind is LayoutKind.JOINT else set())
    local = local_shape(whole, layout, tp)
    return tuple(size if dim in own else 0 for dim, size in enumerate(local))


def slice_bounds(call: Call) -> tuple[int, int]:
    """First element and the one behind the last, counted from the front."""
    size = call.operands[0].shape[call.integer(1, "dim", 0)]
    start = call.argument(2, "start")
    first = 0 if not isinstance(start, int) else max(start + size, 0) if start < 0 else min(start, size)
    return first, first + call.results[0].shape[call.integer(1, "dim", 0)]

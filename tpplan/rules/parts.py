"""Which dims are several things side by side, seen where a graph takes them apart: fused projections."""

from collections import defaultdict
from itertools import pairwise

from tpplan.graph import ModelGraph
from tpplan.intervals import Parts
from tpplan.rules.call import Call
from tpplan.rules.literals import SLICES, slice_bounds
from tpplan.rules.views import RESHAPES, TAKES_APART, TAKES_ONE, stacks

#: a projection fuses few things; more parts than these are heads, whose slices are contiguous
MOST_PARTS = 8


def fused_parts(graph: ModelGraph) -> frozenset[Parts]:
    """Parts that a dim of a weight may be made of: where something of its size is split, sliced, or viewed as a stack
    of which single members are taken."""
    widths = {size for source in graph.parameters for size in graph.values[source.result].shape}
    cuts: dict[tuple[str, int], set[int]] = defaultdict(set)
    stacked: set[int] = set()
    found: set[Parts] = set()
    for op in graph.ops:
        call = Call.of(graph, op)
        if op.target in TAKES_APART:
            dim = call.integer(TAKES_APART[op.target], "dim", 0)
            found.add(tuple(value.shape[dim] for value in call.results))
        elif op.target in SLICES and call.argument(4, "step", 1) == 1:
            dim = call.integer(SLICES[op.target], "dim", 0) % len(call.operands[0].shape)
            cuts[op.operands[0], dim].update((0, *slice_bounds(call), call.operands[0].shape[dim]))
        elif op.target in TAKES_ONE:
            stacked.add(call.operands[0].shape[call.integer(1, "dim", 0)])
    found.update(tuple(end - start for start, end in pairwise(sorted(bounds))) for bounds in cuts.values())
    for op in graph.ops:
        shapes = [graph.values[name].shape for name in (*op.operands, *op.results)]
        if op.target in RESHAPES:
            for joined, stack, is_stacked in stacks(*shapes):
                size, count = shapes[not is_stacked][joined], shapes[is_stacked][stack[0]]
                if count in stacked:
                    found.add((size // count,) * count)
    return frozenset(
        parts for parts in found if 2 <= len(parts) <= MOST_PARTS and min(parts) > 0 and sum(parts) in widths
    )

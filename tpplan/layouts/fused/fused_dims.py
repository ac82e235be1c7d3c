"""Finds fused dims: dims that concatenate several parts, such as queries, keys and values of one projection.

The parts are seen where the graph slices or splits a dim. From there they are followed back, through ops that keep the
order of a sharded dim, to the weight that makes them. A reshape `n * c -> n, c` whose n members are selected one by one
makes n parts of size c.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from tpplan.core.graph import Boundary, ModelGraph
from tpplan.core.layout import S
from tpplan.core.part_intervals import Parts
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.fused.retold_walks import op_named, walked
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.layouts.rules.size_literals import SLICES, slice_bounds
from tpplan.layouts.rules.views import RESHAPES, TAKES_APART, TAKES_ONE, stacks

#: value name -> dim -> the possible sizes of its parts
Fused = Mapping[str, Mapping[int, frozenset[Parts]]]
#: a value's name, a dim of the value, and the sizes of the dim's parts
PartsOfDim = tuple[str, int, Parts]
#: an op's name, and by result the parts of each of its dims
_Question = tuple[str, tuple[tuple[tuple[int, frozenset[Parts]], ...], ...]]

#: ops that show the parts of an operand, though their results have none
_MAKES_PARTS = frozenset({*TAKES_APART, *TAKES_ONE})
#: most parts of a fused dim; a dim with more parts has heads, whose slices are contiguous
MOST_PARTS = 8


def fused_dims(graph: ModelGraph, strategies: Callable[[Call], Iterable[Strategy]]) -> Fused:
    """Value name -> dim -> possible parts, for dims that may be sharded part by part.

    `strategies` gives the strategies of a call without regard to parts.
    """

    def parts_of_operands(question: _Question) -> tuple[tuple[int, int, Parts], ...]:
        name, given = question
        return tuple(_operand_parts(Call.of(graph, op_named(graph, name)), tuple(map(dict, given)), strategies))

    sliced = tuple(_sliced_parts(graph))
    return walked(graph, (fused_dims, sliced), parts_of_operands, lambda ask: _followed_back(graph, sliced, ask))


def _followed_back(
    graph: ModelGraph,
    sliced: Iterable[PartsOfDim],
    parts_of_operands: Callable[[_Question], tuple[tuple[int, int, Parts], ...]],
) -> Fused:
    """The fused dims, from sliced values and from what each op says of its operands, given the parts of its results."""
    like = like_ops(graph)
    marks: dict[str, dict[int, set[Parts]]] = defaultdict(lambda: defaultdict(set))
    for name, dim, parts in sliced:
        marks[name][dim].add(parts)
    for node in reversed(graph.nodes):
        if marks.keys().isdisjoint(node.results) and (isinstance(node, Boundary) or node.target not in _MAKES_PARTS):
            continue
        given = tuple([_frozen(marks[name]) if name in marks else {} for name in node.results])
        if isinstance(node, Boundary):
            found = tuple((0, dim, own) for dim, parts in given[0].items() for own in parts)
        else:
            found = parts_of_operands((like[node.name], tuple([tuple(own.items()) for own in given])))
        for place, dim, parts in found:
            if 2 <= len(parts) <= MOST_PARTS and min(parts) > 0:
                marks[node.operands[place]][dim].add(parts)
    weights = (marks[name] for name in matrices(graph) if name in marks)
    made = {parts for dims in weights for own in dims.values() for parts in own}
    return {
        name: {dim: frozenset(parts & made) for dim, parts in dims.items() if parts & made}
        for name, dims in marks.items()
    }


def matrices(graph: ModelGraph) -> frozenset[str]:
    """Names of the parameters of several dims, and of the parts into which code splits them."""
    return graph.once_for_all_sizes(matrices, lambda: _matrices(graph))


def _matrices(graph: ModelGraph) -> frozenset[str]:
    found = {source.result for source in graph.parameters if len(graph.values[source.result].shape) > 1}
    for op in graph.ops:
        if op.target in TAKES_APART | SLICES and op.operands[0] in found:
            found.update(op.results)
    return frozenset(found)


def _frozen(dims: Mapping[int, set[Parts]]) -> dict[int, frozenset[Parts]]:
    return {dim: frozenset(parts) for dim, parts in sorted(dims.items()) if parts}


def _operand_parts(
    call: Call,
    marks: tuple[Mapping[int, frozenset[Parts]], ...],
    strategies: Callable[[Call], Iterable[Strategy]],
) -> Iterator[tuple[int, int, Parts]]:
    """Yields the parts of a call's operands, as (position of the operand, dim, parts), given those of its results."""
    marked = {(i, dim): parts for i, dims in enumerate(marks) for dim, parts in dims.items()}
    if call.target in TAKES_APART:
        dim = call.integer(TAKES_APART[call.target], "dim", 0) % len(call.operands[0].shape)
        finest = [
            max(sorted(own.get(dim, ())), key=len, default=(value.shape[dim],))
            for own, value in zip(marks, call.results, strict=True)
        ]
        yield 0, dim, tuple(size for parts in finest for size in parts)
    if call.target in TAKES_ONE:
        dim = call.integer(1, "dim", 0) % len(call.operands[0].shape)
        yield 0, dim, (1,) * call.operands[0].shape[dim]
    if call.target in RESHAPES:
        for joined, stack, is_result in stacks(call.operands[0].shape, call.results[0].shape):
            count = call.results[0].shape[stack[0]] if is_result else 0
            if is_result and (1,) * count in marks[0].get(stack[0], ()):
                yield 0, joined, (call.operands[0].shape[joined] // count,) * count
    for strategy in strategies(call):
        for (i, dim), parts in marked.items():
            if strategy.results[i] == S(dim):
                for place, (operand, layout) in enumerate(zip(call.operands, strategy.operands, strict=True)):
                    if layout.dim is not None and operand.shape[layout.dim] == call.results[i].shape[dim]:
                        yield from ((place, layout.dim, p) for p in parts)


def _sliced_parts(graph: ModelGraph) -> Iterator[PartsOfDim]:
    """Yields sliced values with the parts between the slices' bounds; empty slices and slices of all divide nothing."""
    cuts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for op in graph.ops:
        if op.target in SLICES:
            call = Call.of(graph, op)
            if call.target == "aten.narrow.default" or call.argument(4, "step", 1) == 1:
                dim = call.integer(SLICES[op.target], "dim", 0) % len(call.operands[0].shape)
                start, end = slice_bounds(call)
                if start < end:
                    cuts[op.operands[0], dim].update((0, start, end, call.operands[0].shape[dim]))
    for (name, dim), bounds in cuts.items():
        if len(bounds) > 2:
            yield name, dim, tuple(end - start for start, end in pairwise(sorted(bounds)))

"""Counts the attention heads that the dims of parameters are made of: 32 in a dim of 4096 that a view makes 32 x 128.

Heads are seen where attention runs: in the second of the four dims of what it reads, or of what a softmax takes along
the last. From there they are followed, in both directions, through ops that keep the order of a sharded dim, to the
weights that make or read them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.layout import S
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.rules import FLEX_ATTENTION, Call, call_strategies
from tpplan.layouts.rules.size_literals import SLICES, slice_bounds
from tpplan.layouts.rules.views import RESHAPES, TAKES_APART, regrouped

_ATTENTION = frozenset({"aten.scaled_dot_product_attention.default", FLEX_ATTENTION})
_SOFTMAX = frozenset({"aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default"})
#: of batch, heads, positions and sizes of a head
_HEADS_DIM, _DIMS = 1, 4

#: numbers of heads in the parts of a dim, one after another: (12, 12, 12) for fused queries, keys and values
Counts = tuple[int, ...]


def heads_of_parameters(graph: ModelGraph) -> dict[str, Mapping[int, Counts]]:
    """Parameter name -> dim -> the heads in it; without parameters that have none in any dim."""
    return graph.once(heads_of_parameters, lambda: _heads_of_parameters(graph))


def _heads_of_parameters(graph: ModelGraph) -> dict[str, Mapping[int, Counts]]:
    marks: dict[str, dict[int, Counts]] = {}
    todo = deque[str]()

    def mark(found: Iterable[tuple[str, int, Counts]]) -> None:
        for name, dim, counts in found:
            if dim not in marks.setdefault(name, {}):
                marks[name][dim] = counts
                todo.append(name)

    mark(_seen(graph))
    while todo:
        name = todo.popleft()
        producers = (graph.producers[name],) if name in graph.producers else ()
        for node in (*producers, *graph.consumers.get(name, ())):
            mark(tuple(_told(graph, node, marks)))
    return {own.label: dict(marks[own.result]) for own in graph.parameters if own.result in marks}


def _seen(graph: ModelGraph) -> Iterator[tuple[str, int, Counts]]:
    """Yields (value, dim, heads) of what attention reads."""
    for op in graph.ops:
        values = [graph.values[name] for name in op.operands[: 3 if op.target in _ATTENTION else 1]]
        if op.target in _SOFTMAX and Call.of(graph, op).integer(1, "dim") not in (-1, _DIMS - 1):
            continue
        if op.target in _ATTENTION | _SOFTMAX:
            for value in values:
                if len(value.shape) == _DIMS:
                    yield value.name, _HEADS_DIM, (value.shape[_HEADS_DIM],)


def _told(
    graph: ModelGraph, node: Op | Boundary, marks: Mapping[str, Mapping[int, Counts]]
) -> Iterator[tuple[str, int, Counts]]:
    """Yields (value, dim, heads) of a node's operands and results, by those that are known of the others."""
    if isinstance(node, Boundary):
        for one, other in ((node.operand, node.result), (node.result, node.operand)):
            yield from ((other, dim, counts) for dim, counts in marks.get(one, {}).items())
        return
    call, names = Call.of(graph, node), (*node.operands, *node.results)
    values = (*call.operands, *call.results)
    for plain, cut in _sharded_dims(graph, node):
        known = (marks.get(names[i], {}).get(dim, ()) for i, dim in plain)
        counts = next(filter(None, known), ())
        for i, dim in cut if counts else ():
            yield from ((names[i], dim, own) for own in _fitting(counts, values[i].shape[dim]))
    if node.target in RESHAPES:
        yield from _told_by_view(call, node, marks)
    if node.target in TAKES_APART:
        dim = call.integer(TAKES_APART[node.target], "dim", 0) % len(call.operands[0].shape)
        yield from _joined(node.operands[0], node.results, dim, marks)
    if node.target in SLICES:
        yield from _told_by_slices(graph, node, marks)


#: dims that go together, each as (number of the operand or result, dim)
_Dims = tuple[tuple[int, int], ...]


def _sharded_dims(graph: ModelGraph, op: Op) -> tuple[tuple[_Dims, _Dims], ...]:
    """The dims that each strategy of an op shards, those in plain layouts and those in one piece each, without
    strategies by parts, whose heads are not those of the next part; found once for the ops at one place of like
    blocks."""

    def dims() -> Iterator[tuple[_Dims, _Dims]]:
        for strategy in call_strategies(Call.of(graph, op), 1):
            layouts = (*strategy.operands, *strategy.results)
            if not any(own.parts for own in layouts):
                sharded = [(i, own.dim, own) for i, own in enumerate(layouts) if own.dim is not None]
                plain = tuple((i, dim) for i, dim, own in sharded if own.is_plain)
                yield plain, tuple((i, dim) for i, dim, own in sharded if own == S(dim))

    return graph.once((_sharded_dims, like_ops(graph)[op.name]), lambda: tuple(dims()))


def _fitting(counts: Counts, size: int) -> Iterator[Counts]:
    """Yields the heads in a dim of this size, which may have fewer that are repeated elsewhere."""
    if len(counts) == 1 and size:
        yield (min(counts[0], size),)
    elif size and size % sum(counts) == 0:
        yield counts


def _told_by_view(call: Call, op: Op, marks: Mapping[str, Mapping[int, Counts]]) -> Iterator[tuple[str, int, Counts]]:
    """Yields the heads in a dim that stacks them: h in each of b parts of b * h, or of n parts of n * h * c."""
    for own, other in regrouped(call.operands[0].shape, call.results[0].shape):
        sides = ((op.operands[0], own), (op.results[0], other))
        for (name, known), (told, new) in (sides, sides[::-1]):
            counts = marks.get(name, {}).get(known.dim, ())
            if len(counts) == known.count and len({*counts}) == 1 and new.size % counts[0] == 0:
                yield told, new.dim, counts[:1] * new.count


def _joined(
    whole: str, parts: tuple[str, ...], dim: int, marks: Mapping[str, Mapping[int, Counts]]
) -> Iterator[tuple[str, int, Counts]]:
    """Yields the heads in a dim that has those of its parts one after another, where all of these have some."""
    found = [marks.get(part, {}).get(dim, ()) for part in parts]
    if all(found):
        yield whole, dim, tuple(count for counts in found for count in counts)


def _told_by_slices(
    graph: ModelGraph, op: Op, marks: Mapping[str, Mapping[int, Counts]]
) -> Iterator[tuple[str, int, Counts]]:
    """Yields the heads in a dim of which this slice and others together are all."""
    place, whole = SLICES[op.target], op.operands[0]
    shape = graph.values[whole].shape
    dim = Call.of(graph, op).integer(place, "dim", 0) % len(shape)
    found: dict[tuple[int, int], str] = {}
    for other in graph.consumers[whole]:
        if isinstance(other, Op) and other.target in SLICES:
            call = Call.of(graph, other)
            if call.integer(SLICES[other.target], "dim", 0) % len(shape) == dim:
                found.setdefault(slice_bounds(call), other.results[0])
    bounds = sorted(found)
    starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
    if starts == [0, *ends[:-1]] and ends[-1] == shape[dim]:
        yield from _joined(whole, tuple(found[own] for own in bounds), dim, marks)

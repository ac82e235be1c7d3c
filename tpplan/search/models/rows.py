"""Finds ops that pair rows of the batch with each other, as a loss does that contrasts a row with all the others, and
losses that are sums over rows.

Dim 0 of each input has a row for each sample, as a batch is divided along it. From there the rules of sharding tell in
which dim of a result the rows are. An op pairs them where it could run on a slice of the rows of either operand, with
the slices in different dims of its result, and not on slices of both: its result has an element for each two rows.
A loss is a sum over rows where ranks with slices of the rows would have summands of it; a mean divides by their number.
Where a rule does not tell where rows are, they are no longer followed, so that some may be missed and none is made up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.core.graph import Boundary, ModelGraph, Op, SourceKind
from tpplan.core.layout import Layout, P, S
from tpplan.layouts.rules import Call, Strategy, call_strategies


@dataclass(frozen=True, slots=True)
class RowsTogether:
    """`pairs` are the ops that pair rows, of which both operands carry a gradient, in order; `sum` is the op that sums
    over rows what becomes the loss, None where none does."""

    pairs: tuple[Op, ...]
    sum: Op | None


def rows_together(graph: ModelGraph) -> RowsTogether:
    """Finds the ops of a graph that pair rows, and the one that sums over rows what becomes the loss."""
    return graph.once_for_all_sizes(rows_together, lambda: _rows_together(graph))


def _rows_together(graph: ModelGraph) -> RowsTogether:
    rows: dict[str, Layout] = {
        source.result: S(0)
        for source in graph.sources
        if source.kind is SourceKind.INPUT and graph.values[source.result].shape
    }
    pairs: list[Op] = []
    sums: dict[str, Op] = {}
    lost: set[str] = set()  # follow from rows, and it is not known how
    for node in graph.nodes:
        is_lost = not lost.isdisjoint(node.operands)
        read = next((name for name in node.operands if name in rows), None)
        if read is None:
            lost.update(node.results if is_lost else ())
            continue
        if isinstance(node, Boundary):
            rows[node.result] = rows[read]
            if read in sums:
                sums[node.result] = sums[read]
            continue
        options = call_strategies(Call.of(graph, node), 1)
        taken = _taken(options, node, rows)
        if taken is None:
            pairs += [node] if _pairs(graph, node, options, rows) else []
            lost.update(node.results)
            continue
        for name, layout in zip(node.results, taken.results, strict=True):
            if layout.dim is not None and layout.is_plain:
                rows[name] = layout
            elif layout == P and not (is_lost or _divides(node)):
                rows[name], sums[name] = layout, sums.get(read, node)
            else:
                lost.add(name)
    return RowsTogether(tuple(pairs), sums.get(graph.loss) if graph.loss is not None else None)


def _divides(op: Op) -> bool:
    """True for a division by a number, which may be that of the rows."""
    return op.target.startswith(("aten.div", "aten.true_divide")) and len(op.operands) == 1


def _taken(options: tuple[Strategy, ...], op: Op, rows: Mapping[str, Layout]) -> Strategy | None:
    """The strategy under which every operand with rows is cut along them, and every other is whole; None without."""
    wanted = tuple(map(rows.get, op.operands))
    return next((own for own in options if _is_cut(own, wanted)), None)


def _is_cut(strategy: Strategy, wanted: tuple[Layout | None, ...]) -> bool:
    both = zip(strategy.operands, wanted, strict=True)
    return all(layout.is_whole if want is None else layout == want for layout, want in both)


def _pairs(graph: ModelGraph, op: Op, options: tuple[Strategy, ...], rows: Mapping[str, Layout]) -> bool:
    """True where slices of rows of two operands, each beside whole others, are in different dims of the result."""
    places = [place for place, name in enumerate(op.operands) if name in rows and graph.values[name].carries_gradient]
    if len(places) != 2 or len(op.results) != 1:
        return False
    dims: list[int | None] = []
    for place in places:
        wanted = tuple(rows[name] if at == place else None for at, name in enumerate(op.operands))
        alone = next((own.results[0] for own in options if _is_cut(own, wanted)), None)
        dims.append(alone.dim if alone is not None else None)
    return None not in dims and dims[0] != dims[1]

"""Finds ops that pair rows of the batch with each other, as a loss does that contrasts a row with all the others.

Dim 0 of each input has a row for each sample, as a batch is divided along it. From there the rules of sharding tell in
which dim of a result the rows are. An op pairs them where it could run on a slice of the rows of either operand, with
the slices in different dims of its result, and not on slices of both: its result has an element for each two rows.
Where a rule does not tell where rows are, they are no longer followed, so that pairs may be missed and none is made up.
"""

from collections.abc import Iterator, Mapping

from tpplan.core.graph import Boundary, ModelGraph, Op, SourceKind
from tpplan.core.layout import Layout, S
from tpplan.layouts.rules import Call, Strategy, call_strategies


def pairing_ops(graph: ModelGraph) -> tuple[Op, ...]:
    """The ops that pair rows, of which both operands carry a gradient, in order."""
    return graph.once_for_all_sizes(pairing_ops, lambda: tuple(_pairing_ops(graph)))


def _pairing_ops(graph: ModelGraph) -> Iterator[Op]:
    rows: dict[str, Layout] = {
        source.result: S(0)
        for source in graph.sources
        if source.kind is SourceKind.INPUT and graph.values[source.result].shape
    }
    for node in graph.nodes:
        if isinstance(node, Boundary):
            if node.operand in rows:
                rows[node.result] = rows[node.operand]
            continue
        if not any(name in rows for name in node.operands):
            continue
        options = call_strategies(Call.of(graph, node), 1)
        taken = _taken(options, node, rows)
        if taken is not None:
            found = zip(node.results, taken.results, strict=True)
            rows.update((name, layout) for name, layout in found if layout.dim is not None and layout.is_plain)
        elif _pairs(graph, node, options, rows):
            yield node


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

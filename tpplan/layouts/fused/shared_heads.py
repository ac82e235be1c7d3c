"""Finds dims that may be cut into fewer slices than ranks: key and value heads that several queries share.

The dims are seen at grouped attention and at ops that repeat heads. From there they are followed back, through ops that
keep the order of a sharded dim, to the weights that make them.
"""

from collections.abc import Callable, Iterable

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.layout import Layout, LayoutKind
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.fused.retold_walks import op_named, walked
from tpplan.layouts.rules.call import Call, Extra, Strategy
from tpplan.layouts.rules.views import EXPANDS, RESHAPES

#: ops that may read S(d)/m heads and give each rank heads of its own
_READS_SHARED_HEADS = frozenset({"aten.scaled_dot_product_attention.default", "aten.repeat_interleave.self_int"})
#: ops that may stand between the expand of a new dim and the reshape that joins it to the dim of heads
_BETWEEN_EXPAND_AND_RESHAPE = frozenset({"aten.clone.default", "aten.contiguous.default"})
_SHARED_KINDS = frozenset({LayoutKind.COPIED, LayoutKind.JOINT})
_NONE = frozenset[Layout]()
#: an op's name, and the layouts of each of its results
_Question = tuple[str, tuple[frozenset[Layout], ...]]


def copied_dims(graph: ModelGraph, strategies: Callable[[Call], Iterable[Strategy]]) -> Extra:
    """Value name -> its layouts with shared slices (S(d)/m, S(d, d+1)) that lead to a result without shared slices.

    `strategies` gives the strategies of a call on the planned number of ranks.
    """

    def layouts_of_operands(question: _Question) -> tuple[frozenset[Layout], ...]:
        name, results = question
        op, layouts = op_named(graph, name), [layout for own in results for layout in own]
        return _operand_layouts(strategies(Call.of(graph, op, layouts)), results, len(op.operands))

    return walked(graph, copied_dims, layouts_of_operands, lambda ask: _followed_back(graph, ask))


def _followed_back(
    graph: ModelGraph, layouts_of_operands: Callable[[_Question], tuple[frozenset[Layout], ...]]
) -> Extra:
    """The layouts with shared slices, from what each op says of its operands, given those of its results."""
    found: dict[str, frozenset[Layout]] = {}
    like = like_ops(graph)
    sharing = graph.once_for_all_sizes(copied_dims, lambda: {op.name for op in graph.ops if _shares(graph, op)})

    def add(name: str, layouts: frozenset[Layout]) -> None:
        if layouts:
            found[name] = found[name] | layouts if name in found else layouts

    for node in reversed(graph.nodes):
        if found.keys().isdisjoint(node.results) and node.name not in sharing:
            continue
        if isinstance(node, Boundary):
            add(node.operand, frozenset(own for own in found[node.result] if own.kind is LayoutKind.COPIED))
            continue
        given = layouts_of_operands((like[node.name], tuple(found.get(name, _NONE) for name in node.results)))
        for name, own in zip(node.operands, given, strict=True):
            add(name, own)
    return found


def _operand_layouts(
    strategies: Iterable[Strategy], results: tuple[frozenset[Layout], ...], num_operands: int
) -> tuple[frozenset[Layout], ...]:
    """By operand, the layouts with shared slices from which an op makes results in those of `results`, or in plain
    ones."""
    found: tuple[set[Layout], ...] = tuple(set() for _ in range(num_operands))
    for strategy in strategies:
        made = zip(results, strategy.results, strict=True)
        if all(layout.kind not in _SHARED_KINDS or layout in known for known, layout in made):
            for own, layout in zip(found, strategy.operands, strict=True):
                own.update({layout} if layout.kind in _SHARED_KINDS else ())
    return tuple(map(frozenset, found))


def _shares(graph: ModelGraph, op: Op) -> bool:
    """True where an op turns shared heads into heads of each rank's own; a reshape does so after an expand."""
    if op.target not in RESHAPES:
        return op.target in _READS_SHARED_HEADS
    producer = graph.producers.get(op.operands[0])
    while isinstance(producer, Op) and producer.target in _BETWEEN_EXPAND_AND_RESHAPE:
        producer = graph.producers.get(producer.operands[0])
    return isinstance(producer, Op) and producer.target in EXPANDS

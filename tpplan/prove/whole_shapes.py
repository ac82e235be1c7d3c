"""Sizes that a module's code is told as they are in one process, where it asks a slice for its shape.

Code may compute with sizes that a rank has less of, or take another path for them: one for a single head, one for as
many heads of keys as of queries, a check that a width divides by a number of heads that stands in a closure. Told the
sizes of one process it does what it does there; the sizes that it then gives to calls are whole, and are replaced by a
rank's as others are (tpplan.apply.modules.local_sizes). As ever, the proof tells whether that was right.

A dim that grows with batch or length is not told: the number would be another one at others.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from tpplan.core.graph import ModelGraph
from tpplan.core.layout import Layout, local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import SHAPE, SizePlan
from tpplan.prove.module_scope import given_nodes, seen_in


def whole_shapes(assignment: Assignment, module: str, growing: Container[tuple[str, int]]) -> Iterator[SizePlan]:
    """Yields the sizes to tell a module's own code, but for those of a rank that stand for several of one process.

    `growing` has the dims, as (value, dim), that grow with batch or length.
    """
    told: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for name, layout in values_seen(assignment.graph, assignment.strategies, module):
        dim, whole = layout.dim, assignment.graph.values[name].shape
        if dim is None or (name, dim) in growing:
            continue
        local = local_shape(whole, layout, assignment.tp)[dim]
        if local != whole[dim]:
            told[len(whole), dim, local].add(whole[dim])
    for (count, dim, local), sizes in told.items():
        if len(sizes) == 1:
            yield SizePlan(call=SHAPE, of=(), count=count, position=dim, written=sizes.pop(), local=local)


def values_seen(graph: ModelGraph, strategies: Mapping[str, Strategy], module: str) -> Iterator[tuple[str, Layout]]:
    """Yields the values that a module's own code sees, each with the layout in which it does."""
    for node in given_nodes(graph, module):
        yield from seen_in(module, node, strategies[node.name])

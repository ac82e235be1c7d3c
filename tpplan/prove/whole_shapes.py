"""Shapes that a module's code is told as they are in one process, where it asks a slice for its shape.

Code may compute with sizes that a rank has less of, or take another path for them: one for a single head, one for as
many heads of keys as of queries, a check that a width divides by a number of heads that stands in a closure. Told the
sizes of one process it does there what it does in one process; the sizes that it then gives to calls are whole, and are
replaced by a rank's as others are (tpplan.apply.modules.local_sizes). As ever, the proof tells whether that was right.

A dim that grows with batch or length is not told: the number would be wrong at another.
"""

from collections.abc import Callable, Iterator

from tpplan.core.graph import Op
from tpplan.core.layout import Layout, local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.plan.plan import SHAPE, SizePlan
from tpplan.prove.module_scope import given_nodes

#: the dims (name of a value, dim) that grow with batch or length
Grows = Callable[[], frozenset[tuple[str, int]]]


def whole_shapes(assignment: Assignment, module: str, grows: Grows) -> Iterator[SizePlan]:
    """Yields the sizes to tell a module's own code, one for each rank's shape that it sees, but for shapes that stand
    for several sizes of one process."""
    told: dict[tuple[tuple[int, ...], int], set[int]] = {}
    for name, layout in _seen(assignment, module):
        dim, whole = layout.dim, assignment.graph.values[name].shape
        if dim is None or (name, dim) in grows():
            continue
        local = local_shape(whole, layout, assignment.tp)[dim]
        if local != whole[dim]:
            of = tuple(local if place == dim else 0 for place in range(len(whole)))
            told.setdefault((of, dim), set()).add(whole[dim])
    for (of, dim), sizes in told.items():
        if len(sizes) == 1:
            yield SizePlan(call=SHAPE, of=of, count=len(of), position=dim, written=sizes.pop(), local=of[dim])


def _seen(assignment: Assignment, module: str) -> Iterator[tuple[str, Layout]]:
    """Yields the values that a module's own code sees, with the layout in which it does."""
    for node in given_nodes(assignment.graph, module):
        strategy = assignment.strategy(node.name)
        is_own = isinstance(node, Op) or node.module != module
        yield from zip(node.results, strategy.results, strict=True)
        if is_own:
            yield from zip(node.operands, strategy.operands, strict=True)

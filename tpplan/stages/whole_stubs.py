"""What stubs of a stage leave in its graph, and the layouts there: whole.

A stub's code gives tensors of whole shapes, whatever it is given. What later stages make of them is dropped, so nothing
is gained by a slice of one. What a stage receives leaves its stub as it comes, or is converted there. What other stubs
are given is whole where it is made.
"""

from collections.abc import Collection, Iterable, Sequence

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, may_write, within
from tpplan.plan.sections.ranks import StagePlan


def unread_in_stubs(
    nodes: Sequence[Op | Boundary], stubs: Collection[str], outputs: Iterable[str]
) -> list[Op | Boundary]:
    """The nodes of stubs, which are given by name, whose results nothing reads but other such nodes, as of most. What
    leaves a stub is received: it is none of them, whether the stage reads it or not."""
    read, found = set(outputs), list[Op | Boundary]()
    for node in reversed(nodes):
        is_needed = may_write(node) if isinstance(node, Op) else node.direction is Direction.OUTPUT
        if is_needed or node.module not in stubs or not read.isdisjoint(node.results):
            read.update(node.operands)
        else:
            found.append(node)
    return found


def ops_in_stubs(graph: ModelGraph, stage: StagePlan) -> frozenset[str]:
    """Names of the ops of the modules that a stage does not have."""
    return frozenset(op.name for op in graph.ops if any(within(op.module, name) for name in stage.absent))


def results_read_in_stubs(graph: ModelGraph) -> dict[str, list[int]]:
    """By name of a node the positions of its results that stubs are given, of which no node is left."""
    found: dict[str, list[int]] = {}
    for value in graph.read_by_stubs:
        if (node := graph.producers.get(value)) is not None:
            found.setdefault(node.name, []).append(node.results.index(value))
    return found

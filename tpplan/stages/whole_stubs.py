"""Layouts at the stubs of a stage: whole.

A stub's code gives tensors of whole shapes, whatever it is given. What later stages make of them is dropped, so nothing
is gained by a slice of one. What a stage receives leaves its stub as it comes, or is converted there. What other stubs
are given is whole where it is made.
"""

from collections.abc import Sequence

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, within
from tpplan.core.layout import Layout
from tpplan.plan.sections.ranks import StagePlan


def nodes_in_stubs(graph: ModelGraph, stage: StagePlan) -> dict[str, Op | Boundary]:
    """Ops and crossings of the modules that a stage does not have, by name."""
    return {node.name: node for node in graph.nodes if any(within(node.module, name) for name in stage.absent)}


def results_read_in_stubs(graph: ModelGraph) -> dict[str, list[int]]:
    """By name of a node the positions of its results that stubs are given, of which no node is left."""
    found: dict[str, list[int]] = {}
    for value in graph.read_by_stubs:
        if (node := graph.producers.get(value)) is not None:
            found.setdefault(node.name, []).append(node.results.index(value))
    return found


def is_whole_there(
    node: Op | Boundary, operands: Sequence[Layout], results: Sequence[Layout], stage: StagePlan
) -> bool:
    """True where these layouts of a node of a stub keep whole all that the stub is given and gives, but what leaves the
    stub that receives."""
    layouts = (*operands, *results)
    if isinstance(node, Boundary):
        enters = node.direction is Direction.INPUT
        layouts = tuple(results if enters else () if node.module == stage.received else layouts)
    return all(layout.is_whole for layout in layouts)

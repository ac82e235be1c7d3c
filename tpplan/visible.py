"""What a module's own code can see: its ops' values, what enters and leaves it, what enters and leaves its children."""

from collections.abc import Iterator

from tpplan.graph import Boundary, Direction, ModelGraph, Op
from tpplan.layout import Layout
from tpplan.rules import Strategy


def parent(graph: ModelGraph, module: str) -> str:
    """The nearest enclosing module that runs code of its own (containers do not)."""
    running = {boundary.module for boundary in graph.boundaries}
    found = module
    while found:
        found = found.rpartition(".")[0]
        if found in running:
            break
    return found


def given_nodes(graph: ModelGraph, module: str) -> Iterator[Op | Boundary]:
    """The nodes that give values to a module's own code: its ops, its boundaries, and its children's outputs."""
    for node in graph.nodes:
        leaves_child = isinstance(node, Boundary) and node.direction is Direction.OUTPUT
        if node.module == module or (leaves_child and parent(graph, node.module) == module):
            yield node


def shards_in(module: str, node: Op | Boundary, strategy: Strategy) -> bool:
    """True where a node of given_nodes so laid out shows a module's code a slice."""
    sides: tuple[tuple[Layout, ...], ...] = (strategy.operands, strategy.results)
    if isinstance(node, Boundary):
        is_inside = (node.module == module) == (node.direction is Direction.INPUT)
        sides = (strategy.results,) if is_inside or node.module != module else (strategy.operands,)
    return any(layout.dim is not None for side in sides for layout in side)

"""Values that a module's own code sees: of its ops, at its boundary, and at the boundaries of modules it calls."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op
from tpplan.core.layout import Layout
from tpplan.layouts.rules import Strategy


def parent(graph: ModelGraph, module: str) -> str:
    """The nearest enclosing module that runs code of its own (containers do not)."""
    running = graph.once(parent, lambda: frozenset(boundary.module for boundary in graph.boundaries))
    found = module
    while found:
        found = found.rpartition(".")[0]
        if found in running:
            break
    return found


def code_of(graph: ModelGraph, node: Op | Boundary) -> str:
    """The module whose own code runs a node, or calls the module that an input enters."""
    is_call = isinstance(node, Boundary) and node.direction is Direction.INPUT
    return parent(graph, node.module) if is_call else node.module


def given_nodes(graph: ModelGraph, module: str) -> Sequence[Op | Boundary]:
    """The nodes that give values to a module's own code: its ops, its boundaries, and outputs of its children and of
    other modules that it calls, such as a child's embedding."""
    return graph.once(given_nodes, lambda: _given_nodes(graph)).get(module, ())


def _given_nodes(graph: ModelGraph) -> Mapping[str, Sequence[Op | Boundary]]:
    """The nodes by the module to whose own code they give values, in the order of the graph."""
    callers, found = _callers(graph), defaultdict[str, list[Op | Boundary]](list)
    for node in graph.nodes:
        leaves = isinstance(node, Boundary) and node.direction is Direction.OUTPUT
        around = {parent(graph, node.module), callers[node.name]} if leaves else set()
        for module in {node.module} | around:
            found[module].append(node)
    return found


def _callers(graph: ModelGraph) -> Mapping[str, str]:
    """The calling module by boundary, from the order of the nodes; they do not show a call without ops that no tensor
    enters or leaves."""
    running, found, left = [""], {}, ""
    for node in graph.nodes:
        leaves = isinstance(node, Boundary) and node.direction is Direction.OUTPUT
        if left and not (leaves and node.module == left):
            del running[running.index(left) :]
            left = ""
        if node.module in running:
            del running[running.index(node.module) + 1 :]
        else:
            running.append(node.module)
        if isinstance(node, Boundary):
            found[node.name] = running[-2] if len(running) > 1 else ""
        if leaves:
            left = node.module
    return found


def seen_in(module: str, node: Op | Boundary, strategy: Strategy) -> Iterator[tuple[str, Layout]]:
    """Yields the values that a node of given_nodes(module), under a strategy, shows the module's code, each with its
    layout there."""
    leaves = isinstance(node, Boundary) and (node.module, node.direction) == (module, Direction.OUTPUT)
    if not leaves:
        yield from zip(node.results, strategy.results, strict=True)
    if leaves or isinstance(node, Op):
        yield from zip(node.operands, strategy.operands, strict=True)


def shards_in(module: str, node: Op | Boundary, strategy: Strategy) -> bool:
    """True where a node of given_nodes(module), under a strategy, shows the module's code a slice."""
    return any(layout.dim is not None for _, layout in seen_in(module, node, strategy))

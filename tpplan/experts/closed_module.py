"""Whether a module of experts is closed: nothing but its call shows other code what it has and computes.

Divided, the module has other weights on each rank, and computes on other rows. Only what it is called with and what it
returns is exchanged, so that code which reads one of its weights, or a tensor that it keeps, would read a rank's own.
"""

from collections.abc import Iterator

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, within
from tpplan.layouts.rules import written_operands


def why_not_closed(graph: ModelGraph, module: str) -> str:
    """How other code sees what a module has or computes, but for its result, or the module what it is not called with;
    "" where neither does. The graph may be of a model whose experts are divided already."""
    return next(_openings(graph, module), "")


def _openings(graph: ModelGraph, module: str) -> Iterator[str]:
    inside = [node for node in graph.nodes if within(node.module, module)]
    outside = [node for node in graph.nodes if not within(node.module, module)]
    weights = {source.result: source.label for source in graph.parameters if _owns(module, source.label)}
    crossing = [node for node in inside if isinstance(node, Boundary) and node.module == module]
    given = [node for node in crossing if node.direction is Direction.INPUT]
    made = {name for node in inside for name in node.results}
    kept = made - {node.result for node in crossing if node.direction is Direction.OUTPUT}
    for node in outside:
        for name in node.operands:
            if name in weights:
                yield f"its weight {weights[name]} is read outside of it{_at(graph, node)}: plan with --ep 1"
            if name in kept:
                yield f"a tensor that it computes is read outside of it{_at(graph, node)}, and it does not return that"
    for path, name in graph.outputs:
        if name in kept or name in weights:
            yield f"what is {path} is a tensor of its own, and it does not return that: return it, or detach it"
    known = made | {source.result for source in graph.sources}
    storages = {graph.values[node.operand].storage for node in given}
    for node in inside:
        if node not in given and not known.issuperset(node.operands):
            yield f"it reads a tensor that it is not called with{_at(graph, node)}: make that an argument"
        if isinstance(node, Op) and any(graph.values[name].storage in storages for name in written_operands(node)):
            yield f"it writes to a tensor that it is given{_at(graph, node)}: write to a copy"


def _owns(module: str, parameter: str) -> bool:
    return within(parameter.rpartition(".")[0], module)


def _at(graph: ModelGraph, node: Op | Boundary) -> str:
    line = graph.lines.get(node.name, "")
    return f", at {line}" if line else f", in {node.module or 'the root'}"

"""Finds the modules of experts in a graph, by how they are called and what weights they have.

Such a module is called once, with rows [T, D], an index [T, K] of integers and a weight [T, K], and returns [T, D'];
it has weights of its own, all with as many slices along dim 0 as there are experts, and none below it. No other code
sees what it has and computes (tpplan.experts.closed_module). That it computes row by row is seen by running it
(tpplan.experts.row_wise).
"""

from collections.abc import Mapping

from tpplan.core.graph import Boundary, Direction, ModelGraph, Value
from tpplan.experts.closed_module import why_not_closed
from tpplan.plan.plan import ExpertCall


def find_experts(graph: ModelGraph) -> dict[str, ExpertCall]:
    """Finds the modules of experts: how each is called, by its name. In `graph` each rank has all experts."""
    return {module: call for module, call in called_as_experts(graph).items() if not why_not_closed(graph, module)}


def called_as_experts(graph: ModelGraph) -> dict[str, ExpertCall]:
    """How each module that is called as experts are, and has such weights, is called, by its name."""
    crossings: dict[str, list[Boundary]] = {}
    for boundary in graph.boundaries:
        crossings.setdefault(boundary.module, []).append(boundary)
    calls = {
        module: _call(crossings.get(module, []), graph.values, experts)
        for module, experts in _experts_by_module(graph).items()
    }
    return {module: call for module, call in calls.items() if call is not None}


def not_called_as_experts(graph: ModelGraph) -> str:
    """How the first module is called that may have experts, a stack of matrices that it is given three tensors for, and
    is not called as experts are; "" without one."""
    stacks = {
        source.label.rpartition(".")[0]: source.label
        for source in graph.parameters
        if len(graph.values[source.result].shape) > 2
    }
    for module, weight in stacks.items():
        given = [own for own in graph.boundaries if (own.module, own.direction) == (module, Direction.INPUT)]
        values = [graph.values[own.result] for own in given]
        if module not in called_as_experts(graph) and len(given) >= 3:
            shown = (f"{own.path} {list(x.shape)} of {x.dtype}" for own, x in zip(given, values, strict=True))
            return f"the module of {weight} is called with {', '.join(shown)}"
    return ""


def _experts_by_module(graph: ModelGraph) -> dict[str, int]:
    """The number of slices along dim 0 that all weights of a module have, by module; without modules that have weights
    of several lengths, of one slice, below them, or shared with another module."""
    lengths: dict[str, set[int]] = {}
    for source in graph.parameters:
        shape = graph.values[source.result].shape
        for label in (source.label, *source.aliases):
            owner = label.rpartition(".")[0]
            lengths.setdefault(owner, set()).add(shape[0] if len(shape) > 1 and not source.aliases else 0)
            while owner:
                owner = owner.rpartition(".")[0]
                lengths.setdefault(owner, set()).add(0)
    return {module: max(own) for module, own in lengths.items() if len(own) == 1 and max(own) > 1}


def _call(crossings: list[Boundary], values: Mapping[str, Value], experts: int) -> ExpertCall | None:
    """How a module is called whose tensors cross at these boundaries; None where it is not called as experts are."""
    given = [boundary for boundary in crossings if boundary.direction is Direction.INPUT]
    returned = [boundary for boundary in crossings if boundary.direction is Direction.OUTPUT]
    if len(given) != 3 or len(returned) != 1:
        return None
    by_kind: dict[str, list[Boundary]] = {"integers": [], "numbers": []}
    for boundary in given:
        value = values[boundary.result]
        by_kind["integers" if value.dtype.startswith(("int", "uint")) else "numbers"].append(boundary)
    if len(by_kind["integers"]) != 1:
        return None
    (index,) = by_kind["integers"]
    shape = values[index.result].shape
    weights = [own for own in by_kind["numbers"] if values[own.result].shape == shape]
    rows = [own for own in by_kind["numbers"] if own not in weights[:1]]
    if len(shape) != 2 or shape[1] > experts or not weights or len(rows) != 1:
        return None
    shapes = [values[boundary.result].shape for boundary in (*rows, *returned)]
    if any(len(own) != 2 or own[0] != shape[0] for own in shapes):
        return None
    return ExpertCall(experts=experts, rows=rows[0].path, index=index.path, weight=weights[0].path)

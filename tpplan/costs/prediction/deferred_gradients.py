"""The weights' gradients that a zero-bubble schedule defers: their seconds, and the bytes that are kept until then.

Deferred is one product, dW = dy^T x, of each linear layer whose weight is a parameter that trains, as
tpplan.apply.modules.deferred_gradients does. Until it is made x and dy are kept; a layer's x may be that of others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from tpplan.core.graph import Boundary, Op, within
from tpplan.core.layout import local_shape
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import local_bytes
from tpplan.costs.runs.kernels import Matmul
from tpplan.costs.runs.known_times import KnownTimes
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Call
from tpplan.plan.sections.ranks import DeferredPlan
from tpplan.solvers.problem import Expression

_LINEAR = "aten.linear.default"


def deferred(assignment: Assignment, formulation: Formulation, executor: Executor) -> DeferredPlan:
    """The products of a micro-batch that a rank defers; `formulation` is that of the assignment alone."""
    times, seconds = KnownTimes(formulation.setting.profile), Counter[str]()
    for op in _linear_layers(assignment):
        product = _product(assignment, op, executor)
        seconds[op.module] += times.kernel(product).seconds if product is not None else 0.0  # type: ignore[assignment]
    kept, largest = deferred_bytes(assignment)
    return DeferredPlan(
        seconds=float(sum(seconds.values())),
        kept_bytes=kept,
        largest_bytes=largest,
        exposed_s=_exposed_s(formulation, {} if assignment.has_uneven_reads else seconds),
    )


def deferred_bytes(assignment: Assignment) -> tuple[float, float]:
    """Bytes that a rank keeps for the deferred products of a micro-batch, and those of the largest product."""
    graph, tp, largest = assignment.graph, assignment.tp, 0
    read: dict[str, int] = {}
    for op in _linear_layers(assignment):
        strategy, result = assignment.strategy(op.name), op.results[0]
        x = _before_crossing(assignment, op.operands[0])
        read[x] = local_bytes(graph.values[x], strategy.operands[0], tp)
        read[result] = local_bytes(graph.values[result], strategy.results[0], tp)
        largest = max(largest, local_bytes(graph.values[op.operands[1]], strategy.operands[1], tp))
    return float(sum(read.values())), float(largest)


def _exposed_s(formulation: Formulation, seconds: Mapping[str, float]) -> float:
    """The seconds of the last reductions that a backward hides, and the deferred products, in some seconds by module,
    do not: a unit is reduced beside the products of its own weights."""
    communication, found = formulation.objective.fsdp_communication, 0.0
    everything = dict.fromkeys(formulation.space.members, 0)
    for unit, last in communication.in_last_backward() if communication.hides else ():
        products = sum(own for module, own in seconds.items() if within(module, unit.name))
        beside = Expression(constant=-products)
        slowdown = formulation.setting.profile.overlap_slowdown
        apart, together = (
            sum(term.value(everything) for term in own.terms(slowdown))
            for own in (replace(last, uncomputed=beside), last)
        )
        found += max(0.0, apart - together)
    return found


def _linear_layers(assignment: Assignment) -> Iterator[Op]:
    """Yields the linear layers whose products are deferred."""
    graph = assignment.graph
    parameters = {source.result for source in graph.parameters}
    for op in graph.ops:
        if op.target != _LINEAR or op.operands[1] not in parameters:
            continue
        if all(graph.values[name].carries_gradient for name in op.operands[:2]):
            yield op


def _before_crossing(assignment: Assignment, value: str) -> str:
    """The value that has the memory of one: before it crossed into modules, unless a conversion made another tensor."""
    maker = assignment.graph.producers.get(value)
    while isinstance(maker, Boundary) and not assignment.conversion(maker).forward:
        value = maker.operand
        maker = assignment.graph.producers.get(value)
    return value


def _product(assignment: Assignment, op: Op, executor: Executor) -> Matmul | None:
    """The product of a linear layer's backward that gives the gradient of its weight on a rank."""
    graph, strategy, tp = assignment.graph, assignment.strategy(op.name), assignment.tp
    shapes = (
        local_shape(graph.values[name].shape, layout, tp)
        for name, layout in zip(op.operands, strategy.operands, strict=True)
    )
    x, weight, *_ = shapes
    ran = executor.execute(Call.of(graph, op), strategy, tp)
    products = (own for own in ran.backward if isinstance(own, Matmul))
    return next((own for own in products if own.k == prod(x[:-1]) and {own.m, own.n} == {*weight}), None)

"""Counts what tensor parallelism divides of a step: FLOPs by module, and parameters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpplan.core.graph import ModelGraph, Op
from tpplan.core.layout import Layout, LayoutKind
from tpplan.core.name_patterns import ROOT
from tpplan.costs.runs.execute import Executor, whole_strategy
from tpplan.costs.runs.kernels import flop_of
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.fused.heads import heads_of_parameters
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.compress_names import by_pattern, pattern_of
from tpplan.plan.tp_shares import BY_PRICES, ModuleShares, TpShares

#: relative difference below which two counts of FLOP are equal
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class OpWork:
    """FLOP of a whole op, forward and backward of one micro-batch, and whether tp divides the op."""

    flop: float
    is_divided: bool


def op_work(call: Call, strategy: Strategy, tp: int, executor: Executor) -> OpWork:
    """The work of an op under a strategy. It is divided where a rank runs 1/tp of the whole's FLOP; an op without FLOP
    where a rank's kernels are not the whole's, or the whole has none, as a view: nothing is there to divide."""
    own, whole = executor.execute(call, strategy, tp), executor.execute(call, whole_strategy(call), tp)
    flop, local = flop_of((*whole.forward, *whole.backward)), flop_of((*own.forward, *own.backward))
    if not flop:
        kernels = whole.forward, whole.backward
        return OpWork(0.0, not any(kernels) or (own.forward, own.backward) != kernels)
    return OpWork(flop, local * tp <= flop * (1 + SAME))


def works(assignment: Assignment, executor: Executor) -> dict[str, OpWork]:
    """The work of every op, by its name."""
    graph, tp = assignment.graph, assignment.tp
    return {op.name: op_work(Call.of(graph, op), assignment.strategy(op.name), tp, executor) for op in graph.ops}


def module_pattern(graph: ModelGraph, op: Op) -> str:
    """The pattern of an op's module, as a plan writes it."""
    return pattern_of(graph, op.module) or ROOT


def tp_shares(assignment: Assignment, executor: Executor, op_seconds: Mapping[str, float]) -> TpShares | None:
    """The shares of a step that tp divides, without reasons; None on one rank. `op_seconds` are as in Priced."""
    if assignment.tp == 1:
        return None
    flop: Counter[str] = Counter()
    divided: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    found = works(assignment, executor)
    for op in assignment.graph.ops:
        module, work = module_pattern(assignment.graph, op), found[op.name]
        flop[module] += work.flop  # type: ignore[assignment]
        divided[module] += work.flop * work.is_divided  # type: ignore[assignment]
        seconds[module] += op_seconds.get(op.name, 0.0) * (not work.is_divided)  # type: ignore[assignment]
    total = sum(flop.values()) or 1
    return TpShares(
        flops_share=float(sum(divided.values()) / total),
        parameters_share=_parameters_share(assignment),
        modules={
            module: ModuleShares(
                flops_share=float(flop[module] / total),
                divided_flops_share=float(divided[module] / total),
                whole_seconds=float(seconds[module]),
            )
            for module in flop
            if flop[module] or seconds[module]
        },
        heads=_heads(assignment) or None,
    )


def counted_again(
    known: TpShares | None, assignment: Assignment, executor: Executor, op_seconds: Mapping[str, float] | None = None
) -> TpShares | None:
    """The shares of a plan whose layouts or machine may have changed since `known` was counted; None where nothing was.

    Without `op_seconds`, seconds stay those known. Reasons stay for modules of which as much is divided, except those
    by the prices of another machine.
    """
    found = tp_shares(assignment, executor, op_seconds or {})
    if known is None or found is None:
        return None
    modules = {}
    for name, own in found.modules.items():
        before = known.modules.get(name)
        if before is not None and before.divided_flops_share == own.divided_flops_share:
            by_prices = op_seconds is not None and (before.reason or "").startswith(BY_PRICES)
            seconds = before.whole_seconds if op_seconds is None else own.whole_seconds
            own = replace(own, whole_seconds=seconds, reason=None if by_prices else before.reason)
        modules[name] = own
    kept = {} if op_seconds is not None else {n: m for n, m in known.modules.items() if not m.flops_share}
    return replace(found, modules={**kept, **modules})


def _heads(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Numbers of heads along the dim in which a parameter is split, by pattern."""
    graph = assignment.graph
    found = heads_of_parameters(graph)
    dims = {source.label: assignment.placement(source).dim for source in graph.parameters if source.label in found}
    heads = {label: found[label][dim] for label, dim in dims.items() if dim is not None and dim in found[label]}
    return by_pattern(graph, heads, lambda counts, rename: counts)


def _parameters_share(assignment: Assignment) -> float:
    """The share of all parameters' elements that are in parameters of which a rank holds, or reads, a slice."""
    graph = assignment.graph
    sizes = {source.label: graph.values[source.result].num_elements for source in graph.parameters}
    divided = (sizes[s.label] for s in graph.parameters if any(map(_is_slice, _layouts(assignment, s.label))))
    return sum(divided) / (sum(sizes.values()) or 1)


def _layouts(assignment: Assignment, parameter: str) -> list[Layout]:
    """The layouts of a parameter at rest, and as it is read where ranks share slices of it."""
    strategies = [assignment.strategy(reading.name) for reading in assignment.readings[parameter]]
    shared = (s.results[0] for s in strategies if s.results[0].kind is LayoutKind.COPIED)
    return [*(s.operands[0] for s in strategies), *shared]


def _is_slice(layout: Layout) -> bool:
    return layout.dim is not None

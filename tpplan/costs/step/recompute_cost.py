"""The cost of recomputation: the decisions of a module that run again in backward, and their time.

A recomputed module runs its forward once more in backward, as under torch.utils.checkpoint. It stops early: at the last
op that saves something, and before that op's kernels where it saves only its operands. A layer that ends in a product
and a sum with its residual repeats neither. What the mode keeps is not repeated. tpplan.costs.step.memory_replay counts
the memory.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tpplan.costs.layer_activations import LayerCosts
from tpplan.costs.step.activation_lifetimes import Lifetimes, Run
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.strategy_times import StrategyTime
from tpplan.layouts.layer_treatments import LayerGroup
from tpplan.machine.profile import Estimate
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Time that recomputation adds to a micro-batch on a rank: kernels and collectives of the forward that runs again,
    and seconds that a GPU waits for the CPU to issue them."""

    compute: Estimate
    collectives: Estimate
    waited_s: float


def repeated(lifetimes: Lifetimes) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """Yields each call of a recomputed module with the decisions whose forward runs again."""
    readings: dict[str, list[str]] = {}
    for own in lifetimes.assignment.readings.values():
        for reading in own:
            readings.setdefault(reading.op.name, []).append(reading.name)
    for run in lifetimes.runs:
        yield run, tuple(_repeated(lifetimes, readings, run))


def rerun(
    lifetimes: Lifetimes, times: Mapping[str, StrategyTime], issue_s: float | None, modules: Collection[str]
) -> Rerun:
    """The time of recomputing those of the recomputed modules that are in `modules`. `times` are by decision; `issue_s`
    are seconds that the CPU takes to issue a kernel, None where nothing waits for it."""
    calls = [[times[name] for name in names] for run, names in repeated(lifetimes) if run.module in modules]
    every = [time for call in calls for time in call]
    return Rerun(
        compute=sum((time.forward for time in every), Estimate.zero()),
        collectives=sum((time.forward_collectives for time in every), Estimate.zero()),
        waited_s=sum(_waited_s(call, issue_s) for call in calls),
    )


def _waited_s(times: list[StrategyTime], issue_s: float | None) -> float:
    """Seconds that issuing a call's kernels takes longer than running them; 0 where it does not."""
    running_s = sum((time.forward + time.forward_collectives).seconds for time in times)
    return 0.0 if issue_s is None else max(0.0, issue_s * sum(time.forward_kernels for time in times) - running_s)


def _repeated(lifetimes: Lifetimes, readings: Mapping[str, list[str]], run: Run) -> Iterator[str]:
    """The decisions of a call whose forward runs again, readings of weights included."""
    stop = lifetimes.stop(run)
    for i in range(run.positions.start, stop + 1):
        if lifetimes.is_held(i):
            continue
        name = lifetimes.nodes[i].name
        yield from readings.get(name, ())
        if i < stop or lifetimes.executions[i].saves_results or lifetimes.executions[i].saved_bytes:
            yield name


def recomputed_forward(
    priced: PricedSpace, units: tuple[str, ...], kind: LayerGroup, mode: Recompute
) -> tuple[Expression, Expression, Expression]:
    """Seconds of kernels, seconds of collectives, and the number of both, of the forward that one layer of a group runs
    again. `units` are the layers that are FSDP units."""
    if mode is Recompute.NONE:
        return Expression(), Expression(), Expression()
    key = "again", units, kind.unit.name, mode
    return priced.once(key, lambda: _forward_again(priced, priced.activations(units).layers[kind.unit.name], mode))


def _forward_again(
    priced: PricedSpace, layer: LayerCosts, mode: Recompute
) -> tuple[Expression, Expression, Expression]:
    rows: tuple[dict[str, tuple[float, ...]], ...] = ({}, {}, {})
    for name, number in layer.again.items():
        repeated = [time.again[mode] for time in priced.times[name]]
        vectors = zip(*((r.compute.seconds, r.collectives.seconds, r.kernels) for r in repeated), strict=True)
        for row, vector in zip(rows, vectors, strict=True):
            if any(vector):
                row[name] = tuple(number * amount for amount in vector)
    compute, collectives, kernels = (Expression(terms=tuple(row.items())) for row in rows)
    return compute, collectives, kernels

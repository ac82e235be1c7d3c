"""What recomputation costs: which decisions of a module run again in backward, and what that takes.

A module that is recomputed runs its forward once more in backward, as torch.utils.checkpoint does it. It stops early:
at the last op that keeps something for its backward, and before that op's kernels where all it keeps are its operands.
A layer that ends in a product and a sum with its residual repeats neither. Selective recomputation holds the results of
products, attention and sums over ranks, and does not repeat them. What there is in memory then,
tpplan.costs.step.memory_replay says.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tpplan.costs.step.activation_lifetimes import Lifetimes, Run
from tpplan.costs.strategy_times import StrategyTime
from tpplan.machine.profile import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What recomputation adds per micro-batch on one rank: kernels and collectives of the forward that runs again, and
    the seconds that a GPU waits for the CPU to issue them."""

    compute: Estimate
    collectives: Estimate
    waited_s: float


def repeated(lifetimes: Lifetimes) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """Each call of a recomputed module with the decisions whose forward runs again."""
    readings: dict[str, list[str]] = {}
    for own in lifetimes.assignment.readings.values():
        for reading in own:
            readings.setdefault(reading.op.name, []).append(reading.name)
    for run in lifetimes.runs:
        yield run, tuple(_repeated(lifetimes, readings, run))


def rerun(
    lifetimes: Lifetimes, times: Mapping[str, StrategyTime], issue_s: float | None, modules: Collection[str]
) -> Rerun:
    """What it takes to recompute some of the modules that are. `times` are by decision; `issue_s` are seconds that the
    CPU takes to issue a kernel, None where nothing waits for it."""
    calls = [[times[name] for name in names] for run, names in repeated(lifetimes) if run.module in modules]
    every = [time for call in calls for time in call]
    return Rerun(
        compute=sum((time.forward for time in every), Estimate.zero()),
        collectives=sum((time.forward_collectives for time in every), Estimate.zero()),
        waited_s=sum(_waited_s(call, issue_s) for call in calls),
    )


def _waited_s(times: list[StrategyTime], issue_s: float | None) -> float:
    """What issuing a call's kernels takes longer than running them."""
    running_s = sum((time.forward + time.forward_collectives).seconds for time in times)
    return 0.0 if issue_s is None else max(0.0, issue_s * sum(time.forward_kernels for time in times) - running_s)


def _repeated(lifetimes: Lifetimes, readings: Mapping[str, list[str]], run: Run) -> Iterator[str]:
    """The decisions of a call whose forward runs again, those of the weights that are read among them."""
    stop = lifetimes.stop(run)
    for i in range(run.positions.start, stop + 1):
        if lifetimes.is_held(i):
            continue
        name = lifetimes.nodes[i].name
        yield from readings.get(name, ())
        if i < stop or lifetimes.executions[i].saves_results or lifetimes.executions[i].saved_bytes:
            yield name

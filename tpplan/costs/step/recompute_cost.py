"""What recomputation costs, in a plan whose modules to recompute are known.

A module that is recomputed runs its forward once more in backward, as torch.utils.checkpoint does it. It stops early:
at the last op that keeps something for its backward, and before that op's kernels where all it keeps are its operands.
A layer that ends in a product and a sum with its residual repeats neither. Selective recomputation holds the results of
products, attention and sums over ranks, and does not repeat them. What there is in memory then,
tpplan.costs.step.memory_replay says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpplan.core.graph import Boundary, Op
from tpplan.costs.step.activation_lifetimes import Lifetimes, Run, lifetimes_of
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.strategy_times import Transfer
from tpplan.machine.profile import Estimate
from tpplan.plan.plan import Pass, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What recomputation adds, per micro-batch on one rank: `compute` and `collectives` are what of the forward runs
    again, which a GPU waits `waited_s` for the CPU to issue; `transfers` are those collectives, by module."""

    compute: Estimate
    collectives: Estimate
    waited_s: float
    transfers: tuple[tuple[str, Transfer], ...]


def rerun(formulation: Formulation, modes: Mapping[str, Recompute]) -> Rerun:
    """The effect of recomputing these modules, where every decision has one strategy left."""
    lifetimes = lifetimes_of(formulation, modes)
    readings = _readings_by_op(formulation)
    calls = [list(_repeated(lifetimes, readings, run)) for run in lifetimes.runs]
    names = [name for call in calls for name in call]
    times = [formulation.table[name][0] for name in names]
    deciders = formulation.space.deciders
    return Rerun(
        compute=sum((time.forward for time in times), Estimate.zero()),
        collectives=sum((time.forward_collectives for time in times), Estimate.zero()),
        waited_s=sum(_waited_s(formulation, call) for call in calls),
        transfers=tuple(
            (decider.module, transfer)
            for name, time in zip(names, times, strict=True)
            if isinstance(decider := deciders[name], Op | Boundary)
            for transfer in time.transfers
            if transfer.during is Pass.FORWARD
        ),
    )


def _waited_s(formulation: Formulation, names: list[str]) -> float:
    """What issuing a call's kernels takes longer than running them."""
    issue_s = formulation.setting.profile.issue_s
    times = [formulation.table[name][0] for name in names]
    running_s = sum((time.forward + time.forward_collectives).seconds for time in times)
    return 0.0 if issue_s is None else max(0.0, issue_s * sum(time.forward_kernels for time in times) - running_s)


def _repeated(lifetimes: Lifetimes, readings: Mapping[str, list[str]], run: Run) -> Iterator[str]:
    """The decisions whose forward runs again, those of the weights that are read among them."""
    stop = lifetimes.stop(run)
    for i in range(run.positions.start, stop + 1):
        if lifetimes.is_held(i):
            continue
        name = lifetimes.nodes[i].name
        yield from readings.get(name, ())
        if i < stop or lifetimes.executions[i].saves_results or lifetimes.executions[i].saved_bytes:
            yield name


def _readings_by_op(formulation: Formulation) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for readings in formulation.space.readings.values():
        for reading in readings:
            found.setdefault(reading.op.name, []).append(reading.name)
    return found

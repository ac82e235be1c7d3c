"""The best plans for other GPUs, batches, lengths, memory limits and bandwidths, which the curves of a report draw.

Each point is solved anew, all but the one thing decided as for the plan, and not proven: a curve says what to ask for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpplan.core.errors import first_line
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan
from tpplan.plan.step_anatomy import BANDWIDTH, GLOBAL_BATCH, GPUS, MEMORY_LIMIT, SEQUENCE_LENGTH, Curve, Outcome
from tpplan.search.comparisons.alternatives import NO_CHANGED_PLAN, Problem, with_links
from tpplan.search.points.options import Cluster

#: what a value is multiplied with
FACTORS = (0.25, 0.5, 1, 2, 4)
MEMORY_FACTORS = (0.5, 0.75, 1, 1.25, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One thing to change: its name, its value in the plan, the values to try, ascending, and the options of solve for
    each."""

    name: str
    now: float
    values: tuple[float, ...]
    options: Callable[[float], dict[str, Any]]


def curves(
    problem: Problem, plan: Plan, progress: Callable[[str, int, int], None] = lambda *_: None
) -> Iterator[Curve]:
    """Yields a curve for each thing that can be changed; `problem` is as the plan was asked for. `progress` hears after
    each solve what is changed, and how many of how many values are solved.

    Raises the errors of solve that do not say that a plan is missing.
    """
    free = replace(problem, options={**problem.options, "micro_batch": "auto"})
    for change in _changes(problem, plan):
        outcomes = []
        for value in change.values:
            outcomes.append(_outcome(free, change, value))
            progress(change.name, len(outcomes), len(change.values))
        yield Curve(name=change.name, now=change.now, outcomes=tuple(outcomes))


def _changes(problem: Problem, plan: Plan) -> Iterator[_Change]:
    """Yields the changes of GPUs, batch, length, memory and links; what the problem fixes otherwise, as by a pin, stays
    fixed."""
    batch, cluster, per_node = plan.batch, problem.cluster, problem.cluster.load_profile().gpus_per_node

    def with_gpus(value: float) -> dict[str, Any]:
        gpus = int(value)
        nodes = replace(cluster, gpus=gpus, gpus_per_node=min(gpus, max(cluster.gpus_per_node, min(per_node, gpus))))
        return {"cluster": nodes}

    def with_batch(value: float) -> dict[str, Any]:
        return {"global_batch": int(value)}

    yield _Change(name=GPUS, now=cluster.gpus, values=_whole(cluster.gpus), options=with_gpus)
    yield _Change(name=GLOBAL_BATCH, now=batch.global_batch, values=_whole(batch.global_batch), options=with_batch)
    if batch.seq_len > 1:
        yield _Change(
            name=SEQUENCE_LENGTH,
            now=batch.seq_len,
            values=_whole(batch.seq_len),
            options=lambda value: {"seq_len": int(value)},
        )
    limit = plan.predicted.memory_limit_bytes
    if limit:
        yield _Change(
            name=MEMORY_LIMIT,
            now=limit,
            values=tuple(limit * factor for factor in MEMORY_FACTORS),
            options=lambda value: {"memory_limit_bytes": value},
        )
    if cluster.gpus > 1:
        yield _Change(
            name=BANDWIDTH,
            now=1,
            values=FACTORS,
            options=lambda value: {"cluster": _with_bandwidth(cluster, value)},
        )


def _whole(now: int) -> tuple[float, ...]:
    """The whole numbers from 1 among a number times FACTORS."""
    return tuple(value for factor in FACTORS if (value := now * factor) == int(value) and value >= 1)


def _with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links of `factor` times the profile's bandwidth, inside nodes and across."""
    profile = cluster.load_profile()
    for across_nodes in (False, True):
        profile = with_links(profile, factor, across_nodes=across_nodes)
    return replace(cluster, profile=profile)


def _outcome(problem: Problem, change: _Change, value: float) -> Outcome:
    try:
        plan = problem.solve(**change.options(value), prove=False)
    except NO_CHANGED_PLAN as error:
        return Outcome(value=value, problem=first_line(error))
    seconds = plan.predicted.step_time_s
    rate = plan.batch.global_batch / seconds if seconds else None
    return Outcome(value=value, step_time_s=seconds, samples_per_s=rate, mesh=_in_short(plan.mesh))


def _in_short(mesh: Mesh) -> str:
    """The axes with several ranks, as in `shard 8 x tp 2`."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard, "tp": mesh.tp}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"

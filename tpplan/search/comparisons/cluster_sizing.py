"""Cluster sizing: the best plan on each of several clusters, and the smallest cluster that is fast enough.

The model is traced once for all of them (tpplan.search.models.trace_cache). Plans are priced and not proven: `solve`
proves the chosen one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpplan.core.errors import IndivisibleError, InfeasibleError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.plan.report.words import mfu
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A cluster with its best plan, or with `problem`, why there is none: without `divides` as no mesh divides it."""

    cluster: Cluster
    profile: HardwareProfile
    plan: Plan | None
    problem: str = ""
    divides: bool = True

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole cluster; 0 without a plan."""
        if self.plan is None or not self.plan.predicted.step_time_s:
            return 0.0
        return self.plan.batch.global_batch * self.plan.batch.seq_len / self.plan.predicted.step_time_s

    @property
    def relative_error(self) -> float:
        """One standard deviation of the step's time, of the step; 0 without a plan."""
        if self.plan is None or not self.plan.predicted.step_time_s:
            return 0.0
        return self.plan.predicted.step_time_error_s / self.plan.predicted.step_time_s

    @property
    def gpu_hours_per_1e9_tokens(self) -> float:
        """GPU hours of all GPUs of the cluster, used or not, for 1e9 tokens; infinite without a plan."""
        return self.cluster.gpus * 1e9 / self.tokens_per_s / 3600 if self.tokens_per_s else float("inf")

    @property
    def mfu(self) -> float:
        """The model's FLOP per second over those of all GPUs in the profile's fastest matmul; 0 without a plan."""
        return mfu(self.plan.predicted, self.cluster.gpus) or 0.0 if self.plan is not None else 0.0


def size(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    clusters: Iterable[Cluster],
    tokens_per_s: float | None = None,
    options: Mapping[str, Any],
    refine: bool = False,
) -> Iterator[Sized]:
    """Yields the best plan on each cluster; skips clusters of a profile after one that does `tokens_per_s`.

    With `refine`, counts between that one and the one before are then tried by bisection. `options` are solve's. A
    cluster on which nothing fits, or which the batch does not divide, has no plan. Raises ModelError and ProfileError.
    """
    reuse, done = Reuse(), set()
    before: Cluster | None = None

    def sized(cluster: Cluster) -> Sized:
        profile = cluster.load_profile()
        try:
            plan = solve(build_model, example_inputs, cluster=cluster, prove=False, reuse=reuse, **options)
        except (InfeasibleError, IndivisibleError) as error:
            divides = not isinstance(error, IndivisibleError)
            return Sized(cluster=cluster, profile=profile, plan=None, problem=str(error), divides=divides)
        return Sized(cluster=cluster, profile=profile, plan=plan)

    for cluster in clusters:
        fingerprint = cluster.load_profile().fingerprint
        if fingerprint in done:
            before = None
            continue
        own = sized(cluster)
        yield own
        if tokens_per_s is not None and own.tokens_per_s >= tokens_per_s:
            done.add(fingerprint)
            between = _between(before, cluster) if refine and before is not None else []
            while between:
                middle = len(between) // 2
                own = sized(replace(cluster, gpus=between[middle]))
                yield own
                between = between[:middle] if own.tokens_per_s >= tokens_per_s else between[middle + 1 :]
        before = cluster


def _between(low: Cluster, high: Cluster) -> list[int]:
    """Counts between two clusters: whole nodes beyond one node, any within."""
    step = high.gpus_per_node if high.gpus > high.gpus_per_node else 1
    return list(range(low.gpus // step * step + step, high.gpus, step))


def smallest(rows: Sequence[Sized], tokens_per_s: float | None = None) -> Sized | None:
    """The row of fewest GPUs with a plan of at least `tokens_per_s`; None where there is none."""
    enough = [row for row in rows if row.plan is not None and row.tokens_per_s >= (tokens_per_s or 0.0)]
    return min(enough, key=lambda row: row.cluster.gpus, default=None)


def counts_up_to(most: int, gpus_per_node: int) -> tuple[int, ...]:
    """1, 2, 4, ... GPUs of a node, then 1, 2, 4, ... nodes."""
    inside = (2**i for i in range(gpus_per_node.bit_length()))
    across = (gpus_per_node * 2**i for i in range(most.bit_length()))
    return tuple(sorted({count for count in (*inside, *across) if count <= most and _is_whole(count, gpus_per_node)}))


def _is_whole(count: int, gpus_per_node: int) -> bool:
    return count <= gpus_per_node or count % gpus_per_node == 0

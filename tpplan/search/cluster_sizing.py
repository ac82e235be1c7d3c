"""Cluster sizing: the best plan on each of several clusters, and the smallest cluster that is fast enough.

The model is traced once for all of them (tpplan.search.points.trace_cache). Plans are priced and not proven: `solve`
proves the chosen one. FLOP are those of matmuls and attention, forward and backward, without recomputation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from tpplan.core.errors import IndivisibleError, InfeasibleError
from tpplan.core.units import FLOATING_DTYPES
from tpplan.costs.execute import Executor, whole_strategy
from tpplan.costs.kernels import flop_of
from tpplan.layouts.rules import Call
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.search.planner import solve
from tpplan.search.points.options import BuildModel, Cluster, ExampleInputs
from tpplan.search.points.trace_cache import Reuse, Traced

#: most products of a backward for one of the forward: one for the gradient of either operand
_BACKWARD_PRODUCTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A cluster with its best plan, or with `problem`, why there is none. `flop` are the model's FLOP of a step."""

    cluster: Cluster
    profile: HardwareProfile
    plan: Plan | None
    problem: str = ""
    flop: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole cluster; 0 without a plan."""
        if self.plan is None or not self.plan.predicted.step_time_s:
            return 0.0
        return self.plan.batch.global_batch * self.plan.batch.seq_len / self.plan.predicted.step_time_s

    @property
    def gpu_hours_per_1e9_tokens(self) -> float:
        """GPU hours of all GPUs of the cluster, used or not, for 1e9 tokens; infinite without a plan."""
        return self.cluster.gpus * 1e9 / self.tokens_per_s / 3600 if self.tokens_per_s else float("inf")

    @property
    def mfu(self) -> float:
        """The model's FLOP per second over those of all GPUs in the profile's fastest matmul; 0 without a plan."""
        if self.plan is None or not self.plan.predicted.step_time_s:
            return 0.0
        return self.flop / self.plan.predicted.step_time_s / (self.cluster.gpus * peak_flop_per_s(self.profile))


def size(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    clusters: Iterable[Cluster],
    tokens_per_s: float | None = None,
    options: Mapping[str, Any],
) -> Iterator[Sized]:
    """Yields the best plan on each cluster; skips clusters of a profile after one that does `tokens_per_s`.

    `options` are solve's. A cluster on which nothing fits, or which the batch does not divide, has no plan. Raises
    ModelError and ProfileError.
    """
    reuse, done = Reuse(), set()
    for cluster in clusters:
        profile = cluster.load_profile()
        if profile.fingerprint in done:
            continue
        try:
            plan = solve(build_model, example_inputs, cluster=cluster, prove=False, reuse=reuse, **options)
        except (InfeasibleError, IndivisibleError) as error:
            yield Sized(cluster=cluster, profile=profile, plan=None, problem=str(error))
            continue
        flop = plan.batch.global_batch * _flop_of_a_sequence(reuse)
        sized = Sized(cluster=cluster, profile=profile, plan=plan, flop=flop)
        yield sized
        if tokens_per_s is not None and sized.tokens_per_s >= tokens_per_s:
            done.add(profile.fingerprint)


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


def peak_flop_per_s(profile: HardwareProfile) -> float:
    """FLOP per second of the profile's fastest matmul, in a 16-bit dtype where it has one."""
    tables = [table for table in profile.matmuls if table.dtype in FLOATING_DTYPES]
    halves = [table for table in tables if table.dtype in ("bfloat16", "float16")]
    return max(
        2 * prod(sizes) / seconds
        for table in (halves or tables)
        for sizes, seconds in zip(product(*table.grids), table.time_s, strict=True)
    )


def _flop_of_a_sequence(reuse: Reuse) -> float:
    traced = next(iter(reuse.traces.values()))
    return model_flop(traced, reuse.executor) / traced.micro_batch


def model_flop(traced: Traced, executor: Executor) -> float:
    """FLOP of the traced matmuls and attention in forward and backward.

    Backward takes as much as forward for each matrix operand that a gradient reaches, for attention twice as much.
    """
    total = 0.0
    for op in traced.graph.ops:
        call = Call.of(traced.graph, op)
        flop = flop_of(executor.execute(call, whole_strategy(call), 1).forward)
        reached = sum(value.carries_gradient and len(value.shape) > 1 for value in call.operands)
        total += flop * (1 + min(reached, _BACKWARD_PRODUCTS))
    return total

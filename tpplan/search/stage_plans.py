"""The plan of a model in stages: where it is cut, the mesh of a stage, the micro-batch, and the plan of each stage.

Each stage is a model of its own (tpplan.stages), which `solve_request` solves and proves. Degrees and micro-batches are
tried with the first, the second and the last stage, which stand for all: the first has the embedding and keeps the
activations of most micro-batches, the last has the head and the loss. The best of them is solved stage by stage;
layers then move from the slowest stage to the fastest while that makes a step shorter.

A step of 1F1B with M micro-batches takes as long as the slowest stage's M micro-batches, and, while the pipeline fills
and drains, one micro-batch of each other stage (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", 2021, section 2.2, for stages that take different times). What is sent between stages is
not hidden: torch's schedule waits for it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

from tpplan.core.errors import IndivisibleError, InfeasibleError, ModelError, UsageError
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import GroupShape, divisors, tp_degrees
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.profile import Collective
from tpplan.plan.parts import DATA_PARALLEL, OPTIMIZER, TP_REDUCTION
from tpplan.plan.pipeline_plan import PipelinePlan, PipelinePrediction, Schedule
from tpplan.plan.plan import SCHEMA_VERSION, Plan, SolverReport
from tpplan.plan.sections import StagePlan
from tpplan.search.planner import solve_request
from tpplan.search.points.options import Batch, BuildModel, Cluster, ExampleInputs, Options, Progress
from tpplan.search.points.request import Request
from tpplan.search.points.trace_cache import Reuse, TraceCache, Traced
from tpplan.solvers.problem import Status
from tpplan.stages.cut_proof import difference
from tpplan.stages.cuts import Cut, cuts_of, stages_of

logger = logging.getLogger(__name__)

#: parts of a stage's step that happen once, however many micro-batches there are
_ONCE = frozenset({OPTIMIZER, TP_REDUCTION})
#: times that layers are moved between stages
MOST_MOVES = 4
#: what a plan of stages says of what was not searched
UNSEARCHED = (
    "micro-batches above one that is slower than the one below it",
    "other cuts than even ones and those that moving single layers leads to",
    "interleaved and zero-bubble schedules; stages of different tp or fsdp degrees",
    "tied weights over two stages, and experts divided over ranks of a stage",
)


def solve_stages(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    stages: int,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    micro_batch: int | None = None,
    options: Options,
    prove: bool = True,
    progress: Progress | None = None,
) -> PipelinePlan:
    """The fastest plan, as predicted, of a model in a number of stages on equal parts of all GPUs.

    Raises UsageError for a number of stages that does not divide the GPUs, or for which the model has too few places to
    be cut (with the reasons), ModelError, ProfileError, SolverError, IndivisibleError where no mesh has as many
    micro-batches as stages, and InfeasibleError where no plan fits.
    """
    if stages < 2 or cluster.gpus % stages:
        raise UsageError(
            f"--pp {stages} does not divide {cluster.gpus} GPUs: take one of "
            f"{', '.join(map(str, divisors(cluster.gpus)[1:]))}"
        )
    own, per_node = cluster.gpus // stages, cluster.gpus_per_node
    if own % per_node and per_node % own:
        raise UsageError(
            f"--pp {stages}: {own} GPUs a stage are neither a part of a node of {per_node} nor whole nodes: take "
            "another number of stages"
        )
    search = _Search(
        build_model=build_model,
        example_inputs=example_inputs,
        cluster=cluster,
        batch=Batch(global_batch, micro_batch, seq_len),
        options=replace(options, all_gpus=True, ep=1),
        count=stages,
        progress=progress,
    )
    return search.found(prove=prove)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Degrees:
    """The tp and FSDP degrees of a stage (0: to be decided), and the micro-batch."""

    tp: int
    micro_batch: int
    fsdp: int = 0


#: the numbers of layers of all stages
_Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The search for a plan of `count` stages; keeps the stages that it has solved."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    cluster: Cluster
    batch: Batch
    options: Options
    count: int
    progress: Progress | None
    reuse: Reuse = field(default_factory=Reuse)
    _solved: dict[tuple[_Degrees, StagePlan, bool], Plan | None] = field(default_factory=dict)

    # The whole model

    @cached_property
    def request(self) -> Request:
        """The request for the whole model."""
        return Request.of(self.build_model, self.example_inputs, self.cluster, self.batch, self.options, None)

    def whole(self, micro_batch: int) -> Traced:
        """The trace of the whole model."""
        return TraceCache(self.request.subject, self.reuse).really_traced(micro_batch)

    def cuts(self, micro_batch: int) -> list[Cut]:
        """The cuts after each layer but the last. Raises UsageError where too few are possible."""
        traced = self.whole(micro_batch)
        if traced.graph.loss is None:
            raise UsageError(
                "--pp: the last stage computes the loss, and there is none: define loss(outputs, inputs), or have the "
                "model return a scalar"
            )
        if traced.opaques.untouched:
            raise UsageError(f"--pp: the model's parameters must stay as they are: {traced.opaques.untouched}")
        every = cuts_of(traced.graph, traced.units)
        possible = [cut for cut in every if not cut.why_not]
        if len(possible) < self.count - 1:
            reasons = dict.fromkeys(f"after {cut.unit}: {cut.why_not}" for cut in every if cut.why_not)
            shown = "; ".join(list(reasons)[:3]) or "it has no repeated layers"
            raise UsageError(
                f"--pp {self.count}: the model can be cut at {len(possible)} places, and {self.count} stages need "
                f"{self.count - 1}: {shown}"
            )
        return possible

    def stages(self, sizes: _Sizes, micro_batch: int) -> list[StagePlan]:
        """The stages of some numbers of layers. `in_flight` is that of 1F1B: as many as stages from here on."""
        graph = self.whole(micro_batch).graph
        return stages_of(graph, self._chosen(sizes, micro_batch), range(self.count, 0, -1), micro_batch)

    def _chosen(self, sizes: _Sizes, micro_batch: int) -> list[Cut]:
        possible = self.cuts(micro_batch)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        return [possible[end - 1] for end in ends]

    # Degrees

    @property
    def gpus(self) -> int:
        """GPUs of a stage."""
        return self.cluster.gpus // self.count

    @property
    def of_stage(self) -> Cluster:
        """The GPUs of a stage, on their nodes."""
        per_node = min(self.cluster.gpus_per_node, self.gpus)
        return replace(self.cluster, gpus=self.gpus, gpus_per_node=per_node)

    def degrees(self) -> list[_Degrees]:
        """All tp degrees inside a node with all micro-batches of which there are as many as stages."""
        pinned = self.options.tp
        every = (pinned,) if pinned else tp_degrees(self.gpus, self.of_stage.gpus_per_node, across_nodes=False)
        found = []
        for tp in every:
            ranks = self.gpus // tp
            if self.gpus % tp or self.batch.global_batch % ranks:
                continue
            share = self.batch.global_batch // ranks
            own = (m for m in divisors(share) if self.batch.micro_batch in (None, m) and share // m >= self.count)
            found += [_Degrees(tp=tp, micro_batch=m, fsdp=self.options.fsdp or 0) for m in own]
        if not found:
            raise IndivisibleError(
                f"--pp {self.count}: no tp degree of {self.gpus} GPUs a stage leaves {self.count} micro-batches of a "
                f"global batch of {self.batch.global_batch} to each rank: take fewer stages or a larger batch"
            )
        return found

    # Solving

    def solved(self, degrees: _Degrees, stage: StagePlan, *, prove: bool) -> Plan | None:
        """The plan of a stage; None where none fits."""
        key = degrees, stage, prove
        if key not in self._solved:
            self._solved[key] = self._solve(degrees, stage, prove=prove)
        return self._solved[key]

    def _solve(self, degrees: _Degrees, stage: StagePlan, *, prove: bool) -> Plan | None:
        loss = self.options.loss if stage.last is None else _stand_in
        options = replace(self.options, stage=stage, loss=loss, tp=degrees.tp, fsdp=degrees.fsdp or None)
        batch = replace(self.batch, micro_batch=degrees.micro_batch)
        request = Request.of(self.build_model, self.example_inputs, self.of_stage, batch, options, None)
        try:
            return solve_request(request, options, self.reuse, prove=prove)
        except InfeasibleError as error:
            logger.info("stage %d, tp %d, micro-batch %d: %s", stage.index, degrees.tp, degrees.micro_batch, error)
            return None

    def tried(self, degrees: _Degrees, sizes: _Sizes) -> tuple[float, _Degrees]:
        """Seconds of a step by the first, second and last stage, and the degrees with the FSDP degree of the first."""
        stages = self.stages(sizes, degrees.micro_batch)
        first = self.solved(degrees, stages[0], prove=False)
        if first is None:
            return math.inf, degrees
        decided = replace(degrees, fsdp=first.mesh.shard)
        own = {0: first}
        for index in dict.fromkeys((1, self.count - 1)):
            plan = self.solved(decided, stages[index], prove=False)
            if plan is None:
                return math.inf, decided
            own[index] = plan
        plans = [own.get(index, own[1]) for index in range(self.count)]
        return self.predicted(plans, stages).step_time_s, decided

    def best(self, sizes: _Sizes) -> _Degrees:
        """The degrees with the fastest step. Raises InfeasibleError where none fits."""
        found: list[tuple[float, _Degrees]] = []
        every = self.degrees()
        for done, (_, own) in enumerate(groupby(every, key=attrgetter("tp"))):
            self._report("solve", done, len({degrees.tp for degrees in every}))
            of_tp = math.inf
            for degrees in own:
                found.append(self.tried(degrees, sizes))
                if of_tp < found[-1][0]:
                    break
                of_tp = found[-1][0]
        seconds, best = min(found)
        if seconds == math.inf:
            raise InfeasibleError(
                f"no plan of {self.count} stages fits: the first stage keeps the activations of {self.count} "
                "micro-batches. Take fewer stages, a smaller micro-batch, or leave --recompute to be decided"
            )
        return best

    def found(self, *, prove: bool) -> PipelinePlan:
        """The plan. Raises what `solve_stages` raises."""
        layers = len(self.cuts(min(degrees.micro_batch for degrees in self.degrees()))) + 1
        sizes = _even(layers, self.count)
        degrees = self.best(sizes)
        sizes, plans = self._moved(degrees, sizes)
        stages = self.stages(sizes, degrees.micro_batch)
        if prove:
            plans = []
            for stage in stages:
                self._report("prove", stage.index, self.count)
                plan = self.solved(degrees, stage, prove=True)
                if plan is None:
                    raise InfeasibleError(
                        f"stage {stage.index} fits unproven, and no plan of it that can be proven does: take a smaller "
                        "micro-batch, another --tp or fewer stages"
                    )
                plans.append(plan)
            self._check_cut(stages, degrees)
            self._report("prove", self.count, self.count)
        predicted = self.predicted(plans, stages)
        seconds = predicted.step_time_s
        return PipelinePlan(
            schema_version=SCHEMA_VERSION,
            schedule=Schedule.ONE_F_ONE_B,
            predicted=predicted,
            solver=SolverReport(
                name=plans[0].solver.name,
                status=Status.FEASIBLE,
                objective_s=seconds,
                bound_s=0.0,  # the stages' own bounds hold for these cuts alone
                gap=1.0,
                meshes_tried=len(self.degrees()),
                skipped={},
                unsearched=UNSEARCHED,
            ),
            stages=tuple(plans),
        )

    def _moved(self, degrees: _Degrees, sizes: _Sizes) -> tuple[_Sizes, list[Plan]]:
        """The stages, with layers moved from the slowest to the fastest while a step gets shorter."""
        plans = self._all(degrees, sizes)
        assert plans is not None, "the stages that were tried stand for all"
        seconds = self.predicted(plans, self.stages(sizes, degrees.micro_batch)).step_time_s
        for _ in range(MOST_MOVES):
            times = [plan.predicted.step_time_s for plan in plans]
            slowest, fastest = times.index(max(times)), times.index(min(times))
            if sizes[slowest] < 2 or slowest == fastest:
                break
            other = tuple(n - (i == slowest) + (i == fastest) for i, n in enumerate(sizes))
            moved = self._all(degrees, other)
            if moved is None:
                break
            now = self.predicted(moved, self.stages(other, degrees.micro_batch)).step_time_s
            if now >= seconds:
                break
            sizes, plans, seconds = other, moved, now
        return sizes, plans

    def _all(self, degrees: _Degrees, sizes: _Sizes) -> list[Plan] | None:
        """Plans of all stages, unproven; None where one does not fit. Middle stages with equally many layers differ in
        memory alone: where the earlier fits, its price is the later's."""
        stages = self.stages(sizes, degrees.micro_batch)
        found: list[Plan] = []
        like: dict[int, Plan] = {}
        for stage in stages:
            is_middle = 0 < stage.index < self.count - 1
            plan = like.get(sizes[stage.index]) if is_middle else None
            plan = plan or self.solved(degrees, stage, prove=False)
            if plan is None:
                return None
            if is_middle:
                like[sizes[stage.index]] = plan
            found.append(plan)
        return found

    def _check_cut(self, stages: Sequence[StagePlan], degrees: _Degrees) -> None:
        """Raises ModelError where a stage does not run its part of the whole model on the same values."""
        whole = self.whole(degrees.micro_batch).graph
        ends = [0, *(_end(whole, stage) for stage in stages[:-1]), len(whole.nodes)]
        for stage in stages:
            subject = replace(
                self.request.subject, stage=stage, loss=self.options.loss if stage.last is None else _stand_in
            )
            graph = TraceCache(subject, self.reuse).really_traced(degrees.micro_batch).graph
            own = range(ends[stage.index], ends[stage.index + 1])
            if problem := difference(whole, graph, stage, own):
                raise ModelError(f"the model in stages is not the model: {problem}; plan without --pp")

    # Time

    def predicted(self, plans: Sequence[Plan], stages: Sequence[StagePlan]) -> PipelinePrediction:
        """Seconds of a step of these stages, by the formula above."""
        steps = plans[0].batch.accumulation_steps
        each = [_seconds_of_a_micro_batch(plan, steps) for plan in plans]
        slowest = max(plan.predicted.step_time_s for plan in plans)
        bubble = sum(each) - max(each)
        crossing = [self.seconds_between(stage) for stage in stages[:-1]]
        # A micro-batch's activations and gradients wait at one link in each stage, and cross all while it fills.
        send = 2 * (steps * max(crossing) + sum(crossing))
        return PipelinePrediction(step_time_s=slowest + bubble + send, stage_s=slowest, bubble_s=bubble, send_s=send)

    def seconds_between(self, stage: StagePlan) -> float:
        """Seconds of sending a stage's tensors to the next: of two ranks that gather as much from each other."""
        crosses = (stage.index + 1) * self.gpus % self.cluster.gpus_per_node == 0
        pair = GroupShape(ranks=2, ranks_per_node=1 if crosses else 2)
        num_bytes = sum(math.prod(one.shape) * DTYPE_BYTES[one.dtype] for one in stage.sends)
        return self.request.profile.collective(Collective.ALL_GATHER, pair, 2.0 * num_bytes).seconds

    def _report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


def _stand_in(outputs: Any, _inputs: Mapping[str, Any]) -> Any:
    """The loss of a stage that is not the last: gradients of all that it sends come back."""
    return sum(tensor.sum() for tensor in outputs)


def _even(layers: int, count: int) -> _Sizes:
    """Layers in `count` parts that differ by at most one; the middle ones are larger."""
    each, rest = divmod(layers, count)
    order = sorted(range(count), key=lambda index: abs(2 * index - (count - 1)))
    larger = set(order[:rest])
    return tuple(each + (index in larger) for index in range(count))


def _end(graph: ModelGraph, stage: StagePlan) -> int:
    """The position after the last node of a stage's last layer."""
    assert stage.last is not None
    last = graph.nodes_by_module[stage.last][-1]
    return graph.nodes.index(last) + 1


def _seconds_of_a_micro_batch(plan: Plan, steps: int) -> float:
    """Seconds of one micro-batch of a stage."""
    times = plan.predicted.time_s
    once = sum(seconds for part, seconds in times.items() if part in _ONCE)
    if plan.mesh.replicate > 1 or plan.mesh.shard == 1:
        once += times.get(DATA_PARALLEL, 0.0)
    return max(0.0, plan.predicted.step_time_s - once) / steps

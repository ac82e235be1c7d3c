"""Traces a model, cuts it into stages, and solves each stage as a model of its own; keeps what it has solved."""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate

from tpplan.core.errors import InfeasibleError, TpplanError, UsageError
from tpplan.core.graph import enclosing, within
from tpplan.experts.expert_share import Division
from tpplan.layouts.assignment import master_bytes
from tpplan.layouts.build_space import NoLayoutError
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.sections.ranks import StagePlan, TensorPlan
from tpplan.search.best_first import NotFasterError
from tpplan.search.diagnose import no_layout
from tpplan.search.expert_degrees import divisions_of
from tpplan.search.models.cut_errors import cut_errors, loss_of_sent
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse, TraceCache, Traced
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.rank_memory import Held
from tpplan.search.pipelines.stage_loads import Loads, loads_of
from tpplan.search.pipelines.tied_weights import Resting
from tpplan.search.planner import solve_request
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.request import Request
from tpplan.stages.cuts import Cut, cuts_of, end_cuts_of, stages_of, tensors_of
from tpplan.trace.trace import called_layers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Degrees:
    """The tp and FSDP degrees of a stage (0: to be decided), the ranks that divide its experts, and the micro-batch.
    With `once` FSDP gathers weights and reduces gradients once a step, and a rank keeps both whole until then; else for
    every micro-batch. What crosses between stages is cut along dim `sliced` over tp; None: it crosses whole."""

    tp: int
    micro_batch: int
    fsdp: int = 0
    once: bool = False
    sliced: int | None = None
    ep: int = 1

    @property
    def fewest(self) -> Point:
        """The point of these degrees on as few GPUs as have them."""
        return Point(num_gpus=self.tp * self.ep, tp=self.tp, shard=self.ep, micro_batch=self.micro_batch, ep=self.ep)


@dataclass(frozen=True, kw_only=True)
class StageSolver:
    """Solves stages of a model; keeps traces, cuts and solved stages."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    cluster: Cluster
    batch: Batch
    options: Options
    reuse: Reuse = field(default_factory=Reuse)
    _solved: dict[Hashable, Plan | None] = field(default_factory=dict)
    _tried: dict[tuple[Degrees, int, StagePlan, Held], Plan | None] = field(default_factory=dict)
    #: seconds that no plan of a stage is below
    _slower: dict[tuple[Degrees, int, StagePlan, Held], float] = field(default_factory=dict)
    #: by pipeline: why the last of its stages without a plan has none, in words
    misses: dict[PipelineShape, str] = field(default_factory=dict)
    _cuts: dict[tuple[int, int], list[Cut]] = field(default_factory=dict)
    _stages: dict[tuple[int, tuple[Cut, ...]], list[StagePlan]] = field(default_factory=dict)
    _loads: dict[tuple[Point, int], Loads] = field(default_factory=dict)
    _why_no_layout: dict[Point, NoLayoutError | None] = field(default_factory=dict)
    _points: dict[int, PointSolver] = field(default_factory=dict)
    _divisions: dict[int, dict[int, Division]] = field(default_factory=dict)
    _sizes: dict[tuple[PipelineShape, Loads], Sizes] = field(default_factory=dict)

    def tracing_all(self) -> "StageSolver":
        """The solver that has solved nothing yet, and traces every graph: none is grown any more."""
        self.reuse.grows = False
        self.reuse.forget_grown()
        return StageSolver(
            build_model=self.build_model,
            example_inputs=self.example_inputs,
            cluster=self.cluster,
            batch=self.batch,
            options=self.options,
            reuse=self.reuse,
        )

    # The whole model

    @cached_property
    def request(self) -> Request:
        """The request for the whole model."""
        return Request.of(self.build_model, self.example_inputs, self.cluster, self.batch, self.options, None)

    def whole(self, micro_batch: int, ep: int = 1) -> Traced:
        """The whole model, whose experts `ep` ranks divide, as it was traced or as its graph was grown."""
        return self.points(ep).traces.traced(micro_batch)

    def has_grown_right(self, degrees: Degrees) -> bool:
        """True where the whole model's graph at some degrees, by which it was cut so far, is that of its trace."""
        traces = self.points(degrees.ep).traces
        known = traces.traced(degrees.micro_batch)
        return known.graph == traces.really_traced(degrees.micro_batch).graph

    def points(self, ep: int) -> PointSolver:
        """The points of the whole model, whose experts `ep` ranks divide."""
        if ep not in self._points:
            division = next((found[ep] for found in self._divisions.values() if ep in found), None)
            request = replace(self.request, subject=replace(self.request.subject, experts=division))
            self._points[ep] = PointSolver(request=request, traces=TraceCache(request.subject, self.reuse))
        return self._points[ep]

    def expert_degrees(self, micro_batch: int, most: int) -> list[int]:
        """The numbers of ranks, up to `most`, that may divide the model's experts; 1 where they need not. Raises
        UsageError for an asked number that the model does not allow."""
        if self.options.ep == 1:
            return [1]
        if micro_batch not in self._divisions:
            per_node = self.cluster.gpus_per_node
            self._divisions[micro_batch] = divisions_of(
                self.whole(micro_batch), self.options, per_node, self.options.ep or per_node
            )
        found = sorted(ep for ep in self._divisions[micro_batch] if ep <= most)
        return [1, *found] if self.options.ep is None else found

    def cuts(self, micro_batch: int, shape: PipelineShape, ep: int = 1) -> list[Cut]:
        """The cuts after each layer but the last, in the trace of a model whose experts `ep` ranks divide; where there
        are more stages than layers, also those before the first layer and after the last. Raises UsageError where too
        few are possible."""
        traced = self.whole(micro_batch, ep)
        if traced.graph.loss is None:
            raise UsageError(
                "--pp: the last stage computes the loss, and there is none: define loss(outputs, inputs), or have the "
                "model return a scalar"
            )
        if self.request.precision is Precision.BF16_AUTOCAST:
            raise UsageError(
                "--pp with --precision bf16-autocast: a schedule of stages runs backwards too, which autocast must not "
                "reach: take bf16-mixed"
            )
        if traced.opaques.untouched:
            raise UsageError(
                f"--pp: the model's parameters must stay as they are: {traced.opaques.untouched}; plan without --pp"
            )
        if (key := (micro_batch, ep)) not in self._cuts:
            self._cuts[key] = cuts_of(traced.graph, called_layers(traced.model, traced.graph))
        every = self._cuts[key]
        possible = [cut for cut in every if not cut.why_not]
        if len(every) < shape.count - 1:
            first, last = end_cuts_of(traced.graph, called_layers(traced.model, traced.graph))
            possible = [*first, *possible, *last]
        if len(possible) < shape.count - 1:
            reasons = dict.fromkeys(f"after {cut.unit}: {cut.why_not}" for cut in every if cut.why_not)
            shown = "; ".join(list(reasons)[:3]) or f"it has {len(every) + 1 if every else 'no'} repeated layers"
            raise UsageError(
                f"{shape.option}: the model can be cut at {len(possible)} places, and {shape.count} stages need "
                f"{shape.count - 1}: {shown}; {'take fewer stages' if possible else 'plan without --pp'}"
            )
        return possible

    def _chosen(self, shape: PipelineShape, sizes: Sizes, micro_batch: int) -> tuple[Cut, ...]:
        """The cuts between stages of some numbers of layers."""
        possible = self.cuts(micro_batch, shape)
        return tuple(possible[end - 1] for end in accumulate(sizes[:-1]))

    def crossing(self, shape: PipelineShape, sizes: Sizes, micro_batch: int) -> list[tuple[TensorPlan, ...]]:
        """The tensors that each stage but the last sends to the next for a micro-batch, where the stages have some
        numbers of layers."""
        graph = self.whole(micro_batch).graph
        return [tensors_of(graph, cut.unit) for cut in self._chosen(shape, sizes, micro_batch)]

    def stages(self, shape: PipelineShape, sizes: Sizes, micro_batch: int) -> list[StagePlan]:
        """The stages of some numbers of layers, each with one micro-batch in flight."""
        chosen = self._chosen(shape, sizes, micro_batch)
        key = micro_batch, chosen
        if key not in self._stages:
            self._stages[key] = stages_of(self.whole(micro_batch).graph, chosen, [1] * len(sizes), micro_batch)
        for one in {own for stage in self._stages[key] for own in stage.ties}:
            if len({index % shape.parts for index in one.stages}) < len(one.stages):
                raise UsageError(
                    f"{shape.option}: parameter {one.name} is read in stages {', '.join(map(str, one.stages))}, and "
                    "some of them are on the same GPUs, which would hold it twice: take one stage a GPU "
                    "(--virtual-stages 1)"
                )
        return self._stages[key]

    def why_no_layout(self, degrees: Degrees) -> NoLayoutError | None:
        """The decision of the whole model that pins leave no layout at a tp degree; None where all have one."""
        key = degrees.fewest
        if key not in self._why_no_layout:
            try:
                self.points(degrees.ep).priced(degrees.micro_batch, degrees.tp)
                self._why_no_layout[key] = None
            except NoLayoutError as error:
                self._why_no_layout[key] = error
        return self._why_no_layout[key]

    def no_layout(self, micro_batch: int, without: Mapping[int, NoLayoutError]) -> TpplanError:
        """The error where the model has no layout at any of the tp degrees; names the pins."""
        return no_layout(self.points(1), micro_batch, without)

    def loads(self, shape: PipelineShape, degrees: Degrees) -> Loads:
        """The least seconds of a micro-batch between each two places at which the model can be cut."""
        cuts = self.cuts(degrees.micro_batch, shape, degrees.ep)
        key = degrees.fewest, len(cuts)
        if key not in self._loads:
            known = [cut.unit for cut in self.cuts(degrees.micro_batch, shape)]
            assert known == [cut.unit for cut in cuts], "where a model may be cut does not depend on its experts' ranks"
            positions = tuple(cut.position for cut in cuts)
            self._loads[key] = loads_of(self.points(degrees.ep), degrees.fewest, positions)
        return self._loads[key]

    def sizes(self, shape: PipelineShape, degrees: Degrees) -> Sizes:
        """The layers of each stage that balance the ranks."""
        loads = self.loads(shape, degrees)
        key = shape, loads
        if key not in self._sizes:
            self._sizes[key] = loads.balanced(shape)
        return self._sizes[key]

    def even_floor(self, shape: PipelineShape, degrees: Degrees) -> float:
        """Seconds that no step at these degrees is below, whatever the cuts: the least compute and tp collectives of
        the whole model, evenly on all parts; and by 1F1B, where all other stages are waited for, as many micro-batches
        of waiting as an even pipeline has."""
        waiting = (shape.parts - 1) / self.steps(shape, degrees) if shape.is_one_f_one_b else 0.0
        return self.least_work_s(shape, degrees) / shape.parts * (1 + waiting)

    def least_work_s(self, shape: PipelineShape, degrees: Degrees) -> float:
        """Seconds that a step's work is not below, on one part after the other: the least compute and tp collectives
        of the whole model."""
        groups = self.gpus(shape).gpus // (degrees.tp * degrees.ep)
        return self.points(degrees.ep).floor(degrees.fewest) / groups

    def floor(self, shape: PipelineShape, degrees: Degrees) -> float:
        """Seconds that no step at these degrees is below with the stages that balance the ranks: the least compute and
        tp collectives of the stages, and the waiting while the pipeline fills and drains. No less than that of any
        cuts."""
        loads, steps = self.loads(shape, degrees), self.steps(shape, degrees)
        return max(self.even_floor(shape, degrees), loads.floor_s(self.sizes(shape, degrees), shape, steps))

    def bound(self, shape: PipelineShape, degrees: Degrees, least: float) -> float:
        """Seconds that no step at these degrees is below, whatever the cuts; where that is `least` or more, it may be
        more. Which stages balance the ranks best is known for one stage a rank alone."""
        even = self.even_floor(shape, degrees)
        return self.floor(shape, degrees) if shape.virtual_stages == 1 and even < least else even

    # A stage

    def steps(self, shape: PipelineShape, degrees: Degrees) -> int:
        """The micro-batches of a step."""
        return self.batch.global_batch // (self.gpus(shape).gpus // degrees.tp * degrees.micro_batch)

    def gpus(self, shape: PipelineShape) -> Cluster:
        """The GPUs of a part of the pipeline, on their nodes."""
        own = self.cluster.gpus // shape.parts
        return replace(self.cluster, gpus=own, gpus_per_node=min(self.cluster.gpus_per_node, own))

    def resting_bytes(self, stage: StagePlan, degrees: Degrees) -> tuple[float, float]:
        """About the bytes of a stage's parameters, gradients and states on a tp rank: those that FSDP divides, before
        it does, with the experts of all ranks, and those that stay whole."""
        optimizer, sharded, whole = optimizer_named(self.request.optimizer), 0.0, 0.0
        graph = self.whole(degrees.micro_batch, degrees.ep).graph
        absent, tied = frozenset(stage.absent), {one.name for one in stage.ties}
        for source in graph.parameters:
            is_absent = not absent.isdisjoint(enclosing(source.label))
            if (is_absent and source.label not in tied) or source.label in stage.blank:
                continue
            value = graph.values[source.result]
            width = master_bytes(self.request.precision, value.dtype)
            gradients = value.num_elements * width
            sharded += source.ep * (gradients + value.num_elements * optimizer.bytes_per_element(width))
            if degrees.once:
                whole += gradients
            else:
                sharded += source.ep * gradients
        return sharded / degrees.tp, whole / degrees.tp

    def solved(
        self,
        degrees: Degrees,
        shape: PipelineShape,
        stage: StagePlan,
        beside: Held,
        *,
        prove: bool,
        is_plain: bool,
        resting: Resting,
    ) -> Plan | None:
        """The plan of a stage beside which its rank holds something, and which lays some parameters out as asked for;
        None where none fits. Where it is open whether FSDP shards layers over shard x tp, it is decided, or with
        `is_plain` as for `tried`."""
        key = degrees, shape.parts, stage, beside, prove, is_plain, resting
        if key not in self._solved:
            solve = self._plainly if is_plain else self._openly
            self._solved[key] = self._solve(degrees, shape, stage, beside, partial(solve, prove=prove), resting)
        return self._solved[key]

    def tried(
        self, degrees: Degrees, shape: PipelineShape, stage: StagePlan, beside: Held, cutoff_s: float = math.inf
    ) -> Plan | None:
        """The unproven plan of a stage, of a graph that may be grown, without the reasons of what stays whole, and
        without layers that FSDP shards over shard x tp unless none fits else; None where none fits. Raises
        NotFasterError where it takes longer than `cutoff_s`."""
        key = degrees, shape.parts, stage, beside
        if key not in self._tried:
            if cutoff_s <= self._slower.get(key, -math.inf):
                raise NotFasterError
            try:
                self._tried[key] = self._solve(degrees, shape, stage, beside, partial(self._briefly, cutoff_s=cutoff_s))
            except NotFasterError:
                self._slower[key] = cutoff_s
                raise
        plan = self._tried[key]
        if plan is not None and plan.predicted.step_time_s > cutoff_s:
            raise NotFasterError
        return plan

    def decided(
        self, degrees: Degrees, shape: PipelineShape, stage: StagePlan, beside: Held, cutoff_s: float
    ) -> Degrees | None:
        """The degrees with the FSDP degree that a stage chooses; None where the stage does not fit. Raises
        NotFasterError where it takes longer than `cutoff_s`."""
        plan = self.tried(degrees, shape, stage, beside, cutoff_s)
        if plan is None:
            return None
        found = replace(degrees, fsdp=plan.mesh.shard)
        self._tried[found, shape.parts, stage, beside] = plan
        return found

    def _solve(
        self,
        degrees: Degrees,
        shape: PipelineShape,
        stage: StagePlan,
        beside: Held,
        solve: Callable[[Request, Options], Plan],
        resting: Resting | None = None,
    ) -> Plan | None:
        """The plan of a stage beside which its rank holds something, made by `solve` from the stage's request and
        options; None where none fits."""
        options = replace(
            self.options,
            loss=self.options.loss if stage.last is None else loss_of_sent,
            tp=degrees.tp,
            fsdp=degrees.fsdp or None,
            ep=degrees.ep if self._has_experts(stage, degrees) else 1,
            whole_gradients=degrees.once,
            gathered_once=degrees.once,
            stage=replace(stage, in_flight=beside.in_flight, beside_bytes=beside.beside_bytes),
            sharded_beside_bytes=beside.sharded_beside_bytes,
            like_stages=beside.like,
            allows=resting.beside(self.options.allows) if resting is not None else self.options.allows,
        )
        batch = replace(self.batch, micro_batch=degrees.micro_batch)
        request = Request.of(self.build_model, self.example_inputs, self.gpus(shape), batch, options, None)
        try:
            return solve(request, options)
        except InfeasibleError as error:
            logger.info("stage %d, tp %d, micro-batch %d: %s", stage.index, degrees.tp, degrees.micro_batch, error)
            self.misses[shape] = f"at tp {degrees.tp} and micro-batch {degrees.micro_batch} {error}"
            return None

    def _has_experts(self, stage: StagePlan, degrees: Degrees) -> bool:
        """True for a stage that has some of the experts that ranks divide."""
        division = self.points(degrees.ep).request.subject.experts
        own = (name for name, _ in division.calls) if division is not None else ()
        return any(not any(within(name, module) for module in stage.absent) for name in own)

    def _openly(self, request: Request, options: Options, *, prove: bool) -> Plan:
        return solve_request(request, options, self.reuse, prove=prove)

    def _plainly(self, request: Request, options: Options, *, prove: bool) -> Plan:
        """A plan without layers that FSDP shards over shard x tp where these are not asked for, unless none fits."""
        if request.fsdp_over_tp is None and options.tp != 1:
            with suppress(InfeasibleError):
                return self._openly(replace(request, fsdp_over_tp=False), options, prove=prove)
        return self._openly(request, options, prove=prove)

    def _briefly(self, request: Request, options: Options, *, cutoff_s: float) -> Plan:
        brief = replace(request, is_explained=False, is_checked=False, cutoff_s=cutoff_s)
        return self._plainly(brief, options, prove=False)

    def check_cut(self, stages: Sequence[StagePlan], shape: PipelineShape, micro_batch: int) -> None:
        """Raises ModelError where a stage does not run its part of the whole model on the same values, and UsageError
        where stages of a rank write the same buffer."""
        for _, error in cut_errors(self.points(1).traces, stages, shape.parts, micro_batch):
            raise error

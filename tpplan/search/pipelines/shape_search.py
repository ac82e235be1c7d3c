"""The search for a plan of one shape of pipeline: all degrees and micro-batches, the ways to cross between stages, and
the plan of the best.

All degrees and micro-batches are tried with the cuts that balance what the ranks take at least
(tpplan.search.pipelines.stage_loads); layers then move from the slowest rank to the fastest while that makes a step
shorter, and the stages of the best are proven.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from tpplan.core.errors import IndivisibleError, InfeasibleError, UsageError
from tpplan.core.mesh import divisors, tp_degrees
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule, why_unscheduled
from tpplan.plan.plan import SCHEMA_VERSION, Plan, SolverReport
from tpplan.search.best_first import NotFasterError
from tpplan.search.expert_degrees import ACROSS
from tpplan.search.pipelines.estimates import ESTIMATED
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.stage_plans import MOST_HASTENED, AllStages
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.pipelines.step_seconds import dims_to_slice, predicted
from tpplan.search.points.options import Options, Progress
from tpplan.solvers.problem import Status

logger = logging.getLogger(__name__)

#: times that layers are moved between stages
MOST_MOVES = 4
#: what a plan says of pipelines that were left out without a bound
TOO_SLOW = (
    f"several stages on a GPU where their first plans are slower by over {MOST_HASTENED:.0%} and what recomputing a "
    "layer takes"
)
#: what a plan of stages says of what was not searched
UNSEARCHED = (
    ESTIMATED,
    "ways to cross between stages but the one whose stages are fastest where memory does not matter",
    "other cuts than those that balance the ranks' least times, and those that moving single layers leads to",
    "FSDP over shard x tp while degrees and cuts are compared",
    "stages of different tp or fsdp degrees",
)
#: what a plan of stages says of graphs that were not traced
GROWN = "micro-batches from the third on were compared as if the code did what it does at the smallest two"
MISLED = "other numbers of stages and schedules may have been compared by graphs that differ from the code's"


#: seconds of a step and its degrees; without degrees, one that was left out as it is slower than another
Found = tuple[float, Degrees | None]
LEFT_OUT: Found = (math.inf, None)


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for a plan of one shape."""

    solver: StageSolver
    shape: PipelineShape
    progress: Progress | None

    def degrees(self) -> list[Degrees]:
        """All tp degrees inside a node, numbers of ranks that may divide experts, and micro-batches of which the
        schedule can run as many as there are."""
        solver, shape = self.solver, self.shape
        own, batch, options = solver.gpus(shape), solver.batch, solver.options
        every = (options.tp,) if options.tp else tp_degrees(own.gpus, own.gpus_per_node, across_nodes=False)
        found, why = [], ""
        for tp in every:
            ranks = own.gpus // tp
            if own.gpus % tp or batch.global_batch % ranks:
                continue
            share = batch.global_batch // ranks
            for size in divisors(share):
                if batch.micro_batch in (None, size):
                    why = why_unscheduled(shape.schedule, shape.parts, shape.virtual_stages, share // size)
                    if not why:
                        found.append(Degrees(tp=tp, micro_batch=size, fsdp=options.fsdp or 0))
        if not found:
            raise IndivisibleError(
                f"{shape.option}: no tp degree of {own.gpus} GPUs a stage leaves {shape.parts} or more micro-batches "
                f"of a global batch of {batch.global_batch} to each rank that the schedule can run: take fewer stages "
                f"or a larger batch{f' ({why})' if why else ''}"
            )
        return list(self._divided(found))

    def _divided(self, degrees: Sequence[Degrees]) -> Iterator[Degrees]:
        """Yields the degrees with each number of ranks that may divide experts. Raises UsageError for an asked number
        that the model or the ranks of a stage do not allow."""
        gpus, asked = self.solver.gpus(self.shape).gpus, self.solver.options.ep
        is_none = True
        for tp, own in groupby(degrees, key=attrgetter("tp")):
            every, ranks = list(own), gpus // tp
            for ep in self.solver.expert_degrees(every[0].micro_batch, ranks):
                if ranks % ep == 0 and every[0].fsdp % ep == 0:
                    is_none = False
                    yield from (replace(one, ep=ep) for one in every)
        if is_none:
            raise UsageError(
                f"{self.shape.option} --ep {asked}: {gpus} GPUs a stage have no tp degree that leaves a multiple of "
                f"{asked} ranks{', of which --fsdp is one' if self.solver.options.fsdp else ''}: take fewer stages, or "
                "another --ep"
            )

    def tried(self, degrees: Degrees, least: float = math.inf) -> tuple[float, Degrees]:
        """Seconds of a step, and the degrees with the FSDP degree that one stage chooses, or the next one that fits.
        Raises NotFasterError where a step is known to take `least` or longer."""
        sizes = self.solver.sizes(self.shape, degrees)
        decided = AllStages.of(self.solver, self.shape, sizes, degrees).decided(least)
        if decided is None:
            return math.inf, degrees
        ranks = self.solver.gpus(self.shape).gpus // degrees.tp
        every = [decided.fsdp] if degrees.fsdp else [shard for shard in divisors(ranks) if shard >= decided.fsdp]
        for shard in (shard for shard in every if shard % degrees.ep == 0):
            own = replace(decided, fsdp=shard)
            plans = AllStages.of(self.solver, self.shape, sizes, own).plans(least)
            if plans is not None:
                return self.seconds(plans), own
        return math.inf, decided

    def seconds(self, plans: list[Plan]) -> float:
        """Seconds of a step of some stages."""
        return predicted(plans, self.shape, self.solver.cluster).step_time_s

    def floors(self, least: float) -> dict[Degrees, float]:
        """By degrees at which the model has a layout the seconds that no step is below: whatever the cuts, and where
        these are below `least` with those that balance the ranks. Raises UsageError where the model has too few places
        to be cut, InfeasibleError where pins leave it no layout at any."""
        every = self.degrees()
        self.solver.cuts(min(degrees.micro_batch for degrees in every), self.shape)  # whether there are enough
        why_not = {degrees: self.solver.why_no_layout(degrees) for degrees in every}
        floors = {own: self.solver.even_floor(self.shape, own) for own, why in why_not.items() if why is None}
        if not floors:
            without = {degrees.tp: error for degrees, error in why_not.items() if error is not None}
            raise self.solver.no_layout(every[0].micro_batch, without)
        return floors | {own: self.solver.floor(self.shape, own) for own, even in floors.items() if even < least}

    def bound(self, least: float) -> float:
        """Seconds that no step of this shape is below, whatever the degrees and cuts; where that is `least` or more, it
        may be more. Infinitely many where it has no degrees."""
        with suppress(IndivisibleError):
            every = [own for own in self.degrees() if self.solver.why_no_layout(own) is None]
            return min((self.solver.bound(self.shape, own, least) for own in every), default=math.inf)
        return math.inf

    @property
    def deferring(self) -> "Search | None":
        """The search for a plan with a zero-bubble schedule in this one's place; None where no such can run."""
        shape = replace(self.shape, is_zero_bubble=True)
        is_run = not why_not_scheduled(shape.schedule, shape, self.solver.options)
        return replace(self, shape=shape) if is_run else None

    @property
    def ways_to_reduce(self) -> tuple[bool, ...]:
        """Whether weights are gathered and gradients reduced once a step, and where that is not pinned nor weights'
        gradients are deferred, for every micro-batch."""
        return (True,) if self.solver.options.whole_gradients or self.shape.is_zero_bubble else (True, False)

    def fastest_way(self, degrees: Degrees, least: float) -> Found:
        """The step with the fastest way to cross between stages, whole or as slices, unless it takes `least` or longer:
        the way whose stages are fastest where memory does not matter, or the next one that fits."""
        sizes = self.solver.sizes(self.shape, degrees)
        ways: list[tuple[float, int, Degrees]] = []
        for place, dim in enumerate(self.dims_to_slice(degrees)):
            own = replace(degrees, sliced=dim)
            every = AllStages.of(self.solver, self.shape, sizes, own)
            floor = every.floor(least)
            if floor < least or least == math.inf:
                filling = 2 * sum(every.between_s) if self.shape.is_zero_bubble else 0.0  # else the floor has it
                ways.append((floor + filling, -place, own))
        found = LEFT_OUT
        for *_, own in sorted(ways):
            found = self._unless_slower(own, least)
            if found[0] < math.inf or found[1] is None:
                break
        return found

    def unfit(self) -> InfeasibleError:
        """The error where no plan fits at any degrees."""
        missed = f": {self.solver.misses[self.shape]}" if self.shape in self.solver.misses else ""
        return InfeasibleError(
            f"no plan of {self.shape.option} fits{missed}. The first stages keep the activations of several "
            "micro-batches: take another number of stages, a smaller micro-batch, more GPUs or memory, or leave "
            "--recompute to be decided"
        )

    def _unless_slower(self, degrees: Degrees, least: float) -> Found:
        """The step at these degrees, unless it takes `least` or longer."""
        try:
            found = self.tried(degrees, least)
        except NotFasterError:
            return LEFT_OUT
        return found if found[0] < least or found[0] == math.inf else LEFT_OUT

    def dims_to_slice(self, degrees: Degrees) -> list[int | None]:
        """Dims of which tp ranks may send slices, and None."""
        sizes = self.solver.sizes(self.shape, degrees)
        return dims_to_slice(self.solver.crossing(self.shape, sizes, degrees.micro_batch), degrees.tp)

    def found(self, *, prove: bool, degrees: Degrees) -> PipelinePlan | None:
        """The plan at degrees that are the best; None where these were compared by graphs that the code does not have.
        Raises what `solve_stages` raises."""
        sizes, _ = self._moved(degrees)
        every = AllStages.of(self.solver, self.shape, sizes, degrees)
        self._report("prove", 0, 1)
        reuse, known = self.solver.reuse, len(self.solver.reuse.ungrowing)
        is_right = self.solver.has_grown_right(degrees)
        plans = every.own_plans(prove=prove) if is_right else None
        if reuse.grows and (not is_right or len(reuse.ungrowing) > known):
            return None
        if plans is None:
            raise InfeasibleError(
                f"no plan of {self.shape.option}: stages taken for alike fit, but one of them, solved by itself, does "
                "not, or has no plan that can be proven: take a smaller micro-batch, another --tp or fewer stages"
            )
        if prove:
            self.solver.check_cut(every.stages, self.shape, degrees.micro_batch)
        self._report("prove", 1, 1)
        times = predicted(plans, self.shape, self.solver.cluster)
        seconds = times.step_time_s
        plan = PipelinePlan(
            schema_version=SCHEMA_VERSION,
            schedule=self.shape.schedule,
            virtual_stages=self.shape.virtual_stages,
            predicted=times,
            solver=SolverReport(
                name=plans[0].solver.name,
                status=Status.FEASIBLE,
                objective_s=seconds,
                bound_s=0.0,  # the stages' own bounds hold for these cuts alone; whoever asked knows of others
                gap=1.0,
                meshes_tried=len(self.degrees()),
                skipped={},
                unsearched=(*UNSEARCHED, *self._left_out()),
            ),
            stages=tuple(plans),
        )
        plan.check(self.shape.option)
        return plan

    def _left_out(self) -> Iterator[str]:
        """Yields lines on what is left out of this shape's plans."""
        if self.shape.virtual_stages > 1:
            yield TOO_SLOW
        own = self.solver.gpus(self.shape)
        if self.solver.options.tp is None and own.gpus > own.gpus_per_node:
            yield "tp degrees across nodes"
        if self.solver.options.ep is None and any(degrees.ep > 1 for degrees in self.degrees()):
            yield ACROSS
        reuse = self.solver.reuse
        if reuse.grown:
            yield GROWN
        if not reuse.grows:
            yield MISLED

    def _moved(self, degrees: Degrees) -> tuple[Sizes, list[Plan]]:
        """The stages, with layers moved from the slowest rank to the fastest while a step gets shorter."""
        sizes, parts = self.solver.sizes(self.shape, degrees), self.shape.parts
        plans = AllStages.of(self.solver, self.shape, sizes, degrees).plans()
        assert plans is not None, "they have been tried"
        seconds = self.seconds(plans)
        for _ in range(MOST_MOVES):
            times = [sum(plan.predicted.step_time_s for plan in plans[rank::parts]) for rank in range(parts)]
            slowest, fastest = times.index(max(times)), times.index(min(times))
            source = max(range(slowest, len(sizes), parts), key=sizes.__getitem__)
            target = min(range(fastest, len(sizes), parts), key=sizes.__getitem__)
            if sizes[source] < 2 or slowest == fastest:
                break
            other = tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))
            moved = AllStages.of(self.solver, self.shape, other, degrees).plans()
            if moved is None:
                break
            now = self.seconds(moved)
            if now >= seconds:
                break
            sizes, plans, seconds = other, moved, now
        return sizes, plans

    def _report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


def why_not_scheduled(schedule: Schedule | None, shape: PipelineShape, options: Options) -> str:
    """Why a schedule that is asked for cannot run pipelines of a shape, with what to do; "" where it can, or none is
    asked for."""
    if schedule is Schedule.ZERO_BUBBLE and options.compile:
        return (
            f"--schedule {schedule} with --compile: torch.compile joins the products of weights' gradients, which the "
            "schedule defers, to the rest of a backward: leave one of the two out"
        )
    if schedule not in (None, shape.schedule):
        return (
            f"--schedule {schedule} with --virtual-stages {shape.virtual_stages}: {Schedule.ONE_F_ONE_B} takes 1, "
            f"{Schedule.INTERLEAVED} 2 or more"
        )
    return ""

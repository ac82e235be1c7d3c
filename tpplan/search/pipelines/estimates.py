"""About how long a step takes at some degrees, before the model is cut: by the whole model's ILP on the GPUs of a part.

All parts together run the whole model, each a share of it on GPUs of its own. So the ILP of the whole model on the GPUs
of one part has all of a step's work one after the other, and its optimum over the number of parts is the mean of what a
part takes. Its memory row is that of a part: what all layers have together counts as one of equal parts of it, and the
activations as often as the fullest rank keeps them. The loads of the parts (tpplan.search.pipelines.stage_loads) say
how uneven the stages are, and the schedule how long they wait for each other. As that takes all ranks for as full as
the fullest, an estimate is no bound: scripts/evidence/estimates.py says how near it is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from tpplan.core.errors import SolverError
from tpplan.core.mesh import divisors
from tpplan.costs.step.formulate import Formulation
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.rank_memory import most_in_flight
from tpplan.search.pipelines.stage_loads import least_step_s
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.pipelines.step_seconds import dims_to_slice, seconds_of_sending, sent_s, simulated_s, split_times
from tpplan.search.points.mesh_points import Point
from tpplan.solvers.problem import Problem

#: of the best step found, how long an estimate may be for degrees to be worth solving
WORTH = 1.03
#: what a plan of stages says of degrees that were left out by an estimate
ESTIMATED = (
    f"degrees at which a step takes over {WORTH - 1:.0%} longer, with a zero-bubble schedule longer at all, by an "
    "estimate from the whole model"
)
#: of a backward, the products of weights' gradients
_WEIGHTS = 0.5


def worth(shape: PipelineShape) -> float:
    """How many times the best step found an estimate may be long for the stages of a shape to be solved.

    With a zero-bubble schedule it may be no longer than that step: the estimate takes all products of weights'
    gradients for deferred, and none of 44 steps of Llama 3 8B took less than estimated (scripts/evidence/estimates.py).
    """
    return 1.0 if shape.is_zero_bubble else WORTH


@dataclass(frozen=True, slots=True, order=True)
class Estimate:
    """About the seconds of a step, and of its work on one part after the other, infinitely many where nothing seems to
    fit; and the FSDP degree."""

    seconds: float
    work_s: float
    fsdp: int = 0
    #: of the work, what a step does once
    once_s: float = 0.0


NO_ESTIMATE = Estimate(math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """The ILPs of the whole model on the GPUs of a part, by mesh and micro-batch and by whether FSDP gathers weights
    and reduces gradients once a step; with the optimum of their relaxations without a memory row."""

    solver: StageSolver
    _formulations: dict[tuple[Point, bool], Formulation] = field(default_factory=dict)
    _unlimited_s: dict[tuple[Point, bool], float] = field(default_factory=dict)

    def formulation(self, point: Point, *, is_once: bool) -> Formulation:
        """The ILP, without units over shard and tp unless these are asked for, as stages are compared."""
        if (key := (point, is_once)) not in self._formulations:
            made = self.solver.points(point.ep).formulate(point)
            over_tp = bool(made.setting.fsdp_over_tp)
            setting = replace(made.setting, whole_gradients=is_once, gathered_once=is_once, fsdp_over_tp=over_tp)
            self._formulations[key] = replace(made, setting=setting)
        return self._formulations[key]

    def unlimited_s(self, point: Point, *, is_once: bool) -> float:
        """The seconds of a step's work where memory does not matter."""
        if (key := (point, is_once)) not in self._unlimited_s:
            problem = self.formulation(point, is_once=is_once).unlimited
            self._unlimited_s[key] = self.optimum_s(problem, point.ep, is_relaxed=True)
        return self._unlimited_s[key]

    def optimum_s(self, problem: Problem, ep: int, *, is_relaxed: bool, cutoff: float = math.inf) -> float:
        """The optimum of a problem, or of its relaxation, in seconds; infinite where it has none, and 0 where the time
        limit does not suffice."""
        try:
            found = self.solver.points(ep).solver_of(problem, cutoff=cutoff, is_relaxed=is_relaxed)
        except SolverError:
            return 0.0
        return math.inf if found.bound is None else found.bound


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates of a shape at some degrees. What crosses between stages is sliced where it can be, whatever the degrees
    say. From `most_s` seconds on, an estimate says no more than that."""

    whole: WholeModel
    shape: PipelineShape
    degrees: Degrees
    most_s: float = math.inf

    def unlimited(self) -> Estimate:
        """By the linear relaxation, where memory does not matter."""
        return self._of_best_fsdp(lambda point: self.whole.unlimited_s(point, is_once=self.degrees.once))

    def relaxed(self) -> Estimate:
        """By the linear relaxation."""
        return self._of_best_fsdp(lambda point: self._optimum_s(point, is_relaxed=True))

    def of_ilp(self, relaxed: Estimate) -> Estimate:
        """By the ILP itself, at the FSDP degree of its relaxation."""
        cutoff = relaxed.work_s * self.most_s / relaxed.seconds if self.most_s < math.inf else math.inf
        point = self._point(relaxed.fsdp)
        return max(relaxed, self._estimate(point, self._optimum_s(point, is_relaxed=False, cutoff=cutoff)))

    def _of_best_fsdp(self, optimum_s: Callable[[Point], float]) -> Estimate:
        """At the FSDP degree that seems best: from the largest on, until a smaller one is no better."""
        best = NO_ESTIMATE
        for point in map(self._point, reversed(self._fsdp_degrees)):
            found = self._estimate(point, optimum_s(point), best)
            if found.seconds >= best.seconds:
                break
            best = found
        return best

    @property
    def _fsdp_degrees(self) -> list[int]:
        ranks = self._solver.gpus(self.shape).gpus // self.degrees.tp
        own = [self.degrees.fsdp] if self.degrees.fsdp else divisors(ranks)
        return [fsdp for fsdp in own if fsdp % self.degrees.ep == 0]

    def _point(self, fsdp: int) -> Point:
        gpus, own = self._solver.gpus(self.shape).gpus, self.degrees
        return Point(num_gpus=gpus, tp=own.tp, shard=fsdp, micro_batch=own.micro_batch, ep=own.ep)

    def _optimum_s(self, point: Point, *, is_relaxed: bool, cutoff: float = math.inf) -> float:
        """The seconds of a step's work on one part after the other, where a part has the memory of a rank."""
        formulation = self.whole.formulation(point, is_once=self.degrees.once)
        in_flight = max(most_in_flight(self.shape, self._steps, with_deferred=True)) / self.shape.virtual_stages
        row = formulation.peaks.of_a_part(self.shape.parts, in_flight)
        problem = replace(formulation.unlimited, resources=(row,))
        return self.whole.optimum_s(problem, point.ep, is_relaxed=is_relaxed, cutoff=cutoff)

    def _estimate(self, point: Point, work_s: float, best: Estimate = NO_ESTIMATE) -> Estimate:
        """The estimate at a point, or that of `best` where neither stages nor what happens once take less."""
        if work_s == math.inf:
            return replace(NO_ESTIMATE, fsdp=point.shard)
        least_s = self._solver.least_work_s(self.shape, self.degrees)
        work_s = max(work_s, least_s)
        # What FSDP does once a step and the optimizer: all but kernels and tp collectives, without recomputation.
        once_s = max(0.0, self.whole.unlimited_s(point, is_once=True) - least_s) if self.degrees.once else 0.0
        if once_s >= best.once_s and work_s - once_s >= best.work_s - best.once_s:
            return replace(best, fsdp=point.shard)
        parts = self.shape.parts
        seconds = self._with_waiting((work_s - once_s) / parts, once_s / parts)
        return Estimate(seconds, work_s, point.shard, once_s)

    @property
    def _solver(self) -> StageSolver:
        return self.whole.solver

    @property
    def _steps(self) -> int:
        return self._solver.steps(self.shape, self.degrees)

    def _with_waiting(self, mean_s: float, once_s: float) -> float:
        """Seconds of a step whose parts take a mean of some seconds for its micro-batches, and some more once."""
        shape, steps = self.shape, self._steps
        each = [mean_s * shape.parts * share / steps for share in self._shares]
        stage_s = [steps * seconds for seconds in each]
        if shape.is_one_f_one_b:
            return least_step_s(stage_s, each, shape) + sent_s(self._between, steps) + once_s
        least_s = least_step_s(stage_s, each, shape) + once_s
        if least_s >= self.most_s:
            return least_s
        times = [split_times(seconds, 0.0, send_s) for seconds, send_s in zip(each, self._between, strict=True)]
        if shape.is_zero_bubble:
            weights = [_WEIGHTS * one.backward_s for one in times]
            times = [
                replace(one, backward_s=one.backward_s - own, weights_s=own)
                for one, own in zip(times, weights, strict=True)
            ]
        return simulated_s(times, [once_s / shape.virtual_stages] * shape.count, shape, steps)

    @cached_property
    def _shares(self) -> list[float]:
        """The part of the model's load that each stage has."""
        loads = self._solver.loads(self.shape, self.degrees).of_stages(self._solver.sizes(self.shape, self.degrees))
        total = sum(loads)
        return [load / total for load in loads] if total else [1 / len(loads)] * len(loads)

    @cached_property
    def _between(self) -> list[float]:
        """Seconds of sending what each stage gives to the next."""
        solver, shape, degrees = self._solver, self.shape, self.degrees
        crossing = solver.crossing(shape, solver.sizes(shape, degrees), degrees.micro_batch)
        dim = dims_to_slice(crossing, degrees.tp)[-1]
        sends = [[replace(one, sliced=dim) for one in tensors] for tensors in crossing]
        return [
            seconds_of_sending(index, own, degrees.tp, shape, solver.cluster) for index, own in enumerate([*sends, []])
        ]

"""A profile whose fitted numbers come from runs of plans on the machine itself.

A profile may have two numbers that no benchmark gives (tpplan.machine.tables.Fitted): by how much matmuls in training
are slower than alone, and by how much kernels are slower beside a collective. The first is fitted to any run, the
second to at least two, on a GPU, where collectives run beside kernels. What is minimized is the mean squared log of
predicted over measured step time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tpplan.costs.prediction.step_time import step_time
from tpplan.machine.fit_tables import rms
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import Fitted
from tpplan.plan.plan import Compile, Plan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.subject import Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster

MATMULS, OVERLAP = "matmul_slowdown", "overlap_slowdown"
#: name of a fitted number -> what it is
FITTED = {
    MATMULS: "time of matmuls in training, relative to the profile's",
    OVERLAP: "extra time of kernels beside a collective, as a share of the collective's",
}
#: the range of the first, from twice as fast to four times as slow; that of the second is 0 to 1, in steps
SLOWDOWNS = (0.5, 4.0)
_OVERLAP_STEPS = 200
#: points of the first search for the least error, and how often the interval around the best point is then cut
_POINTS, _CUTS = 9, 16
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan, its measured step time, and how far measurements of it are apart, relative to the time."""

    plan: Plan
    measured_s: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile with fitted numbers, and each run's predicted step time in seconds before and after. `is_at_the_end`
    where the slowdown of matmuls is at an end of SLOWDOWNS, so that what differs is something else."""

    profile: HardwareProfile
    is_at_the_end: bool
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]


def calibrated(runs: Sequence[Run], spec: ModelSpec, profile: HardwareProfile, *, name: str) -> Calibration:
    """Fits a profile's numbers to runs on the machine.

    The residual that the profile gives them is sqrt(sum of squared log errors / (n - k)) for n runs and k numbers. With
    no more runs than numbers any can be met, which says nothing of other plans: it is then what the profile was off
    by before. It is at least the spread of a run's measurements.

    Raises PlanMismatchError for a plan that does not fit the model, and ProfileError for what the profile lacks.
    """
    reuse = Reuse()
    predictions = [_prediction(run, spec, profile, reuse) for run in runs]
    fits_overlap = profile.device_type == "cuda" and len(runs) > 1
    overlaps = [i / _OVERLAP_STEPS for i in range(_OVERLAP_STEPS + 1)] if fits_overlap else [profile.overlap_slowdown]

    def best(slowdown: float) -> tuple[float, float]:
        """The least mean squared error, and the overlap that has it; times are linear in the overlap."""
        ends = [[predicted(_with(profile, {MATMULS: slowdown, OVERLAP: end})) for end in (0.0, 1.0)]
                for predicted in predictions]  # fmt: skip

        def error(overlap: float) -> float:
            times = zip(ends, runs, strict=True)
            return fmean(
                math.log((none + (all_ - none) * overlap) / run.measured_s) ** 2 for (none, all_), run in times
            )

        return min((error(overlap), overlap) for overlap in overlaps)

    slowdown = _least(lambda tried: best(tried)[0])
    error, overlap = best(slowdown)
    numbers = {MATMULS: slowdown} | ({OVERLAP: overlap} if fits_overlap else {})
    before_s = [predicted(profile) for predicted in predictions]
    if len(runs) > len(numbers):
        residual = math.sqrt(error * len(runs) / (len(runs) - len(numbers)))
    else:
        residual = rms([math.log(before / run.measured_s) for before, run in zip(before_s, runs, strict=True)])
    residual = max(residual, *(run.spread for run in runs))
    found = _with(profile, numbers, residual=residual, runs=len(runs))
    facts = ", ".join(f"plan {run.plan.hash[:12]} {run.measured_s:.4g} s" for run in runs)
    note = f"Numbers in `fitted` come from steps on the machine itself: {facts}."
    return Calibration(
        profile=replace(found, name=name, notes=(*found.notes, note)),
        is_at_the_end=any(abs(math.log(slowdown / end)) < 0.01 for end in SLOWDOWNS),
        before_s=tuple(before_s),
        after_s=tuple(predicted(found) for predicted in predictions),
    )


def _with(
    profile: HardwareProfile, numbers: Mapping[str, float], *, residual: float = 0.0, runs: int = 1
) -> HardwareProfile:
    """The profile with some of its fitted numbers replaced."""
    made = (
        Fitted(name=name, value=round(value, 4), residual=round(residual, 4), runs=runs, what=FITTED[name])
        for name, value in numbers.items()
    )
    kept = (number for number in profile.fitted or () if number.name not in numbers)
    return replace(profile, fitted=(*made, *kept))


def _prediction(
    run: Run, spec: ModelSpec, profile: HardwareProfile, reuse: Reuse
) -> Callable[[HardwareProfile], float]:
    """A function of the profile: predicted seconds of a step of the run's plan."""
    plan = run.plan
    subject = Subject.of_plan(plan, spec.build_model, spec.example_inputs, spec.loss, profile=profile)
    assignment = TraceCache(subject, reuse).traced(plan.batch.micro_batch).fitting(plan)
    per_node, known = plan.cluster.gpus_per_node, dict[tuple[float, float], float]()

    def predicted(changed: HardwareProfile) -> float:
        numbers = changed.matmul_slowdown, changed.overlap_slowdown
        if numbers not in known:
            known[numbers] = sum(step_time(assignment, changed, per_node, reuse.executor).time_s.values())
        return known[numbers]

    return predicted


def _least(function: Callable[[float], float]) -> float:
    """Where in SLOWDOWNS a function is least: the best of some points, then a golden-section search around it."""
    first, last = map(math.log, SLOWDOWNS)
    step = (last - first) / (_POINTS - 1)
    at = min((first + step * i for i in range(_POINTS)), key=lambda tried: function(math.exp(tried)))
    low, high = max(first, at - step), min(last, at + step)
    for _ in range(_CUTS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if function(math.exp(left)) < function(math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def solved_again(plan: Plan, spec: ModelSpec, profile: HardwareProfile) -> Plan:
    """The plan that is best with another profile, on the same GPUs with the same batch and pins; unproven, for
    comparison alone. Raises InfeasibleError where none fits."""
    per_node = min(plan.cluster.gpus_per_node, profile.gpus_per_node)
    return solve(
        spec.build_model,
        spec.example_inputs,
        cluster=Cluster(gpus=plan.mesh.num_gpus, gpus_per_node=per_node, profile=profile),
        global_batch=plan.batch.global_batch,
        seq_len=plan.batch.seq_len if spec.has_length else None,
        loss=spec.loss,
        unused_outputs=spec.unused_outputs,
        precision=plan.precision,
        optimizer=plan.optimizer,
        all_gpus=True,
        compile=plan.compile is not Compile.NONE,
        memory_limit_bytes=plan.predicted.memory_limit_bytes,
        pins=plan.request.pins if plan.request is not None else {},
        prove=False,
    )


def chooses_alike(one: Plan, other: Plan) -> bool:
    """True where two plans make the same choices: mesh, micro-batch, layouts, recomputation, and how FSDP shards."""
    return _choices(one) == _choices(other)


def _choices(plan: Plan) -> tuple[object, ...]:
    layouts = plan.parameter_plans(), plan.boundary_plans(), plan.size_plans(), plan.buffer_plans()
    return plan.mesh, plan.batch, *layouts, plan.recomputed_modules(), plan.resharded_units(), plan.units_over_tp()

"""Seconds of a step of an assignment by part, and with its peak memory the prediction that a plan carries.

    predicted = price(assignment, profile, gpus_per_node, executor).predicted

`solve`, `price`, `explain`, `size` and `verify` all print these numbers. The time is the objective of the ILP
(tpplan.costs.step.objective) in which every decision has one strategy; the memory is replayed op by op
(tpplan.costs.prediction.memory_replay). No ILP decides on modules that a plan recomputes beside its layers, parts of a
layer or modules around several: their time is added.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.costs.error_bars import NONE, Residuals
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.collectives_of_step import collectives
from tpplan.costs.prediction.deferred_gradients import deferred
from tpplan.costs.prediction.memory_ledger import Peak
from tpplan.costs.prediction.memory_replay import memory
from tpplan.costs.prediction.misaligned import misaligned_matmuls
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.kernels import flop_of
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import StrategyTime, Work
from tpplan.costs.tied_space import tied_space
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import OPAQUE, has_rule
from tpplan.machine.profile import Collective, Estimate, HardwareProfile
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.parts import (
    ACCUMULATION,
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    FSDP_COPIES,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import CollectivePlan, Prediction
from tpplan.plan.sections.ranks import NOTHING_DEFERRED, DeferredPlan

#: most products of a backward for one of the forward: one for the gradient of either operand
_BACKWARD_PRODUCTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step by part, the error of their sum, and whether a time was extrapolated."""

    time_s: Mapping[str, float]
    error_s: float
    is_extrapolated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The sections of a plan that depend on the profile, and its collectives. `op_seconds` are the kernel seconds of
    each op in a step, by its name. `deferred` is what a stage may defer. `notes` tell of costs that are
    guesses, and of matmuls that a size makes slow."""

    predicted: Prediction
    collectives: tuple[CollectivePlan, ...]
    op_seconds: Mapping[str, float]
    unruled_ops: Mapping[str, float]
    opaque_seconds: Mapping[str, float]
    notes: tuple[str, ...]
    deferred: DeferredPlan = NOTHING_DEFERRED


def price(
    assignment: Assignment,
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    *,
    memory_limit_bytes: float | None = None,
    may_defer: bool = False,
) -> Priced:
    """Everything that an assignment costs on a machine. The limit, by default the profile's memory, changes nothing but
    the prediction's own limit. Of a stage that `may_defer` weights' gradients these are priced, too. Raises
    ProfileError for what the profile does not cover."""
    formulation = formulated(
        assignment, profile, gpus_per_node, executor, memory_limit_bytes=memory_limit_bytes, is_tied=True
    )
    lifetimes = Lifetimes(assignment, executor)
    step, peak, seconds = time_of(assignment, formulation), memory(lifetimes), _OpSeconds(formulation)
    predicted = Prediction(
        step_time_s=float(sum(step.time_s.values())),
        step_time_error_s=step.error_s,
        is_extrapolated=step.is_extrapolated,
        time_s=step.time_s,
        peak_memory_bytes=peak.num_bytes,
        slack_bytes=float(profile.slack_bytes),
        memory_limit_bytes=formulation.setting.memory_limit_bytes,
        memory_bytes=peak.memory_bytes,
        peak_during=peak.during,
        peak_module=peak.module or ROOT,
        model_flop=model_flop(assignment.graph, executor)
        * assignment.accumulation_steps
        * assignment.mesh.data_parallel,
        peak_flop_per_s=profile.peak_flop_per_s,
    )
    return Priced(
        predicted=predicted,
        collectives=collectives(lifetimes),
        op_seconds=seconds.by_name,
        unruled_ops=seconds.of_unruled_ops(),
        opaque_seconds=seconds.of_opaque_modules(),
        notes=(*misaligned_matmuls(lifetimes, profile, predicted.step_time_s), *guesses(lifetimes)),
        deferred=deferred(assignment, formulation, executor) if may_defer else NOTHING_DEFERRED,
    )


def model_flop(graph: ModelGraph, executor: Executor) -> float:
    """FLOP of a micro-batch's matmuls and attention in forward and backward, without recomputation.

    Backward takes as much as forward for each matrix operand that a gradient reaches, for attention twice as much.
    """
    total = 0.0
    for op in graph.ops:
        flop = flop_of(executor.whole(graph, op).forward)
        operands = (graph.values[name] for name in op.operands)
        reached = sum(value.carries_gradient and len(value.shape) > 1 for value in operands)
        total += flop * (1 + min(reached, _BACKWARD_PRODUCTS))
    return total


def with_peak(predicted: Prediction, peak: Peak) -> Prediction:
    """A prediction with another peak of memory."""
    return replace(
        predicted,
        peak_memory_bytes=peak.num_bytes,
        memory_bytes=peak.memory_bytes,
        peak_during=peak.during,
        peak_module=peak.module or ROOT,
    )


def step_time(assignment: Assignment, profile: HardwareProfile, gpus_per_node: int, executor: Executor) -> StepTime:
    """Seconds of a step of an assignment by part. Raises ProfileError for what the profile does not cover."""
    return time_of(assignment, formulated(assignment, profile, gpus_per_node, executor, is_tied=True))


def formulated(
    assignment: Assignment,
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    *,
    memory_limit_bytes: float | None = None,
    kin: Mapping[str, str] | None = None,
    is_tied: bool = False,
) -> Formulation:
    """The ILP in which the assignment is the only choice; its objective is the step's time. `kin` is as in Setting.
    With `is_tied` decisions that cost the same are one (tpplan.costs.tied_space); else each is on its own."""
    setting = Setting(
        profile=profile,
        gpus_per_node=gpus_per_node,
        precision=assignment.precision,
        optimizer=assignment.optimizer,
        memory_limit_bytes=profile.memory_bytes if memory_limit_bytes is None else memory_limit_bytes,
        slack_bytes=profile.slack_bytes,
        accumulation_steps=assignment.accumulation_steps,
        units=assignment.layers,
        whole_gradients=assignment.whole_gradients,
        gathered_once=assignment.gathered_once,
        treatments=assignment.treatments,
        units_over_tp=assignment.over_tp,
        kin=kin,
    )
    num_gpus, is_compiled = assignment.mesh.num_gpus, assignment.is_compiled
    space = tied_space(assignment) if is_tied else assignment.space
    priced = price_space(space, profile, gpus_per_node, executor, is_compiled=is_compiled, num_gpus=num_gpus)
    return Formulation(priced=priced, mesh=assignment.mesh, setting=setting)


def guesses(lifetimes: Lifetimes) -> tuple[str, ...]:
    """Assumptions about ops whose behaviour is unknown, each after the pattern of its module."""
    graph = lifetimes.graph
    found = (
        f"{pattern_of(graph, graph.nodes[position].module) or ROOT}: {guess}"
        for position, execution in lifetimes.executions.items()
        for guess in execution.guesses
    )
    return tuple(dict.fromkeys(found))


def time_of(assignment: Assignment, formulation: Formulation) -> StepTime:
    """Seconds of a step by part; `formulation` is that of the assignment alone (formulated)."""
    everything = dict.fromkeys(formulation.space.members, 0)
    assert formulation.unlimited.is_consistent(everything), "the assignment's layouts disagree along an edge"
    time: Counter[str] = Counter()
    for term in formulation.unlimited.objective:
        time[term.name] += term.value(everything)  # type: ignore[assignment]
    time_s = {name: float(seconds) for name, seconds in time.items()}
    error, is_extrapolated = _error(formulation, time_s)
    found = StepTime(time_s=time_s, error_s=error, is_extrapolated=is_extrapolated)
    return _with_rerun(found, assignment, formulation) if assignment.recomputed_within else found


def _with_rerun(step: StepTime, assignment: Assignment, formulation: Formulation) -> StepTime:
    """The time plus that of modules recomputed beside layers, with the same relative error."""
    lifetimes = Lifetimes(assignment, formulation.priced.executor)
    times = {name: formulation.table[own][0] for name, own in formulation.space.classes.items()}
    again = rerun(lifetimes, times, formulation.setting.profile.issue_s, assignment.recomputed_within)
    steps, time_s = assignment.accumulation_steps, dict(step.time_s)
    time_s[RECOMPUTATION] = time_s.get(RECOMPUTATION, 0.0) + steps * again.compute.seconds
    time_s[TENSOR_PARALLEL] = time_s.get(TENSOR_PARALLEL, 0.0) + steps * again.collectives.seconds
    if again.waited_s:
        time_s[ISSUE] = time_s.get(ISSUE, 0.0) + steps * again.waited_s
    return StepTime(
        time_s=time_s,
        error_s=step.error_s * sum(time_s.values()) / sum(step.time_s.values()),
        is_extrapolated=step.is_extrapolated or again.compute.extrapolated or again.collectives.extrapolated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Time that recomputation adds to a micro-batch on a rank: kernels and collectives of the forward that runs again,
    and seconds that a GPU waits for the CPU to issue them."""

    compute: Estimate
    collectives: Estimate
    waited_s: float


def rerun(
    lifetimes: Lifetimes, times: Mapping[str, StrategyTime], issue_s: float | None, modules: Collection[str]
) -> Rerun:
    """The time of recomputing those of the recomputed modules that are in `modules`. `times` are by decision; `issue_s`
    are seconds that the CPU takes to issue a kernel, None where nothing waits for it."""
    runs = [(run, names) for run, names in lifetimes.run_again() if run.module in modules]
    calls = [[times[name].again[run.mode] for name in names] for run, names in runs]
    every = [work for call in calls for work in call]
    return Rerun(
        compute=sum((work.compute for work in every), Estimate.zero()),
        collectives=sum((work.collectives for work in every), Estimate.zero()),
        waited_s=sum(_waited_s(call, issue_s) for call in calls),
    )


def _waited_s(works: list[Work], issue_s: float | None) -> float:
    """Seconds that issuing a call's kernels takes longer than running them; 0 where it does not."""
    running_s = sum((work.compute + work.collectives).seconds for work in works)
    return 0.0 if issue_s is None else max(0.0, issue_s * sum(work.kernels for work in works) - running_s)


def _error(formulation: Formulation, time: Mapping[str, float]) -> tuple[float, bool]:
    """The error of a step's time in seconds (tpplan.costs.error_bars), and whether a time was extrapolated. Parts that
    are bytes times a rate have the rate's relative error."""
    profile = formulation.setting.profile
    times = [own for (own,) in formulation.table.values()]
    repeats = formulation.objective.repeats()
    numbers = map(len, formulation.space.members.values())
    found = [own.residuals * number for own, number in zip(times, numbers, strict=True)]
    found += [again.residuals for again in repeats]
    residuals = sum(found, NONE) * formulation.setting.accumulation_steps
    estimates = [e for t in times for e in (t.forward, t.backward, t.forward_collectives, t.backward_collectives)]
    estimates += [estimate for again in repeats for estimate in (again.compute, again.collectives)]
    extrapolated = any(e.extrapolated for e in estimates)
    moved, step = profile.memory_bound(num_bytes=BUCKET_BYTES), formulation.objective.optimizer_issue()
    if profile.device_type == "cuda" and step.seconds < time.get(OPTIMIZER, 0.0):
        step = Estimate.zero()  # the GPU takes longer
    moving_s = sum(time.get(part, 0.0) for part in (FSDP_COPIES, ACCUMULATION, OPTIMIZER))
    residuals += Residuals(
        memory=max(0.0, moving_s - step.seconds) * moved.relative_error,
        launches=time.get(ISSUE, 0.0) * profile.launch.relative_error + step.error_s,
    )
    data_axis = Axis.SHARD if formulation.mesh.shard > 1 else Axis.REPLICATE
    for part, axis in {DATA_PARALLEL: data_axis, TP_REDUCTION: Axis.TP}.items():
        if time.get(part, 0.0) > 0 and formulation.mesh.size(axis) > 1:
            bucket = formulation.objective.seconds_per_byte(Collective.ALL_REDUCE, axis)
            error = time[part] * bucket.relative_error
            residuals += Residuals(tp_collectives=error) if axis is Axis.TP else Residuals(data_collectives=error)
            extrapolated |= bucket.extrapolated
    if formulation.groups.over_tp.given:
        extrapolated |= formulation.objective.seconds_per_byte(Collective.ALL_GATHER, Axis.SHARD_TP).extrapolated
    tp_s = sum(time.get(part, 0.0) for part in (TENSOR_PARALLEL, TP_REDUCTION, EXPERT_PARALLEL))
    return residuals.combined(profile, sum(time.values()) - tp_s), extrapolated


class _OpSeconds:
    """Kernel seconds of single ops in a step."""

    def __init__(self, formulation: Formulation) -> None:
        self.graph = formulation.space.graph
        steps, classes = formulation.setting.accumulation_steps, formulation.space.classes
        seconds = {
            name: float((own.forward + own.backward).seconds * steps) for name, (own,) in formulation.table.items()
        }
        self.by_name = {op.name: seconds[classes[op.name]] for op in self.graph.ops}

    def of_unruled_ops(self) -> dict[str, float]:
        """Seconds by op without a rule, which runs whole although it reads tensors that carry gradients."""
        found: Counter[str] = Counter()
        for op in self.graph.ops:
            is_unruled = not (op.is_pointwise or has_rule(op.target)) and op.target != OPAQUE
            if is_unruled and any(self.graph.values[name].carries_gradient for name in op.operands):
                found[op.target] += self.by_name[op.name]  # type: ignore[assignment]
        return dict(sorted(found.items()))

    def of_opaque_modules(self) -> dict[str, float]:
        """Seconds by name of a module that runs whole."""
        found: Counter[str] = Counter()
        for op in self.graph.ops:
            if op.target == OPAQUE:
                found[op.module] += self.by_name[op.name]  # type: ignore[assignment]
        return dict(found)

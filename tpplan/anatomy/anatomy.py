"""`anatomy`: from a plan and its model to what its step is drawn from."""

from tpplan.anatomy.timeline import timeline
from tpplan.core.errors import PlanMismatchError
from tpplan.core.units import format_bytes, format_seconds
from tpplan.costs.prediction.memory_replay import course
from tpplan.costs.prediction.step_time import formulated
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.typecheck import Mistyped
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.model_fingerprint import check_parameters
from tpplan.plan.plan import Plan
from tpplan.plan.step_anatomy import Anatomy, Moment, Timeline
from tpplan.search.models.subject import BuildModel, ExampleInputs, Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.trace.trace import Loss

#: relative difference up to which numbers count as those of the plan
TOLERANCE = 1e-6


def anatomy(
    plan: Plan,
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    profile: HardwareProfile,
    loss: Loss | None = None,
    reuse: Reuse | None = None,
) -> Anatomy:
    """The plan's step pulled apart, without curves; the model, its inputs, loss and profile are those of the plan.

    Raises ModelError, ProfileError for what the profile does not cover, and PlanMismatchError where the plan does not
    fit the model.
    """
    subject = Subject.of_plan(plan, build_model, example_inputs, loss, profile=profile)
    traces = TraceCache(subject, reuse or Reuse())
    assignment, executor = _assignment(plan, traces), traces.reuse.executor
    formulation = formulated(assignment, profile, plan.cluster.gpus_per_node, executor)
    found, peaks = timeline(assignment, formulation), course(assignment, executor)
    moments = tuple(Moment(memory_bytes=p.memory_bytes, during=p.during, module=p.module) for p in peaks)
    return Anatomy(timeline=found, moments=moments, problem=_difference(plan, found, moments, profile))


def _assignment(plan: Plan, traces: TraceCache) -> Assignment:
    traced = traces.traced(plan.batch.micro_batch)
    named = traced.model.named_parameters(remove_duplicate=False)
    check_parameters(plan, {name: (tuple(weight.shape), weight.requires_grad) for name, weight in named})
    assignment = traced.assignment_of(plan)
    if isinstance(assignment, Mistyped):
        raise PlanMismatchError(f"the plan does not fit the model: {assignment.message}")
    return assignment


def _difference(plan: Plan, found: Timeline, moments: tuple[Moment, ...], profile: HardwareProfile) -> str:
    """In what the timeline and the memory differ from the plan's predictions, and why that may be."""
    peak = max(moment.num_bytes for moment in moments)
    rows = [
        (found.end_s, plan.predicted.step_time_s, format_seconds, "a step of"),
        (peak, plan.predicted.peak_memory_bytes, format_bytes, "a peak of"),
    ]
    said = [
        f"{name} {text_of(own)} here, {text_of(planned)} in the plan"
        for own, planned, text_of, name in rows
        if abs(own - planned) > TOLERANCE * max(own, planned)
    ]
    if not said:
        return ""
    why = "made by another version of tpplan, or changed since"
    if profile.fingerprint != plan.cluster.profile_fingerprint:
        why = f"made with another version of {plan.cluster.profile}"
    return f"{'; '.join(said)}: the plan was {why}"

"""`anatomy`: from a plan and its model to what its step is drawn from."""

from tpplan.anatomy.timeline import timeline
from tpplan.core.units import format_bytes, format_seconds
from tpplan.costs.prediction.memory_replay import course
from tpplan.costs.prediction.step_time import formulated
from tpplan.machine.profile import HardwareProfile
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
    assignment, executor = traces.traced(plan.batch.micro_batch).fitting(plan), traces.reuse.executor
    formulation = formulated(assignment, profile, plan.cluster.gpus_per_node, executor)
    found, peaks = timeline(assignment, formulation), course(assignment, executor)
    moments = tuple(Moment(memory_bytes=p.memory_bytes, during=p.during, module=p.module) for p in peaks)
    return Anatomy(timeline=found, moments=moments, problem=_difference(plan, found, moments, profile))


def _difference(plan: Plan, found: Timeline, moments: tuple[Moment, ...], profile: HardwareProfile) -> str:
    """The step time and the peak where they differ from the plan's predictions, and why that may be; "" where both are
    the same."""
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

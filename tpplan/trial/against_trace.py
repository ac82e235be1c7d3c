"""A plan held against a trace of a training run that it was applied to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpplan.costs.prediction.step_time import step_time
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.subject import Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.trial.chrome_trace import Trace
from tpplan.trial.turns import in_measured_parts
from tpplan.trial.worst_predicted import Row, collective_rows, op_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds of a step: measured and predicted, by part as (measured, predicted), by kind of collective and by op."""

    steps: int
    step_time_s: float
    predicted_s: float
    parts: Mapping[str, tuple[float, float]]
    collectives: tuple[Row, ...]
    ops: tuple[Row, ...]


def against_trace(plan: Plan, path: Path, spec: ModelSpec, profile: HardwareProfile) -> Comparison:
    """Compares a plan's times, priced with a profile, with one rank's trace.

    Raises UsageError for a file that is no trace of whole steps, PlanMismatchError for a plan that does not fit the
    model, and ProfileError for what the profile lacks.
    """
    trace = Trace.load(path)
    subject = Subject.of_plan(plan, spec.build_model, spec.example_inputs, spec.loss, profile=profile)
    traces = TraceCache(subject, Reuse())
    assignment = traces.traced(plan.batch.micro_batch).fitting(plan)
    per_node, executor = plan.cluster.gpus_per_node, traces.reuse.executor
    measured = trace.parts(is_tp=plan.mesh.tp > 1)
    predicted = in_measured_parts(step_time(assignment, profile, per_node, executor).time_s)
    return Comparison(
        steps=trace.steps,
        step_time_s=sum(measured.values()),
        predicted_s=sum(predicted.values()),
        parts={part: (seconds, predicted[part]) for part, seconds in measured.items()},
        collectives=tuple(collective_rows(trace, plan, profile)),
        ops=tuple(op_rows(trace, assignment, profile, per_node, executor)),
    )

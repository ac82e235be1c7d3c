"""The step of a plan of stages over time: which part of the pipeline runs what when, by a simulation of its schedule.

Times of forward and backward are those by which plans of stages are priced (tpplan.search.pipelines.step_seconds). 1F1B
waits for what it sends, as torch's schedule does; an interleaved one computes meanwhile.
"""

from collections.abc import Iterator, Sequence

from tpplan.machine.profile import HardwareProfile
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.step_anatomy import StageRun, StageTimeline, StageWork
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.step_seconds import exposed_s, predicted, seconds_between, seconds_once, times_of
from tpplan.search.points.options import Cluster
from tpplan.stages.schedule import Run, runs_of


def stage_timeline(plan: PipelinePlan, profile: HardwareProfile | None) -> StageTimeline:
    """The step of the plan on the machine of a profile; without sending where that is None."""
    steps, shape = plan.batch.accumulation_steps, PipelineShape.of(plan)
    times = [
        times_of(own, shape, steps, send_s)
        for own, send_s in zip(plan.stages, _sending(plan, shape, profile), strict=True)
    ]
    is_waiting = plan.schedule is Schedule.ONE_F_ONE_B
    runs = list(runs_of(shape.orders(steps), times, waits_for_sending=is_waiting))
    return StageTimeline(runs=(*_work(runs), *_once(plan, runs)), has_sending=profile is not None)


def _sending(plan: PipelinePlan, shape: PipelineShape, profile: HardwareProfile | None) -> Iterator[float]:
    """Yields the seconds in which each stage sends to the next."""
    cluster = _cluster(plan, shape, profile) if profile is not None else None
    for own in plan.stages:
        stage = own.stage if cluster is not None else None
        yield 0.0 if stage is None or cluster is None else seconds_between(stage, own.mesh.tp, shape, cluster)


def _cluster(plan: PipelinePlan, shape: PipelineShape, profile: HardwareProfile) -> Cluster:
    """The GPUs of all stages on their nodes. A stage's plan names the GPUs of a node that are its own alone; whether
    stages share nodes follows from what the plan says of sending."""
    per_node = (plan.stages[0].cluster.gpus_per_node, min(profile.gpus_per_node, plan.num_gpus))
    clusters = [Cluster(gpus=plan.num_gpus, gpus_per_node=own, profile=profile) for own in per_node]
    return min(clusters, key=lambda own: abs(predicted(plan.stages, shape, own).send_s - plan.predicted.send_s))


def _work(runs: Sequence[Run]) -> Iterator[StageRun]:
    """Yields forwards and backwards, and the sending of what they give."""
    for run in runs:
        stage, work, micro_batch = run.action
        yield StageRun(
            part=run.rank,
            stage=stage,
            work=work,
            micro_batch=micro_batch,
            start_s=run.start_s,
            seconds=run.end_s - run.start_s,
        )
        if run.sent_s > run.sends_from_s:
            yield StageRun(
                part=run.rank,
                stage=stage,
                work=StageWork.SENDING,
                micro_batch=micro_batch,
                start_s=run.sends_from_s,
                seconds=run.sent_s - run.sends_from_s,
            )


def _once(plan: PipelinePlan, runs: Sequence[Run]) -> Iterator[StageRun]:
    """Yields what each stage does once a step, after the last action of its ranks."""
    for part in range(plan.parts):
        end_s = max(run.sent_s for run in runs if run.rank == part)
        for stage in range(part, len(plan.stages), plan.parts):
            own = plan.stages[stage]
            seconds = seconds_once(own) + exposed_s(own, PipelineShape.of(plan))
            yield StageRun(
                part=part, stage=stage, work=StageWork.ONCE, micro_batch=None, start_s=end_s, seconds=seconds
            )
            end_s += seconds

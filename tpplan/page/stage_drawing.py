"""The step of a plan of stages as lanes, two for each part of the pipeline: what it runs, and what it sends."""

from collections.abc import Iterable, Iterator

from tpplan.core.units import format_seconds
from tpplan.page.step_drawing import HEIGHT, TICKS, WIDTH, Lanes, Shape, StepDrawing
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.report.words import plural
from tpplan.plan.step_anatomy import StageRun, StageTimeline, StageWork

_COLOURS = {
    StageWork.FORWARD: ("blue", "sky"),
    StageWork.BACKWARD: ("orange", "yellow"),
    StageWork.WEIGHTS: ("green", "green"),
    StageWork.SENDING: ("red", "red"),
    StageWork.ONCE: ("grey", "grey"),
}
#: most rectangles that are drawn one by one; of more, those of one colour are one shape
MOST_SHAPES = 3000
#: relative difference of two times that are said to be the same
_SAME = 0.005


def stage_drawing(timeline: StageTimeline, plan: PipelinePlan) -> StepDrawing:
    """The drawing of the timeline of a plan's step."""
    shown = [run for run in timeline.runs if run.seconds]
    works = [work for work in StageWork if any(run.work is work for run in shown)]
    end_s = timeline.end_s
    return StepDrawing(
        sentences=tuple(_sentences(timeline, plan)),
        legend=tuple((colour, name) for work in works for colour, name in _named(work)),
        windows=(
            Lanes(
                title="The step",
                spans=(),
                lanes=tuple(_lanes(shown, end_s, plan)),
                ticks=tuple((format_seconds(end_s * i / TICKS), 100.0 * i / TICKS) for i in range(TICKS + 1)),
            ),
        ),
    )


def _named(work: StageWork) -> Iterator[tuple[str, str]]:
    """Yields the colours of a kind of work, with what they are."""
    even, odd = _COLOURS[work]
    if even == odd:
        yield even, str(work)
    else:
        yield even, f"{work}, micro-batches 0, 2, 4, ..."
        yield odd, f"{work}, 1, 3, 5, ..."


def _sentences(timeline: StageTimeline, plan: PipelinePlan) -> Iterator[str]:
    """Yields how long each part works and waits, and how the drawn step differs from the predicted one."""
    end_s, predicted = timeline.end_s, plan.predicted
    for part in range(plan.parts):
        busy = sum(run.seconds for run in timeline.runs if run.part == part and run.work is not StageWork.SENDING)
        yield (
            f"{_part_name(part, plan)}: at work for {format_seconds(busy)}, and waits {format_seconds(end_s - busy)} "
            f"({(end_s - busy) / end_s if end_s else 0.0:.1%}) for other stages."
        )
    if not timeline.has_sending:
        yield "Sending between stages is not drawn: the plan's profile is not known here."
    if abs(end_s - predicted.step_time_s) > _SAME * predicted.step_time_s:
        yield (
            f"Drawn are {format_seconds(end_s)}, by running the schedule action by action; the plan's step, "
            f"{format_seconds(predicted.step_time_s)}, is the sum that plans are compared by."
        )


def _part_name(part: int, plan: PipelinePlan) -> str:
    """`stages 0 and 2 on GPUs 0-3`."""
    stages, first = [str(i) for i in range(part, len(plan.stages), plan.parts)], part * plan.ranks_per_stage
    last = first + plan.ranks_per_stage - 1
    gpus = f"GPU {first}" if last == first else f"GPUs {first}-{last}"
    return f"{'Stage' if len(stages) == 1 else 'Stages'} {', '.join(stages)} on {gpus}"


def _lanes(runs: list[StageRun], end_s: float, plan: PipelinePlan) -> Iterator[tuple[str, tuple[Shape, ...]]]:
    """Yields (name, shapes) of the lanes of each part."""
    is_merged = len(runs) > MOST_SHAPES
    for part in range(plan.parts):
        own = [run for run in runs if run.part == part]
        work = [run for run in own if run.work is not StageWork.SENDING]
        sends = [run for run in own if run.work is StageWork.SENDING]
        yield _part_name(part, plan), tuple(_shapes(work, end_s, is_merged=is_merged))
        if sends:
            yield "sends", tuple(_shapes(sends, end_s, is_merged=is_merged))


def _shapes(runs: Iterable[StageRun], end_s: float, *, is_merged: bool) -> Iterator[Shape]:
    """Yields the rectangles of some runs, each by itself or those of one colour together."""
    groups: dict[object, list[StageRun]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.work, _colour(run)) if is_merged else index, []).append(run)
    for own in groups.values():
        path = "".join(_rectangle(run, end_s) for run in own)
        title = _title(own[0]) if len(own) == 1 else f"{own[0].work}: {plural(len(own), 'time')}"
        yield Shape(colour=_colour(own[0]), path=path, title=title)


def _colour(run: StageRun) -> str:
    return _COLOURS[run.work][(run.micro_batch or 0) % 2]


def _rectangle(run: StageRun, end_s: float) -> str:
    left, width = (WIDTH * seconds / end_s for seconds in (run.start_s, run.seconds))
    return f"M{left:.2f} 0h{width:.2f}v{HEIGHT}h-{width:.2f}z"


def _title(run: StageRun) -> str:
    of = f" of micro-batch {run.micro_batch}" if run.micro_batch is not None else ""
    return f"{run.work}{of}, stage {run.stage}: {format_seconds(run.seconds)}"

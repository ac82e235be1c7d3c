"""A step's timeline as lanes, one for each stream: the last micro-batch as a whole, and one of its layers in each pass.

A lane is 1000 wide and 10 high; times become places on it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from tpplan.core.graph import enclosing
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import format_seconds
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    DATA_PARALLEL,
    FSDP_COPIES,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import Pass, Plan
from tpplan.plan.report.words import plural
from tpplan.plan.step_anatomy import Segment, Stream, Timeline

WIDTH = 1000
HEIGHT = 10
#: name and colour of work that runs beside kernels, and so is no part of the step's time
HIDDEN = "data-parallel collectives that kernels hide"
COLOURS = {
    COMPUTE: "blue",
    RECOMPUTATION: "sky",
    TENSOR_PARALLEL: "orange",
    TP_REDUCTION: "orange",
    DATA_PARALLEL: "red",
    HIDDEN: "green",
    FSDP_COPIES: "pink",
    ACCUMULATION: "pink",
    OPTIMIZER: "grey",
    ISSUE: "yellow",
}
#: ticks of a time axis after the first, evenly spread
TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rectangles of one colour as an SVG path, and what they are."""

    colour: str
    path: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named stretch of a drawing, from and over a percentage of its width."""

    name: str
    left: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A window of time: its title, named stretches above the lanes, (stream, shapes) of each lane, and (text, percent)
    of ticks below."""

    title: str
    spans: tuple[Span, ...]
    lanes: tuple[tuple[str, tuple[Shape, ...]], ...]
    ticks: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrawing:
    """The drawing of a step: sentences on what hides and what waits, (colour, part) of what is drawn, the last
    micro-batch, and a layer in forward and backward where there are layers."""

    sentences: tuple[str, ...]
    legend: tuple[tuple[str, str], ...]
    windows: tuple[Lanes, ...]


def step_drawing(timeline: Timeline, plan: Plan) -> StepDrawing:
    """The drawing of the timeline of a plan's step."""
    parts = {segment.part or HIDDEN for segment in timeline.segments if segment.seconds}
    whole = "The last micro-batch, and the end of the step" if timeline.earlier else "The step"
    return StepDrawing(
        sentences=tuple(_sentences(timeline)),
        legend=legend(parts),
        windows=(_whole(timeline, whole), *_layer(timeline, plan)),
    )


def legend(parts: Set[str]) -> tuple[tuple[str, str], ...]:
    """(colour, its parts) in the order of COLOURS, a colour once."""
    ordered = in_order(parts)
    colours = dict.fromkeys(map(colour_of, ordered))
    return tuple((colour, ", ".join(part for part in ordered if colour_of(part) == colour)) for colour in colours)


def in_order(parts: Set[str]) -> tuple[str, ...]:
    """The parts in the order of COLOURS; those it lacks follow by name."""
    known = [part for part in COLOURS if part in parts]
    return (*known, *sorted(parts - {*known}))


def colour_of(part: str) -> str:
    """The name of a part's colour."""
    return COLOURS.get(part, "grey")


def _sentences(timeline: Timeline) -> Iterator[str]:
    """Yields sentences on micro-batches that are not drawn, and on how long each stream of the drawn one is busy."""
    drawn_s = timeline.end_s - timeline.start_s
    if timeline.earlier:
        yield (
            f"{plural(timeline.earlier, 'micro-batch')} before it, "
            f"{format_seconds(timeline.start_s)}, not drawn, run alike. Of the {format_seconds(drawn_s)} drawn:"
        )

    def seconds(accepts: Callable[[Segment], bool]) -> float:
        return sum(segment.seconds for segment in timeline.segments if accepts(segment))

    kernels = seconds(lambda own: own.stream is Stream.COMPUTE and own.part not in (DATA_PARALLEL, ISSUE))
    tensor = seconds(lambda own: own.stream is Stream.TENSOR)
    hidden = seconds(lambda own: not own.part)
    waited, slowed = (
        seconds(lambda own, stream=stream: own.part == DATA_PARALLEL and own.stream is stream)  # type: ignore[misc]
        for stream in (Stream.DATA, Stream.COMPUTE)
    )
    yield f"Kernels run for {format_seconds(kernels)} ({kernels / drawn_s if drawn_s else 0.0:.1%})."
    if tensor:
        yield f"Tensor-parallel collectives take {format_seconds(tensor)}: kernels wait for all of it."
    if hidden or waited:
        rest = f", and slows kernels by {format_seconds(slowed)}" if slowed else ""
        yield (
            f"Data-parallel collectives take {format_seconds(hidden + waited)}: {format_seconds(hidden)} runs beside "
            f"kernels{rest}; {format_seconds(waited)} is waited for."
        )
    if issue := seconds(lambda own: own.part == ISSUE):
        yield f"The GPU waits {format_seconds(issue)} for the CPU to issue kernels."


def _whole(timeline: Timeline, title: str) -> Lanes:
    segments, start_s, end_s = timeline.segments, timeline.start_s, timeline.end_s
    passes = _runs(segments, lambda own: str(own.during))
    return _lanes(segments, start_s, end_s, title=title, runs=passes, is_merged=True)


def _layer(timeline: Timeline, plan: Plan) -> Iterator[Lanes]:
    """The middle one of the layers with most time, in forward and in backward."""
    name = _middle_layer(timeline, plan)
    for during in (Pass.FORWARD, Pass.BACKWARD):
        own = [s for s in timeline.segments if s.part and s.during is during and name in enclosing(s.module)]
        if not name or not own:
            continue
        start_s, end_s = own[0].start_s, own[-1].end_s
        shown = [s for s in timeline.segments if s.start_s < end_s and s.end_s > start_s]
        runs = _runs(own, lambda segment: _child(segment.module, name))
        yield _lanes(shown, start_s, end_s, title=f"{name} in {during}", runs=runs, is_merged=False)


def _middle_layer(timeline: Timeline, plan: Plan) -> str:
    """Name of the middle layer of the block whose layers take the most time; "" without repeated blocks."""
    seconds: dict[str, dict[str, float]] = {}
    for segment in timeline.segments:
        for pattern in plan.blocks:
            expression = re.escape(pattern).replace(r"\*", r"\d+")
            if segment.part and (found := re.match(rf"{expression}(?=\.|$)", segment.module)):
                layers = seconds.setdefault(pattern, {})
                layers[found[0]] = layers.get(found[0], 0.0) + segment.seconds
    if not seconds:
        return ""
    layers = max(seconds.values(), key=lambda own: sum(own.values()))
    return list(layers)[len(layers) // 2]


def _child(module: str, layer: str) -> str:
    return module.removeprefix(layer).removeprefix(".").split(".")[0]


def _runs(segments: Sequence[Segment], name_of: Callable[[Segment], str]) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds of each run of segments with one name; segments without a part are left out."""
    found: list[tuple[str, float, float]] = []
    for segment in segments:
        if not segment.part:
            continue
        if found and found[-1][0] == name_of(segment):
            found[-1] = (found[-1][0], found[-1][1], segment.end_s)
        else:
            found.append((name_of(segment), segment.start_s, segment.end_s))
    return found


def _lanes(
    segments: Sequence[Segment],
    start_s: float,
    end_s: float,
    *,
    title: str,
    runs: Iterable[tuple[str, float, float]],
    is_merged: bool,
) -> Lanes:
    """The lanes of a window; `is_merged` makes one shape of all that a part does in a lane."""
    scale = 1.0 / (end_s - start_s) if end_s > start_s else 0.0
    drawn: dict[Stream, dict[object, list[Segment]]] = {stream: {} for stream in Stream}
    for index, segment in enumerate(segments):
        key = segment.part if is_merged else index
        drawn[segment.stream].setdefault(key, []).append(segment)

    def shape(own: list[Segment]) -> Shape:
        path = "".join(_rectangle(s, start_s, end_s, scale) for s in own)
        return Shape(colour=colour_of(own[0].part or HIDDEN), path=path, title=_title(own, is_merged=is_merged))

    return Lanes(
        title=title,
        spans=tuple(
            Span(name=name, left=100.0 * (first - start_s) * scale, width=100.0 * (last - first) * scale)
            for name, first, last in runs
        ),
        lanes=tuple((str(s), tuple(map(shape, parts.values()))) for s, parts in drawn.items() if parts),
        ticks=tuple(
            (format_seconds(start_s + i * (end_s - start_s) / TICKS), 100.0 * i / TICKS) for i in range(TICKS + 1)
        ),
    )


def _rectangle(segment: Segment, start_s: float, end_s: float, scale: float) -> str:
    left = WIDTH * (max(segment.start_s, start_s) - start_s) * scale
    width = WIDTH * (min(segment.end_s, end_s) - max(segment.start_s, start_s)) * scale
    return f"M{left:.2f} 0h{width:.2f}v{HEIGHT}h-{width:.2f}z"


def _title(segments: list[Segment], *, is_merged: bool) -> str:
    seconds = format_seconds(sum(segment.seconds for segment in segments))
    part = segments[0].part or HIDDEN
    return f"{part}: {seconds}" if is_merged else f"{segments[0].module or ROOT}: {part}, {seconds}"

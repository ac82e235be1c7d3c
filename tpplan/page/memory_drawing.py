"""Memory over a step as areas on each other, one for each part; 1000 wide and 1000 high.

Modules follow each other in the order in which they run, all equally wide: it is no time axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpplan.core.name_patterns import ROOT
from tpplan.page.step_drawing import WIDTH, Shape, Span
from tpplan.plan.parts import (
    BESIDE,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    SAVED,
    SOURCES,
    STATES,
    TRANSIENTS,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
)
from tpplan.plan.plan import Pass
from tpplan.plan.report.words import gib
from tpplan.plan.step_anatomy import Moment

HEIGHT = 1000
#: part -> colour, from the bottom up, parts that stay over the step first
COLOURS = {
    PARAMETERS: "blue",
    STATES: "grey",
    GRADIENTS: "red",
    SOURCES: "dim",
    BESIDE: "dim",
    UNSHARDED_PARAMETERS: "sky",
    UNSHARDED_GRADIENTS: "pink",
    SAVED: "green",
    TRANSIENTS: "orange",
    BUFFERS: "yellow",
}
#: the limit is drawn where it is at most this many times the peak
_NEAR_LIMIT = 1.5
#: full height over the highest amount that is drawn
_HEADROOM = 1.06


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDrawing:
    """Areas with their parts, passes above them, where and what the peak is (percent of the width and height), and the
    limit's height in percent (None where it is far above). `top` is the text of the full height."""

    areas: tuple[Shape, ...]
    spans: tuple[Span, ...]
    peak: tuple[float, float]
    peak_text: str
    limit: float | None
    limit_text: str
    top: str


def memory_drawing(moments: Sequence[Moment], limit_bytes: float, slack_bytes: float) -> MemoryDrawing:
    """The drawing of at least one moment. The limit is what is left of `limit_bytes` beside the slack; 0 is unknown."""
    highest = max(moments, key=lambda moment: moment.num_bytes)
    peak_bytes, at = highest.num_bytes, moments.index(highest)
    free = limit_bytes - slack_bytes
    is_near = 0.0 < free <= _NEAR_LIMIT * peak_bytes
    top = _HEADROOM * max(peak_bytes, free if is_near else 0.0) or 1.0
    return MemoryDrawing(
        areas=tuple(_areas(moments, top)),
        spans=tuple(_passes(moments)),
        peak=(100.0 * (at + 0.5) / len(moments), 100.0 * peak_bytes / top),
        peak_text=f"{gib(peak_bytes)} in {_pass_name(highest.during)} of {highest.module or ROOT}",
        limit=100.0 * free / top if is_near else None,
        limit_text=_limit_text(limit_bytes, slack_bytes),
        top=gib(top),
    )


def _pass_name(during: Pass) -> str:
    return "the optimizer's step" if during is Pass.STEP else str(during)


def _limit_text(limit_bytes: float, slack_bytes: float) -> str:
    if limit_bytes <= 0.0:
        return "no limit is known"
    beside = f", beside {gib(slack_bytes)} of slack" if slack_bytes else ""
    return f"limit {gib(limit_bytes - slack_bytes)}{beside}"


def _areas(moments: Sequence[Moment], top: float) -> list[Shape]:
    present = {part for moment in moments for part, num_bytes in moment.memory_bytes.items() if num_bytes}
    parts = [*(part for part in COLOURS if part in present), *sorted(present - COLOURS.keys())]
    below, found = [0.0] * len(moments), list[Shape]()
    for part in parts:
        own = [moment.memory_bytes.get(part, 0.0) for moment in moments]
        above = [low + num_bytes for low, num_bytes in zip(below, own, strict=True)]
        title = f"{part}: up to {gib(max(own))}"
        found.append(Shape(colour=COLOURS.get(part, "dim"), path=_area(below, above, top), title=title))
        below = above
    return found


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """The path of the stairs between two series of bytes: up along `above`, back along `below`."""
    forth = _stairs([(i, y) for i, y in enumerate(above)], len(above), top)
    back = _stairs([(i + 1, y) for i, y in reversed(list(enumerate(below)))], len(below), top)
    return f"M0 {HEIGHT}{forth}H{WIDTH}{back}H0z"


def _stairs(edges: Sequence[tuple[int, float]], count: int, top: float) -> str:
    """Lines to a step's edge and on to its height, where that is another than the last."""
    path, last = "", ""
    for index, num_bytes in edges:
        height = f"{HEIGHT * (1 - num_bytes / top):.1f}"
        if height != last:
            path += f"H{WIDTH * index / count:.2f}V{height}"
            last = height
    return path


def _passes(moments: Sequence[Moment]) -> list[Span]:
    found: list[Span] = []
    for moment in moments:
        width = 100.0 / len(moments)
        if found and found[-1].name == str(moment.during):
            last = found.pop()
            found.append(Span(name=last.name, left=last.left, width=last.width + width))
        else:
            left = found[-1].left + found[-1].width if found else 0.0
            found.append(Span(name=str(moment.during), left=left, width=width))
    return found

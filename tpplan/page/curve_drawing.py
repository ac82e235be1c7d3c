"""Curves of throughput over one quantity that is varied, each point the best plan, on a grid of 1000 by 1000.

Values stand evenly spaced, however far apart they are; the height begins at 0.
"""

from dataclasses import dataclass

from tpplan.core.units import format_seconds
from tpplan.page.step_drawing import WIDTH
from tpplan.plan.plan import Plan
from tpplan.plan.report.words import format_count, gib
from tpplan.plan.step_anatomy import BANDWIDTH, MEMORY_LIMIT, SEQUENCE_LENGTH, Curve, Outcome

HEIGHT = 1000
_HEADROOM = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An outcome: its value, its cells in a table, its place in percent (height None without a plan), and whether it is
    the plan's own value."""

    value: str
    cells: tuple[str, ...]
    left: float
    height: float | None
    is_now: bool
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveDrawing:
    """A curve: its name, its line as an SVG path, its points, and the text of its full height."""

    name: str
    path: str
    points: tuple[Point, ...]
    top: str


def curve_drawing(curve: Curve, plan: Plan) -> CurveDrawing:
    """The drawing of a curve of at least one outcome around the plan."""
    rates = [_rate(curve, outcome, plan) for outcome in curve.outcomes]
    top = _HEADROOM * max((rate for rate in rates if rate is not None), default=0.0)
    points = tuple(
        Point(
            value=_value(curve, outcome),
            cells=_cells(outcome, rate),
            left=100.0 * (i + 0.5) / len(rates),
            height=100.0 * rate / top if rate is not None and top else None,
            is_now=outcome.value == curve.now,
            problem=outcome.problem,
        )
        for i, (outcome, rate) in enumerate(zip(curve.outcomes, rates, strict=True))
    )
    return CurveDrawing(name=curve.name, path=_path(points), points=points, top=format_count(top))


def _rate(curve: Curve, outcome: Outcome, plan: Plan) -> float | None:
    """Tokens per second, or samples where they have no length."""
    if outcome.samples_per_s is None:
        return None
    length = outcome.value if curve.name == SEQUENCE_LENGTH else plan.batch.seq_len
    return outcome.samples_per_s * length


def _value(curve: Curve, outcome: Outcome) -> str:
    if curve.name == BANDWIDTH:
        return f"x {outcome.value:g}"
    return gib(outcome.value) if curve.name == MEMORY_LIMIT else f"{outcome.value:g}"


def _cells(outcome: Outcome, rate: float | None) -> tuple[str, ...]:
    if outcome.step_time_s is None or rate is None:
        return ()
    return format_seconds(outcome.step_time_s), format_count(rate), outcome.mesh or ""


def _path(points: tuple[Point, ...]) -> str:
    """A line through points in a row; it breaks where there is no plan."""
    drawn, path = False, ""
    for point in points:
        if point.height is not None:
            at = f"{WIDTH * point.left / 100:.1f} {HEIGHT * (1 - point.height / 100):.1f}"
            path += f"{'L' if drawn else 'M'}{at}"
        drawn = point.height is not None
    return path

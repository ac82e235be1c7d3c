"""Several plans as one HTML page: `plans_page(rows, title=...)`: their numbers in a table, and their steps by part as
bars of one scale.

Texts of a plan may be hostile: the template escapes every one, and control characters are escaped before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.core.escapes import escaped_data
from tpplan.core.units import format_seconds
from tpplan.page.bars import Bar
from tpplan.page.render import rendered
from tpplan.page.step_drawing import StepDrawing, colour_of, in_order, legend
from tpplan.plan.plan import Plan
from tpplan.plan.report.words import format_count, gib, mfu, tokens_per_s, unit_of

_TITLES = ("GPUs", "mesh", "micro", "step", "per second", "MFU", "peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan by its name; where there is none, `problem` says why. `is_answer` marks the one that is asked for."""

    name: str
    plan: Plan | None
    problem: str = ""
    is_answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A row as the template shows it: its cells, () without a plan, and (colour, bar) of each part of its step."""

    name: str
    is_answer: bool
    cells: tuple[str, ...] = ()
    step: str = ""
    parts: tuple[tuple[str, Bar], ...] = ()


def plans_page(
    rows: Sequence[Row],
    *,
    title: str,
    sentences: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    timeline: StepDrawing | None = None,
) -> str:
    """The text of the page, titled `title`, with `facts`, (name, text), and `sentences` above the table, and a timeline
    of all plans' step below, where they are stages of one. Bars are relative to the slowest step."""
    shown = [escaped_data(row) for row in rows]
    plans = [row.plan for row in shown if row.plan is not None]
    slowest_s = max((plan.predicted.step_time_s for plan in plans), default=0.0)
    return rendered(
        "plans_page.html.j2",
        title=escaped_data(title),
        sentences=escaped_data(tuple(sentences)),
        facts=escaped_data(tuple(facts)),
        titles=_TITLES,
        timeline=timeline,
        rows=[_drawn(row, slowest_s) for row in shown],
        legend=legend({part for plan in plans for part, seconds in plan.predicted.time_s.items() if seconds}),
        problems=[(row.name, row.problem) for row in shown if row.problem],
    )


def _drawn(row: Row, slowest_s: float) -> _Drawn:
    if row.plan is None:
        return _Drawn(name=row.name, is_answer=row.is_answer)
    predicted = row.plan.predicted
    return _Drawn(
        name=row.name,
        is_answer=row.is_answer,
        cells=_cells(row.plan),
        step=format_seconds(predicted.step_time_s),
        parts=tuple(_parts(predicted.time_s, slowest_s)),
    )


def _parts(time_s: Mapping[str, float], whole_s: float) -> Iterator[tuple[str, Bar]]:
    """Yields (colour, bar) of each part side by side, in the order of the legend."""
    starts_at = 0.0
    for part in in_order({part for part, seconds in time_s.items() if seconds}):
        percent = 100.0 * time_s[part] / whole_s if whole_s else 0.0
        yield colour_of(part), Bar(name=part, amount=format_seconds(time_s[part]), percent=percent, starts_at=starts_at)
        starts_at += percent


def _cells(plan: Plan) -> tuple[str, ...]:
    """A cell for each of _TITLES; samples per second where they have no length, else tokens."""
    predicted, degrees, rate = plan.predicted, plan.mesh_degrees, tokens_per_s(plan)
    used = mfu(predicted, plan.mesh.num_gpus)
    return (
        str(plan.mesh.num_gpus),
        f"{degrees.replicate} x {degrees.shard} x {degrees.tp}",
        f"{plan.batch.micro_batch} x {plan.batch.accumulation_steps}",
        f"{format_seconds(predicted.step_time_s)} ± {format_seconds(predicted.step_time_error_s)}",
        "" if rate is None else f"{format_count(rate)} {unit_of(plan.batch)}",
        "" if used is None else f"{used:.0%}",
        gib(predicted.held_bytes),
    )

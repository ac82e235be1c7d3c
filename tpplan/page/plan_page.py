"""A plan as one HTML page: `plan_page(plan)`. Its numbers are the plan's, in the words of `tpplan show`.

Texts of a plan may be hostile: the template escapes every one, and control characters are escaped before.
"""

from tpplan.core.escapes import escaped_data
from tpplan.core.units import format_bytes, format_seconds
from tpplan.page.bars import bars
from tpplan.page.curve_drawing import curve_drawing
from tpplan.page.memory_drawing import memory_drawing
from tpplan.page.mesh_drawing import drawings
from tpplan.page.render import rendered
from tpplan.page.step_drawing import step_drawing
from tpplan.plan.parts import SLACK
from tpplan.plan.plan import Plan
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.answer import warnings
from tpplan.plan.report.details import collective_totals, moment, provenance, setting
from tpplan.plan.report.layer_table import layer_entries
from tpplan.plan.report.words import format_count, gib, mesh_sizes, mfu, tokens_per_s, unit_of
from tpplan.plan.step_anatomy import Anatomy


def plan_page(plan: Plan, *, title: str, anatomy: Anatomy | None = None) -> str:
    """The text of the page, titled `title`; without an anatomy of its step the page says how to have it drawn.

    Raises PlanError for a dtype of unknown size.
    """
    unproven, shown = why_unproven(plan), escaped_data(plan)
    predicted, taken_apart = shown.predicted, escaped_data(anatomy)
    held = {**predicted.memory_bytes, SLACK: predicted.slack_bytes}
    return rendered(
        "plan_page.html.j2",
        title=escaped_data(title),
        plan=shown,
        is_proven=not unproven,
        answer=_answer(shown),
        warnings=tuple(warnings(shown, unproven)),
        time_bars=bars(predicted.time_s, predicted.step_time_s, format_seconds),
        step=format_seconds(predicted.step_time_s),
        error=format_seconds(predicted.step_time_error_s),
        memory_bars=bars(held, predicted.memory_limit_bytes, gib),
        moment=moment(predicted),
        **_step_parts(shown, taken_apart),
        drawings=drawings(shown),
        layers=layer_entries(shown),
        collectives=[
            (axis, during, kind.replace("_", "-"), count, format_bytes(num_bytes))
            for axis, during, kind, count, num_bytes in collective_totals(shown.collectives)
        ],
        facts=tuple(setting(shown)),
        provenance=tuple(provenance(shown, unproven)),
    )


def _step_parts(plan: Plan, anatomy: Anatomy | None) -> dict[str, object]:
    """The drawings of an anatomy, by their names in the template; None without one."""
    if anatomy is None:
        return {"timeline": None, "memory": None, "curves": (), "differs": "", "unit": ""}
    predicted = plan.predicted
    return {
        "timeline": step_drawing(anatomy.timeline, plan),
        "memory": memory_drawing(anatomy.moments, predicted.memory_limit_bytes, predicted.slack_bytes),
        "curves": [curve_drawing(curve, plan) for curve in anatomy.curves],
        "differs": anatomy.problem,
        "unit": f"{unit_of(plan.batch)}/s",
    }


def _per_gpu(plan: Plan, rate: float) -> str:
    """Throughput of one GPU, and its MFU where the plan says it."""
    used = mfu(plan.predicted, plan.mesh.num_gpus)
    return f"{format_count(rate / plan.mesh.num_gpus)} per GPU" + ("" if used is None else f", MFU {used:.0%}")


def _answer(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """(name, value, note) of the numbers at the top of the page."""
    predicted, mesh = plan.predicted, plan.mesh
    rate = tokens_per_s(plan)
    limit = predicted.memory_limit_bytes
    return (
        ("step", format_seconds(predicted.step_time_s), f"± {format_seconds(predicted.step_time_error_s)}, predicted"),
        (
            f"{unit_of(plan.batch)}/s",
            format_count(rate) if rate is not None else "unknown",
            _per_gpu(plan, rate) if rate is not None else "the predicted step is 0 s",
        ),
        (
            "memory per GPU",
            gib(predicted.held_bytes),
            f"{predicted.held_bytes / limit:.0%} of {gib(limit)}" if limit else "no limit is known",
        ),
        ("GPUs", str(mesh.num_gpus), mesh_sizes(mesh) or "one rank"),
    )

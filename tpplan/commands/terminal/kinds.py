"""Prints the plans of `tpplan solve --top N`: what distinguishes each, how much slower it is than the best, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpplan.commands.terminal.comparison import batch_cell, main_terms, mesh_cell
from tpplan.commands.terminal.output import aligned, folded, write_json
from tpplan.core.units import format_seconds
from tpplan.plan.plan import Plan
from tpplan.plan.report import as_data, gib
from tpplan.plan.styles import Style

if TYPE_CHECKING:
    from tpplan.search.comparisons.alternatives import PlanKind

_SHORT = {
    Style.COLUMN: "columns",
    Style.ROW: "rows",
    Style.VOCABULARY: "vocabulary",
    Style.REPLICATED: "replicated",
    Style.SLICES: "slices",
    Style.SPLIT: "split",
}
_LEGEND = (
    "Kinds differ in mesh (replicas x FSDP shards x tp ranks), micro-batch, recomputation, or in the set of styles of "
    "their matrices and norms. A plan is not listed where a cheaper one on its mesh has a subset of its styles."
)


def kind_lines(kinds: "Sequence[PlanKind]", width: int) -> list[str]:
    """The table of plans, then for each plan but the first the terms in which it is slower."""
    first = kinds[0].plan
    rows = [("", "mesh", "micro", "step", "more", "peak", "styles")]
    for i, kind in enumerate(kinds, start=1):
        plan = kind.plan
        more = plan.predicted.step_time_s - first.predicted.step_time_s
        rows.append(
            (
                str(i),
                mesh_cell(plan),
                batch_cell(plan),
                format_seconds(plan.predicted.step_time_s),
                f"+{more / first.predicted.step_time_s:.2%}" if i > 1 else "",
                gib(plan.predicted.peak_memory_bytes),
                styles_text(kind),
            )
        )
    lines = ["Best plans by kind", *(f"  {line}" for line in aligned(rows, left=(0, 1, 6)))]
    for i, kind in enumerate(kinds[1:], start=2):
        lines += folded(f"{i} against 1: {main_terms(first, kind.plan)}", width)
    if len(kinds) == 1:
        lines.append("There is no other kind that fits.")
    return [*lines, *folded(_LEGEND, width)]


def styles_text(kind: "PlanKind") -> str:
    """The styles of a kind's layers and its recomputation, in few words."""
    plan = kind.plan
    words = (
        [_SHORT.get(style, str(style)) for style in Style if style in kind.styles] if plan.mesh.tp > 1 else ["whole"]
    )
    return ", ".join([*words, *(f"{mode} recomputation" for mode in dict.fromkeys(map(str, plan.recompute.values())))])


def print_kinds_as_data(plan: Plan, kinds: "Sequence[PlanKind]") -> None:
    """Prints the best plan as JSON, with all kinds under "kinds"."""
    data = as_data(plan) | {"kinds": [{"styles": sorted(map(str, k.styles)), "plan": as_data(k.plan)} for k in kinds]}
    write_json(data)

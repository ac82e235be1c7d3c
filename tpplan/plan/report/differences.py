"""Two plans side by side: seconds and bytes by part, and the settings and modules in which they differ."""

from collections.abc import Iterable, Mapping

from tpplan.plan.plan import Plan
from tpplan.plan.report.details import setting
from tpplan.plan.report.layer_table import braced, module_rows


def time_differences(plan: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part of the step, seconds in the plan, seconds in the other), the largest difference first."""
    return _differences(plan.predicted.time_s, other.predicted.time_s)


def memory_differences(plan: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part of the peak, bytes in the plan, bytes in the other), the largest difference first."""
    return _differences(plan.predicted.memory_bytes, other.predicted.memory_bytes)


def setting_differences(plan: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """(name, text in the plan, text in the other) of each setting that differs; "" where a plan lacks it."""
    ours, theirs = (_joined(setting(own)) for own in (plan, other))
    names = dict.fromkeys((*ours, *theirs))
    return [(n, ours.get(n, ""), theirs.get(n, "")) for n in names if ours.get(n) != theirs.get(n)]


def module_differences(plan: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """(modules, their style in the plan, their style in the other) where styles differ; siblings that differ alike
    share an entry."""
    ours, theirs = (_styles(own) for own in (plan, other))
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key in dict.fromkeys((*ours, *theirs)):
        pair = ours.get(key, ""), theirs.get(key, "")
        if pair[0] != pair[1]:
            groups.setdefault((key.rpartition(".")[0], *pair), []).append(key)
    return [(braced(keys), *pair) for (_, *pair), keys in groups.items()]  # type: ignore[misc]  # two of three


def _styles(plan: Plan) -> dict[str, str]:
    """Module pattern -> its style and where it converts, in words."""
    if plan.mesh.tp == 1:
        return {row.key: "whole" for row in module_rows(plan) if row.main is not None}
    found = {}
    for row in module_rows(plan):
        crossings = [f"{name}: {crossing.conversion}" for name, crossing in row.crossings]
        if text := ", ".join(filter(None, (row.style, *crossings))):
            found[row.key] = text
    return found


def _joined(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name -> text, without unnamed lines, which explain the line before."""
    return {name: text for name, text in rows if name}


def _differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[tuple[str, float, float]]:
    rows = [(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in {**ours, **theirs}]
    return sorted((row for row in rows if row[1] or row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0]))

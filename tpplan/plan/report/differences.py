"""Two plans side by side: seconds and bytes by part, and the settings and modules in which they differ."""

import re
from collections.abc import Iterable, Mapping

from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.plan.report.details import setting
from tpplan.plan.report.layer_table import braced, module_rows
from tpplan.plan.report.stages import stage_facts

#: a plan of a whole model, or of a model in stages
AnyPlan = Plan | PipelinePlan
#: parts of a step of stages
_SLOWEST, _BUBBLE, _SENDING = "slowest stage", "filling and draining", "sending between stages"
#: facts of stages that are no settings, or numbers told elsewhere
_TOLD = frozenset({"step", "speed", "memory", "solver", "command"})
#: settings that are those of one stage, or told of all together
_OF_A_STAGE = frozenset({"model", "mesh", "batch", "fsdp units"})


def time_differences(plan: AnyPlan, other: AnyPlan) -> list[tuple[str, float, float]]:
    """(part of the step, seconds in the plan, seconds in the other), the largest difference first. Beside a plan of
    stages, a whole model is one stage."""
    if isinstance(plan, Plan) and isinstance(other, Plan):
        return _differences(plan.predicted.time_s, other.predicted.time_s)
    return _differences(_seconds_by_stage(plan), _seconds_by_stage(other))


def memory_differences(plan: AnyPlan, other: AnyPlan) -> list[tuple[str, float, float]]:
    """(part of the peak on the fullest GPU, bytes in the plan, bytes in the other), the largest difference first."""
    return _differences(fullest(plan).predicted.memory_bytes, fullest(other).predicted.memory_bytes)


def fullest(plan: AnyPlan) -> Plan:
    """The plan of the stage whose GPUs hold most."""
    stages = (plan,) if isinstance(plan, Plan) else plan.stages
    return max(stages, key=lambda own: own.predicted.peak_memory_bytes)


def _seconds_by_stage(plan: AnyPlan) -> dict[str, float]:
    if isinstance(plan, Plan):
        return {_SLOWEST: plan.predicted.step_time_s}
    predicted = plan.predicted
    return {_SLOWEST: predicted.stage_s, _BUBBLE: predicted.bubble_s, _SENDING: predicted.send_s}


def setting_differences(plan: AnyPlan, other: AnyPlan) -> list[tuple[str, str, str]]:
    """(name, text in the plan, text in the other) of each setting that differs; "" where a plan lacks it."""
    ours, theirs = (_joined(_setting(own)) for own in (plan, other))
    names = dict.fromkeys((*ours, *theirs))
    return [(n, ours.get(n, ""), theirs.get(n, "")) for n in names if ours.get(n) != theirs.get(n)]


def _setting(plan: AnyPlan) -> Iterable[tuple[str, str]]:
    """(name, text) of what was planned."""
    if isinstance(plan, Plan):
        return setting(plan)
    alike = [row for row in setting(plan.stages[0]) if all(row in setting(own) for own in plan.stages[1:])]
    facts = [row for row in stage_facts(plan) if row[0] not in _TOLD]
    return [*facts, *(row for row in alike if row[0] not in _OF_A_STAGE)]


def module_differences(plan: AnyPlan, other: AnyPlan) -> list[tuple[str, str, str]]:
    """(modules, their style in the plan, their style in the other) where styles differ; siblings that differ alike
    share an entry."""
    ours, theirs = (_styles(own) for own in (plan, other))
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key in dict.fromkeys((*ours, *theirs)):
        pair = ours.get(key, ""), theirs.get(key, "")
        if pair[0] != pair[1]:
            groups.setdefault((key.rpartition(".")[0], *pair), []).append(key)
    return [(braced(keys), *pair) for (_, *pair), keys in groups.items()]  # type: ignore[misc]  # two of three


def _styles(plan: AnyPlan) -> dict[str, str]:
    """Module pattern -> its style and where it converts, in words; of stages that differ, each one's."""
    if isinstance(plan, Plan):
        return _styles_of_one(plan)
    stages: dict[str, dict[str, list[str]]] = {}
    for index, stage in enumerate(plan.stages):
        for key, text in _styles_of_one(stage).items():
            stages.setdefault(_as_in_others(key, stage, plan), {}).setdefault(text, []).append(str(index))
    return {
        key: next(iter(own))
        if len(own) == 1
        else "; ".join(f"stage {', '.join(where)}: {text}" for text, where in own.items())
        for key, own in stages.items()
    }


def _as_in_others(key: str, stage: Plan, plan: PipelinePlan) -> str:
    """The name of a module by the pattern of other stages' layers, where its stage has only one such layer."""
    for pattern in dict.fromkeys(pattern for own in plan.stages for pattern in own.blocks):
        if pattern not in stage.blocks and (found := re.match(rf"{re.escape(pattern[:-1])}\d+(?=\.|$)", key)):
            return pattern + key[found.end() :]
    return key


def _styles_of_one(plan: Plan) -> dict[str, str]:
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

"""`tpplan explain plan.json 'model.layers.*.mlp' --why-not megatron model.py`: alternatives to a plan, and their cost.

Without further options it says, in sentences with the plan's numbers, what the plan does in the modules of that name,
and needs no model. Every alternative is solved again to optimality: --why-not on the plan's mesh with all other choices
free, --shadow-prices on all meshes of the cluster.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tpplan.commands.terminal.comparison import mesh_cell, part_rows, signed, times
from tpplan.commands.terminal.output import aligned, print_answer, terminal_width
from tpplan.commands.terminal.pins import add_pins, pins_of
from tpplan.commands.terminal.values import count
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import InfeasibleError, ProfileError, UsageError
from tpplan.core.escapes import escaped_data
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import format_seconds
from tpplan.layouts.pins import parse_pin
from tpplan.machine.profile import Collective, HardwareProfile, load_profile
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import CollectivePlan, Plan
from tpplan.plan.report.layer_table import layer_rows
from tpplan.plan.report.sentences import sentences
from tpplan.plan.report.stages import stage_sentence
from tpplan.search.models.model_spec import ModelSpec, is_model
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.search.comparisons.alternatives import Alternative

_EPILOG = """\
model.py (or model.py:BUILDER, hf:path/config.json) is the plan's model. Pins are the plan's, and those given here. The
profile is the plan's, by name, unless --profile names another.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "explain", "show the cost of other choices", __doc__, _EPILOG, run=run)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument(
        "words", nargs="*", metavar="MODULE|model.py", help="modules by pattern, such as 'layers.*.mlp'; the model"
    )
    parser.add_argument("--why-not", metavar="STYLE", help="price the plan with these modules in this style")
    parser.add_argument("--shadow-prices", action="store_true", help="price more memory, faster links and more GPUs")
    parser.add_argument("--profile", metavar="NAME", help="default: the plan's, by its name")
    parser.add_argument("--tp", type=count, metavar="N", help="for --shadow-prices: pin the tensor-parallel degree")
    parser.add_argument("--fsdp", type=count, metavar="N", help="for --shadow-prices: pin FSDP's degree")
    add_pins(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the plan's rows and the alternatives; returns 3 where no plan of the style exists."""
    loaded = load_plan(args.plan)
    if isinstance(loaded, PipelinePlan):
        return _explain_stages(args, loaded)
    plan = loaded
    pattern, spec = _sorted_words(args.words)
    if args.why_not is not None:
        parse_pin(pattern or "", args.why_not)
    if pattern is None and (args.why_not is not None or not args.shadow_prices):
        raise UsageError("explain: expected modules by pattern, such as 'layers.*.mlp', or --shadow-prices")
    if spec is None and (args.why_not is not None or args.shadow_prices):
        raise UsageError("explain: --why-not and --shadow-prices need model.py, because they solve again")
    data: dict[str, object] = {}
    lines: list[str] = []
    if pattern is not None and not _rows(plan, pattern):
        raise _no_module(args.plan, pattern)
    profile = _profile_of(plan, args.profile, is_needed=spec is not None)
    if profile is None:
        lines += [f"no times of collectives: the profile {plan.cluster.profile!r} is not known; --profile names it", ""]
    if pattern is not None:
        lines += [f"{pattern} in the plan", *_say(plan, pattern, profile, data), ""]
    code = 0
    if spec is not None and profile is not None:
        model = load_model_file(spec)
        with model.locating():
            code = _solve_again(args, plan, pattern, model, profile, data, lines)
    print_answer(lines, data, as_json=args.json)
    return code


def _explain_stages(args: argparse.Namespace, plan: PipelinePlan) -> int:
    """Prints what the stages do in the modules of the pattern, stage by stage."""
    pattern, spec = _sorted_words(args.words)
    if args.why_not is not None or args.shadow_prices or spec is not None:
        raise UsageError(
            f"{args.plan}: --why-not and --shadow-prices take a plan of a whole model; of stages, solve again with "
            "--pin and compare: tpplan diff a.json b.json"
        )
    if pattern is None:
        raise UsageError("explain: expected modules by pattern, such as 'layers.*.mlp'")
    profile = _profile_of(plan.stages[0], args.profile, is_needed=False)
    lines, data = list[str](), list[dict[str, object]]()
    for index, stage in enumerate(plan.stages):
        if _rows(stage, pattern):
            does = stage_sentence(escaped_data(stage))
            data.append({"stage": index, "does": does})
            lines += [does, "", *_say(stage, pattern, profile, data[-1]), ""]
    if not data:
        raise _no_module(args.plan, pattern)
    print_answer(lines, {"stages": data}, as_json=args.json)
    return 0


def _rows(plan: Plan, pattern: str) -> list[str]:
    """The plan's table of the modules of a pattern, with a header; empty where there are none."""
    return layer_rows(escaped_data(plan), lambda module: _matches(pattern, module), terminal_width() - 2)


def _no_module(path: str, pattern: str) -> UsageError:
    return UsageError(f"{path}: no module {pattern!r} owns parameters or converts tensors at its boundary")


def _say(plan: Plan, pattern: str, profile: HardwareProfile | None, data: dict[str, object]) -> list[str]:
    """The rows of the modules of a pattern and sentences on them, which are put into `data` as well."""
    rows = _rows(plan, pattern)
    times = _seconds_of(plan, profile) if profile is not None else lambda _: None
    said = list(sentences(escaped_data(plan), lambda module: _matches(pattern, module), times))
    data |= {"modules": [" ".join(row.split()) for row in rows[1:]], "sentences": said}
    return [*(f"  {row}" for row in rows), "", *said]


def _profile_of(plan: Plan, name: str | None, *, is_needed: bool) -> HardwareProfile | None:
    """The profile of this name, else the plan's, or None where that is not known and nothing is solved again."""
    try:
        return load_profile(name or plan.cluster.profile)
    except ProfileError:
        if name or is_needed:
            raise
        return None


def _seconds_of(plan: Plan, profile: HardwareProfile) -> Callable[[CollectivePlan], float]:
    """A function that gives the seconds of a collective of the plan, alone on the machine of the profile."""

    def seconds_of(entry: CollectivePlan) -> float:
        group = plan.mesh.group(entry.axis, plan.cluster.gpus_per_node)
        return profile.collective(Collective(entry.kind), group, entry.num_bytes).seconds

    return seconds_of


def _sorted_words(words: Sequence[str]) -> tuple[str | None, str | None]:
    """(pattern, model) among the words; the model is the word with `.py` or `hf:` in it."""
    models = [word for word in words if is_model(word)]
    patterns = [word for word in words if word not in models]
    if len(models) > 1 or len(patterns) > 1:
        raise UsageError(f"explain: expected one pattern of modules and one model, got {' '.join(words)}")
    return next(iter(patterns), None), next(iter(models), None)


def _matches(pattern: str, module: str) -> bool:
    """True for a module whose name, or an enclosing module's, equals or matches the pattern."""
    parts = len(pattern.split("."))
    own = ".".join(module.split(".")[:parts])
    if not own:  # the model itself
        return pattern == ROOT
    matches = own == pattern or parse_pin(pattern, "replicate").matches(own)
    return matches or parse_pin(own, "replicate").matches(pattern)  # one layer of those that a row stands for


def _solve_again(
    args: argparse.Namespace,
    plan: Plan,
    pattern: str | None,
    model: ModelSpec,
    profile: HardwareProfile,
    data: dict[str, object],
    lines: list[str],
) -> int:
    from tpplan.search.comparisons.alternatives import Problem, shadow_prices, why_not
    from tpplan.search.models.trace_cache import Reuse

    problem = Problem.of_plan(plan, model, profile, Reuse(), pins=pins_of(args))
    if profile.fingerprint != plan.cluster.profile_fingerprint:
        plan = _priced_again(plan, model, profile)
        lines += [f"The plan was made with another version of {plan.cluster.profile}; this one prices it here.", ""]
    code = 0
    if args.why_not is not None and pattern is not None:
        other = why_not(problem, plan, pattern, args.why_not)
        lines += [*_comparison(plan, other, pattern, profile), ""]
        data["why_not"] = _comparison_data(plan, other, profile)
        code = 0 if other.plan is not None else InfeasibleError.exit_code
    if args.shadow_prices:
        free = replace(problem, options={**problem.options, "tp": args.tp, "fsdp": args.fsdp})
        found = list(shadow_prices(free))
        lines += [*_price_lines(plan, found), ""]
        data["shadow_prices"] = [_price_data(found[0], alternative) for alternative in found]
    return code


def _priced_again(plan: Plan, model: ModelSpec, profile: HardwareProfile) -> Plan:
    from tpplan.search.planner import price

    return price(plan, model.build_model, model.example_inputs, profile=profile, loss=model.loss)


# Why not


def _comparison(plan: Plan, other: "Alternative", pattern: str, profile: HardwareProfile) -> Iterator[str]:
    """Yields the lines that compare both plans: the step's time by part, collectives by kind, memory by part."""
    mesh = f"on {plan.mesh}"
    if other.plan is None:
        yield f"{pattern} as {other.name} {mesh}: none. {other.problem}"
        return
    before, after = plan.predicted.step_time_s, other.plan.predicted.step_time_s
    rows = [("", "plan", other.name, "difference")]
    rows += part_rows(plan, other.plan)
    kinds = _collectives(plan, profile), _collectives(other.plan, profile)
    rows.append(("collectives, issued", *times(*(sum(own.values()) for own in kinds))))
    rows += [
        (f"  {' '.join(key)}", *times(kinds[0].get(key, 0.0), kinds[1].get(key, 0.0)))
        for key in sorted({**kinds[0], **kinds[1]})
    ]
    yield f"{pattern} as {other.name} {mesh}, all other choices free"
    yield from (f"  {line}" for line in aligned(rows, left=(0,)))
    share = f"{abs(after / before - 1):.2%}" if before else "0 %"
    if abs(after - before) <= 1e-9 * before:
        yield f"It costs the same: {format_seconds(after)} a step."
    elif after > before:
        yield f"It would cost {format_seconds(after - before)} a step more ({share})."
    else:
        yield f"It would save {format_seconds(before - after)} a step ({share}): the plan is not the best of its mesh."


def _collectives(plan: Plan, profile: HardwareProfile) -> dict[tuple[str, str], float]:
    """(axis, kind) -> seconds of a step's collectives, whether hidden by compute or not."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    seconds_of = _seconds_of(plan, profile)
    for entry in plan.collectives:
        found[str(entry.axis), entry.kind.replace("_", "-")] += entry.count * seconds_of(entry)
    return dict(found)


def _comparison_data(plan: Plan, other: "Alternative", profile: HardwareProfile) -> dict[str, object]:
    return {
        "style": other.name,
        "problem": other.problem or None,
        "alternative": other.plan.to_dict() if other.plan is not None else None,
        "step_time_s": [plan.predicted.step_time_s, other.plan.predicted.step_time_s] if other.plan else None,
        "collectives_s": [
            {" ".join(key): seconds for key, seconds in _collectives(own, profile).items()}
            for own in (plan, other.plan)
            if own is not None
        ],
    }


# Shadow prices


def _price_lines(plan: Plan, found: Sequence["Alternative"]) -> Iterator[str]:
    base = found[0]
    if base.plan is None:
        yield f"Shadow prices: none. {base.problem}"
        return
    yield "Shadow prices: the best plan of all meshes, and the best with one thing changed"
    rows = [("", "step", "saved", "", "mesh")]
    for alternative in found:
        own = alternative.plan
        if own is None:
            rows.append((alternative.name, "none", "", "", ""))
            continue
        saved = base.plan.predicted.step_time_s - own.predicted.step_time_s
        share = saved / base.plan.predicted.step_time_s
        numbers = ("", "") if alternative is base else (signed(saved, format_seconds, 1e-12), f"{share:.2%}")
        rows.append((alternative.name, format_seconds(own.predicted.step_time_s), *numbers, mesh_cell(own)))
    yield from (f"  {line}" for line in aligned(rows, left=(0, 4)))
    yield from (f"{row.name}: {row.problem}" for row in found if row.plan is None)
    if abs(base.plan.predicted.step_time_s / plan.predicted.step_time_s - 1) > 1e-6:
        yield (
            f"The plan itself takes {format_seconds(plan.predicted.step_time_s)}: it was made with pins or options "
            "that were not given here."
        )


def _price_data(base: "Alternative", alternative: "Alternative") -> dict[str, object]:
    own, first = alternative.plan, base.plan
    return {
        "change": alternative.name,
        "problem": alternative.problem or None,
        "step_time_s": own.predicted.step_time_s if own else None,
        "saved_s": first.predicted.step_time_s - own.predicted.step_time_s if own and first else None,
        "mesh": str(own.mesh) if own else None,
    }

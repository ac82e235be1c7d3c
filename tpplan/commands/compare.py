"""`tpplan compare model.py --with fsdp,megatron ...`: the best plan beside plans as an expert writes them by hand."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import (
    STAGE_COLUMNS,
    add_machine,
    add_search,
    add_training,
    check_output,
    machine_of,
    problem_of,
)
from tpplan.commands.terminal.comparison import batch_cell, main_terms, mesh_cell
from tpplan.commands.terminal.output import aligned, folded, print_lines, write_json, wrote
from tpplan.commands.terminal.progress import bars
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import UsageError
from tpplan.core.files import write_atomically
from tpplan.core.units import format_seconds
from tpplan.plan.plan import Plan
from tpplan.plan.report import as_data, gib
from tpplan.plan.report.differences import module_differences
from tpplan.plan.report.words import mfu
from tpplan.plan.tp_shares import percent
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.search.comparisons.alternatives import Alternative

_ALL = "ddp,fsdp,megatron,megatron+sp,torchtitan,hf"
#: most modules that are named where a plan lays them out otherwise
_MOST_NAMED = 4
_EPILOG = """\
Each is the best plan of its kind on all GPUs: the micro-batch, recomputation and the tensor-parallel degree within a
node are chosen for it, and what is pinned is: ddp: replicas. fsdp: FSDP over all GPUs (ZeRO-3). megatron: columns then
rows in each layer, whole norms, token table and head by vocabulary; replicas. megatron+sp: norms on slices of the
sequence. torchtitan: the same, and FSDP in place of replicas. hf: what the model's own tp_plan says (transformers
models have one), whole weights elsewhere, and FSDP.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "compare", "compare the best plan with hand-made ones", __doc__, _EPILOG, run=run)
    parser.add_argument("model", metavar="model.py", help="model.py, model.py:BUILDER or hf:path/config.json")
    parser.add_argument("--with", dest="names", default=_ALL, metavar="NAMES", help=f"default: {_ALL}")
    add_machine(parser.add_argument_group("machine"))
    add_training(parser.add_argument_group("training"))
    add_search(parser.add_argument_group("search"))
    parser.add_argument("--json", action="store_true", help="print all plans as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page with charts here")


def run(args: argparse.Namespace) -> int:
    """Prints the table and what the differences are."""
    names = list(dict.fromkeys(filter(None, args.names.split(","))))
    if unknown := [name for name in names if name not in _ALL.split(",")]:
        raise UsageError(f"--with {unknown[0]}: unknown; known: {_ALL.replace(',', ', ')}")
    check_output(args.html)
    profile, model = machine_of(args), load_model_file(args.model)
    from tpplan.search.comparisons.expert_plans import expert_plan

    with model.locating(), bars(STAGE_COLUMNS) as progress:
        problem = problem_of(args, model, profile, progress)
        best = problem.solve(prove=args.prove)
        others = [expert_plan(problem, name, best, prove=args.prove) for name in names]
    if args.json:
        found = {own.name: {"problem": own.problem or None, "plan": own.plan and as_data(own.plan)} for own in others}
        write_json({"tpplan": as_data(best), **found})
    else:
        print_lines(lambda width: list(_lines(best, others, width)))
    if args.html is not None:
        write_atomically(args.html, _page(best, others))
        wrote(args.html)
    return 0


def _page(best: Plan, others: "Sequence[Alternative]") -> str:
    """The page of the plans, with what each costs more."""
    from tpplan.page.plans_page import Row, plans_page

    rows = [Row(name="tpplan", plan=best, is_answer=True)]
    rows += [Row(name=own.name, plan=own.plan, problem=own.problem.split(" (")[0]) for own in others]
    sentences = [f"Against the best, {_costs(own.name, best, own.plan)}" for own in others if own.plan is not None]
    return plans_page(rows, title="The best plan beside plans by hand", sentences=sentences)


def _lines(best: Plan, others: "Sequence[Alternative]", width: int) -> Iterator[str]:
    """The table, then what each plan does otherwise and what that costs."""
    rows = [("", "mesh", "micro", "step", "more", "MFU", "peak"), _cells("tpplan", best, best)]
    rows += [_cells(own.name, own.plan, best) if own.plan else (own.name, "none", "", "", "", "", "") for own in others]
    yield from aligned(rows, left=(0, 1))
    yield ""
    for own in others:
        text = f"{own.name}: {own.problem.split(' (')[0]}" if own.plan is None else _costs(own.name, best, own.plan)
        yield from folded(text, width)
    error = format_seconds(best.predicted.step_time_error_s)
    yield from folded(
        "mesh: replicas x FSDP shards x tp ranks. micro: samples at once x accumulation steps. more: than tpplan's "
        f"plan, whose own error bar is +/- {error}.",
        width,
    )


def _cells(name: str, plan: Plan, best: Plan) -> tuple[str, ...]:
    step, least = plan.predicted.step_time_s, best.predicted.step_time_s
    used = mfu(plan.predicted, plan.cluster.gpus)
    return (
        name,
        mesh_cell(plan),
        batch_cell(plan),
        format_seconds(step),
        f"+{step / least - 1:.1%}" if plan is not best and least else "",
        percent(used).replace(" ", "") if used is not None else "",
        gib(plan.predicted.peak_memory_bytes),
    )


def _costs(name: str, best: Plan, plan: Plan) -> str:
    """Lines on what a plan costs more, and which modules it lays out otherwise."""
    terms = main_terms(best, plan)
    rows = module_differences(best, plan) if best.mesh.tp > 1 and plan.mesh.tp > 1 else []
    shown = [f"{what} ({theirs or 'as it comes'}; ours: {ours or 'as it comes'})" for what, ours, theirs in rows]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    where = f" Otherwise: {'; '.join(shown[:_MOST_NAMED])}{more}." if shown else ""
    return f"{name}: {terms}{where}"

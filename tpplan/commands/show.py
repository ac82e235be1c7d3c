"""`tpplan show plan.json`: prints a plan's report, as `tpplan solve` printed it, or that of one of its stages;
`tpplan show --glossary` its words."""

import argparse
from typing import TYPE_CHECKING

from tpplan.commands.terminal.output import print_any, print_lines
from tpplan.core.errors import UsageError
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan
from tpplan.plan.report.glossary import glossary_lines

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("show", help="print a plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("plan", nargs="?", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("--stage", type=int, metavar="N", help="of a plan of stages, print stage N (from 0) alone")
    parser.add_argument("--glossary", action="store_true", help="explain the words of reports")
    parser.add_argument("--json", action="store_true", help="print the plan and numbers derived from it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan, or the glossary."""
    if (args.plan is None) != args.glossary:
        raise UsageError("show: expected plan.json, or --glossary alone")
    if args.glossary:
        print_lines(lambda width: list(glossary_lines(width)))
        return 0
    plan = load_plan(args.plan)
    print_any(plan if args.stage is None else stage_of(plan, args.stage, "show", args.plan), as_json=args.json)
    return 0


def stage_of(plan: Plan | PipelinePlan, number: int, verb: str, origin: str) -> Plan:
    """The plan of one stage. Raises UsageError for a plan without stages, and for a number that none has."""
    if isinstance(plan, Plan):
        raise UsageError(f"{verb} --stage: {origin} is a plan of a whole model, without stages")
    if not 0 <= number < len(plan.stages):
        raise UsageError(f"{verb} --stage {number}: {origin} has stages 0 to {len(plan.stages) - 1}")
    return plan.stages[number]

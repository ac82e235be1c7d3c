"""`tpplan show plan.json`: prints a plan's report, as `tpplan solve` printed it."""

import argparse
from typing import TYPE_CHECKING

from tpplan.commands.terminal.output import print_plan
from tpplan.plan.plan import Plan

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("show", help="print a plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("--json", action="store_true", help="print the plan and numbers derived from it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    print_plan(Plan.load(args.plan), as_json=args.json)
    return 0

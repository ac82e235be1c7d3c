"""`tpplan report plan.json -o report.html`: writes a plan as one HTML page that loads nothing from the network."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import check_output
from tpplan.commands.terminal.output import wrote
from tpplan.core.files import write_atomically
from tpplan.plan.plan import Plan

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "report", help="write a plan as an HTML page", description=__doc__, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="where to write the page")


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    from tpplan.page.plan_page import plan_page

    check_output(args.output)
    write_atomically(args.output, plan_page(Plan.load(args.plan), title=Path(args.plan).name))
    wrote(args.output)
    return 0

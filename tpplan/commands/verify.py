"""`tpplan verify plan.json model.py --ranks 4`: compares a plan on real ranks with one process, and its list of
collectives with those that are issued. `--dry` checks all but the values on a fake process group of the plan's real
size. A plan of stages is checked stage by stage, and as the whole model."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import STAGE_COLUMNS, check_output
from tpplan.commands.terminal.output import print_lines, write_json, wrote
from tpplan.commands.terminal.progress import bars
from tpplan.commands.terminal.values import count, seconds
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.verify.checks import Report

_EPILOG = """\
model.py (or model.py:BUILDER, hf:path/config.json) is the plan's model. Exit code 4 if a check fails; the differences
are printed below it, the first layer first. With -o, a plan that was edited or has no proof hash is written with a new
proof. On fewer ranks than the plan has, its choices run on a mesh whose degrees divide the plan's. A plan of stages
needs a rank for each part of its pipeline, twice as many where its stages are tensor-parallel; it takes no --layers.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "verify", "check a plan by running it", __doc__, _EPILOG, run=run)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("model", metavar="model.py", help="model.py, model.py:BUILDER or hf:path/config.json")
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="processes to start (default: the plan's, at most 4; of stages as many as they need)",
    )
    parser.add_argument(
        "--layers",
        type=count,
        metavar="N",
        help="keep the first N layers of each repeated block; not of a plan of stages",
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="one rank, or of stages one of each part, on fake tensors, at the plan's real size",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the plan with its proof here, if all checks pass"
    )
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="seconds for the ranks to finish")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the checks; returns 4 where one fails."""
    from tpplan.verify.verify import verify_plan

    if args.dry and args.ranks is not None:
        raise UsageError("verify: --dry starts no ranks: leave out --ranks")
    check_output(args.output)
    with bars(STAGE_COLUMNS) as progress:
        report = verify_plan(
            args.plan,
            args.model,
            ranks=args.ranks,
            layers=args.layers,
            dry=args.dry,
            mend=args.output is not None,
            timeout_s=args.timeout,
            progress=progress,
        )
    if args.json:
        data = {
            "ran": report.ran,
            "checks": [asdict(check) for check in report.checks],
            "is_right": report.is_right,
        }
        write_json(data)
    else:
        print_lines(lambda width: _lines(report))
    if report.is_right and report.mended is not None:
        report.mended.dump(args.output)
        wrote(args.output)
    return 0 if report.is_right else VerificationError.exit_code


def _lines(report: "Report") -> list[str]:
    width = max(len(check.name) for check in report.checks)
    lines = [report.ran, ""]
    for check in report.checks:
        lines.append(f"{check.outcome}  {check.name:{width}}  {check.detail}")
        lines += [f"      {difference}" for difference in check.differences]
    return lines

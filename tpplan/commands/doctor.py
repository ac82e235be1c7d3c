"""`tpplan doctor`: says in about ten lines what of this installation works, for a bug report."""

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from tpplan.commands.terminal.output import write, write_json
from tpplan.core.errors import TpplanError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.verify.doctor import Finding


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "doctor", help="say what works on this machine", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each part as soon as it was tried; returns 1 where a part fails."""
    from tpplan.trace.trace import quiet
    from tpplan.verify.doctor import State, examine

    findings: list[Finding] = []
    with quiet():
        for finding in examine():
            findings.append(finding)
            if not args.json:
                write("\n".join(_lines(finding)) + "\n")
                sys.stdout.flush()
    if args.json:
        write_json([asdict(finding) for finding in findings], sort_keys=False)
    return TpplanError.exit_code if any(finding.state is State.FAILS for finding in findings) else 0


def _lines(finding: "Finding") -> list[str]:
    line = f"{finding.state:<5}  {finding.name:<9}  {finding.said}"
    return [line, *(f"       {detail}" for detail in finding.details)]

"""`tpplan diff a.json b.json`: where two plans differ: settings, modules, and the step and the peak by part."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpplan.commands.terminal.comparison import part_rows
from tpplan.commands.terminal.output import aligned, folded, print_lines, write_json
from tpplan.core.escapes import escaped_data
from tpplan.plan.pipeline_plan import load_plan
from tpplan.plan.report.differences import (
    AnyPlan,
    memory_differences,
    module_differences,
    setting_differences,
    time_differences,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("diff", help="show where two plans differ", description=__doc__, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("plan", metavar="a.json", help="a plan, of a whole model or of stages")
    parser.add_argument("other", metavar="b.json", help="another plan, of the same model or not")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the differences."""
    plan, other = escaped_data(load_plan(args.plan)), escaped_data(load_plan(args.other))
    if args.json:
        write_json(
            {
                "settings": setting_differences(plan, other),
                "modules": module_differences(plan, other),
                "time_s": time_differences(plan, other),
                "memory_bytes": memory_differences(plan, other),
            }
        )
    else:
        print_lines(lambda width: list(_lines(plan, other, args.plan, args.other, width)))
    return 0


def _lines(plan: AnyPlan, other: AnyPlan, name: str, other_name: str, width: int) -> Iterator[str]:
    yield from aligned([("", name, other_name, "difference"), *part_rows(plan, other)], left=(0,))
    for title, rows in (
        ("Settings", setting_differences(plan, other)),
        ("Modules", module_differences(plan, other)),
    ):
        yield from ("", title if rows else f"{title}: the same")
        for what, ours, theirs in rows:
            yield f"  {what}"
            for sign, text in (("-", ours), ("+", theirs)):
                first, *rest = folded(f"{sign} {text or 'nothing'}", width - 4)
                yield from (f"    {first}", *(f"      {line}" for line in rest))

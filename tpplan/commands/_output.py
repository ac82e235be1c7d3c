"""How verbs print a plan: one function, so that `show` prints what `solve` printed."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence

from tpplan.plan import Plan
from tpplan.report import DEFAULT_WIDTH, as_data, render

#: longer lines are hard to read, however wide the terminal; on shorter ones nothing is left of the tables
_MAX_WIDTH = 120
_MIN_WIDTH = 40


def print_lines(lines_of: Callable[[int], Sequence[str]]) -> None:
    """Writes lines to stdout, made for the terminal's width where there is one."""
    sys.stdout.write("\n".join(lines_of(terminal_width())) + "\n")


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Cells padded to the width of their column, at the right but for the columns in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def folded(line: str, width: int) -> list[str]:
    """A line of text in lines of that width; one of a table, which is indented, as it is."""
    if not line or line.startswith(" "):
        return [line]
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


def terminal_width() -> int:
    """Columns to print for: the terminal's, as far as they are readable."""
    columns = shutil.get_terminal_size(fallback=(DEFAULT_WIDTH, 0)).columns
    return max(_MIN_WIDTH, min(columns, _MAX_WIDTH))


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Writes a plan to stdout: as JSON, or as the report, coloured and as wide as the terminal where it is one."""
    if as_json:
        text = json.dumps(as_data(plan), indent=2, sort_keys=True) + "\n"
    else:
        text = render(plan, width=terminal_width(), color=sys.stdout.isatty())
    sys.stdout.write(text)

"""How verbs print a plan: one function, so that `show` prints what `solve` printed."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tpplan.core.escapes import escaped_lines
from tpplan.plan.plan import Plan
from tpplan.plan.report import DEFAULT_WIDTH, as_data, render

#: longer lines are hard to read, however wide the terminal; on shorter ones nothing is left of the tables
_MAX_WIDTH = 120
_MIN_WIDTH = 40


def write(text: str, *, to_stderr: bool = False, is_styled: bool = False) -> None:
    """Writes text to stdout, or stderr: the one place where a command prints. What a terminal would obey is escaped,
    unless it is styled, by a report that has escaped what it holds."""
    stream = sys.stderr if to_stderr else sys.stdout
    encoding = stream.encoding or "utf-8"
    safe = text if is_styled else escaped_lines(text)
    stream.write(safe.encode(encoding, errors="backslashreplace").decode(encoding))


def write_json(data: object, *, sort_keys: bool = True) -> None:
    """Writes data to stdout as JSON; DEL, which JSON may hold, as its escape."""
    write(json.dumps(data, indent=2, sort_keys=sort_keys).replace("\x7f", "\\u007f") + "\n")


def wrote(path: Path, more: str = "") -> None:
    """Says on stderr which file there is now."""
    write(f"wrote {path}{more}\n", to_stderr=True)


def print_lines(lines_of: Callable[[int], Sequence[str]]) -> None:
    """Writes lines to stdout, made for the terminal's width where there is one."""
    write("\n".join(lines_of(terminal_width())) + "\n")


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
        write_json(as_data(plan))
    else:
        write(render(plan, width=terminal_width(), color=sys.stdout.isatty()), is_styled=True)

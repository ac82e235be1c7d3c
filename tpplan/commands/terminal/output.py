"""How verbs print. `print_plan` serves `solve` and `show`, so that both print the same."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from tpplan.core.escapes import escaped_lines
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.plan.report import DEFAULT_WIDTH, as_data, render
from tpplan.plan.report.stages import stage_lines

#: widest and narrowest report, in columns: longer lines are hard to read, shorter ones break the tables
_MAX_WIDTH = 120
_MIN_WIDTH = 40


def write(text: str, *, to_stderr: bool = False, is_styled: bool = False) -> None:
    """Writes text to stdout or stderr; all commands print through this function.

    Terminal control characters are escaped, unless the text is styled by a report that has escaped its content.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    encoding = stream.encoding or "utf-8"
    safe = text if is_styled else escaped_lines(text)
    stream.write(safe.encode(encoding, errors="backslashreplace").decode(encoding))


def write_json(data: object, *, sort_keys: bool = True) -> None:
    """Writes data to stdout as JSON, with DEL escaped, which json leaves as it is."""
    write(json.dumps(data, indent=2, sort_keys=sort_keys).replace("\x7f", "\\u007f") + "\n")


def wrote(path: Path, more: str = "") -> None:
    """Says on stderr that a file was written."""
    write(f"wrote {path}{more}\n", to_stderr=True)


def print_lines(lines_of: Callable[[int], Sequence[str]]) -> None:
    """Writes the lines that `lines_of` gives for the terminal's width to stdout."""
    write("\n".join(lines_of(terminal_width())) + "\n")


def print_answer(lines: Iterable[str], data: object, *, as_json: bool) -> None:
    """Writes an answer to stdout: its data as JSON, or its lines, folded to the terminal's width."""
    if as_json:
        write_json(data)
    else:
        _print_folded(lines)


def _print_folded(lines: Iterable[str]) -> None:
    print_lines(lambda width: [part for line in lines for part in folded(line, width)])


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows with cells padded to the width of their column, left-aligned in the columns `left`, else right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def folded(line: str, width: int) -> list[str]:
    """A line of text wrapped to the width, below its own text where a name stands before it, two spaces or more apart;
    an indented line, which is a row of a table, is left as it is."""
    if not line or line.startswith(" "):
        return [line]
    name = re.match(r"\S+(?: \S+)* {2,}", line)
    below = " " * (len(name[0]) if name else 0)
    return textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def terminal_width() -> int:
    """Columns to print for: the terminal's, between _MIN_WIDTH and _MAX_WIDTH."""
    columns = shutil.get_terminal_size(fallback=(DEFAULT_WIDTH, 0)).columns
    return max(_MIN_WIDTH, min(columns, _MAX_WIDTH))


def print_any(plan: Plan | PipelinePlan, *, as_json: bool) -> None:
    """Writes a plan, of a whole model or of stages, to stdout: as JSON, or as its report."""
    if isinstance(plan, Plan):
        print_plan(plan, as_json=as_json)
    elif as_json:
        write(plan.dumps())
    else:
        _print_folded(stage_lines(plan))


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Writes a plan to stdout: as JSON, or as the report with the terminal's width and colours."""
    if as_json:
        write_json(as_data(plan))
    else:
        write(render(plan, width=terminal_width(), color=sys.stdout.isatty()), is_styled=True)

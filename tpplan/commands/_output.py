"""How verbs print a plan: one function, so that `show` prints what `solve` printed."""

import json
import os
import shutil
import sys

from tpplan.plan import Plan
from tpplan.report import DEFAULT_WIDTH, as_data, render

#: longer lines are hard to read, however wide the terminal
_MAX_WIDTH = 120


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Writes a plan to stdout: as JSON, or as the report, coloured and as wide as the terminal where it is one."""
    if as_json:
        text = json.dumps(as_data(plan), indent=2, sort_keys=True) + "\n"
    else:
        is_terminal = sys.stdout.isatty()
        columns = shutil.get_terminal_size().columns if is_terminal else int(os.environ.get("COLUMNS") or DEFAULT_WIDTH)
        text = render(plan, width=min(columns, _MAX_WIDTH), color=is_terminal)
    sys.stdout.write(text)

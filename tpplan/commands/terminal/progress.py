"""Progress bars of a command on stderr, shown only on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: called with (stage, done, total)
Report = Callable[[str, int, int], None]


@contextlib.contextmanager
def bars(width: int, *, is_shown: bool = True, stays: bool = False) -> Iterator[Report]:
    """Yields a function that shows a bar for each stage, with `width` columns for its name; it does nothing without a
    terminal. Bars are erased at the end unless `stays`."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda stage, done, total: None
        return
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as shown:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield advance

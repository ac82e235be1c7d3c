"""Progress of a command on stderr: bars on a terminal, else a line every few seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tpplan.commands.terminal.output import write

#: called with (stage, done, total)
Report = Callable[[str, int, int], None]


#: seconds between lines of progress in a log
LINE_EVERY_S = 5.0


class _Lines:
    """Progress in lines, for a log: stage, how much of it is done, and the seconds since the start."""

    def __init__(self, start: float) -> None:
        self.start = self.last = start

    def advance(self, stage: str, done: int, total: int) -> None:
        """Writes a line where the last was long enough ago."""
        now = time.monotonic()
        if now - self.last >= LINE_EVERY_S:
            self.last = now
            write(f"tpplan: {stage} {done} of {total}, {now - self.start:.0f} s\n", to_stderr=True)


@contextlib.contextmanager
def bars(width: int, *, is_shown: bool = True, stays: bool = False) -> Iterator[Report]:
    """Yields a function that shows a bar for each stage, with `width` columns for its name; without a terminal it
    writes a line where LINE_EVERY_S have passed since the last. Bars are erased at the end unless `stays`."""
    if not is_shown:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        yield _Lines(time.monotonic()).advance
        return
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as shown:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield advance

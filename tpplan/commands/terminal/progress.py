"""Progress of a command on stderr: bars on a terminal, else a line every few seconds."""

import contextlib
import sys
import threading
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
    """Progress in lines, for a log: stage, how much of it is done, and the seconds since the start. A thread writes one
    every LINE_EVERY_S from the first report on, also where a stage reports nothing for long."""

    def __init__(self) -> None:
        self._start, self._is_over = time.monotonic(), threading.Event()
        self._now: tuple[str, int, int] | None = None
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)
        self._thread.start()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Notes what the next line says."""
        self._now = (stage, done, total)

    def end(self) -> None:
        """Ends the lines."""
        self._is_over.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._is_over.wait(LINE_EVERY_S):
            if self._now is not None:
                stage, done, total = self._now
                seconds = time.monotonic() - self._start
                write(f"tpplan: {stage} {done} of {total}, {seconds:.0f} s\n", to_stderr=True)


@contextlib.contextmanager
def bars(width: int, *, is_shown: bool = True, stays: bool = False) -> Iterator[Report]:
    """Yields a function that shows a bar for each stage, with `width` columns for its name; without a terminal it
    writes a line every LINE_EVERY_S. Bars are erased at the end unless `stays`."""
    if not is_shown:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        lines = _Lines()
        try:
            yield lines.advance
        finally:
            lines.end()
        return
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not stays) as shown:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield advance

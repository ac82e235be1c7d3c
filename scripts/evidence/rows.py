"""A row of a table per subject, found in a process of its own that is ended when its budget of CPU seconds is spent."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from gloo_ranks import described

DONE = "done"
#: wall seconds per CPU second of a budget, after which a process that waits for good is ended
WALL_PER_CPU_S = 10.0
#: wall seconds between two looks at what has been spent
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of a subject. `failed` is the first stage that failed; `problems` are lines for the reader."""

    model: str
    stage: str = "build"
    failed: str = ""
    problems: tuple[str, ...] = ()
    cpu_s: float = 0.0


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(slots=True)
class Reporter(Generic[AnyRow]):
    """Sends the row after each change; `stage` is where it stands."""

    row: AnyRow
    connection: Connection

    def put(self, row: AnyRow) -> None:
        """The row as it is from now on."""
        self.row = row
        self.connection.send(row)

    def at(self, stage: str) -> None:
        """Where it stands."""
        self.put(replace(self.row, stage=stage))

    def note(self, problem: str) -> None:
        """A line for the reader."""
        self.put(replace(self.row, problems=(*self.row.problems, problem)))

    def progress(self, stage: str, done: int, total: int) -> None:
        """What solve calls."""
        if stage != self.row.stage.partition(" ")[0]:
            self.at(stage)

    def fail(self, stage: str, problem: str) -> None:
        """The first failure names the status; all are listed."""
        self.note(problem)
        self.put(replace(self.row, failed=self.row.failed or stage))

    @contextlib.contextmanager
    def reported(self, stage: str, label: str = "") -> Iterator[None]:
        """An error inside becomes a line of the row, under the stage it came from."""
        self.at(stage)
        try:
            yield
        except Exception as error:
            at = self.row.stage
            self.fail(at if stage == "build" else stage, f"{at}{label}: {described(error)}")


def in_own_process(row: AnyRow, live: Callable[[Reporter[AnyRow]], None], budget_s: float) -> AnyRow:
    """The row that live(reporter) has reported, begun with `row`, and its CPU seconds; as far as it came where the
    process dies or it and its children have spent budget_s CPU seconds, or WALL_PER_CPU_S times that by the clock."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(row, live, theirs))
    before_s = _children_cpu_s()
    process.start()
    group = process.pid
    assert group is not None
    theirs.close()
    try:
        row = _last_row(row, ours, group, budget_s)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # there is no such group where no session was started
            os.killpg(group, signal.SIGKILL)
        process.join()
    return replace(row, cpu_s=_children_cpu_s() - before_s)


def _live(row: AnyRow, live: Callable[[Reporter[AnyRow]], None], connection: Connection) -> None:
    os.setsid()  # the parent ends this process and its ranks at once
    reporter = Reporter(row, connection)
    live(reporter)
    reporter.at(DONE)


def _last_row(row: AnyRow, connection: Connection, group: int, budget_s: float) -> AnyRow:
    deadline = time.monotonic() + WALL_PER_CPU_S * budget_s
    while row.stage != DONE:
        if not connection.poll(LOOK_S):
            if spent := _over_budget(group, budget_s, deadline):
                return replace(row, failed="timeout", problems=(*row.problems, f"{row.stage}: not done in {spent}"))
            continue
        try:
            row = connection.recv()
        except EOFError:
            return replace(row, failed=row.stage, problems=(*row.problems, f"{row.stage}: the process died"))
    return row


def _over_budget(group: int, budget_s: float, deadline: float) -> str:
    """What the processes of a group have spent too much of, in words; empty while they may go on."""
    if group_cpu_s(group) > budget_s:
        return f"{budget_s:g} CPU s"
    return f"{WALL_PER_CPU_S * budget_s:g} s by the clock" if time.monotonic() > deadline else ""


def group_cpu_s(group: int) -> float:
    """CPU seconds of the processes of a group and of their children that have ended; 0 where /proc does not tell."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # proc(5): the fields after the name, which may hold anything: state, parent, group; 11 to 14 are times
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _children_cpu_s() -> float:
    """CPU seconds of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def widths(header: Sequence[str], least: dict[str, int]) -> list[int]:
    """Of the columns, by their names and the least that some need; the last is open."""
    return [max(len(name), least.get(name, 0)) for name in header[:-1]] + [0]


def line(texts: Sequence[str], column_widths: Sequence[int]) -> str:
    """A line of the table."""
    return "  ".join(text.ljust(width) for text, width in zip(texts, column_widths, strict=True)).rstrip()

"""Processes for scripts/evidence/adversary.py: forked, asked many things, and ended when they do not answer.

They are forked from a process that has computed nothing (see fork_server.py for why), which keeps them.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: threads that all sleep for so long wait for what does not come: on a busy machine what would run is not asleep
STUCK_S, SAMPLE_S = 10.0, 0.25
#: cases that a pair runs before another takes its place: process groups are made for each
CASES_OF_A_PAIR = 40


class LateError(Exception):
    """A process did not answer in time; it is to be ended."""


class DiedError(Exception):
    """A process ended without an answer."""


class Child:
    """A forked process that answers what it is asked by a function; with has_children=True it may fork others."""

    def __init__(
        self, answer: Callable[[Any], Any], prepare: Callable[[], None] = lambda: None, *, has_children: bool = False
    ) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connection, self.has_children = ours, has_children
        self.process = multiprocessing.get_context("fork").Process(
            target=_live, args=(theirs, ours, answer, prepare, has_children), daemon=not has_children
        )
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except (BrokenPipeError, ConnectionError):
            raise DiedError(f"exit code {self.process.exitcode}") from None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        fields = _stat(f"/proc/{self.process.pid}/stat")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    @property
    def is_asleep(self) -> bool:
        """No thread of the process runs or could."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        states = [_stat(f"{task}/stat")[:1] for task in (tasks.iterdir() if tasks.exists() else ())]
        return all(state in (["S"], ["Z"], []) for state in states)

    def receive(self, cpu_s: float) -> Any:
        """The answer. Raises LateError, after so many CPU seconds or where all sleeps, DiedError, and RuntimeError with
        the traceback of what the function raised."""
        limit = Limit([self], cpu_s)
        while not self.connection.poll(SAMPLE_S):
            limit.check()
        try:
            has_returned, outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(1.0)
            raise DiedError(f"exit code {self.process.exitcode}") from None
        if not has_returned:
            raise RuntimeError(outcome)
        return outcome

    def ask(self, message: object, cpu_s: float) -> Any:
        self.send(message)
        return self.receive(cpu_s)

    def end(self) -> None:
        """Kills the process and those that it started."""
        if self.has_children and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


class Limit:
    """On children that are waited for: CPU seconds that each may take, and how long all may sleep."""

    def __init__(self, children: Sequence[Child], cpu_s: float) -> None:
        self.children, self.cpu_s = children, cpu_s
        self.begun = [child.cpu_s for child in children]
        self.awake_at = time.monotonic()

    def check(self) -> None:
        """Raises LateError where a limit is passed."""
        for child, begun in zip(self.children, self.begun, strict=True):
            if child.cpu_s - begun > self.cpu_s:
                raise LateError(f"no answer in {self.cpu_s:.0f} CPU s")
        now = time.monotonic()
        if not all(child.is_asleep for child in self.children):
            self.awake_at = now
        if now - self.awake_at > STUCK_S:
            raise LateError(f"no answer, and all asleep for {STUCK_S:.0f} s")


def _stat(path: str) -> list[str]:
    """The fields of a process or thread from its state on; none where it has ended."""
    try:
        return Path(path).read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _live(
    connection: Connection,
    other: Connection,
    answer: Callable[[Any], Any],
    prepare: Callable[[], None],
    leads_group: bool,
) -> None:
    """A child's life; it ends when its parent's side is closed."""
    if leads_group:
        os.setpgid(0, 0)
    other.close()
    torch.set_num_threads(1)
    prepare()
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            outcome = pickle.dumps((True, answer(message)))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(outcome)


def join_group(number: int, num_ranks: int, store: Path) -> None:
    """The default process group, gloo over the loopback interface; nothing in it waits longer than its keeper does."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), num_ranks),
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=1000),
    )


class Ranks:
    """Ranks of one gloo group that are all asked alike, and are replaced once one has failed or not answered."""

    def __init__(self, num_ranks: int, answer: Callable[[Any], Any]) -> None:
        self.num_ranks, self.answer = num_ranks, answer
        self.children: list[Child] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.num_cases = 0

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self.folder.name) / "store"
        self.num_cases = 0
        for number in range(self.num_ranks):
            self.children.append(Child(self.answer, lambda number=number: join_group(number, self.num_ranks, store)))

    def end(self) -> None:
        for child in self.children:
            child.end()
        self.children = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def ask(self, message: object, cpu_s: float, is_failure: Callable[[Any], bool]) -> list[Any]:
        """Each rank's answer, in rank order; an exception in place of one that did not come or was none.

        Ranks of which one raised, or for whose answer is_failure holds, are replaced.
        """
        if not self.children or self.num_cases >= CASES_OF_A_PAIR:
            self.end()
            self.start()
        self.num_cases += 1
        found = self._answers(message, cpu_s, is_failure)
        if any(isinstance(each, Exception) or is_failure(each) for each in found):
            self.end()
        return found

    def _answers(self, message: object, cpu_s: float, is_failure: Callable[[Any], bool]) -> list[Any]:
        found: list[Any] = [LateError("no answer")] * self.num_ranks
        waiting = {child.connection: number for number, child in enumerate(self.children)}
        for child in self.children:
            with suppress(DiedError):
                child.send(message)
        while waiting:
            limit = Limit([self.children[number] for number in waiting.values()], cpu_s)
            while not (ready := wait(list(waiting), timeout=SAMPLE_S)):
                try:
                    limit.check()
                except LateError as error:
                    for number in waiting.values():
                        found[number] = error
                    return found
            for connection in ready:
                number = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    found[number] = self.children[number].receive(cpu_s)
                except (RuntimeError, DiedError, LateError) as error:
                    found[number] = error
        return found


def first_error(found: Sequence[Any]) -> str:
    """What is said of answers of which one is an exception."""
    for number, each in enumerate(found):
        if isinstance(each, Exception):
            return f"rank {number}: {type(each).__name__}: {(str(each).strip() or '-').splitlines()[-1]}"
    return ""

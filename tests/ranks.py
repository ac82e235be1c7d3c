"""Real ranks for tests: forked processes in one gloo group, each returning a value or its traceback.

A fork of a process that has imported torch costs 0.05 s where a spawn costs over a second. Ranks are not forked from
the test's process, which may have run a backward, but from one that forks.py starts. A rank keeps its sockets open
until its parent ends it, so that a peer never fails for another's early exit.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from forks import in_fork

Result = TypeVar("Result")

#: for a signalled rank to write its stack
STACK_GRACE_S = 0.3
#: for a death that made a peer fail to show: a dying rank's sockets close a moment before it can be seen to be dead
DEATH_GRACE_S = 1.0


class RankError(AssertionError):
    """A rank failed, died or did not finish. `traceback` is the rank's own, or where it stood. `is_of_gloo` says that a
    thread which runs no Python, such as gloo's, ended the process."""

    def __init__(self, rank: int, what: str, traceback: str, *, is_of_gloo: bool = False) -> None:
        super().__init__(f"rank {rank} {what}\n{traceback}")
        self.rank = rank
        self.what = what
        self.traceback = traceback
        self.is_of_gloo = is_of_gloo

    def __reduce__(self) -> tuple[Callable[..., "RankError"], tuple[int, str, str]]:
        return partial(RankError, is_of_gloo=self.is_of_gloo), (self.rank, self.what, self.traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A running rank, seen from the parent. `stack` is the file its stack is written to when it is asked or dies."""

    number: int
    process: BaseProcess
    connection: Connection
    stack: Path


def run_ranks(num_ranks: int, function: Callable[..., Result], *args: object, timeout_s: float = 60.0) -> list[Result]:
    """function(*args) on each of num_ranks ranks of a gloo group on this machine; the results in rank order.

    The function may be a closure: what it holds is copied. Classes and functions of test modules are found by name, in
    modules that the ranks import. When a rank raises, dies or is still running after timeout_s, all are ended and
    RankError is raised. Where a thread of gloo's own ended a rank, all run once more, with a warning: it was seen in
    one of ten thousand groups, inside malloc, and says nothing of what is tested.
    """
    found = in_fork(pickled_results, num_ranks, function, args, timeout_s)
    if isinstance(found, RankError) and found.is_of_gloo:
        warnings.warn(f"run again, as a thread that runs no Python ended a rank: {found}", stacklevel=2)
        found = in_fork(pickled_results, num_ranks, function, args, timeout_s)
    if isinstance(found, RankError):
        raise found
    return [pickle.loads(result) for result in found]


def pickled_results(
    num_ranks: int, function: Callable[..., object], args: tuple[object, ...], timeout_s: float
) -> list[bytes] | RankError:
    """What the ranks return, in rank order, or what went wrong."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, bytes] = {}
    try:
        with started_ranks(num_ranks, function, args, timeout_s) as ranks:
            waiting = {rank.connection: rank for rank in ranks}
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise late(list(waiting.values()), timeout_s)
                for connection in ready:
                    rank = waiting.pop(connection)
                    results[rank.number] = receive(rank, ranks)
    except RankError as error:
        return error
    return [results[number] for number in range(num_ranks)]


@contextmanager
def started_ranks(
    num_ranks: int, function: Callable[..., Result], args: tuple[object, ...], timeout_s: float
) -> Iterator[list[Rank]]:
    """The ranks, running; all of them are killed and reaped on the way out."""
    context = multiprocessing.get_context("fork")
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for number in range(num_ranks):
                ours, theirs = context.Pipe()
                stack = Path(directory) / f"stack-{number}"
                process = context.Process(
                    target=rank_main,
                    args=(number, num_ranks, Path(directory) / "store", stack, theirs, function, args, timeout_s),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append(Rank(number=number, process=process, connection=ours, stack=stack))
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.process.close()
                rank.connection.close()


def rank_main(
    number: int,
    num_ranks: int,
    store: Path,
    stack: Path,
    connection: Connection,
    function: Callable[..., Result],
    args: tuple[object, ...],
    timeout_s: float,
) -> None:
    """The child: joins the group, runs, sends (succeeded, result or traceback), and waits for its end."""
    with stack.open("w") as stack_file:
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, stack_file)
        os.dup2(stack_file.fileno(), sys.stderr.fileno())  # what C++ says before it ends the process is shown too
        try:
            join_group(number, num_ranks, store, timeout_s)
            outcome = pickle.dumps((True, pickle.dumps(function(*args))))
        except BaseException:  # pytest's skip and fail are no Exceptions
            outcome = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            connection.send_bytes(outcome)
            connection.recv_bytes()  # nothing is ever sent: this returns when the parent kills this rank, or is gone
        finally:
            os._exit(0)


def join_group(number: int, num_ranks: int, store: Path, timeout_s: float) -> None:
    """Joins the default process group: gloo over the loopback interface, meeting in a file."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), num_ranks),
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def receive(rank: Rank, ranks: Sequence[Rank]) -> bytes:
    """The result that a rank sent, pickled.

    Raises RankError for a traceback, or for a death that this comes of.
    """
    try:
        succeeded, outcome = pickle.loads(rank.connection.recv_bytes())
    except EOFError:
        raise dead(rank, ranks) from None
    if succeeded:
        return outcome
    dying = wait([r.process.sentinel for r in ranks], timeout=DEATH_GRACE_S)
    for other in ranks:
        if other.process.sentinel in dying:
            raise dead(other, ranks)
    raise RankError(rank.number, "failed", outcome)


def dead(rank: Rank, ranks: Sequence[Rank]) -> RankError:
    """The error for a rank that died without a word, with what became of all."""
    rank.process.join()
    time.sleep(STACK_GRACE_S)  # a fault that others share shows by then
    fates = "\n".join(f"rank {r.number}: exit code {r.process.exitcode}\n{r.stack.read_text()}" for r in ranks)
    is_crash = rank.process.exitcode in (-signal.SIGABRT, -signal.SIGSEGV)
    is_of_gloo = is_crash and "Current thread" not in rank.stack.read_text()  # faulthandler's words for a Python thread
    return RankError(rank.number, f"died with exit code {rank.process.exitcode}", fates, is_of_gloo=is_of_gloo)


def late(ranks: Sequence[Rank], timeout_s: float) -> RankError:
    """The error for ranks that did not finish, with where each stands."""
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(STACK_GRACE_S)
    stacks = "\n".join(f"rank {rank.number}:\n{rank.stack.read_text()}" for rank in ranks)
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return RankError(ranks[0].number, f"did not finish in {timeout_s} s; unfinished: {numbers}", stacks)

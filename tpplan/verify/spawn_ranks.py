"""Runs a function on ranks of this machine, started for it: processes in one process group, under tpplan.train.guard.

Ranks are forked from a server process that has only imported torch, so they start in milliseconds, inherit no threads,
and may use a GPU.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, untyped

from tpplan.core.errors import RankFailedError, TpplanError
from tpplan.train.guard import SAID, guard

Result = TypeVar("Result")

#: seconds to wait for the other ranks' account after one has failed; a guard needs less to find out
AFTERMATH_S = 45.0
#: modules that a rank would import when it first uses DTensor
_PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The function that ranks run, its arguments and environment. The folder holds the process group's store."""

    folder: Path
    environment: dict[str, str]
    device_type: str
    timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A rank's process, the connection to it, and the file with what it writes to stderr."""

    rank: int
    process: BaseProcess
    connection: Connection
    stderr: Path


def on_ranks(
    num_ranks: int, function: Callable[..., Result], *arguments: object, device_type: str = "cpu", timeout_s: float
) -> list[Result]:
    """Runs function(*arguments) on each rank of a gloo (CPU) or NCCL (GPU) group. Returns the results in rank order.

    The function must be importable, arguments and results picklable. Raises the TpplanError that a rank raised, or
    RankFailedError, with what the ranks agreed on, where one fails otherwise, dies or takes longer than timeout_s. All
    ranks are ended at the end.
    """
    with tempfile.TemporaryDirectory(prefix="tpplan-ranks-") as name:
        job = _Job(
            folder=Path(name),
            environment=dict(os.environ),
            device_type=device_type,
            timeout_s=timeout_s,
            function=function,
            arguments=arguments,
        )
        with _started(num_ranks, job) as workers:
            results = _collected(workers, timeout_s)
    return [results[rank] for rank in range(num_ranks)]


def _collected(workers: Sequence[_Worker], timeout_s: float) -> dict[int, Any]:
    """The results by rank. Raises the cause where a rank fails."""
    waiting = {worker.connection: worker for worker in workers}
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _late(list(waiting.values()), failures, timeout_s)
        for connection in ready:
            assert isinstance(connection, Connection)
            worker = waiting.pop(connection)
            outcome = _received(worker)
            if isinstance(outcome, Exception):
                failures[worker.rank] = outcome
                deadline = min(deadline, time.monotonic() + AFTERMATH_S)
            else:
                (results[worker.rank],) = outcome
    if failures:
        raise _cause(failures)
    return results


@contextlib.contextmanager
def _started(num_ranks: int, job: _Job) -> Iterator[list[_Worker]]:
    """Starts the ranks; ends them at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOADED, job.function.__module__])
    with _imports_as_here():
        forkserver.ensure_running()
    workers: list[_Worker] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            stderr = job.folder / f"stderr-{rank}"
            process = context.Process(target=_main, args=(rank, num_ranks, theirs, stderr, job), daemon=True)
            process.start()
            theirs.close()
            workers.append(_Worker(rank=rank, process=process, connection=ours, stderr=stderr))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()


@contextlib.contextmanager
def _imports_as_here() -> Iterator[None]:
    """Makes Python processes that are started inside import from this process's sys.path.

    The fork server of Python 3.12 and older does not take over sys.path: it would import from the working directory
    first, and miss other folders.
    """
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _main(rank: int, num_ranks: int, connection: Connection, stderr: Path, job: _Job) -> None:
    """The main function of a rank: joins the group, runs the job, sends the outcome, and keeps its sockets open until
    it is ended."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    try:
        os.environ.clear()
        os.environ.update(job.environment)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        _join(rank, num_ranks, job)
        with guard():
            outcome: object = (job.function(*job.arguments),)
    except Exception as error:
        traceback.print_exc()
        outcome = error
    sys.stdout.flush()
    try:
        connection.send_bytes(_pickled(outcome))
        connection.recv_bytes()  # nothing is ever sent: waits until this rank is killed, or its parent is gone
    finally:
        os._exit(0)


def _pickled(outcome: object) -> bytes:
    """The pickled outcome; an error that cannot be pickled becomes a RankFailedError."""
    try:
        return pickle.dumps(outcome)
    except (TypeError, AttributeError, pickle.PicklingError):
        return pickle.dumps(RankFailedError(f"{type(outcome).__name__}: {outcome}"))


def _join(rank: int, num_ranks: int, job: _Job) -> None:
    """Joins the default process group by a store in a file; gloo uses the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    if job.device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if job.device_type == "cuda" else "gloo",
        store=FileStore(str(job.folder / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=job.timeout_s),
    )


def _received(worker: _Worker) -> tuple[Any] | Exception:
    """A rank's result in a tuple, or its error."""
    try:
        outcome: tuple[Any] | Exception = pickle.loads(worker.connection.recv_bytes())
    except EOFError:
        worker.process.join()
        said = _verdict_in(worker.stderr)
        code = worker.process.exitcode
        return RankFailedError(said or f"rank {worker.rank} died with exit code {code}{_end_of(worker.stderr)}")
    return outcome


def _verdict_in(stderr: Path) -> str:
    """The reason that the guard printed when it ended the rank; "" where it printed none."""
    text = stderr.read_text(errors="replace") if stderr.exists() else ""
    return text.rpartition(SAID)[2].strip() if SAID in text else ""


def _end_of(stderr: Path) -> str:
    text = stderr.read_text(errors="replace").strip() if stderr.exists() else ""
    return ":\n" + "\n".join(text.splitlines()[-15:]) if text else ""


def _cause(failures: dict[int, Exception]) -> Exception:
    """The error to raise for failed ranks: what ranks agreed on, if anything; else the first rank's own error."""
    errors = [failures[rank] for rank in sorted(failures)]
    agreed = [
        error for error in errors if isinstance(error, RankFailedError) and " died with exit code" not in str(error)
    ]
    found = next(iter(agreed or errors))
    return found if isinstance(found, TpplanError) else RankFailedError(f"{type(found).__name__}: {found}")


def _late(waiting: Sequence[_Worker], failures: dict[int, Exception], timeout_s: float) -> Exception:
    if failures:
        return _cause(failures)
    numbers = ", ".join(str(worker.rank) for worker in waiting)
    return RankFailedError(f"ranks {numbers} did not finish in {timeout_s:.0f} s: give them more time with --timeout")

"""Ends all ranks when one fails, dies or is cut off: every rank ends within seconds, with the same message.

    torch.distributed.init_process_group()
    with tpplan.guard():
        train()

A rank that raises leaves its peers in a collective that never ends; the peers of a killed rank fail with a closed
connection (gloo) or wait for minutes (NCCL). Inside the guard each rank runs a thread that writes a heartbeat to the
process group's store, watches the heartbeat of the next rank, and reads reported failures. The verdict, which all ranks
share, is the first report of a rank's own error; without one, of a rank without heartbeat; without that, of a lost
connection. A rank whose main thread returns raises the verdict as RankFailedError; in a rank that hangs in a
collective, which nothing can interrupt, the guard's thread prints it and ends the process.

Leaving the guard waits for all ranks to leave it.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, untyped

from tpplan.core.errors import RankFailedError, first_line
from tpplan.torch_internals.groups import default_store

#: prefix of a verdict on stderr
SAID = "tpplan: error: "
#: seconds between two heartbeats, and between two looks at the next rank's
BEAT_S = 1.0
#: seconds without a heartbeat after which a rank counts as dead: normally; after a peer has lost a connection; and
#: before its first heartbeat, while it may still be on its way into the guard
SILENCE_S, SILENCE_AFTER_LOSS_S, ENTRY_S = 15.0, 5.0, 45.0
#: seconds after the first report of a lost connection in which a better cause may be reported
PATIENCE_S = 20.0
#: seconds that a main thread has to return after a verdict, before its process is ended
GRACE_S = 3.0
#: parts of the messages with which libraries report a peer that is gone, or a group that ended because of one
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket Timeout")
_TORCH = Path(torch.__file__).parent


class Cause(StrEnum):
    """own: the rank raised an error. silent: the rank's heartbeat stopped. lost: the rank lost a connection."""

    OWN = "own"
    SILENT = "silent"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """A failure of a rank, reported by itself or by the rank that watches it."""

    rank: int
    host: str
    cause: Cause
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}: {self.text}"


@contextlib.contextmanager
def guard(*, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Ends all ranks with the same message when one fails inside the context; does nothing without a process group.

    A rank without a heartbeat for silence_s seconds counts as dead; a thread of its own writes one each second. Ranks
    whose code returns raise RankFailedError, which names the failed rank and its error; the others print that message
    and end with exit code 1. Every rank must enter and leave the guard, as often as the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        yield
        return
    watch = _Watch.start(silence_s)
    try:
        yield
    except Exception as error:
        raise RankFailedError(watch.fail(report_of(error, dist.get_rank()))) from error
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            watch.fail(report_of(error, dist.get_rank()))
        raise
    else:
        if (verdict := watch.leave()) is not None:
            raise RankFailedError(verdict)
    finally:
        watch.has_returned.set()


def report_of(error: BaseException, rank: int) -> FailureReport:
    """Returns a rank's report of an error, with the last line of code outside of torch in its traceback."""
    text = str(error).strip() or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    cause = Cause.LOST if is_lost_connection(error) else Cause.OWN
    return FailureReport(
        rank=rank, host=socket.gethostname(), cause=cause, text=f"{type(error).__name__}: {text}{where}"
    )


def is_lost_connection(error: BaseException) -> bool:
    """True for an error that a collective or the store raises when a peer is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)
    )


def verdict_of(reports: Sequence[FailureReport], waited_s: float) -> str | None:
    """Returns the message for all ranks; None where reports, in order of arrival, give no cause yet.

    After waited_s > PATIENCE_S seconds since the first report a lost connection is cause enough.
    """
    for cause in (Cause.OWN, Cause.SILENT):
        for report in reports:
            if report.cause is cause:
                return str(report)
    return str(reports[0]) if reports and waited_s > PATIENCE_S else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Watch:
    """A rank's keys in the store, and the thread that writes and reads them."""

    store: Store
    rank: int
    num_ranks: int
    silence_s: float
    has_returned: threading.Event = field(default_factory=threading.Event)
    #: set when the main thread has left the guarded code or failed in it, so that it need not be ended
    is_leaving: threading.Event = field(default_factory=threading.Event)
    first_report_at: float | None = None

    @classmethod
    def start(cls, silence_s: float) -> "_Watch":
        """Starts the thread. Keys contain the number of times that this rank entered a guard, equal on all ranks."""
        rank = dist.get_rank()
        store = _own_connection(default_store())
        entered = store.add(f"tpplan/guard/entered/{rank}", 1)
        watch = cls(
            store=PrefixStore(f"tpplan/guard/{entered}", store),
            rank=rank,
            num_ranks=dist.get_world_size(),
            silence_s=silence_s,
        )
        threading.Thread(target=watch.run, name="tpplan guard", daemon=True).start()
        return watch

    # The watching thread

    def run(self) -> None:
        """Writes heartbeats, watches the next rank and reads reports, until the guard is left or there is a verdict."""
        neighbour = (self.rank + 1) % self.num_ranks
        beats, seen, seen_at = 0, b"", time.monotonic()
        has_reported = False
        while not self.has_returned.is_set():
            try:
                beats += 1
                self.store.set(f"alive/{self.rank}", str(beats))
                latest = self._read(f"alive/{neighbour}")
                if latest != seen:
                    seen, seen_at = latest, time.monotonic()
                silent_s = time.monotonic() - seen_at
                if not has_reported and silent_s > self._limit_s(bool(seen)) and not self._has_left(neighbour):
                    self._post(_silence(neighbour, silent_s))
                    has_reported = True
                verdict = self._verdict()
            except Exception as error:  # the store fails when the process that holds it is gone
                verdict = self._without_store(error)
            if verdict is not None:
                self._end(verdict)
                return
            self.has_returned.wait(BEAT_S)

    def _limit_s(self, has_entered: bool) -> float:
        if not has_entered:
            return max(ENTRY_S, self.silence_s)
        return self.silence_s if self.first_report_at is None else min(self.silence_s, SILENCE_AFTER_LOSS_S)

    def _has_left(self, rank: int) -> bool:
        return bool(self.store.check([f"left/{rank}"]))

    def _end(self, verdict: str) -> None:
        """Ends this process unless its main thread returns within GRACE_S."""
        if self.is_leaving.wait(GRACE_S) or self.has_returned.is_set():
            return
        sys.stdout.flush()
        sys.stderr.write(f"{SAID}{verdict}\n")
        sys.stderr.flush()
        os._exit(RankFailedError.exit_code)

    # Reports and the verdict

    def fail(self, report: FailureReport) -> str:
        """Reports this rank's failure, and returns the verdict once there is one."""
        self.is_leaving.set()
        try:
            self._post(report)
            while (verdict := self._verdict()) is None:
                time.sleep(BEAT_S / 4)
        except Exception as error:  # the store fails when the process that holds it is gone
            return str(report) if report.cause is Cause.OWN else self._without_store(error)
        return verdict

    def leave(self) -> str | None:
        """Waits until every rank has left, and returns None; returns the verdict where a rank failed."""
        self.is_leaving.set()
        try:
            self.store.set(f"left/{self.rank}", "1")
            num_left = self.store.add("left", 1)
            while num_left < self.num_ranks:
                if (verdict := self._verdict()) is not None:
                    return verdict
                time.sleep(BEAT_S / 20)
                num_left = self.store.add("left", 0)
        except Exception:  # the process that holds the store has left before, and this rank has done its work
            return None
        return None

    def _post(self, report: FailureReport) -> None:
        number = self.store.add("reports", 1)
        self.store.set(f"report/{number}", json.dumps(asdict(report)))

    def _verdict(self) -> str | None:
        """Returns the verdict that is in the store, or sets it as soon as there is a cause; None before."""
        if self.store.check(["verdict"]):
            return str(self.store.get("verdict").decode())
        reports = [
            FailureReport(**{**data, "cause": Cause(data["cause"])})
            for number in range(1, self.store.add("reports", 0) + 1)
            if (text := self._read(f"report/{number}")) and (data := json.loads(text))
        ]
        if not reports:
            return None
        if self.first_report_at is None:
            self.first_report_at = time.monotonic()
        verdict = verdict_of(reports, time.monotonic() - self.first_report_at)
        return str(self.store.compare_set("verdict", "", verdict).decode()) if verdict is not None else None

    def _read(self, key: str) -> bytes:
        return self.store.get(key) if self.store.check([key]) else b""

    def _without_store(self, error: Exception) -> str:
        return (
            "rank 0, or another process that holds the process group's store, is gone: it was killed, or ended before "
            f"the others ({first_line(error)})"
        )


def _silence(rank: int, silent_s: float) -> FailureReport:
    text = f"died, was killed or is cut off: no sign of life for {silent_s:.0f} s"
    return FailureReport(rank=rank, host="", cause=Cause.SILENT, text=text)


def _own_connection(store: Store) -> Store:
    """Returns a second connection to the store: a thread that waits for a key blocks all others on its connection."""
    return store.clone() if hasattr(store, "clone") else store

"""All ranks end together: when one fails, dies or is cut off, every rank ends with the same message, in seconds.

    torch.distributed.init_process_group()
    with tpplan.guard():
        train()

A rank that raises leaves its peers in a collective that never ends; one that is killed makes them fail for its closed
connection (gloo) or wait for minutes (NCCL). Inside the guard each rank has a thread that shows in the process group's
store that the rank lives, looks whether its neighbour does, and whether anyone has reported a failure. What is reported
first and is no lost connection is the cause; else a rank that shows no sign of life; else the lost connection. That
becomes the verdict, once for all. A rank whose own thread comes back raises it as RankFailedError; one that stays in a
collective, which nothing can wake, prints it and is ended.

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

from tpplan.core.errors import RankFailedError
from tpplan.torch_internals.groups import PrefixStore, Store, default_store

#: what stands before a verdict on stderr
SAID = "tpplan: error: "
#: between two signs of life, and between two looks at those of others
BEAT_S = 1.0
#: without a sign of life for so long a rank is dead, or as good as; for so long, where a peer has lost a connection;
#: and for so long, where it has shown none yet: it is on its way into the guard
SILENCE_S, SILENCE_AFTER_LOSS_S, ENTRY_S = 15.0, 5.0, 45.0
#: for a better cause to be reported than a lost connection
PATIENCE_S = 20.0
#: for a rank to come back from where it is, once there is a verdict
GRACE_S = 3.0
#: what libraries say of a peer that is gone, or of a group that ended because of one
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket Timeout")
_TORCH = Path(torch.__file__).parent


class Cause(StrEnum):
    """own: a rank raised an error of its own. silent: its neighbour sees no life in it. lost: it lost a connection."""

    OWN = "own"
    SILENT = "silent"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What went wrong with a rank, as it says or as its neighbour does."""

    rank: int
    host: str
    cause: Cause
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}: {self.text}"


@contextlib.contextmanager
def guard(*, silence_s: float = SILENCE_S) -> Iterator[None]:
    """While inside, the failure of one rank ends all, each with the same message; without a process group, nothing.

    A rank that shows no sign of life for silence_s seconds counts as dead; its own thread shows one each second.
    Raises RankFailedError, which names the rank and what it raised, on the ranks that can; the others print the same
    and end with exit code 1. Every rank must enter and leave alike.
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


def report_of(error: BaseException, rank: int) -> Report:
    """What an error says, with the last line of code outside of torch that it went through."""
    text = str(error).strip() or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    cause = Cause.LOST if is_lost_connection(error) else Cause.OWN
    return Report(rank=rank, host=socket.gethostname(), cause=cause, text=f"{type(error).__name__}: {text}{where}")


def is_lost_connection(error: BaseException) -> bool:
    """True for what a collective or the store raises when a peer is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)
    )


def verdict_of(reports: Sequence[Report], waited_s: float) -> str | None:
    """The message for all ranks, given reports in the order they came; None while a better cause may still come."""
    for cause in (Cause.OWN, Cause.SILENT):
        for report in reports:
            if report.cause is cause:
                return str(report)
    return str(reports[0]) if reports and waited_s > PATIENCE_S else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Watch:
    """This rank's part: keys in the store, and the thread that writes and reads them."""

    store: Store
    rank: int
    num_ranks: int
    silence_s: float
    has_returned: threading.Event = field(default_factory=threading.Event)
    #: the main thread has left the guarded code, or failed in it, and needs no ending
    is_leaving: threading.Event = field(default_factory=threading.Event)
    first_report_at: float | None = None

    @classmethod
    def start(cls, silence_s: float) -> "_Watch":
        """A running watch. How often a rank has entered names the keys: all enter in step."""
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
        """Until the guard is left: show life, look for it in the neighbour, and for reports."""
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
            except Exception as error:  # of the store: whatever holds it is gone
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
        """Ends this process unless its main thread comes back by itself."""
        if self.is_leaving.wait(GRACE_S) or self.has_returned.is_set():
            return
        sys.stdout.flush()
        sys.stderr.write(f"{SAID}{verdict}\n")
        sys.stderr.flush()
        os._exit(RankFailedError.exit_code)

    # Reports and the verdict

    def fail(self, report: Report) -> str:
        """Reports this rank's failure, and waits for the verdict."""
        self.is_leaving.set()
        try:
            self._post(report)
            while (verdict := self._verdict()) is None:
                time.sleep(BEAT_S / 4)
        except Exception as error:  # of the store
            return str(report) if report.cause is Cause.OWN else self._without_store(error)
        return verdict

    def leave(self) -> str | None:
        """Waits until every rank has left, or one has failed: then the verdict."""
        self.is_leaving.set()
        try:
            self.store.set(f"left/{self.rank}", "1")
            num_left = self.store.add("left", 1)
            while num_left < self.num_ranks:
                if (verdict := self._verdict()) is not None:
                    return verdict
                time.sleep(BEAT_S / 20)
                num_left = self.store.add("left", 0)
        except Exception:  # of the store, whose holder has left before: this rank has done its part
            return None
        return None

    def _post(self, report: Report) -> None:
        number = self.store.add("reports", 1)
        self.store.set(f"report/{number}", json.dumps(asdict(report)))

    def _verdict(self) -> str | None:
        """What all agree on, as soon as there is a cause."""
        if self.store.check(["verdict"]):
            return str(self.store.get("verdict").decode())
        reports = [
            Report(**{**data, "cause": Cause(data["cause"])})
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return (
            "rank 0, or whatever else holds the process group's store, is gone: it was killed, or ended before the "
            f"others ({reason})"
        )


def _silence(rank: int, silent_s: float) -> Report:
    text = f"died, was killed or is cut off: no sign of life for {silent_s:.0f} s"
    return Report(rank=rank, host="", cause=Cause.SILENT, text=text)


def _own_connection(store: Store) -> Store:
    """A second connection: one that waits for a key keeps all others on it waiting."""
    return store.clone() if hasattr(store, "clone") else store

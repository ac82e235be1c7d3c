"""Times work on a device: windows of many calls, on all ranks at once, within a budget.

On a CPU the time of a call includes issuing it. On a GPU it does not: the calls of a window are queued behind a pause,
and run back to back between two events, however long Python takes to issue them.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.core.units import MIB
from tpplan.machine.fit_tables import Array
from tpplan.torch_internals.operators import busy_gpu

#: section, points done, points in all
Progress = Callable[[str, int, int], None]
#: a point to measure, such as the sizes of a matmul
Point = TypeVar("Point")
T = TypeVar("T")

NUM_REPEATS = 5
#: windows' worth of time that a point costs beside its repeats: a warm-up and the search for the number of calls
WINDOWS_BESIDE = 2
WINDOWS_PER_POINT = NUM_REPEATS + WINDOWS_BESIDE
#: seconds; on a CPU several time slices of a scheduler (Linux: 3 to 4 ms), where a GPU has its own clock and one user
SHORTEST_USEFUL_WINDOW_S = {"cpu": 0.02, "cuda": 0.001}
LONGEST_WINDOW_S = 0.2
#: seconds of calls before a window, and again after it, so that all ranks work during the window: ranks share cores,
#: but no GPUs
BESIDE_S = {"cpu": 0.005, "cuda": 0.0}
#: the largest sizes are left out where one call of each point in each window would take more than this part of the
#: budget, at the rate of a middle size, timed with so many repeats
LARGEST_PART, PROBE_REPEATS = 0.5, 1
#: part of a window that a trial must fill for its time per call to be used
CALIBRATED_PART = 0.25
#: most that calls grow from one trial to the next, so that one slow call does not make a window seem full
MOST_GROWTH = 16
#: most calls queued at a time: a GPU's queue holds about a thousand kernels, and a call may launch several
MOST_QUEUED_CALLS = 100
#: steps that are issued in a row: few enough that a GPU's queue holds all their kernels
ISSUED_STEPS = 3
#: length of the pause before a GPU's window, over the time to queue the window's calls
PAUSE_MARGIN = 1.5
#: windows of which the last counts, where a GPU's pause was too short to queue the calls
MOST_WINDOWS = 4
#: no GPU's clock is faster; pauses are given in cycles, and must not be too short
HIGHEST_CLOCK_HZ = 3e9
#: bytes that exceed the last cache of a device: a CPU's core has a few MiB of it, a GPU up to 126 MiB (B200)
COLD_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
#: most operands at different addresses, and most results that are kept: small ones stay in caches in a model too
MOST_APART = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The number of calls timed at once, the number of calls that run before and again after them, and the seconds that
    the CPU needs to issue one (0 where the CPU is the device)."""

    calls: int
    beside: int
    issue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times work on a device, on all ranks at once, in windows of about window_s."""

    device: torch.device
    window_s: float
    repeats: int = NUM_REPEATS

    def samples(self, work: Callable[[], object]) -> Array:
        """Seconds per call on the slowest rank, one for each repeat. Every rank must call this for the same work."""
        window = self.window(work)
        return np.array(slowest(self.device, [self.elapsed(work, window) for _ in range(self.repeats)])) / window.calls

    def window(self, work: Callable[[], object]) -> Window:
        """The window that takes window_s, after a warm-up; equal on every rank. Every rank must call this."""
        self._elapsed(work, 1, 0.0)  # warm-up: lazy initialisation, first touch of memory
        issue_s = 0.0 if self.device.type == "cpu" else float(self.issue_samples(work, calls=1).min())
        calls, call_s = self._calls(work, issue_s)
        return Window(calls=calls, beside=self._beside(call_s), issue_s=issue_s)

    def elapsed(self, work: Callable[[], object], window: Window) -> float:
        """Seconds that this rank needs for a window's calls, while all ranks are at work.

        Ranks that share a core leave a barrier one by one: the first has the core alone for a while, and the last has
        it alone when the first is done. The untimed calls before and after the window fill these times.
        """
        return self._elapsed(work, window.calls, window.issue_s, window.beside)

    def issue_samples(self, work: Callable[[], object], *, calls: int = MOST_QUEUED_CALLS) -> Array:
        """Seconds that the slowest rank's CPU needs to issue a call, one for each repeat; the GPU's queue is not
        full."""
        elapsed = []
        for _ in range(self.repeats):
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(calls):
                work()
            elapsed.append((time.perf_counter() - start) / calls)
        synchronize(self.device)
        return np.array(slowest(self.device, elapsed))

    def step_issue_samples(self, step: Callable[[], object]) -> Array:
        """Seconds that the slowest rank's CPU needs to issue a step of many kernels, one for each repeat; on a CPU
        seconds of the step, which is issued and run in one."""
        if self.device.type == "cpu":
            return self.samples(step)
        step()  # lazy initialisation
        return self.issue_samples(step, calls=ISSUED_STEPS)

    def _beside(self, call_s: float) -> int:
        """Number of calls before a window, and after it; 0 for a rank that is alone."""
        return round(BESIDE_S[self.device.type] / call_s) if dist.is_initialized() else 0

    def _calls(self, work: Callable[[], object], issue_s: float) -> tuple[int, float]:
        """(number of calls that fill the window, pause included, equal on every rank; seconds of each)."""
        most = math.inf if self.device.type == "cpu" else MOST_QUEUED_CALLS
        calls = 1
        while True:
            (elapsed,) = slowest(self.device, [self._elapsed(work, calls, issue_s)])
            call_s = elapsed / calls + PAUSE_MARGIN * issue_s
            filling = min(self.window_s / call_s, most)
            if calls * call_s >= CALIBRATED_PART * self.window_s or calls >= most:
                return max(1, round(filling)), call_s
            calls = math.ceil(min(filling, calls * MOST_GROWTH))

    def _elapsed(self, work: Callable[[], object], calls: int, issue_s: float, beside: int = 0) -> float:
        """Seconds that this rank needs for the calls, after a common start."""
        if dist.is_initialized():
            dist.barrier()
        synchronize(self.device)
        if self.device.type == "cuda":
            return self._elapsed_between_events(work, calls, calls * issue_s * PAUSE_MARGIN)
        for _ in range(beside):
            work()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        elapsed = time.perf_counter() - start
        for _ in range(beside):
            work()
        return elapsed

    def _elapsed_between_events(self, work: Callable[[], object], calls: int, pause_s: float) -> float:
        """Seconds that a GPU needs for the calls, all of which are queued before the pause ends.

        Where the CPU took longer to queue them than the GPU pauses (an allocation, another process), the GPU may have
        waited for it: the window is repeated with a longer pause, MOST_WINDOWS times at most.
        """
        for _ in range(MOST_WINDOWS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun_s = time.perf_counter()
            busy_gpu(int(pause_s * HIGHEST_CLOCK_HZ))
            start.record()
            for _ in range(calls):
                work()
            end.record()
            queued_s = time.perf_counter() - begun_s
            end.synchronize()
            if queued_s <= pause_s:
                break
            pause_s = PAUSE_MARGIN * queued_s
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000


def overhead_s(device: torch.device) -> float:
    """Seconds that a window costs beside its calls: ranks wait for each other before it, and compare times after it.

    0 for a rank that is alone.
    """
    if not dist.is_initialized():
        return 0.0
    elapsed = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        dist.barrier()
        synchronize(device)
        slowest(device, [start])
        elapsed.append(time.perf_counter() - start)
    return float(np.median(slowest(device, elapsed))) + 2 * BESIDE_S[device.type]


def synchronize(device: torch.device) -> None:
    """Waits until the current stream of a GPU is done; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def slowest(device: torch.device, seconds: Sequence[float]) -> list[float]:
    """The maximum over all ranks of each number."""
    if not dist.is_initialized():
        return list(seconds)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest.tolist()]


def in_rounds(
    device: torch.device,
    points: Sequence[Point],
    make: Callable[[Point], Callable[[], object]],
    section: str,
    budget_s: float,
    progress: Progress,
    *,
    repeats: int = NUM_REPEATS,
) -> dict[Point, Array]:
    """Seconds per call on the slowest rank, one for each repeat, by point. A round is one window of every point.

    A machine that is slow for some seconds thus spoils one repeat of many points, and not all repeats of a few, whose
    medians would be wrong. make(point) gives the work of a point, anew for each window. Windows share out the budget;
    where the machine gets slower after the first round, later windows have fewer calls.
    """
    start, beside_s = time.perf_counter(), overhead_s(device)
    first, in_all = 1 + WINDOWS_BESIDE, repeats + WINDOWS_BESIDE
    windows: dict[Point, Window] = {}
    samples: dict[Point, list[float]] = {point: [] for point in points}
    spent_s, slowdown = 0.0, 1.0
    for round_number in range(repeats):
        for done, point in enumerate(points):
            work, left = make(point), (repeats - round_number) * len(points) - done
            if not round_number:
                # Other rounds take as long as the first, which searches for the number of calls too.
                share_s = max(0.0, budget_s - spent_s * in_all / first) / (len(points) - done)
                window_s = min(max(0.0, share_s / in_all - beside_s), LONGEST_WINDOW_S)
                windows[point] = Stopwatch(device=device, window_s=window_s).window(work)
            call_s = samples[point][0] * slowdown if round_number else 0.0
            window = _shortened(windows[point], call_s, (budget_s - spent_s) / left - beside_s)
            elapsed_s = Stopwatch(device=device, window_s=0.0).elapsed(work, window)
            spent_s, elapsed_s = slowest(device, [time.perf_counter() - start, elapsed_s])
            samples[point].append(elapsed_s / window.calls)
            slowdown = max(1.0, samples[point][-1] / samples[point][0]) if samples[point][0] else 1.0
            progress(section, round_number * len(points) + done + 1, repeats * len(points))
    return {point: np.array(own) for point, own in samples.items()}


def _shortened(window: Window, call_s: float, share_s: float) -> Window:
    """The window with no more calls than take `share_s` seconds, but one, where a call takes `call_s` (0: unknown)."""
    if not call_s:
        return window
    return replace(window, calls=max(1, min(window.calls, int(share_s / call_s))))


def in_turn(works: Sequence[Callable[[], T]], kept: int) -> Callable[[], T]:
    """A function that calls the works in turn, over and over, and keeps so many results, so that the next result is
    allocated elsewhere."""
    turns, results = itertools.cycle(works), deque[T](maxlen=kept)

    def work() -> T:
        result = next(turns)()
        results.append(result)
        return result

    return work


def apart(pool: Tensor, numbers: int) -> list[Tensor]:
    """Consecutive slices of a pool, of so many numbers each; at most MOST_APART."""
    return [pool[i * numbers : (i + 1) * numbers] for i in range(min(MOST_APART, len(pool) // numbers))]


def silent(section: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""

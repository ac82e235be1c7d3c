"""Times work on a device: windows of many calls, on all ranks at once, within a budget."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tpplan.fit import Array

#: section, points done, points in all
Progress = Callable[[str, int, int], None]
#: what is measured at a time
Point = TypeVar("Point")

NUM_REPEATS = 5
#: windows that a point costs: its repeats, a warm-up and the search for the number of calls
WINDOWS_PER_POINT = NUM_REPEATS + 2
#: several time slices of a scheduler (Linux: 3 to 4 ms)
SHORTEST_USEFUL_WINDOW_S = 0.02
LONGEST_WINDOW_S = 0.2
#: the number of calls in a window is known well enough once they fill this part of it
CALIBRATED_PART = 0.25
#: one slow call must not make a window seem full: calls grow at most by this from one trial to the next
MOST_GROWTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times work on a device, on all ranks at once, in windows of about window_s."""

    device: torch.device
    window_s: float

    def samples(self, work: Callable[[], object]) -> Array:
        """Seconds per call of the slowest rank, one for each repeat. Every rank must call this for the same work."""
        self._elapsed(work, 1)  # warm-up: lazy initialisation, first touch
        calls = self._calls(work)
        elapsed = [self._elapsed(work, calls) for _ in range(NUM_REPEATS)]
        return np.array(slowest(self.device, elapsed)) / calls

    def _calls(self, work: Callable[[], object]) -> int:
        """How many calls fill the window, the same number on every rank."""
        calls = 1
        while True:
            (elapsed,) = slowest(self.device, [self._elapsed(work, calls)])
            filling = calls * self.window_s / elapsed
            if elapsed >= CALIBRATED_PART * self.window_s:
                return max(1, round(filling))
            calls = math.ceil(min(filling, calls * MOST_GROWTH))

    def _elapsed(self, work: Callable[[], object], calls: int) -> float:
        """Seconds of this rank, from a common start."""
        if dist.is_initialized():
            dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def slowest(device: torch.device, seconds: Sequence[float]) -> list[float]:
    """The largest of each over the ranks."""
    if not dist.is_initialized():
        return list(seconds)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest.tolist()]


def paced(
    device: torch.device, points: Sequence[Point], section: str, budget_s: float, progress: Progress
) -> Iterator[tuple[Point, Stopwatch]]:
    """The points, each with a stopwatch whose windows share out what is left of the budget."""
    start = time.perf_counter()
    for done, point in enumerate(points):
        (spent_s,) = slowest(device, [time.perf_counter() - start])
        share_s = max(0.0, budget_s - spent_s) / (len(points) - done)
        yield point, Stopwatch(device=device, window_s=min(share_s / WINDOWS_PER_POINT, LONGEST_WINDOW_S))
        progress(section, done + 1, len(points))


def silent(section: str, done: int, total: int) -> None:
    """No progress shown."""

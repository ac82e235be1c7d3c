"""tpplan.measure.timer on a GPU's clock, which is a stand-in here."""

import time

import pytest
import torch

from tpplan.measure import timer
from tpplan.measure.timer import HIGHEST_CLOCK_HZ, MOST_WINDOWS, Stopwatch, Window

CUDA = torch.device("cuda")


class Event:
    """An event of a GPU on which a window takes 7 ms."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: "Event") -> float:
        return 7.0


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that a stand-in for a GPU was asked for."""
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timer, "synchronize", lambda device: None)
    monkeypatch.setattr(timer, "busy_gpu", lambda cycles: found.append(cycles / HIGHEST_CLOCK_HZ))
    return found


def test_a_window_that_is_queued_in_time_is_run_once(pauses_s: list[float]) -> None:
    window = Window(calls=3, beside=0, issue_s=10.0)
    assert Stopwatch(device=CUDA, window_s=1.0).elapsed(lambda: None, window) == pytest.approx(7e-3)
    assert pauses_s == [pytest.approx(45.0)]


def test_a_window_that_the_cpu_queued_too_late_is_run_again(pauses_s: list[float]) -> None:
    """The first call allocates, say: it takes 0.2 s where 1 ms was expected. The next pause is as long as that."""
    first = [0.2]

    def work() -> None:
        time.sleep(first.pop() if first else 0.0)

    Stopwatch(device=CUDA, window_s=1.0).elapsed(work, Window(calls=2, beside=0, issue_s=1e-3))
    assert len(pauses_s) == 2
    assert pauses_s[1] >= 1.5 * 0.2 > pauses_s[0]


def test_a_cpu_that_is_always_late_ends_it(pauses_s: list[float]) -> None:
    sleep_s = iter(0.01 * 4**i for i in range(9))
    Stopwatch(device=CUDA, window_s=1.0).elapsed(
        lambda: time.sleep(next(sleep_s)), Window(calls=1, beside=0, issue_s=1e-6)
    )
    assert len(pauses_s) == MOST_WINDOWS

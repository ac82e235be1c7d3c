"""scripts/evidence/rows.py: a budget counts the CPU seconds of a process and its children, not the clock's."""

import dataclasses
import multiprocessing
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forks import in_fork

EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"
BUDGET_S = 0.5
NO_GROUP = -1


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVIDENCE))
    import rows

    return rows


def spin() -> None:
    while True:
        pass


def spin_in_a_child(reporter: Any) -> None:
    """All that is spent is a child's."""
    child = multiprocessing.get_context("fork").Process(target=spin, daemon=True)
    child.start()
    child.join()


def sleep_longer_than_the_budget(reporter: Any) -> None:
    time.sleep(3 * BUDGET_S)
    reporter.put(dataclasses.replace(reporter.row, problems=("slept",)))


def row_of(live: Any) -> Any:
    import rows

    return rows.in_own_process(rows.Row(model="m"), live, BUDGET_S)


def test_what_children_spend_counts(script: ModuleType) -> None:
    row = in_fork(row_of, spin_in_a_child)
    assert (row.failed, row.problems) == ("timeout", ("build: not done in 0.5 CPU s",))


def test_waiting_does_not_count(script: ModuleType) -> None:
    row = in_fork(row_of, sleep_longer_than_the_budget)
    assert (row.failed, row.problems) == ("", ("slept",))


def test_a_process_that_waits_for_good_is_ended(script: ModuleType) -> None:
    assert script._over_budget(NO_GROUP, BUDGET_S, time.monotonic() + 60) == ""
    assert script._over_budget(NO_GROUP, BUDGET_S, time.monotonic() - 1) == "5 s by the clock"

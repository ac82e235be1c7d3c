"""scripts/bench/pipelines.py: a case is planned in a process of its own, and stands beside its bars."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "pipelines.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, check=False, text=True, timeout=300
    )


@pytest.mark.long
def test_a_case_is_printed_beside_its_bars() -> None:
    ran = run("toy")
    header, row = ran.stdout.splitlines()
    assert header.split() == ["CPU", "s", "bar", "wall", "s", "GB", "bar", "tokens/s", "bar", "plan"]
    name, seconds, bar, wall, gigabytes, *_ = row.split()
    assert (name, float(bar)) == ("toy", 60.0)
    assert float(seconds) > 1.0 < float(wall)
    assert 0.1 < float(gigabytes) < 3.0
    assert "2 stages" in row
    assert ran.returncode == (float(seconds) > 60.0)


def test_an_unknown_case_is_refused_by_name() -> None:
    ran = run("9b")
    assert ran.returncode == 2
    assert "unknown case '9b'; known: toy, 8b, 70b, 405b, 405b-virtual" in ran.stderr

"""scripts/bench/solve.py: every stage is seen, and together they are the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "solve.py"


@pytest.mark.long
def test_stages_add_up_to_the_process() -> None:
    child = subprocess.run(
        [sys.executable, SCRIPT, "--child", "toy"], stdout=subprocess.PIPE, check=True, text=True, timeout=300
    )
    row = json.loads(child.stdout)
    stages = [row[stage] for stage in ("import", "trace", "costs", "build", "solve", "prove", "rest")]
    assert all(seconds > 0 for seconds in stages)
    assert sum(stages) == pytest.approx(row["total"], rel=0.02)
    assert row["programs"] >= 3
    assert row["variables"] > 10


@pytest.mark.long
def test_untied_layers_gain_nothing_where_memory_does_not_bind() -> None:
    ran = subprocess.run(
        [sys.executable, SCRIPT, "toy", "--untied", "--time-limit-s", "20"],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
        timeout=300,
    )
    rows = [line.split() for line in ran.stdout.splitlines() if line.split()[0] == "inf"]
    assert ran.returncode == 0
    assert len(rows) == 2  # the best mesh, and the best of four tensor-parallel ranks
    assert all(tied == untied == bound for _, tied, untied, bound, *_ in rows)

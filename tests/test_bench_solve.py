"""scripts/bench_solve.py: every stage is seen, and together they are the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_solve.py"


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

"""scripts/bench/growth.py: every model solves, and its exponent is that of its rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "growth.py"


@pytest.mark.long
@pytest.mark.parametrize("model", ["tied", "untied", "deep", "wide", "u-net"])
def test_each_model_is_solved_and_counted(model: str) -> None:
    command = [sys.executable, SCRIPT, "--child", model, "2"]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=300)
    row = json.loads(child.stdout)
    assert row["ops"] >= 8
    assert row["storages"] >= row["ops"]
    assert row["cpu_s"] > 0

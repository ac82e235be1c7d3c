"""scripts/evidence/experts.py on small cases: what its table says, and its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
SMALL = """
import sys
sys.path.insert(0, "scripts/{room}")
import experts
{change}
sys.argv = ["experts.py", {arguments}]
sys.exit(experts.main())
"""


def run(room: str, arguments: str, change: str = "") -> subprocess.CompletedProcess[str]:
    """A script of scripts/<room> with something in it changed."""
    code = SMALL.format(room=room, arguments=arguments, change=change)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240
    )


def test_divided_experts_and_a_list_of_experts_are_right() -> None:
    found = run("evidence", '"qwen3_moe", "loop", "--forms", "grouped_mm", "--ranks", "2", "--no-training"')
    assert found.returncode == 0, found.stdout + found.stderr
    rows = [row.split() for row in found.stdout.splitlines() if "fsdp 2" in row]
    assert [row[:8] for row in rows] == [
        ["qwen3_moe", "grouped_mm", "ep", "2", "fsdp", "2", "tp", "1"],
        ["loop", "list", "ep", "2", "fsdp", "2", "tp", "1"],
    ]
    assert all(0.0 < float(row[8]) < 1e-5 for row in rows)
    assert [row[9] for row in rows] == ["divided,", "whole:"]
    assert "2 of 2 cases right" in found.stdout


def test_a_wrong_gradient_is_said() -> None:
    """Rows' gradients are not divided by the ranks that divide experts."""
    change = "\n".join(
        (
            "from tpplan.experts import exchange",
            "moved = exchange._moved",
            "exchange._moved = lambda rows, counts, back: moved(rows, counts, back) * (2 if back else 1)",
        )
    )
    found = run("evidence", '"qwen3_moe", "--forms", "grouped_mm", "--ranks", "2", "--no-training"', change)
    assert found.returncode == 4, found.stdout + found.stderr
    assert "WRONG in" in found.stdout

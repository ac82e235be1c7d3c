"""Ranks of tpplan verify: they import what their parent does, and see its environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tpplan

SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tpplan.verify.spawn_ranks import on_ranks

if __name__ == "__main__":
    for value in ("first", "second"):
        os.environ["SET_LATE"] = value
        print(*on_ranks(2, os.getenv, "SET_LATE", timeout_s=120.0), os.getenv("PYTHONSAFEPATH"))
"""


@pytest.mark.slow
def test_ranks_import_and_see_what_their_parent_does(tmp_path: Path) -> None:
    """Not what stands in the working directory, nor what was so when the first ranks were started."""
    decoy = tmp_path / "decoy" / "tpplan" / "__init__.py"
    decoy.parent.mkdir(parents=True)
    decoy.write_text("import sys\nprint('the decoy was imported', flush=True)\n")
    script = tmp_path / "script" / "run.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    source = str(Path(tpplan.__file__).parent.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [sys.executable, str(script), source],
        cwd=decoy.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["first first None", "second second None"]

"""Completion: a shell that has read the script offers the verbs, options and values of the command line."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tpplan.commands import main
from tpplan.plan.plan import Recompute

BASH, ZSH = shutil.which("bash"), shutil.which("zsh")


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def offered(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    asked = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tpplan; printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run(
        [str(BASH), "-c", f"{script}\n{asked}", "bash", "tpplan", *words],
        capture_output=True, text=True, check=True, cwd=folder,
    )  # fmt: skip
    assert not ran.stderr
    return ran.stdout.split()


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_bash_offers_verbs_options_values_and_files(script: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    assert offered(script, tmp_path, "so") == ["solve"]
    assert {"solve", "report", "completion"} <= {*offered(script, tmp_path, "")}
    assert offered(script, tmp_path, "solve", "--global-b") == ["--global-batch"]
    assert offered(script, tmp_path, "solve", "model.py", "--what") == []
    assert {str(mode) for mode in Recompute} >= {*offered(script, tmp_path, "solve", "--recompute", "")} >= {"full"}
    assert offered(script, tmp_path, "show", "mod") == ["model.py"]
    assert offered(script, tmp_path, "completion", "z") == ["zsh"]


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_bash_offers_verbs_below_a_verb(script: str, tmp_path: Path) -> None:
    assert offered(script, tmp_path, "profile", "li") == ["list"]
    assert "--budget" not in offered(script, tmp_path, "profile", "list", "--")


@pytest.mark.skipif(ZSH is None, reason="no zsh here")
def test_zsh_reads_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    text = f"autoload -U compinit && compinit -u\n{capsys.readouterr().out}\nwhence -w _tpplan"
    ran = subprocess.run([str(ZSH), "-f", "-c", text], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "_tpplan: function"

"""scripts/dev/torch_versions.py, suite_runs.py and setup: what is said of a torch is what was run with it."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tpplan.plan.plan import Plan, ProofReport
from tpplan.torch_internals.versions import NEWEST, OLDEST, TESTED

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "dev"))

import suite_runs  # noqa: E402
import torch_table  # noqa: E402
import torch_versions  # noqa: E402
from suite_runs import Run, is_whole, report_lines, run_to_note  # noqa: E402
from torch_table import Outcome, Part, Row  # noqa: E402

PLAN: dict[str, object] = {
    "torch_version": "2.13.0",
    "tpplan_version": "0.1.0",
    "mesh_degrees": {"shard": 2, "tp": 8},
    "proof": {"status": "proven"},
}


def solved(**changes: object) -> Outcome:
    return torch_table.solve_outcome(PLAN | changes, seconds=1.0)


def row(torch: str, **outcomes: Outcome) -> Row:
    return Row(torch=torch, build="CPU", outcomes={Part(part): outcome for part, outcome in outcomes.items()})


# Versions


def test_tested_versions_are_one_list_for_python_and_the_shell() -> None:
    assert suite_runs.tested_versions() == TESTED
    assert (TESTED[0], TESTED[-1]) == (OLDEST, NEWEST)
    assert sorted(TESTED, key=lambda release: tuple(map(int, release.split(".")))) == list(TESTED)


def test_the_release_that_setup_installs_is_tested() -> None:
    (line,) = [line for line in (ROOT / "scripts" / "setup").read_text().splitlines() if "local release=" in line]
    assert line.partition("=")[2] in TESTED


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--torch",), "--torch wants a version"),
        (("test", "--torch", "../2.14"), "--torch wants a version"),
        (("--python", "3.1"), "no python3.1 on PATH"),
        (("-x",), "unknown argument '-x'"),
    ],
)
def test_setup_refuses_what_it_cannot_do(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "setup", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TPPLAN_ENVIRONMENTS": str(tmp_path)},
    )
    assert done.returncode == 1
    assert complaint in done.stderr
    assert list(tmp_path.iterdir()) == []


# Plans


def test_hash_of_a_plan_leaves_out_versions_alone() -> None:
    names = {field.name for field in dataclasses.fields(Plan)} | {
        f"proof.{field.name}" for field in dataclasses.fields(ProofReport)
    }
    assert {*torch_table.LEFT_OUT} <= names
    same = solved(torch_version="2.14.1", tpplan_version="9.9.9")
    assert same.text == solved().text
    others = [solved(mesh_degrees={"shard": 8, "tp": 2}), solved(mesh_degrees={"shard": 2}), solved(more=1)]
    assert len({solved().text, *(other.text for other in others)}) == 4


def test_an_unproven_plan_is_wrong() -> None:
    assert solved().is_right
    assert not solved(proof={"status": "unproven"}).is_right


def test_plans_that_differ_are_named_with_what_differs() -> None:
    rows = [row("2.13.0", solve=solved()), row("2.14.1", solve=solved(mesh_degrees={"shard": 16, "tp": 1}))]
    is_right, lines = torch_table.verdict(rows, [Part.SOLVE])
    assert not is_right
    assert "2.14.1: its plan is not that of 2.13.0: mesh_degrees differ" in lines


# What ran


@pytest.mark.parametrize(
    ("code", "closing", "text", "is_right"),
    [
        (0, "2540 passed, 5 skipped, 12 warnings in 1500.10s (0:25:00)", "2540/0/5", True),
        (0, "==== 1 passed in 0.10s ====", "1/0/0", True),
        (1, "2 failed, 90 passed, 3 skipped, 1 error in 61.20s (0:01:01)", "90/3/3", False),
        (2, "20 passed in 8.22s", "20/0/0, exit code 2", False),
        (0, "5 deselected in 0.10s", "0/0/0, exit code 0", False),
        (124, "............", "no closing line, exit code 124", False),
    ],
)
def test_a_suite_is_right_where_it_ended_and_passed(code: int, closing: str, text: str, is_right: bool) -> None:
    output = f"setup: tpplan[test] is installed\n......\n3 passed in the test of this line in 1 s\n{closing}\n"
    outcome = torch_table.suite_outcome(code, output, seconds=60.0)
    assert (outcome.text, outcome.is_right) == (text, is_right)


def test_all_is_right_where_every_part_is_with_every_torch_that_can_be_had() -> None:
    right = Outcome(is_right=True, text="right", seconds=1.0)
    wrong = Outcome(is_right=False, text="exit code 4", seconds=1.0)
    rows = [row("2.13.0", demo=right, solve=solved()), row("2.14.1", demo=right, solve=solved(torch_version="2.14.1"))]
    missing = Row(torch="2.14.1+cpu", problem="no such build", is_missing=True)
    parts = (Part.DEMO, Part.SOLVE)
    assert torch_table.verdict([*rows, missing], parts)[0]
    assert torch_table.verdict(rows, [Part.DEMO])[0]
    assert not torch_table.verdict([], parts)[0]
    assert not torch_table.verdict([missing], parts)[0]
    for other, complaint in (
        (row("2.11.0", demo=wrong, solve=solved()), "2.11.0: demo: exit code 4"),
        (row("2.11.0", solve=solved()), "2.11.0: demo has not run"),
        (row("2.11.0", demo=right), "2.11.0: solve has not run"),
        (Row(torch="2.11.0", problem="no network"), "2.11.0: no network"),
    ):
        is_right, lines = torch_table.verdict([*rows, other], parts)
        assert not is_right
        assert complaint in lines


@pytest.mark.parametrize(
    ("torch", "output", "expected"),
    [
        ("2.14.1+cpu", "ERROR: No matching distribution found for torch===2.14.1+cpu", True),
        (
            "2.14.1+cpu",
            "ERROR: Cannot install torch===2.14.1+cpu because these package versions have conflicting",
            True,
        ),
        ("2.14.1", "ERROR: No matching distribution found for torch===2.14.1", False),
        ("2.14.1+cpu", "ERROR: Could not install packages due to an OSError: No space left on device", False),
        (
            "2.14.1+cpu",
            "WARNING: Retrying (Retry(total=4)) after connection broken\n"
            "ERROR: No matching distribution found for torch===2.14.1+cpu",
            False,
        ),
    ],
)
def test_a_cpu_build_that_no_index_has_is_nobodys_mistake(torch: str, output: str, expected: bool) -> None:
    assert torch_versions.is_no_build_here(torch, output) is expected


def test_table_has_a_row_a_torch() -> None:
    suite = torch_table.suite_outcome(0, "90 passed, 3 skipped in 61.20s", seconds=600.0)
    head, rule, first, second = torch_table.table_lines(
        [row("2.14.1", suite=suite, solve=solved()), Row(torch="2.11.0+cpu", problem="none", is_missing=True)]
    )
    assert len({len(line) for line in (head, rule, first, second)}) == 1
    assert [cell.strip() for cell in first.strip("|").split("|")] == [
        *("2.14.1", "CPU", "-", "90/0/3", "10", "-", solved().text, "-")
    ]
    assert "not to be had" in second


def torch_versions_of(
    monkeypatch: pytest.MonkeyPatch, out: Path, outcomes: dict[Part, Outcome], arguments: Sequence[str]
) -> tuple[int, list[Part]]:
    """The exit code and the parts that ran, with these outcomes and without environments."""
    ran: list[Part] = []

    def runs(part: Part) -> Outcome:
        ran.append(part)
        return outcomes[part]

    place = torch_versions.Place(variables={}, logs=out.parent)
    monkeypatch.setattr(torch_versions, "prepare", lambda target, logs: (Row(torch=target.name, build="CPU"), place))
    monkeypatch.setattr(torch_versions, "RUNS", {part: lambda place, part=part: runs(part) for part in outcomes})
    return torch_versions.main([*arguments, "--out", str(out)]), ran


def test_what_was_right_is_not_run_again_at_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "versions.json"
    right = Outcome(is_right=True, text="right", seconds=1.0)
    wrong = Outcome(is_right=False, text="exit code 4", seconds=1.0)
    arguments = ("2.14.1", "--only", "demo,solve")
    first = torch_versions_of(monkeypatch, out, {Part.DEMO: wrong, Part.SOLVE: solved()}, arguments)
    assert first == (1, [Part.DEMO, Part.SOLVE])
    second = torch_versions_of(monkeypatch, out, {Part.DEMO: right, Part.SOLVE: solved()}, arguments)
    assert second == (0, [Part.DEMO])
    assert torch_versions_of(monkeypatch, out, {}, arguments) == (0, [])
    monkeypatch.setattr(torch_versions, "tree_of", lambda root: "another")
    with pytest.raises(SystemExit, match="name another file"):
        torch_versions_of(monkeypatch, out, {}, arguments)


def test_a_command_past_its_limit_is_ended_with_what_it_started(tmp_path: Path) -> None:
    place = torch_versions.Place(variables={"PATH": "/usr/bin:/bin"}, logs=tmp_path)
    ran = place.run("sleep", "bash", "-c", "sleep 1000 & echo $!; wait", limit_s=1.0)
    assert ran.code == 124
    assert ran.seconds < 100
    stat = Path("/proc", ran.output.strip(), "stat")
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Notes of whole runs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), True),
        (("--numprocesses", "2", "--dist", "worksteal"), True),
        (("--session-timeout=60",), True),
        (("--numprocesses", "2", "tests/plan/test_plan.py"), False),
        (("-x",), False),
        (("-k", "plan"), False),
    ],
)
def test_a_whole_run_leaves_no_test_out(arguments: tuple[str, ...], expected: bool) -> None:
    assert is_whole(arguments) is expected


def test_runs_are_noted_that_ended_at_one_commit() -> None:
    def outcome(tree: str = "abc", after: str = "abc", code: int = 0, arguments: tuple[str, ...] = ()) -> str | None:
        run = run_to_note(tree, after, code, arguments)
        return run and run.outcome

    assert outcome() == "passed"
    assert outcome(code=1) == "failed"
    assert outcome(code=2) is None  # interrupted, or past its session timeout
    assert outcome(after="def") is None
    assert outcome(tree="abc+changes", after="abc+changes") is None
    assert outcome(tree="unknown", after="unknown") is None
    assert outcome(arguments=("-x",)) is None


def test_a_tree_that_differs_from_its_commit_is_another(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments)
        subprocess.run(command, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    commit = suite_runs.tree_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert suite_runs.tree_of(tmp_path) == f"{commit}+changes"


def test_report_says_which_runs_this_commit_has_not_had(tmp_path: Path) -> None:
    commit = "a" * 40
    passed = Run(commit=commit, torch="2.13.0+cpu", python="3.11.7", outcome="passed")
    for name, run in {"one": passed, "two": dataclasses.replace(passed, commit="b" * 40, torch="2.14.1")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / suite_runs.NOTE).write_text(json.dumps(dataclasses.asdict(run)))
    runs = list(suite_runs.noted_runs([tmp_path / "one", tmp_path / "two", tmp_path / "three"]))
    assert report_lines(commit, runs, ("2.13.0", "2.14.1")) == [
        "whole suite at aaaaaaaaaa, by torch: 2.13.0+cpu (Python 3.11.7) passed",
        "not run at aaaaaaaaaa: torch 2.14.1",
        "scripts/test --torch 2.14.1 runs it",
    ]
    assert "no whole run has seen them" in report_lines(f"{commit}+changes", runs, TESTED)[-1]
    assert report_lines("c" * 40, runs, TESTED)[0].endswith("not run")


# Continuous integration

PASSED = "90 passed, 3 skipped in 61.20s (0:01:01)"
STOPPED = "!!! xdist.dsession.Interrupted: session-timeout: 60.0 sec exceeded !!!\n"


def ci(folder: Path, first: str, second: str, setup: str = "true", limit_s: int = 3600) -> tuple[int, list[str], str]:
    """The exit code of .ci/run, the arguments of the second run, and what was said, where these lines of shell stand
    for the two runs of scripts/test and for scripts/setup."""
    source = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert source.count("limit_s=3600") == 1
    files = {
        ".ci/run": source.replace("limit_s=3600", f"limit_s={limit_s}"),
        "scripts/test": f'echo "$@" >> calls\nif [[ $# == 0 ]]; then {first}; else {second}; fi\n',
        "scripts/setup": f"{setup}\n",
        "tpplan/torch_internals/versions.py": 'NEWEST = "9.9.9"\n',
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        path.chmod(0o755)
    done = subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()[1:], done.stdout + done.stderr


def ending(closing: str, code: int) -> str:
    return f"printf '%s\\n' {shlex.quote(closing)}; exit {code}"


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        (ending(PASSED, 0), 0, f"ci: torch 9.9.9, the whole suite: {PASSED}"),
        (ending(f"1 failed, {PASSED}", 1), 1, f"ci: FAILED with torch 9.9.9: 1 failed, {PASSED}"),
        (
            ending(STOPPED + PASSED, 2),
            0,
            f"NOT FINISHED with torch 9.9.9.*it came to: {PASSED}; the first run: {PASSED}",
        ),
        (ending(f"{STOPPED}1 failed, {PASSED}", 2), 2, "ci: FAILED with torch 9.9.9"),
        (ending(PASSED, 2), 2, "ci: FAILED with torch 9.9.9"),
        (ending("Segmentation fault", 139), 139, "ci: FAILED with torch 9.9.9: no closing line"),
    ],
)
def test_ci_runs_the_newest_torch_in_what_is_left(tmp_path: Path, second: str, code: int, said: str) -> None:
    returned, calls, output = ci(tmp_path, ending(PASSED, 0), second)
    assert returned == code
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), output)
    (call,) = calls
    assert re.fullmatch(r"--torch 9\.9\.9 --session-timeout (3600|35\d\d)", call)


def test_ci_ends_with_the_first_run_where_that_fails(tmp_path: Path) -> None:
    assert ci(tmp_path, ending(f"1 failed, {PASSED}", 1), ending(PASSED, 0))[:2] == (1, [])


def test_ci_fails_where_the_newest_torch_cannot_be_installed(tmp_path: Path) -> None:
    code, calls, output = ci(tmp_path, ending(PASSED, 0), ending(PASSED, 0), setup="exit 1")
    assert (code, calls) == (1, [])
    assert "torch 9.9.9 cannot be installed" in output


def test_ci_says_where_no_time_is_left_for_the_second_run(tmp_path: Path) -> None:
    code, calls, output = ci(tmp_path, ending(PASSED, 0), ending("1 failed in 1.00s", 1), limit_s=100)
    assert (code, calls) == (0, [])
    assert "NOT RUN with torch 9.9.9" in output

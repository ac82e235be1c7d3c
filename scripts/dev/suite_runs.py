"""Which whole runs of the test suite this commit has had: scripts/test notes them, scripts/check reports them.

    python scripts/dev/suite_runs.py tree                                 the commit, and whether files differ from it
    python scripts/dev/suite_runs.py note --tree TREE --code N -- ARGS    after pytest: N is its exit code
    python scripts/dev/suite_runs.py report [FOLDER]                      of this environment, and of those in FOLDER

A note is a file in the environment whose Python ran the suite, and holds the latest run alone. No torch is imported.
"""

import argparse
import json
import os
import platform
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTE = ".tpplan-suite.json"
#: what a tree is called that no commit describes
CHANGED = "+changes"
#: the exit codes of pytest after which every test has run
OUTCOMES = {0: "passed", 1: "failed"}
#: options of pytest, each with a value, that leave no test out of a run that ends by itself
WHOLE = {"--numprocesses", "--dist", "--session-timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of every test, to its end: at which commit, with which release of torch (2.13.0+cpu is the CPU build of
    2.13.0) and of Python, and whether it passed or failed."""

    commit: str
    torch: str
    python: str
    outcome: str


def tested_versions() -> tuple[str, ...]:
    """The releases of torch in tpplan/torch_internals/versions.py."""
    constants = runpy.run_path(str(ROOT / "tpplan" / "torch_internals" / "versions.py"))
    return tuple(constants["TESTED"])


def installed_torch() -> str:
    """The release of torch in this environment, "none" without one."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def tree_of(root: Path) -> str:
    """The commit that is checked out at root, with CHANGED behind it where files differ from it or are new;
    "unknown" outside git."""
    git = ("git", "-C", str(root))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    return head.stdout.strip() + (CHANGED if status.stdout.strip() else "")


def is_whole(arguments: Sequence[str]) -> bool:
    """True where pytest's arguments leave no test out."""
    rest = iter(arguments)
    for argument in rest:
        name, has_value, _ = argument.partition("=")
        if name not in WHOLE:
            return False
        if not has_value:
            next(rest, None)
    return True


def run_to_note(tree: str, tree_after: str, code: int, arguments: Sequence[str]) -> Run | None:
    """The run that pytest ended with that exit code; None where it was not whole, or its tree is no commit's, or
    another one after the run than before."""
    is_commit = tree == tree_after and tree != "unknown" and not tree.endswith(CHANGED)
    if not is_commit or code not in OUTCOMES or not is_whole(arguments):
        return None
    return Run(commit=tree, torch=installed_torch(), python=platform.python_version(), outcome=OUTCOMES[code])


def noted_runs(environments: Sequence[Path]) -> Iterator[Run]:
    """The run that each of those folders has a note of."""
    for environment in environments:
        try:
            yield Run(**json.loads((environment / NOTE).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            continue  # none yet, or of another release of this script


def report_lines(tree: str, runs: Sequence[Run], tested: Sequence[str]) -> list[str]:
    """What is to be known of the whole suite at that tree: each run at its commit, each tested release without one."""
    commit = tree.removesuffix(CHANGED)
    here = sorted((run for run in runs if run.commit == commit), key=lambda run: (run.torch, run.python))
    done = [f"{run.torch} (Python {run.python}) {run.outcome}" for run in here]
    missing = [release for release in tested if release not in {run.torch.partition("+")[0] for run in here}]
    lines = [f"whole suite at {commit[:10]}, by torch: {', '.join(done) or 'not run'}"]
    if missing and done:
        lines.append(f"not run at {commit[:10]}: torch {', '.join(missing)}")
    if missing:
        lines.append(f"scripts/test --torch {missing[-1]} runs it")
    if tree.endswith(CHANGED):
        lines.append("files have changed since that commit: no whole run has seen them as they are")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tree")
    note = commands.add_parser("note")
    note.add_argument("--tree", required=True)
    note.add_argument("--code", type=int, required=True)
    note.add_argument("arguments", nargs="*")
    commands.add_parser("report").add_argument("folder", type=Path, nargs="?", default=ROOT)
    options = parser.parse_args(arguments)
    if options.command == "tree":
        print(tree_of(ROOT))
    elif options.command == "note":
        set_elsewhere = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
        run = run_to_note(options.tree, tree_of(ROOT), options.code, [*options.arguments, *set_elsewhere])
        if run is not None:
            Path(sys.prefix, NOTE).write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    else:
        environments = {Path(sys.prefix), *options.folder.glob(".venv*")}
        print(f"ran with torch {installed_torch()}, Python {platform.python_version()}")
        print(*report_lines(tree_of(ROOT), list(noted_runs(sorted(environments))), tested_versions()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

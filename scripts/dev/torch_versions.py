#!/usr/bin/env python3
"""Runs tpplan with each version of torch that it is tested with, and prints a table of how that went.

    python3 scripts/dev/torch_versions.py                                       all that are tested, plain and CPU build
    python3 scripts/dev/torch_versions.py 2.14.1 2.13.0+cpu --only solve,run
    python3 scripts/dev/torch_versions.py 2.14.1 --environment 2.14.1=FOLDER

With each torch it runs

    suite   scripts/test
    demo    scripts/demo
    solve   the plan of scripts/examples/llama.py:llama3_8b for 16 H100; its hash is without the plan's versions
    run     a plan with tp 2 and fsdp 2 on four gloo ranks, whose losses and gradients are held against one process

in an environment that scripts/setup makes (5.5 GB with CUDA's libraries), or in the one that --environment names, into
which scripts/setup installs this checkout. What is done is kept in the file of --out: the same command at the same
commit goes on there, runs again what was wrong, and prints the table of all that the file holds. Output of what ran
lies in the folder beside it. Exit code 0 only where all is right and all plans are the same. It imports no torch.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from suite_runs import CHANGED, tested_versions, tree_of
from torch_table import Outcome, Part, Row, row_from_json, solve_outcome, suite_outcome, table_lines, verdict

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "torch_versions.json"
LLAMA = "scripts/examples/llama.py"
SOLVE_8B = (f"{LLAMA}:llama3_8b", "--gpus", "16", "--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "8192")
SOLVE_4_RANKS = (
    *(f"{LLAMA}:llama_cpu", "--gpus", "4", "--profile", "cpu-gloo", "--tp", "2", "--fsdp", "2"),
    *("--global-batch", "8", "--micro-batch", "2", "--seq-len", "128"),
)
#: seconds after which what runs is ended
LIMIT_S = {Part.SUITE: 7200.0, Part.DEMO: 1800.0, Part.SOLVE: 1800.0, Part.RUN: 1800.0}
SETUP_LIMIT_S = 3600.0
#: between asking processes to end and ending them
GRACE_S = 15.0
#: what pip says where no index has that build, without and with constraints of its own; and where it reached none
NOT_TO_BE_HAD = ("No matching distribution found for torch===", "Cannot install torch===")
NOT_REACHED = "Retrying (Retry("
#: prints what an environment holds; run outside the checkout, so that tpplan is the one that is installed
PROBE = """
import json, platform, torch, tpplan
from importlib.metadata import version
print(json.dumps([version("torch"), torch.version.cuda, platform.python_version(), tpplan.__file__]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A torch to run with, an interpreter's version ("": python3), and an environment that is there already."""

    torch: str
    python: str = ""
    environment: Path | None = None

    @property
    def name(self) -> str:
        """As in the results."""
        return self.torch + (f" python {self.python}" if self.python else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that ended: its exit code (124: it was ended at its limit), its output, its seconds."""

    code: int
    output: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Environment variables that make a virtual environment the active one, and the folder that output is kept in."""

    variables: Mapping[str, str]
    logs: Path

    def run(self, name: str, *command: str, limit_s: float) -> Ran:
        """Runs a command at the root; its output is appended to a file of that name."""
        path = self.logs / f"{name}.log"
        started = time.monotonic()
        with path.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            code = _run_group(command, self.variables, log.fileno(), limit_s)
            log.seek(begin)
            return Ran(code=code, output=log.read(), seconds=time.monotonic() - started)


def _run_group(command: Sequence[str], variables: Mapping[str, str], output: int, limit_s: float) -> int:
    """The exit code; none of the processes that the command started in its group outlives an exception or the limit."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(variables), stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def active(environment: Path) -> dict[str, str]:
    """This process's variables with that virtual environment active."""
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(environment)}


def prepare(target: Target, logs: Path) -> tuple[Row, Place | None]:
    """Makes the target's environment, or takes the one that is named, and looks what it holds. A row with a problem
    has no place to run in."""
    row = Row(torch=target.name)
    options = ["--torch", target.torch, *(["--python", target.python] if target.python else [])]
    place = Place(variables=active(target.environment) if target.environment else dict(os.environ), logs=logs)
    ran = place.run("setup", "scripts/setup", "test", *([] if target.environment else options), limit_s=SETUP_LIMIT_S)
    if ran.code != 0:
        problem = f"scripts/setup failed, see {logs}/setup.log"
        return replace(row, problem=problem, is_missing=is_no_build_here(target.torch, ran.output)), None
    place = Place(variables=active(Path(ran.output.splitlines()[-1])), logs=logs)
    probe = subprocess.run(
        ["python", "-c", PROBE], cwd=logs, env=place.variables, capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        return replace(row, problem=f"its environment does not import torch and tpplan: {probe.stderr[-300:]}"), None
    torch, cuda, python, package = json.loads(probe.stdout)
    row = replace(row, build=f"CUDA {cuda}" if cuda else "CPU", python=python)
    if torch != target.torch or not python.startswith(target.python):
        return replace(row, problem=f"its environment has torch {torch} and Python {python}"), None
    if not Path(package).is_relative_to(ROOT):
        return replace(row, problem=f"its environment imports {package}, which is not of this checkout"), None
    return row, place


def is_no_build_here(torch: str, output: str) -> bool:
    """True where pip looked for a build besides the plain one, such as 2.14.1+cpu, and found none."""
    return "+" in torch and NOT_REACHED not in output and any(line in output for line in NOT_TO_BE_HAD)


def run_suite(place: Place) -> Outcome:
    """The whole suite."""
    ran = place.run(Part.SUITE, "scripts/test", limit_s=LIMIT_S[Part.SUITE])
    return suite_outcome(ran.code, ran.output, ran.seconds)


def run_demo(place: Place) -> Outcome:
    """The README's demo, which compares 20 steps of two runs."""
    ran = place.run(Part.DEMO, "scripts/demo", limit_s=LIMIT_S[Part.DEMO])
    return _yes_or_no(ran)


def run_solve(place: Place) -> Outcome:
    """The plan of Llama 3 8B for 16 H100."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        ran = place.run(Part.SOLVE, "tpplan", "solve", *SOLVE_8B, "--output", str(path), limit_s=LIMIT_S[Part.SOLVE])
        if ran.code != 0:
            return _yes_or_no(ran)
        return solve_outcome(json.loads(path.read_text(encoding="utf-8")), ran.seconds)


def run_ranks(place: Place) -> Outcome:
    """A plan for four ranks, tp 2 x fsdp 2, run beside one process by `tpplan verify`."""
    place = replace(place, variables={**place.variables, "OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "plan.json"))
        solved = place.run(Part.RUN, "tpplan", "solve", *SOLVE_4_RANKS, "--output", path, limit_s=LIMIT_S[Part.RUN])
        if solved.code != 0:
            return _yes_or_no(solved)
        verify = ("tpplan", "verify", path, f"{LLAMA}:llama_cpu", "--ranks", "4")
        return _yes_or_no(place.run(Part.RUN, *verify, limit_s=LIMIT_S[Part.RUN]))


def _yes_or_no(ran: Ran) -> Outcome:
    text = "right" if ran.code == 0 else f"exit code {ran.code}"
    return Outcome(is_right=ran.code == 0, text=text, seconds=ran.seconds)


RUNS: Mapping[Part, Callable[[Place], Outcome]] = {
    Part.SUITE: run_suite,
    Part.DEMO: run_demo,
    Part.SOLVE: run_solve,
    Part.RUN: run_ranks,
}


def fill(rows: dict[str, Row], target: Target, parts: Sequence[Part], logs: Path, save: Callable[[], None]) -> None:
    """Runs those parts that were not right yet with that torch; each outcome is saved when it is there."""
    before = rows.get(target.name, Row(torch=target.name))
    left = [part for part in parts if part not in before.outcomes or not before.outcomes[part].is_right]
    if not left:
        return
    logs.mkdir(parents=True, exist_ok=True)
    say(f"{target.name}: environment")
    row, place = prepare(target, logs)
    rows[target.name] = row = replace(row, outcomes=before.outcomes)
    save()
    if place is None:
        say(f"{target.name}: {row.problem}")
        return
    for part in left:
        say(f"{target.name}: {part}")
        outcome = RUNS[part](place)
        rows[target.name] = row = replace(row, outcomes={**row.outcomes, part: outcome})
        save()
        say(f"{target.name}: {part}: {outcome.text} after {outcome.seconds:.0f} s")


def say(line: str) -> None:
    """Progress."""
    print(f"torch_versions: {line}", file=sys.stderr, flush=True)


def read_rows(path: Path, tree: str) -> dict[str, Row]:
    """The rows of an earlier run at that commit. Raises SystemExit where the file is of another."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["tree"] != tree:
        raise SystemExit(f"{path} is of {data['tree']}, checked out is {tree}: name another file with --out")
    return {name: row_from_json(row) for name, row in data["rows"].items()}


def write_rows(path: Path, tree: str, rows: Mapping[str, Row]) -> None:
    """Writes the file whole or not at all."""
    data = {"tree": tree, "rows": {name: asdict(row) for name, row in rows.items()}}
    half = path.with_name(path.name + ".half")
    half.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    half.replace(path)


def targets_of(options: argparse.Namespace) -> list[Target]:
    """Each torch that is named, on each Python. Raises SystemExit for an environment of a torch that is not named."""
    named = options.torch or [release + build for release in tested_versions() for build in ("", "+cpu")]
    environments = dict(options.environment)
    unknown = sorted(environments.keys() - set(named))
    if unknown:
        raise SystemExit(f"--environment {unknown[0]}=...: {unknown[0]} is not among {', '.join(named)}")
    return [
        Target(torch=torch, python=python, environment=environments.get(torch))
        for torch in named
        for python in options.python
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("torch", nargs="*", type=_release, help="2.14.1, or 2.13.0+cpu (default: all that are tested)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file of results (default: %(default)s)")
    parser.add_argument("--only", type=_parts, default=tuple(Part), metavar="PART,...", help="of suite,demo,solve,run")
    parser.add_argument(
        *("--python",), type=lambda text: text.split(","), default=[""], metavar="3.12,...", help="(default: python3)"
    )
    parser.add_argument(
        *("--environment",), type=_environment, action="append", default=[], metavar="TORCH=FOLDER", help="use that one"
    )
    return parser.parse_args(arguments)


def _release(text: str) -> str:
    if re.fullmatch(r"\d+(\.\d+)+(\+[a-z0-9.]+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no release of torch, such as 2.14.1 or 2.13.0+cpu")
    return text


def _parts(text: str) -> tuple[Part, ...]:
    unknown = sorted(set(text.split(",")) - set(Part))
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(Part)}")
    return tuple(part for part in Part if part in text.split(","))


def _environment(text: str) -> tuple[str, Path]:
    torch, _, folder = text.partition("=")
    path = Path(folder).absolute()
    if not (path / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(f"{text!r}: {path} is no virtual environment")
    return _release(torch), path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left to run, then prints the table of all that the file holds."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tree = tree_of(ROOT)
    if tree.endswith(CHANGED):
        say("files differ from the commit: what is found is of no commit")
    rows = read_rows(options.out, tree)
    for target in targets_of(options):
        logs = options.out.absolute().with_suffix(".logs") / target.name.replace(" ", "-")
        fill(rows, target, options.only, logs, lambda: write_rows(options.out, tree, rows))
    is_right, lines = verdict(list(rows.values()), options.only)
    print(f"commit {tree}", "", *table_lines(list(rows.values())), "", *lines, sep="\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends with it
    sys.exit(main())

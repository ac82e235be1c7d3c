"""The order of the house: a module imports from those above it, torch begins with `trace`, importing has no effects."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tpplan"

#: From the top down. A package is one room: its modules import each other.
WITHOUT_TORCH = (
    "errors",
    "escapes",
    "garbage",
    "units",
    "files",
    "strict",
    "buckets",
    "interpolate",
    "mesh",
    "intervals",
    "layout",
    "graph",
    "blocks",
    "profile_tables",
    "profile",
    "fit",
    "profile_check",
    "profile_views",
    "svg",
    "profile_report",
    "problem",
    "expressions",
    "patterns",
    "batching",
    "input_dims",
    "plan",
    "proof_hash",
    "by_pattern",
    "model_check",
    "shrink",
    "checkpoint_folder",
    "ledger",
    "optimizers",
    "treatments",
    "setting",
    "solvers",
    "rules",
    "written",
    "typecheck",
    "space",
    "visible",
    "pins",
    "layer_table",
    "report",
)
WITH_TORCH = (
    "torch_internals",
    "operators",
    "torch_internals",
    "storages",
    "subclass",
    "patched",
    "chance",
    "again",
    "reentry",
    "rewrite",
    "unsaid",
    "planned_device",
    "saved_hooks",
    "known",
    "own_failure",
    "registered",
    "branches",
    "counts",
    "calls",
    "program",
    "call_log",
    "left_behind",
    "reader",
    "siblings",
    "opaque",
    "observe",
    "trace",
    "applied",
    "originals",
    "weighting",
    "data",
    "fast_path",
    "marking",
    "convert",
    "losses",
    "costs",
    "kinds",
    "priced",
    "parameter_bytes",
    "peaks",
    "formulate",
    "lifetimes",
    "reruns",
    "weights",
    "shards",
    "replay",
    "assemble",
    "pricing",
    "sizes",
    "draws",
    "stopwatch",
    "machine",
    "measure_attention",
    "measure_groups",
    "measure_launch",
    "measure_optimizers",
    "measure",
    "survey",
    "reduce",
    "average",
    "read",
    "localize",
    "input_shapes",
    "in_step",
    "run_again",
    "recompute",
    "style",
    "closures",
    "agreement",
    "watch",
    "workers",
    "fitting",
    "first_calls",
    "apply",
    "constructor",
    "materialize",
    "load_weights",
    "checkpoint_metadata",
    "checkpoint",
    "bystander",
    "issued",
    "answers",
    "tracker",
    "prove",
    "options",
    "unsearched",
    "grown",
    "reuse",
    "job",
    "other_shapes",
    "infeasible",
    "unkept",
    "outcome",
    "conflicts",
    "search",
    "planner",
    "proof",
    "exporters",
    "sizing",
    "alternatives",
    "load",
    "examine",
    "verify",
    "doctor",
    "commands",
    "__main__",
)
ORDER = WITHOUT_TORCH + WITH_TORCH
#: what __init__.py is called here: it stands below everything
PUBLIC_API = ""


def room_of(path: Path) -> str:
    """The module or package directly under tpplan that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return PUBLIC_API if first == "__init__" else first


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a file, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                yield from ((node.lineno, "." * level + f"{module or ''}.{alias.name}") for alias in aliases)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violation(room: str, name: str) -> str | None:
    """Why a module of this room may not import this name; None where it may."""
    top, _, rest = name.partition(".")
    if top == "":
        return "relative import: imports are absolute"
    if top == "torch" and room in WITHOUT_TORCH:
        return f"torch begins with {WITH_TORCH[0]}"
    if top != "tpplan" or room == PUBLIC_API:
        return None
    target = rest.partition(".")[0]
    if target not in ORDER:
        return f"tpplan.{target} is not a module in ORDER: import from the module that defines it"
    if target != room and ORDER.index(target) >= ORDER.index(room):
        return f"{target} stands below {room}"
    return None


def violations(source: str, path: Path) -> list[str]:
    """Each forbidden import of a file, with its place."""
    found = ((line, name, violation(room_of(path), name)) for line, name in imported_names(ast.parse(source)))
    return [f"{path.relative_to(PACKAGE.parent)}:{line}: {name}: {why}" for line, name, why in found if why]


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter at the checkout's root."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_module_has_a_place_in_the_order() -> None:
    unknown = {room_of(path) for path in sources()} - {*ORDER, PUBLIC_API}
    assert not unknown, f"add {sorted(unknown)} to ORDER in {Path(__file__).name}, below what they import"


def test_modules_import_from_above_alone() -> None:
    placed = [path for path in sources() if room_of(path) in (*ORDER, PUBLIC_API)]
    found = [line for path in placed for line in violations(path.read_text(encoding="utf-8"), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("mesh.py", "from tpplan.errors import UsageError", None),
        ("mesh.py", "from tpplan import errors", None),
        ("errors.py", "from tpplan.mesh import Mesh", "mesh stands below errors"),
        ("errors.py", "def f():\n    import tpplan.mesh", "mesh stands below errors"),
        ("solvers/cbc.py", "from tpplan.solvers import milp", None),
        ("solvers/cbc.py", "from tpplan.rules.call import Call", "rules stands below solvers"),
        ("plan.py", "def f():\n    import torch.distributed", "torch begins with torch_internals"),
        ("plan.py", "import importlib\nimportlib.import_module('torch')", "torch begins with torch_internals"),
        ("trace.py", "import torch", None),
        ("planner.py", "from tpplan import Plan", "tpplan.Plan is not a module"),
        ("planner.py", "from . import plan", "relative import"),
        ("__init__.py", "from tpplan.planner import solve", None),
    ],
)
def test_what_the_order_forbids_is_found(file: str, source: str, complaint: str | None) -> None:
    found = violations(source, PACKAGE / file)
    assert len(found) == (complaint is not None)
    assert all(complaint in line for line in found if complaint)


def test_modules_above_trace_do_not_load_torch() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if room_of(path) in WITHOUT_TORCH
    ]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"import {{name}} loads torch"
"""
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr


def test_importing_tpplan_has_no_effects() -> None:
    code = """
import os, sys, threading
before = dict(os.environ), os.getcwd(), list(sys.path)
import tpplan
assert (dict(os.environ), os.getcwd(), list(sys.path)) == before
assert threading.active_count() == 1
torch = sys.modules.get("torch")
assert torch is None or not torch.distributed.is_initialized()
assert torch is None or not torch.cuda.is_initialized()
"""
    ran = run_python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

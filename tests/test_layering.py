"""The order of the house: a room imports from those before it, torch begins with `torch_internals`, no modules import
each other, and each room says in its `__init__` what it imports."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tpplan"

#: in the order in which a plan is made; inner rooms before the room they are in, or after it where they build on it
WITHOUT_TORCH = (
    "core",
    "solvers",
    "plan/sections",
    "plan",
    "plan/report",
    "page",
    "machine",
    "layouts/rules",
    "layouts/fused",
    "layouts",
)
WITH_TORCH = (
    *("torch_internals", "trace/hooks", "trace/answers", "trace/whole", "experts", "stages", "trace"),
    *("apply/collectives", "apply/modules", "apply", "train", "costs/runs", "costs"),
    *("costs/step", "costs/prediction", "measure", "prove"),
    *(
        "search/models",
        "search/points",
        "search/conflicts",
        "search",
        "search/pipelines",
        "search/comparisons",
        "anatomy",
        "verify",
        "trial",
    ),
    *("exporters", "commands/terminal", "commands"),
)
ROOMS = WITHOUT_TORCH + WITH_TORCH
#: the public API, and `python -m tpplan`
FRONT = ""
#: files of a room, its `__init__` among them; in commands each verb is one
FEWEST, MOST, MOST_VERBS = 4, 14, 20


def room_of(path: Path) -> str:
    """The folder under tpplan that a file is in."""
    return "/".join(path.relative_to(PACKAGE).parts[:-1])


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


PATHS = {module_of(path): path for path in sources()}


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


def imported_module(name: str) -> str | None:
    """The module of tpplan that an imported name is, or is in; None where it is none."""
    return next((own for own in (name, name.rpartition(".")[0]) if own in PATHS), None)


def violation(room: str, name: str) -> str | None:
    """Why a module of this room may not import this name; None where it may."""
    top = name.partition(".")[0]
    if top == "":
        return "relative import: imports are absolute"
    if top == "torch" and room in WITHOUT_TORCH:
        return f"torch begins with {WITH_TORCH[0]}"
    if top != "tpplan" or room == FRONT:
        return None
    module = imported_module(name)
    if module is None or module == "tpplan":
        return f"{name} is not a module: import from the module that defines it"
    target = room_of(PATHS[module])
    if target != room and ROOMS.index(target) >= ROOMS.index(room):
        return f"{target} comes after {room}"
    return None


def violations(source: str, path: Path) -> list[str]:
    """Each forbidden import of a file, with its place."""
    found = ((line, name, violation(room_of(path), name)) for line, name in imported_names(ast.parse(source)))
    return [f"{path.relative_to(PACKAGE.parent)}:{line}: {name}: {why}" for line, name, why in found if why]


def imports_of(path: Path) -> set[str]:
    """The modules of tpplan that a file imports."""
    names = (name for _, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))))
    return {module for name in names if (module := imported_module(name)) is not None}


def said_imports(room: str) -> tuple[set[str], set[str]]:
    """Rooms, and inner rooms of the same room, that the last sentence of a room's docstring names."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    found = re.search(r"^Imports: ([^.;]+)(?:; ([^.]+))?\.$", ast.get_docstring(tree) or "", re.MULTILINE)
    assert found, f"{room}/__init__.py: the docstring names no imports"
    outer, inner = (names and " ".join(names.split()) for names in found.groups())
    return set() if outer == "nothing" else set(outer.split(", ")), set(inner.split(", ")) if inner else set()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter at the checkout's root."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_file_is_in_a_room() -> None:
    unknown = {room_of(path) for path in sources()} - {*ROOMS, FRONT}
    assert not unknown, f"add {sorted(unknown)} to ROOMS in {Path(__file__).name}, after what they import"
    beside = {path.name for path in sources() if room_of(path) == FRONT}
    assert beside == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_neither_a_cupboard_nor_a_hall(room: str) -> None:
    number = sum(room_of(path) == room for path in sources())
    assert FEWEST <= number <= (MOST_VERBS if room == "commands" else MOST)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_says(room: str) -> None:
    modules = set[str]().union(*(imports_of(path) for path in sources() if room_of(path) == room))
    used = {room_of(PATHS[module]) for module in modules} - {room, FRONT}
    top = room.partition("/")[0]
    outer = {name.partition("/")[0] for name in used if name.partition("/")[0] != top}
    inner = {name for name in used if "/" in room and name.partition("/")[0] == top}
    assert said_imports(room) == (outer, inner)


def test_rooms_import_from_those_before_them_alone() -> None:
    found = [line for path in sources() for line in violations(path.read_text(encoding="utf-8"), path)]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other() -> None:
    graph = nx.DiGraph((module, other) for module, path in PATHS.items() for other in imports_of(path) - {module})
    assert not list(nx.simple_cycles(graph))


def test_every_room_is_in_the_package() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {f"tpplan.{room}".replace("/", ".") for room in ROOMS} | {"tpplan", "tpplan.profiles"}
    assert set(settings["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("core/mesh.py", "from tpplan.core.errors import UsageError", None),
        ("core/mesh.py", "from tpplan.core import errors", None),
        ("core/mesh.py", "from tpplan.plan.plan import Plan", "plan comes after core"),
        ("core/errors.py", "def f():\n    import tpplan.plan.plan", "plan comes after core"),
        ("solvers/cbc.py", "from tpplan.solvers import milp", None),
        ("solvers/cbc.py", "from tpplan.layouts.rules.call import Call", "layouts/rules comes after solvers"),
        ("trace/hooks/x.py", "from tpplan.trace.trace import trace", "trace comes after trace/hooks"),
        ("plan/plan.py", "def f():\n    import torch.distributed", "torch begins with torch_internals"),
        ("plan/plan.py", "import importlib\nimportlib.import_module('torch')", "torch begins with torch_internals"),
        ("trace/trace.py", "import torch", None),
        ("search/planner.py", "from tpplan import Plan", "tpplan.Plan is not a module"),
        ("search/planner.py", "from . import plan", "relative import"),
        ("__init__.py", "from tpplan.search.planner import solve", None),
    ],
)
def test_what_the_order_forbids_is_found(file: str, source: str, complaint: str | None) -> None:
    found = violations(source, PACKAGE / file)
    assert len(found) == (complaint is not None)
    assert all(complaint in line for line in found if complaint)


def test_rooms_without_torch_do_not_load_it() -> None:
    names = [module for module, path in PATHS.items() if room_of(path) in WITHOUT_TORCH]
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


def test_planning_and_applying_do_not_load_the_compiler() -> None:
    # It takes a second, on each rank and for each plan.
    code = """
import sys
import tpplan.apply.apply, tpplan.commands.solve, tpplan.search.planner, tpplan.train
assert "torch._dynamo" not in sys.modules
"""
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr

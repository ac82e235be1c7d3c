"""Private names of torch stand in one room, each with a probe; releases outside the tested range are said."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import in_fork
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import probes
from tpplan.torch_internals.operators import hides_sizes, seen_by
from tpplan.torch_internals.versions import NEWEST, OLDEST, TESTED, complaint, is_too_old

PACKAGE = Path(__file__).resolve().parents[2] / "tpplan"
ROOM = PACKAGE / "torch_internals"
#: private attributes that are Python's or another library's, or of ParallelStyle, which tpplan overrides; and files
#: whose text is written into exported files
NOT_TORCH = {"_getframe", "_exit", "_from_config", "_actions", "_replace", "_make", "_apply"}
EXPORTED = {"exporters/_pytorch_styles.py"}


def private_names(tree: ast.AST, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of what a file takes from torch that torch marks as private: modules and names with a leading
    underscore, torch.testing, and attributes with one that are not in `own`, which the file defines itself."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                parts = [*module.split("."), *(alias.name for alias in names)]
                if any(part.startswith("_") or part in ("testing", "experimental") for part in parts):
                    yield node.lineno, ".".join(parts)
            case ast.Import(names=names):
                for alias in names:
                    parts = alias.name.split(".")
                    if parts[0] == "torch" and any(part.startswith("_") for part in parts):
                        yield node.lineno, alias.name
            case ast.Attribute(attr=attr) if attr.startswith("_") and not attr.endswith("__"):
                if attr not in own and attr not in NOT_TORCH:
                    yield node.lineno, ast.unparse(node)


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, fields, and attributes that are assigned on self."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr, ctx=ast.Store()):
                yield attr


def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_other_module_uses_private_names_of_torch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees().items()
        if ROOM not in path.parents and str(path.relative_to(PACKAGE)) not in EXPORTED
        for line, name in private_names(tree, frozenset(defined_names(tree)))
    ]
    assert not found, "these belong into tpplan/torch_internals, with a probe:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree",
        "from torch._C import thing",
        "import torch._dynamo",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "x = torch._C._current_graph_task_id()",
        "y = tensor._spec",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert list(private_names(ast.parse(source), frozenset()))


def test_every_file_of_the_room_has_probes() -> None:
    files = {path.stem for path in ROOM.glob("*.py")} - {"__init__", "versions", "probe", "probes"}
    assert files == set(probes.FILES)


def test_this_torch_does_what_every_probe_asks() -> None:
    assert not probes.failed_probes()
    assert len(list(probes.probes())) > len(probes.FILES)


#: what a torch that lacks something looks like, by the name of the probe that must say so
BREAKAGES = {
    "the running backward": "del torch._C._current_graph_task_id",
    "functions with their own backward": "torch.autograd.Function.apply = torch.autograd.Function.apply",
    "reentrant checkpoints": "torch.utils.checkpoint.CheckpointFunction = type('Renamed', (), {'apply': None})",
    "non-reentrant checkpoints": (
        "c = torch.utils.checkpoint\n"
        "[c.__dict__.pop(name) for name in list(vars(c)) if name.startswith('_checkpoint_without')]"
    ),
    "replaced tensors in a module": "del torch.nn.utils.stateless._reparametrize_module",
    "recording with plain kernels": "del torch._C._DisablePythonDispatcher",
    "kernels for meta tensors": "del torch.library.Library._destroy",
    "parallel": "import torch.distributed._tools.fsdp2_mem_tracker as t; del t._FSDPState",
    "DTensor's parts": "import torch.distributed.tensor as t; t.DTensor._spec = property(lambda self: None)",
    "FSDP2's memory tracker": (
        "import torch.distributed._tools.fsdp2_mem_tracker as t\ndel t.FSDPMemTracker._fsdp_param_group_post_backward"
    ),
}


def names_lacking_without(breakage: str) -> list[str]:
    """What a fresh load of the room lacks in a torch that was broken first."""
    exec(breakage, {"torch": torch})
    for module in [module for module in sys.modules if module.startswith("tpplan.torch_internals")]:
        del sys.modules[module]
    fresh = importlib.import_module("tpplan.torch_internals.probes")
    return [found.name for found in fresh.failed_probes()]


@pytest.mark.parametrize("name", BREAKAGES)
def test_what_a_torch_lacks_is_said_by_name(name: str) -> None:
    assert name in in_fork(names_lacking_without, BREAKAGES[name])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("version", "is_old", "is_said"),
    [
        ("2.10.9", True, True),
        ("1.13.1+cu117", True, True),
        (OLDEST, False, False),
        ("2.12.0", False, False),
        (f"{NEWEST}+cu130", False, False),
        ("2.14.2", False, True),
        ("2.15.0.dev20261120+cpu", False, True),
        ("3.0.0a0+gitabc", False, True),
    ],
)
def test_releases_outside_the_tested_range_are_said(version: str, is_old: bool, is_said: bool) -> None:
    assert is_too_old(version) == is_old
    assert (OLDEST in complaint(version) and NEWEST in complaint(version)) == is_said


def test_tested_releases_span_the_range() -> None:
    assert (TESTED[0], TESTED[-1]) == (OLDEST, NEWEST)


def test_loading_tpplan_refuses_an_older_torch_and_warns_once_of_a_newer() -> None:
    code = """
import sys, torch
torch.__version__ = "2.10.0"
import tpplan
try:
    tpplan.apply_plan
except tpplan.core.errors.TorchVersionError as error:
    print(error)
else:
    sys.exit("it was not refused")
for name in [name for name in sys.modules if name.partition(".")[0] == "tpplan"]:
    del sys.modules[name]
torch.__version__ = "9.9.9"
import tpplan
tpplan.apply_plan, tpplan.solve
"""
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("torch 2.10.0 is too old")
    assert ran.stderr.count("torch 9.9.9 is newer") == 1, ran.stderr
    assert "2.10.0" not in ran.stderr


class _Named(TorchFunctionMode):
    """Notes the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


class _Opening(_Named):
    """Sees also what a function calls that hands itself to modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return seen_by(self, func)(*args, **kwargs or {}) if hides_sizes(func) else func(*args, **kwargs or {})


def test_each_mode_around_sees_an_opened_function_as_one_call() -> None:
    outermost, around, opening = _Named(), _Named(), _Opening()
    attention = torch.nn.MultiheadAttention(4, 2)
    x = torch.zeros(3, 1, 4)
    with outermost, around, opening:
        attention(x, x, x, need_weights=False)
    name = "multi_head_attention_forward"
    assert outermost.seen.count(name) == around.seen.count(name) == 1
    assert "linear" in opening.seen
    assert "linear" not in outermost.seen + around.seen

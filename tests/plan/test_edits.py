"""Plans edited by hand, in random ways: either one loads and is proven, or it is refused with the path of what is
wrong; and no text in a plan or a profile is ever run."""

import ast
import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from examples import eager_to_shard, example, solve_example
from hypothesis import strategies as st
from torch import nn

from tpplan.core.errors import PlanError, TpplanError, VerificationError
from tpplan.plan.plan import Plan
from tpplan.search.models.trace_cache import Reuse
from tpplan.verify.prove_plan import prove_plan

TEXTS = ("R", "R*", "S(0)", "S(1)", "S(7)", "P", "rows", "R -> S(0) as float32", "P -> R as bfloat16", "layers.*",
         "layers.9", "<root>", "head", "full", "__import__('os').abort()", "float64", "0-3", "")  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    batch = {"global_batch": 8, "micro_batch": 2}
    return solve_example("mlp", eager_to_shard(), gpus=4, tp=2, fsdp=2, builder=build_model, recompute="full", **batch)


@pytest.fixture(scope="module")
def reuse() -> Reuse:
    return Reuse()


def prove(plan: Plan, reuse: Reuse) -> None:
    module = example("mlp")
    prove_plan(plan, build_model, module.example_inputs, loss=module.loss, reuse=reuse)


def build_model() -> nn.Module:
    """Of two blocks."""
    model: nn.Module = example("mlp").MLP(64, 128, 2, 10)
    return model


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON data."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*path, key))


def edited(data: object, draw: Any) -> object:
    """The data with one thing changed: replaced, removed, moved, renamed, doubled or added to."""
    found = copy.deepcopy(data)
    every = list(places(found))[1:]
    path = draw(st.sampled_from(every))
    holder: Any = found
    for key in path[:-1]:
        holder = holder[key]
    value = holder[path[-1]]
    match draw(st.sampled_from(("replace", "near", "borrow", "remove", "rename", "double", "add"))):
        case "near" if isinstance(value, bool):
            holder[path[-1]] = not value
        case "near" if isinstance(value, int | float):
            holder[path[-1]] = draw(st.sampled_from((value + 1, value - 1, 2 * value, 0, -value, 10**30, value / 2)))
        case "near" if isinstance(value, str):
            holder[path[-1]] = draw(st.sampled_from(TEXTS))
        case "borrow":
            other: Any = found
            for key in draw(st.sampled_from(every)):
                other = other[key]
            holder[path[-1]] = copy.deepcopy(other)
        case "remove":
            del holder[path[-1]]
        case "rename" if isinstance(holder, dict):
            holder[draw(st.sampled_from((*TEXTS, "x", "compile")))] = holder.pop(path[-1])
        case "double" if isinstance(holder, list):
            holder.append(copy.deepcopy(value))
        case "add" if isinstance(holder, dict):
            holder[draw(st.sampled_from((*TEXTS, "x")))] = copy.deepcopy(value)
        case _:
            values = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS)
            holder[path[-1]] = draw(values | st.lists(values, max_size=2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_edits", [60, pytest.param(200, marks=pytest.mark.long)])
def test_an_edited_plan_is_proven_or_refused_with_its_path(
    plan: Plan, reuse: Reuse, tmp_path: Path, num_edits: int
) -> None:
    data = json.loads(plan.dumps())
    file = tmp_path / "plan.json"
    seen: Counter[str] = Counter()

    @hypothesis.settings(max_examples=num_edits, derandomize=True, database=None, deadline=None)
    @hypothesis.given(st.data())
    def holds(draws: st.DataObject) -> None:
        changed = edited(data, draws.draw)
        file.write_text(json.dumps(changed), encoding="utf-8")
        seen[outcome(file, reuse)] += 1

    holds()
    assert seen.total() >= num_edits
    assert all(seen[what] for what in ("proven", "refused as it is read", "refused by the proof")), seen


def outcome(file: Path, reuse: Reuse) -> str:
    """What becomes of a plan; any other error is the test's failure, and so is a refusal without a path."""
    try:
        loaded = Plan.load(file)
    except PlanError as error:
        refusal, where = str(error), "refused as it is read"
        if "not valid JSON" in refusal or "expected finite numbers" in refusal:
            return where
    else:
        try:
            prove(loaded, reuse)
        except VerificationError as error:
            refusal, where = str(error), "refused by the proof"
        else:
            return "proven"
    assert begins_with_path(refusal.removeprefix(f"{file}: ")), refusal
    return where


def begins_with_path(text: str) -> bool:
    """`boundaries.layers.*.inputs.x: ...`: it begins with a section of the plan, or with what an edit has put there."""
    sections = {member.name for member in dataclasses.fields(Plan)} | {*TEXTS, "x", '""'}
    return any(text.startswith(f"{section}{mark}") for section in sections for mark in ".[:")


def test_the_plan_itself_is_proven(plan: Plan, reuse: Reuse) -> None:
    prove(plan, reuse)


# ---- no text is ever run

PACKAGE = Path(__file__).resolve().parents[2] / "tpplan"
#: what runs text, or finds code by its name
RUNNING_NAMES = {"eval", "exec", "compile", "__import__"}
RUNNING_MODULES = {"pickle", "marshal", "shelve", "importlib", "runpy", "code", "subprocess", "yaml", "ctypes"}
#: what only finds files: the profiles that ship, and the versions of installed packages
FINDS_FILES = {"importlib.resources", "importlib.metadata"}


def imported(module: str) -> Iterator[str]:
    """A module of tpplan, by its path without the ending, and all of them that it imports, however deep."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpplan."):
                todo.append((node.module or "").removeprefix("tpplan.").replace(".", "/"))


def parsed(module: str) -> ast.Module:
    path = PACKAGE / f"{module}.py"
    return ast.parse((path if path.is_file() else PACKAGE / module / "__init__.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("loader", ["plan/plan", "machine/profile"])
def test_what_reads_plans_and_profiles_can_run_nothing(loader: str) -> None:
    modules = list(imported(loader))
    assert {"core/strict_json", "core/errors"} <= {*modules}
    for module in modules:
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNNING_NAMES, f"{module}:{node.lineno}"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not RUNNING_MODULES & {name.partition(".")[0] for name in {*names} - FINDS_FILES}, module


def test_code_in_a_plan_stays_text(plan: Plan, tmp_path: Path) -> None:
    """In whatever place: as a value, and as a key."""
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    data = json.loads(plan.dumps())
    file = tmp_path / "plan.json"
    for path in list(places(data))[1::5]:
        changed = copy.deepcopy(data)
        holder: Any = changed
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder[path[-1]], str):
            holder[path[-1]] = code
        elif isinstance(holder, dict):
            holder[code] = holder.pop(path[-1])
        file.write_text(json.dumps(changed), encoding="utf-8")
        try:
            Plan.load(file)
        except TpplanError:
            continue
    assert not mark.exists()
    assert not torch.distributed.is_initialized()

"""The plan file: it round-trips, the shipped schema is the dataclasses', mistakes are named, writes are whole."""

import copy
import dataclasses
import errno
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.dev.make_schema import SCHEMA_PATH, plan_schema, schema_text
from tpplan.core.errors import PlanError, PlanMismatchError
from tpplan.core.layout import R_STAR, ROWS, Conversion, P, R, S, layouts_of
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import MAX_BLOCK_INDEX, ROOT, format_ranges, parse_ranges
from tpplan.core.strict_json import AtLeast, Text
from tpplan.plan.model_fingerprint import check_parameters
from tpplan.plan.plan import (
    BatchPlan,
    BoundaryPlan,
    ClusterPlan,
    CollectivePlan,
    Compile,
    CrossingPlan,
    Fingerprints,
    FsdpPlan,
    LayoutText,
    MeshPlan,
    ParameterPlan,
    Pass,
    Plan,
    Precision,
    Prediction,
    ProofReport,
    ProofStatus,
    Recompute,
    SizePlan,
    SolverReport,
)
from tpplan.plan.sections.input_dims import Dim
from tpplan.solvers.problem import Status


def parameter(placement: str, shape: tuple[int, ...], reads: Mapping[str, str], **changes: object) -> ParameterPlan:
    """A parameter of a float32 model."""
    layouts = {"R": R, "R*": R_STAR, "S(0)": S(0), "S(1)": S(1)}
    plan = ParameterPlan(
        placement=layouts[placement],
        reads={reader: layouts[text] for reader, text in reads.items()},
        shape=shape,
        dtype="float32",
        trainable=True,
        aliases=(),
    )
    return dataclasses.replace(plan, **changes)


#: two layers in the pattern, a third of its own, tied embedding and head
EXAMPLE = Plan(
    schema_version=1,
    tpplan_version="0.1.0",
    torch_version="2.13.0",
    cluster=ClusterPlan(gpus=8, gpus_per_node=8, profile="h100-sxm", profile_fingerprint="sha256:0"),
    mesh_degrees=MeshPlan(replicate=1, shard=4, tp=2),
    batch=BatchPlan(global_batch=16, micro_batch=2, accumulation_steps=2, seq_len=128),
    precision=Precision.BF16_MIXED,
    optimizer="adamw",
    blocks={"layers.*": "0-2"},
    parameters={
        "embedding.weight": parameter("S(0)", (64, 8), {"embedding": "S(0)", "head": "S(0)"}, aliases=("head.weight",)),
        "layers.*.up.weight": parameter("S(0)", (32, 8), {"layers.*.up": "S(0)"}),
        "layers.1.up.weight": parameter("R", (32, 8), {"layers.1.up": "R*"}),
        "layers.*.norm.weight": parameter("R", (8,), {"layers.*.norm": "R*"}, trainable=False),
    },
    boundaries={
        "embedding": BoundaryPlan(
            inputs={"input": CrossingPlan(Conversion(R, ROWS), "int64")},
            outputs={"output": CrossingPlan(Conversion(ROWS, S(1)), "bfloat16")},
        ),
        "layers.*.up": BoundaryPlan(inputs={"input": CrossingPlan(Conversion(S(1), R_STAR), "bfloat16")}, outputs={}),
    },
    outputs={"output": S(2)},
    sizes={"layers.*.up": (SizePlan(call="view", of=(0, 0, 16), count=4, position=2, written=8, local=4),)},
    losses={"<root>": 64},
    draws=("layers.*.up",),
    recompute={"layers.*": Recompute.SELECTIVE, "layers.1": Recompute.FULL, "layers.2": Recompute.NONE},
    compile=Compile.BLOCKS,
    fsdp=FsdpPlan(units=("layers.*", "<root>"), reshard_after_forward=True, exceptions=("layers.2",)),
    collectives=(
        CollectivePlan(
            where="layers.*.up input",
            kind="all_gather",
            axis=Axis.TP,
            during=Pass.FORWARD,
            dtype="bfloat16",
            num_bytes=4096,
            count=6,
        ),
    ),
    predicted=Prediction(
        step_time_s=0.5,
        step_time_error_s=0.05,
        is_extrapolated=False,
        time_s={"compute": 0.4, "tp collectives": 0.1},
        peak_memory_bytes=1e9,
        slack_bytes=1e8,
        memory_limit_bytes=2e9,
        memory_bytes={"parameters": 1e9},
        peak_during=Pass.BACKWARD,
        peak_module="<root>",
    ),
    solver=SolverReport(
        name="highs",
        status=Status.OPTIMAL,
        objective_s=0.5,
        bound_s=0.5,
        gap=0.0,
        meshes_tried=4,
        skipped={"too slow": 2},
    ),
    fingerprints=Fingerprints(parameters="sha256:1", graph="sha256:2", inputs={"tokens": "int64[2, 128]"}),
    proof=ProofReport(status=ProofStatus.PROVEN, rounds=1, cuts=("layers.0.up: S(1)",), assumptions=()),
    unruled_ops={"aten.diagonal.default": 0.001},
)

VALIDATOR = jsonschema.Draft202012Validator(plan_schema())


# The schema.


def test_shipped_schema_is_that_of_the_dataclasses():
    assert SCHEMA_PATH.read_text() == schema_text(), "run python scripts/dev/make_schema.py"
    jsonschema.Draft202012Validator.check_schema(plan_schema())


def test_schema_accepts_what_is_dumped():
    VALIDATOR.validate(json.loads(EXAMPLE.dumps()))


def test_schema_patterns_say_what_is_parsed():
    layouts = (*layouts_of((2, 2), carries_gradient=True, tp=2), ROWS)
    pattern = get_args(LayoutText)[1].pattern
    assert all(re.fullmatch(pattern, str(layout)) for layout in layouts)
    conversions = plan_schema()["$defs"]["BoundaryPlan"]["properties"]["inputs"]["additionalProperties"]
    assert all(re.search(conversions["pattern"], f"{a} -> {b} as bfloat16") for a in layouts for b in layouts)
    assert not any(re.search(conversions["pattern"], text) for text in ("R -> S(-1) as int64", "R -> P", "R -> P as "))


# Round trip.


#: without the name of the root, which hypothesis finds in the code
names = st.text(
    st.sampled_from("abc.0") | st.characters(codec="utf-8", exclude_characters="*"), min_size=1, max_size=8
).filter(lambda name: name != ROOT)
layouts = st.sampled_from([R, R_STAR, P, ROWS, S(0), S(3)])
dims = st.sampled_from([Dim(0), Dim(32), Dim(1, 1, "length"), Dim(-2, 3, "batch"), Dim(0, 1, "batch * length")])


def _crossings(source: object, target: object, dtype: str) -> CrossingPlan:
    try:
        return CrossingPlan(Conversion(source, target), dtype)  # type: ignore[arg-type]
    except ValueError:
        return CrossingPlan(Conversion(R, S(1)), dtype)


def strategy_of(hint: object) -> st.SearchStrategy[object]:
    """Any value of a field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        match arguments[1]:
            case Text(parse=parse) if parse.__name__ == "parse_layout":
                return layouts
            case Text(parse=parse) if parse.__name__ == "parse_dim":
                return dims
            case Text():
                return st.builds(_crossings, layouts, layouts, st.sampled_from(["int64", "float8_e4m3fn"]))
            case AtLeast(bound=bound) if arguments[0] is int:
                return st.integers(int(bound), 2**62)
            case AtLeast(bound=bound):
                return st.just(float(bound)) | st.floats(max(bound, 1e-30), 1e30) | st.integers(1, 9)
    if origin in (Union, types.UnionType):
        return st.none() | strategy_of(arguments[0])
    if origin is tuple:
        return st.lists(strategy_of(arguments[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(names, strategy_of(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return st.fixed_dictionaries({name: strategy_of(inner) for name, inner in hints.items()}).map(
            lambda members: hint(**members)
        )
    assert isinstance(hint, type)
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return {str: names, bool: st.booleans(), int: st.integers(-(2**62), 2**62)}[hint]


@st.composite
def plans(draw: Callable[[st.SearchStrategy[object]], object]) -> Plan:
    """Any plan whose products and patterns agree."""
    plan = draw(strategy_of(Plan))
    assert isinstance(plan, Plan)
    degrees = MeshPlan(replicate=2, shard=2, tp=2)
    experts = plan.experts and dataclasses.replace(plan.experts, ep=draw(st.sampled_from([1, 2])))
    micro_batch, steps = plan.batch.micro_batch % 2**20 + 1, plan.batch.accumulation_steps % 2**20 + 1
    batch = dataclasses.replace(
        plan.batch, micro_batch=micro_batch, accumulation_steps=steps, global_batch=micro_batch * steps * 4
    )
    entries = [
        dataclasses.replace(entry, aliases=(), shape=tuple(size % 2**20 for size in entry.shape))
        for entry in plan.parameters.values()
    ]
    return dataclasses.replace(
        plan,
        schema_version=1,
        mesh_degrees=degrees,
        experts=experts,
        cluster=dataclasses.replace(plan.cluster, gpus=8),
        batch=batch,
        blocks={"layers.*": "0-2,5"},
        sizes=dict(zip(("layers.*.mlp", "layers.2.mlp"), plan.sizes.values(), strict=False)),
        losses=dict(zip(("layers.*.mlp", "layers.2.mlp"), plan.losses.values(), strict=False)),
        draws=("layers.*.mlp",),
        fsdp=dataclasses.replace(
            plan.fsdp, exceptions=plan.fsdp.units[:1], over_tp=plan.fsdp.over_tp and plan.fsdp.units[:1]
        ),
        recompute=dict(zip(("layers.*.mlp", "layers.2.mlp"), plan.recompute.values(), strict=False)),
        parameters=dict(zip(("layers.*.w", "layers.1.w"), entries, strict=False)),
    )


@settings(max_examples=60)
@given(plans())
def test_any_plan_round_trips_and_fits_the_schema(plan):
    text = plan.dumps()
    again = Plan.from_dict(json.loads(text))
    assert again == plan
    assert again.dumps() == text
    assert again.hash == plan.hash
    VALIDATOR.validate(json.loads(text))


def test_file_round_trip(tmp_path):
    EXAMPLE.dump(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == EXAMPLE
    assert Plan.load(str(tmp_path / "plan.json")).hash == EXAMPLE.hash


def test_text_is_sorted_and_does_not_depend_on_the_order_of_mappings():
    def reversed_mappings(value: object) -> object:
        if isinstance(value, dict):
            return {key: reversed_mappings(value[key]) for key in reversed(value)}
        return [reversed_mappings(item) for item in value] if isinstance(value, list) else value

    other = Plan.from_dict(reversed_mappings(EXAMPLE.to_dict()))
    assert other.dumps() == EXAMPLE.dumps()

    def keys(value: object) -> Iterator[list[str]]:
        if isinstance(value, dict):
            yield list(value)
            for member in value.values():
                yield from keys(member)

    assert all(found == sorted(found) for found in keys(json.loads(EXAMPLE.dumps())))
    assert EXAMPLE.dumps().endswith("}\n")
    assert max(map(len, EXAMPLE.dumps().splitlines())) < 200


def test_hash_changes_with_any_key():
    assert dataclasses.replace(EXAMPLE, optimizer="sgd").hash != EXAMPLE.hash
    assert EXAMPLE.hash.startswith("sha256:")


def test_a_number_that_json_cannot_hold_is_not_written():
    broken = dataclasses.replace(EXAMPLE, predicted=dataclasses.replace(EXAMPLE.predicted, step_time_s=float("nan")))
    with pytest.raises(ValueError, match="JSON"):
        broken.dumps()


# Strictness.


def places(value: object, path: str = "") -> Iterator[tuple[str, object, str | int]]:
    """Every key of the data: its path, the object or array it stands in, and its own name there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        own = f"{path}[{key}]" if isinstance(key, int) else f"{path}{'.' if path else ''}{key}"
        yield own, value, key
        yield from places(member, own)


PATHS = [path for path, _, _ in places(EXAMPLE.to_dict())]
#: replacements that are of the wrong type or range nearly everywhere
REPLACEMENTS = (None, True, -1, 1.5, "", "?", [], {}, [None], {"?": None}, 10**400)


def altered(path: str, change: Callable[[object, str | int], None]) -> dict[str, object]:
    """The example's data with one key changed."""
    data = copy.deepcopy(EXAMPLE.to_dict())
    container, key = next((c, k) for own, c, k in places(data) if own == path)
    change(container, key)
    return data


def error_of(read: Callable[[], Plan]) -> str | None:
    """The PlanError's message, None where there is none; any other exception is not caught."""
    try:
        read()
    except PlanError as error:
        return str(error)
    return None


def assert_refused_exactly_where_the_schema_refuses(data: object, path: str) -> None:
    """A file that the schema refuses is refused with the key's path; one that loads is one that the schema allows."""
    message = error_of(lambda: Plan.from_dict(data, origin="plan.json"))
    if message is None:
        assert VALIDATOR.is_valid(data)
    else:
        assert message.startswith("plan.json: ")
        assert path in message or VALIDATOR.is_valid(data)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_value_is_refused_by_its_path(path):
    for replacement in REPLACEMENTS:
        data = altered(path, lambda container, key, value=replacement: container.__setitem__(key, value))
        assert_refused_exactly_where_the_schema_refuses(data, path)


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_or_unknown_key_is_refused_by_its_path(path):
    without = altered(path, lambda container, key: container.__delitem__(key))
    assert_refused_exactly_where_the_schema_refuses(without, path)
    data = altered(path, lambda container, key: None)
    container, key = next((c, k) for own, c, k in places(data) if own == path)
    if isinstance(container, dict):
        container["surprise"] = 1
        assert_refused_exactly_where_the_schema_refuses(data, path.removesuffix(str(key)) + "surprise")


#: what to put where, and what the message must say
MISTAKES = {
    "schema_version": ("schema_version", 2, "plan.json: schema_version: this tpplan reads version 1, the file has 2"),
    "not an integer": ("schema_version", "1", "plan.json: schema_version: expected an integer, got text '1'"),
    "negative": ("predicted.step_time_s", -1, "plan.json: predicted.step_time_s: expected >= 0, got -1"),
    "zero ranks": ("mesh_degrees.tp", 0, "plan.json: mesh_degrees.tp: expected >= 1, got 0"),
    "infinite": ("predicted.step_time_s", float("inf"), "predicted.step_time_s: expected a finite number"),
    "enum": ("precision", "bf17", "precision: expected one of fp32, bf16-mixed, bf16, bf16-autocast, got 'bf17'"),
    "layout": (
        "parameters.embedding.weight.placement",
        "S(x)",
        "parameters.embedding.weight.placement: expected a layout",
    ),
    "conversion": (
        "boundaries.embedding.inputs.input",
        "P -> rows as int64",
        "boundaries.embedding.inputs.input: no conversion P -> rows",
    ),
    "range": ("blocks", {"layers.*": "2-0"}, "blocks.layers.*: expected ascending ranges, got '2-0'"),
    "overlap": ("blocks", {"layers.*": "0-2,2"}, "blocks.layers.*: expected ascending ranges"),
    "no range": ("blocks", {"layers.*": "all"}, "blocks.layers.*: expected ranges up to 9999 such as"),
    "endless": ("blocks", {"layers.*": "0-999999999999"}, "blocks.layers.*: expected ranges up to 9999"),
    "block name": ("blocks", {"layers": "0-2"}, "blocks.layers: expected a pattern that ends in its only '*'"),
    "no block": ("blocks", {}, "parameters.layers.*.up.weight: 'layers.*.up.weight' matches none of the blocks []"),
    "unit": ("fsdp.units", ["h.*"], "fsdp.units[0]: 'h.*' matches none of the blocks ['layers.*']"),
    "two stars": ("fsdp.units", ["layers.*.a.*"], "fsdp.units[0]: 'layers.*.a.*' matches none of the blocks"),
    "stray star": (
        "parameters.layers.1.up.weight.reads",
        {"layers.*.up": "R"},
        "parameters.layers.1.up.weight: 'layers.*.up' has a '*'",
    ),
    "own alias": (
        "parameters.embedding.weight.aliases",
        ["embedding.weight"],
        "parameters.embedding.weight.aliases: a name cannot be its own alias",
    ),
    "no dtype": (
        "boundaries.embedding.inputs.input",
        "R -> rows",
        "boundaries.embedding.inputs.input: expected a conversion and a dtype such as 'R -> S(1) as bfloat16', got",
    ),
    "recompute mode": ("recompute.layers.*", "some", "recompute.layers.*: expected one of none, full, selective"),
    "compile mode": ("compile", "some", "compile: expected one of none, blocks, got 'some'"),
    "recompute pattern": ("recompute", {"blocks.*": "full"}, "recompute.blocks.*: 'blocks.*' matches none of the"),
    "region in a region": (
        "recompute",
        {"layers.*.up": "full", "layers.1": "selective"},
        "recompute.layers.1: layers.1.up inside it is recomputed too; name only one of them",
    ),
    "batch": (
        "batch.global_batch",
        15,
        "batch.global_batch: expected micro_batch 2 * accumulation_steps 2 * 4 data-parallel ranks, got 15",
    ),
    "too few GPUs": ("cluster.gpus", 4, "mesh_degrees: replicate 1 x shard 4 x tp 2 needs more than cluster.gpus, 4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_place(mistake):
    path, value, message = MISTAKES[mistake]
    data = altered(path, lambda container, key: container.__setitem__(key, value))
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_dict(data, origin="plan.json")


def test_a_near_miss_is_suggested():
    data = altered("precision", lambda container, key: container.__setitem__("precison", container.pop(key)))
    with pytest.raises(PlanError, match=r"precison: unknown key; did you mean 'precision'\?"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"plan"',
        "\ufeff{}",
        '{"a": 1, "a": 2}',
        '{"schema_version": NaN}',
        '{"schema_version": 1e999}',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        EXAMPLE.dumps()[:-20],
        EXAMPLE.dumps() + "}",
        EXAMPLE.dumps().replace("0.5", "NaN", 1),
        EXAMPLE.dumps().replace('"optimizer"', '"batch": 1, "optimizer"'),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=re.escape(str(path))):
        Plan.load(path)


@settings(max_examples=60)
@given(st.integers(0, len(EXAMPLE.dumps()) - 2), st.binary(max_size=3))
def test_a_damaged_file_never_raises_anything_else(tmp_path_factory, position, noise):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    text = EXAMPLE.dumps().encode()
    for damaged in (text[:position], text[:position] + noise + text[position + 1 :]):
        path.write_bytes(damaged)
        message = error_of(lambda: Plan.load(path))
        assert message is None or str(path) in message


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.json", ".", "binary"):
        with pytest.raises(PlanError, match="cannot be read"):
            Plan.load(tmp_path / name)


# Atomic writing.


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    EXAMPLE.dump(path)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"plan.json: cannot be written: No space left on device"):
        dataclasses.replace(EXAMPLE, optimizer="sgd").dump(path)
    assert Plan.load(path) == EXAMPLE
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EXAMPLE.dump(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "absent" / "plan.json"):
        with pytest.raises(PlanError, match="cannot be written"):
            EXAMPLE.dump(place)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_an_existing_file_is_replaced(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    EXAMPLE.dump(path)
    assert Plan.load(path) == EXAMPLE
    assert path.stat().st_mode & 0o777 == 0o644


# Patterns.


def test_an_explicit_name_overrides_the_pattern():
    found = EXAMPLE.parameter_plans()
    assert {name: str(plan.placement) for name, plan in found.items() if name.startswith("layers")} == {
        "layers.0.up.weight": "S(0)",
        "layers.1.up.weight": "R",
        "layers.2.up.weight": "S(0)",
        "layers.0.norm.weight": "R",
        "layers.1.norm.weight": "R",
        "layers.2.norm.weight": "R",
    }
    assert found["layers.2.up.weight"].reads == {"layers.2.up": S(0)}
    assert found["layers.1.up.weight"].reads == {"layers.1.up": R_STAR}
    assert found["embedding.weight"] == EXAMPLE.parameters["embedding.weight"]


def test_patterns_of_modules_and_units_expand():
    assert set(EXAMPLE.boundary_plans()) == {"embedding", "layers.0.up", "layers.1.up", "layers.2.up"}
    assert EXAMPLE.recomputed_modules() == {"layers.0": Recompute.SELECTIVE, "layers.1": Recompute.FULL}
    assert EXAMPLE.fsdp_units() == ("layers.0", "layers.1", "layers.2", "")


def test_aliases_in_a_pattern_expand():
    entry = parameter("R", (8,), {"layers.*.a": "R"}, aliases=("layers.*.b.weight",))
    plan = dataclasses.replace(EXAMPLE, parameters={"layers.*.a.weight": entry})
    assert plan.parameter_plans()["layers.2.a.weight"].aliases == ("layers.2.b.weight",)


def test_a_star_within_a_name_is_no_pattern():
    plan = dataclasses.replace(EXAMPLE, boundaries={"odd*name": EXAMPLE.boundaries["embedding"]})
    assert set(Plan.from_dict(plan.to_dict()).boundary_plans()) == {"odd*name"}


def test_blocks_of_the_root_expand():
    plan = dataclasses.replace(
        EXAMPLE,
        blocks={"*": "0,2"},
        parameters={"*.weight": parameter("R", (8,), {"*": "R"})},
        boundaries={},
        sizes={},
        losses={},
        draws=(),
        recompute={"*": Recompute.FULL},
        fsdp=FsdpPlan(units=("*", "<root>"), reshard_after_forward=False, exceptions=()),
    )
    again = Plan.from_dict(plan.to_dict())
    assert set(again.parameter_plans()) == {"0.weight", "2.weight"}
    assert again.parameter_plans()["2.weight"].reads == {"2": R}
    assert again.fsdp_units() == ("0", "2", "")
    assert set(again.recomputed_modules()) == {"0", "2"}


@given(st.sets(st.integers(0, MAX_BLOCK_INDEX), min_size=1, max_size=20))
def test_ranges_round_trip(indices):
    ordered = tuple(sorted(indices))
    assert parse_ranges(format_ranges(ordered)) == ordered


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "1,", "3-1", "0,5-3", "1,1", "2-4,3", " 1", "1.5", "٣", "10000"])
def test_other_ranges_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse_ranges(text)


# The model's parameters.


def rows(plan: Plan) -> dict[str, tuple[tuple[int, ...], bool]]:
    """What a model that fits the plan has."""
    return {
        name: (entry.shape, entry.trainable)
        for own, entry in plan.parameter_plans().items()
        for name in (own, *entry.aliases)
    }


def test_the_planned_model_is_accepted():
    assert len(rows(EXAMPLE)) == 8  # embedding and head, and three layers of two
    check_parameters(EXAMPLE, rows(EXAMPLE))


def test_another_model_is_refused_parameter_by_parameter():
    found = rows(EXAMPLE)
    del found["layers.2.up.weight"]
    found["layers.3.up.weight"] = ((32, 8), True)
    found["layers.0.up.weight"] = ((32, 9), True)
    found["layers.0.norm.weight"] = ((8,), True)
    with pytest.raises(PlanMismatchError) as caught:
        check_parameters(EXAMPLE, found)
    message = str(caught.value)
    assert "4 parameters differ" in message
    for line in (
        "layers.2.up.weight: in the plan, not in the model",
        "layers.3.up.weight: in the model, not in the plan",
        "layers.0.up.weight: shape [32, 8] in the plan, [32, 9] in the model",
        "layers.0.norm.weight: trainable False in the plan, True in the model",
    ):
        assert line in message


def test_a_long_list_of_differences_is_cut():
    with pytest.raises(PlanMismatchError, match="and 4 more"):
        check_parameters(EXAMPLE, {f"other.{i}": ((1,), True) for i in range(4)})


def test_schema_path_is_in_the_package():
    assert Path(SCHEMA_PATH).parent.parts[-2:] == ("tpplan", "plan")

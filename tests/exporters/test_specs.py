"""Plans as named axes and as degrees of a mesh: JAX places the slices that tpplan's ranks hold."""

import json
import os
import subprocess
import sys

import pytest
from examples import eager_to_shard, example, solve_example
from plans import handmade_plan
from ranks import run_ranks
from torch import nn

from tpplan.apply.apply import apply_plan
from tpplan.core.errors import ExportError
from tpplan.core.mesh import Mesh
from tpplan.exporters import export
from tpplan.exporters.sharding_specs import specs_of
from tpplan.plan.plan import Plan
from tpplan.train.materialize import local_box

MESH = Mesh(replicate=2, shard=2, tp=2)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def plan_for(mesh: Mesh) -> Plan:
    """Columns, then rows."""
    columns = {"0.weight": ("S(0)", "S(0)"), "0.bias": ("S(0)", "S(0)")}
    rows = {"2.weight": ("S(1)", "S(1)"), "2.bias": ("R", "P")}
    boundaries = {"0": ({"input": "R -> R*"}, {}), "2": ({}, {"output": "P -> R"})}
    return handmade_plan(build_model(), mesh, parameters=columns | rows, boundaries=boundaries)


#: prints, by parameter, what each device holds of it: [start, stop] of each dim
JAX = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
from jax.sharding import NamedSharding, PartitionSpec
specs, shapes = json.load(sys.stdin)
mesh = jax.make_mesh(tuple(specs["mesh"].values()), tuple(specs["mesh"]))
found = {}
for name, dims in specs["parameters"].items():
    sharding = NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in dims)))
    held = sharding.devices_indices_map(tuple(shapes[name]))
    boxes = {device.id: [s.indices(n)[:2] for s, n in zip(box, shapes[name])] for device, box in held.items()}
    found[name] = [boxes[device.id] for device in mesh.devices.flat]
print(json.dumps(found))
"""


def held_boxes(plan: Plan) -> dict[str, list[list[int]]]:
    model = apply_plan(build_model(), plan)
    found = model.named_parameters(remove_duplicate=False)
    return {name: [[part.start, part.stop] for part in local_box(parameter)] for name, parameter in found}


def boxes_of(specs: dict[str, object], shape: tuple[int, ...], name: str, rank: int) -> list[list[int]]:
    """What a rank holds by the named axes, worked out cut by cut."""
    sizes = specs["mesh"]
    coordinate, left = {}, rank
    for axis in reversed(sizes):
        left, coordinate[axis] = divmod(left, sizes[axis])
    boxes = []
    for size, axes in zip(shape, specs["parameters"][name], strict=True):
        start, length = 0, size
        for axis in axes:
            length //= sizes[axis]
            start += coordinate[axis] * length
        boxes.append([start, start + length])
    return boxes


@pytest.fixture(scope="module")
def placed() -> tuple[Plan, list[dict[str, list[list[int]]]]]:
    """A plan on eight ranks, and what each rank holds of each parameter."""
    plan = plan_for(MESH)
    return plan, run_ranks(MESH.num_gpus, held_boxes, plan)


@pytest.mark.long
def test_named_axes_are_the_slices_that_ranks_hold(placed) -> None:
    plan, ranks = placed
    specs = specs_of(plan)
    shapes = {name: parameter.shape for name, parameter in build_model().named_parameters(remove_duplicate=False)}
    assert {str(axes) for dims in specs["parameters"].values() for axes in dims} > {"['tp', 'shard']", "['shard']"}
    for rank, held in enumerate(ranks):
        for name, boxes in held.items():
            assert boxes_of(specs, tuple(shapes[name]), name, rank) == boxes, (name, rank)


@pytest.mark.long
def test_jax_places_the_same_slices(placed) -> None:
    pytest.importorskip("jax")
    plan, ranks = placed
    shapes = {name: list(p.shape) for name, p in build_model().named_parameters(remove_duplicate=False)}
    given = json.dumps([specs_of(plan), shapes])
    done = subprocess.run([sys.executable, "-c", JAX], input=given, capture_output=True, text=True, check=True)
    for name, by_rank in json.loads(done.stdout).items():
        assert by_rank == [held[name] for held in ranks], name


def test_a_dim_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ExportError, match=r"parameter 0.weight: dim 0 of 16 does not divide by 3 ranks \(shard\)"):
        specs_of(handmade_plan(build_model(), Mesh(shard=3)))


def test_the_degrees_are_those_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("mlp")
    plan = solve_example("mlp", eager_to_shard(), gpus=2, tp=1, fsdp=2, seq_len=1, micro_batch=4)
    text = export(plan, module.build_model, module.example_inputs, loss=module.loss, to="accelerate")
    degrees = json.loads(text)
    assert degrees == {"dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 1}
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_FSDP", "true")
    assert accelerate.ParallelismConfig(**degrees).total_size == plan.mesh.num_gpus

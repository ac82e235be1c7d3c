"""Layers that FSDP shards over the shard and tp axes together: ranks compute what one process does, whatever the loop.

The plan is written by hand, so that a layer has weights of both kinds: attention sees all tokens on every tp rank, and
its gradients are whole there; norms and the MLP see a slice of them, and theirs are summands.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from one_process import TOLERANCE, assert_same, gradients, mean_over_replicas, relative_errors, whole
from plans import handmade_plan
from ranks import run_ranks
from tiny_llama import NUM_LAYERS, TinyLlama, batch, build, loss_of, my_part, sequence_parallel
from torch import Tensor, nn

import tpplan
from tpplan.apply import data_parallel
from tpplan.apply.apply import apply_plan, no_sync
from tpplan.core.errors import PlanError
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan, Precision, Recompute

UNITS = tuple(f"layers.{layer}" for layer in range(NUM_LAYERS))
MESHES = [Mesh(shard=2, tp=2), Mesh(replicate=2, shard=2, tp=2), Mesh(shard=2, tp=4)]
#: several steps of AdamW: its first steps only see a gradient's sign, and rounding decides that of a gradient near 0
STEPS_TOLERANCE = 2e-4


def over_both(model: nn.Module, mesh: Mesh, *, units: tuple[str, ...] = UNITS, **options: object) -> Plan:
    """Attention reads weights as R, on whole sequences; norms and MLPs as R*, on slices of them."""
    boundaries = {"layers.0": ({"x": "R -> S(1)"}, {}), "norm": ({}, {"output": "S(1) -> R"})}
    for unit in UNITS:
        boundaries[f"{unit}.attention"] = ({"x": "S(1) -> R"}, {"output": "R -> S(1)"})
    sliced = [name for name, _ in model.named_parameters() if "norm" in name or ".mlp." in name]
    parameters = dict.fromkeys(sliced, ("R", "R*"))
    plan = handmade_plan(model, mesh, parameters=parameters, boundaries=boundaries, units=UNITS, **options)
    return replace(plan, fsdp=replace(plan.fsdp, over_tp=units))


def applied(mesh: Mesh, seed: int = 0, *, units: tuple[str, ...] = UNITS, **options: object) -> TinyLlama:
    model = build(seed)
    apply_plan(model, over_both(model, mesh, units=units, **options))
    return model


# ---- a step


def one_backward(mesh: Mesh, units: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    reference, model = build(), applied(mesh, torch.distributed.get_rank(), units=units)
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    expected = loss_of(reference, *batch())
    expected.backward()
    loss = loss_of(model, *my_part(mesh))
    assert abs(mean_over_replicas(loss) - expected.item()) < TOLERANCE
    loss.backward()
    assert_same(gradients(model), gradients(reference))
    return {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_and_gradients_equal_one_process(mesh: Mesh) -> None:
    shapes = run_ranks(mesh.num_gpus, one_backward, mesh, UNITS)
    parts = mesh.shard * mesh.tp
    for name, parameter in build().named_parameters():
        first, *others = parameter.shape
        divisor = parts if name.startswith("layers.") else mesh.shard
        assert shapes[0][name] == (-(-first // divisor), *others)


def test_layers_over_both_axes_beside_layers_over_one() -> None:
    run_ranks(4, one_backward, MESHES[0], UNITS[1:])


# ---- loops of the user


def train(
    model: nn.Module,
    read: Callable[[int], tuple[Tensor, Tensor]],
    syncs: tuple[bool, ...],
    steps: int,
    *,
    foreach: bool,
) -> tuple[list[float], list[float]]:
    """Losses of this rank's data, and norms of gradients before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for number, syncs_now in enumerate(syncs):
            with nullcontext() if syncs_now else no_sync(model):
                loss = loss_of(model, *read(10 * step + number)) / len(syncs)
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(whole(tpplan.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, norms


def train_and_compare(
    mesh: Mesh, syncs: tuple[bool, ...], steps: int, foreach: bool, options: dict[str, object]
) -> None:
    whole_gradients = options.pop("whole_gradients", None)
    expected = train(build(), batch, (True,) * len(syncs), steps, foreach=foreach)
    model = build()
    plan = over_both(model, mesh, **options)
    apply_plan(model, replace(plan, fsdp=replace(plan.fsdp, whole_gradients=whole_gradients)))
    losses, norms = train(model, lambda step: my_part(mesh, step), syncs, steps, foreach=foreach)
    means = [mean_over_replicas(torch.tensor(loss)) for loss in losses]
    assert means == pytest.approx(expected[0], rel=STEPS_TOLERANCE)
    assert norms == pytest.approx(expected[1], rel=STEPS_TOLERANCE)


def test_twenty_steps_of_adamw_with_clipping() -> None:
    run_ranks(4, train_and_compare, MESHES[0], (True,), 20, False, {})


@pytest.mark.parametrize(
    ("mesh", "syncs", "options"),
    [
        (MESHES[0], (False, False, True), {}),
        (MESHES[1], (False, False, True), {"whole_gradients": True}),
        (MESHES[0], (True, False, True), {"reshard_after_forward": False}),
        (MESHES[0], (False, False, True), {"whole_gradients": True}),
        (MESHES[0], (True, True), {"recompute": dict.fromkeys(UNITS, Recompute.FULL)}),
    ],
    ids=["last", "whole, replicated", "kept", "whole", "recomputed"],
)
def test_accumulation_equals_one_process(mesh: Mesh, syncs: tuple[bool, ...], options: dict[str, object]) -> None:
    run_ranks(mesh.num_gpus, train_and_compare, mesh, syncs, 2, mesh is MESHES[0], options)


def penalty(model: nn.Module) -> Tensor:
    """Of all weights, read outside of any forward; alike on all ranks."""
    return 0.1 * torch.stack([whole(p.square().sum()) for p in model.parameters()]).sum()


def penalize(mesh: Mesh) -> None:
    reference, model = build(), applied(mesh)
    for each, read in ((reference, batch), (model, lambda step: my_part(mesh, step))):
        penalty(each).backward()
        (loss_of(each, *read(0)) + penalty(each)).backward()
        with no_sync(each):
            loss_of(each, *read(1)).backward()
            penalty(each).backward()
        loss_of(each, *read(2)).backward()
    assert_same(gradients(model), gradients(reference))


def step_in_backward(mesh: Mesh) -> None:
    """A hook on an accumulated gradient sees the gradient of one process."""
    reference, model = build(), applied(mesh)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for each, read in ((reference, batch), (model, lambda step: my_part(mesh, step))):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(2):
            loss_of(each, *read(number)).backward()
    found, expected = ({name: whole(p.detach()) for name, p in m.named_parameters()} for m in (model, reference))
    assert_same(found, expected)


@pytest.mark.parametrize("loop", [penalize, step_in_backward], ids=["penalties", "hooks"])
def test_penalties_on_weights_and_hooks_on_gradients(loop: Callable[[Mesh], None]) -> None:
    run_ranks(4, loop, MESHES[0])


def test_mixed_precision_casts_and_reduces_as_one_process_would() -> None:
    run_ranks(4, in_mixed_precision, MESHES[0])


def in_mixed_precision(mesh: Mesh) -> None:
    """Rounding to bfloat16 differs between the two treatments, as the order of sums does."""
    found = []
    for units in (UNITS, ()):
        model = applied(mesh, units=units, precision=Precision.BF16_MIXED)
        loss_of(model, *my_part(mesh)).backward()
        found.append(gradients(model))
    assert max(relative_errors(*found).values()) < 0.02


# ---- a fault


def not_multiplied(mesh: Mesh) -> dict[str, float]:
    """Relative errors where summands are averaged over tp without being multiplied."""

    def take_off_tp(model: nn.Module, plan: Plan, mesh_over_tp: object, slots: object) -> None:
        data_parallel_take_off(model, plan, mesh_over_tp, ())

    data_parallel_take_off = data_parallel.take_off_tp
    reference = build()
    loss_of(reference, *batch()).backward()
    with patch.object(data_parallel, "take_off_tp", take_off_tp):
        model = applied(mesh)
    loss_of(model, *my_part(mesh)).backward()
    return relative_errors(gradients(model), gradients(reference))


def test_the_comparison_sees_a_wrong_divisor() -> None:
    for errors in run_ranks(4, not_multiplied, MESHES[0]):
        assert max(errors.values()) > 1000 * TOLERANCE


# ---- checkpoints


def saved(folder: Path, units: tuple[str, ...]) -> dict[str, Tensor]:
    mesh = MESHES[0]
    model = applied(mesh, units=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, *my_part(mesh)).backward()
    optimizer.step()
    tpplan.save_checkpoint(folder / "checkpoint", model, optimizer, step=1)
    tpplan.save_safetensors(model, folder / "weights")
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def loaded(folder: Path, plan_of: Callable[[nn.Module], Plan], mesh: Mesh) -> list[dict[str, Tensor]]:
    """The weights of the checkpoint, after one more step, of the safetensors files, and as freshly drawn."""
    found = []
    for source in ("checkpoint", "weights", "drawn"):
        with torch.device("meta"):
            model = TinyLlama()
        apply_plan(model, plan_of(model))
        if source == "checkpoint":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            tpplan.load_checkpoint(folder / "checkpoint", model, optimizer)
            found.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})
            loss_of(model, *my_part(mesh, 1)).backward()
            optimizer.step()
        elif source == "weights":
            tpplan.load_safetensors(model, folder / "weights")
        else:
            tpplan.init_weights(model, TinyLlama, seed=3)
        found.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})
    return found


def test_saved_under_one_treatment_and_loaded_under_any(tmp_path: Path) -> None:
    plans: list[tuple[Mesh, Callable[[nn.Module], Plan]]] = [
        (MESHES[0], partial(over_both, mesh=MESHES[0])),
        (MESHES[0], partial(over_both, mesh=MESHES[0], units=())),
        (Mesh(tp=2), partial(sequence_parallel, mesh=Mesh(tp=2))),
    ]
    for number, units in enumerate((UNITS, ())):
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = run_ranks(4, saved, folder, units, timeout_s=120)[0]
        results = [run_ranks(mesh.num_gpus, loaded, folder, plan, mesh, timeout_s=120)[0] for mesh, plan in plans]
        for own, stepped, files, drawn in results:
            for name, weight in expected.items():
                assert torch.equal(own[name], weight)
                assert torch.equal(files[name], weight)
                assert torch.equal(drawn[name], results[0][3][name])
                torch.testing.assert_close(stepped[name], results[0][1][name], rtol=1e-3, atol=1e-4)


# ---- the plan's file


def changed(**values: object) -> Callable[[], Plan]:
    def load() -> Plan:
        model = build()
        data = over_both(model, MESHES[0]).to_dict()
        for path, value in values.items():
            *around, key = path.split("__")
            place = data
            for own in around:
                place = place[own]
            place[key] = value
        return Plan.from_dict(data)

    return load


def test_it_is_in_the_file_where_a_unit_has_it() -> None:
    model = build()
    plan = over_both(model, MESHES[0])
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["fsdp"]["over_tp"] == list(UNITS)
    assert "over_tp" not in replace(plan, fsdp=replace(plan.fsdp, over_tp=None)).dumps()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesh_degrees__shard": 1, "batch__global_batch": 1}, "several ranks on shard and on tp"),
        ({"mesh_degrees__tp": 1}, "several ranks on shard and on tp"),
        ({"fsdp__over_tp": ["<root>"]}, "is not in fsdp.units, or is the root"),
        ({"fsdp__over_tp": ["head"]}, "is not in fsdp.units, or is the root"),
    ],
    ids=["no shards", "no tp", "the root", "no unit"],
)
def test_a_plan_that_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        changed(**values)()


def test_a_weight_that_tp_cuts_is_refused() -> None:
    model = build()
    plan = sequence_parallel(model, MESHES[0])
    data = replace(plan, fsdp=replace(plan.fsdp, over_tp=UNITS)).to_dict()
    with pytest.raises(PlanError, match=r"layers.0 has layers.0.attention.q.weight, which tp places as S\(0\)"):
        Plan.from_dict(data)

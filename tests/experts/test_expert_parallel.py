"""Experts divided over real ranks: loss and every gradient of one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from moe_models import LENGTH, OwnMoe, hugging_face, loss, text
from one_process import gradients, mean_over_replicas, part, relative_errors, whole
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from profiles import synthetic_profile
from tpplan.core.mesh import Mesh
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, ProofStatus

TOLERANCE = 2e-5


MACHINE = HardwareProfile.from_dict({**synthetic_profile(), "device_type": "cpu"}, origin="synthetic")


def solved(
    build: Callable[[], nn.Module], *, gpus: int, ep: int | None, fsdp: int | None, batch: int = 8, **options: object
) -> Plan:
    defaults = {"micro_batch": 1, "precision": "fp32", "recompute": "none", "tp": gpus // fsdp if fsdp else None}
    return tpplan.solve(
        build,
        text,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=MACHINE),
        global_batch=batch,
        seq_len=LENGTH,
        loss=loss,
        ep=ep,
        fsdp=fsdp,
        all_gpus=True,
        **{**defaults, **options},
    )


def backwards(model: nn.Module, inputs: dict[str, Tensor], plan: Plan | None = None) -> Tensor:
    """The loss of a batch, after the backwards of the plan's micro-batches on this rank; of one without a plan."""
    steps = 1
    if plan is not None:
        inputs = part(inputs, plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
        steps = plan.batch.accumulation_steps
    total = torch.zeros(())
    for step in range(steps):
        micro = part(inputs, step, steps)
        value = loss(model(micro["input_ids"]), micro) / steps
        value.backward()
        total += value.detach()
    return total


def one_process(build: Callable[[], nn.Module], batch: int = 8) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build()
    return backwards(model, text(batch, LENGTH)).item(), gradients(model)


def on_ranks(build: Callable[[], nn.Module], plan: Plan, batch: int = 8) -> tuple[float, dict[str, Tensor]]:
    """A step with the plan's accumulation, on this rank."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(build(), plan)
    return mean_over_replicas(backwards(model, text(batch, LENGTH), plan)), gradients(model)


def assert_as_one_process(build: Callable[[], nn.Module], plan: Plan) -> None:
    assert plan.proof.status is ProofStatus.PROVEN
    expected_loss, expected = one_process(build)
    for found_loss, found in run_ranks(plan.mesh.num_gpus, on_ranks, build, plan, timeout_s=120):
        assert found_loss == pytest.approx(expected_loss, rel=1e-5)
        assert found.keys() == expected.keys()
        errors = relative_errors(found, expected)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize(("gpus", "ep", "fsdp"), [(2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 2, 2)])
def test_own_module_of_experts(gpus: int, ep: int, fsdp: int) -> None:
    plan = solved(OwnMoe, gpus=gpus, ep=ep, fsdp=fsdp)
    assert plan.mesh == Mesh(shard=fsdp, tp=gpus // fsdp, ep=ep)
    assert_as_one_process(OwnMoe, plan)


ARCHITECTURES = ("Qwen3Moe", "Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss", "Olmoe", "Glm4Moe", "Dots1", "Ernie4_5_Moe")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    build = hugging_face(name)
    assert_as_one_process(build, solved(build, gpus=2, ep=2, fsdp=2))


def test_experts_by_batched_products() -> None:
    pytest.importorskip("transformers")
    build = hugging_face("Qwen3Moe", "batched_mm")
    assert_as_one_process(build, solved(build, gpus=2, ep=2, fsdp=2))


def test_replicas_of_divided_experts() -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=2, tp=1)
    assert plan.mesh == Mesh(replicate=2, shard=2, ep=2)
    assert_as_one_process(OwnMoe, plan)


def test_recomputed_layers_and_accumulation() -> None:
    plan = solved(OwnMoe, gpus=2, ep=2, fsdp=2, recompute="full")
    assert plan.batch.accumulation_steps == 4
    assert plan.recomputed_modules()
    assert_as_one_process(OwnMoe, plan)


def trained(
    build: Callable[[], nn.Module], plan: Plan | None, steps: int = 20
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of AdamW steps with clipping, and the parameters after them."""
    torch.manual_seed(0)
    model = build()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs = {name: torch.randint(64, (8, LENGTH), generator=generator) for name in ("input_ids", "targets")}
        total = backwards(model, inputs, plan)
        norm = tpplan.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [mean_over_replicas(total) if plan is not None else total.item(), norm.item()]
    return found, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def test_twenty_steps_of_adamw_with_clipping() -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=4)
    expected, weights = trained(OwnMoe, None)
    for found, own in run_ranks(4, trained, OwnMoe, plan, timeout_s=120):
        assert found == pytest.approx(expected, rel=2e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-2, atol=2e-3)


def loads_of_a_forward(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(OwnMoe(), plan)
    assert tpplan.expert_load(model) == {}
    inputs = part(text(8, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    model(inputs["input_ids"])
    return tpplan.expert_load(model)


def test_the_load_of_experts_counts_every_row() -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=4, micro_batch=2)
    found = run_ranks(4, loads_of_a_forward, plan)
    torch.manual_seed(0)
    model, chosen = OwnMoe(), {}
    for name, layer in model.named_modules():
        if name.endswith("experts"):
            layer.register_forward_pre_hook(lambda _m, args, name=name: chosen.update({name: args[1]}))
    model(text(8, LENGTH)["input_ids"])
    for name, index in chosen.items():
        every = torch.bincount(index.flatten(), minlength=4)
        groups = (found[0][name], found[2][name])  # ranks 0 and 1 divide experts, and 2 and 3 do
        assert found[0][name].shape == (2, 2)
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(sum(own.flatten() for own in groups), every)

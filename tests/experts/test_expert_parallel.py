"""Experts divided over real ranks: loss and every gradient of one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from examples import machine
from moe_models import LENGTH, OwnMoe, hugging_face, loss, text
from one_process import gradients, mean_over_replicas, part, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan, ProofStatus

TOLERANCE = 2e-5


def solved(build: Callable[[], nn.Module], *, gpus: int, ep: int, fsdp: int, batch: int = 8, **options: object) -> Plan:
    defaults = {"micro_batch": 1, "precision": "fp32", "recompute": "none"}
    return tpplan.solve(
        build,
        text,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=machine()),
        global_batch=batch,
        seq_len=LENGTH,
        loss=loss,
        ep=ep,
        fsdp=fsdp,
        tp=gpus // fsdp if "replicate" not in options else None,
        all_gpus=True,
        **{**defaults, **options},
    )


def one_process(build: Callable[[], nn.Module], batch: int = 8) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), text(batch, LENGTH)
    value = loss(model(inputs["input_ids"]), inputs)
    value.backward()
    return value.item(), gradients(model)


def on_ranks(build: Callable[[], nn.Module], plan: Plan, batch: int = 8) -> tuple[float, dict[str, Tensor]]:
    """A step with the plan's accumulation, on this rank."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(build(), plan)
    inputs = part(text(batch, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    steps = plan.batch.accumulation_steps
    total = torch.zeros(())
    for step in range(steps):
        micro = part(inputs, step, steps)
        value = loss(model(micro["input_ids"]), micro) / steps
        value.backward()
        total += value.detach()
    return mean_over_replicas(total), gradients(model)


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


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_implementations(implementation: str) -> None:
    pytest.importorskip("transformers")
    build = hugging_face("Qwen3Moe", implementation)
    assert_as_one_process(build, solved(build, gpus=2, ep=2, fsdp=2))

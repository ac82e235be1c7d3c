"""Experts that no row has chosen, on some data-parallel ranks or on all: 20 steps on real ranks against one process."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard
from expert_loops import ASKING, VOCAB, Model, Way, by_counts, if_any, if_rows
from one_process import part, relative_errors, whole
from ranks import run_ranks
from torch import Tensor

import tpplan
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.verify.collective_log import differences, listed
from tpplan.verify.fake_step import fake_step

BATCH, LENGTH, STEPS = 8, 2, 20


def text(batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(way: Way, *, gpus: int, **options: Any) -> Plan:
    plan = tpplan.solve(
        partial(Model, way),
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        **{"global_batch": BATCH, "micro_batch": 2, "seq_len": LENGTH, "precision": "fp32", **options},
    )
    assert plan.proof.status is ProofStatus.PROVEN
    return plan


#: losses, names of parameters with a gradient in each step, the first step's gradients, the parameters at the end
Run = tuple[list[float], list[set[str]], dict[str, Tensor], dict[str, Tensor]]


def trained(way: Way, plan: Plan | None) -> Run:
    """A run of AdamW; its epsilon is such that noise in a gradient of zero does not become a step."""
    torch.manual_seed(0)
    model: torch.nn.Module = Model(way)
    parts, index, steps = 1, 0, 1
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        parts, index = plan.mesh.data_parallel, plan.mesh.data_rank(dist.get_rank())
        steps = plan.batch.accumulation_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, named, first = [], [], {}
    for step in range(STEPS):
        own, value = part(text(BATCH, LENGTH, step), index, parts), 0.0
        for number in range(steps):
            batch = part(own, number, steps)
            with tpplan.no_sync(model) if plan is not None and number < steps - 1 else contextlib.nullcontext():
                one = loss(model(batch["tokens"]), batch) / steps
                one.backward()
            value += one.item()
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        losses.append(value)
        named.append(set(gradients))
        first = first or gradients
        optimizer.step()
        optimizer.zero_grad()
    return losses, named, first, {name: whole(p).detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("way", "gpus", "options"),
    [
        *((way, 2, {"tp": 1, "fsdp": 2}) for way in (*ASKING, if_rows)),
        (if_any, 4, {"tp": 2, "fsdp": 2}),
        (if_rows, 4, {"tp": 2, "fsdp": 2}),
        (by_counts, 4, {"tp": 1, "fsdp": 2, "recompute": "full"}),
        (if_rows, 4, {"tp": 1, "fsdp": 2, "whole_gradients": True, "micro_batch": 1}),
        (if_any, 4, {"tp": 1, "fsdp": 1, "micro_batch": 1}),
    ],
)
def test_steps_are_those_of_one_process(way: Way, gpus: int, options: dict[str, Any]) -> None:
    plan = solved(way, gpus=gpus, **options)
    degrees = options["tp"], options["fsdp"]
    assert plan.mesh == Mesh(replicate=gpus // degrees[0] // degrees[1], shard=degrees[1], tp=degrees[0])
    assert plan.fsdp.uneven_reads
    runs = run_ranks(gpus, trained, way, plan, timeout_s=120)
    losses, named, first, end = trained(way, None)
    assert any(len(own) < len(end) for own in named), "every expert was chosen in each step"
    for found in runs:
        assert found[1] == named
        assert max(relative_errors(found[2], first).values()) < 1e-5
        assert max(relative_errors(found[3], end).values()) < 1e-3
    for step in range(STEPS):
        assert sum(found[0][step] for found in runs) / gpus == pytest.approx(losses[step], rel=1e-4)


def test_gradients_kept_whole_in_another_dtype() -> None:
    """What comes in the last micro-batch alone, or in none, is reduced with what FSDP keeps in float32."""
    plan = solved(if_rows, gpus=2, tp=1, fsdp=2, whole_gradients=True, micro_batch=1, precision="bf16-mixed")
    losses, named, first, _ = trained(if_rows, None)
    runs = run_ranks(2, trained, if_rows, plan, timeout_s=120)
    assert sum(found[0][1] for found in runs) / 2 == pytest.approx(losses[1], rel=2e-2)
    for found in runs:
        assert found[1][0] == named[0]
        large = {name for name, gradient in first.items() if gradient.abs().max() > 1e-2}
        assert large
        for name in large:
            assert (found[2][name] - first[name]).norm() < 0.1 * first[name].norm(), name


@pytest.mark.parametrize("way", [if_any, by_counts, if_rows])
def test_a_step_on_fake_tensors_is_as_planned(way: Way) -> None:
    plan = solved(way, gpus=4, tp=2, fsdp=2, seq_len=8 * LENGTH)  # each expert gets rows
    seen = fake_step(partial(Model, way), text(plan.batch.micro_batch, 8 * LENGTH), loss, plan)
    assert differences(plan, listed(plan), seen.issued) == []
    assert seen.tracked is not None
    predicted = sum(plan.predicted.memory_bytes.values())
    assert predicted == pytest.approx(seen.tracked.peak_bytes, rel=0.1)


def test_ranks_that_all_read_the_same_exchange_nothing() -> None:
    class Dense(Model):
        def __init__(self) -> None:
            super().__init__(if_any)
            for layer in self.layers:
                layer.mixture = torch.nn.Identity()

    plan = tpplan.solve(
        Dense,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        seq_len=LENGTH,
        fsdp=2,
    )
    assert plan.fsdp.uneven_reads is None

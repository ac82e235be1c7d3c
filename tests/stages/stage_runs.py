"""Models in stages, solved on a made-up machine and run on real ranks, against one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import gradients, relative_errors, whole
from ranks import run_ranks
from stage_models import (
    LENGTH,
    Vision,
    images,
    labelled,
    loss,
    own_loss,
    text,
    vision_loss,
    with_own_loss,
)
from torch import Tensor, nn

import tpplan
from profiles import synthetic_profile
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.proof_hash import why_unproven
from tpplan.search.points.options import Options

#: relative difference of gradients that rounding explains
TOLERANCE = 2e-5
MACHINE = HardwareProfile.from_dict({**synthetic_profile(), "device_type": "cpu"}, origin="synthetic")
#: the same with slow links between nodes
FAR = HardwareProfile.from_dict({**synthetic_profile(inter_bytes_per_s=1e6), "device_type": "cpu"}, origin="far")


def solved(
    build: Callable[[], nn.Module],
    *,
    stages: int,
    gpus: int,
    batch: int = 8,
    virtual: int = 1,
    prove: bool = True,
    schedule: Schedule | None = None,
    gpus_per_node: int | None = None,
    machine: HardwareProfile = MACHINE,
    **options: object,
) -> PipelinePlan:
    is_vision = build is Vision
    losses = {Vision: vision_loss, with_own_loss: None}
    own = {"loss": losses.get(build, loss), "precision": Precision.FP32, "recompute": "none", **options}
    return tpplan.solve_stages(
        build,
        images if is_vision else labelled if build is with_own_loss else text,
        stages=stages,
        virtual_stages=virtual,
        schedule=schedule or (Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B),
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus_per_node or gpus, profile=machine),
        global_batch=batch,
        seq_len=1 if is_vision else LENGTH,
        micro_batch=1,
        options=Options(**own),  # type: ignore[arg-type]
        prove=prove,
    )


def given(build: Callable[[], nn.Module], batch: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if build is Vision:
        return images(batch)
    return labelled(batch, LENGTH) if build is with_own_loss else text(batch, LENGTH)


def loss_of(build: Callable[[], nn.Module]) -> Callable[[object, dict[str, Tensor]], Tensor]:
    return {Vision: vision_loss, with_own_loss: own_loss}.get(build, loss)  # type: ignore[call-overload]


def one_process(build: Callable[[], nn.Module]) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), given(build)
    value = loss_of(build)(model(**tpplan.forward_inputs(model, inputs)), inputs)
    value.backward()
    return value.item(), gradients(model)


def on_ranks(build: Callable[[], nn.Module], plan: PipelinePlan) -> tuple[float, float, dict[str, Tensor]]:
    """(loss of a step, loss without a backward, gradients of this rank's stage)."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(build(), plan)
    share = plan.batch_for(dist.get_rank())
    value = model.step(share.micro_batches(given(build)), loss_of(build))  # type: ignore[operator]
    again = model.evaluate(share.micro_batches(given(build)), loss_of(build))  # type: ignore[operator]
    return value.item(), again.item(), gradients(model)


def assert_as_one_process(build: Callable[[], nn.Module], plan: PipelinePlan) -> None:
    assert not any(map(why_unproven, plan.stages))
    expected_loss, expected = run_ranks(1, one_process, build)[0]
    results = run_ranks(plan.num_gpus, on_ranks, build, plan, timeout_s=120)
    losses = {found[0] for found in results}
    assert sum(found[0] for found in results) / len(results) == pytest.approx(expected_loss, rel=1e-5)
    assert sum(found[1] for found in results) / len(results) == pytest.approx(expected_loss, rel=1e-5)
    assert len(losses) <= plan.stages[0].mesh.data_parallel  # every stage is told the loss of its replica
    everything: dict[str, Tensor] = {}
    for number, (_, _, found) in enumerate(results):
        if number % plan.ranks_per_stage == 0:
            assert not everything.keys() & found.keys()
        everything |= found
    assert everything.keys() == expected.keys()
    errors = relative_errors(everything, expected)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"


def saved(build: Callable[[], nn.Module], plan: PipelinePlan, folder: Path) -> dict[str, Tensor]:
    """Saves a checkpoint and weights after a step; what this rank's stages then hold."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(given(build)), loss)  # type: ignore[operator]
    optimizer.step()
    tpplan.save_checkpoint(folder / "checkpoint", model, optimizer, step=1)
    tpplan.save_safetensors(model, folder / "weights")
    return held(model, optimizer)


def loaded(
    build: Callable[[], nn.Module], plan: PipelinePlan | Plan, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the checkpoint gives, and the parameters that the files of weights give."""
    torch.manual_seed(5)
    model = tpplan.apply_plan(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tpplan.load_checkpoint(folder / "checkpoint", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    found = held(model, optimizer)
    tpplan.init_weights(model, build, seed=3)
    tpplan.load_safetensors(model, folder / "weights")
    return found, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, and the optimizer's first moments of them."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter.detach()).clone()
        found[f"moment of {name}"] = whole(optimizer.state[parameter]["exp_avg"]).clone()
    return found


def assert_loads(
    build: Callable[[], nn.Module], plan: PipelinePlan, others: Sequence[PipelinePlan | Plan], folder: Path
) -> None:
    """What is saved under one plan is what every other one loads."""
    expected: dict[str, Tensor] = {}
    for own in run_ranks(plan.num_gpus, saved, build, plan, folder, timeout_s=120):
        assert all(torch.equal(expected[name], own[name]) for name in expected.keys() & own.keys())
        expected |= own
    for other in others:
        ranks = other.num_gpus if isinstance(other, PipelinePlan) else other.mesh.num_gpus
        found: dict[str, Tensor] = {}
        for own, files in run_ranks(ranks, loaded, build, other, folder, timeout_s=120):
            found |= own
            assert all(torch.equal(value, expected[name]) for name, value in files.items())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def in_one_stage(build: Callable[[], nn.Module]) -> Plan:
    """A plan of the whole model on one rank."""
    machine = tpplan.Cluster(gpus=1, profile=MACHINE)
    return tpplan.solve(build, text, cluster=machine, global_batch=8, seq_len=LENGTH, loss=loss)


def trained(build: Callable[[], nn.Module], plan: PipelinePlan | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, over all ranks, and norms of 20 AdamW steps with clipping, and the parameters after them."""
    torch.manual_seed(0)
    model = build()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(20):
        torch.manual_seed(step)
        inputs = text(8, LENGTH)
        if plan is not None:
            value = model.step(plan.batch_for(dist.get_rank()).micro_batches(inputs), loss)  # type: ignore[operator]
            dist.all_reduce(value, dist.ReduceOp.AVG)
        else:
            value = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
            value.backward()
        norm = tpplan.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [value.item(), norm.item()]
    return seen, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def assert_trains(build: Callable[[], nn.Module], plan: PipelinePlan) -> None:
    """20 AdamW steps as one process."""
    expected, parameters = run_ranks(1, trained, build, None)[0]
    found: dict[str, Tensor] = {}
    for seen, own in run_ranks(plan.num_gpus, trained, build, plan, timeout_s=120):
        assert seen == pytest.approx(expected, rel=1e-3)
        found |= own
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.allclose(found[name], value, atol=2e-3), name


def assert_solved_as_one_process(build: Callable[[], nn.Module], **how: Any) -> None:
    """A proven plan, whose ranks together compute the losses and the gradients of one process."""
    plan = solved(build, **how)
    assert not any(map(why_unproven, plan.stages))
    value, expected = run_ranks(1, one_process, build)[0]
    held: set[str] = set()
    for stepped, evaluated, found in run_ranks(plan.num_gpus, on_ranks, build, plan, timeout_s=120):
        assert (stepped, evaluated) == pytest.approx((value, value), rel=1e-5)
        held |= found.keys()
        errors = relative_errors(found, {name: expected[name] for name in found})
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"
    assert held == expected.keys()

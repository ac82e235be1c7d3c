"""Checkpoints and weights of divided experts: saved under one division, loaded under any."""

from pathlib import Path

import torch
import torch.distributed as dist
from moe_models import LENGTH, OwnMoe, loss, text
from one_process import part, whole
from ranks import run_ranks
from test_expert_parallel import solved
from torch import Tensor, nn

import tpplan
from tpplan.plan.plan import Plan

Weights = dict[str, Tensor]


def plans() -> list[Plan]:
    """Four ranks: experts on two, on four, on all, and on two beside tensor parallelism."""
    return [solved(OwnMoe, gpus=4, ep=ep, fsdp=fsdp, micro_batch=2) for ep, fsdp in ((2, 4), (4, 4), (1, 4), (2, 2))]


def weights(model: nn.Module) -> Weights:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    inputs = part(text(8, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    for index in range(plan.batch.accumulation_steps):
        micro = part(inputs, index, plan.batch.accumulation_steps)
        (loss(model(micro["input_ids"]), micro) / plan.batch.accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(plan: Plan, folder: Path) -> Weights:
    torch.manual_seed(0)
    model = tpplan.apply_plan(OwnMoe(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, plan)
    tpplan.save_checkpoint(folder / "checkpoint", model, optimizer, step=1)
    tpplan.save_safetensors(model, folder / "weights")
    return weights(model)


def loaded(plan: Plan, folder: Path) -> tuple[Weights, Weights, Weights, Weights]:
    """The weights of the checkpoint, after one more step, of the safetensors files, and as freshly drawn."""
    found = []
    for source in ("checkpoint", "weights", "drawn"):
        with torch.device("meta"):
            model = OwnMoe()
        model = tpplan.apply_plan(model, plan)
        if source == "checkpoint":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            tpplan.load_checkpoint(folder / "checkpoint", model, optimizer)
            found.append(weights(model))
            step(model, optimizer, plan)
        elif source == "weights":
            tpplan.load_safetensors(model, folder / "weights")
        else:
            tpplan.init_weights(model, OwnMoe, seed=3)
        found.append(weights(model))
    return found[0], found[1], found[2], found[3]


def test_saved_under_one_division_and_loaded_under_any(tmp_path: Path) -> None:
    every = plans()
    expected = run_ranks(4, saved, every[0], tmp_path, timeout_s=120)[0]
    results = [run_ranks(4, loaded, plan, tmp_path, timeout_s=120) for plan in every]
    _, after, _, drawn = results[0][0]
    for ranks in results:
        for own, stepped, files, fresh in ranks:
            for name, weight in expected.items():
                assert torch.equal(own[name], weight)
                assert torch.equal(files[name], weight)
                assert torch.equal(fresh[name], drawn[name])
                torch.testing.assert_close(stepped[name], after[name], rtol=1e-3, atol=1e-4)

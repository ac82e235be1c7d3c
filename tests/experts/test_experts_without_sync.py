"""Divided experts whose gradients are kept whole between micro-batches, and reduced once a step, on real ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from moe_models import LENGTH, OwnMoe, text
from one_process import gradients, relative_errors
from ranks import run_ranks
from test_expert_parallel import TOLERANCE, loss, one_process, part, solved
from torch import Tensor

import tpplan
from tpplan.plan.plan import Plan


def step_without_sync(plan: Plan) -> dict[str, Tensor]:
    """This rank's gradients of a step that reduces in its last micro-batch alone."""
    torch.manual_seed(0)
    model, steps = tpplan.apply_plan(OwnMoe(), plan), plan.batch.accumulation_steps
    inputs = part(text(8, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    for step in range(steps):
        micro = part(inputs, step, steps)
        with contextlib.nullcontext() if step == steps - 1 else tpplan.no_sync(model):
            (loss(model(micro["input_ids"]), micro) / steps).backward()
    return gradients(model)


@pytest.mark.parametrize("fsdp", [4, 2], ids=["ep x fsdp", "ep x tp"])
def test_gradients_that_are_reduced_once_a_step_are_those_of_one_process(fsdp: int) -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=fsdp, whole_gradients=True)
    assert plan.fsdp.whole_gradients
    assert plan.batch.accumulation_steps > 1
    expected = one_process(OwnMoe)[1]
    for found in run_ranks(4, step_without_sync, plan, timeout_s=120):
        assert found.keys() == expected.keys()
        assert max(relative_errors(found, expected).values()) < TOLERANCE

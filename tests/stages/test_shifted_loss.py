"""The loss of the next token, over logits of which each tensor-parallel rank of the last stage has some classes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import gradients, relative_errors
from ranks import run_ranks
from stage_models import LENGTH, Stack, text
from stage_runs import solved
from torch import Tensor

import tpplan
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.proof_hash import why_unproven


def shifted(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs[:, :-1], inputs["targets"][:, 1:])


def stepped(plan: PipelinePlan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Stack()
    torch.manual_seed(1)
    inputs = text(8, LENGTH)
    if plan is None:
        value = shifted(model(inputs["tokens"]), inputs)
        value.backward()
        return value.item(), gradients(model)
    model = tpplan.apply_plan(model, plan)
    share = plan.batch_for(dist.get_rank())
    return model.step(share.micro_batches(inputs), shifted).item(), gradients(model)  # type: ignore[operator]


def test_stages_and_tensor_parallel_ranks_equal_one_process() -> None:
    plan = solved(Stack, stages=2, gpus=4, tp=2, loss=shifted, pins={"head": "column"})
    assert not any(map(why_unproven, plan.stages))
    expected, reference = run_ranks(1, stepped, None)[0]
    for value, found in run_ranks(4, stepped, plan, timeout_s=120):
        assert value == pytest.approx(expected, rel=1e-5)
        assert max(relative_errors(found, {name: reference[name] for name in found}).values()) < 1e-4

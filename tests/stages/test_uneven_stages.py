"""Experts that no row of a rank has chosen, in a pipeline's stages: steps on real ranks against one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from expert_loops import Model, Way, if_any, if_rows
from one_process import relative_errors, whole
from ranks import run_ranks
from stage_runs import MACHINE
from test_uneven_reads import LENGTH, loss, text
from torch import Tensor

import tpplan
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Precision
from tpplan.search.points.options import Options

BATCH, STEPS = 8, 8


def trained(way: Way, plan: PipelinePlan | None) -> tuple[list[float], list[set[str]], dict[str, Tensor]]:
    """Losses, names of this rank's parameters with a gradient in each step, and its parameters at the end."""
    torch.manual_seed(0)
    model = Model(way) if plan is None else tpplan.apply_plan(Model(way), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, named = [], []
    for step in range(STEPS):
        inputs = text(BATCH, LENGTH, step)
        if plan is None:
            value = loss(model(inputs["tokens"]), inputs)
            value.backward()
        else:
            value = model.step(plan.batch_for(dist.get_rank()).micro_batches(inputs), loss)  # type: ignore[operator]
            dist.all_reduce(value, dist.ReduceOp.AVG)
        losses.append(value.item())
        named.append({name for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, named, {name: whole(p).detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", [if_any, if_rows])
def test_steps_are_those_of_one_process(way: Way) -> None:
    plan = tpplan.solve_stages(
        partial(Model, way),
        text,
        stages=2,
        cluster=tpplan.Cluster(gpus=4, gpus_per_node=4, profile=MACHINE),
        global_batch=BATCH,
        seq_len=LENGTH,
        micro_batch=1,
        options=Options(loss=loss, precision=Precision.FP32, recompute="none", tp=1),
    )
    assert all(stage.fsdp.uneven_reads for stage in plan.stages)
    losses, named, end = trained(way, None)
    assert any(len(own) < len(end) for own in named), "every expert was chosen in each step"
    for found in run_ranks(4, trained, way, plan, timeout_s=120):
        own = found[2].keys()
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == [names & own for names in named]
        assert max(relative_errors(found[2], {name: end[name] for name in own}).values()) < 1e-4

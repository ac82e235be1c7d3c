"""Experts divided over the ranks of a stage: losses, gradients, training, memory and checkpoints on real ranks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import Layer, OwnMoe
from moe_models import hugging_face as moe
from ranks import run_ranks
from stage_models import LENGTH, loss
from stage_runs import assert_as_one_process, assert_loads, assert_trains, given, solved
from test_expert_parallel import solved as of_experts
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import PlanError, UsageError
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.search.pipelines.rank_memory import num_bytes
from tpplan.torch_internals.parallel import StagesTracker

WIDTH = 16
Moe = partial(OwnMoe, layers=4)


class Dense(nn.Module):
    """A layer without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class DenseFirst(OwnMoe):
    """A language model whose first layers have no experts, as DeepSeek's."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        for index in range(3):
            self.layers[index] = Dense()


class Turns(Layer):
    """A layer whose tokens take the experts in turn, so that each gets as many rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight = self.router(rows).softmax(-1)[:, :2]
        index = torch.arange(2 * rows.shape[0], device=x.device).view(-1, 2) % self.experts.experts
        return x + self.experts(rows, index, weight).view_as(x)


class Even(OwnMoe):
    """A language model whose experts all get as many rows."""

    def __init__(self) -> None:
        super().__init__(dim=WIDTH)
        self.layers = nn.ModuleList(Turns(4, WIDTH) for _ in range(4))


@pytest.mark.parametrize(
    ("stages", "gpus", "options"),
    [
        (2, 4, {"tp": 1, "ep": 2}),
        (2, 8, {"tp": 2, "ep": 2, "recompute": "full"}),
        (2, 8, {"tp": 1, "ep": 2, "fsdp": 4, "virtual": 2, "whole_gradients": True, "recompute": "selective"}),
        (2, 8, {"tp": 1, "ep": 2, "fsdp": 2}),
    ],
)
def test_own_model(stages: int, gpus: int, options: dict[str, Any]) -> None:
    plan = solved(Moe, stages=stages, gpus=gpus, **options)
    assert {own.mesh.ep for own in plan.stages} == {plan.ep} == {2}
    assert all(own.experts is not None and own.experts.ep == 2 for own in plan.stages)
    assert_as_one_process(Moe, plan)


@pytest.mark.parametrize("name", ["Qwen3Moe", pytest.param("DeepseekV3", marks=pytest.mark.long)])
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    build = moe(name)
    assert_as_one_process(build, solved(build, stages=2, gpus=4, tp=1, ep=2))


def test_a_stage_without_experts() -> None:
    """Its ranks are those of the others, and divide none."""
    plan = solved(DenseFirst, stages=2, gpus=4, tp=1, ep=2, batch=8)
    assert [own.mesh.ep for own in plan.stages] == [1, 2]
    assert_as_one_process(DenseFirst, plan)


def test_the_asked_number_of_ranks_must_divide_those_of_a_stage() -> None:
    with pytest.raises(UsageError, match="--pp 2 --ep 4: 2 GPUs a stage have no tp degree that leaves a multiple of 4"):
        solved(Moe, stages=2, gpus=4, ep=4)
    with pytest.raises(UsageError, match=r"--ep 3: module layers\.0\.experts: 4 experts do not divide among 3 ranks"):
        solved(Moe, stages=2, gpus=6, ep=3, tp=1, batch=6)


def test_stages_whose_experts_lie_otherwise_are_no_plan() -> None:
    plan = solved(Moe, stages=2, gpus=8, tp=1, ep=2, fsdp=4)
    other = solved(Moe, stages=2, gpus=8, tp=1, ep=4, fsdp=4)
    mixed = replace(plan, stages=(plan.stages[0], other.stages[1]))
    with pytest.raises(PlanError, match="experts over 2 ranks, in another stage 4"):
        PipelinePlan.from_dict(json.loads(mixed.dumps()))


@pytest.mark.parametrize(("virtual", "tp"), [(1, 2), (2, 1)])
def test_twenty_steps(virtual: int, tp: int) -> None:
    assert_trains(Moe, solved(Moe, stages=2, gpus=4 * tp, tp=tp, ep=2, virtual=virtual))


def peak(plan: PipelinePlan) -> float:
    """The most bytes that a rank holds in its second step."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Even(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(given(Even)))
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(micro_batches, loss)  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    tracker = StagesTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        model.step(micro_batches, loss)  # type: ignore[operator]
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize("options", [{}, {"virtual": 2}, {"whole_gradients": True}, {"tp": 2}], ids=str)
def test_ranks_hold_what_the_plan_counts(options: dict[str, Any]) -> None:
    plan = solved(Even, stages=2, gpus=4 * options.get("tp", 1), **{"tp": 1, "ep": 2, **options}, prove=False)
    for rank, found in enumerate(run_ranks(plan.num_gpus, peak, plan, timeout_s=120)):
        plans = plan.stages_of(rank)
        predicted = max(own.predicted.peak_memory_bytes for own in plans)
        # Gloo does not say that a send has arrived before it is waited for.
        stages = [one.stage for one in plans if one.stage is not None]
        crossing = sum(num_bytes((*stage.receives, *stage.sends), plan.stages[0].mesh.tp) for stage in stages)
        assert 0.97 * predicted < found < 1.04 * predicted + plan.batch.accumulation_steps * crossing


def test_checkpoints_load_under_other_stages_and_divisions(tmp_path: Path) -> None:
    plan = solved(Moe, stages=2, gpus=4, tp=1, ep=2, virtual=2)
    others = (
        solved(Moe, stages=2, gpus=4, tp=1, ep=1),
        solved(Moe, stages=2, gpus=8, tp=2, ep=2),
        of_experts(Moe, gpus=4, ep=4, fsdp=4),
    )
    assert_loads(Moe, plan, others, tmp_path)


def loads(plan: PipelinePlan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(Even(), plan)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(given(Even)), loss)  # type: ignore[operator]
    return tpplan.expert_load(model)


def test_rows_of_experts_are_counted() -> None:
    """Each rank tells those of its own stages."""
    plan = solved(Even, stages=2, gpus=4, tp=1, ep=2)
    for rank, found in enumerate(run_ranks(4, loads, plan, timeout_s=120)):
        layers = (0, 1) if rank < 2 else (2, 3)
        assert found.keys() == {f"layers.{layer}.experts" for layer in layers}
        assert all(set(rows.flatten().tolist()) == {2 * LENGTH * 2 // 4} for rows in found.values())

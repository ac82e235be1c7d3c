"""Notes on code that is given rows or gradients of a part of the batch: named where it is, and absent elsewhere."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import NAMES, eager_to_shard, machine, solve_example
from torch import Tensor, nn

import tpplan
from tpplan.apply.model_match import check_model
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.plan.plan import MeshPlan, Plan

ROWS, LENGTH, DIM, HIDDEN = 8, 4, 8, 32


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-4, 1e-4)


class Model(nn.Module):
    """Two layers, between which code may do something with rows or gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.gelu(self.up(x)))).square().mean()


class OwnBackward(Model):
    def between(self, h: Tensor) -> Tensor:
        return Clipped.apply(h)  # type: ignore[no-any-return, no-untyped-call]


class HookOnActivation(Model):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient / gradient.norm())
        return h


class HookOfModule(Model):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_hook(lambda _module, given, _taken: (given[0] / given[0].norm(),))


class Statistics(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


class Average(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(HIDDEN))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean((0, 1)), 0.1)
        return h - self.mean


class Contrasts(Model):
    """A loss that tells each row from all the others."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.up(x).mean(1), self.up(x.square()).mean(1)
        pairs = F.linear(one, other)
        return F.cross_entropy(pairs, torch.arange(len(x), device=x.device)) + self.down(one).square().mean()


class HookOfWeight(Model):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient / gradient.norm())


def batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, DIM)}


def solve(build: Callable[[], nn.Module], **options: object) -> Plan:
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    given = {"global_batch": ROWS, "micro_batch": ROWS // 2, "seq_len": LENGTH, "precision": "fp32", "tp": 1, "fsdp": 2}
    return tpplan.solve(build, batch, cluster=cluster, all_gpus=True, **{**given, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (OwnBackward, r"code of the model in backward \(test_rank_notes.py:\d+: return Clipped"),
        (HookOnActivation, r"code of the model in backward \(test_rank_notes.py:\d+: h.register_hook"),
        (HookOfModule, r"code of the model in backward \(hook of down\)"),
        (
            Contrasts,
            r"rows are paired with each other \(test_rank_notes.py:\d+: pairs = .*: each with those of one",
        ),
    ],
)
def test_what_is_given_a_part_of_the_batch_is_named(build: type[nn.Module], code: str) -> None:
    (note,) = solve(build).notes or ()
    assert re.match(code, note), note
    assert not solve(build, tp=2, fsdp=1, micro_batch=ROWS).notes


def test_norms_over_rows_and_their_statistics_are_named() -> None:
    kept, taken = solve(Statistics).notes or ()
    assert kept.startswith("running statistics (norm) are of each rank's own rows: training does not read them")
    assert taken == "norms over rows (norm) take mean and variance of the rows of one of 2 data-parallel ranks"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "one of 2 data-parallel ranks"),
        ({"micro_batch": ROWS // 4}, "one micro-batch of one of 2 data-parallel ranks"),
        ({"tp": 2, "fsdp": 1}, "one of 2 micro-batches"),
    ],
)
def test_the_part_of_the_batch_is_said(options: dict[str, object], part: str) -> None:
    (note,) = solve(OwnBackward, **options).notes or ()
    assert f"is given the gradient of {part}:" in note


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Average, "buffers that the forward writes to (mean) are updated 2 times a step, from one micro-batch each"),
        (
            HookOfWeight,
            "code of the model in backward (hook of up.weight) is given the gradient of one of 2 micro-batch",
        ),
    ],
)
def test_what_data_parallel_ranks_may_not_do_is_told_of_micro_batches(build: type[nn.Module], text: str) -> None:
    (note,) = solve(build, tp=2, fsdp=1).notes or ()
    assert text in note


def test_a_hook_on_a_weights_gradient_is_refused_on_data_parallel_ranks() -> None:
    with pytest.raises(UsageError, match=r"parameter up.weight has a hook on its gradient .*on 2 data-parallel ranks"):
        solve(HookOfWeight)
    assert solve(HookOfWeight, tp=None, fsdp=None).mesh.data_parallel == 1


def test_a_plan_for_data_parallel_ranks_does_not_take_a_model_with_such_a_hook() -> None:
    plan = replace(solve(HookOfWeight, tp=2, fsdp=1), mesh_degrees=MeshPlan(replicate=2, shard=1, tp=2))
    with pytest.raises(PlanMismatchError, match=r"up.weight has a hook on its gradient .*each rank's own gradient"):
        check_model(HookOfWeight(), plan)


@pytest.mark.parametrize("name", NAMES)
def test_plain_models_have_no_such_note(name: str) -> None:
    plan = solve_example(name, machine(), gpus=2, tp=1, micro_batch=2)
    assert plan.mesh.data_parallel * plan.batch.accumulation_steps > 1
    assert not plan.notes

"""Weights' gradients that are deferred: which they are, steps of zero-bubble schedules against one process, and when
such a schedule is chosen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from stage_models import (
    LENGTH,
    WIDTH,
    Checkpointed,
    Deep,
    Stack,
    Tied,
    Vision,
    hugging_face,
    loss,
    text,
)
from stage_runs import FAR, MACHINE, assert_as_one_process, assert_trains, given, solved
from torch import Tensor, nn

import tpplan
from tpplan.apply.modules.deferred_gradients import Deferral
from tpplan.core.errors import PlanError, UsageError
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Precision
from tpplan.plan.sections.ranks import NOTHING_DEFERRED
from tpplan.search.pipelines.solve_stages import UNDEFERRED
from tpplan.search.points.options import Options

ZERO_BUBBLE = Schedule.ZERO_BUBBLE


# ---- what is deferred


class Reads(nn.Module):
    """Products with a weight, with a part of one, with one that is computed, and with what is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)
        self.part, self.computed = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.first(x)).relu())
        x = F.linear(x, self.part[1])
        x = F.linear(x, self.computed * self.computed.sigmoid())
        x = self.frozen(x) * self.part[0].sum()
        return F.linear(x, x[:8])


def test_weight_gradients_of_linear_layers_alone_are_deferred() -> None:
    torch.manual_seed(0)
    model, x = Reads(), torch.randn(16, 8, requires_grad=True)
    model(x).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    of_x, x.grad = x.grad, None
    model.zero_grad()
    deferral = Deferral()
    with deferral.deferring():
        deferral.begin("one")
        model(x).square().sum().backward()
        before = {name for name, p in model.named_parameters() if p.grad is not None}
        assert x.grad is not None
        assert of_x is not None
        assert torch.allclose(x.grad, of_x, rtol=1e-4)
        assert len(deferral.products["one"]) == 4  # first, twice, and part[1]
        parameters = list(deferral.parameters("one"))
        assert [id(own) for own in deferral.weight_gradients("one")] == list(map(id, parameters))
    assert parameters[0] is model.part
    assert before == {"first.bias", "twice.bias", "part", "computed"}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max())), name


def test_nothing_is_deferred_without_gradients_outside_and_in_functions_of_torch() -> None:
    layer, x, deferral = nn.Linear(4, 4), torch.randn(3, 4), Deferral()
    with deferral.deferring():
        layer(x.requires_grad_()).sum().backward()  # nobody asked for it
        deferral.begin("one")
        layer(x.detach()).sum().backward()  # no backward goes on from x
        with torch.no_grad():
            layer(x)
        torch.vmap(lambda row: F.linear(row, layer.weight))(x).sum().backward()
        assert not deferral.products
    layer(x).sum().backward()
    assert not deferral.products


def test_hooks_on_a_weight_see_its_whole_gradient() -> None:
    """A weight that is read twice has one gradient in a backward, which a hook may change."""
    layer, x, deferral = nn.Linear(4, 4, bias=False), torch.randn(3, 4, requires_grad=True), Deferral()
    layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[no-untyped-call]
    layer(layer(x)).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    deferral.begin("one")
    with deferral.deferring():
        layer(layer(x)).sum().backward()
        list(deferral.weight_gradients("one"))
    assert wanted is not None
    assert torch.equal(layer.weight.grad, wanted)


def test_gradients_that_nobody_computes_are_told() -> None:
    deferral = Deferral()
    deferral.begin("one")
    with pytest.raises(AssertionError, match="never computed"), deferral.deferring():
        nn.Linear(4, 4)(torch.randn(3, 4, requires_grad=True)).sum().backward()
    with deferral.deferring():  # the next step begins without them
        pass


# ---- steps against one process


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "gpus": 2},
        {"stages": 4, "gpus": 4},
        {"stages": 2, "gpus": 2, "virtual": 2},
        {"stages": 2, "gpus": 4, "tp": 2, "machine": FAR, "gpus_per_node": 2},
        {"stages": 2, "gpus": 4, "tp": 1, "fsdp": 2},
        {"stages": 2, "gpus": 4, "tp": 1, "fsdp": 2, "virtual": 2, "recompute": "full"},
        {"stages": 2, "gpus": 4, "tp": 1, "fsdp": 1},
        {"stages": 2, "gpus": 8, "tp": 1, "fsdp": 2, "recompute": "selective"},
        {"stages": 2, "gpus": 4, "tp": 2, "pins": {"layers.*.up": "on slices"}},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items() if name != "machine"),
)
def test_step_is_that_of_one_process(options: dict[str, Any]) -> None:
    plan = solved(Stack, schedule=ZERO_BUBBLE, **options)
    assert plan.schedule is ZERO_BUBBLE
    assert_as_one_process(Stack, plan)


@pytest.mark.parametrize("build", [Vision, Checkpointed])
def test_models(build: Callable[[], nn.Module]) -> None:
    assert_as_one_process(build, solved(build, stages=2, gpus=2, schedule=ZERO_BUBBLE))


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX"])
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    build = hugging_face(name)
    assert_as_one_process(build, solved(build, stages=2, gpus=2, schedule=ZERO_BUBBLE))


def test_twenty_steps_with_a_tied_head() -> None:
    assert_trains(Tied, solved(Tied, stages=2, gpus=4, tp=1, fsdp=2, schedule=ZERO_BUBBLE))


def in_bf16(plan: PipelinePlan) -> dict[str, Tensor]:
    """Gradients of a step, and whether those that are kept whole are in float32."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Stack(), plan)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)), loss)  # type: ignore[operator]
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def test_mixed_precision_adds_up_in_float32() -> None:
    """Gradients are those of 1F1B to the last bit: of each micro-batch in bfloat16, added up in float32."""
    mesh = {"stages": 2, "gpus": 4, "tp": 1, "fsdp": 2, "precision": Precision.BF16_MIXED, "whole_gradients": True}
    plans = [solved(Stack, schedule=own, **mesh) for own in (None, ZERO_BUBBLE)]  # type: ignore[arg-type]
    for expected, found in zip(*(run_ranks(4, in_bf16, plan, timeout_s=120) for plan in plans), strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.allclose(gradient, expected[name], rtol=1e-3, atol=1e-3 * float(expected[name].abs().max()))


# ---- plans


def test_it_is_chosen_where_waiting_costs_more_than_memory_allows() -> None:
    """Without a schedule asked for, the plan is the faster of the two; both say what they take."""
    asked = {
        "stages": 4,
        "cluster": tpplan.Cluster(gpus=4, gpus_per_node=4, profile=MACHINE),
        "global_batch": 4,
        "seq_len": LENGTH,
        "micro_batch": 1,
        "options": Options(loss=loss, precision=Precision.FP32, recompute="none"),
        "prove": False,
    }
    plans = {own: tpplan.solve_stages(Deep, text, schedule=own, **asked) for own in (None, *PLAIN)}  # type: ignore[arg-type]
    seconds = {own: plan.predicted.step_time_s for own, plan in plans.items()}
    assert seconds[ZERO_BUBBLE] < seconds[Schedule.ONE_F_ONE_B]
    assert plans[None].schedule is ZERO_BUBBLE
    assert seconds[None] == pytest.approx(seconds[ZERO_BUBBLE])
    assert UNDEFERRED not in (plans[None].solver.unsearched or ())
    compiled = tpplan.solve_stages(Deep, text, **{**asked, "options": replace(asked["options"], compile=True)})  # type: ignore[arg-type, type-var]
    assert compiled.schedule is Schedule.ONE_F_ONE_B
    assert UNDEFERRED in (compiled.solver.unsearched or ())
    bubbles = [plans[own].predicted.bubble_s for own in PLAIN]
    assert bubbles[1] < 0.8 * bubbles[0]


PLAIN = (Schedule.ONE_F_ONE_B, ZERO_BUBBLE)


def test_deferred_products_are_as_many_bytes_as_are_kept() -> None:
    plan = solved(Stack, stages=2, gpus=2, schedule=ZERO_BUBBLE)
    tokens, size = LENGTH, 4
    layer = size * tokens * WIDTH * (1 + 3 + 2 + 1 + 4 + 4 + 1)  # x and dy of q, k, v; of o; of up; of down
    (first, last) = (own.stage for own in plan.stages)
    assert first is not None
    assert last is not None
    assert first.deferred == NOTHING_DEFERRED  # for its backward no other stage waits
    assert last.deferred.kept_bytes == 2 * layer + size * tokens * (WIDTH + 64)
    assert last.deferred.largest_bytes == size * 4 * WIDTH * WIDTH


def test_plans_and_options_that_cannot_defer_are_refused() -> None:
    plan = solved(Stack, stages=2, gpus=4, tp=1, fsdp=2, schedule=ZERO_BUBBLE, prove=False)
    stages = [replace(own, fsdp=replace(own.fsdp, whole_gradients=None)) for own in plan.stages]
    with pytest.raises(PlanError, match=r"stages\[0\].fsdp.whole_gradients: expected true"):
        replace(plan, stages=tuple(stages)).check("plan.json")
    with pytest.raises(UsageError, match="--schedule zero-bubble with --compile"):
        solved(Stack, stages=2, gpus=2, schedule=ZERO_BUBBLE, compile=True)
    with pytest.raises(UsageError, match="--schedule interleaved with --virtual-stages 1"):
        solved(Stack, stages=2, gpus=2, schedule=Schedule.INTERLEAVED)

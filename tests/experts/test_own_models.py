"""What models do with divided experts beside one plain call a layer: on real ranks, or refused."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from moe_models import LENGTH, Layer, OwnMoe, loss, text
from one_process import gradients, mean_over_replicas, part, relative_errors
from ranks import run_ranks
from test_expert_parallel import MACHINE, TOLERANCE, assert_as_one_process, one_process, solved
from torch import Tensor, nn

import tpplan
from tpplan.anatomy.anatomy import anatomy
from tpplan.core.errors import UsageError
from tpplan.plan.plan import Plan, Recompute


class TwiceLayer(Layer):
    """Routes the results to experts again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class CalledTwice(OwnMoe):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwiceLayer(4, 16) for _ in range(2))


class Tied(OwnMoe):
    """Two layers with one module of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].experts = self.layers[0].experts


class TiedWeights(OwnMoe):
    """Two modules of experts with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].experts.up = self.layers[0].experts.up


@pytest.mark.parametrize("build", [CalledTwice, Tied, TiedWeights])
def test_experts_that_are_called_twice_or_shared_are_not_divided(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(UsageError, match="no module is called as experts are"):
        solved(build, gpus=2, ep=2, fsdp=2)


def test_experts_that_are_called_twice_stay_whole() -> None:
    plan = solved(CalledTwice, gpus=2, ep=None, fsdp=2)
    assert plan.experts is None
    assert_as_one_process(CalledTwice, plan)


@pytest.mark.parametrize("build", [Tied, TiedWeights])
def test_experts_of_several_layers_are_gathered_by_themselves_or_with_the_root(build: Callable[[], nn.Module]) -> None:
    plan = solved(build, gpus=2, ep=None, fsdp=2)
    assert plan.experts is None
    assert not {"layers.0", "layers.1"} & set(plan.fsdp_units())
    assert_as_one_process(build, plan)


class BesideOthers(OwnMoe):
    """One module of experts is called twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = TwiceLayer(4, 16)


def test_experts_called_once_are_divided_beside_others() -> None:
    plan = solved(BesideOthers, gpus=2, ep=2, fsdp=2)
    assert set(plan.expert_calls()) == {"layers.1.experts"}
    assert_as_one_process(BesideOthers, plan)


def test_selective_recomputation_around_experts() -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=4, recompute="selective")
    assert set(plan.recomputed_modules().values()) == {Recompute.SELECTIVE}
    assert_as_one_process(OwnMoe, plan)


def test_the_step_of_a_plan_with_divided_experts_is_pulled_apart() -> None:
    plan = solved(OwnMoe, gpus=2, ep=2, fsdp=2, prove=False)
    found = anatomy(plan, OwnMoe, text, profile=MACHINE, loss=loss)
    assert not found.problem
    assert found.timeline.end_s == pytest.approx(plan.predicted.step_time_s)


def compiled(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the gradients of two backwards whose layers are traced by torch.compile, and run as they are."""
    torch.manual_seed(0)
    compiled_by = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda self: compiled_by(self, backend="aot_eager")):
        model = tpplan.apply_plan(OwnMoe(), plan, compile=True)
        inputs = part(text(8, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
        losses = []
        for _ in range(2):
            model.zero_grad()
            value = loss(model(inputs["input_ids"]), inputs)
            value.backward()
            losses.append(mean_over_replicas(value))
    return losses, gradients(model)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_with_divided_experts(recompute: str) -> None:
    plan = solved(OwnMoe, gpus=2, ep=2, fsdp=2, micro_batch=4, recompute=recompute)
    expected_loss, expected = one_process(OwnMoe)
    for losses, found in run_ranks(2, compiled, plan, timeout_s=120):
        assert losses == pytest.approx([expected_loss] * 2, rel=1e-5)
        assert max(relative_errors(found, expected).values()) < TOLERANCE


def evaluated(plan: Plan, batches: list[dict[str, Tensor]]) -> list[float]:
    """The losses of this rank's batches of every second one; a rank that has fewer runs its last again, without
    counting it."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(OwnMoe(), plan).eval()
    own = batches[dist.get_rank() :: 2]
    found = []
    with torch.no_grad():
        for step in range(-(-len(batches) // 2)):
            batch = own[min(step, len(own) - 1)]
            value = loss(model(batch["input_ids"]), batch)
            if step < len(own):
                found.append(value.item())
    return found


def test_evaluation_of_more_batches_on_one_rank() -> None:
    plan = solved(OwnMoe, gpus=2, ep=2, fsdp=2)
    whole = text(5, LENGTH)
    batches = [part(whole, i, 5) for i in range(5)]
    torch.manual_seed(0)
    model = OwnMoe().eval()
    expected = [loss(model(batch["input_ids"]), batch).item() for batch in batches]
    first, second = run_ranks(2, evaluated, plan, batches)
    assert first == pytest.approx(expected[0::2], rel=1e-5)
    assert second == pytest.approx(expected[1::2], rel=1e-5)


class InLists(OwnMoe):
    """Has the parts of its layers in lists, so that FSDP gathers parts, and experts by themselves."""

    def __init__(self) -> None:
        super().__init__()
        parts = ([layer.norm, layer.router, layer.experts] for layer in self.layers)
        self.layers = nn.ModuleList(nn.ModuleList(own) for own in parts)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for norm, router, experts in self.layers:
            rows = norm(x).flatten(0, 1)
            weight, index = router(rows).softmax(-1).topk(2)
            x = x + experts(rows, index, weight).view_as(x)
        return self.head(x)


def test_experts_that_are_parts_of_lists() -> None:
    plan = solved(InLists, gpus=2, ep=2, fsdp=2)
    assert plan.experts is not None
    assert_as_one_process(InLists, plan)

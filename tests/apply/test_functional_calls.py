"""torch.func.functional_call in a forward: weights that the code computes, in place of a module's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from one_process import assert_same, gradients, whole
from ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.func import functional_call

import tpplan
from tpplan.core.layout import S
from tpplan.plan.plan import Plan, ProofStatus

DIM, HIDDEN, LENGTH, BATCH = 32, 64, 6, 2


class Inner(nn.Module):
    """x + down(f(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layer(Inner):
    """Calls itself, or one of its products, with other weights."""

    def linear_scaled(self, x: Tensor) -> Tensor:
        h = functional_call(self.up, {"weight": 2 * self.up.weight, "bias": self.up.bias}, (x,))
        return x + self.down(F.gelu(h))

    def weight_alone(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(functional_call(self.up, {"weight": self.up.weight.tanh()}, (x,))))

    def own_weights(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(functional_call(self.up, dict(self.up.named_parameters()), (x,))))

    def both_ways(self, x: Tensor) -> Tensor:
        scaled = {name: 2 * parameter for name, parameter in self.up.named_parameters()}
        return x + self.down(F.gelu(self.up(x)) + F.gelu(functional_call(self.up, scaled, (x,))))

    def transposed(self, x: Tensor) -> Tensor:
        h = F.gelu(functional_call(self.up, {"weight": self.down.weight.t(), "bias": self.up.bias}, (x,)))
        return x + self.down(h)


class Stack(nn.Module):
    """x [B, T, D] -> a loss, by layers that compute as `way` says."""

    def __init__(self, way: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.way(layer, x)
        return x.square().mean()


def whole_layer(layer: Layer, x: Tensor) -> Tensor:
    """A layer called with all its weights changed, as a step of an inner loop does."""
    return functional_call(layer, {name: parameter * 0.9 for name, parameter in layer.named_parameters()}, (x,))


class InnerLoop(nn.Module):
    """x [B, T, D] -> the loss after one step of gradient descent within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Inner()

    def forward(self, x: Tensor) -> Tensor:
        names, weights = zip(*self.layer.named_parameters(), strict=True)
        inner = functional_call(self.layer, dict(zip(names, weights, strict=True)), (x,)).square().mean()
        steps = torch.autograd.grad(inner, weights, create_graph=True)
        moved = {name: weight - 0.1 * step for name, weight, step in zip(names, weights, steps, strict=True)}
        return functional_call(self.layer, moved, (x,)).square().mean()


WAYS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "as_written": lambda layer, x: layer(x),
    "linear_scaled": lambda layer, x: layer.linear_scaled(x),
    "weight_alone": lambda layer, x: layer.weight_alone(x),
    "own_weights": lambda layer, x: layer.own_weights(x),
    "both_ways": lambda layer, x: layer.both_ways(x),
    "transposed": lambda layer, x: layer.transposed(x),
    "whole_layer": whole_layer,
}


def build(way: str) -> nn.Module:
    torch.manual_seed(0)
    return InnerLoop() if way == "inner_loop" else Stack(WAYS[way])


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(1))}


def solved(way: str) -> Plan:
    return solve_eagerly(lambda: build(way), inputs, loss=lambda output, _: output, batch=BATCH, seq_len=LENGTH)


def ran(way: str, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    model = build(way)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    value = model(**inputs(BATCH, LENGTH))
    value.backward()
    return value.item(), gradients(model)


@pytest.mark.parametrize("way", [*WAYS, "inner_loop"])
def test_weights_given_in_a_call_are_those_of_one_process(way: str) -> None:
    plan = solved(way)
    assert plan.proof.status is ProofStatus.PROVEN
    value, expected = ran(way, None)
    for applied_value, applied in run_ranks(2, ran, way, plan):
        assert applied_value == pytest.approx(value, rel=1e-5)
        assert_same(applied, expected)


def doubled_from_outside(
    plan: Plan | None, is_plain: bool, has_gradients: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """The training code calls the model with other weights: DTensors, or plain tensors that are whole."""
    model = build("as_written")
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    given = {name: 2 * (whole(p) if is_plain else p) for name, p in model.named_parameters()}
    with torch.set_grad_enabled(has_gradients):
        value = functional_call(model, given, (inputs(BATCH, LENGTH)["x"],))
    value.backward()
    return value.item(), gradients(model)


def test_weights_given_from_outside_are_dtensors() -> None:
    plan = solved("as_written")
    assert plan.parameters["layers.0.up.weight"].placement == S(0)
    value, expected = doubled_from_outside(None, is_plain=False)
    for applied_value, applied in run_ranks(2, doubled_from_outside, plan, False):
        assert applied_value == pytest.approx(value, rel=1e-5)
        assert_same(applied, expected)
    for has_gradients in (True, False):
        with pytest.raises(RankError, match=r"layers\.0\.up\.weight is a plain tensor in place of the parameter"):
            run_ranks(2, doubled_from_outside, plan, True, has_gradients)

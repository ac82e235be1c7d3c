"""Dropout on slices: every rank drops its own share, the group stays in step, recomputation drops the same."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.apply.modules.dropout_rng import DrawByRank
from tpplan.core.errors import PlanError
from tpplan.core.layout import S
from tpplan.layouts.typecheck import typecheck
from tpplan.plan.plan import Plan, Recompute
from tpplan.trace.hooks.call_rewriting import rewrite_calls
from tpplan.trace.trace import trace

DIM, HIDDEN, HEADS, LENGTH, P = 16, 2048, 4, 15, 0.25


class Dropping(nn.Module):
    """Drops between a split and a joining projection, and on the residual stream behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.last = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.up_proj(x), P, self.training)
        out: Tensor = self.last(self.down_proj(hidden))
        self.hidden, self.out = hidden.detach(), out.detach()  # with their gradients they would be outputs
        return out


class Attention(nn.Module):
    """Drops in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """x -> the mean square of what a layer adds to it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layer(x)).square().mean()


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(1))}


def solve(layer: type[nn.Module]) -> Plan:
    return tpplan.solve(
        lambda: Model(layer()),
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard(hbm_bytes_per_s=1e11)),
        global_batch=1,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
        micro_batch=1,
    )


def test_dropout_does_not_stop_a_projection_from_being_split() -> None:
    plan = solve(Dropping)
    assert plan.parameters["layer.up_proj.weight"].placement == S(0)
    assert plan.draws == ("layer",)
    plan = solve(Attention)
    assert [str(plan.parameters[f"layer.{name}.weight"].placement) for name in "qkvo"] == ["S(0)"] * 3 + ["S(1)"]
    assert plan.draws == ("layer",)


def dropped(plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masks of two forwards on this rank, what the second one adds to the stream, and a draw after them."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Model(Dropping()), plan)
    torch.manual_seed(5)
    masks = []
    for _ in range(2):
        model(**inputs(1, LENGTH))
        masks.append(model.layer.hidden.detach() == 0)
    model(**inputs(1, LENGTH)).backward()
    gradient = model.layer.down_proj._parameters["weight"].grad
    assert isinstance(gradient, DTensor)
    return masks[0], masks[1], model.layer.out.detach(), torch.rand(3)


def test_ranks_drop_their_own_share_and_stay_in_step() -> None:
    ranks = run_ranks(2, dropped, solve(Dropping))
    masks = [mask for rank in ranks for mask in rank[:2]]
    for mask in masks:
        assert mask.shape == (1, LENGTH, HIDDEN // 2)
        assert mask.float().mean() == pytest.approx(P, abs=0.02)  # 15,360 elements: 6 deviations
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert (mask == other).float().mean() == pytest.approx(P**2 + (1 - P) ** 2, abs=0.03)  # independent
    for one, other in zip(ranks[0][2:], ranks[1][2:], strict=True):
        assert torch.equal(one, other)  # the whole stream, and what is drawn next


class Drawing(nn.Module):
    """One call that drops, in its own forward."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, P),
    "F.dropout, named": lambda x: F.dropout(input=x, p=P, training=True),
    "in place": lambda x: F.dropout(x.clone(), P, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, P, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), P, train=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, P),
    "attention, named": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=P, is_causal=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_drops_is_drawn_by_rank(call: str) -> None:
    """The same values on two ranks: with one mask for both they would stay the same."""
    found = []
    for rank in (0, 1):
        module = Drawing(CALLS[call])
        rewrite_calls({module: (DrawByRank(rank),)})
        torch.manual_seed(5)
        found.append((module(torch.ones(2, 4, 16, 8)), torch.rand(3)))
    (first, after_first), (second, after_second) = found
    assert not torch.equal(first, second)
    assert torch.equal(after_first, after_second)


def test_what_drops_nothing_draws_nothing() -> None:
    for call in (lambda x: F.dropout(x, P, training=False), lambda x: F.scaled_dot_product_attention(x, x, x)):
        module = Drawing(call)
        rewrite_calls({module: (DrawByRank(1),)})
        torch.manual_seed(5)
        module(torch.ones(2, 4, 16, 8))
        drawn = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3))


def gradients(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(Model(Dropping()), plan)
    torch.manual_seed(5)
    model(**inputs(1, LENGTH)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_recomputation_drops_the_same() -> None:
    plan = solve(Dropping)
    again = dataclasses.replace(plan, recompute={"layer": Recompute.FULL})
    for kept, recomputed in zip(run_ranks(2, gradients, plan), run_ranks(2, gradients, again), strict=True):
        for name, gradient in kept.items():
            torch.testing.assert_close(recomputed[name], gradient)


def test_evaluation_equals_one_process() -> None:
    plan = solve(Attention)

    def run(on: Plan | None) -> Tensor:
        torch.manual_seed(0)
        model = Model(Dropping()) if on is None else tpplan.apply_plan(Model(Dropping()), on)
        with torch.no_grad():
            return model.eval()(**inputs(1, LENGTH))

    plan = solve(Dropping)
    for value in run_ranks(2, run, plan):
        torch.testing.assert_close(value, run(None))


def test_a_plan_that_hides_where_slices_are_dropped_does_not_type() -> None:
    plan = solve(Dropping)
    graph = trace(Model(Dropping()), inputs(1, LENGTH))
    assert typecheck(graph, plan) is None
    for draws in ((), ("layer", "layer.last")):
        found = typecheck(graph, dataclasses.replace(plan, draws=draws))
        assert found is not None
        assert "aten.dropout.default" in found.message
    found = typecheck(graph, dataclasses.replace(plan, draws=("layer", "nowhere")))
    assert found is not None
    assert "module nowhere: in the plan, not in the model" in found.message
    with pytest.raises(PlanError, match=r"draws\[0\]: 'blocks.\*' matches none"):
        Plan.from_dict(dataclasses.replace(plan, draws=("blocks.*",)).to_dict())


class Again(nn.Module):
    """Most of a layer in a function that it checkpoints itself: a count of heads in its code, and a dropout."""

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__()
        self.up, self.down, self.checkpoint = nn.Linear(DIM, 64), nn.Linear(64, DIM), checkpoint

    def inner(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(x.shape[0], x.shape[1], HEADS, 16).relu()
        return self.down(F.dropout(heads.flatten(2), P, self.training))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.checkpoint == "reentrant")


class Layers(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, DIM), nn.Linear(DIM, 32)
        self.layers = nn.ModuleList(Again(checkpoint) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def text(batch: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return {name: torch.randint(32, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def entropy(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def checkpointed_step(checkpoint: str | None, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(Layers(checkpoint), plan)
    torch.manual_seed(5)
    inputs = text(2, 8)
    entropy(model(inputs["tokens"]), inputs).backward()
    return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


def test_what_a_module_checkpoints_itself_runs_again_as_it_ran() -> None:
    """By then its forward is over: what is dropped, and a rank's number of heads, are those of the forward all the
    same."""
    found = {}
    for kind in (None, "reentrant", "not reentrant"):
        plan = tpplan.solve(
            lambda kind=kind: Layers(kind),
            text,
            loss=entropy,
            cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
            global_batch=2,
            micro_batch=2,
            seq_len=8,
            tp=2,
            precision="fp32",
            pins={"layers.*": "megatron"},
        )
        assert plan.drawing_modules()
        assert plan.size_plans()
        found[kind] = run_ranks(2, checkpointed_step, kind, plan)[0]
    for kind in ("reentrant", "not reentrant"):
        assert all(torch.equal(found[kind][name], gradient) for name, gradient in found[None].items())

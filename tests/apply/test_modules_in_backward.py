"""autograd.Functions of a model: they stay whole on ranks, however they are called; those that run modules in backward
(own checkpoints, reversible layers) run on ranks that have whole weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard
from one_process import mean_over_replicas, part, relative_errors, whole
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import UsageError
from tpplan.plan.plan import Plan, ProofStatus

BATCH, LENGTH, DIM, VOCAB = 4, 6, 32, 48


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.norm(x)).tanh())


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); backward computes x from y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.y, ctx.f, ctx.g = (y1.detach(), y2.detach()), f, g
        f.drawn = torch.get_rng_state()  # type: ignore[assignment]
        return torch.cat((y1, y2), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (y1, y2), (d1, d2) = ctx.y, gradient.chunk(2, -1)
        torch.set_rng_state(ctx.f.drawn)
        with torch.enable_grad():
            y1.requires_grad_()
            gy1 = ctx.g(y1)
            torch.autograd.backward(gy1, d2)
        assert y1.grad is not None
        d1, x2 = d1 + y1.grad, (y2 - gy1).detach().requires_grad_()
        with torch.enable_grad():
            fx2 = ctx.f(x2)
            torch.autograd.backward(fx2, d1)
        assert x2.grad is not None
        return torch.cat((d1, d2 + x2.grad), -1), None, None


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + Checkpoint.apply(super().forward, x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Reversible.apply(torch.cat((x, x), -1), self.f, self.g)
        return y[..., :DIM] + y[..., DIM:]


class Centered(torch.autograd.Function):
    """Identity, whose backward needs all of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


class Switching(Centered):
    """Switches gradients in its forward, in which they are off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            pass
        with torch.no_grad():
            return x * 1.0


centered, switching = Centered.apply, Switching.apply
hidden_away = {"centered": Centered.apply}


class Around(Mlp):
    """A Function between the matrices."""

    def between(self, x: Tensor) -> Tensor:
        return Centered.apply(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.between(self.a(self.norm(x))).tanh())


class Named(Around):
    def between(self, x: Tensor) -> Tensor:
        return centered(x)


class NamedSwitching(Around):
    def between(self, x: Tensor) -> Tensor:
        return switching(x)


class LookedUp(Around):
    def between(self, x: Tensor) -> Tensor:
        return hidden_away["centered"](x)


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def text(batch: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(layer: type[nn.Module], **options: Any) -> Plan:
    return tpplan.solve(
        lambda: Model(layer),
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        seq_len=LENGTH,
        precision="fp32",
        all_gpus=True,
        **options,
    )


def backward(layer: type[nn.Module], plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Model(layer), text(BATCH, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        inputs = part(inputs, plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    value = loss(model(inputs["tokens"]), inputs)
    value.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return value.item() if plan is None else mean_over_replicas(value), found


@pytest.mark.parametrize("layer", [Checkpointed, Pair])
def test_they_run_whole_on_ranks_that_have_whole_weights(layer: type[nn.Module]) -> None:
    plan = solved(layer, micro_batch=BATCH // 2)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.mesh.tp == 1
    assert all("that it is not given" in own.reason for own in (plan.opaque or {}).values())
    expected, reference = backward(layer, None)
    for found, gradients in run_ranks(2, backward, layer, plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert gradients.keys() == reference.keys()
        assert max(relative_errors(gradients, reference).values()) < 1e-5


@pytest.mark.parametrize("layer", [Checkpointed, Pair])
def test_tensor_parallel_ranks_are_refused_by_name(layer: type[nn.Module]) -> None:
    with pytest.raises(UsageError, match=r"layers\.0 runs modules in backward.*plan with --tp 1"):
        solved(layer, tp=2)


@pytest.mark.parametrize("layer", [Around, Named, NamedSwitching, LookedUp])
def test_functions_are_whole_on_tensor_parallel_ranks_however_they_are_called(layer: type[nn.Module]) -> None:
    plan = solved(layer, tp=2)
    reasons = {own.reason for own in (plan.opaque or {}).values()}
    assert all("called by an `apply` that was looked up before" in reason for reason in reasons)
    assert bool(reasons) is (layer is LookedUp)
    expected, reference = backward(layer, None)
    for found, gradients in run_ranks(2, backward, layer, plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert max(relative_errors(gradients, reference).values()) < 1e-5

"""Code that a trace sees less of than what runs: refused with a word, or planned and equal to one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.core.errors import TpplanError
from tpplan.plan.plan import Plan, ProofStatus

DIM, HIDDEN, ROWS = 32, 128, 4
Inputs = Mapping[str, Tensor]


class MLP(nn.Module):
    """Up and down: sharded by column and by row, where nothing forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return F.relu(h)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.down(self.between(self.up(x), *rest)).square().mean()


class WidthAsConstant(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h * torch.tensor(h.shape[-1] ** -0.5, device=h.device)


class WidthAsNewTensor(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h * h.new_tensor([h.shape[-1] ** -0.5])


class WidthAsMovedConstant(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h * torch.tensor([float(h.shape[-1])]).to(h.device)


class MeanOfData(MLP):
    """Reads values by `.data`, which no op of torch shows."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h - h.data.mean(-1, keepdim=True)


class PlaceByData(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h * F.one_hot(h.data.argmax(-1), h.shape[-1])


class NormOfData(MLP):
    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        weight = self.up.weight
        return F.linear(F.linear(x, weight / weight.data.norm(dim=0, keepdim=True)), self.down.weight).square().mean()


class AsSubclass(MLP):
    """Hands on a tensor with the memory of another one that no op has made."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return h - h.detach().as_subclass(Tensor).mean(-1, keepdim=True)


class Normalizing(torch.autograd.Function):
    """A backward that is not linear."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class OwnBackward(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return F.relu(Normalizing.apply(h))


class HookInForward(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm())
        return h


class ModuleHook(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_hook(lambda _m, given, _out: (given[0] / given[0].norm(),))


class ParameterHook(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient * 0.1)


class HookThatReads(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda _m, args, out: out * args[0].mean())


class Reentrant(MLP):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        y = checkpoint(lambda given: self.down(F.relu(self.up(given))), x.requires_grad_(), use_reentrant=True)
        return y.square().mean()


class InClosure(MLP):
    def __init__(self) -> None:
        super().__init__()
        weight = self.up.weight
        self.tied = lambda h: h @ weight

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.tied(self.up(x)).square().mean()


class ReentrantWhole(MLP):
    """In a module that runs whole."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        y = checkpoint(lambda given: self.down(F.relu(self.up(given))), x.requires_grad_(), use_reentrant=True)
        return y.square().mean() * self.down.weight.mean().item()


class SelfInClosure(MLP):
    """A function that reads the module that it is on, and a hook that does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.scaled = lambda h: h * self.scale
        self.up.register_forward_hook(lambda _m, _args, out: out + self.scale.sum())

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return self.scaled(h)


class OnTheInstance(MLP):
    """A layer whose forward was wrapped."""

    def __init__(self) -> None:
        super().__init__()
        forward = self.up.forward
        self.up.forward = lambda given: forward(given) * 2  # type: ignore[method-assign]


@torch.jit.script
def scripted(h: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(h @ weight)


class Scripted(MLP):
    """TorchScript optimizes a function when it has run a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HIDDEN))
        for _ in range(3):
            scripted(
                torch.ones(2, 2, device="cpu", requires_grad=True), torch.ones(2, 2, device="cpu")
            ).sum().backward()

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return scripted(h, self.weight)


class KeptByHook(MLP):
    """What a hook puts aside is what leaves the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.first = nn.Linear(DIM, DIM)
        self.first.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: object, out: Tensor) -> None:
        self.kept["first"] = out

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(self.first(x).tanh()) + self.kept["first"].mean()


class ReadsAtRest(MLP):
    """A penalty on all weights."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(x) + sum(weight.square().sum() for weight in self.parameters())


class PutsModule(MLP):
    """A module without weights is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.Identity()

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        self.act = nn.GELU()
        return self.act(h)


class Mapped(MLP):
    """Inside torch.vmap."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.softmax(-1))(h)


class Reports(MLP):
    """A number that is only reported."""

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        loss = super().forward(x)
        return loss, loss.item()


class Masked(MLP):
    """Goes another way where the mask is not all true."""

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return h if rest[0].all() else h.softmax(-1)


class MaskInPlace(MLP):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        every = torch.ones_like(rest[0])
        every &= rest[0]
        return h if every.all() else h.softmax(-1)


class MaskThroughRelu(MLP):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        signs = rest[0].float() - 1
        F.relu(signs, inplace=True)
        return h if (signs >= 0).all() else h.softmax(-1)


class Residual(MLP):
    """A layer, and what it leaves behind."""

    aux: Tensor | float | None = 0.0

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.between(self.up(x), *rest)
        self.aux = h.square().mean()
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))


class AuxiliaryLosses(Stack):
    def __init__(self) -> None:
        super().__init__(Residual)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + self.layers[1].aux


class Appending(Residual):
    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:  # type: ignore[override]
        given.append(x.square().mean())
        return super().forward(x)


class LossesInAList(Stack):
    def __init__(self) -> None:
        super().__init__(Appending)

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, losses)
        return x.square().mean() + sum(losses)


class MaskedLayer(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return F.relu(h) if rest[0].all() else h.softmax(-1)


class AnotherMask(Stack):
    """Like layers, called alike but for what a mask says."""

    def __init__(self) -> None:
        super().__init__(MaskedLayer)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, mask if i == 1 else torch.ones_like(mask))
        return x.square().mean()


class SevenIn(MLP):
    """Asks a module's own input, of which a rank may be given a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.down(self.up(self.inner(x, rest[0]))).square().mean()


class Inner(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = x.softmax(-1).exp().sin() * ids[:, None]
        return y * (2.0 if 7 in ids else 1.0)


class Caught(MLP):
    """Ops behind a caught error are not those of the module that raised it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        try:
            x = self.down(x)
        except RuntimeError:
            x = x * self.scale
        return super().forward(x)


class LossByToken(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 64, bias=False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(F.relu(self.down(self.up(x)))), rest[0], reduction="none")
        return (losses * torch.arange(1.0, ROWS + 1, device=x.device)).sum()


PLAIN: Inputs = {"x": torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))}
MASK: Inputs = {**PLAIN, "mask": torch.tensor([True, False, True, True])}
IDS: Inputs = {**PLAIN, "ids": torch.tensor([7, 1, 1, 1])}


class Named(nn.Module):
    """A model whose second input has a name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        return self.model(x, *(extra for extra in (mask, ids) if extra is not None))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        *((model, PLAIN) for model in (WidthAsConstant, WidthAsNewTensor, WidthAsMovedConstant, OwnBackward)),
        *((model, PLAIN) for model in (MeanOfData, PlaceByData, NormOfData, AsSubclass)),
        *((model, PLAIN) for model in (HookThatReads, AuxiliaryLosses, Caught)),
        *((model, PLAIN) for model in (HookInForward, ModuleHook, ParameterHook, LossesInAList)),
        *((model, PLAIN) for model in (Reentrant, ReentrantWhole, InClosure, SelfInClosure, OnTheInstance)),
        *((model, PLAIN) for model in (Scripted, KeptByHook, ReadsAtRest, PutsModule, Mapped)),
        *((model, MASK) for model in (Masked, AnotherMask, MaskThroughRelu)),
        *((model, IDS) for model in (SevenIn, LossByToken)),
    ],
)
def test_what_is_planned_equals_one_process(model: Callable[[], nn.Module], inputs: Inputs) -> None:
    plan = solve(model, inputs)
    assert plan.proof.status is ProofStatus.PROVEN
    loss, gradients = step(model, inputs, None)
    for applied_loss, applied in run_ranks(2, step, model, inputs, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert applied.keys() == gradients.keys()
        assert max(relative_errors(applied, gradients).values()) < 1e-5


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (MaskInPlace, MASK, "have been written to"),
    ],
)
def test_what_cannot_be_seen_is_refused(model: Callable[[], nn.Module], inputs: Inputs, message: str) -> None:
    with pytest.raises(TpplanError, match=message):
        solve(model, inputs)


def test_what_is_asked_once_a_layer_is_told_once() -> None:
    plan = solve(AnotherMask, MASK)
    line = "return F.relu(h) if rest[0].all() else h.softmax(-1)"
    assert [text.partition(": ")[2] for text in plan.proof.assumptions] == [f"{line} is True", f"{line} is False"]


def solve(model: Callable[[], nn.Module], inputs: Inputs, **options: Any) -> Plan:
    return tpplan.solve(
        lambda: Named(model()),
        lambda batch, seq_len: dict(inputs),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=ROWS,
        micro_batch=ROWS,
        seq_len=1,
        tp=2,
        precision="fp32",
        **options,
    )


def step(model: Callable[[], nn.Module], inputs: Inputs, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    built: nn.Module = Named(model())
    built = built if plan is None else tpplan.apply_plan(built, plan)
    loss = built(**{name: tensor.clone() for name, tensor in inputs.items()})  # a model may write to what it is given
    loss.backward()
    gradients = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}

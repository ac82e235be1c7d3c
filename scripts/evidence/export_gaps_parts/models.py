"""Whole models for scripts/evidence/export_gaps.py: kinds of inputs and outputs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export_gaps_parts.modules import DIM, HIDDEN, LENGTH, Inner

VOCABULARY, NUM_ROWS = 32, 4


def numbers() -> torch.Generator:
    """The same at every call."""
    return torch.Generator().manual_seed(1)


def activations() -> Tensor:
    """[B, T, D]"""
    return torch.randn(NUM_ROWS, LENGTH, DIM, generator=numbers())


def tokens() -> Tensor:
    """[B, T]"""
    return torch.randint(VOCABULARY, (NUM_ROWS, LENGTH), generator=numbers())


class MLP(nn.Module):
    """What can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def run(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ReturnsDict(MLP):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.run(x)
        return {"loss": y.square().mean(), "hidden": [y, {"first": y[:, 0]}], "none": None, "number": 3}


class Output(NamedTuple):
    loss: Tensor
    y: Tensor


class ReturnsNamedTuple(MLP):
    def forward(self, x: Tensor) -> Output:
        y = self.run(x)
        return Output(y.square().mean(), y)


@dataclasses.dataclass
class Result:
    loss: Tensor
    y: Tensor


class ReturnsDataclass(MLP):
    def forward(self, x: Tensor) -> Result:
        y = self.run(x)
        return Result(y.square().mean(), y)


class ReturnsInput(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x).square().mean(), x


class ReturnsItem(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        loss = self.run(x).square().mean()
        return loss, loss.item()


class ReturnsSelected(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.run(x)
        return y.square().mean(), y[y > 0]


class ReturnsSeveral(MLP):
    """Losses of several heads, and their sum last."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.run(x)
        first, second = y.square().mean(), y.abs().mean()
        return first + second, first.detach(), second.detach()


class KeywordOnly(MLP):
    def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None, mode: str = "mean") -> Tensor:
        y = self.run(x) * scale
        y = y if mask is None else y * mask[..., None]
        return getattr(y.square(), mode)()


class Nested(MLP):
    def forward(self, batch: dict[str, Any], *rest: Tensor, **named: Tensor) -> Tensor:
        y = self.run(batch["x"]) + sum(batch["list"])
        return (y * named["scale"]).square().mean()


class ShapeDecides(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        for i in range(x.shape[1] // 4):
            x = x + self.run(x) / (i + 1)
        return x.square().mean()


class Text(MLP):
    """A table, and a loss on a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.run(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Packs(Text):
    """Padding is taken out, and put back."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        kept = (tokens != 0).flatten().nonzero().squeeze(-1)
        y = self.run(self.embedding(tokens).flatten(0, 1)[kept])
        return F.cross_entropy(self.head(y), labels.flatten()[kept])


class Decodes(Text):
    """Samples from itself while it trains."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            drawn = self.head(self.run(self.embedding(tokens))).softmax(-1).flatten(0, 1).multinomial(1)
        logits = self.head(self.run(self.embedding(drawn.view_as(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Penalized(MLP):
    """A penalty on the gradient of its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.run(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y / 100 + gradient.square().mean()


class Unrolled(Inner):
    """A step of gradient descent inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(x).square().mean()
        weights = dict(self.layer.named_parameters())
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return self.other(torch.func.functional_call(self.layer, moved, (x,))).square().mean()


class WritesToItsInput(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.run(x).square().mean()


class ChecksDevice(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            x = x.half()
        return self.run(x.to(next(self.parameters()).dtype)).square().mean()


class DiesOnMeta(MLP):
    """Code that wants real data whatever the device says."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.abs().max())
        return (self.run(x) / scale).square().mean()


class UsesWeightsValue(MLP):
    """Goes one way or another by a weight's value, and by an activation's."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        if self.up.weight.norm() > 1e6 or y.isnan().any():
            y = y.clamp(-1, 1)
        return y.square().mean()


class Iterates(MLP):
    """As often as data says."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        while y.norm() > 10:
            y = self.run(y) / 2
        return y.square().mean()


class Contrastive(nn.Module):
    """Two towers, and a loss over the pairs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = MLP(), MLP(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = (F.normalize(tower.run(z).mean(1), dim=-1) for tower, z in ((self.first, x), (self.second, y)))
        logits, own = self.scale.exp() * one @ other.T, torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class PredictsNoise(nn.Module):
    """Noise by a schedule that stands in a buffer, at a step that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * DIM, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, DIM))
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        step = torch.randint(0, 10, x.shape[:1], device=x.device)
        noise, kept = torch.randn_like(x), self.kept[step][:, None, None]
        angle = step[:, None, None] * torch.exp(-torch.arange(DIM // 2, device=x.device) / 4.0)
        time = torch.cat((angle.sin(), angle.cos()), -1).expand(-1, x.shape[1], -1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.layers(torch.cat((noisy, time), -1)), noise)


class FillsIn(MLP):
    """Half of the tokens, in an order that is drawn, and a loss on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.missing, self.position = nn.Parameter(torch.zeros(1, 1, DIM)), nn.Parameter(torch.randn(1, LENGTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2], device=x.device).argsort(1)
        seen, back = order[:, : LENGTH // 2, None].expand(-1, -1, DIM), order.argsort(1)
        y = self.run((x + self.position).gather(1, seen))
        filled = torch.cat((y, self.missing.expand(x.shape[0], LENGTH - LENGTH // 2, -1)), 1)
        filled = filled.gather(1, back[..., None].expand(-1, -1, DIM))
        is_missing = (back >= LENGTH // 2).float()
        return ((filled - x).square().mean(-1) * is_missing).sum() / is_missing.sum()


class PassesMessages(nn.Module):
    """Along the edges of a graph, and a mean of what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * DIM, HIDDEN), nn.Linear(HIDDEN + DIM, DIM)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, (source, target) = x.flatten(0, 1), edges
        messages = self.message(torch.cat((nodes[source], nodes[target]), -1)).relu()
        arrived = torch.zeros(len(nodes), HIDDEN, device=x.device).index_add_(0, target, messages)
        number = torch.zeros(len(nodes), device=x.device).index_add_(
            0, target, torch.ones(len(target), device=x.device)
        )
        return self.update(torch.cat((arrived / number.clamp(min=1)[:, None], nodes), -1)).square().mean()


class SeveralTokensAhead(Text):
    """A loss for each distance, and one that keeps logits small."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, total = self.run(self.embedding(tokens)), torch.zeros((), device=tokens.device)
        for ahead in range(3):
            logits = self.head(hidden[:, : LENGTH - ahead]).flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, ahead:].flatten(), label_smoothing=0.1)
            total = total + 0.5**ahead * (loss + 1e-2 * logits.logsumexp(-1).square().mean())
        return total


Inputs = Callable[[], dict[str, object]]


def of_x() -> dict[str, object]:
    return {"x": activations()}


def of_text() -> dict[str, object]:
    return {"tokens": tokens(), "labels": tokens()}


def of_graph() -> dict[str, object]:
    return {"x": activations(), "edges": torch.randint(NUM_ROWS * LENGTH, (2, 40), generator=numbers())}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "dict returned": (ReturnsDict, of_x),
    "named tuple returned": (ReturnsNamedTuple, of_x),
    "dataclass returned": (ReturnsDataclass, of_x),
    "input returned": (ReturnsInput, of_x),
    "number returned": (ReturnsItem, of_x),
    "what data selects returned": (ReturnsSelected, of_x),
    "several losses returned": (ReturnsSeveral, of_x),
    "keyword-only, None and string inputs": (
        KeywordOnly,
        lambda: {"x": activations(), "scale": 2.0, "mask": None, "mode": "mean"},
    ),
    "nested and variable inputs": (
        Nested,
        lambda: {"batch": {"x": activations(), "list": [activations(), 1]}, "scale": torch.ones(DIM)},
    ),
    "shapes decide": (ShapeDecides, of_x),
    "a loss in the model": (Text, of_text),
    "padding taken out": (Packs, of_text),
    "samples from itself": (Decodes, of_text),
    "gradient penalty": (Penalized, of_x),
    "gradient step in forward": (Unrolled, of_x),
    "writes to its input": (WritesToItsInput, of_x),
    "asks for devices and dtypes": (ChecksDevice, of_x),
    "a number out of the input": (DiesOnMeta, of_x),
    "branches on values": (UsesWeightsValue, of_x),
    "a loop that data ends": (Iterates, of_x),
    "loss over the pairs of a batch": (Contrastive, lambda: {"x": activations(), "y": activations().roll(1, 0)}),
    "noise predicted": (PredictsNoise, of_x),
    "tokens left out and filled in": (FillsIn, of_x),
    "messages on a graph": (PassesMessages, of_graph),
    "several tokens ahead": (SeveralTokensAhead, of_text),
}

"""Layers [B, T, D] -> [B, T, D] for scripts/evidence/export_gaps.py: state, computed weights, experts, attention."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from export_gaps_parts.modules import DIM, HIDDEN, LENGTH, NUM_HEADS, Inner

NUM_EXPERTS, NUM_CODES, RANK = 4, 8, 4


def heads(x: Tensor) -> Tensor:
    """[B, H, T, D / H]"""
    return x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse."""
    return x.transpose(1, 2).flatten(2)


# What they keep


class FollowsCodes(Inner):
    """Vector quantization, with codes in a buffer that follow what is given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(NUM_CODES, DIM))
        self.register_buffer("counts", torch.ones(NUM_CODES))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        is_own = F.one_hot(nearest, NUM_CODES).float()
        with torch.no_grad():
            self.counts.mul_(0.9).add_(is_own.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(is_own.T @ flat / self.counts.unsqueeze(-1), alpha=0.1)
        code = self.codes[nearest].view_as(x)
        return super().forward(x + (code - x).detach()) + (x - code.detach()).square().mean()


class GrowsTable(Inner):
    """A table of positions that is made anew when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(0, DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cos.shape[0] < x.shape[1]:
            positions = torch.arange(x.shape[1], device=x.device).float()
            self.cos = torch.outer(positions, torch.ones(DIM, device=x.device)).cos()
        return super().forward(x * self.cos[: x.shape[1]])


class RegistersBuffer(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, device=x.device).tril(), persistent=False)
        return super().forward(self.mask @ x)


class KeepsKeys(nn.Module):
    """Keys and values of the call before, in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.past: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(y) for y in self.qkv(x).chunk(3, -1))
        keys, values = k, v
        if self.past is not None:
            keys, values = torch.cat((self.past[0], k), 2), torch.cat((self.past[1], v), 2)
        self.past = (k.detach(), v.detach())
        return self.out(joined(F.scaled_dot_product_attention(q, keys, values)))


class FixedPoint(Inner):
    """Iterates without gradients, then once with."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                z = torch.tanh(self.layer(z) + x)
        return self.other(torch.tanh(self.layer(z.detach()) + x))


class MaxNorm(Inner):
    """A table of which the rows that are looked up are made shorter first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, DIM, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(LENGTH, device=x.device)))


# Weights that are computed


class LowRankDelta(nn.Module):
    """What is added to a frozen weight."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(RANK, num_in)), nn.Parameter(0.1 * torch.randn(num_out, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Wide(nn.Module):
    """Two layers whose weights are computed, wide enough to be sharded."""

    def __init__(self, wrap: Callable[[nn.Linear], nn.Module] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        for layer in (self.up, self.down) if wrap is not None else ():
            wrap(layer)

    def computed(self, weight: Tensor) -> Tensor:
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if type(self) is Wide:
            return self.down(self.up(x).relu())
        hidden = F.linear(x, self.computed(self.up.weight), self.up.bias).relu()
        return F.linear(hidden, self.computed(self.down.weight), self.down.bias)


def low_rank(layer: nn.Linear) -> nn.Module:
    """A frozen layer, parametrized."""
    layer.weight.requires_grad_(False)
    delta = LowRankDelta(layer.out_features, layer.in_features)
    return parametrize.register_parametrization(layer, "weight", delta)


class Quantized(Wide):
    """Rounded to 4 bits, with a scale for each row or one for all, and passed straight through in backward."""

    dims: Any = -1

    def computed(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().amax(self.dims, keepdim=True) / 7
        return weight + ((weight / scale).round().clamp(-8, 7) * scale - weight).detach()


class QuantizedAlike(Quantized):
    dims = (0, 1)


class Standardized(Wide):
    def computed(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(-1, keepdim=True)) / (weight.std(-1, keepdim=True) + 1e-5)


class TiedToItsTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.up.weight.T)


class CosineHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(HIDDEN, DIM)), nn.Parameter(torch.tensor(1.0))
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1)) * self.scale.exp())


class Generated(nn.Module):
    """A weight for each row, which a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.other = nn.Linear(DIM, DIM * RANK), nn.Linear(RANK, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.bmm(x, self.generator(x.mean(1)).view(-1, DIM, RANK)))


class Interleaved(nn.Module):
    """Gates between the values that they gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden[..., ::2] * hidden[..., 1::2].sigmoid())


class SharedBias(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.other.bias = self.layer.bias


class TwiceInSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(DIM, DIM)
        self.layers = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class StopsEarly(nn.Module):
    """At a depth that stands in an attribute; the layers after it are there."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number >= self.depth:
                return x
            x = layer(x).relu()
        return x


class StochasticDepth(Inner):
    def forward(self, x: Tensor) -> Tensor:
        is_kept = torch.rand(x.shape[0], 1, 1, device=x.device) > 0.3
        return x + super().forward(x) * is_kept / 0.7


class MixedDtypes(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x.double()).float())


# Functions with backwards of their own


class Scaling(torch.autograd.Function):
    """In two steps, and with another gradient than the product's."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 2 * gradient * scale, (gradient * x).sum((0, 1))


class Scales(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scaling.apply(x, self.scale))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Adversary(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.adversary = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.adversary(Reversal.apply(y)).square().mean()


# Experts


class Masked(nn.Module):
    """Every expert sees all; what it was not chosen for is masked. The balance of the choice is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        experts = (nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(NUM_EXPERTS))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        chosen_shares = F.one_hot(chosen, NUM_EXPERTS).float().mean((0, 1, 2))
        return out + 0.1 * NUM_EXPERTS * (shares.mean((0, 1)) * chosen_shares).sum()


class Dispatched(nn.Module):
    """Each token goes to a place of its expert's, as long as there are any."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        self.up = nn.Parameter(0.1 * torch.randn(NUM_EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(0.1 * torch.randn(NUM_EXPERTS, HIDDEN, DIM))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        gate, expert = self.router(tokens).softmax(-1).max(-1)
        is_chosen = F.one_hot(expert, NUM_EXPERTS)
        place = (is_chosen.cumsum(0) - 1) * is_chosen
        has_place = (place < self.CAPACITY) & (is_chosen > 0)
        dispatch = F.one_hot(place.clamp(max=self.CAPACITY - 1), self.CAPACITY).float() * has_place.unsqueeze(-1)
        hidden = torch.einsum("ecd,edh->ech", torch.einsum("nec,nd->ecd", dispatch, tokens), self.up).relu()
        made = torch.einsum("ech,ehd->ecd", hidden, self.down)
        return torch.einsum("nec,ecd->nd", dispatch * gate[:, None, None], made).view_as(x)


# Attention and recurrence


class LearnedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, DIM))
        self.into = nn.MultiheadAttention(DIM, NUM_HEADS, batch_first=True)
        self.back = nn.MultiheadAttention(DIM, NUM_HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.into(latents, x, x, need_weights=False)[0]
        return x + self.back(x, latents, latents)[0]


class RelativePositions(nn.Module):
    """A table of biases by distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, NUM_HEADS))
        positions = torch.arange(LENGTH)
        self.register_buffer("distance", positions[:, None] - positions[None] + LENGTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, NUM_HEADS, d // NUM_HEADS).permute(2, 0, 3, 1, 4)
        bias = self.table[self.distance.view(-1)].view(t, t, -1).permute(2, 0, 1)
        attention = (q @ k.transpose(-2, -1) / math.sqrt(d / NUM_HEADS) + bias).softmax(-1)
        return self.out((attention @ v).transpose(1, 2).reshape(b, t, d))


class MixedHeads(nn.Module):
    """Heads that hear each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mix = nn.Parameter(torch.eye(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(y) for y in self.qkv(x).chunk(3, -1))
        attention = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2), self.mix).softmax(-1)
        return self.out(joined(attention @ v))


class SelectiveScan(nn.Module):
    """A state that each token decides how to change, after a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN, padding=2)
        self.parts, self.step = nn.Linear(HIDDEN, RANK + 4), nn.Linear(RANK, HIDDEN)
        self.decay, self.skip = nn.Parameter(torch.rand(HIDDEN, 2)), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.into(x).chunk(2, -1)
        hidden = F.silu(self.conv(hidden.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, write, read = self.parts(hidden).split([RANK, 2, 2], -1)
        step = F.softplus(self.step(step)).unsqueeze(-1)
        kept, written = torch.exp(-step * self.decay.exp()), step * write.unsqueeze(2) * hidden.unsqueeze(-1)
        state, found = torch.zeros_like(kept[:, 0]), []
        for t in range(x.shape[1]):
            state = kept[:, t] * state + written[:, t]
            found.append((state * read[:, t].unsqueeze(1)).sum(-1))
        return self.out((torch.stack(found, 1) + hidden * self.skip) * F.silu(gate))


LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "codes that follow": FollowsCodes,
    "table that grows": GrowsTable,
    "register_buffer in forward": RegistersBuffer,
    "keys kept in attributes": KeepsKeys,
    "fixed point": FixedPoint,
    "max_norm": MaxNorm,
    "weight_norm, wide": functools.partial(Wide, parametrizations.weight_norm),
    "LoRA by parametrization": functools.partial(Wide, low_rank),
    "weight quantized by row": Quantized,
    "weight quantized as one": QuantizedAlike,
    "weight standardized": Standardized,
    "tied to its transpose": TiedToItsTranspose,
    "cosine head": CosineHead,
    "weight that a layer generates": Generated,
    "gates between values": Interleaved,
    "shared bias": SharedBias,
    "module twice in a Sequential": TwiceInSequence,
    "early exit": StopsEarly,
    "stochastic depth": StochasticDepth,
    "parameters of two dtypes": MixedDtypes,
    "autograd.Function with setup_context": Scales,
    "gradient reversal": Adversary,
    "experts, masked": Masked,
    "experts with a capacity": Dispatched,
    "learned queries": LearnedQueries,
    "relative positions": RelativePositions,
    "heads mixed": MixedHeads,
    "selective scan": SelectiveScan,
}

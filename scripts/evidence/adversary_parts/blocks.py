"""Modules [B, T, D] -> [B, T, D] that adversary_parts/models.py composes: one thing each, written in many ways.

A block is a class and, in its OPTIONS, what may be drawn for each argument of it. Shapes: B batch, T length, D model,
H heads, K head dim, F hidden, E experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: rows of position tables and buffers, above every length that is run
ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What all blocks of a model share. `seq_len` is the planned length."""

    dim: int
    heads: int
    hidden: int
    batch: int
    seq_len: int


def weight(*shape: int) -> nn.Parameter:
    """A normal weight whose product with its last dim keeps a variance."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "square": lambda h: F.relu(h).square(),
    "relu in place": lambda h: F.relu(h, inplace=True),
    "softmax": lambda h: h.softmax(-1),
    "softplus": F.softplus,
    "clamp": lambda h: h.clamp(-1, 1),
    "where": lambda h: torch.where(h > 0, h, h * 0.1),
    "mul_": lambda h: (h * 1.0).mul_(0.5).sin_(),
}


class Norm(nn.Module):
    """One of the norms, with or without weights."""

    OPTIONS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "kind": ("layer", "layer", "rms", "torch rms", "by hand", "plain", "l2", "group", "none", "functional"),
    }

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.kind, dim = kind, sizes.dim
        self.norm: nn.Module | None = {
            "layer": lambda: nn.LayerNorm(dim),
            "torch rms": lambda: nn.RMSNorm(dim, eps=1e-5),
            "plain": lambda: nn.LayerNorm(dim, elementwise_affine=False),
            "group": lambda: nn.GroupNorm(4, dim),
        }.get(kind, lambda: None)()
        if kind in ("rms", "by hand", "functional"):
            self.scale = nn.Parameter(torch.rand(dim) + 0.5)
        if kind == "by hand":
            self.shift = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "none":
                return x
            case "rms":
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
            case "by hand":
                centered = x - x.mean(dim=-1, keepdim=True)
                return (
                    self.scale * centered / (centered.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() + self.shift
                )
            case "functional":
                return F.layer_norm(x, x.shape[-1:], weight=self.scale)
            case "l2":
                return F.normalize(x, dim=-1) * x.size(-1) ** 0.5
            case "group":
                assert self.norm is not None
                return self.norm(x.transpose(1, 2)).transpose(1, 2)
        assert self.norm is not None
        out: Tensor = self.norm(x)
        return out


class Attention(nn.Module):
    """Heads over the sequence: `projection` makes them, `kernel` attends, `merge` joins them."""

    OPTIONS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "projection": ("view", "view", "unflatten", "split", "fused heads", "einsum", "chunk", "grouped fused"),
        "kernel": ("sdpa", "sdpa", "matmul", "einsum", "bmm"),
        "mask": ("causal", "causal", "none", "buffer", "bias", "table"),
        "groups": (1, 1, 2),
        "sharing": ("repeat_interleave", "expand", "gqa"),
        "merge": ("reshape", "flatten", "view", "einsum", "cat"),
        "rope": (False, False, True),
        "bias": (True, False),
    }

    def __init__(
        self,
        sizes: Sizes,
        projection: str,
        kernel: str,
        mask: str,
        groups: int,
        sharing: str,
        merge: str,
        rope: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.projection, self.kernel, self.mask, self.merge, self.rope = projection, kernel, mask, merge, rope
        self.n_head, self.head_dim, self.n_embd = sizes.heads, sizes.dim // sizes.heads, sizes.dim
        self.groups, self.sharing = (groups if projection in ("view", "unflatten", "grouped fused") else 1), sharing
        self.n_kv, dim = sizes.heads // self.groups, sizes.dim
        kv_dim = self.n_kv * self.head_dim
        match projection:
            case "view" | "unflatten":
                self.q, self.k = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, kv_dim, bias=bias)
                self.v = nn.Linear(dim, kv_dim, bias=bias)
            case "split" | "fused heads" | "chunk":
                self.c_attn = nn.Linear(dim, 3 * dim, bias=bias)
            case "grouped fused":
                self.qkv = nn.Linear(dim, dim + 2 * kv_dim, bias=bias)
            case "einsum":
                self.w_q, self.w_k, self.w_v = (weight(self.n_head, self.head_dim, dim) for _ in range(3))
        if merge == "einsum":
            self.w_o = weight(self.n_head, self.head_dim, dim)
        else:
            self.o = nn.Linear(dim, dim, bias=bias)
        if mask == "buffer":
            self.register_buffer("tril", torch.ones(ROWS, ROWS).tril().bool(), persistent=False)
        if mask == "bias":
            self.bias_table = nn.Parameter(torch.randn(self.n_head, ROWS, ROWS) * 0.1)
        if mask == "table":
            self.relative = nn.Embedding(2 * ROWS, self.n_head)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, K], and k and v of fewer heads."""
        b, t, d = x.shape
        match self.projection:
            case "view":
                q = self.q(x).view(b, t, self.n_head, self.head_dim).transpose(1, 2)
                k, v = (p(x).view(b, t, -1, self.head_dim).transpose(1, 2) for p in (self.k, self.v))
            case "unflatten":
                q = self.q(x).unflatten(-1, (self.n_head, -1)).movedim(2, 1)
                k, v = (p(x).unflatten(-1, (self.n_kv, -1)).movedim(2, 1) for p in (self.k, self.v))
            case "split":
                parts = self.c_attn(x).split(self.n_embd, dim=2)
                q, k, v = (part.view(b, t, self.n_head, d // self.n_head).transpose(1, 2) for part in parts)
            case "fused heads":
                q, k, v = self.c_attn(x).reshape(b, t, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            case "chunk":
                parts = self.c_attn(x).chunk(3, dim=-1)
                q, k, v = (torch.stack(part.chunk(self.n_head, dim=-1), 1) for part in parts)
            case "grouped fused":
                kv_dim = self.n_kv * self.head_dim
                q, k, v = self.qkv(x).split([self.n_embd, kv_dim, kv_dim], dim=-1)
                q, k, v = (part.reshape(b, t, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
            case _:
                q, k, v = (torch.einsum("btd,hkd->bhtk", x, w) for w in (self.w_q, self.w_k, self.w_v))
        return q, k, v

    def shared(self, k: Tensor) -> Tensor:
        """k with as many heads as q."""
        if self.groups == 1 or (self.sharing == "gqa" and self.kernel == "sdpa"):
            return k
        if self.sharing == "repeat_interleave":
            return k.repeat_interleave(self.groups, dim=1)
        b, h, t, d = k.shape
        return k[:, :, None].expand(b, h, self.groups, t, d).reshape(b, h * self.groups, t, d)

    def rotated(self, x: Tensor) -> Tensor:
        """Half of each head turned by the position."""
        half = x.shape[-1] // 2
        rates = 1.0 / (100 ** (torch.arange(half, device=x.device, dtype=x.dtype) / half))
        angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * rates
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def added(self, length: int, x: Tensor) -> Tensor | None:
        """What is added to the scores: 0 and -inf, or learned."""
        match self.mask:
            case "buffer":
                allowed = self.tril[:length, :length]
                return torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, float("-inf"))
            case "bias":
                return self.bias_table[:, :length, :length]
            case "table":
                position = torch.arange(length, device=x.device)
                distances = position[None, :] - position[:, None] + ROWS
                return self.relative(distances).permute(2, 0, 1)
            case "causal":
                return torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        return None

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, K]"""
        length, scale = q.shape[-2], 1.0 / math.sqrt(self.head_dim)
        if self.kernel == "sdpa":
            grouped = self.groups > 1 and self.sharing == "gqa"
            if self.mask == "causal":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.added(length, q), enable_gqa=grouped)
        match self.kernel:
            case "einsum":
                scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
            case "bmm":
                b, h, t, d = q.shape
                flat = torch.bmm(q.reshape(b * h, t, d), k.reshape(b * h, t, d).transpose(1, 2))
                scores = flat.view(b, h, t, t) * scale
            case _:
                scores = (q @ k.transpose(-2, -1)) * scale
        added = self.added(length, q)
        scores = scores if added is None else scores + added
        return scores.softmax(dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.rope:
            q, k = self.rotated(q), self.rotated(k)
        y = self.attended(q, self.shared(k), self.shared(v))
        b, t, d = x.shape
        match self.merge:
            case "einsum":
                return torch.einsum("bhtk,hkd->btd", y, self.w_o)
            case "cat":
                out: Tensor = self.o(torch.cat(y.unbind(1), dim=-1))
            case "view":
                out = self.o(y.transpose(1, 2).contiguous().view(b, t, d))
            case "flatten":
                out = self.o(y.transpose(1, 2).flatten(2))
            case _:
                out = self.o(y.transpose(1, 2).reshape(b, t, self.n_head * self.head_dim))
        return out


class Mlp(nn.Module):
    """D -> F -> D by several kinds, with something done between."""

    OPTIONS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "kind": ("plain", "plain", "gated", "fused gate", "interleaved gate", "matmul", "einsum", "conv", "low rank",
                 "deep", "sequential", "addmm", "heads"),
        "activation": tuple(ACTIVATIONS),
        "between": ("none", "none", "none", "norm", "scale", "mean", "topk", "cumsum", "sort", "flip", "roll", "halves",
                    "max", "logsumexp", "amax gate", "stack", "einops", "by length", "by width", "std"),
        "bias": (True, False),
    }  # fmt: skip

    def __init__(self, sizes: Sizes, kind: str, activation: str, between: str, bias: bool) -> None:
        super().__init__()
        self.kind, self.activation, self.how = kind, ACTIVATIONS[activation], between
        dim, self.hidden = sizes.dim, sizes.hidden
        match kind:
            case "matmul" | "addmm":
                self.w_in, self.w_out = weight(dim, self.hidden), weight(self.hidden, dim)
                self.b_in = nn.Parameter(torch.randn(self.hidden) * 0.1)
            case "einsum":
                self.w_in, self.w_out = weight(2, self.hidden // 2, dim), weight(2, self.hidden // 2, dim)
            case "conv":
                self.up: nn.Module = nn.Conv1d(dim, self.hidden, 1, bias=bias)
                self.down: nn.Module = nn.Conv1d(self.hidden, dim, 1, bias=bias)
            case "heads":
                self.ups = nn.ModuleList(nn.Linear(dim, self.hidden // 2, bias=bias) for _ in range(2))
                self.down = nn.Linear(self.hidden, dim, bias=bias)
            case _:
                width = 2 * self.hidden if kind in ("fused gate", "interleaved gate") else self.hidden
                self.up, self.down = nn.Linear(dim, width, bias=bias), nn.Linear(self.hidden, dim, bias=bias)
        if kind == "gated":
            self.gate = nn.Linear(dim, self.hidden, bias=bias)
        if kind == "deep":
            self.middle = nn.Linear(self.hidden, self.hidden, bias=bias)
        if kind == "low rank":
            self.a, self.b = weight(4, dim), weight(self.hidden, 4)
        if kind == "sequential":
            self.net = nn.Sequential(self.up, nn.Tanh(), self.down, nn.Dropout(0.0))
        if between == "norm":
            self.norm = nn.LayerNorm(self.hidden)
        if between == "scale":
            self.scale = nn.Parameter(torch.rand(self.hidden))

    def between(self, h: Tensor) -> Tensor:
        """h [B, T, F], and something of that shape."""
        match self.how:
            case "norm":
                return self.norm(h)
            case "scale":
                return h * self.scale
            case "mean":
                return h - h.mean(-1, keepdim=True)
            case "std":
                return h / (h.std() + 1.0)
            case "topk":
                values, places = h.topk(4, dim=-1)
                return torch.zeros_like(h).scatter(-1, places, values)
            case "cumsum":
                return h.cumsum(-1) / h.shape[-1]
            case "sort":
                return h.sort(dim=-1).values
            case "flip":
                return h.flip(-1)
            case "roll":
                return h.roll(1, dims=-1)
            case "halves":
                first, second = h.chunk(2, dim=-1)
                return torch.cat([second, first * 0.5], dim=-1)
            case "max":
                return h * (h == h.amax(-1, keepdim=True))
            case "logsumexp":
                return h - h.logsumexp(dim=-1, keepdim=True) / 4
            case "amax gate":
                return h * h.amax(1, keepdim=True).sigmoid()
            case "stack":
                return torch.stack([h, h.tanh()], dim=-1).sum(-1)
            case "einops":
                return h.unflatten(-1, (2, self.hidden // 2)).transpose(-1, -2).flatten(-2)
            case "by length":
                return h * 0.5 if h.shape[1] > 4 else h
            case "by width":
                return h * (0.5 if h.shape[-1] > self.hidden // 2 else 2.0) / h.shape[-1] ** 0.5
        return h

    def widened(self, x: Tensor) -> Tensor:
        """[B, T, F]"""
        match self.kind:
            case "gated":
                return self.activation(self.gate(x)) * self.up(x)
            case "fused gate":
                gate, up = self.up(x).chunk(2, dim=-1)
                return self.activation(gate.clone()) * up
            case "interleaved gate":
                both = self.up(x)
                return self.activation(both[..., ::2]) * both[..., 1::2]
            case "matmul":
                return self.activation(x @ self.w_in + self.b_in)
            case "addmm":
                b, t, d = x.shape
                return self.activation(torch.addmm(self.b_in, x.reshape(-1, d), self.w_in)).view(b, t, -1)
            case "einsum":
                return self.activation(torch.einsum("btd,ghd->btgh", x, self.w_in)).flatten(2)
            case "conv":
                return self.activation(self.up(x.transpose(1, 2))).transpose(1, 2)
            case "low rank":
                return self.activation(self.up(x) + F.linear(F.linear(x, self.a), self.b))
            case "deep":
                return self.activation(self.middle(self.activation(self.up(x))))
            case "heads":
                return self.activation(torch.cat([up(x) for up in self.ups], dim=-1))
        return self.activation(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sequential":
            out: Tensor = self.net(x)
            return out
        h = self.between(self.widened(x))
        match self.kind:
            case "matmul" | "addmm":
                return h @ self.w_out
            case "einsum":
                return torch.einsum("btgh,ghd->btd", h.unflatten(-1, (2, -1)), self.w_out)
            case "conv":
                return self.down(h.transpose(1, 2)).transpose(1, 2)
        return self.down(h)


class Mixer(nn.Module):
    """Mixes tokens without attention."""

    OPTIONS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "kind": ("depthwise", "full conv", "grouped conv", "cumsum", "shift", "softmax", "pool gate", "flip", "ema",
                 "linear attention", "token mixing", "pairs", "max", "scan", "roll", "pad", "fold heads"),
    }  # fmt: skip

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.kind, dim, self.n_head = kind, sizes.dim, sizes.heads
        self.inner, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        groups = {"depthwise": dim, "grouped conv": 4, "full conv": 1}.get(kind)
        if groups is not None:
            self.conv = nn.Conv1d(dim, dim, 3, padding=2, groups=groups)
        if kind == "linear attention":
            self.key = nn.Linear(dim, dim)
        if kind == "token mixing":
            self.mix = nn.Linear(sizes.seq_len, sizes.seq_len)
        if kind == "ema":
            self.decay = nn.Parameter(torch.rand(dim))
        if kind == "scan":
            self.cell = nn.Linear(dim, dim)

    def mixed(self, h: Tensor) -> Tensor:
        """h [B, T, D]"""
        b, t, d = h.shape
        match self.kind:
            case "cumsum":
                return h.cumsum(1) / torch.arange(1, t + 1, device=h.device, dtype=h.dtype)[:, None]
            case "shift":
                return torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
            case "pad":
                return F.pad(h, (0, 0, 1, 0))[:, :t]
            case "softmax":
                return h.softmax(1) * t
            case "pool gate":
                return h * h.mean(1, keepdim=True).sigmoid()
            case "flip":
                return h + h.flip(1)
            case "max":
                return h + h.max(dim=1, keepdim=True).values
            case "roll":
                return h.roll(shifts=(1, 2), dims=(1, 2))
            case "ema":
                steps = torch.arange(t, device=h.device)
                lag = (steps[:, None] - steps[None, :]).clamp(min=0)
                decays = self.decay.sigmoid()[None, None, :] ** lag[..., None]
                return torch.einsum("tsd,bsd->btd", decays * (steps[:, None] >= steps[None, :])[..., None], h)
            case "linear attention":
                keys = self.key(h).softmax(dim=-1).view(b, t, self.n_head, -1)
                values = h.view(b, t, self.n_head, -1)
                state = torch.einsum("bthk,bthv->bhkv", keys, values)
                return torch.einsum("bthk,bhkv->bthv", keys, state).reshape(b, t, d)
            case "token mixing":
                return self.mix(h.transpose(1, 2)).transpose(1, 2)
            case "pairs":
                return h.reshape(b, -1, 2, d).flip(2).reshape(b, t, d)
            case "scan":
                state, states = torch.zeros_like(h[:, 0]), []
                for step in range(t):
                    state = torch.tanh(self.cell(state) + h[:, step])
                    states.append(state)
                return torch.stack(states, dim=1)
            case "fold heads":
                folded = h.view(b, t, self.n_head, d // self.n_head).transpose(1, 2).reshape(b * self.n_head, t, -1)
                return folded.softmax(1).view(b, self.n_head, t, -1).transpose(1, 2).reshape(b, t, d)
        return self.conv(h.transpose(1, 2))[..., :t].transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mixed(self.inner(x)))


class Experts(nn.Module):
    """A router and experts, all of which run."""

    OPTIONS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "style": ("stacked", "modules", "gathered", "soft"),
        "k": (1, 2),
        "renormalized": (True, False),
    }
    NUM_EXPERTS = 4

    def __init__(self, sizes: Sizes, style: str, k: int, renormalized: bool) -> None:
        super().__init__()
        self.style, self.k, self.renormalized, dim = style, k, renormalized, sizes.dim
        self.router = nn.Linear(dim, self.NUM_EXPERTS, bias=False)
        if style == "modules":
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(self.NUM_EXPERTS)
            )
        else:
            self.w_in, self.w_out = weight(self.NUM_EXPERTS, dim, 32), weight(self.NUM_EXPERTS, 32, dim)

    def gates(self, x: Tensor) -> Tensor:
        """[B, T, E], zero for all but k."""
        scores = self.router(x).softmax(-1)
        if self.style == "soft":
            return scores
        values, places = scores.topk(self.k, dim=-1)
        values = values / values.sum(-1, keepdim=True) if self.renormalized else values
        return torch.zeros_like(scores).scatter(-1, places, values)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates(x)
        if self.style == "modules":
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out = out + gates[..., number : number + 1] * expert(x)
            return out
        if self.style == "gathered":
            tokens = x.reshape(-1, x.shape[-1])
            h = torch.bmm(tokens.expand(self.NUM_EXPERTS, -1, -1), self.w_in).relu()
            y = torch.bmm(h, self.w_out).transpose(0, 1)
            return (y * gates.reshape(-1, self.NUM_EXPERTS, 1)).sum(1).view_as(x)
        h = torch.einsum("btd,edf->btef", x, self.w_in).relu()
        return torch.einsum("btef,efd,bte->btd", h, self.w_out, gates)


BLOCKS: Mapping[str, type[nn.Module]] = {"attention": Attention, "mlp": Mlp, "mixer": Mixer, "experts": Experts}

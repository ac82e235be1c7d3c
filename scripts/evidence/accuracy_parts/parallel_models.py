"""Small models out of the blocks of a published run's model, whose differences in price are those of single blocks.

A model is an embedding, some layers of one kind, and a head where it is asked for. Layers are attention alone, experts
alone, or attention and a dense feed-forward together. Gated layers have RMSNorm, others LayerNorm.
Attention runs on tensor-parallel ranks and experts on expert-parallel ones, so that each half of a layer with experts
is priced on its own ranks.

Elementwise ops are fused by the pricer's model of torch.compile, as Megatron's kernels fuse them. An unfused attention
is two batched products and a softmax that reads and writes all scores once; its mask is inside of that kernel, and
costs nothing.

Shapes: B batch, T sequence, D model, F hidden, H heads, K heads of keys and values, E head size, V vocabulary, N rows.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Kind(StrEnum):
    """What a layer of a small model is."""

    GPT = "attention and feed-forward"
    ATTENTION = "attention"
    WINDOWED = "attention in a window"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model. Without experts their sizes are 0; without a window all layers attend to everything."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq_len: int
    ffn: int = 0
    is_gated: bool = False
    has_biases: bool = False
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    #: tokens that a token of every second layer attends to, itself included; 0: all before it
    window: int = 0
    has_flash_attention: bool = True


class Attention(nn.Module):
    """Causal attention, fused or not, to all before a token or in a window."""

    def __init__(self, shape: Shape, *, window: int = 0) -> None:
        super().__init__()
        self.head_dim, self.window, self.is_flash = shape.head_dim, window, shape.has_flash_attention
        width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        linear = partial(nn.Linear, bias=shape.has_biases)
        self.q_proj, self.o_proj = linear(shape.hidden, width), linear(width, shape.hidden)
        self.k_proj, self.v_proj = linear(shape.hidden, narrow), linear(shape.hidden, narrow)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        query, key, value = (
            weight(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.window:
            found = self._in_window(query, key, value)
        elif self.is_flash:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            scores = query @ key.transpose(2, 3) * self.head_dim**-0.5
            found = scores.softmax(-1) @ value
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _in_window(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of blocks as long as the window to themselves, [B, H, T, E]: causal, a token of a block attends to
        half of it, and in a window of the same length to all: twice is what a kernel in a window runs."""
        folded = [part.unflatten(2, (-1, self.window)).transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
        found = F.scaled_dot_product_attention(*folded, enable_gqa=True)
        return found.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)), D -> F -> D."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=shape.has_biases)
        self.gate_proj = linear(shape.hidden, shape.ffn) if shape.is_gated else None
        self.up_proj, self.down_proj = linear(shape.hidden, shape.ffn), linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        wide = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(F.gelu(wide, approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(x)) * wide)


class Router(nn.Module):
    """The experts of each row, and their weights, which add up to 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k, self.weight = shape.top_k, nn.Parameter(torch.empty(shape.experts, shape.hidden))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [N, D] -> experts [N, top_k], weights [N, top_k]."""
        likely, chosen = F.linear(rows, self.weight).softmax(-1, dtype=torch.float).topk(self.top_k, dim=-1)
        return chosen, (likely / likely.sum(-1, keepdim=True)).to(rows.dtype)


class Experts(nn.Module):
    """Gated experts, whose products run in groups of rows.

    A row's weight is multiplied beside its activation, before the second product, as Megatron-Core's kernels of the
    activation do (fusions/fused_bias_swiglu.py, weighted_bias_swiglu_impl)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts = shape.experts
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.moe_ffn, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.moe_ffn))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """rows [N, D], experts [N, top_k], weights [N, top_k] -> [N, D]."""
        top_k = chosen.shape[-1]
        experts, order = chosen.flatten().sort()
        bins = experts.float() if experts.device.type == "cpu" else experts.int()
        ends = bins.histc(self.num_experts, min=0, max=self.num_experts - 1).cumsum(0, dtype=torch.int32)
        gate, up = self._product(rows[order // top_k], self.gate_up_proj, ends).chunk(2, dim=-1)
        narrow = F.silu(gate) * up * weights.flatten()[order].unsqueeze(-1)
        found = self._product(narrow, self.down_proj, ends)
        return found[order.argsort()].unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)


class SparseFeedForward(nn.Module):
    """A router and its experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.experts = Router(shape), Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        rows = x.flatten(0, 1)
        return self.experts(rows, *self.gate(rows)).view_as(x)


class Layer(nn.Module):
    """Blocks, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, kind: Kind) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.is_gated else nn.LayerNorm
        self.has_attention, self.has_rest = kind is not Kind.EXPERTS, kind in (Kind.GPT, Kind.EXPERTS)
        if self.has_attention:
            window = shape.window if kind is Kind.WINDOWED else 0
            self.attention_norm, self.attention = norm(shape.hidden), Attention(shape, window=window)
        if self.has_rest:
            self.ffn_norm = norm(shape.hidden)
            self.feed_forward = SparseFeedForward(shape) if kind is Kind.EXPERTS else FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        if self.has_attention:
            x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x)) if self.has_rest else x


class Small(nn.Module):
    """tokens [B, T] -> logits [B, T, V], or the last layer's output [B, T, D] without a head."""

    def __init__(self, shape: Shape, kind: Kind, *, layers: int, has_head: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, kind) for _ in range(layers))
        self.norm = nn.LayerNorm(shape.hidden) if has_head else None
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if has_head else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, V] or [B, T, D]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.norm(x))

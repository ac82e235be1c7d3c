"""Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Small by default, `llama.py:llama3_8b` in full.

Shapes: B batch, T sequence, D model, F hidden, H query heads, K key and value heads, E head size, V vocabulary.
Views take head counts as -1: a rank of a tensor-parallel group holds some of the heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of a Llama; the defaults train on a CPU."""

    num_layers: int = 4
    model_dim: int = 64
    hidden_dim: int = 192
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 256
    max_seq_len: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.model_dim // self.num_heads


def rotary_tables(head_dim: int, max_seq_len: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, E / 2] of position * theta^(-2i / E). [Su et al. 2021]"""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + E / 2) of x [B, H, T, E] by its position's angle, cos and sin [T, E / 2]."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)  # the tables may be wider than x


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * E] -> [B, H, T, E]."""
    return x.view(x.shape[0], x.shape[1], -1, head_dim).transpose(1, 2)


class Attention(nn.Module):
    """Causal attention in which H / K query heads share a key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.k_proj = nn.Linear(config.model_dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.model_dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.model_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        query = rotate(split_heads(self.q_proj(x), self.head_dim), cos, sin)
        key = rotate(split_heads(self.k_proj(x), self.head_dim), cos, sin)
        value = split_heads(self.v_proj(x), self.head_dim)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        merged = heads.transpose(1, 2)
        return self.o_proj(merged.reshape(merged.shape[0], merged.shape[1], -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), D -> F -> D."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.model_dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.model_dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.model_dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.model_dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.model_dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.head_dim, config.max_seq_len, config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.apply(init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each of `tokens`."""
        seq_len = tokens.shape[1]
        cos, sin = self.rotary_cos[:seq_len], self.rotary_sin[:seq_len]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, from torch's global generator: seed it before building."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def build_model() -> Llama:
    """The small one."""
    return Llama(Config())


def llama_cpu() -> Llama:
    """3.3 M parameters: wide enough that sharding the layers pays on the ranks of a CPU."""
    return Llama(Config(model_dim=256, hidden_dim=768))


def llama3_8b() -> Llama:
    """Llama 3 8B; build it under torch.device("meta") to plan. [Grattafiori et al. 2024, table 3]"""
    return Llama(
        Config(
            num_layers=32,
            model_dim=4096,
            hidden_dim=14336,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=128_256,
            max_seq_len=8192,
            rope_theta=500_000.0,
        )
    )


def llama3_70b() -> Llama:
    """Llama 3 70B; build it under torch.device("meta") to plan. [Grattafiori et al. 2024, table 3]"""
    return Llama(
        Config(
            num_layers=80,
            model_dim=8192,
            hidden_dim=28672,
            num_heads=64,
            num_kv_heads=8,
            vocab_size=128_256,
            max_seq_len=8192,
            rope_theta=500_000.0,
        )
    )


def llama3_405b() -> Llama:
    """Llama 3 405B; build it under torch.device("meta") to plan. [Grattafiori et al. 2024, table 3]"""
    return Llama(
        Config(
            num_layers=126,
            model_dim=16_384,
            hidden_dim=53_248,
            num_heads=128,
            num_kv_heads=8,
            vocab_size=128_256,
            max_seq_len=8192,
            rope_theta=500_000.0,
        )
    )


def example_inputs(batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Random bytes as tokens [B, T], and as targets [B, T] the byte after each; forward takes `tokens` alone."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (batch, seq_len + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token, in nats."""
    return tpplan.cross_entropy(outputs, inputs["targets"])

"""GPT: LayerNorm, learned positions, attention with biases, GELU, dropout, an untied head.

Shapes: B batch, T sequence, D model, F hidden, H heads, E head size, V vocabulary.
Views take head counts as -1: a rank of a tensor-parallel group holds some of the heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of a GPT; the defaults train on a CPU."""

    num_layers: int = 2
    model_dim: int = 64
    hidden_dim: int = 256
    num_heads: int = 4
    vocab_size: int = 256
    max_seq_len: int = 512
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.model_dim // self.num_heads


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * E] -> [B, H, T, E]."""
    return x.view(x.shape[0], x.shape[1], -1, head_dim).transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.model_dim, config.model_dim)
        self.k_proj = nn.Linear(config.model_dim, config.model_dim)
        self.v_proj = nn.Linear(config.model_dim, config.model_dim)
        self.o_proj = nn.Linear(config.model_dim, config.model_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        query = split_heads(self.q_proj(x), self.head_dim)
        key = split_heads(self.k_proj(x), self.head_dim)
        value = split_heads(self.v_proj(x), self.head_dim)
        merged = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.o_proj(merged.reshape(merged.shape[0], merged.shape[1], -1))


class FeedForward(nn.Module):
    """down(gelu(up(x))), D -> F -> D."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.model_dim, config.hidden_dim)
        self.down_proj = nn.Linear(config.hidden_dim, config.model_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.model_dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.model_dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.model_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim)
        self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        self.apply(init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each of `tokens`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases, from torch's global generator: seed it before building."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model() -> GPT:
    """The small one."""
    return GPT(Config())


def example_inputs(batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Random bytes as tokens [B, T], and as targets [B, T] the byte after each; forward takes `tokens` alone."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (batch, seq_len + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token, in nats."""
    return tpplan.cross_entropy(outputs, inputs["targets"])

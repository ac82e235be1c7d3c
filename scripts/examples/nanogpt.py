"""A GPT as nanoGPT and its descendants write it: nothing here knows of ranks.

One projection makes queries, keys and values; widths and head counts are written into views and splits; the head is the
embedding; the loss is computed in forward, over a flattened vocabulary.
Shapes: B batch, T sequence, D model, H heads, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes; the defaults train on a CPU. dropout in attention and on the residual stream."""

    num_layers: int = 2
    model_dim: int = 64
    num_heads: int = 4
    vocab_size: int = 256
    block_size: int = 512
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    """Fused projection, heads by view."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.model_dim, 3 * config.model_dim)
        self.c_proj = nn.Linear(config.model_dim, config.model_dim)
        self.num_heads, self.model_dim = config.num_heads, config.model_dim
        self.dropout = config.dropout
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        b, t, d = x.size()
        q, k, v = self.c_attn(x).split(self.model_dim, dim=2)
        q = q.view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2)
        k = k.view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2)
        v = v.view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, d)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """D -> 4 D -> D."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.model_dim, 4 * config.model_dim)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.model_dim, config.model_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention and MLP behind norms, beside the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.model_dim)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.model_dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """tokens [B, T], targets [B, T] -> (logits [B, T, V], mean loss in nats)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.model_dim),
                "wpe": nn.Embedding(config.block_size, config.model_dim),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.num_layers)),
                "ln_f": nn.LayerNorm(config.model_dim),
            }
        )
        self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.apply(init_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the loss of `targets`; -1 is a target that counts for nothing."""
        positions = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.transformer["drop"](self.transformer["wte"](tokens) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


#: logits are not read where the loss is: they may stay sharded
unused_outputs = ("0",)


def init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases, from torch's global generator: seed it before building."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model() -> NanoGPT:
    """The small one."""
    return NanoGPT(Config())


def gpt2_xl() -> NanoGPT:
    """GPT-2 XL's sizes: 1.6 B parameters, its vocabulary padded to a multiple of 64."""
    return NanoGPT(Config(num_layers=48, model_dim=1600, num_heads=25, vocab_size=50304, block_size=1024))


def gpt3_13b() -> NanoGPT:
    """GPT-3 13B's sizes [Brown et al. 2020, table 2.1]."""
    return NanoGPT(Config(num_layers=40, model_dim=5120, num_heads=40, vocab_size=50304, block_size=2048))


def example_inputs(batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Random bytes as tokens [B, T], and as targets [B, T] the byte after each."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (batch, seq_len + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def loss(outputs: tuple[Tensor, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """The model's own."""
    return outputs[1]

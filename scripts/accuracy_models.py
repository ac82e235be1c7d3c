"""The models of published training runs, from the sizes that a table gives: who is closest by parameters is meant.

MPT is written as llm-foundry v0.0.4 ran it: its flash attention takes padding out of queries, keys and values first and
puts it back in behind, whether there is any or not, which costs as much memory traffic as the rest of the layer.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from testbed_models import megatron_pins
from torch import Tensor, nn

import tpplan

sys.path.append(str(Path(__file__).parent / "examples"))

from llama import Config, Llama

#: of a table's parameters and the nearest architecture's, how far they may be apart
CLOSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a table says of a model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    num_parameters: float


class MptAttention(nn.Module):
    """Causal attention on a fused projection, padding out and in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        batch, length, dim = x.shape
        rows = torch.arange(batch * length, device=x.device)
        query, key, value = (
            part.reshape(batch * length, dim)[rows].view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.Wqkv(x).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = y.transpose(1, 2).reshape(batch * length, dim)
        return self.out_proj(torch.zeros_like(y).index_put((rows,), y).view(batch, length, dim))


class MptBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.attn = MptAttention(sizes.hidden, sizes.heads)
        self.up_proj, self.down_proj = nn.Linear(sizes.hidden, sizes.ffn), nn.Linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.attn(self.norm_1(x))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class Mpt(nn.Module):
    """tokens [B, T] -> logits [B, T, V]; learned positions, and a head that is the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(sizes.seq_len, sizes.hidden)
        self.blocks = nn.ModuleList(MptBlock(sizes) for _ in range(sizes.layers))
        self.norm_f = nn.LayerNorm(sizes.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)


def _llama(sizes: Sizes) -> nn.Module:
    return Llama(
        Config(
            num_layers=sizes.layers,
            model_dim=sizes.hidden,
            hidden_dim=sizes.ffn,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            vocab_size=sizes.vocab,
            max_seq_len=sizes.seq_len,
        )
    )


ARCHITECTURES: dict[str, Callable[[Sizes], nn.Module]] = {"MPT": Mpt, "Llama": _llama}


#: Megatron's layouts with sequence parallelism, as pins
MEGATRON_PINS = {
    "MPT": {
        "blocks.*.attn": "megatron",
        "blocks.*.up_proj": "columns",
        "blocks.*.down_proj": "rows",
        "blocks.*.norm_1": "sequence",
        "blocks.*.norm_2": "sequence",
        "norm_f": "sequence",
    },
    "Llama": megatron_pins("sequence"),
}


def architecture(sizes: Sizes) -> Callable[[], nn.Module]:
    """A builder of the architecture with as many parameters as the table says. Raises ValueError if none is near."""
    name = architecture_name(sizes)
    return lambda: ARCHITECTURES[name](sizes)


def architecture_name(sizes: Sizes) -> str:
    """What builder architecture returns. Raises ValueError as it does."""
    counts = {name: _count(build, sizes) for name, build in ARCHITECTURES.items()}
    name = min(counts, key=lambda name: abs(counts[name] - sizes.num_parameters))
    if abs(counts[name] / sizes.num_parameters - 1) > CLOSE:
        shown = ", ".join(f"{name} {count / 1e9:.3f}e9" for name, count in counts.items())
        raise ValueError(f"{sizes.num_parameters / 1e9:.3f}e9 parameters in the table; of these sizes: {shown}")
    return name


def _count(build: Callable[[Sizes], nn.Module], sizes: Sizes) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(sizes).parameters())


def example_inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    """Tokens and targets, both [B, T], on the meta device."""
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device="meta")
    return {"tokens": tokens, "targets": tokens.clone()}


def loss(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The mean cross entropy, in float32 as all of these runs have it."""
    return tpplan.cross_entropy(logits.float(), inputs["targets"])

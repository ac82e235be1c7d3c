"""The models of published training runs, from the sizes that a table gives: who is closest by parameters is meant.

MPT is written as llm-foundry v0.0.4 ran it: its flash attention takes padding out of queries, keys and values first and
puts it back in behind, whether there is any or not, which costs as much memory traffic as the rest of the layer. Its
loss is one kernel each way on bfloat16 logits, of which it keeps nothing but the logits and a sum per row
[llm-foundry v0.0.4, models/mpt/modeling_mpt.py: loss_fn is fused_crossentropy unless told; flash-attention v1.0.9,
csrc/xentropy].

Llama, with a head of its own or tied, is the example's, but as torchtitan runs it where a run is torchtitan's: norms
step by step in float32, rotations of complex numbers, keys and values repeated for every head [torchtitan,
models/norms.py and models/llama/model.py].
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron_pins import megatron_pins
from torch import Tensor, nn

import tpplan

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llama import Attention, Config, Llama

#: (logits [B, T, V], inputs) -> the mean over tokens
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]

#: of a table's parameters and the nearest architecture's, how far they may be apart, and from where on that is said
CLOSE, SAID = 0.1, 0.02


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
    """tokens [B, T] -> logits [B, T, V]; learned positions, and a head that is the embedding unless told otherwise."""

    def __init__(self, sizes: Sizes, *, has_own_head: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(sizes.seq_len, sizes.hidden)
        self.blocks = nn.ModuleList(MptBlock(sizes) for _ in range(sizes.layers))
        self.norm_f = nn.LayerNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False) if has_own_head else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), (self.lm_head or self.wte).weight)


@torch.library.custom_op("accuracy::fused_cross_entropy", mutates_args=())
def fused_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V], targets [N] -> losses [N] and logarithms of sums of exponentials [N], in float32."""
    sums = logits.float().logsumexp(1)
    return sums - logits.gather(1, targets[:, None])[:, 0].float(), sums


@torch.library.custom_op("accuracy::fused_cross_entropy_backward", mutates_args=())
def fused_cross_entropy_backward(gradient: Tensor, logits: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
    """The gradient of logits [N, V] from that of the losses [N]."""
    shares = (logits.float() - sums[:, None]).exp()
    shares[torch.arange(len(targets), device=targets.device), targets] -= 1
    return (shares * gradient[:, None]).to(logits.dtype)


@fused_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(targets.shape, dtype=torch.float32), logits.new_empty(targets.shape, dtype=torch.float32)


@fused_cross_entropy_backward.register_fake
def _(gradient: Tensor, logits: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, gradient: Tensor, _sums: Tensor | None) -> tuple[Tensor, None]:
    return fused_cross_entropy_backward(gradient, *ctx.saved_tensors), None


fused_cross_entropy.register_autograd(_backward, setup_context=_keep)


def _fused_loss(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return fused_cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())[0].mean()


def _loss(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The mean cross entropy in float32, as torchtitan and others after it have it, by torch's kernels."""
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs["targets"].flatten())


def _loss_as_made(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The mean cross entropy in the dtype of logits."""
    return F.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())


def _sharded_loss_as_made(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The same of logits that ranks have slices of."""
    return tpplan.cross_entropy(logits, inputs["targets"])


def _sharded_loss(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The same of logits that ranks have slices of."""
    return tpplan.cross_entropy(logits.float(), inputs["targets"])


def _config(sizes: Sizes) -> Config:
    return Config(
        num_layers=sizes.layers,
        model_dim=sizes.hidden,
        hidden_dim=sizes.ffn,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
        max_seq_len=sizes.seq_len,
    )


def _llama(sizes: Sizes) -> nn.Module:
    return Llama(_config(sizes))


class StepwiseNorm(nn.Module):
    """RMSNorm op by op in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbours of x [B, T, H, E] as complex numbers in float32; cos and sin [T, E / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos, sin)[None, :, None]
    return torch.view_as_real(turned).flatten(3).to(x.dtype)


class RepeatingAttention(Attention):
    """Rotations of complex numbers, and keys and values repeated for the query heads that share them."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        query, key, value = (
            weight(x).unflatten(-1, (-1, self.head_dim)) for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate_pairs(query, cos, sin), _rotate_pairs(key, cos, sin)
        shared = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(shared, dim=2) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


def _torchtitan(sizes: Sizes) -> nn.Module:
    config, model = _config(sizes), Llama(_config(sizes))
    for layer in model.layers:
        layer.attention = RepeatingAttention(config)
        layer.attention_norm, layer.ffn_norm = (StepwiseNorm(config.model_dim, config.norm_eps) for _ in range(2))
    model.norm = StepwiseNorm(config.model_dim, config.norm_eps)
    return model


def _tied(build: Callable[[Sizes], nn.Module]) -> Callable[[Sizes], nn.Module]:
    """The same Llama with a head that is the embedding."""

    def build_tied(sizes: Sizes) -> nn.Module:
        model = build(sizes)
        model.lm_head.weight = model.tok_embeddings.weight
        return model

    return build_tied


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model is built, its loss on whole logits and on sharded ones, and Megatron's layouts with sequence
    parallelism, as pins."""

    build: Callable[[Sizes], nn.Module]
    loss: Loss
    sharded_loss: Loss
    pins: Mapping[str, str]

    def num_parameters(self, sizes: Sizes) -> int:
        """Of the model with these sizes."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(sizes).parameters())

    def relative_excess(self, sizes: Sizes) -> float:
        """How many more parameters it has than a table says, as a part of these; 0 where that is next to none."""
        excess = self.num_parameters(sizes) / sizes.num_parameters - 1
        return excess if abs(excess) > SAID else 0.0


MPT_PINS = {
    "blocks.*.attn": "megatron",
    "blocks.*.up_proj": "columns",
    "blocks.*.down_proj": "rows",
    "blocks.*.norm_1": "sequence",
    "blocks.*.norm_2": "sequence",
    "norm_f": "sequence",
}
LLAMA = Architecture(_llama, _loss, _sharded_loss, megatron_pins("sequence"))
MPT = Architecture(Mpt, _fused_loss, _sharded_loss, MPT_PINS)
TIED_LLAMA = "Llama, tied"
ARCHITECTURES = {
    "MPT": MPT,
    "MPT, untied": replace(MPT, build=partial(Mpt, has_own_head=True)),
    "Llama": LLAMA,
    TIED_LLAMA: replace(LLAMA, build=_tied(_llama)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is known of the code of published runs."""

    #: how its Llama differs from the plain one; None: it does not
    llama: Architecture | None = None
    #: FlashAttention 1, about half as fast as the second version [FlashAttention-2, arXiv:2307.08691: "around 2x"],
    #: which profiles hold
    has_first_flash_attention: bool = False
    #: under tensor parallelism the head's output is gathered, and the loss made of all of it on every rank
    gathers_logits: bool = False
    #: a variable of the training loop holds a micro-batch's logits until the next one has its own
    keeps_logits: bool = False
    #: FSDP reduces gradients once a step, and they are whole until then
    whole_gradients: bool = False
    #: gradients are reduced in float32, also where parameters rest in bfloat16
    reduces_in_float32: bool = False
    #: fully_shard wraps a model on a single data-parallel rank too
    wraps_one_rank: bool = False
    #: the loss is made of logits in the dtype that they have, not in float32
    loss_as_made: bool = False
    optimizer: str = "adamw"


UNKNOWN = Software()
#: how a Llama is written, by the word in a table of versions
LLAMAS: Mapping[str, Architecture | None] = {
    "plain": None,
    "torchtitan": replace(LLAMA, build=_torchtitan),
    "replicated embedding": replace(LLAMA, pins=LLAMA.pins | {"tok_embeddings": "replicated"}),
}


def architecture(sizes: Sizes, ran: Software = UNKNOWN) -> Architecture:
    """The architecture with as many parameters as the table says. Raises ValueError if none is near."""
    counts = {name: entry.num_parameters(sizes) for name, entry in ARCHITECTURES.items()}
    name = min(counts, key=lambda name: abs(counts[name] - sizes.num_parameters))
    if abs(counts[name] / sizes.num_parameters - 1) > CLOSE:
        shown = ", ".join(f"{name} {count / 1e9:.3f}e9" for name, count in counts.items())
        raise ValueError(f"{sizes.num_parameters / 1e9:.3f}e9 parameters in the table; of these sizes: {shown}")
    if not name.startswith("Llama"):
        return ARCHITECTURES[name]
    llama = ran.llama or LLAMA
    if name == TIED_LLAMA:
        llama = replace(llama, build=_tied(llama.build)) if ran.llama is not None else ARCHITECTURES[name]
    return replace(llama, loss=_loss_as_made, sharded_loss=_sharded_loss_as_made) if ran.loss_as_made else llama


def example_inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    """Tokens and targets, both [B, T], on the meta device."""
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device="meta")
    return {"tokens": tokens, "targets": tokens.clone()}

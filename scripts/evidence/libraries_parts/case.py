"""What a model file says of a model, as data: the arguments of tpplan.solve, and how many heads its attention has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tpplan
from tpplan.torch_internals import pytree

Inputs = Mapping[str, Any]

VOCABULARY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model. `heads`: the least number of heads (of keys and values) of any attention; None where it has none.
    `tolerance`: the error that its own code makes by rounding; None where that is what float32 rounds."""

    build_model: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Inputs]
    loss: Callable[[Any, Inputs], Tensor]
    unused_outputs: tuple[str, ...] = ()
    heads: int | None = None
    tolerance: float | None = None
    batch: int = 1
    seq_len: int = 16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 0, below: int = VOCABULARY) -> Tensor:
    """Ids, the same at every call."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def images(name: str, size: int, channels: int = 3) -> Callable[[int, int], Inputs]:
    """example_inputs of a model of square images, whose argument has this name."""
    return lambda batch, seq_len: {name: drawn(batch, channels, size, size)}


def text(name: str) -> Callable[[int, int], Inputs]:
    """example_inputs of a language model: ids under this name, and as targets others."""
    return lambda batch, seq_len: {name: tokens(batch, seq_len), "targets": tokens(batch, seq_len, seed=1)}


def next_token(outputs: Any, inputs: Inputs) -> Tensor:
    """Cross entropy of the targets in nats, of logits [B, T, V]."""
    return tpplan.cross_entropy(outputs, inputs["targets"])


def squares(outputs: Any, inputs: Inputs) -> Tensor:
    """A loss for any output: of each tensor with a gradient the mean of (x - target)^2, added up. The target differs
    along the last dim, so that elements in the wrong places show."""
    found = [
        leaf if leaf.dim() else leaf[None]
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return sum(
        ((leaf - torch.arange(leaf.shape[-1], device=leaf.device).cos()).square().mean() for leaf in found),
        start=torch.zeros((), device=found[0].device),
    )

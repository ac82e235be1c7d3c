"""A vision transformer: patches, learned positions, pre-norm blocks, the mean over patches, a linear head.

Shapes: B batch, T patches, D model, F hidden, H heads, E head size, C classes.
Views take head counts as -1: a rank of a tensor-parallel group holds some of the heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of a vision transformer; the defaults train on a CPU."""

    num_layers: int = 2
    model_dim: int = 64
    hidden_dim: int = 256
    num_heads: int = 4
    num_classes: int = 16
    image_size: int = 32
    patch_size: int = 8
    num_channels: int = 3

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.model_dim // self.num_heads

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


def patches_of(images: Tensor, patch_size: int) -> Tensor:
    """images [B, channels, height, width] -> [B, T, channels * patch_size^2], patches in reading order."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    grid = images.reshape(batch, channels, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch, rows * columns, channels * patch_size**2)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * E] -> [B, H, T, E]."""
    return x.view(x.shape[0], x.shape[1], -1, head_dim).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention of every patch to every patch."""

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
        merged = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
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

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class ViT(nn.Module):
    """images [B, channels, height, width] -> logits [B, C]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.model_dim)
        self.positions = nn.Parameter(torch.empty(config.num_patches, config.model_dim))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim)
        self.head = nn.Linear(config.model_dim, config.num_classes)
        nn.init.normal_(self.positions, std=0.02)
        self.apply(init_weights)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of each class."""
        x = self.patch_embedding(patches_of(images, self.patch_size)) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases, from torch's global generator: seed it before building."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def build_model() -> ViT:
    """The small one."""
    return ViT(Config())


def example_inputs(batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """A fixed picture per class with noise: images [B, channels, height, width] of the small model, and as targets [B]
    the class. The sequence is the patches: seq_len is ignored."""
    config = Config()
    shape = (config.num_channels, config.image_size, config.image_size)
    pictures = torch.randn(config.num_classes, *shape, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(config.num_classes, (batch,), generator=generator)
    images = pictures[targets] + torch.randn(batch, *shape, generator=generator)
    return {"images": images, "targets": targets}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the class, in nats."""
    return tpplan.cross_entropy(outputs, inputs["targets"])

"""A classifier of vectors: equal blocks of two linear layers with ReLU, and a head.

Shapes: B batch, D model, F hidden, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan

MODEL_DIM = 64
HIDDEN_DIM = 256
NUM_BLOCKS = 4
NUM_CLASSES = 10


class Block(nn.Module):
    """relu(down(relu(up(x)))), D -> F -> D."""

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(model_dim, hidden_dim)
        self.down_proj = nn.Linear(hidden_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> [B, D]."""
        return F.relu(self.down_proj(F.relu(self.up_proj(x))))


class MLP(nn.Module):
    """features [B, D] -> logits [B, C]."""

    def __init__(self, model_dim: int, hidden_dim: int, num_blocks: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(model_dim, hidden_dim) for _ in range(num_blocks)))
        self.head = nn.Linear(model_dim, num_classes)
        self.apply(init_weights)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of each class."""
        return self.head(self.layers(features))


def init_weights(module: nn.Module) -> None:
    """Normal weights that keep a ReLU's variance, zero biases, from torch's global generator. [He et al. 2015]"""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


def build_model() -> MLP:
    """Four blocks of 64 -> 256 -> 64 and ten classes."""
    return MLP(MODEL_DIM, HIDDEN_DIM, NUM_BLOCKS, NUM_CLASSES)


def example_inputs(batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Ten fixed clusters with noise: features [B, D], and as targets [B] the cluster. There is no sequence: seq_len is
    ignored."""
    centers = torch.randn(NUM_CLASSES, MODEL_DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(NUM_CLASSES, (batch,), generator=generator)
    features = centers[targets] + torch.randn(batch, MODEL_DIM, generator=generator)
    return {"features": features, "targets": targets}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the class, in nats."""
    return tpplan.cross_entropy(outputs, inputs["targets"])

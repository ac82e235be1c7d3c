"""Small models to cut into stages, their inputs and losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Layer(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (own(y).unflatten(-1, (4, -1)).transpose(1, 2) for own in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """A language model whose root makes the mask, and scales the embedding in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * WIDTH**0.5
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Deep(Stack):
    """A model of twice as many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Layer() for _ in range(4))


class Tied(Stack):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


class Checkpointed(Stack):
    """A model that runs its layers again in backward by reentrant checkpoints."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Skipping(Stack):
    """A model whose last layers read what the first one gave."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.layers[0](self.embedding(tokens))
        for layer in self.layers[1:]:
            x = layer(x) + first
        logits: Tensor = self.head(self.norm(x))
        return logits


class Vision(nn.Module):
    """A vision transformer: a convolution to patches, a class token and positions that the root holds."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.blocks(x)[:, 0])
        return logits


def text(batch: int, length: int) -> dict[str, Tensor]:
    drawn = torch.randint(VOCABULARY, (batch, length + 1))
    return {"tokens": drawn[:, :-1], "input_ids": drawn[:, :-1], "targets": drawn[:, 1:]}


def loss(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs.logits, inputs["targets"])


def labelled(batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def own_loss(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = outputs.loss
    return found


def images(batch: int) -> dict[str, Tensor]:
    return {"pixels": torch.randn(batch, 3, 16, 16), "labels": torch.randint(10, (batch,))}


def vision_loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "use_cache": False,
}


def hugging_face(name: str) -> Callable[[], nn.Module]:
    return partial(_hugging_face, name)


def _hugging_face(name: str) -> nn.Module:
    import transformers

    own = {"head_dim": WIDTH // 4} if name == "Qwen3" else {}
    sizes = {key: value for key, value in SIZES.items() if not (name == "GPTNeoX" and key == "num_key_value_heads")}
    config = getattr(transformers, f"{name}Config")(**sizes, **own)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def with_own_loss() -> nn.Module:
    """A model that computes its loss from labels among its inputs."""
    return _hugging_face("Llama")

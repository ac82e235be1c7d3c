"""Small models with experts: transformers' architectures, and a module written here."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan

VOCAB, LENGTH = 64, 12


class Experts(nn.Module):
    """Feed-forward experts on sorted rows, as grouped products take them, here by one product with weights picked."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        chosen = F.one_hot(index, self.experts).to(x.dtype)  # [T, K, E]
        hidden = F.silu(torch.einsum("td,ehd->teh", x, self.up))
        each = torch.einsum("teh,edh->ted", hidden, self.down)
        return torch.einsum("ted,tke,tk->td", each, chosen, weight)


class Layer(nn.Module):
    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.experts = Experts(experts, dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight, index = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, index, weight / weight.sum(-1, keepdim=True)).view_as(x)


class OwnMoe(nn.Module):
    """A language model of layers of experts."""

    def __init__(self, experts: int = 4, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Layer(experts, dim) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hugging_face(name: str, implementation: str = "grouped_mm", num_experts: int = 4) -> Callable[[], nn.Module]:
    """A builder of a tiny transformers model of a class such as "Qwen3Moe"."""
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), num_experts),
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "use_cache": False, "shared_expert_intermediate_size": 32,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 64,
    }  # fmt: skip
    config_class: Any = getattr(transformers, f"{name}Config")
    known = vars(config_class())
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = 4
    config = config_class(
        **{key: value for key, value in sizes.items() if key in known or hasattr(config_class(), key)}
    )

    def build() -> nn.Module:
        model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
        model.set_experts_implementation(implementation)
        return model

    return build


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    """Random tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("input_ids", "targets")}


def loss(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy."""
    return tpplan.cross_entropy(getattr(outputs, "logits", outputs), inputs["targets"])


#: what a model file defines
build_model, example_inputs = OwnMoe, text

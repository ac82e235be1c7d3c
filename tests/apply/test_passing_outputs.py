"""Outputs in containers that the loss does not read, as a cache of keys and values: they stay divided, and say so."""

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.layout import S
from tpplan.plan.plan import Plan

DIM, VOCAB, HEADS, LENGTH = 32, 64, 4, 7
Cache = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Attention that returns its keys and values [B, H, T, D] beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        layers = (self.to_q, self.to_k, self.to_v)
        q, k, v = (layer(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in layers)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(attended.transpose(1, 2).flatten(2)), (k, v)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor) -> dict[str, object]:
        x, caches = self.embedding(tokens), []
        for layer in self.layers:
            added, cache = layer(x)
            x = x + added
            caches.append(cache)
        return {"logits": self.head(x), "caches": tuple(caches)}


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("tokens", "targets")}


def loss(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs["logits"], inputs["targets"])


def solved() -> Plan:
    return solve_eagerly(Caching, text, loss=loss, batch=1, seq_len=LENGTH)


def ran(plan: Plan | None) -> tuple[float, dict[str, Tensor], Tensor, bool]:
    """The loss, gradients, keys of the first layer, whole, and whether these were divided."""
    torch.manual_seed(0)
    model, inputs = Caching(), text(1, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    outputs = model(inputs["tokens"])
    value = loss(outputs, inputs)
    value.backward()
    keys = outputs["caches"][0][0]
    is_divided = isinstance(keys, DTensor)
    whole = keys.full_tensor() if is_divided else keys
    return value.item(), gradients(model), whole.detach(), is_divided


def test_a_cache_that_nobody_asked_for_stays_divided() -> None:
    plan = solved()
    assert plan.outputs["output.caches.0.0"] == S(1)
    assert plan.notes is not None
    assert any("caches" in note and "DTensor" in note for note in plan.notes)
    value, expected, keys, _ = ran(None)
    for found, applied, found_keys, is_divided in run_ranks(2, ran, plan):
        assert is_divided
        assert torch.allclose(found_keys, keys, atol=1e-6)
        assert found == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, expected).values()) < 1e-4

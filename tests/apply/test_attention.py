"""Attention as libraries write it, divided by heads: every size in code, packed weights, weights read from outside."""

from collections.abc import Callable

import pytest
import torch
from examples import eager_to_shard
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.layout import S
from tpplan.plan.plan import Plan

DIM, VOCAB, HEADS, LENGTH, BATCH = 32, 64, 4, 6, 2
PACKED = S(0, DIM, DIM, DIM)


class Attending(nn.Module):
    """torch's attention: of tokens to themselves, from one packed weight, or to others, which splits the weight."""

    def __init__(self, *, to_others: bool, **options: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.to_others, self.options = to_others, options

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        others = x.roll(1, 1) if self.to_others else x
        return self.head(x + self.attention(x, others, others, **self.options)[0])


def encoder() -> nn.Module:
    """torch's own encoder, which in evaluation hands all weights of a layer to one kernel."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCAB, DIM), encoder, nn.Linear(DIM, VOCAB))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "to itself": (lambda: Attending(to_others=False, need_weights=False), "attention"),
    "to others": (lambda: Attending(to_others=True, need_weights=False), "attention"),
    "with weights": (lambda: Attending(to_others=False), "attention"),
    "in an encoder": (encoder, "1.layers.*.self_attn"),
}


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("tokens", "input", "targets")
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in names}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def losses_and_gradients(
    build: Callable[[], nn.Module], plan: Plan | None, batch: int
) -> tuple[float, float, dict[str, Tensor]]:
    """Losses in training and in evaluation, and gradients."""
    torch.manual_seed(0)
    model, inputs = build(), text(batch, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan, check="warn")
    given = tpplan.forward_inputs(model, inputs)
    trained = loss(model(**given), inputs)
    trained.backward()
    model.eval()
    with torch.no_grad():
        return trained.item(), loss(model(**given), inputs).item(), gradients(model)


def by_heads(build: Callable[[], nn.Module], module: str, tp: int) -> Plan:
    return tpplan.solve(
        build,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=tp, gpus_per_node=tp, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=LENGTH,
        tp=tp,
        precision="fp32",
        pins={module: "megatron"},
    )


@pytest.mark.parametrize(("name", "tp"), [*((name, 2) for name in MODELS), ("with weights", 4)])
def test_torchs_attention_is_divided_by_heads(name: str, tp: int) -> None:
    build, module = MODELS[name]
    plan = by_heads(build, module, tp)
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert read[f"{module}.in_proj_weight"] == PACKED
    assert read[f"{module}.out_proj.weight"] == S(1)
    assert plan.proof.other_shapes is not None
    assert plan.proof.other_shapes.batch.multiple
    for batch in (BATCH, 3 * BATCH):
        trained, evaluated, expected = losses_and_gradients(build, None, batch)
        for found in run_ranks(tp, losses_and_gradients, build, plan, batch):
            assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
            assert max(relative_errors(found[2], expected).values()) < 1e-4

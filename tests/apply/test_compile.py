"""Layers that torch.compile compiles: one graph for all that are alike, and what one process computes."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from examples import eager_to_shard, example
from one_process import gradients, relative_errors
from ranks import run_ranks
from test_attention import DIM, HEADS, LENGTH, VOCAB, JoinedBias, Processed, loss, text
from torch import Tensor, nn
from torch._dynamo.utils import counters

import tpplan
from tpplan.plan.plan import Plan, Recompute

BATCH, LAYERS = 4, 10  # more layers than torch compiles versions of one function
STEPS = 3


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def stack(attention: Callable[[], nn.Module], layers: int = 2) -> nn.Module:
    blocks = nn.Sequential(*(Layer(attention()) for _ in range(layers)))
    return nn.Sequential(nn.Embedding(VOCAB, DIM), blocks, nn.Linear(DIM, VOCAB))


def llama() -> nn.Module:
    module = example("llama")
    return module.Llama(module.Config(num_layers=LAYERS))


def llama_text(batch: int, seq_len: int) -> dict[str, Tensor]:
    inputs = text(batch, seq_len)
    return {"tokens": inputs["tokens"], "targets": inputs["targets"]}


def solved(build: Callable[[], nn.Module], inputs: Callable[..., Any], gpus: int = 2, **options: Any) -> Plan:
    return tpplan.solve(
        build, inputs, loss=loss, global_batch=BATCH, seq_len=LENGTH, precision="fp32", all_gpus=True, tp=2,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        **{"micro_batch": BATCH, "recompute": "none", **options},
    )  # fmt: skip


@contextlib.contextmanager
def without_code_generation():
    """torch.compile traces forward and backward, and runs the graphs as they are: the rest takes a minute."""
    compiled = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda self: compiled(self, backend="aot_eager")):
        yield


def trained(
    build: Callable[[], nn.Module],
    inputs: Callable[..., Mapping[str, Tensor]],
    plan: Plan | None,
    is_compiled: bool = True,
    is_dynamic: bool = False,
) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses of some backwards, the sum of their gradients, and how many graphs and graph breaks there were."""
    torch.manual_seed(0)
    model, batch = build(), inputs(BATCH, LENGTH)
    counters.clear()
    found = []
    with without_code_generation(), patch.object(torch._dynamo.config, "assume_static_by_default", not is_dynamic):
        if plan is not None:
            model = tpplan.apply_plan(model, plan, compile=is_compiled)
            rank = torch.distributed.get_rank()
            share = BATCH // plan.mesh.data_parallel
            first = plan.mesh.data_rank(rank) * share
            batch = {name: value[first : first + share] for name, value in batch.items()}
        for step in range(STEPS):
            with tpplan.no_sync(model) if step == 0 and plan is not None else contextlib.nullcontext():
                value = loss(model(**tpplan.forward_inputs(model, batch)), batch)
                value.backward()
            found.append(value.item())
    breaks = sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())
    return found, gradients(model), counters["stats"]["unique_graphs"], breaks


def check(
    build: Callable[[], nn.Module], inputs: Callable[..., Any], plan: Plan, ranks: int = 2, **how: bool
) -> list[tuple[int, int]]:
    """(graphs, graph breaks) of each rank, whose losses and gradients must be those of one process."""
    losses, expected, _, _ = trained(build, inputs, None)
    counted = []
    every = run_ranks(ranks, trained, build, inputs, plan, True, how.get("is_dynamic", False), timeout_s=240)
    for found, grads, graphs, breaks in every:
        if plan.mesh.data_parallel == 1:
            assert found == pytest.approx(losses, rel=1e-5)
        assert max(relative_errors(grads, expected).values()) < 1e-4
        counted.append((graphs, breaks))
    mean = [sum(own) / len(every) for own in zip(*(found for found, *_ in every), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)
    return counted


def test_like_layers_are_compiled_once_without_a_break() -> None:
    pins = {"layers.*.attention": "megatron", "layers.*.feed_forward": "megatron"}
    plan = solved(llama, llama_text, pins=pins)
    assert plan.parameters["layers.*.attention_norm.weight"].reads["layers.*.attention_norm"]
    for graphs, breaks in check(llama, llama_text, plan):
        assert graphs <= 2  # the first layer may get its input in another layout
        assert breaks == 0


@pytest.mark.long
def test_compiled_layers_under_fsdp_that_are_recomputed() -> None:
    plan = solved(llama, llama_text, gpus=4, fsdp=2, micro_batch=2, recompute="full")
    assert set(plan.recompute.values()) == {Recompute.FULL}
    for graphs, _ in check(llama, llama_text, plan, ranks=4):
        assert graphs <= 4


@pytest.mark.parametrize(
    ("attention", "is_dynamic"),
    [
        (Processed, True),
        (TorchAttention, False),
        pytest.param(Processed, False, marks=pytest.mark.long),
        pytest.param(TorchAttention, True, marks=pytest.mark.long),
        pytest.param(JoinedBias, False, marks=pytest.mark.long),
        pytest.param(JoinedBias, True, marks=pytest.mark.long),
    ],
)
def test_sizes_are_replaced_in_compiled_code(attention: Callable[[], nn.Module], is_dynamic: bool) -> None:
    def build() -> nn.Module:
        return stack(attention)

    if attention is Processed and torch.__version__.startswith("2.11."):
        pytest.skip("this compiler reads a property's own entry of a module's __dict__ by the property, without end")
    plan = solved(build, text)
    assert plan.sizes
    check(build, text, plan, is_dynamic=is_dynamic)

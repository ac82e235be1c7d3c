"""The memory constraint against the step gone through: never below it, and not far above."""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assignments import untied
from examples import example, machine
from torch import Tensor, nn

from tpplan import solvers
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import Mesh
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.memory_replay import memory
from tpplan.costs.runs.execute import Executor
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.build_space import build_space
from tpplan.plan.plan import Precision
from tpplan.solvers.problem import Expression, Term, total
from tpplan.trace.trace import trace

MESHES = [Mesh(replicate=replicate, shard=shard, tp=tp) for replicate in (1, 2) for shard in (1, 2, 4) for tp in (1, 2)]
EXECUTOR = Executor()


def llama(batch: int, **sizes: int) -> ModelGraph:
    module = example("llama")
    config = {"num_layers": 3, "model_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
    with torch.device("meta"):
        model = module.Llama(module.Config(**config | sizes))
        inputs = module.example_inputs(batch, 32)
    return trace(model, inputs, loss=module.loss)


def formulated(graph: ModelGraph, mesh: Mesh, **settings: object) -> Formulation:
    layers = sorted({source.label.split(".")[1] for source in graph.parameters if source.label.startswith("layers.")})
    setting = Setting(
        profile=machine(),
        gpus_per_node=4,
        memory_limit_bytes=1e15,
        units=tuple(f"layers.{i}" for i in layers),
        **{  # type: ignore[arg-type]
            "precision": Precision.FP32,
            "optimizer": "adamw",
            "accumulation_steps": 1,
            "recompute": None,
            "reshard_after_forward": None,
            **settings,
        },
    )
    space = build_space(graph, mesh.tp, unused_outputs=frozenset({"output"}))
    return Formulation(priced=price_space(space, setting.profile, 4, EXECUTOR), mesh=mesh, setting=setting)


def chosen(formulation: Formulation, rng: random.Random) -> dict[str, int]:
    """What suits a random price of every strategy, with layers dealt out to up to three treatments of a split."""
    problem = formulation.problem
    nodes = (
        Term(name=n.name, expressions=(Expression(terms=((n.name, tuple(rng.random() for _ in n.strategies)),)),))
        for n in problem.nodes
    )
    choice = solvers.solve(replace(problem, objective=tuple(nodes), resources=())).choice
    assert choice is not None
    dealt = dict(choice) | dict.fromkeys(problem.parts, 0)
    for split in problem.splits:
        among = rng.sample(split.parts, k=min(rng.randint(1, 3), len(split.parts)))
        for part in (*among[: split.total], *rng.choices(among, k=split.total))[: split.total]:
            dealt[part] += 1
    return dealt


def excesses(formulation: Formulation, rng: random.Random, times: int) -> Iterator[float]:
    """How far the constraint is above the peak of the step gone through, as a share of it."""
    for _ in range(times):
        assignment, alone = untied(formulation, chosen(formulation, rng))
        everything = dict.fromkeys(assignment.strategies, 0)
        needed = max(total(row.terms, everything) for row in alone.problem.resources)
        yield needed / memory(Lifetimes(assignment, alone.priced.executor)).num_bytes - 1


SETTINGS = (
    {"accumulation_steps": 1},
    {"accumulation_steps": 3},
    {"accumulation_steps": 3, "whole_gradients": True, "gathered_once": True},
    {"optimizer": "sgd", "accumulation_steps": 2},
    {"precision": Precision.BF16_MIXED, "optimizer": "adamw-foreach"},
)


@pytest.mark.parametrize("mesh", [Mesh(shard=2, tp=2), Mesh(tp=2), Mesh(replicate=2, shard=2)], ids=str)
def test_the_constraint_is_not_below_the_step_gone_through(mesh: Mesh) -> None:
    rng = random.Random(str(mesh))
    graph = llama(batch=2)
    for settings in SETTINGS[:3]:
        assert min(excesses(formulated(graph, mesh, **settings), rng, 1)) >= -1e-9


@pytest.mark.parametrize(
    ("layers", "mesh", "steps", "seed"), [(6, Mesh(shard=4), 1, 5), (3, Mesh(shard=2, tp=2), 3, 2)], ids=str
)
def test_the_constraint_is_not_below_the_step_where_layers_are_large_and_treated_differently(
    layers: int, mesh: Mesh, steps: int, seed: int
) -> None:
    """Gathered layers and gradients that are reduced outweigh activations: the peak may be in the middle layers."""
    formulation = formulated(llama(batch=1, num_layers=layers, hidden_dim=512), mesh, accumulation_steps=steps)
    assert min(excesses(formulation, random.Random(seed), 8)) >= -1e-9


class Stack(nn.Module):
    """A residual MLP per entry of `hidden`, its hidden features: equal ones are a family."""

    def __init__(self, hidden: Sequence[int], features: int = 64, words: int = 128) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, features), nn.Linear(features, words)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(features), nn.Linear(features, h), nn.GELU(), nn.Linear(h, features))
            for h in hidden
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class LargeLogits(Stack):
    """Logits that outweigh all else, of which the loss takes a wider copy, and which are returned beside it."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers[0](self.embedding(tokens)))
        return {"loss": F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()), "logits": logits}


def stack(hidden: Sequence[int], batch: int) -> ModelGraph:
    with torch.device("meta"):
        return trace(Stack(hidden), tokens_and_targets(batch))


def tokens_and_targets(batch: int) -> dict[str, Tensor]:
    tokens = torch.zeros(batch, 32, dtype=torch.long)
    return {"tokens": tokens, "targets": tokens.clone()}


@pytest.mark.parametrize(
    "hidden",
    [
        (512, 128, 128),
        pytest.param((64, 64, 1024, 64), marks=pytest.mark.long),
        pytest.param((128, 256, 128, 256), marks=pytest.mark.long),
        pytest.param((256, 256, 128), marks=pytest.mark.long),
        pytest.param((64, 128, 192, 256, 256, 256), marks=pytest.mark.long),
    ],
)
def test_the_constraint_is_not_below_the_step_where_layers_differ(hidden: Sequence[int]) -> None:
    """Layers of other sizes before, among and after the most of one size, and two sizes that take turns."""
    rng = random.Random(str(hidden))
    for batch in (1, 16):
        graph = stack(hidden, batch)
        for mesh in (Mesh(), Mesh(shard=4), Mesh(shard=2, tp=2)):
            for settings in SETTINGS[:3]:
                assert min(excesses(formulated(graph, mesh, **settings), rng, 1)) >= -1e-9


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=2), Mesh(tp=2)], ids=str)
def test_logits_are_counted_as_often_as_they_are_held(mesh: Mesh) -> None:
    """Returned logits get no gradient beside the loss, which keeps a copy of them that was made before it."""
    with torch.device("meta"):
        graph = trace(LargeLogits([64], words=8192), tokens_and_targets(4), loss=lambda output, inputs: output["loss"])
    found = list(excesses(formulated(graph, mesh), random.Random(0), 4))
    assert min(found) >= -1e-9
    assert min(found) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_constraint_is_tight_on_any_mesh(batch: int, settings: dict[str, object]) -> None:
    """Not below the peak, and in the median less than 15 % above it where a batch is 1, 12 % where activations weigh
    more: layouts and treatments are random."""
    rng = random.Random(f"{batch} {settings}")
    graph = llama(batch)
    found = [excess for mesh in MESHES for excess in excesses(formulated(graph, mesh, **settings), rng, 8)]
    assert min(found) >= -1e-9
    assert statistics.median(found) < (0.15 if batch == 1 else 0.12)

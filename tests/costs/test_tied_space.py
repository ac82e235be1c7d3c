"""Like decisions are priced as one where they cost the same, and only there."""

import random
from dataclasses import replace

import pytest
import torch
from assignments import check_tied, untied
from examples import example, machine
from torch import Tensor, nn

from tpplan import solvers
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import Mesh
from tpplan.core.repeated_blocks import like_ops, unlike_ops
from tpplan.costs.prediction.step_time import formulated
from tpplan.costs.runs.execute import Executor
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.costs.tied_space import tied_space
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.build_space import build_space
from tpplan.layouts.decision_space import classes_of
from tpplan.plan.plan import Precision
from tpplan.solvers.problem import Expression, Term
from tpplan.trace.trace import trace

EXECUTOR = Executor()
MESH = Mesh(shard=2, tp=2)
LAYERS = tuple(f"layers.{i}" for i in range(3))


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    module = example("llama")
    sizes = {"model_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
    with torch.device("meta"):
        model = module.Llama(module.Config(num_layers=len(LAYERS), **sizes))
        return trace(model, module.example_inputs(2, 32), loss=module.loss)


def formulated_freely(graph: ModelGraph, layers: tuple[str, ...], *, is_apart: bool) -> Formulation:
    """The ILP without a limit on memory; with `is_apart` layers have layouts of their own."""
    profile = machine()
    apart = (lambda name: name) if is_apart else None
    space = build_space(graph, MESH.tp, unused_outputs=frozenset({"output"}), apart=apart)
    setting = Setting(
        profile=profile,
        gpus_per_node=4,
        memory_limit_bytes=1e15,
        units=layers,
        precision=Precision.FP32,
        optimizer="adamw",
        accumulation_steps=2,
        recompute=None,
        reshard_after_forward=None,
    )
    return Formulation(priced=price_space(space, profile, 4, EXECUTOR), mesh=MESH, setting=setting)


def assigned(graph: ModelGraph, seed: int, *, is_apart: bool) -> Assignment:
    """What suits random prices of strategies and treatments."""
    rng, formulation = random.Random(seed), formulated_freely(graph, LAYERS, is_apart=is_apart)
    prices = (
        Term(name=n.name, expressions=(Expression(terms=((n.name, tuple(rng.random() for _ in n.strategies)),)),))
        for n in formulation.problem.nodes
    )
    choice = solvers.solve(replace(formulation.problem, objective=tuple(prices), resources=())).choice
    assert choice is not None
    dealt = dict(choice) | dict.fromkeys(formulation.problem.parts, 0)
    for split in formulation.problem.splits:
        for part in rng.choices(split.parts, k=split.total):
            dealt[part] += 1
    return formulation.assignment(dealt)


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_an_assignment_costs_the_same_where_like_decisions_are_one(
    llama: ModelGraph, seed: int, is_apart: bool
) -> None:
    assignment = assigned(llama, seed, is_apart=is_apart)
    check_tied(assignment, formulated(assignment, machine(), 4, EXECUTOR))


def test_layers_of_unlike_layouts_are_not_one(llama: ModelGraph) -> None:
    alike, apart = (tied_space(assigned(llama, 0, is_apart=is_apart)) for is_apart in (False, True))
    assert alike.classes is classes_of(llama)[0]  # of which much is known already
    assert len(alike.members) < len(apart.members) < len(apart.classes)
    for name, representative in apart.classes.items():
        assert apart.strategies[name] == apart.strategies[representative]


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)


class Flattened(nn.Module):
    """Three layers, the first of which is given a tensor in another order in memory: its reshape copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Flat() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        inputs = scaled.transpose(0, 1), scaled, scaled
        return sum(layer(own).sum() for layer, own in zip(self.layers, inputs, strict=True))


def test_a_reshape_that_copies_is_not_like_one_that_makes_a_view() -> None:
    graph = trace(Flattened(), {"x": torch.ones(4, 4)})
    assert [block.indices for block in graph.blocks] == [(0, 1, 2)]
    copy, view, other = (op.name for op in graph.ops if op.target == "aten.reshape.default")
    for like in (like_ops(graph), classes_of(graph)[0]):
        assert (like[copy], like[view], like[other]) == (copy, view, view)
    assert [op.name for op in unlike_ops(graph)] == [op.name for op in graph.ops if like_ops(graph)[op.name] == op.name]


def test_a_choice_costs_what_its_assignment_does_where_one_layer_copies_what_others_view() -> None:
    graph = trace(Flattened(), {"x": torch.ones(4, 4)})
    formulation = formulated_freely(graph, (), is_apart=False)
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    untied(formulation, choice)

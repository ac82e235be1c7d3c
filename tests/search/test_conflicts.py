"""Conflicts forbid no assignment that has no counterexample, whatever the solver shards beside them."""

import pytest
import torch
from examples import eager_to_shard
from test_optimal import DIM, ODD, CountedModel

import tpplan
from tpplan.core.graph import Direction, Op
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.prove.counterexample import Counterexample
from tpplan.search.conflicts.smallest_conflict import conflict_of
from tpplan.search.conflicts.trials import with_little_else
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Options
from tpplan.search.points.request import Request


def formulation(length: int = ODD) -> Formulation:
    """The ILP of a small model on two tp ranks, which cut sequences of an even length too."""
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    options = Options(precision="fp32", tp=2, all_gpus=True)
    inputs = {"x": torch.randn(1, length, DIM)}
    request = Request.of(CountedModel, lambda batch, _: inputs, cluster, Batch(1, 1, length), options, None)
    solver, points, _ = prepare(request, options)
    return solver.formulate(points[0])


def test_a_choice_that_the_solver_makes_again_is_not_dropped() -> None:
    """An op differs where a module's input is a slice and its own result is whole. With little else sharded it is whole
    by itself, so that the input alone seems to suffice; sharded it is right."""
    made = formulation()
    graph, space = made.space.graph, made.space
    given = next(b for b in graph.boundaries if b.module == "counted.left" and b.direction is Direction.INPUT)
    op = next(node for node in graph.nodes if isinstance(node, Op) and "relu" in node.target)
    sharded = frozenset(s for s in space.strategies[space.classes[given.name]] if s.results[0].dim is not None)

    def differs(trial: Assignment) -> bool:
        return trial.strategy(given.name) in sharded and trial.strategy(op.name).results[0].is_whole

    def check(trial: Assignment, _until: str | None = None) -> Counterexample | None:
        if not differs(trial):
            return None
        return Counterexample(message="it differs", blamed=(given.name,), node=op)

    refuted = with_little_else(made, {given.name: sharded})
    assert refuted is not None
    found = check(refuted)
    assert found is not None
    chosen, _ = conflict_of(found, refuted, made, check)
    options = space.strategies[space.classes[op.name]]
    sliced = frozenset(strategy for strategy in options if not strategy.results[0].is_whole)
    right = with_little_else(made, {given.name: sharded, op.name: sliced})
    assert right is not None
    assert check(right) is None
    assert refuted.strategy(given.name) in chosen[given.name]
    assert not all(right.strategy(name) in group for name, group in chosen.items()), "what is right is forbidden"


@pytest.mark.parametrize("dim", [1, 2])
def test_every_other_choice_is_tried_in_the_place_of_a_dropped_one(dim: int) -> None:
    """An op differs where a module's input is a slice, unless its own result is one in one dim of two."""
    made = formulation(8)
    graph, space = made.space.graph, made.space
    given = next(b for b in graph.boundaries if b.module == "counted.left" and b.direction is Direction.INPUT)
    op = next(node for node in graph.nodes if isinstance(node, Op) and "relu" in node.target)
    sharded = frozenset(s for s in space.strategies[space.classes[given.name]] if s.results[0].dim is not None)

    def check(trial: Assignment, _until: str | None = None) -> Counterexample | None:
        if trial.strategy(given.name) not in sharded or trial.strategy(op.name).results[0].dim == dim:
            return None
        return Counterexample(message="it differs", blamed=(given.name,), node=op)

    refuted = with_little_else(made, {given.name: sharded})
    assert refuted is not None
    found = check(refuted)
    assert found is not None
    chosen, _ = conflict_of(found, refuted, made, check)
    options = space.strategies[space.classes[op.name]]
    sliced = frozenset(strategy for strategy in options if strategy.results[0].dim == dim)
    right = with_little_else(made, {given.name: sharded, op.name: sliced})
    assert right is not None
    assert check(right) is None
    assert not all(right.strategy(name) in group for name, group in chosen.items()), "what is right is forbidden"

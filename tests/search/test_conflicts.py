"""Conflicts forbid no assignment that has no counterexample, whatever the solver shards beside them."""

import pytest
import torch
from examples import eager_to_shard
from test_optimal import DIM, HIDDEN, ODD, CountedModel
from torch import Tensor, nn

import tpplan
from tpplan.core.graph import Direction, Op
from tpplan.core.layout import S
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.prove.counterexample import Counterexample
from tpplan.search.conflicts.smallest_conflict import conflict_of
from tpplan.search.conflicts.trials import with_little_else
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Options
from tpplan.search.points.request import Request
from tpplan.solvers.problem import Status


def formulation(length: int = ODD) -> Formulation:
    """The ILP of a small model on two tp ranks, which cut sequences of an even length too."""
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    options = Options(precision="fp32", tp=2, all_gpus=True)
    inputs = {"x": torch.randn(1, length, DIM)}
    request = Request.of(CountedModel, lambda batch, _: inputs, cluster, Batch(1, 1, length), options, None)
    solver, points, _ = prepare(request, options)
    return solver.formulate(points[0])


@pytest.mark.parametrize(("length", "right_dims"), [(ODD, {2}), (8, {1}), (8, {2}), (8, {1, 2})])
def test_a_choice_is_dropped_only_where_no_other_in_its_place_is_right(length: int, right_dims: set[int]) -> None:
    """An op differs where a module's input is a slice, unless its own result is one in some dims. With little else
    sharded that is whole by itself, so that the input alone seems to suffice."""
    made = formulation(length)
    graph, space = made.space.graph, made.space
    given = next(b for b in graph.boundaries if b.module == "counted.left" and b.direction is Direction.INPUT)
    op = next(node for node in graph.nodes if isinstance(node, Op) and "relu" in node.target)
    sharded = frozenset(s for s in space.strategies[space.classes[given.name]] if s.results[0].dim is not None)

    def check(trial: Assignment, _until: str | None = None) -> Counterexample | None:
        if trial.strategy(given.name) not in sharded or trial.strategy(op.name).results[0].dim in right_dims:
            return None
        return Counterexample(message="it differs", blamed=(given.name,), node=op)

    refuted = with_little_else(made, {given.name: sharded})
    assert refuted is not None
    found = check(refuted)
    assert found is not None
    chosen, _ = conflict_of(found, refuted, made, check)
    assert refuted.strategy(given.name) in chosen[given.name]
    for dim in right_dims:
        sliced = frozenset(s for s in space.strategies[space.classes[op.name]] if s.results[0].dim == dim)
        right = with_little_else(made, {given.name: sharded, op.name: sliced})
        assert right is not None
        assert check(right) is None
        assert not all(right.strategy(name) in group for name, group in chosen.items()), "what is right is forbidden"


class Choosy(nn.Module):
    """Two projections alike, of which the code refuses a slice of some."""

    def __init__(self, refused: tuple[str, ...]) -> None:
        super().__init__()
        self.refused = refused
        self.left, self.right = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.left_down, self.right_down = nn.Linear(HIDDEN, DIM, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = {"left": self.left(x), "right": self.right(x)}
        if any(given[name].numel() != x.shape[1] * HIDDEN for name in self.refused):
            raise ValueError("a slice")
        x = x * 2
        return x + self.left_down(given["left"].relu()) + self.right_down(given["right"].relu())


class ChoosyModel(nn.Module):
    def __init__(self, refused: tuple[str, ...]) -> None:
        super().__init__()
        self.choosy = Choosy(refused)

    def forward(self, x: Tensor) -> Tensor:
        return self.choosy(x).square().mean()


@pytest.mark.parametrize("refused", [("left",), ("right",), ("left", "right")])
def test_like_modules_are_forbidden_what_their_code_refuses_and_no_more(refused: tuple[str, ...]) -> None:
    """One module is refused what the other may do; where both are, one counterexample shows it."""
    plan = tpplan.solve(
        lambda: ChoosyModel(refused),
        lambda batch, length: {"x": torch.randn(batch, length, DIM)},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        micro_batch=1,
        seq_len=ODD,
        tp=2,
        precision="fp32",
        all_gpus=True,
    )
    columns = {name for name in ("left", "right") if plan.parameter_plans()[f"choosy.{name}.weight"].placement == S(0)}
    assert columns == {"left", "right"} - set(refused)
    assert plan.solver.status is Status.OPTIMAL
    assert plan.proof.rounds == 2

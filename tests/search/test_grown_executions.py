"""Executions of ops of grown graphs, which the search grows from runs at other sizes, against runs."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import pytest
from examples import NAMES, example, machine

import tpplan
from tpplan.core.graph import ModelGraph, Op
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import Execution
from tpplan.costs.runs.grown_executions import GrownExecutions, Sizes
from tpplan.costs.runs.kernels import MemoryBound
from tpplan.layouts.build_space import build_space
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.plan import Plan
from tpplan.search.models.grown_graph import grown
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.request import Request

SEQ_LEN = 32
SIZES = (1, 2, 4, 8, 16)


@pytest.fixture
def doubts(monkeypatch: pytest.MonkeyPatch) -> list[PointSolver]:
    """The solvers that traced and ran everything, after what was grown had differed."""
    found: list[PointSolver] = []
    distrust = PointSolver.distrust_grown

    def noting(self: PointSolver) -> None:
        found.append(self)
        distrust(self)

    monkeypatch.setattr(PointSolver, "distrust_grown", noting)
    return found


def traced(name: str, *sizes: int) -> list[ModelGraph]:
    module = example(name)
    cluster = Cluster(gpus=1, gpus_per_node=1, profile=machine())
    options = Options(loss=module.loss, unused_outputs=tuple(getattr(module, "unused_outputs", ())))
    request = Request.of(
        module.build_model, module.example_inputs, cluster, Batch(max(sizes), None, SEQ_LEN), options, None
    )
    solver, _, _ = prepare(request, options)
    return [solver.traces.really_traced(size).graph for size in sizes]


def strategies(graph: ModelGraph) -> Iterator[tuple[Op, Strategy, int]]:
    """Every strategy of every op on 1, 2 and 4 ranks."""
    for tp in (1, 2, 4):
        space = build_space(graph, tp)
        for name in space.members:
            if isinstance(op := space.deciders[name], Op):
                yield from ((op, strategy, tp) for strategy in space.strategies[name])


def executions(name: str) -> Iterator[tuple[str, Execution, Execution]]:
    """(target, as the search has it, as it is run) of each strategy at micro-batches beyond the two smallest."""
    low, high, *others = traced(name, *SIZES)
    executor = Executor()
    for graph in (low, high):
        for op, strategy, tp in strategies(graph):
            executor.execute(Call.of(graph, op), strategy, tp)
    for size, other in zip(SIZES[2:], others, strict=True):
        graph = grown(low, high, SIZES[:2], size)
        assert graph == other
        assert graph is not None
        real = {op.name: op for op in other.ops}
        for op, strategy, tp in strategies(graph):
            found = executor.execute(Call.of(graph, op), strategy, tp)
            yield op.target, found, Executor().execute(Call.of(other, real[op.name]), strategy, tp)


@pytest.mark.parametrize("name", NAMES)
def test_a_grown_execution_is_that_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Execution] = []
    monkeypatch.setattr(GrownExecutions, "at", noted(made))
    pairs = list(executions(name))
    assert [target for target, found, run in pairs if found != run] == []
    assert len({id(execution) for execution in made}) > 20


def test_a_wrong_growth_differs_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices it."""
    monkeypatch.setattr(GrownExecutions, "at", too_small)
    assert any(found != run for _, found, run in executions("mlp"))


def test_a_wrong_growth_does_not_reach_the_plan(monkeypatch: pytest.MonkeyPatch, doubts: list[PointSolver]) -> None:
    """Ops of larger micro-batches seem to cost nothing: the answer is run, and the search goes on without growth."""
    right = plan_of("mlp")
    assert right.batch.micro_batch in SIZES[2:], "an answer at a grown micro-batch"
    assert not doubts
    monkeypatch.setattr(GrownExecutions, "at", too_small)
    wrong = plan_of("mlp")
    assert len(doubts) == 1
    assert (wrong.predicted, wrong.batch, wrong.mesh) == (right.predicted, right.batch, right.mesh)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_a_grown_answer_has_the_price_of_its_ops(name: str, doubts: list[PointSolver]) -> None:
    """The plan of a search that grows is that of one at the same micro-batch alone, which runs every op."""
    plan = plan_of(name)
    assert not doubts
    alone = plan_of(name, micro_batch=plan.batch.micro_batch)
    assert plan.predicted == alone.predicted


def plan_of(name: str, micro_batch: int | str = "auto") -> Plan:
    module = example(name)
    return tpplan.solve(
        module.build_model,
        module.example_inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=machine(launch_s=1e-5)),
        global_batch=max(SIZES),
        seq_len=SEQ_LEN,
        precision="fp32",
        loss=module.loss,
        micro_batch=micro_batch,  # type: ignore[arg-type]
        prove=False,
    )


_AT = GrownExecutions.at


def noted(made: list[Execution]) -> Callable[[GrownExecutions, Hashable, Sizes], Execution | None]:
    """GrownExecutions.at, with what it gives in `made`."""

    def at(self: GrownExecutions, about: Hashable, sizes: Sizes) -> Execution | None:
        found = _AT(self, about, sizes)
        made.extend([found] if found is not None else [])
        return found

    return at


def too_small(self: GrownExecutions, about: Hashable, sizes: Sizes) -> Execution | None:
    """GrownExecutions.at with kernels of forward that move a byte each."""
    found = _AT(self, about, sizes)
    return found and replace(found, forward=(MemoryBound(num_bytes=1),) * len(found.forward))

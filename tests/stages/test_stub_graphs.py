"""What stubs leave in a stage's graph, and graphs of stages that are grown while stages are only compared."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_models import LENGTH, Stack, loss, text
from stage_runs import MACHINE, assert_as_one_process, solved
from torch import Tensor, nn

import tpplan
from tpplan.core.graph import ModelGraph, within
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.layouts.build_space import build_space
from tpplan.plan.plan import Precision, StagePlan
from tpplan.search.models.cut_errors import loss_of_sent
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.pipelines import most_promising
from tpplan.search.pipelines.shape_search import GROWN, MISLED, Search
from tpplan.search.pipelines.stage_plans import AllStages
from tpplan.search.pipelines.stage_solver import Degrees
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.request import Request
from tpplan.stages.cuts import cuts_of, stages_of
from tpplan.stages.stub import Stub, is_stand_in
from tpplan.trace.record_fx import given_on_meta


class Weighted(Stack):
    """A model whose root gives each layer weights of the tokens, of one sample each, and a mask of the sequence."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        weights = (tokens > 3).float().unsqueeze(-1) + 1.0
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for layer in self.layers:
            x = layer(x, mask, weights)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Layer(nn.Module):
    """A layer that reads the weights of the tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        given: Tensor = self.inner(x * weights, mask)
        return given


def weighted() -> nn.Module:
    model = Weighted()
    model.layers = nn.ModuleList(map(_Layer, model.layers))
    return model


def stage_and_solver(build: Any, index: int, batch: int) -> tuple[StagePlan, PointSolver]:
    """A stage of a model cut behind its first and third of four layers, and its solver on two tensor-parallel ranks."""
    cluster, sizes = Cluster(gpus=2, profile=MACHINE), Batch(batch, batch, LENGTH)
    options = Options(loss=loss, precision=Precision.FP32, tp=2)
    whole = Request.of(build, text, cluster, sizes, options, None)
    graph = TraceCache(whole.subject, Reuse()).really_traced(batch).graph
    cuts = cuts_of(graph, [f"layers.{i}" for i in range(4)])
    stage = stages_of(graph, [cuts[0], cuts[2]], [1, 1, 1], batch)[index]
    own = Options(loss=loss if index == 2 else loss_of_sent, precision=Precision.FP32, tp=2, stage=stage)
    request = Request.of(build, text, cluster, sizes, own, None)
    return stage, PointSolver(request=request, traces=TraceCache(request.subject, Reuse()))


def graph_of(solver: PointSolver, batch: int) -> ModelGraph:
    return solver.traces.really_traced(batch).graph


@pytest.mark.parametrize("index", [0, 1, 2])
def test_of_stubs_nothing_but_what_is_received_is_left(index: int) -> None:
    stage, solver = stage_and_solver(weighted, index, 2)
    graph = graph_of(solver, 2)
    absent = {name for node in graph.nodes for name in stage.absent if within(node.module, name)}
    assert absent == ({stage.received} if stage.received else set())
    made = {graph.producers[name].module for name in graph.read_by_stubs if name in graph.producers}
    assert made == {""}, "the root makes the mask and the weights, which stubs are given too"
    assert len(graph.read_by_stubs) >= 2


def test_what_stubs_are_given_stays_whole() -> None:
    """The batch could be divided from the root on; then a stub would get a part of it beside whole tensors."""
    _, solver = stage_and_solver(weighted, 1, 2)
    graph, is_cut = graph_of(solver, 2), solver.is_cut(2, 2)
    with_cut, without = build_space(graph, 2, cut=is_cut), build_space(graph, 2)
    handed = {graph.producers[name].name: name for name in graph.read_by_stubs if name in graph.producers}
    assert any(not s.results[0].is_whole for name in handed for s in without.strategies[name])
    for name, value in handed.items():
        place = graph.producers[value].results.index(value)
        assert all(strategy.results[place].is_whole for strategy in with_cut.strategies[name])


@pytest.mark.parametrize("options", [{"tp": 2, "gpus": 4}, {"tp": 1, "gpus": 2, "virtual": 2}], ids=str)
def test_a_model_whose_root_gives_layers_more_than_hidden_states(options: dict[str, Any]) -> None:
    assert_as_one_process(weighted, solved(weighted, stages=2, **options))


class Pairs(Stack):
    """A model whose layers also give what none but the head's code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Pair, self.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x, norms = layer(x)
        logits: Tensor = self.head(self.norm(x)) * norms[..., :1]
        return logits


class _Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, self.inner.norm(y)


@pytest.mark.parametrize("options", [{"gpus": 2}, {"gpus": 4, "tp": 2}], ids=str)
def test_a_stage_receives_what_it_does_not_read(options: dict[str, Any]) -> None:
    """Each stage receives both tensors that a layer gives, of which its own layers read one."""
    plan = solved(Pairs, stages=2, **options)
    assert [len(stage.stage.sends) for stage in plan.stages if stage.stage is not None] == [2, 0]
    assert_as_one_process(Pairs, plan)


def test_stubs_hand_on_what_has_no_memory() -> None:
    layers = Stack().layers
    stubs = [Stub(f"layers.{i}", layer, Precision.FP32, (), given_on_meta) for i, layer in enumerate(layers)]
    x, mask = torch.ones(2, LENGTH, 32), torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    first = stubs[0](x, mask)
    assert is_stand_in(first)
    assert not is_stand_in(x)
    assert (first.shape, first.untyped_storage().nbytes(), first.requires_grad) == (x.shape, 4, False)
    assert stubs[1](first, mask) is first


class Listed(Stack):
    """A model whose root calls one layer by a list of its own, which holds it besides its container."""

    def __init__(self) -> None:
        super().__init__()
        self.again = [self.layers[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for i, layer in enumerate(self.layers):
            x = self.again[0](x, mask) if i == 1 else layer(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("build", [weighted, Pairs, Listed])
def test_stages_that_share_what_others_have_run_what_they_run_alone(build: Any, order: tuple[int, ...]) -> None:
    """All stages are made of one model: none changes it, nor what another stage runs."""
    reuse, shared = Reuse(), dict[int, ModelGraph]()
    for index in order:
        _, solver = stage_and_solver(build, index, 2)
        shared[index] = TraceCache(solver.request.subject, reuse).really_traced(2).graph
        whole = replace(solver.request.subject, stage=None, loss=loss)
        found = TraceCache(whole, reuse).really_traced(2).model
        assert not any(isinstance(module, Stub) for module in found.modules())
        assert graph_fingerprint(TraceCache(whole, reuse).trace_of(found, text(2, LENGTH))[0]) == graph_fingerprint(
            TraceCache(whole, Reuse()).really_traced(2).graph
        )
    for index, graph in shared.items():
        alone = graph_of(stage_and_solver(build, index, 2)[1], 2)
        assert graph_fingerprint(graph) == graph_fingerprint(alone)
        assert graph.read_by_stubs == alone.read_by_stubs


class Changing(Stack):
    """A model whose layers do more at four samples and above."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Changing, self.layers))


class _Changing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        given: Tensor = self.inner(x, mask)
        return self.inner(given, mask) if len(x) >= 4 else given


def search(build: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[tpplan.PipelinePlan, list[tuple[Any, int]], int]:
    """The plan of two stages at any micro-batch, all of which are solved, the smallest first; the traces of stages
    (stage, micro-batch), and how often it was looked for."""
    traces: list[tuple[Any, int]] = []
    searches: list[Any] = []
    trace, candidates = TraceCache._trace, most_promising._candidates

    def traced(self: TraceCache, micro_batch: int, **options: Any) -> Any:
        if self.subject.stage is not None:
            traces.append((self.subject.stage.index, micro_batch))
        return trace(self, micro_batch, **options)

    def no_floors(self: Search, _least: float) -> dict[Degrees, float]:
        return dict.fromkeys(self.degrees(), 0.0)

    def looked_for(*args: Any) -> Any:
        searches.append(args)
        return candidates(*args)

    def unestimated(self: Any, _whole: Any, _least: float) -> Iterator[Any]:
        yield replace(self, known=most_promising._Known.ILP)

    monkeypatch.setattr(TraceCache, "_trace", traced)
    monkeypatch.setattr(Search, "floors", no_floors)
    monkeypatch.setattr(most_promising, "_candidates", looked_for)
    monkeypatch.setattr(most_promising._Candidate, "looked_at", unestimated)
    monkeypatch.setattr(AllStages, "floor", lambda _self, _least=math.inf: 0.0)
    plan = tpplan.solve_stages(
        build,
        text,
        stages=2,
        cluster=tpplan.Cluster(gpus=2, profile=MACHINE),
        global_batch=64,
        seq_len=LENGTH,
        options=Options(loss=loss, precision=Precision.FP32, tp=1),
        prove=False,
    )
    return plan, traces, len(searches)


def test_stages_that_are_compared_are_traced_at_two_micro_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, traces, times = search(Stack, monkeypatch)
    assert plan.batch.micro_batch > 4, "else nothing needs to be grown"
    assert times == 1
    assert GROWN in (plan.solver.unsearched or ())
    assert {size for _, size in traces} == {1, 2, plan.batch.micro_batch}


def test_stages_whose_code_changes_with_the_batch_are_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, traces, times = search(Changing, monkeypatch)
    assert times == 2
    assert MISLED in (plan.solver.unsearched or ())
    assert GROWN not in (plan.solver.unsearched or ())
    assert {size for _, size in traces} > {1, 2, 4, 8}
    assert plan.batch.micro_batch in {size for _, size in traces}

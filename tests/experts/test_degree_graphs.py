"""Graphs of divided experts that follow from those of two other degrees: held against the trace of their own."""

from functools import partial

import pytest
from moe_models import Experts, Layer, OwnMoe, hugging_face, loss, text
from torch import Tensor, nn

import tpplan
from profiles import synthetic_profile
from tpplan.experts.degree_graph import of_degree
from tpplan.machine.profile import HardwareProfile
from tpplan.search.expert_degrees import every_degree
from tpplan.search.models.subject import BuildModel
from tpplan.search.models.trace_cache import TraceCache, Traced
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Options
from tpplan.search.points.point_solver import Solvers
from tpplan.search.points.request import Request
from tpplan.trace.answers.varying_dims import varying_as

GPUS, EXPERTS, LENGTH = 8, 16, 12
MACHINE = HardwareProfile.from_dict({**synthetic_profile(), "device_type": "cpu"}, origin="synthetic")


def solvers_of(build: BuildModel) -> Solvers:
    """Solvers of every degree of a model with 16 experts: 1, 2, 4 and 8."""
    options = Options(loss=loss, precision="fp32", tp=1)
    cluster = tpplan.Cluster(gpus=GPUS, gpus_per_node=GPUS, profile=MACHINE)
    request = Request.of(build, text, cluster, Batch(64, None, LENGTH), options, None)
    return every_degree(*prepare(request, options), options)[0]


def qwen3_moe() -> nn.Module:
    pytest.importorskip("transformers")
    return hugging_face("Qwen3Moe", num_experts=EXPERTS)()


class Counting(Experts):
    """Runs one more op where a rank has eight experts, as graphs of fewer do not show."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x.clone() if self.experts == EXPERTS // 2 else x, index, weight)


class CountingMoe(OwnMoe):
    def __init__(self) -> None:
        super().__init__(experts=EXPERTS)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.experts = Counting(EXPERTS, 16, 32)


@pytest.mark.parametrize("build", [partial(OwnMoe, experts=EXPERTS), qwen3_moe], ids=["own", "qwen3_moe"])
def test_a_derived_graph_is_that_of_a_trace(build: BuildModel) -> None:
    solvers = solvers_of(build)
    traced: list[tuple[int, int]] = []
    trace = TraceCache._trace

    def noted(self: TraceCache, micro_batch: int, like: object = None) -> Traced:
        traced.append((self.subject.experts.ep if self.subject.experts else 1, micro_batch))
        return trace(self, micro_batch, like)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(TraceCache, "_trace", noted)
        for size in (1, 2, 4):
            for ep in (8, 4, 2):
                solvers.by_ep[ep].traces.traced(size)
        assert not [size for ep, size in traced if ep == 2]
    for ep in (4, 2):
        traces = solvers.by_ep[ep].traces
        for size in (1, 2, 4):
            assumed = traces.traced(size).graph
            assert assumed == traces.really_traced(size).graph
            assert assumed.ep == ep
        assert not traces.is_likened((1, 2, 4))


def test_code_that_counts_its_experts_is_seen_by_the_trace_of_the_answer() -> None:
    """The derived graph lacks an op; from then on every degree's own graph is traced."""
    traces = solvers_of(CountingMoe).by_ep[2].traces
    assumed = traces.traced(1).graph
    own = traces.really_traced(1).graph
    assert len(own.nodes) > len(assumed.nodes)
    traces.distrust_grown()
    assert traces.traced(2).graph == traces.really_traced(2).graph


def solved(build: BuildModel, ep: int | None) -> tpplan.Plan:
    cluster = tpplan.Cluster(gpus=GPUS, gpus_per_node=GPUS, profile=MACHINE)
    return tpplan.solve(
        build,
        text,
        cluster=cluster,
        global_batch=GPUS,
        seq_len=LENGTH,
        loss=loss,
        precision="fp32",
        tp=1,
        all_gpus=True,
        ep=ep,
        recompute="none",
        prove=False,
    )


@pytest.mark.parametrize("build", [partial(OwnMoe, experts=EXPERTS), CountingMoe], ids=["sizes alone", "another op"])
def test_the_plan_is_that_of_its_degree_alone_and_says_which_graphs_were_derived(build: BuildModel) -> None:
    plan = solved(build, None)
    alone = {ep: solved(build, ep).solver for ep in (1, 2, 4, 8)}
    assert plan.solver.objective_s == pytest.approx(min(report.objective_s for report in alone.values()))
    assert any("experts over" in line and "priced as if" in line for line in plan.solver.unsearched or ())
    assert not any("priced as if" in line for report in alone.values() for line in report.unsearched or ())


def test_graphs_that_differ_in_more_than_sizes_give_none() -> None:
    by_ep = solvers_of(partial(OwnMoe, experts=EXPERTS)).by_ep
    graphs = {ep: solver.traces.traced(1).graph for ep, solver in by_ep.items()}
    other = solvers_of(CountingMoe).by_ep[2].traces.really_traced(1).graph
    assert of_degree(graphs[8], graphs[8], other, 4) is None
    assert of_degree(graphs[8], graphs[8], graphs[1], 4) is None
    assert varying_as(other, graphs[8]) is None

"""The micro-batch is decided: graphs that are grown from two traces, and what is decided on them."""

from collections.abc import Callable

import pytest
import torch
from examples import NAMES, eager_to_shard, example, machine
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import ModelError
from tpplan.core.graph import ModelGraph
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.kernels import Attention, Matmul, MemoryBound, kernel_time
from tpplan.costs.step.cost_table import decides_like, price_space
from tpplan.layouts.build_space import build_space
from tpplan.layouts.decision_space import Space
from tpplan.machine.profile import AttentionSizes, HardwareProfile, load_profile
from tpplan.plan.plan import Plan
from tpplan.search.models.grown_graph import grown
from tpplan.search.models.trace_cache import TraceCache
from tpplan.search.planner import prepare
from tpplan.search.points.best_rates import BestRates, seconds_of_a_sequence
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.request import Request
from tpplan.solvers.problem import Status

GLOBAL_BATCH = 16


class Doubling(nn.Module):
    """Runs its second layer once more where the batch is large: no two small traces tell."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return (x if x.shape[0] <= self.most else self.second(x)).square().mean()


def rows(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(batch, seq_len, 64)}


def solved(
    build: Callable[[], nn.Module], inputs: Callable[[int, int], object], profile: HardwareProfile, **options: object
) -> Plan:
    given = {"global_batch": GLOBAL_BATCH, "seq_len": 32, "precision": "fp32", **options}
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=profile)
    return tpplan.solve(build, inputs, cluster=cluster, **given)  # type: ignore[arg-type]


def graphs(name: str, *sizes: int) -> list[ModelGraph]:
    module = example(name)
    cluster = Cluster(gpus=1, gpus_per_node=1, profile=machine())
    options = Options(loss=module.loss, unused_outputs=tuple(getattr(module, "unused_outputs", ())))
    batch = Batch(GLOBAL_BATCH, None, 32)
    request = Request.of(module.build_model, module.example_inputs, cluster, batch, options, None)
    solver, _, _ = prepare(request, options)
    return [solver.traces.really_traced(size).graph for size in sizes]


@pytest.mark.parametrize("name", NAMES)
def test_a_grown_graph_is_that_of_a_trace(name: str) -> None:
    low, high, traced = graphs(name, 2, 4, 8)
    assert grown(low, high, (2, 4), 8) == traced


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_that_is_shared_is_that_of_each_space(name: str) -> None:
    """Nodes, edges and units of a space at another micro-batch, where its decisions are the same."""
    assert_shared(*(build_space(graph, 2) for graph in graphs(name, 2, 4)))


def test_a_frame_that_is_shared_is_that_of_another_tp_degree() -> None:
    (graph,) = graphs("llama", 4)
    assert_shared(build_space(graph, 2), build_space(graph, 4))


def assert_shared(low: Space, high: Space) -> None:
    """Asserts that the second space takes the first one's frame, which is that it would make."""
    assert decides_like(low, high)
    profile, executor = machine(), Executor()
    first = price_space(low, profile, 2, executor)
    shared = price_space(high, profile, 2, executor, others=[first])
    alone = price_space(high, profile, 2, executor)
    assert shared.frame is first.frame is not alone.frame
    units = ("layers.0",)
    assert (first.nodes(), first.edges(), first.units(units)) == (alone.nodes(), alone.edges(), alone.units(units))


def test_spaces_of_other_decisions_share_no_frame() -> None:
    """The batch may be sharded where the micro-batch divides, and decisions that are cut are others."""
    odd, even = (build_space(graph, 2) for graph in graphs("mlp", 1, 2))
    assert not decides_like(odd, even)
    first = next(name for name in even.members if len(even.strategies[name]) > 1)
    kept = even.strategies[first][0]
    cut = build_space(even.graph, 2, cut=lambda name, strategy: name == first and strategy != kept)
    assert not decides_like(even, cut)
    profile, executor = machine(), Executor()
    others = [price_space(odd, profile, 2, executor), price_space(cut, profile, 2, executor)]
    found = price_space(even, profile, 2, executor, others=others)
    assert all(found.frame is not other.frame for other in others)


def test_graphs_that_differ_in_more_than_sizes_do_not_grow() -> None:
    low, high = graphs("mlp", 1, 2)
    other = graphs("llama", 2)[0]
    assert grown(low, high, (1, 2), 4) is not None
    assert grown(low, other, (1, 2), 4) is None


@pytest.mark.parametrize(("most", "shares"), [(4, True), (2, False)])
def test_traces_that_differ_in_sizes_alone_share_their_outline(most: int, shares: bool) -> None:
    """At micro-batch 4 a layer runs once more where `most` is 2. What is said of both graphs, in whatever order, is
    what is said of each alone."""
    cluster = Cluster(gpus=2, gpus_per_node=2, profile=machine())
    batch = Batch(GLOBAL_BATCH, None, 32)

    def traces() -> TraceCache:
        request = Request.of(lambda: Doubling(most), rows, cluster, batch, Options(), None)
        return prepare(request, Options())[0].traces

    together = traces()
    graphs = [together.really_traced(size).graph for size in (2, 4)]
    assert graphs[1].is_resized_of(graphs[0]) is shares
    for size, graph in zip((2, 4), graphs, strict=True):
        (alone,) = (own.really_traced(size).graph for own in (traces(),))
        assert graph == alone
        for tp in (1, 2):
            own, other = build_space(graph, tp), build_space(alone, tp)
            assert (own.classes, own.members, own.flows) == (other.classes, other.members, other.flows)
            assert (own.strategies, own.shared, own.layouts) == (other.strategies, other.shared, other.layouts)


def test_the_default_decides_what_each_size_alone_does() -> None:
    """Over every micro-batch that divides the batch, each pinned, the best is what is found without a pin."""
    module = example("mlp")
    profile = machine(launch_s=1e-5)
    options = {"loss": module.loss, "prove": False}
    plan = solved(module.build_model, module.example_inputs, profile, loss=module.loss)
    assert plan.solver.status is Status.OPTIMAL
    pinned = [
        solved(module.build_model, module.example_inputs, profile, micro_batch=size, **options)
        for size in (1, 2, 4, 8, 16)
    ]
    assert plan.predicted.step_time_s == pytest.approx(min(p.predicted.step_time_s for p in pinned), rel=1e-9)
    assert plan.batch.micro_batch > 1
    assert pinned[0].batch.micro_batch == 1
    assert pinned[0].predicted.step_time_s > 1.5 * plan.predicted.step_time_s


def test_a_plan_says_which_sizes_were_priced_without_a_trace() -> None:
    module = example("mlp")
    plan = solved(module.build_model, module.example_inputs, machine(launch_s=1e-5), loss=module.loss)
    said = " ".join(plan.solver.unsearched or ())
    own = plan.batch.micro_batch
    assert own not in (1, 2)
    assert "as if the code did what it does at smaller ones" in said
    listed = {int(number) for number in said.partition("micro-batch ")[2].partition(":")[0].split(", ")}
    assert listed == {4, 8, 16} - {own}


def test_code_that_does_other_things_at_larger_batches_is_traced_at_each() -> None:
    """The trace at the size that was settled on is not what grew: nothing grows then, and the answer is the pinned
    one's."""
    profile = machine(launch_s=1e-5)
    plan = solved(lambda: Doubling(most=2), rows, profile)
    pinned = [
        solved(lambda: Doubling(most=2), rows, profile, micro_batch=size, prove=False) for size in (1, 2, 4, 8, 16)
    ]
    assert plan.predicted.step_time_s == pytest.approx(min(p.predicted.step_time_s for p in pinned), rel=1e-9)
    assert "as if the code" not in " ".join(plan.solver.unsearched or ())


class OverRows(nn.Module):
    """Takes statistics over rows, which one row has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(32, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def one_vector_a_row(batch: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(batch, 32)}


def test_sizes_that_are_too_small_for_the_code_are_left_out() -> None:
    def planned(**pinned: int) -> Plan:
        return tpplan.solve(
            OverRows,
            one_vector_a_row,
            cluster=Cluster(gpus=2, gpus_per_node=2, profile=machine()),
            global_batch=8,
            **pinned,
        )

    plan = planned()
    assert plan.batch.micro_batch > 1
    (line,) = (own for own in plan.solver.unsearched or () if "micro-batches below 2" in own)
    assert "Expected more than 1 value per channel when training" in line
    with pytest.raises(ModelError, match="Expected more than 1 value per channel"):
        planned(micro_batch=1)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80gb", "b200", "cpu-gloo"])
def test_nothing_is_faster_than_the_best_rates(name: str) -> None:
    """Kernels of all sizes, also beyond the tables."""
    profile = load_profile(name)
    rates = BestRates(profile, is_compiled=False)
    dtype = profile.matmuls[0].dtype
    sizes = (1, 7, 64, 500, 4096, 30_000, 200_000)
    for m in sizes:
        for n in sizes:
            for k in sizes:
                kernel = Matmul(m=m, n=n, k=k, batch=1, dtype=dtype)
                assert rates.seconds(kernel) <= kernel_time(profile, kernel).seconds * (1 + 1e-9), kernel
        moved = MemoryBound(num_bytes=m * 4096)
        assert rates.seconds(moved) <= kernel_time(profile, moved).seconds * (1 + 1e-9)
        for dim in (64, 128):
            own = AttentionSizes(batch_heads=32, queries=m, keys=m, head_dim=dim, causal=True)
            for is_backward in (False, True):
                flop = 2.0 * 32 * m * m * dim * (2.5 if is_backward else 1)
                kernel_of = Attention(
                    flop=flop, dtype=profile.attention_rates[0].dtype, is_backward=is_backward, sizes=own
                )
                assert rates.seconds(kernel_of) <= kernel_time(profile, kernel_of).seconds * (1 + 1e-9), kernel_of


def test_no_plan_is_faster_than_its_sequences_at_the_best_rates() -> None:
    low, high = graphs("llama", 1, 2)
    for profile in (machine(), eager_to_shard()):
        least = seconds_of_a_sequence(low, high, (1, 2), BestRates(profile, is_compiled=False), Executor())
        module = example("llama")
        for size in (1, 4, 16):
            plan = solved(
                module.build_model,
                module.example_inputs,
                profile,
                loss=module.loss,
                micro_batch=size,
                recompute="none",
                prove=False,
            )
            own = plan.predicted.time_s["compute"] * plan.mesh.num_gpus / GLOBAL_BATCH
            assert 0 < least <= own

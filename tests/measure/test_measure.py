"""What is measured becomes a profile that loads and gives the medians back. No test here says how fast a machine is."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tpplan.core.errors import ProfileError, UsageError
from tpplan.core.mesh import GroupShape
from tpplan.machine.fit_tables import (
    LEAST_RELATIVE_ERROR,
    UNKNOWN_RELATIVE_ERROR,
    attention_table,
    collective_table,
    group_extrapolation,
    isotonic_grid,
    isotonic_median,
    matmul_table,
    memory_bound_table,
)
from tpplan.machine.profile import AttentionSizes, Collective, Estimate, HardwareProfile, load_profile
from tpplan.measure import misaligned, timer
from tpplan.measure.attention import AttentionShape
from tpplan.measure.collectives import measure_collectives
from tpplan.measure.compute import make_profile, measure_compute
from tpplan.measure.grid import ComputeGrid, default_grid
from tpplan.measure.launch import measure_launch
from tpplan.measure.matmuls import MATMUL_FORMS, Operands, _measured_points, _of_batch, _thinned
from tpplan.measure.misaligned import measure_misaligned, misaligned_matmuls
from tpplan.measure.optimizer_step import measure_optimizers
from tpplan.measure.timer import Stopwatch, Window, in_rounds
from tpplan.plan.optimizers import OPTIMIZERS

CPU = torch.device("cpu")
NUM_RANKS = 2
PAIR = GroupShape(ranks=NUM_RANKS, ranks_per_node=NUM_RANKS)
SIZES = (4, 8, 16)
MESSAGES = (1024, 4096, 16384)
TOY = ComputeGrid(
    matmul_batches=(1,),
    matmul_sizes=SIZES,
    copied_bytes=(4096, 65536),
    attention=(AttentionShape(batch=1, heads=2, sequence=16, head_dim=8, causal=True),),
)
#: the profile keeps four significant digits
ROUNDING = 1e-3


class Clock:
    """A clock that only work moves; the machine gets slower by `factor` after `slows_at` seconds."""

    def __init__(self, slows_at: float, factor: float) -> None:
        self.now, self.slows_at, self.factor = 0.0, slows_at, factor

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * (self.factor if self.now >= self.slows_at else 1.0)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_the_budget_is_kept_on_a_machine_that_gets_slower(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first of five rounds, which takes three of seven windows' time, the machine is slower by the factor."""
    budget_s, points = 20.0, [1e-3 + 1e-5 * i for i in range(40)]
    clock = Clock(budget_s * 3 / 7, factor)
    monkeypatch.setattr(timer, "time", clock)
    samples = in_rounds(CPU, points, lambda point: lambda: clock.work(point), "matmul", budget_s, timer.silent)
    assert clock.now <= budget_s * 1.1
    assert clock.now >= budget_s * 0.9
    for point, seconds in samples.items():
        assert len(seconds) == timer.NUM_REPEATS
        assert seconds[0] == pytest.approx(point)
        assert seconds[-1] == pytest.approx(point * factor)


def measured_on_a_rank() -> dict[str, object]:
    """A profile's content, measured at toy size in about a second."""
    compute = measure_compute(CPU, dtypes=["float32"], budget_s=0.6, grid=TOY)
    collectives = measure_collectives([NUM_RANKS], MESSAGES, device=CPU, ranks_per_node=NUM_RANKS, budget_s=0.4)
    profile = make_profile(
        name="toy", device=CPU, compute=compute, collectives=collectives, gpus_per_node=NUM_RANKS, notes=["a note"]
    )
    return profile.to_dict()


@pytest.fixture(scope="module")
def per_rank() -> list[dict[str, object]]:
    return run_ranks(NUM_RANKS, measured_on_a_rank)


@pytest.fixture(scope="module")
def profile(per_rank: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> HardwareProfile:
    """What a user gets: the first rank's profile, written and read back strictly."""
    path = tmp_path_factory.mktemp("profiles") / "toy.json"
    path.write_text(json.dumps(per_rank[0]))
    return load_profile(path)


# --- measured on two ranks -----------------------------------------------------------------------------------------


def test_a_measured_profile_loads_and_tells_how_it_was_made(profile: HardwareProfile) -> None:
    assert (profile.name, profile.device_type, profile.gpus_per_node) == ("toy", "cpu", NUM_RANKS)
    assert [source.id for source in profile.sources] == ["measured"]
    notes = " ".join(profile.notes)
    assert profile.software is not None
    assert profile.software["torch"] == torch.__version__
    assert profile.date is not None
    assert profile.sources[0].source.startswith(f"tpplan profile, {profile.date}, ")
    assert "gloo" in notes
    assert "same work at the same time" in notes
    assert "a note" in notes
    assert 0 < profile.usable_bytes < profile.memory_bytes


def test_every_rank_has_the_same_tables(per_rank: list[dict[str, object]]) -> None:
    # The slowest rank's time counts, so there is one time. Memory in use is each rank's own.
    first, second = ({**content, "memory": None} for content in per_rank)
    assert first == second


def test_every_point_of_the_grid_was_measured(profile: HardwareProfile) -> None:
    (matmuls,) = profile.matmuls
    assert (matmuls.dtype, matmuls.grids) == ("float32", (TOY.matmul_batches, SIZES, SIZES, SIZES))
    assert [(table.causal, table.backward, table.grids) for table in profile.attention_tables or ()] == [
        (True, backward, ((2,), (16,), (8,))) for backward in (False, True)
    ]
    assert profile.memory_bound_table is not None
    assert profile.memory_bound_table.bytes == tuple(2 * size for size in TOY.copied_bytes)  # read and written
    assert {table.kind for table in profile.collectives} == set(Collective)
    assert {(table.group, table.bytes) for table in profile.collectives} == {(PAIR, MESSAGES)}


def test_predictions_at_measured_points_are_the_table(profile: HardwareProfile) -> None:
    (matmuls,) = profile.matmuls
    points = itertools.product(*matmuls.grids)
    for (batch, m, n, k), seconds in zip(points, matmuls.time_s, strict=True):
        assert profile.matmul(m=m, n=n, k=k, batch=batch, dtype="float32").seconds == seconds
    for table in profile.attention_tables or ():
        sizes = AttentionSizes(batch_heads=2, queries=16, keys=16, head_dim=8, causal=True)
        estimate = profile.attention(flop=1.0, dtype="float32", backward=table.backward, sizes=sizes)
        assert estimate.seconds == table.time_s[0]
    for table in profile.collectives:
        for num_bytes, seconds, error in zip(table.bytes, table.time_s, table.relative_error, strict=True):
            estimate = Estimate(seconds=seconds, error_s=seconds * error)
            assert profile.collective(table.kind, PAIR, num_bytes) == estimate


def test_every_number_has_an_error_bar(profile: HardwareProfile) -> None:
    (matmuls,), (attention,) = profile.matmuls, profile.attention_rates
    errors = [part.relative_error for part in (profile.launch, profile.bandwidth, matmuls, attention)]
    errors += [error for table in profile.collectives for error in table.relative_error]
    assert min(errors) >= LEAST_RELATIVE_ERROR
    spreads = [table.spread for table in (matmuls, profile.memory_bound_table, *(profile.attention_tables or ()))]
    assert [len(spread.relative) for spread in spreads] == [27, 2, 1, 1]  # 3^3 products
    # One group alone: nothing says how well it predicts another.
    assert profile.group_extrapolation.in_node_relative_error == UNKNOWN_RELATIVE_ERROR


def test_groups_across_machines_are_refused_by_name(profile: HardwareProfile) -> None:
    four = GroupShape(ranks=2 * NUM_RANKS, ranks_per_node=NUM_RANKS)
    with pytest.raises(ProfileError, match=r"no all_gather measurement across nodes \(asked for 4 ranks\)"):
        profile.collective(Collective.ALL_GATHER, four, 1024)
    with pytest.raises(ProfileError, match=r"no all_reduce measurement for 4 ranks in a node of 2 GPUs"):
        profile.collective(Collective.ALL_REDUCE, GroupShape(ranks=4, ranks_per_node=4), 1024)
    with pytest.raises(ProfileError, match="no matmul measurement for dtype bfloat16; covered: float32"):
        profile.matmul(m=8, n=8, k=8, dtype="bfloat16")


# --- measured alone ------------------------------------------------------------------------------------------------


def test_one_process_measures_compute_alone() -> None:
    batched = dataclasses.replace(TOY, matmul_batches=(1, 2))
    compute = measure_compute(CPU, dtypes=["float32", "float64"], budget_s=0.1, grid=batched)
    profile = make_profile(name="alone", device=CPU, compute=compute, collectives=(), gpus_per_node=1)
    assert HardwareProfile.from_dict(profile.to_dict(), "alone") == profile
    assert [table.dtype for table in profile.matmuls] == ["float32", "float64"]
    assert "gloo" not in " ".join(profile.notes)
    with pytest.raises(ProfileError, match="no all_reduce measurement"):
        profile.collective(Collective.ALL_REDUCE, PAIR, 1024)


def test_progress_ends_with_every_section_done() -> None:
    last: dict[str, tuple[int, int]] = {}
    measure_compute(
        CPU, dtypes=["float32"], budget_s=0.1, grid=TOY, progress=lambda what, *count: last.update({what: count})
    )
    # Copies and sums of 2 sizes; forward and backward; 3^3 products, each forward and for both gradients.
    assert last == {"memory": (20, 20), "attention float32": (10, 10), "matmul float32": (243, 243)}


def test_little_time_leaves_out_matmul_sizes_evenly() -> None:
    few = dataclasses.replace(TOY, matmul_sizes=(1, 2, 3, 4, 5, 6, 7))
    (table,) = measure_compute(CPU, dtypes=["float32"], budget_s=0.1, grid=few).matmuls
    assert table.m == table.n == table.k
    assert len(table.m) == 4  # the fewest
    assert [_thinned((1, 2, 3, 4, 5, 6, 7), lambda sizes, most=most: len(sizes) <= most) for most in (7, 5, 1)] == [
        (1, 2, 3, 4, 5, 6, 7),
        (1, 3, 4, 5, 7),
        (1, 3, 5, 7),
    ]


def test_large_batched_products_are_told_by_single_ones() -> None:
    measured = list(_measured_points((1, 3), SIZES, 8))
    assert len(measured) == 3**3 + 2**3
    assert (3, 8, 8, 16) not in measured
    samples = {(1, 8, 8, 16): [np.array([1.0, 2.0])], (3, 8, 8, 8): [np.array([5.0, 5.0])]}
    assert _of_batch(samples, (3, 8, 8, 16), 1).tolist() == [[3.0, 6.0]]
    assert _of_batch(samples, (3, 8, 8, 8), 1).tolist() == [[5.0, 5.0]]
    grid = dataclasses.replace(TOY, matmul_batches=(1, 3), largest_batched=8)
    (table,) = measure_compute(CPU, dtypes=["float32"], budget_s=0.1, grid=grid).matmuls
    assert table.inferred == "batches above 1 with a size above 8: so many times the time of batch 1"
    assert len(table.time_s) == 2 * 3**3


def test_operands_lie_as_in_the_three_products_of_a_layer() -> None:
    tokens, outputs, inputs = 2, 3, 5
    x, weight, gradient = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    operands = Operands.of(CPU, torch.float32, outputs * inputs)
    for form, (left, right) in zip(MATMUL_FORMS, ((x, weight.T), (gradient, weight), (gradient.T, x)), strict=True):
        assert form == (not left.is_contiguous(), not right.is_contiguous())
        (m, k), n = left.shape, right.shape[1]
        assert operands.product((1, m, n, k), form)().shape == (left @ right).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_misaligned_products_are_timed_beside_aligned_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that takes 1 s a FLOP on aligned rows, and 16 / alignment s on others."""
    points: set[int] = set()

    def seconds(points_: Sequence[Any], make: Callable[[Any], Callable[[], torch.Tensor]]) -> dict[Any, Any]:
        found = {}
        for point in points_:
            product = make(point)()
            rows, columns = product.shape
            alignment = math.gcd(16, product.stride(0) * dtype.itemsize)
            points.add(alignment)
            found[point] = np.full(3, 2.0 * rows * columns**2 * 16 / alignment)
        return found

    monkeypatch.setattr(misaligned, "in_rounds", lambda _device, points, make, *_args, **_kwargs: seconds(points, make))
    grid = dataclasses.replace(TOY, matmul_sizes=(16, 64))
    entries = measure_misaligned(CPU, dtype, grid, 1.0)
    expected = [count for count in (2, 4, 8) if count >= dtype.itemsize]
    assert [entry.bytes for entry in entries] == expected
    assert points == {16, *expected}
    for entry in entries:
        assert entry.flop_per_s == pytest.approx(entry.bytes / 16, rel=ROUNDING)
        assert (entry.aligned_flop_per_s, entry.relative_error) == (1.0, 0.01)


def test_what_a_flop_takes_longer_in_smaller_products_is_the_error() -> None:
    rates = {(64, 16): 4.0, (64, 8): 2.0, (16, 16): 2.0, (16, 8): 1.6}
    entry = misaligned_matmuls("bfloat16", 8, rates)
    assert (entry.flop_per_s, entry.aligned_flop_per_s) == (2.0, 4.0)
    assert entry.relative_error == pytest.approx(math.log(0.25 / 0.125), rel=0.01)
    # Where a smaller product is no slower, the time is unknown.
    assert misaligned_matmuls("bfloat16", 8, rates | {(16, 8): 2.0}).relative_error == 1.0


def test_misaligned_products_of_a_cpu_are_measured_on_the_cpu() -> None:
    entries = measure_misaligned(CPU, torch.float32, TOY, 0.05)
    assert [entry.bytes for entry in entries] == [4, 8]
    assert all(entry.flop_per_s > 0 for entry in entries)


def test_right_operands_and_results_lie_apart() -> None:
    operands = Operands.of(CPU, torch.float32, 64)
    work = operands.product((1, 8, 8, 8), (False, True))
    first, second = work(), work()
    assert first.data_ptr() != second.data_ptr()
    assert not torch.equal(first, second)  # of the same left operand
    left, right = operands.left[:64].view(8, 8), operands.right[:64].view(8, 8)
    assert torch.equal(first, left @ right.T)


def test_a_machine_that_is_slow_for_a_while_is_so_in_one_repeat_of_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Stopwatch, "window", lambda self, work: Window(calls=2, beside=0, issue_s=0.0))
    monkeypatch.setattr(Stopwatch, "elapsed", lambda self, work, window: order.append(work()) or float(len(order)))
    samples = in_rounds(CPU, ["a", "b"], lambda point: lambda: point, "", 1e3, lambda *_: None, repeats=3)
    assert order == ["a", "b"] * 3
    assert {point: seconds.tolist() for point, seconds in samples.items()} == {
        "a": [0.5, 1.5, 2.5],  # two calls a window
        "b": [1.0, 2.0, 3.0],
    }


def test_issuing_a_kernel_of_a_step_takes_longer_than_launching_one() -> None:
    launch = measure_launch(CPU, 0.2)
    assert launch.issue_s is not None
    assert launch.issue_s > launch.launch_s  # autograd, modules and views, beside the kernel itself


def test_issuing_a_step_on_dtensors_takes_longer_than_on_tensors(profile: HardwareProfile) -> None:
    found = [profile.optimizer_issues or (), *(measure_optimizers(CPU, 0.3) for _ in range(3))]
    assert not dist.is_initialized()
    assert all([issue.optimizer for issue in issues] == [*OPTIMIZERS] for issues in found)
    assert all(issue.plain_s > 0 for issues in found for issue in issues)
    # Several ops for each parameter, each through Python: 6 times as long on an idle machine, twice on a busy one, and
    # in a burst of others' work perhaps not once.
    assert any(one_by_one.sharded_s > one_by_one.plain_s for one_by_one, *_ in found)


def test_shapes_that_fill_no_table_give_a_rate_alone() -> None:
    shape = TOY.attention[0]
    scattered = (shape, dataclasses.replace(shape, heads=4, sequence=32))
    compute = measure_compute(CPU, dtypes=["float32"], budget_s=0.1, grid=dataclasses.replace(TOY, attention=scattered))
    assert compute.attention_tables == ()
    assert compute.attention_rates[0].forward_flop_per_s > 0


def test_default_grids_ascend() -> None:
    for device_type in ("cpu", "cuda"):
        grid = default_grid(device_type)
        assert sorted(set(grid.matmul_sizes)) == list(grid.matmul_sizes)
        assert sorted(set(grid.copied_bytes)) == list(grid.copied_bytes)


def test_mistakes_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="dtype 'float31' cannot be measured"):
        measure_compute(CPU, dtypes=["float31"], budget_s=1.0, grid=TOY)
    with pytest.raises(UsageError, match="expected one dtype or more and a budget"):
        measure_compute(CPU, dtypes=[], budget_s=1.0, grid=TOY)
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="there is no process group: start with torchrun"):
        measure_collectives([2], MESSAGES, device=CPU, ranks_per_node=2, budget_s=1.0)


def wrong_group_on_a_rank() -> str:
    with pytest.raises(UsageError) as caught:
        measure_collectives([2, 3], MESSAGES, device=CPU, ranks_per_node=NUM_RANKS, budget_s=0.1)
    return str(caught.value)


def test_a_group_that_does_not_divide_the_world_is_a_usage_error() -> None:
    assert (
        run_ranks(NUM_RANKS, wrong_group_on_a_rank)
        == ["measure_collectives: group sizes [3] do not divide a world of 2 ranks; sizes that do: [2]"] * NUM_RANKS
    )


# --- samples to tables ---------------------------------------------------------------------------------------------


def test_monotone_medians_are_kept() -> None:
    samples = {1024: [3e-5, 1e-5, 2e-5], 4096: [5e-5, 4e-5, 9e-5]}
    arrays = {size: np.array(seconds) for size, seconds in samples.items()}
    table = collective_table(Collective.ALL_REDUCE, PAIR, arrays, ("measured",))
    assert table.bytes == (1024, 4096)
    assert table.time_s == (2e-5, 5e-5)
    assert table.latency_s == 2e-5


def test_falling_medians_are_pooled_and_their_distance_is_in_the_error_bar() -> None:
    arrays = {size: np.full(5, seconds) for size, seconds in {1024: 4e-5, 4096: 1e-5, 16384: 8e-5}.items()}
    table = collective_table(Collective.ALL_REDUCE, PAIR, arrays, ("measured",))
    pooled = np.sqrt(4e-5 * 1e-5)  # the median of two, in logarithms
    assert table.time_s == pytest.approx([pooled, pooled, 8e-5], rel=ROUNDING)
    assert table.relative_error[0] == pytest.approx(np.log(2), rel=0.01)  # each is a factor of two from the pool


def test_matmul_samples_become_their_medians() -> None:
    axes = ((1, 4), SIZES, SIZES, SIZES)
    flop = np.array([2.0 * b * m * n * k for b, m, n, k in itertools.product(*axes)]).reshape(2, 3, 3, 3)
    rate, launch_s = 1e9, 1e-6
    seconds = launch_s + flop / rate
    samples = seconds[..., None, None] * np.array([[0.9, 1.0, 1.0, 1.0, 5.0]])
    table = matmul_table("float32", axes, samples, launch_s, ("measured",))
    assert table.time_s == pytest.approx(seconds.ravel(), rel=ROUNDING)
    assert table.extrapolation_relative_error == pytest.approx(0, abs=1e-9)  # launch plus work is how matmul() goes on
    assert table.relative_error > np.log(5) / np.sqrt(5)  # one sample of five is off by ln 5


def test_a_product_counts_as_the_mean_of_its_forms_and_their_difference_is_in_the_error_bar() -> None:
    axes = ((1,), (1,), (1,), (1,))
    samples = np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]).reshape(1, 1, 1, 1, 3, 3)
    table = matmul_table("float32", axes, samples, 1e-6, ("measured",))
    assert table.time_s == (2.0,)
    assert table.relative_error > np.log(2) / np.sqrt(3)  # one form of three takes half of the mean
    assert table.spread is not None
    assert table.spread.relative == (0.0,)  # each form repeats itself


def test_points_whose_repeats_lie_apart_are_marked() -> None:
    steady, noisy = [1.0, 1.0, 1.01, 1.02, 9.0], [1.0, 1.0, 1.1, 1.5, 1.6]
    arrays = {1024: np.array(steady), 4096: 2 * np.array(noisy)}
    spread = collective_table(Collective.ALL_REDUCE, PAIR, arrays, ("measured",)).spread
    assert spread is not None
    assert spread.relative == pytest.approx([0.02, 0.5 / 1.1], rel=0.02)  # (q75 - q25) / q50: one slow repeat is none
    assert spread.noisy == (1,)
    kinds = {1024: np.array([steady, noisy])}
    table = memory_bound_table(kinds, ("measured",))
    assert table.spread is not None
    assert table.spread.noisy == (0,)
    assert table.time_s == pytest.approx([(1.01 + 1.1) / 2], rel=ROUNDING)


def test_attention_samples_become_a_table_that_goes_on_as_the_work_does() -> None:
    axes = ((4, 16), (64, 128, 256), (32, 64))
    seconds = np.array([1e-6 + 1e-13 * h * s**2 * d for h, s, d in itertools.product(*axes)]).reshape(2, 3, 2)
    table = attention_table(
        "float32", causal=False, backward=False, axes=axes, samples=np.repeat(seconds[..., None], 3, -1),
        launch_s=1e-6, sources=("measured",),
    )  # fmt: skip
    assert table.time_s == pytest.approx(seconds.ravel(), rel=ROUNDING)
    assert table.extrapolation_relative_error == pytest.approx(0, abs=ROUNDING)
    twice = AttentionSizes(batch_heads=32, queries=256, keys=256, head_dim=64, causal=False)
    assert table.time(twice, 1e-6).seconds == pytest.approx(1e-6 + 1e-13 * 32 * 256**2 * 64, rel=ROUNDING)


def test_monotone_fits_leave_monotone_values_alone() -> None:
    values = np.array([1.0, 2.0, 2.0, 7.0])
    assert isotonic_median(values) == pytest.approx(values)
    assert isotonic_grid(np.multiply.outer(values, values)) == pytest.approx(np.multiply.outer(values, values))
    assert (np.diff(isotonic_grid(np.random.default_rng(0).uniform(1, 2, (4, 4))), axis=0) >= 0).all()


def test_what_one_group_says_of_another_is_the_extrapolation_error() -> None:
    content = measured_with_groups_of(2, 4)
    residual = group_extrapolation(content)
    # Made to follow the extrapolation's own formula: latency log2 p, all-gather traffic (p - 1) / p.
    assert residual.in_node_relative_error == pytest.approx(0, abs=ROUNDING)
    assert residual.across_nodes_relative_error == UNKNOWN_RELATIVE_ERROR


def measured_with_groups_of(*group_sizes: int) -> HardwareProfile:
    """A machine of four ranks with an all-gather of 10 us per tree level and 1 GB/s."""
    compute = measure_compute(CPU, dtypes=["float32"], budget_s=0.05, grid=TOY)
    tables = []
    for ranks in group_sizes:
        steps, traffic = np.log2(ranks), (ranks - 1) / ranks
        seconds = {size: np.full(5, 1e-5 * steps + size * traffic / 1e9) for size in (1, *MESSAGES)}
        group = GroupShape(ranks=ranks, ranks_per_node=ranks)
        tables.append(collective_table(Collective.ALL_GATHER, group, seconds, ("measured",)))
    return make_profile(name="four", device=CPU, compute=compute, collectives=tuple(tables), gpus_per_node=4)


# --- the shipped measurement ---------------------------------------------------------------------------------------

CPU_GLOO = Path(__file__).resolve().parents[2] / "profiles" / "cpu-gloo.json"


@pytest.mark.skipif(not CPU_GLOO.exists(), reason="not measured yet")
def test_the_shipped_cpu_profile_covers_a_small_llama() -> None:
    # B 8, T 128, D 256, F 768, 8 heads of 32, on 2 and 4 ranks.
    profile = load_profile("cpu-gloo")
    batch, sequence, model, hidden, heads = 8, 128, 256, 768, 8
    for n, k in ((model, model), (hidden, model), (model, hidden), (hidden // 4, model)):
        estimate = profile.matmul(m=batch * sequence, n=n, k=k, dtype="float32")
        assert not estimate.extrapolated
        assert estimate.seconds > profile.launch_s
    flop = 4.0 * batch * heads * sequence**2 * (model // heads) / 2
    activation = 4 * batch * sequence * model
    assert profile.attention(flop=flop, dtype="float32", backward=True).seconds > 0
    assert profile.memory_bound(num_bytes=2 * activation).seconds > 0
    for kind, ranks in itertools.product(Collective, (2, 4)):
        group = GroupShape(ranks=ranks, ranks_per_node=ranks)
        assert not profile.collective(kind, group, activation).extrapolated
    with pytest.raises(ProfileError, match="across nodes"):
        profile.collective(Collective.ALL_REDUCE, GroupShape(ranks=8, ranks_per_node=4), activation)

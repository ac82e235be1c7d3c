"""A profile gives back what was measured, says so where it guesses, and refuses what it does not know."""

import copy
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tpplan
from profiles import full_profile, synthetic_profile
from tpplan.core.errors import ProfileError
from tpplan.core.mesh import GroupShape
from tpplan.machine.profile import AttentionSizes, Collective, Estimate, HardwareProfile, load_profile, shipped_profiles
from tpplan.machine.tables import MemoryBoundTable

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED_FILE = REPOSITORY / "profiles" / "h100-sxm.json"
H100 = load_profile("h100-sxm")
A100 = load_profile("a100-sxm-80gb")
CONTENT = json.loads(SHIPPED_FILE.read_text())
#: a few units in the last place of a double: interpolation goes through logarithms
ROUNDING = 1e-12

sizes = st.integers(1, 100_000)
message_bytes = st.floats(1, 1e12)
dtypes = st.sampled_from(["bfloat16", "float16", "float32"])
kinds = st.sampled_from(Collective)
groups = st.builds(
    lambda per_node, nodes: GroupShape(ranks=per_node * nodes, ranks_per_node=per_node),
    st.integers(1, 8),
    st.integers(1, 512),
).filter(lambda group: group.ranks > 1)


@functools.cache
def synthetic(**overrides: float) -> HardwareProfile:
    return HardwareProfile.from_dict(synthetic_profile(**overrides), "synthetic")


# --- what was measured is given back -------------------------------------------------------------------------------


def test_collectives_are_exact_at_measured_points() -> None:
    for table in CONTENT["collectives"]:
        group = GroupShape(ranks=table["ranks"], ranks_per_node=table["ranks_per_node"])
        for num_bytes, time, error in zip(table["bytes"], table["time_s"], table["relative_error"], strict=True):
            estimate = H100.collective(Collective(table["kind"]), group, num_bytes)
            assert estimate.seconds == time
            assert estimate.error_s == pytest.approx(time * error)
            assert not estimate.extrapolated


def test_matmuls_are_exact_at_measured_points() -> None:
    for table in CONTENT["matmuls"]:
        points = [(b, m, n, k) for b in table["batch"] for m in table["m"] for n in table["n"] for k in table["k"]]
        for (batch, m, n, k), time in zip(points, table["time_s"], strict=True):
            estimate = H100.matmul(m=m, n=n, k=k, batch=batch, dtype=table["dtype"])
            assert (estimate.seconds, estimate.extrapolated) == (time, False)


def test_large_matmul_runs_at_the_rate_measured_elsewhere() -> None:
    # 794.5 TFLOP/s: best_achieved_bf16_tflops of hardware.csv, another source than the table's.
    estimate = H100.matmul(m=8192, n=8192, k=8192, dtype="bfloat16")
    assert 2 * 8192**3 / estimate.seconds == pytest.approx(794.5e12, rel=0.05)
    assert estimate.extrapolated


@pytest.mark.parametrize(("alignment", "further_s_per_flop"), [(16, 0.0), (8, 2.5e-15), (4, 2.5e-15), (2, 7.5e-15)])
def test_a_misaligned_matmul_takes_longer_by_its_work(alignment: int, further_s_per_flop: float) -> None:
    """1 / 2e14 - 1 / 4e14 s a FLOP at 8 bytes, and at 4, which were not measured; 1 / 1e14 - 1 / 4e14 s at 2."""
    profile = HardwareProfile.from_dict(full_profile(), "full")
    sizes = {"m": 500, "n": 260, "k": 130, "batch": 3}
    aligned = profile.matmul(**sizes, dtype="bfloat16")
    further_s = 2 * 500 * 260 * 130 * 3 * further_s_per_flop
    found = profile.matmul(**sizes, dtype="bfloat16", alignment=alignment)
    assert found.seconds == pytest.approx(aligned.seconds + further_s)
    assert found.error_s == pytest.approx(aligned.error_s + 0.25 * further_s)
    assert profile.matmul(**sizes, dtype="float16", alignment=alignment) == profile.matmul(**sizes, dtype="float16")


@pytest.mark.parametrize(
    ("m", "n", "k", "rate"),
    [(2048, 2048, 128, 1e14), (2048, 2048, 256, 2e14), (2048, 128, 2048, 1.5e14), (256, 2048, 2048, 2.5e14)],
)
def test_a_batch_takes_at_least_the_time_by_its_small_size(m: int, n: int, k: int, rate: float) -> None:
    profile = HardwareProfile.from_dict(full_profile(), "full")
    found = profile.matmul(m=m, n=n, k=k, batch=64, dtype="bfloat16")
    assert found.seconds == pytest.approx(2 * 64 * m * n * k / rate)
    assert found.error_s == pytest.approx(0.1 * found.seconds)
    # launch + FLOP / 4e14, as where no size is small: one product, another dtype
    one = profile.matmul(m=m, n=n, k=k, dtype="bfloat16")
    assert one.seconds == pytest.approx(5e-6 + 2 * m * n * k / 4e14)
    assert profile.matmul(m=m, n=n, k=k, batch=64, dtype="float16").seconds < found.seconds


def test_a_batch_of_small_products_goes_by_bytes() -> None:
    profile = HardwareProfile.from_dict(full_profile(), "full")
    seconds = [profile.matmul(m=2048, n=2048, k=k, batch=64, dtype="bfloat16").seconds for k in (64, 128)]
    # both operands and the result: 2 * 2048 * 64 + 2048^2 numbers, and 2 * 2048 * 128 + 2048^2
    assert seconds[0] / seconds[1] == pytest.approx((2 * 64 + 2048) / (2 * 128 + 2048))


def test_all_to_all_counts_the_whole_value() -> None:
    # nccl-tests on 8 GPUs, S17: size 16 GiB per rank takes 43.2 ms, so the whole value is 128 GiB.
    estimate = H100.collective(Collective.ALL_TO_ALL, GroupShape(ranks=8, ranks_per_node=8), 8 * 2**34)
    assert estimate.seconds == pytest.approx(43.23e-3, rel=0.002)


def test_memory_bound_and_attention_follow_their_formulas() -> None:
    profile = synthetic(hbm_bytes_per_s=2e12, flop_per_s=1e14, launch_s=5e-6)
    assert profile.memory_bound(num_bytes=2e9).seconds == 1e-3
    assert profile.attention(flop=1e12, dtype="float32", backward=True).seconds == 1e-2
    assert profile.memory_bound(num_bytes=1).seconds == 5e-6 == profile.launch_s
    assert profile.attention(flop=1, dtype="bfloat16", backward=False).seconds == 5e-6


# --- what a profile may hold beside ---------------------------------------------------------------------------------

SQUARE = AttentionSizes(batch_heads=16, queries=1024, keys=1024, head_dim=128, causal=True)
FULL = HardwareProfile.from_dict(full_profile(), "full")


def test_attention_comes_from_its_table_and_is_exact_there() -> None:
    for backward in (False, True):
        table = next(table for table in FULL.attention_tables or () if table.backward == backward)
        for (heads, length, dim), time in zip(itertools.product(*table.grids), table.time_s, strict=True):
            sizes = AttentionSizes(batch_heads=heads, queries=length, keys=length, head_dim=dim, causal=True)
            estimate = FULL.attention(flop=1.0, dtype="bfloat16", backward=backward, sizes=sizes)
            assert (estimate.seconds, estimate.extrapolated) == (time, False)
            assert estimate.error_s == pytest.approx(0.05 * time)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"sizes": dataclasses.replace(SQUARE, causal=False)}, {}])
def test_attention_without_a_table_goes_by_its_rate(change: dict[str, object]) -> None:
    asked = {"flop": 4e12, "dtype": "bfloat16", "backward": False, "sizes": SQUARE} | change
    if not change:
        asked.pop("sizes")
    assert FULL.attention(**asked).seconds == 4e12 / 4e14
    without_tables = dataclasses.replace(FULL, attention_tables=None)
    assert without_tables.attention(**asked) == FULL.attention(**asked)


def test_attention_beyond_its_table_grows_as_its_work() -> None:
    def estimate(**sizes: float) -> Estimate:
        asked = dataclasses.replace(SQUARE, **sizes)
        return FULL.attention(flop=1.0, dtype="bfloat16", backward=False, sizes=asked)

    longer = estimate(queries=8192, keys=8192)
    assert longer.extrapolated
    assert longer.seconds == pytest.approx(5e-6 + 2 * 16 * 8192**2 * 128 / 4e14)
    assert longer.error_s == pytest.approx(longer.seconds * math.hypot(0.05, 0.1))
    crossed = estimate(queries=512, keys=2048)  # as much work as 1024 by 1024
    assert crossed.seconds == pytest.approx(estimate().seconds)
    assert crossed.extrapolated


@given(
    sizes=st.builds(
        AttentionSizes, batch_heads=sizes, queries=sizes, keys=sizes, head_dim=st.integers(1, 512), causal=st.just(True)
    ),
    grown=st.sampled_from(["batch_heads", "queries", "keys", "head_dim"]),
    more=st.integers(1, 5000),
)
def test_attention_time_never_decreases_with_a_size(sizes: AttentionSizes, grown: str, more: int) -> None:
    larger = dataclasses.replace(sizes, **{grown: getattr(sizes, grown) + more})
    before, after = (FULL.attention(flop=1.0, dtype="bfloat16", backward=True, sizes=s) for s in (sizes, larger))
    assert after.seconds >= before.seconds * (1 - ROUNDING)
    assert before.seconds >= FULL.launch_s * (1 - ROUNDING)


def test_memory_bound_kernels_come_from_their_table() -> None:
    assert [FULL.memory_bound(num_bytes=n).seconds for n in (2**14, 2**20, 2**30)] == [6e-6, 7e-6, 5e-4]
    assert FULL.memory_bound(num_bytes=1).seconds == 6e-6
    beyond = FULL.memory_bound(num_bytes=2**32)
    assert (beyond.seconds, beyond.extrapolated) == (4 * 5e-4, True)
    between = FULL.memory_bound(num_bytes=2**25)
    assert between.seconds == pytest.approx(math.sqrt(7e-6 * 5e-4))
    assert between.error_s == pytest.approx(between.seconds * 0.075)


def test_no_kernel_is_shorter_than_a_launch() -> None:
    slow = dataclasses.replace(FULL, launch=dataclasses.replace(FULL.launch, launch_s=1e-4))
    assert slow.memory_bound(num_bytes=2**20).seconds == 1e-4
    assert slow.memory_bound(num_bytes=2**30).seconds == 5e-4


def test_a_thin_matmul_reads_its_operands_at_the_rate_of_their_size() -> None:
    # 1 row against a weight of 2^25 bytes: 64 rows, the fewest of the table, take 10 us.
    cached = MemoryBoundTable(
        bytes=(2**25, 2**26), time_s=(8e-6, 9e-6), relative_error=(0.1, 0.1), sources=("made-up",)
    )
    profile = dataclasses.replace(FULL, memory_bound_table=cached)
    assert profile.matmul(m=1, n=4096, k=4096, dtype="bfloat16").seconds == pytest.approx(8e-6, rel=0.001)
    slow = dataclasses.replace(FULL, memory_bound_table=None)  # 2^25 bytes at 2 TB/s are 17 us
    rows_64 = slow.matmul(m=64, n=4096, k=4096, dtype="bfloat16").seconds
    assert slow.matmul(m=1, n=4096, k=4096, dtype="bfloat16").seconds == rows_64


def test_a_thin_matmul_with_a_weight_beyond_the_table_takes_no_less_than_reading_it() -> None:
    """A table's thinnest rows, scaled by work, would read 2^29 bytes faster than any memory."""
    profile = dataclasses.replace(FULL, memory_bound_table=None)
    read_s = 2 * 2**14 * 2**14 / profile.bandwidth.hbm_bytes_per_s
    thin = profile.matmul(m=1, n=2**14, k=2**14, dtype="bfloat16")
    assert thin.seconds == pytest.approx(read_s, rel=0.001)
    wide = profile.matmul(m=2**14, n=2**14, k=2**14, dtype="bfloat16")
    assert thin.relative_error > wide.relative_error  # the bandwidth's error is on top
    assert thin.extrapolated


def test_a_full_profile_round_trips_and_names_everything_in_its_fingerprint() -> None:
    again = HardwareProfile.from_dict(json.loads(FULL.dumps()), "again")
    assert again == FULL
    assert again.fingerprint == FULL.fingerprint
    assert FULL.date == datetime.date(2026, 3, 1)
    changed = [
        dataclasses.replace(FULL, date=datetime.date(2026, 3, 2)),
        dataclasses.replace(FULL, software={"torch": "2.11.0"}),
        dataclasses.replace(FULL, fitted=None),
        dataclasses.replace(FULL, overlap=None),
    ]
    assert len({FULL.fingerprint, *(profile.fingerprint for profile in changed)}) == 5


def test_what_an_older_file_does_not_hold_stays_absent() -> None:
    for name in ("cpu-gloo", "h100-sxm"):
        content = json.loads((REPOSITORY / "profiles" / f"{name}.json").read_text())
        assert json.loads(load_profile(name).dumps()) == content
        text = json.dumps(HardwareProfile.from_dict(content, name).to_dict(), sort_keys=True)
        assert load_profile(name).fingerprint == hashlib.sha256(text.encode()).hexdigest()


# --- what lies between and beyond ----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [H100, A100], ids=["H100", "A100"])
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64), dtype=dtypes, more=st.integers(1, 5000), which=st.data())
def test_matmul_time_never_decreases_with_a_size(
    profile: HardwareProfile, m: int, n: int, k: int, batch: int, dtype: str, more: int, which: st.DataObject
) -> None:
    smaller = {"m": m, "n": n, "k": k, "batch": batch}
    grown = which.draw(st.sampled_from(sorted(smaller)))
    larger = smaller | {grown: smaller[grown] + more}
    before, after = (profile.matmul(**shape, dtype=dtype).seconds for shape in (smaller, larger))
    assert after >= before * (1 - ROUNDING)
    assert before >= profile.launch_s * (1 - ROUNDING)


@given(kind=kinds, group=groups, num_bytes=message_bytes, more=st.floats(0, 1e11))
def test_collective_time_never_decreases_with_bytes(
    kind: Collective, group: GroupShape, num_bytes: float, more: float
) -> None:
    before, after = (H100.collective(kind, group, size) for size in (num_bytes, num_bytes + more))
    assert after.seconds >= before.seconds * (1 - ROUNDING)
    assert before.seconds > 0
    assert before.error_s > 0


@given(kind=kinds, group=groups, num_bytes=st.floats(1e8, 1e12))
def test_unmeasured_groups_follow_the_traffic_of_a_synthetic_machine(
    kind: Collective, group: GroupShape, num_bytes: float
) -> None:
    # No latency, and what a rank sends through its slowest link, written out apart from the product's own formula.
    profile = synthetic(latency_s=1e-12, intra_bytes_per_s=3e11, inter_bytes_per_s=4e10)
    p, q = group.ranks, group.ranks_per_node
    crosses = p > q
    sent = {
        Collective.ALL_REDUCE: 2 * num_bytes * (p - 1) / p / (q if crosses else 1),
        Collective.ALL_GATHER: num_bytes * (p - 1) / p / (q if crosses else 1),
        Collective.REDUCE_SCATTER: num_bytes * (p - 1) / p / (q if crosses else 1),
        Collective.ALL_TO_ALL: num_bytes / p * ((p - q) if crosses else (p - 1)) / p,
    }[kind]
    expected = sent / (4e10 if crosses else 3e11)
    assert profile.collective(kind, group, num_bytes).seconds == pytest.approx(expected, rel=1e-3)


@given(m=sizes, n=sizes, k=sizes)
def test_synthetic_matmul_takes_launch_plus_work(m: int, n: int, k: int) -> None:
    work_s, memory_s = 2 * m * n * k / 4e14, 2 * (m * k + k * n + m * n) / 2.9e12
    seconds = synthetic().matmul(m=m, n=n, k=k, dtype="bfloat16").seconds
    assert 5e-6 + work_s <= seconds * (1 + 1e-9)
    assert seconds <= (5e-6 + work_s) * 1.06 + memory_s


def test_extrapolation_is_flagged_and_less_sure() -> None:
    eight = GroupShape(ranks=8, ranks_per_node=8)
    measured = H100.collective(Collective.ALL_GATHER, eight, 2**30)
    beyond = H100.collective(Collective.ALL_GATHER, eight, 2**36)
    other = H100.collective(Collective.ALL_GATHER, GroupShape(ranks=512, ranks_per_node=8), 2**30)
    assert [estimate.extrapolated for estimate in (measured, beyond, other)] == [False, True, True]
    assert beyond.seconds == 4 * H100.collective(Collective.ALL_GATHER, eight, 2**34).seconds
    assert other.error_s / other.seconds > measured.error_s / measured.seconds
    inside, thin = (H100.matmul(m=m, n=4096, k=4096, dtype="bfloat16") for m in (3000, 3))
    assert [inside.extrapolated, thin.extrapolated] == [False, True]
    # Reading the weight takes longer than 3 rows of arithmetic.
    assert thin.seconds > 2 * 4096 * 4096 / 2.9e12


def test_below_the_first_size_lies_between_latency_and_the_first_time() -> None:
    table = next(t for t in H100.collectives if t.kind is Collective.ALL_GATHER and t.ranks == 80)
    estimate = table.time(table.bytes[0] / 2)
    assert estimate.extrapolated
    assert estimate.seconds == pytest.approx((table.latency_s + table.time_s[0]) / 2)
    # An inferred latency is no surer than a group that was never measured.
    through_profile = H100.collective(table.kind, table.group, table.bytes[0] / 2)
    assert through_profile.seconds == pytest.approx(estimate.seconds)
    assert through_profile.error_s >= through_profile.seconds * H100.group_extrapolation.across_nodes_relative_error
    small = H100.collective(Collective.ALL_GATHER, GroupShape(ranks=4, ranks_per_node=4), 1)
    assert not small.extrapolated


def test_one_rank_or_no_bytes_cost_nothing() -> None:
    alone, pair = GroupShape(ranks=1, ranks_per_node=1), GroupShape(ranks=2, ranks_per_node=2)
    for kind in Collective:
        assert H100.collective(kind, alone, 1e9) == H100.collective(kind, pair, 0) == Estimate.zero()


def test_room_left_in_the_node_does_not_matter() -> None:
    tight, roomy = GroupShape(ranks=4, ranks_per_node=4), GroupShape(ranks=4, ranks_per_node=8)
    kind = Collective.REDUCE_SCATTER
    assert H100.collective(kind, tight, 1e8) == H100.collective(kind, roomy, 1e8)


def test_estimates_add_up() -> None:
    one = Estimate(seconds=1.0, error_s=0.25)
    two = Estimate(seconds=2.0, error_s=0.5, extrapolated=True)
    assert one + two == Estimate(seconds=3.0, error_s=0.75, extrapolated=True)
    assert one + Estimate.zero() == one
    assert 2 * one == one * 2 == one + one


# --- what is not covered -------------------------------------------------------------------------------------------


def test_a_profile_without_matmuls_has_no_peak() -> None:
    assert dataclasses.replace(H100, matmuls=()).peak_flop_per_s == 0.0


def test_missing_measurements_are_named() -> None:
    with pytest.raises(ProfileError, match="no matmul measurement for dtype float64; covered: bfloat16, float16"):
        H100.matmul(m=1, n=1, k=1, dtype="float64")
    with pytest.raises(ProfileError, match="no attention measurement for dtype float64"):
        H100.attention(flop=1.0, dtype="float64", backward=False)
    with pytest.raises(ProfileError, match="16 ranks in a node of 8 GPUs; covered: up to 8 ranks in a node"):
        H100.collective(Collective.ALL_REDUCE, GroupShape(ranks=16, ranks_per_node=16), 1.0)
    with pytest.raises(ProfileError, match="sizes >= 1, got m=0"):
        H100.matmul(m=0, n=1, k=1, dtype="bfloat16")


def test_crossing_nodes_needs_a_measurement_across_nodes() -> None:
    one_node = synthetic(max_nodes=1)
    one_node.collective(Collective.ALL_GATHER, GroupShape(ranks=8, ranks_per_node=8), 1e6)
    with pytest.raises(ProfileError, match="no all_gather measurement across nodes"):
        one_node.collective(Collective.ALL_GATHER, GroupShape(ranks=16, ranks_per_node=8), 1e6)
    content = copy.deepcopy(CONTENT)
    content["collectives"] = [table for table in content["collectives"] if table["kind"] != "all_to_all"]
    with pytest.raises(
        ProfileError, match=r"no all_to_all measurement within a node .*; covered: all_gather across nodes"
    ):
        HardwareProfile.from_dict(content, "edited").collective(
            Collective.ALL_TO_ALL, GroupShape(ranks=2, ranks_per_node=2), 1e6
        )


def test_unknown_name_lists_the_shipped_and_the_nearest() -> None:
    assert "h100-sxm" in shipped_profiles()
    with pytest.raises(ProfileError, match=r"unknown profile 'h100'; did you mean 'h100-sxm'\? \(shipped: .*h100-sxm"):
        load_profile("h100")


# --- strictness ----------------------------------------------------------------------------------------------------


def test_round_trip_and_fingerprint() -> None:
    for profile in (H100, synthetic()):
        again = HardwareProfile.from_dict(json.loads(json.dumps(profile.to_dict())), "again")
        assert again == profile
        assert again.fingerprint == profile.fingerprint
    assert len(H100.fingerprint) == 64
    assert synthetic(latency_s=2e-5).fingerprint != synthetic().fingerprint


Edit = Callable[[dict], object]
MUTATIONS: dict[str, tuple[Edit, str]] = {
    "negative time": (
        lambda d: d["collectives"][3]["time_s"].__setitem__(4, -1),
        "collectives[3].time_s[4]: expected > 0, got -1",
    ),
    "zero time": (lambda d: d["matmuls"][0]["time_s"].__setitem__(0, 0), "matmuls[0].time_s[0]: expected > 0, got 0"),
    "nan": (lambda d: d["launch"].update(launch_s=math.nan), "launch.launch_s: expected a finite number, got nan"),
    "infinite": (lambda d: d["launch"].update(launch_s=math.inf), "launch.launch_s: expected a finite number, got inf"),
    "huge integer": (lambda d: d["launch"].update(launch_s=10**400), "launch.launch_s: expected a finite number"),
    "true as number": (lambda d: d["launch"].update(launch_s=True), "launch.launch_s: expected a number, got true"),
    "true as count": (lambda d: d.update(gpus_per_node=True), "gpus_per_node: expected an integer, got true"),
    "text as number": (
        lambda d: d["launch"].update(launch_s="5e-6"),
        "launch.launch_s: expected a number, got text '5e-6'",
    ),
    "float as count": (
        lambda d: d["matmuls"][1]["m"].__setitem__(0, 256.0),
        "matmuls[1].m[0]: expected an integer, got a number",
    ),
    "no nodes": (lambda d: d.update(gpus_per_node=0), "gpus_per_node: expected >= 1, got 0"),
    "null": (lambda d: d["memory"].update(inferred=None), "memory.inferred: expected text, got null"),
    "unknown key": (
        lambda d: d["bandwidth"].update(hbm_byte_per_s=1),
        "bandwidth.hbm_byte_per_s: unknown key; did you mean 'hbm_bytes_per_s'?",
    ),
    "missing key": (lambda d: d["bandwidth"].pop("hbm_bytes_per_s"), "bandwidth.hbm_bytes_per_s: missing key"),
    "array for object": (lambda d: d.update(memory=[]), "memory: expected an object, got an array"),
    "object for array": (lambda d: d.update(notes={}), "notes: expected an array, got an object"),
    "unknown kind": (
        lambda d: d["collectives"][0].update(kind="broadcast"),
        "collectives[0].kind: expected one of all_reduce, ",
    ),
    "decreasing time": (
        lambda d: d["collectives"][0]["time_s"].reverse(),
        "collectives[0].time_s[1]: expected >= time_s[0]",
    ),
    "decreasing matmul": (lambda d: d["matmuls"][0]["time_s"].reverse(), "matmuls[0].time_s["),
    "descending bytes": (
        lambda d: d["collectives"][0]["bytes"].reverse(),
        "collectives[0].bytes[1]: expected > bytes[0]",
    ),
    "too few times": (lambda d: d["collectives"][0]["time_s"].pop(), "collectives[0].time_s: expected "),
    "too few matmuls": (lambda d: d["matmuls"][2]["time_s"].pop(), "matmuls[2].time_s: expected 375 values, got 374"),
    "empty grid": (lambda d: d["matmuls"][0].update(m=[]), "matmuls[0].m: expected at least one value"),
    "latency above": (
        lambda d: d["collectives"][0].update(latency_s=1),
        "collectives[0].latency_s: expected <= time_s[0]",
    ),
    "one rank": (lambda d: d["collectives"][0].update(ranks=1), "collectives[0].ranks: expected >= 2, got 1"),
    "more per node": (
        lambda d: d["collectives"][0].update(ranks_per_node=99),
        "collectives[0].ranks_per_node: expected <= ranks",
    ),
    "same table twice": (lambda d: d["collectives"].append(d["collectives"][0]), "]: expected one entry for "),
    "unknown source": (
        lambda d: d["launch"].update(sources=["S99"]),
        "launch.sources: expected ids listed in sources, got ['S99']",
    ),
    "no source": (lambda d: d["matmuls"][0].update(sources=[]), "matmuls[0].sources: expected ids listed in sources"),
    "strange dtype": (lambda d: d["matmuls"][0].update(dtype="bf16"), "matmuls[0].dtype: expected one of "),
    "all reserved": (
        lambda d: d["memory"].update(reserved_bytes=2**60),
        "memory.reserved_bytes: expected < memory_bytes",
    ),
    "other version": (lambda d: d.update(schema_version=2), "schema_version: expected 1, got 2"),
    "other device": (lambda d: d.update(device_type="tpu"), "device_type: expected cuda or cpu, got 'tpu'"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_file_is_refused_with_the_path_of_the_key(name: str) -> None:
    edit, message = MUTATIONS[name]
    content = copy.deepcopy(CONTENT)
    edit(content)
    with pytest.raises(ProfileError) as caught:
        HardwareProfile.from_dict(content, "profiles/h100-sxm.json")
    assert str(caught.value).startswith("profiles/h100-sxm.json: ")
    assert message in str(caught.value)


FULL_MUTATIONS: dict[str, tuple[Edit, str]] = {
    "no date": (lambda d: d.update(date="last week"), "date: Invalid isoformat string: 'last week'"),
    "a number as version": (lambda d: d["software"].update(torch=2.13), "software.torch: expected text, got a number"),
    "unknown beside": (lambda d: d.update(overlaps={}), "overlaps: unknown key; did you mean 'overlap'?"),
    "falling attention": (
        lambda d: d["attention_tables"][1]["time_s"].reverse(),
        "attention_tables[1].time_s[1]: expected >= time_s[0]",
    ),
    "missing attention": (
        lambda d: d["attention_tables"][0]["time_s"].pop(),
        "attention_tables[0].time_s: expected 12 values, got 11",
    ),
    "attention twice": (
        lambda d: d["attention_tables"][1].update(backward=False),
        "attention_tables[1]: expected one entry for ('bfloat16', True, False)",
    ),
    "attention in a strange dtype": (
        lambda d: d["attention_tables"][1].update(dtype="half"),
        "attention_tables[1].dtype: expected one of ",
    ),
    "neither true nor false": (
        lambda d: d["attention_tables"][0].update(causal=1),
        "attention_tables[0].causal: expected true or false, got an integer 1",
    ),
    "spread too short": (
        lambda d: d["attention_tables"][0].update(spread={"relative": [0.1], "noisy_above": 0.2, "noisy": []}),
        "attention_tables[0].spread.relative: expected 12 values, got 1",
    ),
    "noise unmarked": (
        lambda d: d["attention_tables"][0]["spread"].update(noisy=[]),
        "attention_tables[0].spread.noisy: expected the points whose relative spread exceeds 0.2, [11], got []",
    ),
    "falling memory": (
        lambda d: d["memory_bound_table"]["time_s"].reverse(),
        "memory_bound_table.time_s[1]: expected >= time_s[0] = 0.0005, got 7e-06",
    ),
    "memory without a source": (
        lambda d: d["memory_bound_table"].update(sources=[]),
        "memory_bound_table.sources: expected ids listed in sources, got none",
    ),
    "attention of another source": (
        lambda d: d["attention_tables"][0].update(sources=["S9"]),
        "attention_tables[0].sources: expected ids listed in sources, got ['S9']",
    ),
    "overlap of another source": (
        lambda d: d["overlap"].update(sources=["S9"]),
        "overlap.sources: expected ids listed in sources, got ['S9']",
    ),
    "rows at odd bytes": (
        lambda d: d["misaligned_matmuls"][0].update(bytes=3),
        "misaligned_matmuls[0].bytes: expected one of 2, 4, 8, got 3",
    ),
    "misaligned twice": (
        lambda d: d["misaligned_matmuls"][1].update(bytes=8),
        "misaligned_matmuls[1]: expected one entry for ('bfloat16', 8), got a second",
    ),
    "batches twice": (
        lambda d: d["batched_matmuls"].append(d["batched_matmuls"][0]),
        "batched_matmuls[1]: expected one entry for bfloat16, got a second",
    ),
    "batches of falling sizes": (
        lambda d: d["batched_matmuls"][0].update(sizes=[256, 128, 2048]),
        "batched_matmuls[0].sizes[1]: expected > sizes[0] = 256, got 128",
    ),
    "batches that a larger size makes faster": (
        lambda d: d["batched_matmuls"][0].update(inner_flop_per_s=[1e14, 3e14, 4e14]),
        "batched_matmuls[0].sizes / inner_flop_per_s[1]: expected >= sizes / inner_flop_per_s[0] = 1.28e-12, got",
    ),
    "batches without a rate": (
        lambda d: d["batched_matmuls"][0].update(outer_flop_per_s=[1e14, 3e14]),
        "batched_matmuls[0].outer_flop_per_s: expected 3 values, got 2",
    ),
    "free issue": (lambda d: d["launch"].update(issue_s=0), "launch.issue_s: expected > 0, got 0"),
    "a speedup": (lambda d: d["overlap"].update(matmul_slowdown=-0.1), "overlap.matmul_slowdown: expected >= 0"),
    "fitted twice": (lambda d: d["fitted"].append(d["fitted"][0]), "fitted[1]: expected one entry for step_factor"),
    "fitted to nothing": (lambda d: d["fitted"][0].update(runs=0), "fitted[0].runs: expected >= 1, got 0"),
    "no residual": (lambda d: d["fitted"][0].pop("residual"), "fitted[0].residual: missing key"),
    "too many fitted": (
        lambda d: d["fitted"].extend([d["fitted"][0] | {"name": name} for name in "ab"]),
        "fitted: expected at most 2 numbers, got 3",
    ),
}


@pytest.mark.parametrize("name", FULL_MUTATIONS)
def test_a_wrong_full_file_is_refused_with_the_path_of_the_key(name: str) -> None:
    edit, message = FULL_MUTATIONS[name]
    content = copy.deepcopy(full_profile())
    edit(content)
    with pytest.raises(ProfileError) as caught:
        HardwareProfile.from_dict(content, "mine.json")
    assert str(caught.value).startswith("mine.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object, got an array"),
        ('{"name": "a", "name": "b"}', "duplicate key 'name'"),
        ('{"name": NaN}', "expected finite numbers, got NaN"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_file_is_a_profile_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_is_a_profile_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent.json", tmp_path, binary):
        with pytest.raises(ProfileError, match="cannot be read"):
            load_profile(path)


# --- where profiles are found --------------------------------------------------------------------------------------


def test_a_path_and_a_name_give_the_same_profile() -> None:
    assert load_profile(SHIPPED_FILE) == load_profile(str(SHIPPED_FILE)) == H100


def test_an_installed_profiles_package_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "profiles"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.json").write_text(json.dumps(synthetic_profile(name="other")))
    monkeypatch.setattr(tpplan, "__path__", [*tpplan.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tpplan.profiles", raising=False)
    try:
        assert shipped_profiles() == ("other",)
        assert load_profile("other").name == "other"
    finally:
        sys.modules.pop("tpplan.profiles", None)
        vars(tpplan).pop("profiles", None)


def test_importing_the_profile_needs_no_torch() -> None:
    code = "import sys, tpplan.machine.profile; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


# --- the shipped profile -------------------------------------------------------------------------------------------


def test_no_source_that_must_not_be_bundled_is_bundled() -> None:
    assert all(source.licence and "do not bundle" not in source.licence for source in H100.sources)
    assert len(SHIPPED_FILE.read_bytes()) < 200_000


def test_usable_memory_leaves_out_what_is_reserved() -> None:
    # nvidia-smi shows 81559 MiB.
    assert H100.memory_bytes == 81559 * 2**20
    assert H100.usable_bytes == H100.memory_bytes - H100.memory.reserved_bytes

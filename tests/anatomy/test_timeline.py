"""The timeline of a step holds the seconds of its price, part by part, in a row; the course of memory has the price's
peak; curves are what solve gives."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from examples import eager_to_shard, example, machine, solve_example

import tpplan
from tpplan.anatomy.anatomy import anatomy
from tpplan.anatomy.what_if import curves
from tpplan.core.errors import PlanMismatchError
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.machine.tables import Fitted
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    DATA_PARALLEL,
    FSDP_COPIES,
    ISSUE,
    RECOMPUTATION,
    TENSOR_PARALLEL,
)
from tpplan.plan.plan import Pass, Plan, Recompute
from tpplan.plan.step_anatomy import Anatomy, Stream
from tpplan.search.comparisons.alternatives import Problem, options_of
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.points.options import Cluster

H100 = load_profile("h100-sxm")
WAITS = dataclasses.replace(H100, launch=dataclasses.replace(H100.launch, issue_s=1e-4))
NUMBER = Fitted(name="overlap_slowdown", value=0.3, residual=0.1, runs=9, what="made up")
SLOWED = dataclasses.replace(machine(intra_bytes_per_s=1e8), fitted=(NUMBER,))

#: example, profile, what the plan is solved for, and a part that its timeline is to have ("" beside kernels)
CASES: dict[str, tuple[str, HardwareProfile, dict[str, Any], str]] = {
    "one rank": ("mlp", machine(), {"gpus": 1}, COMPUTE),
    "tp in two micro-batches": (
        "gpt",
        eager_to_shard(),
        {"gpus": 2, "tp": 2, "global_batch": 8, "micro_batch": 4},
        TENSOR_PARALLEL,
    ),
    "tp and FSDP": ("gpt", eager_to_shard(), {"gpus": 4, "tp": 2, "fsdp": 2, "micro_batch": 1}, FSDP_COPIES),
    "FSDP over shard x tp": (
        "gpt",
        SLOWED,
        {"gpus": 4, "tp": 2, "fsdp": 2, "micro_batch": 1, "fsdp_over_tp": True},
        FSDP_COPIES,
    ),
    "replicas of FSDP": (
        "mlp",
        SLOWED,
        {"gpus": 4, "tp": 1, "fsdp": 2, "gpus_per_node": 2, "micro_batch": 1},
        DATA_PARALLEL,
    ),
    "ZeRO-2 whose collectives slow kernels": (
        "llama",
        SLOWED,
        {"gpus": 2, "tp": 1, "fsdp": 2, "reshard_after_forward": False, "micro_batch": 1},
        "",
    ),
    "recomputed on a machine that waits for its CPU": (
        "gpt",
        WAITS,
        {"gpus": 4, "tp": 2, "fsdp": 2, "micro_batch": 1, "recompute": "full"},
        ISSUE,
    ),
    "whole gradients": (
        "gpt",
        H100,
        {"gpus": 4, "tp": 1, "fsdp": 4, "global_batch": 12, "micro_batch": 1, "whole_gradients": True},
        ACCUMULATION,
    ),
    "mixed precision": ("mlp", H100, {"gpus": 2, "tp": 1, "precision": "bf16-mixed", "micro_batch": 2}, ACCUMULATION),
}


def taken_apart(name: str, plan: Plan, profile: HardwareProfile) -> Anatomy:
    module = example(name)
    return anatomy(plan, module.build_model, module.example_inputs, profile=profile, loss=module.loss)


def assert_is_the_price(found: Anatomy, plan: Plan) -> None:
    """By part to rounding, in a row without gaps, with collectives beside kernels alone."""
    planned = {part: seconds for part, seconds in plan.predicted.time_s.items() if seconds}
    assert found.timeline.seconds_by_part() == pytest.approx(planned, rel=1e-9)
    row = [segment for segment in found.timeline.segments if segment.part]
    assert row[0].start_s == pytest.approx(found.timeline.start_s)
    for before, after in pairwise(row):
        assert after.start_s == pytest.approx(before.end_s)
    assert found.timeline.end_s == pytest.approx(plan.predicted.step_time_s)
    kernels = [s for s in row if s.part in (COMPUTE, RECOMPUTATION)]
    for beside in (segment for segment in found.timeline.segments if not segment.part):
        assert beside.stream is Stream.DATA
        during = sum(max(0.0, min(k.end_s, beside.end_s) - max(k.start_s, beside.start_s)) for k in kernels)
        assert during == pytest.approx(beside.seconds)


def test_a_timeline_of_units_that_stay_gathered_adds_up_to_the_price() -> None:
    """The second micro-batch gathers nothing."""
    options = {"global_batch": 8, "micro_batch": 1, "whole_gradients": True, "reshard_after_forward": False}
    plan = solve_example("gpt", SLOWED, gpus=4, tp=1, fsdp=4, prove=False, **options)
    module, fsdp = example("gpt"), dataclasses.replace(plan.fsdp, gathered_once=True)
    once = tpplan.price(
        dataclasses.replace(plan, fsdp=fsdp),
        module.build_model,
        module.example_inputs,
        profile=SLOWED,
        loss=module.loss,
    )
    for part in (DATA_PARALLEL, FSDP_COPIES):
        assert 0 < once.predicted.time_s[part] < plan.predicted.time_s[part]
    assert_is_the_price(taken_apart("gpt", once, SLOWED), once)


@pytest.mark.parametrize("case", CASES)
def test_a_timeline_adds_up_to_the_price(case: str) -> None:
    name, profile, options, part = CASES[case]
    plan = solve_example(name, profile, prove=False, **options)
    found = taken_apart(name, plan, profile)
    assert not found.problem
    assert_is_the_price(found, plan)
    assert part in {segment.part for segment in found.timeline.segments}
    assert found.timeline.earlier == plan.batch.accumulation_steps - 1
    peak = max(found.moments, key=lambda moment: moment.num_bytes)
    assert peak.memory_bytes == plan.predicted.memory_bytes
    assert (peak.during, peak.module or "<root>") == (plan.predicted.peak_during, plan.predicted.peak_module)


def test_parts_of_a_layer_that_run_again_are_in_it() -> None:
    plan = solve_example("gpt", eager_to_shard(), gpus=2, tp=2, prove=False)
    (block,) = plan.blocks
    inside = dataclasses.replace(plan, recompute={f"{block}.feed_forward": Recompute.FULL})
    module = example("gpt")
    priced = tpplan.price(inside, module.build_model, module.example_inputs, profile=eager_to_shard(), loss=module.loss)
    found = taken_apart("gpt", priced, eager_to_shard())
    assert_is_the_price(found, priced)
    again = {segment.module for segment in found.timeline.segments if segment.part == RECOMPUTATION}
    assert again
    assert all(name.endswith(".feed_forward") for name in again)


def test_a_recomputed_layer_runs_again_before_its_backward() -> None:
    plan = solve_example("gpt", eager_to_shard(), gpus=2, tp=2, recompute="full", prove=False)
    segments = taken_apart("gpt", plan, eager_to_shard()).timeline.segments
    (first, *_) = (i for i, segment in enumerate(segments) if segment.part == RECOMPUTATION)
    layer = segments[first].module
    backward = [
        i
        for i, s in enumerate(segments)
        if s.part == COMPUTE and s.during is Pass.BACKWARD and s.module.startswith(f"{layer}.")
    ]
    assert first < min(backward)


def test_a_plan_of_another_profile_says_so() -> None:
    plan = solve_example("mlp", machine(), gpus=2, tp=2, prove=False)
    found = taken_apart("mlp", plan, machine(flop_per_s=1e12))
    assert "made with another version of synthetic" in found.problem


def test_another_model_is_refused() -> None:
    plan = solve_example("mlp", machine(), gpus=2, tp=2, prove=False)
    with pytest.raises(PlanMismatchError, match="made for another model"):
        taken_apart("gpt", plan, machine())


def test_curves_are_what_solve_gives() -> None:
    module, cluster = example("mlp"), Cluster(gpus=2, gpus_per_node=2, profile=machine())
    plan = solve_example("mlp", machine(), gpus=2, prove=False)
    problem = Problem(
        build_model=module.build_model,
        example_inputs=module.example_inputs,
        cluster=cluster,
        options=options_of(plan) | {"loss": module.loss},
        reuse=Reuse(),
    )
    found = {curve.name: curve for curve in curves(problem, plan)}
    assert list(found) == ["GPUs", "global batch", "sequence length", "memory limit", "bandwidth of links"]
    for option, name in (("global_batch", "global batch"), ("seq_len", "sequence length")):
        for outcome in found[name].outcomes:
            own = problem.solve(prove=False, micro_batch="auto", **{option: int(outcome.value)})
            assert outcome.step_time_s == own.predicted.step_time_s
    assert [outcome.value for outcome in found["GPUs"].outcomes] == [1, 2, 4, 8]
    assert [outcome.mesh for outcome in found["GPUs"].outcomes][:1] == ["one rank"]
    by_links = found["bandwidth of links"].outcomes
    step_s = {outcome.value: outcome.step_time_s for outcome in by_links}
    assert step_s[1] == pytest.approx(next(own.step_time_s for own in found["GPUs"].outcomes if own.value == 2))
    assert sorted(step_s.values(), reverse=True) == list(step_s.values())


def test_a_value_without_a_plan_says_why() -> None:
    module, cluster = example("mlp"), Cluster(gpus=2, gpus_per_node=2, profile=machine())
    plan = solve_example("mlp", machine(), gpus=2, prove=False)
    needed = plan.predicted.peak_memory_bytes
    tight = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory_limit_bytes=0.2 * needed))
    problem = Problem(
        build_model=module.build_model,
        example_inputs=module.example_inputs,
        cluster=cluster,
        options=options_of(plan) | {"loss": module.loss, "tp": 1, "fsdp": 1, "recompute": "none"},
        reuse=Reuse(),
    )
    (curve,) = (curve for curve in curves(problem, tight) if curve.name.startswith("memory"))
    none = curve.outcomes[0]
    assert none.step_time_s is None
    assert "no plan fits" in none.problem

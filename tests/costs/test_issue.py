"""How long a GPU waits for the CPU, against kernels issued and run one by one; and what CPU profiles do with it."""

import dataclasses

import pytest
from examples import eager_to_shard, example, solve_example

from tpplan.costs.cpu_launch_lag import LaunchLag, waiting
from tpplan.costs.runs.kernels import MemoryBound, kernel_time
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import OptimizerIssue
from tpplan.plan.parts import ISSUE
from tpplan.plan.plan import Plan

#: kernels of a forward and of a backward
KERNELS = (40, 80)
#: seconds to issue one, and to run one of a forward and one of a backward
CASES = [(1.0, 0.2, 0.3), (1.0, 3.0, 2.0), (1.0, 0.2, 2.0), (1.0, 3.0, 0.4), (1.0, 1.8, 0.5)]


def issuing(profile: HardwareProfile, issue_s: float | None) -> HardwareProfile:
    return dataclasses.replace(profile, launch=dataclasses.replace(profile.launch, issue_s=issue_s))


def one_by_one(issue_s: float, forward_s: float, backward_s: float, steps: int) -> float:
    """When the last kernel is done: each starts when it is issued and the one before it is done."""
    issued = done = 0.0
    for _ in range(steps):
        for count, seconds in zip(KERNELS, (forward_s, backward_s), strict=True):
            for _ in range(count):
                issued += issue_s
                done = max(done, issued) + seconds
    return done


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("issue_s", "forward_s", "backward_s"), CASES)
def test_waiting_is_what_issuing_kernels_one_by_one_takes_longer(
    issue_s: float, forward_s: float, backward_s: float, steps: int
) -> None:
    forward = KERNELS[0] * (issue_s - forward_s)
    both = forward + KERNELS[1] * (issue_s - backward_s)
    running_s = steps * (KERNELS[0] * forward_s + KERNELS[1] * backward_s)
    expressions = waiting({"all": LaunchLag(forward=(forward,), both=(both,))}, steps)
    found = running_s + max(e.value({"all": 0}) for e in expressions)
    # The first kernel is issued before anything runs.
    assert found == pytest.approx(one_by_one(issue_s, forward_s, backward_s, steps), abs=issue_s + 1e-9)


def plan(issue_s: float | None, **options: object) -> Plan:
    return solve_example("gpt", issuing(eager_to_shard(), issue_s), gpus=1, prove=False, **options)


def test_a_step_takes_no_less_than_issuing_its_kernels() -> None:
    eager, slow = plan(None), plan(1.0)
    assert ISSUE not in eager.predicted.time_s
    micro_batches = slow.batch.accumulation_steps
    waited_s = slow.predicted.time_s[ISSUE]
    # A second for each of them is longer than all else by far.
    assert waited_s > 50 * micro_batches
    again = plan(2.0).predicted.time_s[ISSUE]
    compute_s = slow.predicted.time_s["compute"]
    assert again + compute_s == pytest.approx(2 * (waited_s + compute_s))


def test_a_cpu_that_is_fast_enough_costs_nothing() -> None:
    assert plan(1e-12).predicted.step_time_s == pytest.approx(plan(None).predicted.step_time_s)


def test_on_a_cpu_issuing_is_added_to_each_kernel() -> None:
    profile = dataclasses.replace(eager_to_shard(), device_type="cpu")
    kernel = MemoryBound(num_bytes=10**6)
    longer = kernel_time(issuing(profile, 0.25), kernel).seconds - kernel_time(profile, kernel).seconds
    assert longer == pytest.approx(0.25)
    assert issuing(profile, 0.25).issue_s is None
    assert kernel_time(issuing(eager_to_shard(), 0.25), kernel) == kernel_time(eager_to_shard(), kernel)


def stepping(profile: HardwareProfile, sharded_s: float, plain_s: float) -> HardwareProfile:
    """A machine where so many seconds of the CPU are one parameter's part of a step."""
    issue = OptimizerIssue(
        optimizer="adamw", sharded_s=sharded_s, plain_s=plain_s, relative_error=0.5, sources=("made-up",)
    )
    return dataclasses.replace(profile, optimizer_issues=(issue,))


@pytest.mark.parametrize(("gpus", "each_s"), [(1, 1.0), (2, 8.0)])
def test_an_optimizer_is_issued_for_each_parameter_sharded_or_plain(gpus: int, each_s: float) -> None:
    model = example("mlp").build_model()
    issued_s = each_s * len(list(model.parameters()))
    on_cpu = dataclasses.replace(eager_to_shard(), device_type="cpu")
    for machine, is_cpu in ((eager_to_shard(), False), (on_cpu, True)):
        free, dear = (
            solve_example("mlp", profile, gpus=gpus, prove=False).predicted
            for profile in (machine, stepping(machine, sharded_s=8.0, plain_s=1.0))
        )
        # A CPU issues and runs; beside a GPU it issues, which here takes longer than all the GPU does.
        alone_s = free.time_s["optimizer"] if is_cpu else 0.0
        assert dear.time_s["optimizer"] == pytest.approx(issued_s + alone_s)
        assert dear.step_time_error_s == pytest.approx(0.5 * issued_s, rel=1e-3)


def test_an_optimizer_issued_in_less_than_a_gpu_runs_it_costs_nothing() -> None:
    plans = [
        solve_example("mlp", profile, gpus=2, prove=False)
        for profile in (eager_to_shard(), stepping(eager_to_shard(), sharded_s=1e-12, plain_s=1e-12))
    ]
    assert plans[0].predicted.time_s == pytest.approx(plans[1].predicted.time_s)
    assert plans[0].predicted.step_time_error_s == plans[1].predicted.step_time_error_s

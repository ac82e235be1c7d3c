"""How long a GPU waits for the CPU, against kernels issued and run one by one; and what CPU profiles do with it."""

import dataclasses

import pytest
from examples import eager_to_shard, solve_example

from tpplan.costs.compute import MemoryBound, kernel_time
from tpplan.costs.issue import Lag, waiting
from tpplan.formulate import ISSUE
from tpplan.plan import Plan
from tpplan.profile import HardwareProfile

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
    expressions = waiting({"all": Lag(forward=(forward,), both=(both,))}, steps)
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

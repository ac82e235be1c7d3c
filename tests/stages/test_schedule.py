"""The orders of schedules against torch's own, and the seconds of a step against known formulas."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from tpplan.plan.pipeline_plan import Schedule, why_unscheduled
from tpplan.plan.step_anatomy import StageWork
from tpplan.stages.schedule import Action, StageTimes, kept_during, orders, seconds_of, waiting_during
from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.parallel import LoopedSchedule, orders_of

FORWARD, BACKWARD, WEIGHTS = StageWork.FORWARD, StageWork.BACKWARD, StageWork.WEIGHTS
INTERLEAVED, ZERO_BUBBLE = Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE

CASES = [(2, 2, 4), (4, 3, 5), (4, 2, 4), (4, 2, 10), (4, 3, 8), (3, 2, 6), (8, 4, 16), (4, 1, 4), (4, 1, 9), (2, 1, 2)]


#: schedules that torch's runtime runs action by action, with the numbers of ranks, stages a rank and micro-batches
LOOPED = [(kind, *case) for kind in (INTERLEAVED, ZERO_BUBBLE) for case in CASES if not why_unscheduled(kind, *case)]


def torch_schedule(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> LoopedSchedule:
    """Torch's schedule of stages without models."""
    kind = ScheduleInterleavedZeroBubble if schedule is ZERO_BUBBLE else ScheduleInterleaved1F1B
    with fake_group(ranks):
        count = ranks * virtual
        stages = [PipelineStage(nn.Identity(), index, count, torch.device("cpu")) for index in range(0, count, ranks)]
        return kind(stages, micro_batches, loss_fn=lambda a, b: a)  # type: ignore[arg-type]


def torch_orders(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """What torch's schedule runs on each rank."""
    every = orders_of(torch_schedule(schedule, ranks, virtual, micro_batches))
    return [[Action(stage, StageWork(work), index) for stage, work, index in order] for order in every]


def received_early(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> list[int]:
    """By rank the most tensors that torch's schedule receives into, beside the one that an action takes."""
    found = []
    placed = torch_schedule(schedule, ranks, virtual, micro_batches).pipeline_order_with_comms
    for _, order in sorted(placed.items()):
        taken = {"FORWARD": "RECV_F", "FULL_BACKWARD": "RECV_B", "BACKWARD_INPUT": "RECV_B"}
        waiting: set[tuple[str, int, int | None]] = set()
        most = 0
        for action in order:
            kind, what = action.computation_type.name, (action.stage_index, action.microbatch_index)
            if kind in taken.values():
                waiting.add((kind, *what))
            elif kind in taken:
                waiting.discard((taken[kind], *what))
                most = max(most, len(waiting))
        found.append(most)
    return found


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro_batches"), LOOPED)
def test_what_is_received_early(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> None:
    """Torch also counts turns in which a rank waits, by which it may receive an action sooner or later."""
    every = waiting_during(orders(schedule, ranks, virtual, micro_batches))
    for own, expected in zip(every, received_early(schedule, ranks, virtual, micro_batches), strict=True):
        assert abs(max(map(len, own)) - expected) <= 2


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro_batches"), LOOPED)
def test_orders_are_those_of_torch(schedule: Schedule, ranks: int, virtual: int, micro_batches: int) -> None:
    found = [list(order) for order in orders(schedule, ranks, virtual, micro_batches)]
    assert found == torch_orders(schedule, ranks, virtual, micro_batches)


@pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO_BUBBLE])
def test_numbers_of_micro_batches_that_torch_refuses_are_refused(schedule: Schedule) -> None:
    for ranks, micro_batches in itertools.product((2, 3, 4), range(1, 20)):
        refused = why_unscheduled(schedule, ranks, 2, micro_batches)
        try:
            torch_orders(schedule, ranks, 2, micro_batches)
        except ValueError:
            assert "rounds" in refused
        else:
            assert refused == "" or "fewer" in refused


def equal(stages: int, send_s: float = 0.0) -> list[StageTimes]:
    return [StageTimes(forward_s=1.0, backward_s=2.0, send_s=send_s) for _ in range(stages)]


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [c for c in CASES if c[2] % c[0] == 0])
def test_bubble_of_equal_stages_is_that_of_the_formula(ranks: int, virtual: int, micro_batches: int) -> None:
    """(p - 1) / v micro-batches of waiting [Narayanan et al. 2021]."""
    schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    every = orders(schedule, ranks, virtual, micro_batches)
    found = seconds_of(every, equal(ranks * virtual))
    assert found == pytest.approx(3.0 * (micro_batches * virtual + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (3, 6), (4, 4), (4, 8), (8, 16)])
def test_bubble_of_deferred_weight_gradients_is_that_of_the_formula(ranks: int, micro_batches: int) -> None:
    """(p - 1) (F + B - W), where 1F1B waits for (p - 1) (F + B + W) [Qi et al. 2023, table 1]."""
    times = StageTimes(forward_s=1.0, backward_s=1.25, send_s=0.0, weights_s=0.75)
    found = seconds_of(orders(ZERO_BUBBLE, ranks, 1, micro_batches), [times] * ranks)
    assert found == pytest.approx(3.0 * micro_batches + (ranks - 1) * (1.0 + 1.25 - 0.75))


def brute_force(every: tuple[tuple[Action, ...], ...], times: list[StageTimes]) -> float:
    """The longest path through the actions: each waits for its rank's last one, and for what it reads."""
    ends: dict[Action, float] = {}
    last, ranks = len(times) - 1, len(every)

    def before(rank: int, place: int) -> Iterator[float]:
        action = every[rank][place]
        if place:
            yield ends.get(every[rank][place - 1], -1.0)
        if action.work is FORWARD and action.stage:
            made = Action(action.stage - 1, FORWARD, action.micro_batch)
        elif action.work is BACKWARD and action.stage < last:
            made = Action(action.stage + 1, BACKWARD, action.micro_batch)
        elif action.work is BACKWARD:
            made = Action(action.stage, FORWARD, action.micro_batch)
        elif action.work is WEIGHTS:
            made = Action(action.stage, BACKWARD, action.micro_batch)
        else:
            return
        yield (
            ends[made] + times[min(made.stage, action.stage)].send_s * (made.stage != action.stage)
            if (made in ends)
            else -1.0
        )

    while len(ends) < sum(map(len, every)):
        for rank in range(ranks):
            for place, action in enumerate(every[rank]):
                waited = [0.0, *before(rank, place)]
                if min(waited) >= 0.0:
                    own = times[action.stage]
                    ends[action] = max(waited) + own.of(action.work)
    return max(ends.values())


def test_step_of_unequal_stages_is_the_longest_path() -> None:
    times = [StageTimes(forward_s=1 + 0.3 * (i % 3), backward_s=2 + 0.5 * (i % 2), send_s=0.01 * i) for i in range(8)]
    deferring = [replace(one, backward_s=one.backward_s - 0.7, weights_s=0.7) for one in times]
    for ranks, virtual in ((4, 2), (2, 4)):
        every = orders(ZERO_BUBBLE, ranks, virtual, 8)
        assert brute_force(every, deferring) <= seconds_of(every, deferring) <= brute_force(every, deferring) * 1.01
        every = orders(Schedule.INTERLEAVED, ranks, virtual, 8)
        # Sends that meet on a link go one by one, which only adds.
        assert brute_force(every, times) <= seconds_of(every, times) <= brute_force(every, times) * 1.01
    every = orders(Schedule.ONE_F_ONE_B, 8, 1, 12)
    assert seconds_of(every, times) == pytest.approx(brute_force(every, times), rel=0.01)


def test_micro_batches_in_flight() -> None:
    """The first of p ranks keeps p micro-batches under 1F1B; interleaved, (v - 1) p + 2 (p - 1) + 1 of its stages. A
    zero-bubble schedule keeps as many as 1F1B, and on rank r the weight gradients of r and of the one that runs."""
    for rank, order in enumerate(orders(Schedule.ONE_F_ONE_B, 4, 1, 8)):
        assert max(kept.in_flight[0] for _, kept in kept_during(order, 4)) == 4 - rank
        assert not any(any(kept.deferred) for _, kept in kept_during(order, 4))
    for rank, order in enumerate(orders(Schedule.INTERLEAVED, 4, 3, 8)):
        assert max(sum(kept.in_flight) for _, kept in kept_during(order, 4)) == 2 * 4 + 2 * (3 - rank) + 1
    for rank, order in enumerate(orders(ZERO_BUBBLE, 4, 1, 8)):
        assert max(kept.in_flight[0] for _, kept in kept_during(order, 4)) == 4 - rank
        assert max(kept.deferred[0] for _, kept in kept_during(order, 4)) == rank + 1


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_slower_stages_is_no_shorter(seed: int) -> None:
    """Floors of a search simulate the least seconds of stages, and rest on it."""
    draw = random.Random(seed)
    for _ in range(10):
        parts, virtual = draw.choice([2, 3, 4]), draw.choice([2, 3, 4])
        every = orders(Schedule.INTERLEAVED, parts, virtual, parts * draw.choice([1, 2, 4]))
        least = [
            StageTimes(forward_s=draw.random(), backward_s=2 * draw.random(), send_s=draw.choice([0.0, 0.01, 0.3]))
            for _ in range(parts * virtual)
        ]
        slower = [
            replace(one, forward_s=one.forward_s * (1 + draw.random()), backward_s=one.backward_s * (1 + draw.random()))
            for one in least
        ]
        assert seconds_of(every, slower) >= seconds_of(every, least) * (1 - 1e-12)

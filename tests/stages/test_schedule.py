"""The orders of schedules against torch's own, and the seconds of a step against known formulas."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from tpplan.plan.pipeline_plan import Schedule, why_unscheduled
from tpplan.stages.schedule import Action, StageTimes, kept_during, orders, seconds_of, waiting_during
from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.parallel import orders_of

CASES = [(2, 2, 4), (4, 3, 5), (4, 2, 4), (4, 2, 10), (4, 3, 8), (3, 2, 6), (8, 4, 16), (4, 1, 4), (4, 1, 9), (2, 1, 2)]


def torch_schedule(ranks: int, virtual: int, micro_batches: int) -> ScheduleInterleaved1F1B:
    """Torch's schedule of stages without models."""
    with fake_group(ranks):
        count = ranks * virtual
        stages = [PipelineStage(nn.Identity(), index, count, torch.device("cpu")) for index in range(0, count, ranks)]
        return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=lambda a, b: a)  # type: ignore[arg-type]


def torch_orders(ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """What torch's schedule runs on each rank."""
    return [[Action(*action) for action in order] for order in orders_of(torch_schedule(ranks, virtual, micro_batches))]


def received_early(ranks: int, virtual: int, micro_batches: int) -> list[int]:
    """By rank the most tensors that torch's schedule receives into, beside the one that an action takes."""
    found = []
    placed = torch_schedule(ranks, virtual, micro_batches).pipeline_order_with_comms
    for _, order in sorted(placed.items()):
        taken = {"FORWARD": "RECV_F", "FULL_BACKWARD": "RECV_B"}
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


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [case for case in CASES if case[1] > 1])
def test_what_is_received_early(ranks: int, virtual: int, micro_batches: int) -> None:
    """Torch also counts turns in which a rank waits, by which it may receive an action sooner or later."""
    every = waiting_during(orders(Schedule.INTERLEAVED, ranks, virtual, micro_batches))
    for own, expected in zip(every, received_early(ranks, virtual, micro_batches), strict=True):
        assert abs(max(map(len, own)) - expected) <= 2


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [case for case in CASES if case[1] > 1])
def test_orders_are_those_of_torch(ranks: int, virtual: int, micro_batches: int) -> None:
    assert why_unscheduled(Schedule.INTERLEAVED, ranks, virtual, micro_batches) == ""
    found = [list(order) for order in orders(Schedule.INTERLEAVED, ranks, virtual, micro_batches)]
    assert found == torch_orders(ranks, virtual, micro_batches)


def test_numbers_of_micro_batches_that_torch_refuses_are_refused() -> None:
    for ranks, micro_batches in itertools.product((2, 3, 4), range(1, 20)):
        refused = why_unscheduled(Schedule.INTERLEAVED, ranks, 2, micro_batches)
        try:
            torch_orders(ranks, 2, micro_batches)
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


def brute_force(every: tuple[tuple[Action, ...], ...], times: list[StageTimes]) -> float:
    """The longest path through the actions: each waits for its rank's last one, and for what it reads."""
    ends: dict[Action, float] = {}
    last, ranks = len(times) - 1, len(every)

    def before(rank: int, place: int) -> Iterator[float]:
        action = every[rank][place]
        if place:
            yield ends.get(every[rank][place - 1], -1.0)
        if action.is_forward and action.stage:
            made = Action(action.stage - 1, True, action.micro_batch)
        elif not action.is_forward and action.stage < last:
            made = Action(action.stage + 1, False, action.micro_batch)
        elif not action.is_forward:
            made = Action(action.stage, True, action.micro_batch)
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
                    ends[action] = max(waited) + (own.forward_s if action.is_forward else own.backward_s)
    return max(ends.values())


def test_step_of_unequal_stages_is_the_longest_path() -> None:
    times = [StageTimes(forward_s=1 + 0.3 * (i % 3), backward_s=2 + 0.5 * (i % 2), send_s=0.01 * i) for i in range(8)]
    for ranks, virtual in ((4, 2), (2, 4)):
        every = orders(Schedule.INTERLEAVED, ranks, virtual, 8)
        # Sends that meet on a link go one by one, which only adds.
        assert brute_force(every, times) <= seconds_of(every, times) <= brute_force(every, times) * 1.01
    every = orders(Schedule.ONE_F_ONE_B, 8, 1, 12)
    assert seconds_of(every, times) == pytest.approx(brute_force(every, times), rel=0.01)


def test_micro_batches_in_flight() -> None:
    """The first of p ranks keeps p micro-batches under 1F1B; interleaved, (v - 1) p + 2 (p - 1) + 1 of its stages."""
    for rank, order in enumerate(orders(Schedule.ONE_F_ONE_B, 4, 1, 8)):
        assert max(counts[0] for _, counts in kept_during(order, 4)) == 4 - rank
    for rank, order in enumerate(orders(Schedule.INTERLEAVED, 4, 3, 8)):
        assert max(sum(counts) for _, counts in kept_during(order, 4)) == 2 * 4 + 2 * (3 - rank) + 1


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

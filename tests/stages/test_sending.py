"""What a 1F1B step waits for what is sent, against a simulation of what torch's schedule posts and waits for."""

import itertools
import random
from collections.abc import Iterator

import pytest

from tpplan.search.pipelines.step_seconds import sent_s

#: a message: True for an activation, False for a gradient; the stage that sends it; the micro-batch
Message = tuple[bool, int, int]
FORWARD_S, BACKWARD_S = 1.0, 2.0


def program(rank: int, ranks: int, micro_batches: int) -> Iterator[tuple[str, list[Message]] | float]:
    """What a rank does in order: posts messages, waits for them, computes for some seconds. [torch's Schedule1F1B]"""

    def activation(stage: int, index: int) -> list[Message]:
        return [(True, stage, index)] if 0 <= stage < ranks - 1 else []

    def gradient(stage: int, index: int) -> list[Message]:
        return [(False, stage, index)] if 0 < stage < ranks else []

    ahead = min(micro_batches, ranks - rank)
    in_flight: list[Message] = []
    for index in range(ahead):
        received = activation(rank - 1, index)
        yield from (("post", received), ("wait", received), FORWARD_S, ("wait", in_flight))
        in_flight = activation(rank, index)
        if index < ahead - 1:
            yield "post", in_flight
    for index in range(micro_batches):
        if index:
            in_flight = [*in_flight, *gradient(rank, index - 1)]
        following = index + ahead - 1
        if index > 0 and following < micro_batches:  # a gradient is sent as an activation is received
            both = [*gradient(rank, index - 1), *activation(rank - 1, following)]
            yield from (("post", both), ("wait", both), FORWARD_S)
            in_flight = activation(rank, following)
        elif index:
            yield "post", gradient(rank, index - 1)
            in_flight = gradient(rank, index - 1)
        received = gradient(rank + 1, index)
        if following < micro_batches:  # an activation is sent as a gradient is received
            both = [*in_flight, *received]
            yield from (("post", both), ("wait", both), BACKWARD_S)
            in_flight = []
        else:
            yield from (("post", received), ("wait", received), BACKWARD_S, ("wait", in_flight))
    yield from (("post", gradient(rank, micro_batches - 1)), ("wait", gradient(rank, micro_batches - 1)))


def simulated(between: list[float], micro_batches: int) -> float:
    """Seconds of a step whose stages take equally long. A message leaves when both ranks have posted it and the one
    before it has arrived."""
    ranks = len(between) + 1
    left = [list(program(rank, ranks, micro_batches)) for rank in range(ranks)]
    now, posted, arrived = [0.0] * ranks, dict[Message, list[float]](), dict[Message, float]()

    def arrives(message: Message) -> float | None:
        is_activation, stage, index = message
        before = arrives((is_activation, stage, index - 1)) if index else 0.0
        if message not in arrived and before is not None and len(posted.get(message, [])) == 2:
            arrived[message] = max(*posted[message], before) + between[stage if is_activation else stage - 1]
        return arrived.get(message)

    while any(left):
        were = sum(map(len, left))
        for rank, steps in enumerate(left):
            while steps:
                step = steps[0]
                if isinstance(step, float):
                    now[rank] += step
                elif step[0] == "post":
                    for message in step[1]:
                        posted.setdefault(message, []).append(now[rank])
                else:
                    ends = [arrives(message) for message in step[1]]
                    if None in ends:
                        break
                    now[rank] = max([now[rank], *(end for end in ends if end is not None)])
                steps.pop(0)
        assert sum(map(len, left)) < were, "ranks wait for each other"
    return max(now)


def waited(between: list[float], micro_batches: int) -> float:
    """Seconds of the simulation beside those of 1F1B that sends at once."""
    alone = (micro_batches + len(between)) * (FORWARD_S + BACKWARD_S)
    assert simulated([0.0] * len(between), micro_batches) == pytest.approx(alone)
    return simulated(between, micro_batches) - alone


@pytest.mark.parametrize("micro_batches", [2, 3, 8, 16])
@pytest.mark.parametrize("send_s", [0.1, 1.0])
def test_two_stages_wait_for_exchanges_alone(micro_batches: int, send_s: float) -> None:
    assert sent_s([send_s, 0.0], micro_batches) == pytest.approx(waited([send_s], micro_batches))


@pytest.mark.parametrize(("ranks", "times"), list(itertools.product((3, 4, 8), (1, 2, 4))))
def test_more_stages_wait_for_an_exchange_less_at_most(ranks: int, times: int) -> None:
    for send_s in (0.1, 1.0):
        found = waited([send_s] * (ranks - 1), times * ranks)
        assert found <= sent_s([*[send_s] * (ranks - 1), 0.0], times * ranks) <= found + send_s * (1 + 1e-9)


def test_no_links_are_waited_for_longer() -> None:
    """Of links with any speeds the fast ones are partly hidden behind the slow."""
    draw = random.Random(0)
    for _ in range(100):
        ranks = draw.choice((2, 3, 4, 8))
        micro_batches = ranks * draw.choice((1, 2, 4))
        between = [draw.choice((0.01, 0.05, 0.5, 1.0)) for _ in range(ranks - 1)]
        found, whole = waited(between, micro_batches), simulated(between, micro_batches)
        assert found <= sent_s([*between, 0.0], micro_batches) * (1 + 1e-9)
        assert sent_s([*between, 0.0], micro_batches) - found < 0.15 * whole

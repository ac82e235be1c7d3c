"""In which order the ranks of a pipeline run forwards and backwards of micro-batches, what each rank keeps meanwhile,
and how long a step takes.

A pipeline of p ranks with v stages a rank has p * v stages; rank r has stages r, r + p, r + 2p, ... [Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2]. The orders are
those of torch.distributed.pipelining, which `Pipeline` compares with torch's own before the first step.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpplan.plan.pipeline_plan import Schedule, rounds_of


class Action(NamedTuple):
    """The forward or the backward of a micro-batch in a stage."""

    stage: int
    is_forward: bool
    micro_batch: int


def orders(schedule: Schedule, ranks: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in a step, in order."""
    if schedule is Schedule.ONE_F_ONE_B:
        return tuple(tuple(_one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks))
    return tuple(tuple(_interleaved(rank, ranks, virtual_stages, micro_batches)) for rank in range(ranks))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """A rank runs ahead by as many forwards as ranks from it on, then one backward and one forward in turns."""
    ahead = min(micro_batches, ranks - rank)
    yield from (Action(rank, True, index) for index in range(ahead))
    for index in range(micro_batches):
        yield Action(rank, False, index)
        if index + ahead < micro_batches:
            yield Action(rank, True, index + ahead)


def _interleaved(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Micro-batches go through a rank's stages in rounds: a round's micro-batches through its first stage, through its
    second, and so on; backwards through the stages from the last to the first."""
    round_size = micro_batches // rounds_of(ranks, micro_batches)
    total = micro_batches * virtual_stages
    ahead = min((virtual_stages - 1) * round_size + 2 * (ranks - 1 - rank), total)

    def action(step: int, is_forward: bool) -> Action:
        turn, place = divmod(step, round_size)
        number, own = divmod(turn, virtual_stages)
        own = own if is_forward else virtual_stages - 1 - own
        return Action(own * ranks + rank, is_forward, number * round_size + place)

    yield from (action(step, True) for step in range(ahead))
    for step in range(total):
        if step + ahead < total:
            yield action(step + ahead, True)
        yield action(step, False)


def kept_during(order: Sequence[Action], ranks: int) -> Iterator[tuple[Action, tuple[int, ...]]]:
    """Yields each action of a rank with the micro-batches that each of its stages has in flight during it: those whose
    forward has begun and whose backward has not ended."""
    counts = [0] * (max(action.stage for action in order) // ranks + 1)
    for action in order:
        own = action.stage // ranks
        counts[own] += action.is_forward
        yield action, tuple(counts)
        counts[own] -= not action.is_forward


def waiting_during(every: Sequence[Sequence[Action]]) -> list[list[tuple[Action, ...]]]:
    """By rank and action what else has been received then: the actions that wait for it.

    A rank receives as its peer sends, at the earliest. All ranks run an action at a time, in turns, as torch does where
    it places what is received in an order (torch.distributed.pipelining.schedules._add_send_recv).
    """
    last = max(action.stage for order in every for action in order)
    here: list[dict[Action, None]] = [{} for _ in every]
    found: list[list[tuple[Action, ...]]] = [[] for _ in every]
    while any(len(done) < len(order) for done, order in zip(found, every, strict=True)):
        for order, done, own in zip(every, found, here, strict=True):
            action = order[len(done)] if len(done) < len(order) else None
            if action is None or not (_needs_nothing(action) or _ends(action, last) or action in own):
                continue
            own.pop(action, None)
            done.append(tuple(own))
            following = _following(action, last)
            if following is not None and following.stage != action.stage:
                here[following.stage % len(every)][following] = None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch in a stage, and of sending what the stage gives to the next (0 for the last)."""

    forward_s: float
    backward_s: float
    send_s: float


class Run(NamedTuple):
    """When a rank runs an action, and when it sends what the action gives, in seconds from the first forward on; the
    sending of what stays on the rank takes no time."""

    rank: int
    action: Action
    start_s: float
    end_s: float
    sends_from_s: float
    sent_s: float


def seconds_of(every: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> float:
    """Seconds from the first forward to the last backward, where a rank computes while it sends; as `runs_of`."""
    return max(run.end_s for run in runs_of(every, times))


def runs_of(
    every: Sequence[Sequence[Action]], times: Sequence[StageTimes], *, waits_for_sending: bool = False
) -> Iterator[Run]:
    """Yields all actions, where each rank runs its own in order, one at a time.

    A forward waits for what the stage before sends, a backward for what the stage behind sends back. A rank computes
    while it sends, unless `waits_for_sending`; what two ranks send each other goes one by one. `times` are those of the
    stages. [A simulation of the actions' dependencies]
    """
    ranks = len(every)
    last = len(times) - 1
    arrived: dict[Action, float] = {}
    place, free = [0] * ranks, [0.0] * ranks
    links: dict[frozenset[int], float] = {}
    ready = [(0.0, rank) for rank in range(ranks)]
    waiting: dict[Action, int] = {}
    while ready:
        _, rank = heapq.heappop(ready)
        action = every[rank][place[rank]]
        own = times[action.stage]
        start = max(free[rank], arrived.get(action, 0.0))
        begin = sent = end = start + (own.forward_s if action.is_forward else own.backward_s)
        place[rank] += 1
        following = _following(action, last)
        if following is not None:
            link = frozenset((rank, following.stage % ranks))
            sending = times[min(action.stage, following.stage)].send_s if len(link) > 1 else 0.0
            begin = max(end, links.get(link, 0.0)) if sending else end
            links[link] = arrived[following] = sent = begin + sending
        free[rank] = sent if waits_for_sending else end
        yield Run(rank, action, start, end, begin, sent)
        for other in (rank, waiting.pop(following, None) if following is not None else None):
            if other is None or place[other] == len(every[other]):
                continue
            wanted = every[other][place[other]]
            if _needs_nothing(wanted) or wanted in arrived:
                heapq.heappush(ready, (max(free[other], arrived.get(wanted, 0.0)), other))
            else:
                waiting[wanted] = other
    assert all(done == len(order) for done, order in zip(place, every, strict=True)), "ranks wait for each other"


def _following(action: Action, last: int) -> Action | None:
    """The action that waits for what an action gives, None after the backward of the first stage."""
    if action.is_forward:
        return action._replace(stage=action.stage + 1) if action.stage < last else action._replace(is_forward=False)
    return action._replace(stage=action.stage - 1) if action.stage else None


def _needs_nothing(action: Action) -> bool:
    return action.is_forward and action.stage == 0


def _ends(action: Action, last: int) -> bool:
    """True for a backward that begins at the loss."""
    return not action.is_forward and action.stage == last

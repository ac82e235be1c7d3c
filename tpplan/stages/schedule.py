"""In which order the ranks of a pipeline run forwards and backwards of micro-batches, what each rank keeps meanwhile,
and how long a step takes.

A pipeline of p ranks with v stages a rank has p * v stages; rank r has stages r, r + p, r + 2p, ... [Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2]. The orders are
those of torch.distributed.pipelining, which `Pipeline` compares with torch's own before the first step.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpplan.plan.pipeline_plan import Schedule, rounds_of
from tpplan.plan.step_anatomy import StageWork


class Action(NamedTuple):
    """The work of a stage on a micro-batch: its forward, its backward, or by a zero-bubble schedule the gradients of
    linear layers' weights apart from the backward (tpplan.apply.modules.deferred_gradients)."""

    stage: int
    work: StageWork
    micro_batch: int


def orders(schedule: Schedule, ranks: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in a step, in order."""
    if schedule is Schedule.ONE_F_ONE_B:
        return tuple(tuple(_one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks))
    looped = _zero_bubble if schedule is Schedule.ZERO_BUBBLE else _interleaved
    return tuple(tuple(looped(rank, ranks, virtual_stages, micro_batches)) for rank in range(ranks))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """A rank runs ahead by as many forwards as ranks from it on, then one backward and one forward in turns."""
    ahead = min(micro_batches, ranks - rank)
    yield from (Action(rank, StageWork.FORWARD, index) for index in range(ahead))
    for index in range(micro_batches):
        yield Action(rank, StageWork.BACKWARD, index)
        if index + ahead < micro_batches:
            yield Action(rank, StageWork.FORWARD, index + ahead)


def _interleaved(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Micro-batches go through a rank's stages in rounds: a round's micro-batches through its first stage, through its
    second, and so on; backwards through the stages from the last to the first."""
    turns = _Turns(rank, ranks, virtual_stages, micro_batches)
    ahead = min(turns.one_round + 2 * (ranks - 1 - rank), turns.total)
    yield from (turns.action(step, StageWork.FORWARD) for step in range(ahead))
    for step in range(turns.total):
        if step + ahead < turns.total:
            yield turns.action(step + ahead, StageWork.FORWARD)
        yield turns.action(step, StageWork.BACKWARD)


def _zero_bubble(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """As interleaved, with half as many forwards ahead. Rank r computes a backward's weight gradients r backwards
    later, and those that are left in the end, where it would wait for others. [Qi et al., "Zero Bubble Pipeline
    Parallelism", 2023, section 2.3: ZB-H1]"""
    turns = _Turns(rank, ranks, virtual_stages, micro_batches)
    ahead = min(turns.one_round + ranks - 1 - rank, turns.total)
    yield from (turns.action(step, StageWork.FORWARD) for step in range(ahead))
    for step in range(turns.total):
        if step + ahead < turns.total:
            yield turns.action(step + ahead, StageWork.FORWARD)
        yield turns.action(step, StageWork.BACKWARD)
        if step >= rank:
            yield turns.action(step - rank, StageWork.WEIGHTS)
    yield from (turns.action(step, StageWork.WEIGHTS) for step in range(max(0, turns.total - rank), turns.total))


class _Turns(NamedTuple):
    """The order in which micro-batches go through the stages of a rank."""

    rank: int
    ranks: int
    virtual_stages: int
    micro_batches: int

    @property
    def total(self) -> int:
        """The forwards of a step."""
        return self.micro_batches * self.virtual_stages

    @property
    def round_size(self) -> int:
        """The micro-batches that go through one stage before they go through the next."""
        return self.micro_batches // rounds_of(self.ranks, self.micro_batches)

    @property
    def one_round(self) -> int:
        """The forwards of a round in all stages but the last."""
        return (self.virtual_stages - 1) * self.round_size

    def action(self, step: int, work: StageWork) -> Action:
        """The forward, or the work of backward, that is number `step` of its kind."""
        turn, place = divmod(step, self.round_size)
        number, own = divmod(turn, self.virtual_stages)
        own = own if work is StageWork.FORWARD else self.virtual_stages - 1 - own
        return Action(own * self.ranks + self.rank, work, number * self.round_size + place)


class Kept(NamedTuple):
    """The micro-batches that each stage of a rank keeps something of: those in flight, whose forward has begun and
    whose backward has not ended; and those with weight gradients to come, whose backward has begun."""

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]


def kept_during(order: Sequence[Action], ranks: int) -> Iterator[tuple[Action, Kept]]:
    """Yields each action of a rank with what its stages keep during it."""
    number = max(action.stage for action in order) // ranks + 1
    in_flight, deferred = [0] * number, [0] * number
    defers = any(action.work is StageWork.WEIGHTS for action in order)
    for action in order:
        own = action.stage // ranks
        in_flight[own] += action.work is StageWork.FORWARD
        deferred[own] += defers and action.work is StageWork.BACKWARD
        yield action, Kept(tuple(in_flight), tuple(deferred))
        in_flight[own] -= action.work is StageWork.BACKWARD
        deferred[own] -= action.work is StageWork.WEIGHTS


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
    """Seconds of a micro-batch in a stage, and of sending what the stage gives to the next (0 for the last).
    `weights_s` are those of weight gradients that are no part of the backward."""

    forward_s: float
    backward_s: float
    send_s: float
    weights_s: float = 0.0

    def of(self, work: StageWork) -> float:
        """The seconds of some work."""
        return {
            StageWork.FORWARD: self.forward_s,
            StageWork.BACKWARD: self.backward_s,
            StageWork.WEIGHTS: self.weights_s,
        }[work]


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
    """Seconds from the first forward to the last action, where a rank computes while it sends; as `runs_of`."""
    return max(run.end_s for run in runs_of(every, times))


def runs_of(
    every: Sequence[Sequence[Action]], times: Sequence[StageTimes], *, waits_for_sending: bool = False
) -> Iterator[Run]:
    """Yields all actions, where each rank runs its own in order, one at a time.

    A forward waits for what the stage before sends, a backward for what the stage behind sends back. A rank computes
    while it sends, and what two ranks send each other goes one by one; with `waits_for_sending` it waits, and both send
    at once. `times` are those of the stages. [A simulation of the actions' dependencies]
    """
    ranks = len(every)
    last = len(times) - 1
    arrived: dict[Action, float] = {}
    place, free = [0] * ranks, [0.0] * ranks
    links: dict[Hashable, float] = {}
    ready = [(0.0, rank) for rank in range(ranks)]
    waiting: dict[Action, int] = {}
    while ready:
        _, rank = heapq.heappop(ready)
        action = every[rank][place[rank]]
        own = times[action.stage]
        start = max(free[rank], arrived.get(action, 0.0))
        begin = sent = end = start + own.of(action.work)
        place[rank] += 1
        following = _following(action, last)
        if following is not None:
            ends = rank, following.stage % ranks
            link: Hashable = ends if waits_for_sending else frozenset(ends)
            sending = times[min(action.stage, following.stage)].send_s if ends[0] != ends[1] else 0.0
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
    """The action that waits for what an action gives; None after the backward of the first stage, and after weight
    gradients, which no stage waits for."""
    if action.work is StageWork.FORWARD:
        return (
            action._replace(stage=action.stage + 1) if action.stage < last else action._replace(work=StageWork.BACKWARD)
        )
    return action._replace(stage=action.stage - 1) if action.work is StageWork.BACKWARD and action.stage else None


def _needs_nothing(action: Action) -> bool:
    """True for a micro-batch's first forward, and for weight gradients, for which their rank has what they read."""
    return action.work is StageWork.WEIGHTS or (action.work is StageWork.FORWARD and action.stage == 0)


def _ends(action: Action, last: int) -> bool:
    """True for a backward that begins at the loss."""
    return action.work is StageWork.BACKWARD and action.stage == last

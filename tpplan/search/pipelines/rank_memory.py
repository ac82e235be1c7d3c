"""The bytes that a rank of a pipeline holds while one of its stages runs: that stage, its others, and tensors between.

A stage that does not run holds its parameters, gradients and states, and for each micro-batch in flight the activations
that its backward needs, the tensors that it received and those that it sent: torch's schedules keep both until the
backward. The stage that runs receives the gradients of what it sent besides. How many micro-batches each stage has in
flight follows from the schedule's order (tpplan.stages.schedule).

Where a schedule defers weights' gradients, all that their products read is held from the backward on. In the backward
of the running micro-batch it takes the place of the activations, so that the larger of the two counts: an estimate, as
either may grow and shrink unevenly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tpplan.core.units import DTYPE_BYTES
from tpplan.plan.parts import BESIDE, SAVED
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.plan.proof_hash import as_proven
from tpplan.plan.sections.ranks import StagePlan, TensorPlan
from tpplan.plan.step_anatomy import StageWork
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.stages.schedule import kept_during


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The micro-batches in flight of the stage that runs, and bytes of all else but its own step. Of its rank's stages
    `like`, itself among them, keep as many layers gathered as it does, which the bytes do not have."""

    in_flight: int
    beside_bytes: float
    #: the part of other stages that FSDP shards, times its degree
    sharded_beside_bytes: float = 0.0
    like: int = 1

    def with_share(self, share: float) -> "Held":
        """Returns this with a share of the micro-batches in flight and of the like stages, at least one of each."""
        in_flight, like = (max(1, math.ceil(share * number)) for number in (self.in_flight, self.like))
        return replace(self, in_flight=in_flight, like=like)


def num_bytes(tensors: Sequence[TensorPlan], tp: int) -> int:
    """Bytes of tensors between stages on one of `tp` ranks, for one micro-batch."""
    return sum(math.prod(one.on_a_rank(tp).shape) * DTYPE_BYTES[one.dtype] for one in tensors)


@cache
def most_in_flight(shape: PipelineShape, micro_batches: int, *, with_deferred: bool = False) -> tuple[int, ...]:
    """By rank the most micro-batches that its stages have in flight together; with those whose weights' gradients are
    deferred."""
    every = shape.orders(micro_batches)
    found = (
        [
            sum((*kept.in_flight, *(kept.deferred if with_deferred else ())))
            for _, kept in kept_during(order, shape.parts)
        ]
        for order in every
    )
    return tuple(map(max, found))


def assumed(stage: StagePlan, in_flight: int, sharded_bytes: float, whole_bytes: float, tp: int, like: int) -> Held:
    """A first assumption for a stage: each of its rank's `like` stages keeps as much of a micro-batch, `in_flight` of
    them in all, and as many layers gathered; the others hold some bytes besides, which FSDP shards, and some which it
    does not."""
    between = float(_between(stage, in_flight, tp))
    return Held(in_flight=in_flight, beside_bytes=between + whole_bytes, sharded_beside_bytes=sharded_bytes, like=like)


def held(stages: Sequence[StagePlan], shape: PipelineShape, micro_batches: int, tp: int) -> list[Held]:
    """For each stage the bytes that its rank, one of `tp`, holds while it runs, at the worst of its actions; `stages`
    say what each keeps."""
    found: list[Held | None] = [None] * len(stages)
    most = [-1.0] * len(stages)
    crossing = [(num_bytes(stage.receives, tp), num_bytes(stage.sends, tp)) for stage in stages]
    for rank, (order, waiting) in enumerate(shape.received(micro_batches)):
        for (action, kept), early in zip(kept_during(order, shape.parts), waiting, strict=True):
            running, own = stages[action.stage], action.stage // shape.parts
            in_flight = kept.in_flight[own] + (action.work is StageWork.WEIGHTS)  # the one that runs is in flight
            beside = float(_between(running, in_flight, tp))
            if kept.deferred[own] and action.work is not StageWork.FORWARD:
                beside -= _takes_the_place(running)
            beside += sum(crossing[one.stage][0 if one.work is StageWork.FORWARD else 1] for one in early)
            for place, (count, deferred) in enumerate(zip(kept.in_flight, kept.deferred, strict=True)):
                other = place * shape.parts + rank
                beside += deferred * stages[other].deferred.kept_bytes
                if other != action.stage:
                    beside += stages[other].resting_bytes
                    beside += count * (stages[other].kept_bytes + sum(crossing[other]))
            total = beside + (in_flight - 1) * running.kept_bytes
            if total > most[action.stage]:
                most[action.stage] = total
                found[action.stage] = Held(in_flight=in_flight, beside_bytes=beside)
    return [one for one in found if one is not None]


def _takes_the_place(stage: StagePlan) -> float:
    """Bytes of a running micro-batch's activations in whose place its backward keeps what is deferred, of which the
    largest gradient is made while it is kept."""
    deferred = stage.deferred
    return min(deferred.kept_bytes, max(0.0, stage.kept_bytes - deferred.largest_bytes))


def _between(stage: StagePlan, in_flight: int, tp: int) -> float:
    """Bytes of the tensors that the running stage received and sent, and of a gradient of what it sent; what the
    running micro-batch received is counted as an input of the stage."""
    return (in_flight - 1) * num_bytes(stage.receives, tp) + (in_flight + 1) * num_bytes(stage.sends, tp)


def with_held(plan: Plan, now: Held) -> Plan:
    """The plan of a stage beside which its rank holds something else: each moment of a step holds as much more."""
    stage, predicted = plan.stage, plan.predicted
    assert stage is not None
    kept = (now.in_flight - stage.in_flight) * stage.kept_bytes
    beside = now.beside_bytes - stage.beside_bytes
    parts = dict(predicted.memory_bytes)
    parts[SAVED] = parts.get(SAVED, 0.0) + kept
    parts[BESIDE] = now.beside_bytes
    changed = replace(
        plan,
        stage=replace(stage, in_flight=now.in_flight, beside_bytes=now.beside_bytes),
        predicted=replace(
            predicted,
            peak_memory_bytes=predicted.peak_memory_bytes + kept + beside,
            memory_bytes={part: value for part, value in parts.items() if value},
        ),
    )
    return as_proven(changed) if plan.proof.status is ProofStatus.PROVEN else changed


def excess_bytes(plan: Plan) -> float:
    """Bytes by which a plan exceeds its limit, below 0 where it fits."""
    predicted = plan.predicted
    return predicted.peak_memory_bytes + predicted.slack_bytes - predicted.memory_limit_bytes

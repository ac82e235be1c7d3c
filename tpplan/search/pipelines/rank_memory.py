"""The bytes that a rank of a pipeline holds while one of its stages runs: that stage, its others, and tensors between.

A stage that does not run holds its parameters, gradients and states, and for each micro-batch in flight the activations
that its backward needs, the tensors that it received and those that it sent: torch's schedules keep both until the
backward. The stage that runs receives the gradients of what it sent besides. How many micro-batches each stage has in
flight follows from the schedule's order (tpplan.stages.schedule).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpplan.core.units import DTYPE_BYTES
from tpplan.plan.parts import BESIDE, SAVED
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.plan.proof_hash import as_proven
from tpplan.plan.sections.ranks import StagePlan, TensorPlan
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


def most_in_flight(shape: PipelineShape, micro_batches: int) -> list[int]:
    """By rank the most micro-batches that its stages have in flight together."""
    every = shape.orders(micro_batches)
    return [max(sum(counts) for _, counts in kept_during(order, shape.parts)) for order in every]


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
        for (action, counts), early in zip(kept_during(order, shape.parts), waiting, strict=True):
            running = stages[action.stage]
            beside = float(_between(running, counts[action.stage // shape.parts], tp))
            beside += sum(crossing[one.stage][0 if one.is_forward else 1] for one in early)
            for place, count in enumerate(counts):
                other = place * shape.parts + rank
                if other != action.stage:
                    beside += stages[other].resting_bytes
                    beside += count * (stages[other].kept_bytes + sum(crossing[other]))
            in_flight = counts[action.stage // shape.parts]
            total = beside + (in_flight - 1) * running.kept_bytes
            if total > most[action.stage]:
                most[action.stage] = total
                found[action.stage] = Held(in_flight=in_flight, beside_bytes=beside)
    return [one for one in found if one is not None]


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

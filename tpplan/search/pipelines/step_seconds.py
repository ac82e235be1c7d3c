"""Seconds of a step of a pipeline, from those of its stages.

A step of 1F1B with M micro-batches takes as long as the slowest stage's M micro-batches, and, while the pipeline fills
and drains, one micro-batch of each other stage (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", 2021, section 2.2, for stages that take different times). What is sent between stages is
not hidden: torch's schedule waits for it. Two neighbours send each other an activation and a gradient at once; a rank
between two neighbours does so with one after the other. Gradients of parameters that several stages have are exchanged
once a step.

An interleaved or zero-bubble step is simulated action by action (tpplan.stages.schedule), as torch's schedule computes
while it sends. A backward, without what it recomputes, counts as two forwards; of it the deferred products of weights'
gradients take what the profile says. What a stage does once a step follows its last action.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tpplan.core.layout import local_shape
from tpplan.core.mesh import GroupShape
from tpplan.layouts.assignment import master_bytes
from tpplan.machine.profile import Collective
from tpplan.plan.parts import DATA_PARALLEL, FSDP_COPIES, OPTIMIZER, RECOMPUTATION, TP_REDUCTION
from tpplan.plan.pipeline_plan import PipelinePrediction
from tpplan.plan.plan import Plan, StagePlan, uses_fsdp
from tpplan.plan.sections.ranks import TensorPlan
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.rank_memory import num_bytes
from tpplan.search.points.options import Cluster
from tpplan.stages.schedule import StageTimes, seconds_of

#: parts of a stage's step that happen once, however many micro-batches there are
_ONCE = frozenset({OPTIMIZER, TP_REDUCTION})
#: forwards that a backward takes as long as: it makes two products for each of the forward's
_BACKWARD = 2.0


def predicted(plans: Sequence[Plan], shape: PipelineShape, cluster: Cluster) -> PipelinePrediction:
    """Seconds of a step of these stages on all GPUs."""
    steps = plans[0].batch.accumulation_steps
    between = [
        0.0 if plan.stage is None else seconds_between(plan.stage, plan.mesh.tp, shape, cluster) for plan in plans
    ]
    tied_s = _seconds_of_ties(plans, shape, cluster)
    if not shape.is_one_f_one_b:
        return _simulated(plans, between, shape, tied_s)
    each = [_seconds_of_a_micro_batch(plan, steps) for plan in plans]
    slowest = max(plan.predicted.step_time_s for plan in plans)
    bubble = sum(each) - max(each)
    send = sent_s(between, steps) + tied_s
    return PipelinePrediction(step_time_s=slowest + bubble + send, stage_s=slowest, bubble_s=bubble, send_s=send)


def sent_s(between: Sequence[float], steps: int) -> float:
    """Seconds that a 1F1B step waits for what is sent, of stages each of which sends to the next for some seconds (0
    for the last). The first micro-batch crosses all links while the pipeline fills, the last while it drains; each of
    the others waits for the exchanges of a rank with both neighbours.

    >>> sent_s([1.0, 0.0], 4)
    5.0
    """
    exchanged = max(before + behind for before, behind in pairwise([0.0, *between]))
    return 2 * sum(between) + (steps - 1) * exchanged


def _simulated(
    plans: Sequence[Plan], between: Sequence[float], shape: PipelineShape, tied_s: float
) -> PipelinePrediction:
    steps = plans[0].batch.accumulation_steps
    times = [times_of(plan, shape, steps, send_s) for plan, send_s in zip(plans, between, strict=True)]
    once = [seconds_once(plan) + exposed_s(plan, shape) for plan in plans]
    ranks = [plans[rank :: shape.parts] for rank in range(shape.parts)]
    slowest = max(sum(plan.predicted.step_time_s + exposed_s(plan, shape) for plan in own) for own in ranks)
    whole = simulated_s(times, once, shape, steps)
    unsent = [replace(one, send_s=0.0) for one in times]
    alone = simulated_s(unsent, once, shape, steps)
    return PipelinePrediction(
        step_time_s=whole + tied_s,
        stage_s=slowest,
        bubble_s=max(0.0, alone - slowest),
        send_s=max(0.0, whole - max(alone, slowest)) + tied_s,
    )


def simulated_s(every: Sequence[StageTimes], once: Sequence[float], shape: PipelineShape, steps: int) -> float:
    """Seconds of a simulated step of `steps` micro-batches, of stages with some seconds of a micro-batch and some
    that a step takes `once`."""
    at_the_end = max(sum(once[rank :: shape.parts]) for rank in range(shape.parts))
    return seconds_of(shape.orders(steps), every) + at_the_end


def seconds_between(stage: StagePlan, tp: int, shape: PipelineShape, cluster: Cluster) -> float:
    """Seconds of sending a stage's tensors to the next, 0 for the last."""
    return seconds_of_sending(stage.index, stage.sends, tp, shape, cluster)


def seconds_of_sending(
    index: int, sends: Sequence[TensorPlan], tp: int, shape: PipelineShape, cluster: Cluster
) -> float:
    """Seconds of sending some tensors from the stage of an index to the next, 0 for none: of two ranks of `tp` that
    gather as much from each other."""
    if not sends:
        return 0.0
    part = index % shape.parts
    return _seconds_of_a_pair(part, (part + 1) % shape.parts, num_bytes(sends, tp), shape, cluster)


def dims_to_slice(crossing: Sequence[Sequence[TensorPlan]], tp: int) -> list[int | None]:
    """None, and the dims of which tp ranks may send slices, where some tensors cross each cut. A tensor alone is
    sliced, and not in its last dim, which is the width of the layers."""
    if tp == 1 or any(len(tensors) != 1 for tensors in crossing):
        return [None]
    shapes = {tensor.shape for (tensor,) in crossing}
    dims = range(min(map(len, shapes)) - 1)
    return [None, *(dim for dim in dims if all(shape[dim] % tp == 0 for shape in shapes))]


def _seconds_of_ties(plans: Sequence[Plan], shape: PipelineShape, cluster: Cluster) -> float:
    """Seconds of a step in which the slowest stage gets the gradients of its parameters from the others that have them,
    one after the other."""
    found = [0.0] * len(plans)
    for index, plan in enumerate(plans):
        for one in plan.stage.ties if plan.stage is not None else ():
            own = plan.parameter_plans()[one.name]
            ranks = plan.mesh.shard if uses_fsdp(plan.mesh, plan.precision) else 1
            moved = math.prod(local_shape(own.shape, own.placement, plan.mesh.tp)) / ranks
            size = moved * master_bytes(plan.precision, own.dtype) * own.trainable
            for other in one.stages:
                if other != index:
                    ends = index % shape.parts, other % shape.parts
                    found[index] += _seconds_of_a_pair(*ends, size, shape, cluster)
    return max(found)


def _seconds_of_a_pair(one: int, other: int, size: float, shape: PipelineShape, cluster: Cluster) -> float:
    """Seconds in which a rank of one part of the pipeline sends `size` bytes to one of another, and gets as many."""
    own, per_node = cluster.gpus // shape.parts, cluster.gpus_per_node
    is_near = one * own // per_node == other * own // per_node
    pair = GroupShape(ranks=2, ranks_per_node=2 if is_near else 1)
    return cluster.load_profile().collective(Collective.ALL_GATHER, pair, 2.0 * size).seconds


def times_of(plan: Plan, shape: PipelineShape, steps: int, send_s: float) -> StageTimes:
    """Seconds of a micro-batch in a stage, of `steps` in a step."""
    seconds = _seconds_of_a_micro_batch(plan, steps)
    again = min(seconds, plan.predicted.time_s.get(RECOMPUTATION, 0.0) / steps)
    times = split_times(seconds, again, send_s)
    if not shape.is_zero_bubble or plan.stage is None:
        return times
    weights = min(plan.stage.deferred.seconds, times.backward_s)
    return replace(times, backward_s=times.backward_s - weights, weights_s=weights)


def exposed_s(plan: Plan, shape: PipelineShape) -> float:
    """Seconds of reductions that a stage waits for as it defers weights' gradients."""
    return plan.stage.deferred.exposed_s if shape.is_zero_bubble and plan.stage is not None else 0.0


def split_times(seconds: float, again_s: float, send_s: float) -> StageTimes:
    """Some seconds of a micro-batch as those of its forward and backward; of the latter `again_s` recompute."""
    forward = (seconds - again_s) / (1 + _BACKWARD)
    return StageTimes(forward_s=forward, backward_s=seconds - forward, send_s=send_s)


def seconds_once(plan: Plan) -> float:
    """Seconds of a stage's step that do not grow with the micro-batches, by a schedule that defers nothing."""
    times = plan.predicted.time_s
    once = sum(seconds for part, seconds in times.items() if part in _ONCE)
    if plan.fsdp.gathered_once and plan.fsdp.whole_gradients and not any(plan.resharded_units().values()):
        once += times.get(DATA_PARALLEL, 0.0) + times.get(FSDP_COPIES, 0.0)
    elif plan.mesh.replicate > 1 or plan.mesh.shard == 1:
        once += times.get(DATA_PARALLEL, 0.0)
    return min(once, plan.predicted.step_time_s)


def _seconds_of_a_micro_batch(plan: Plan, steps: int) -> float:
    """Seconds of one micro-batch of a stage."""
    return (plan.predicted.step_time_s - seconds_once(plan)) / steps

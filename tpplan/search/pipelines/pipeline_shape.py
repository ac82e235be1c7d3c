"""How many parts of the GPUs a pipeline has, and how many stages each: the schedule that joins them, and the layers of
each stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.stages.schedule import Action, orders, waiting_during

#: the numbers of layers of all stages
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PipelineShape:
    """A pipeline of `parts` parts with `virtual_stages` stages each; part i has stages i, i + parts, ... With
    `is_zero_bubble` they defer weights' gradients."""

    parts: int
    virtual_stages: int = 1
    is_zero_bubble: bool = False

    @classmethod
    def of(cls, plan: PipelinePlan) -> "PipelineShape":
        """The shape of a plan's pipeline."""
        is_zero_bubble = plan.schedule is Schedule.ZERO_BUBBLE
        return cls(parts=plan.parts, virtual_stages=plan.virtual_stages, is_zero_bubble=is_zero_bubble)

    @property
    def count(self) -> int:
        """The number of stages."""
        return self.parts * self.virtual_stages

    @property
    def schedule(self) -> Schedule:
        """The schedule of such a pipeline."""
        if self.is_zero_bubble:
            return Schedule.ZERO_BUBBLE
        return Schedule.INTERLEAVED if self.virtual_stages > 1 else Schedule.ONE_F_ONE_B

    @property
    def is_one_f_one_b(self) -> bool:
        """True where a rank has one stage, and waits for what it sends."""
        return self.schedule is Schedule.ONE_F_ONE_B

    @property
    def option(self) -> str:
        """The command line's options for this shape."""
        virtual = f" --virtual-stages {self.virtual_stages}" if self.virtual_stages > 1 else ""
        return f"--pp {self.parts}{virtual}{f' --schedule {self.schedule}' if self.is_zero_bubble else ''}"

    def orders(self, micro_batches: int) -> Sequence[Sequence[Action]]:
        """The actions of the ranks in a step, in order."""
        return _orders(self.schedule, self.parts, self.virtual_stages, micro_batches)

    def received(self, micro_batches: int) -> Sequence[tuple[Sequence[Action], Sequence[Sequence[Action]]]]:
        """For each rank its actions in order, and for each of these the actions whose tensors have come in early; none
        by 1F1B, which receives for the next action alone."""
        return _received(self.schedule, self.parts, self.virtual_stages, micro_batches)

    def even(self, layers: int) -> Sizes:
        """Layers in stages that differ by at most one; the middle ones are larger."""
        each, rest = divmod(layers, self.count)
        order = sorted(range(self.count), key=lambda index: abs(2 * index - (self.count - 1)))
        larger = set(order[:rest])
        return tuple(each + (index in larger) for index in range(self.count))


_orders = cache(orders)


@cache
def _received(
    schedule: Schedule, parts: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[Sequence[Action], Sequence[Sequence[Action]]], ...]:
    every = _orders(schedule, parts, virtual_stages, micro_batches)
    if schedule is Schedule.ONE_F_ONE_B:
        return tuple((order, ((),) * len(order)) for order in every)
    return tuple(zip(every, waiting_during(every), strict=True))

"""The least seconds of a step of a pipeline, where stages of some kinds have plans and others the least of their part.

Stages with as many layers are alike but for names: the first, the last, and the middle ones of each number of layers
make a kind. What a step takes of others bounds what a stage may take.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpplan.plan.pipeline_plan import Schedule
from tpplan.plan.plan import Plan
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.stage_loads import least_step_s
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.pipelines.step_seconds import (
    seconds_between,
    seconds_once,
    sent_s,
    simulated_s,
    split_times,
    times_of,
)

#: what stages that are solved as one have in common: whether they are the first and the last, and their layers
Kind = tuple[bool, bool, int]


def kinds_of(sizes: Sizes) -> tuple[Kind, ...]:
    """The kind of each stage."""
    return tuple((i == 0, i == len(sizes) - 1, size) for i, size in enumerate(sizes))


@dataclass(frozen=True, kw_only=True)
class LeastStep:
    """The least step of the stages of one shape, numbers of layers and degrees."""

    solver: StageSolver
    shape: PipelineShape
    sizes: Sizes
    degrees: Degrees
    stages: Sequence[StagePlan]

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each stage."""
        return kinds_of(self.sizes)

    def seconds(self, own: Mapping[Kind, Plan]) -> float:
        """Seconds that no step is below in which stages of some kinds have plans."""
        found = least_step_s(*self._seconds(own), self.shape) + self._sent_s
        return max(found, self.simulated({})) if self.shape.schedule is Schedule.INTERLEAVED else found

    @cached_property
    def between_s(self) -> list[float]:
        """Seconds of sending what each stage gives to the next."""
        return [seconds_between(stage, self.degrees.tp, self.shape, self.solver.cluster) for stage in self.stages]

    @property
    def _sent_s(self) -> float:
        """Seconds that a step is known to wait for what is sent: by 1F1B, which computes nothing meanwhile."""
        return sent_s(self.between_s, self._steps) if self.shape.is_one_f_one_b else 0.0

    def simulated(self, own: Mapping[Kind, Plan]) -> float:
        """Seconds of an interleaved step, simulated, in which stages of some kinds have plans. No bound but without
        plans: slower ones that recompute more have shorter forwards, and with these a step was up to 0.8 % shorter in
        2 of 4,000 random pipelines."""
        steps_s, each_s = self._seconds(own)
        steps, times = self._steps, []
        for kind, send_s, seconds in zip(self.kinds, self.between_s, each_s, strict=True):
            plan = own.get(kind)
            times.append(
                split_times(seconds, 0.0, send_s) if plan is None else times_of(plan, self.shape, steps, send_s)
            )
        once = [step - steps * one for step, one in zip(steps_s, each_s, strict=True)]
        return simulated_s(times, once, self.shape, steps)

    def most_of(self, kind: Kind, own: Mapping[Kind, Plan], least: float) -> float:
        """Seconds of a step of a stage of some kind above which no step is below `least`, where stages of other kinds
        have plans."""
        if least == math.inf:
            return least
        steps_s, each_s = self._seconds(own)
        parts = self.shape.parts
        is_like = [other == kind for other in self.kinds]
        if self.shape.is_one_f_one_b:
            return least - self._sent_s - sum(each_s) + max(each_s)
        found = math.inf
        for rank in range(parts):
            rest = sum(
                seconds for seconds, like in zip(steps_s[rank::parts], is_like[rank::parts], strict=True) if not like
            )
            if number := sum(is_like[rank::parts]):
                filling = 0.0 if self.shape.is_zero_bubble else sum(each_s[:rank])
                found = min(found, (least - rest - filling) / number)
        return found

    def _seconds(self, own: Mapping[Kind, Plan]) -> tuple[list[float], list[float]]:
        """The seconds of a step, and those of a micro-batch of it, in each stage: by the plan of its kind, or without
        one the least that its part of the model takes. With one stage a rank the first stage of a kind has its plan;
        those behind it have fewer micro-batches in flight, and may run by faster ones."""
        each_s = self.solver.loads(self.shape, self.degrees).of_stages(self.sizes)
        steps_s = [self._steps * seconds for seconds in each_s]
        for i, kind in enumerate(self.kinds):
            is_open = self.shape.virtual_stages == 1 and kind in self.kinds[:i]
            if (plan := own.get(kind)) is not None and not is_open:
                steps_s[i] = plan.predicted.step_time_s
                each_s[i] = (plan.predicted.step_time_s - seconds_once(plan)) / self._steps
        return steps_s, each_s

    @property
    def _steps(self) -> int:
        return self.solver.steps(self.shape, self.degrees)

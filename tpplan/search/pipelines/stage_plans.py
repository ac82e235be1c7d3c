"""The plans of all stages of a pipeline on the same mesh, so that what each rank holds fits.

Stages with as many layers are alike but for names: the first, the last, and the middle ones of each number of layers
are solved, and stand for all. What a rank holds beside the stage that runs depends on its other stages, so that they
are solved in rounds: at first each is taken for one of like stages; where a rank then holds more than its limit, the
stages on it are solved again with as much less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tpplan.plan.plan import Plan
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.rank_memory import Held, assumed, excess_bytes, held, most_in_flight, with_held
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver

#: rounds of solving stages with less memory than before
MOST_ROUNDS = 5
#: of what a rank holds too much, how much less its stages get: their activations shrink in steps of a layer
_MARGIN = 1.05

#: what stages that are solved as one have in common: whether they are the first and the last, and their layers
_Kind = tuple[bool, bool, int]


@dataclass(frozen=True, kw_only=True)
class AllStages:
    """All stages of one shape, numbers of layers and degrees, and by kind what is held beside each while it runs."""

    solver: StageSolver
    shape: PipelineShape
    sizes: Sizes
    degrees: Degrees
    stages: Sequence[StagePlan]
    beside: dict[_Kind, Held] = field(default_factory=dict)

    @classmethod
    def of(cls, solver: StageSolver, shape: PipelineShape, sizes: Sizes, degrees: Degrees) -> "AllStages":
        """The stages, each taken for one of the like stages of a rank."""
        stages = [own.with_slices(degrees.sliced) for own in solver.stages(shape, sizes, degrees.micro_batch)]
        found = cls(solver=solver, shape=shape, sizes=sizes, degrees=degrees, stages=stages)
        steps = solver.batch.global_batch // (solver.gpus(shape).gpus // degrees.tp * degrees.micro_batch)
        most = most_in_flight(shape, steps)
        for stage in stages:
            sharded, whole = (
                (shape.virtual_stages - 1) * num_bytes for num_bytes in solver.resting_bytes(stage, degrees)
            )
            own = assumed(stage, most[stage.index % shape.parts], sharded, whole, degrees.tp)
            known = found.beside.get(found.kind(stage))
            if known is None or known.in_flight < own.in_flight:
                found.beside[found.kind(stage)] = own
        return found

    def kind(self, stage: StagePlan) -> _Kind:
        """The key that stages share where one is solved for all of them."""
        return stage.index == 0, stage.index == stage.count - 1, self.sizes[stage.index]

    def decided(self) -> Degrees | None:
        """The degrees with the FSDP degree of the stage whose rank has most in flight; None where it does not fit."""
        fullest = max(self.stages, key=lambda stage: self.beside[self.kind(stage)].in_flight)
        return self.solver.decided(self.degrees, self.shape, fullest, self.beside[self.kind(fullest)])

    def plans(self) -> list[Plan] | None:
        """Unproven plans of all stages, None where one does not fit. The first of its kind stands for all."""
        for _ in range(MOST_ROUNDS):
            plans = self._round()
            if plans is None:
                return None
            if not self._lower(plans):
                return plans
        return None

    def own_plans(self, *, prove: bool) -> list[Plan] | None:
        """Plans of all stages, each solved as itself; None where one does not fit."""
        if self.plans() is None:
            return None
        found = []
        for stage in self.stages:
            plan = self.solver.solved(self.degrees, self.shape, stage, self.beside[self.kind(stage)], prove=prove)
            if plan is None:
                return None
            found.append(plan)
        settled = self._settled(found)
        return None if any(excess_bytes(plan) > 0 for plan in settled) else settled

    def _round(self) -> list[Plan] | None:
        """Plans under the present assumptions, with what their ranks then hold."""
        own: dict[_Kind, Plan] = {}
        for stage in self.stages:
            kind = self.kind(stage)
            if kind not in own:
                plan = self.solver.tried(self.degrees, self.shape, stage, self.beside[kind])
                if plan is None:
                    return None
                own[kind] = plan
        return self._settled([own[self.kind(stage)] for stage in self.stages])

    def _settled(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans with what their ranks hold while each runs."""
        kept = []
        for stage, plan in zip(self.stages, plans, strict=True):
            assert plan.stage is not None
            kept.append(replace(stage, kept_bytes=plan.stage.kept_bytes, resting_bytes=plan.stage.resting_bytes))
        everything = held(kept, self.shape, plans[0].batch.accumulation_steps, self.degrees.tp)
        return [with_held(plan, own) for plan, own in zip(plans, everything, strict=True)]

    def _lower(self, plans: Sequence[Plan]) -> bool:
        """Assumes that more is held beside the stages of ranks that hold too much; False where none does."""
        excess: dict[_Kind, float] = {}
        for rank in range(self.shape.parts):
            own = max(map(excess_bytes, plans[rank :: self.shape.parts]))
            for stage in self.stages[rank :: self.shape.parts]:
                excess[self.kind(stage)] = max(excess.get(self.kind(stage), 0.0), own)
        for kind, num_bytes in excess.items():
            if num_bytes > 0:
                known = self.beside[kind]
                self.beside[kind] = replace(known, beside_bytes=known.beside_bytes + _MARGIN * num_bytes)
        return any(num_bytes > 0 for num_bytes in excess.values())

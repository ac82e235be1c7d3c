"""The plans of all stages of a pipeline on the same mesh, so that what each rank holds fits.

Stages with as many layers are alike but for names: the first, the last, and the middle ones of each number of layers
are solved, and stand for all. What a rank holds beside the stage that runs depends on its other stages, so that they
are solved in rounds: at first each is taken for one of like stages; where a rank then holds more than its limit, the
stages on it are solved again with as much less. Where ranks have memory left, stages take plans that keep more and run
faster: with one stage a rank those behind the first of their kind, which have fewer micro-batches in flight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tpplan.plan.pipeline_plan import Schedule
from tpplan.plan.plan import Plan
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.best_first import NotFasterError
from tpplan.search.pipelines.least_step import Kind, LeastStep
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.rank_memory import Held, assumed, excess_bytes, held, most_in_flight, with_held
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.pipelines.tied_weights import Resting

#: rounds of solving stages with less memory than before
MOST_ROUNDS = 5
#: of what a rank holds too much, how much less its stages get: their activations shrink in steps of a layer
_MARGIN = 1.05
#: at most how much shorter a step is assumed to become by plans that keep more in place of the first, with several
#: stages a rank, beside what one layer more in each stage brings; 0.031 in all where it was measured
MOST_HASTENED = 0.03
#: at most the part of a stage's step that recomputes: a forward of a forward, it again, and a backward of two
_MOST_AGAIN = 0.25
#: shares of its rank's micro-batches in flight that a stage is solved for to find faster plans that keep more
_SHARES = (0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class AllStages:
    """All stages of one shape, numbers of layers and degrees, and by kind what is held beside each while it runs."""

    solver: StageSolver
    shape: PipelineShape
    sizes: Sizes
    degrees: Degrees
    stages: Sequence[StagePlan]
    beside: dict[Kind, Held] = field(default_factory=dict)
    #: by its index what a stage assumes that is solved for more memory than its kind
    apart: dict[int, Held] = field(default_factory=dict)

    @classmethod
    def of(cls, solver: StageSolver, shape: PipelineShape, sizes: Sizes, degrees: Degrees) -> "AllStages":
        """The stages, each taken for one of the like stages of a rank."""
        stages = [own.with_slices(degrees.sliced) for own in solver.stages(shape, sizes, degrees.micro_batch)]
        found = cls(solver=solver, shape=shape, sizes=sizes, degrees=degrees, stages=stages)
        most = most_in_flight(shape, solver.steps(shape, degrees))
        resting = {kind: solver.resting_bytes(stage, degrees) for kind, stage in found.firsts.items()}
        for stage in stages:
            others = (other for other in stages[stage.index % shape.parts :: shape.parts] if other is not stage)
            every = [resting[found.kind(other)] for other in others]
            sharded, whole = (sum(one[i] for one in every) for i in range(2))
            own = assumed(stage, most[stage.index % shape.parts], sharded, whole, degrees.tp, shape.virtual_stages)
            known = found.beside.get(found.kind(stage))
            if known is None or known.in_flight < own.in_flight:
                found.beside[found.kind(stage)] = own
        return found

    def kind(self, stage: StagePlan) -> Kind:
        """The key that stages share where one is solved for all of them."""
        return self._bounds.kinds[stage.index]

    @property
    def firsts(self) -> dict[Kind, StagePlan]:
        """The first stage of each kind."""
        return {self.kind(stage): stage for stage in reversed(self.stages)}

    def decided(self, least: float = math.inf) -> Degrees | None:
        """The degrees with the FSDP degree of the stage whose rank has most in flight, the largest of such, or with
        several stages a rank of one of the most common kind; None where it does not fit. Raises NotFasterError where a
        step is then known to take `least` or longer."""

        def fullness(stage: StagePlan) -> tuple[int, float]:
            return self.beside[self.kind(stage)].in_flight, sum(self.solver.resting_bytes(stage, self.degrees))

        is_alone = self.shape.virtual_stages == 1
        stage = max(self.firsts.values(), key=fullness) if is_alone else self.firsts[self._commonest]
        kind = self.kind(stage)
        cutoff_s = self._bounds.most_of(kind, {}, self._bar(least, {}))
        return self.solver.decided(self.degrees, self.shape, stage, self.beside[kind], cutoff_s)

    @property
    def between_s(self) -> list[float]:
        """Seconds of sending what each stage gives to the next."""
        return self._bounds.between_s

    def floor(self, least: float = math.inf) -> float:
        """Seconds that no step of these stages is below; infinite where they do not fit, or where that is `least` or
        more by the loads of the parts alone or as one stage takes too long.

        Stages of the most common kind run by their fastest plan, with one micro-batch in flight. Others take the least
        that their part of the model does.
        """
        if self._bounds.seconds({}) >= least:
            return math.inf
        kind = self._commonest
        try:
            plan = self._fastest(kind, self._bounds.most_of(kind, {}, least))
        except NotFasterError:
            return math.inf
        return self._bounds.seconds({kind: plan}) if plan is not None else math.inf

    @cached_property
    def _bounds(self) -> LeastStep:
        return LeastStep(
            solver=self.solver, shape=self.shape, sizes=self.sizes, degrees=self.degrees, stages=self.stages
        )

    @property
    def _commonest(self) -> Kind:
        kinds = self._bounds.kinds
        return max(dict.fromkeys(kinds), key=kinds.count)

    @property
    def _in_order(self) -> list[Kind]:
        """The kinds of stages in the order in which they are solved: that first which tells most of whether a step is
        too slow, the first stage's, which has most in flight, or with several stages a rank the most common."""
        kinds = self._bounds.kinds
        every = list(dict.fromkeys(kinds))
        return every if self.shape.virtual_stages == 1 else sorted(every, key=kinds.count, reverse=True)

    def _bar(self, least: float, own: Mapping[Kind, Plan]) -> float:
        """Seconds of a step that faster plans of some stages may bring to `least`, where stages of some kinds have
        plans: like stages get plans of whole layers, and each may have memory for one layer less to recompute."""
        if self.shape.virtual_stages == 1 or least == math.inf:
            return least
        kind = self._commonest
        _, _, layers = kind
        again = _MOST_AGAIN
        if (plan := own.get(kind)) is not None and (fastest := self._fastest(kind)) is not None:
            again = max(0.0, 1 - fastest.predicted.step_time_s / plan.predicted.step_time_s)
        return least / (1 - MOST_HASTENED) / (1 - again / layers)

    def _expected(self, own: Mapping[Kind, Plan]) -> float:
        """Seconds of a step in which stages of some kinds have plans: a bound, or with several stages a rank, whose bar
        is an assumption, the longer of that and a simulation."""
        found = self._bounds.seconds(own)
        is_simulated = self.shape.schedule is Schedule.INTERLEAVED
        return max(found, self._bounds.simulated(own)) if is_simulated else found

    def _fastest(self, kind: Kind, cutoff_s: float = math.inf) -> Plan | None:
        """The fastest plan of a kind of stages, with one micro-batch in flight; None where it does not fit. Raises
        NotFasterError where it takes longer than `cutoff_s`."""
        degrees = replace(self.degrees, fsdp=self.solver.options.fsdp or 0)
        return self.solver.tried(degrees, self.shape, self.firsts[kind], self.beside[kind].with_share(0.0), cutoff_s)

    def plans(self, least: float = math.inf) -> list[Plan] | None:
        """Unproven plans of all stages, None where one does not fit. The first of its kind stands for all. Raises
        NotFasterError where a step is known to take `least` or longer, or is assumed to, however plans are hastened."""
        for _ in range(MOST_ROUNDS):
            plans = self._round(least)
            if plans is None:
                return None
            if not self._lower(plans):
                return self._hastened(plans)
        return None

    def own_plans(self, *, prove: bool) -> list[Plan] | None:
        """Plans of all stages, each solved as itself; None where one does not fit. Where stages with layers that FSDP
        shards over shard x tp do not fit together, which were not tried so, they have none."""
        if self.plans() is None:
            return None
        return self._own(prove=prove, is_plain=False) or self._own(prove=prove, is_plain=True)

    def _own(self, *, prove: bool, is_plain: bool) -> list[Plan] | None:
        # From the last stage on: a head, whose products take longest, decides how a tied embedding lies.
        found = self._one_after_the_other(self.stages[::-1], prove=prove, is_plain=is_plain)
        if found is None and any(stage.ties for stage in self.stages):
            found = self._one_after_the_other(self.stages, prove=prove, is_plain=is_plain)
        if found is None:
            return None
        settled = self._settled(sorted(found, key=lambda plan: plan.stage.index if plan.stage is not None else 0))
        return None if any(excess_bytes(plan) > 0 for plan in settled) else settled

    def _one_after_the_other(self, stages: Sequence[StagePlan], *, prove: bool, is_plain: bool) -> list[Plan] | None:
        """Plans of stages, in which parameters lie as in those before that have them too."""
        found, resting = list[Plan](), Resting()
        for stage in stages:
            beside = self.apart.get(stage.index, self.beside[self.kind(stage)])
            plan = self.solver.solved(
                self.degrees, self.shape, stage, beside, prove=prove, is_plain=is_plain, resting=resting.of(stage)
            )
            if plan is None:
                return None
            resting = resting.after(plan)
            found.append(plan)
        return found

    def _round(self, least: float) -> list[Plan] | None:
        """Plans under the present assumptions, with what their ranks then hold; None where one does not fit. Raises
        NotFasterError where a step is known to take `least` or longer."""
        own: dict[Kind, Plan] = {}
        for kind in self._in_order:
            cutoff_s = self._bounds.most_of(kind, own, self._bar(least, own))
            plan = self.solver.tried(self.degrees, self.shape, self.firsts[kind], self.beside[kind], cutoff_s)
            if plan is None:
                return None
            own[kind] = plan
            if least < math.inf and self._expected(own) >= self._bar(least, own):
                raise NotFasterError
        return self._settled([own[self.kind(stage)] for stage in self.stages])

    def _hastened(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans, and faster ones that keep more in their place where their ranks have memory for them: of each
        rank one stage after the other, by the fastest plan that fits; those behind first, which have the fewest
        micro-batches in flight."""
        self.apart.clear()
        kinds = {self.kind(stage) for stage in self.stages if self._may_hasten(stage)}
        found = list(plans)
        faster = {kind: self._faster(kind, plans[self.firsts[kind].index]) for kind in kinds}
        for first in reversed(range(0, len(found), self.shape.parts)):
            turn = self.stages[first : first + self.shape.parts]
            for rank in range(max(map(len, faster.values()), default=0)):
                tried, taken = list(found), {}
                for stage in turn:
                    choices = faster[self.kind(stage)] if self._may_hasten(stage) else ()
                    if stage.index not in self.apart and rank < len(choices):
                        tried[stage.index], taken[stage.index] = choices[rank][1], choices[rank][0]
                settled = self._settled(tried)
                for index, beside in taken.items():
                    if all(excess_bytes(plan) <= 0 for plan in settled[index % self.shape.parts :: self.shape.parts]):
                        found[index], self.apart[index] = tried[index], beside
        return self._settled(found)

    def _may_hasten(self, stage: StagePlan) -> bool:
        """With one stage a rank the first of a kind keeps its plan, by which a step is bounded."""
        return self.shape.virtual_stages > 1 or stage is not self.firsts[self.kind(stage)]

    def _faster(self, kind: Kind, plan: Plan) -> list[tuple[Held, Plan]]:
        """Plans of a kind of stages that are faster than one, the fastest first, each with what it assumes."""
        known, stage = self.beside[kind], self.firsts[kind]
        found: dict[float, tuple[Held, Plan]] = {}
        for share in _SHARES:
            beside = known.with_share(share)
            other = self.solver.tried(self.degrees, self.shape, stage, beside)
            if other is None or other.predicted.step_time_s >= plan.predicted.step_time_s:
                break  # with more in flight there is less memory, and no plan is faster
            found.setdefault(other.predicted.step_time_s, (beside, other))
        return [found[seconds] for seconds in sorted(found)]

    def _settled(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans with what their ranks hold while each runs."""
        kept = []
        for stage, plan in zip(self.stages, plans, strict=True):
            assert plan.stage is not None
            names = ("kept_bytes", "resting_bytes", "deferred")
            kept.append(replace(stage, **{name: getattr(plan.stage, name) for name in names}))
        everything = held(kept, self.shape, plans[0].batch.accumulation_steps, self.degrees.tp)
        return [with_held(plan, own) for plan, own in zip(plans, everything, strict=True)]

    def _lower(self, plans: Sequence[Plan]) -> bool:
        """Assumes that more is held beside the stages of ranks that hold too much; False where none does."""
        excess: dict[Kind, float] = {}
        for rank in range(self.shape.parts):
            own = max(map(excess_bytes, plans[rank :: self.shape.parts]))
            for stage in self.stages[rank :: self.shape.parts]:
                excess[self.kind(stage)] = max(excess.get(self.kind(stage), 0.0), own)
        for kind, num_bytes in excess.items():
            if num_bytes > 0:
                known = self.beside[kind]
                self.beside[kind] = replace(known, beside_bytes=known.beside_bytes + _MARGIN * num_bytes)
        return any(num_bytes > 0 for num_bytes in excess.values())

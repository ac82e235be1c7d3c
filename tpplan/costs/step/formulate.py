"""The ILP of a mesh, from its priced decision space, and the assignment that a solution of it makes.

Objective: seconds of one optimizer step on one rank (tpplan.costs.step.objective). Besides layouts the ILP decides how
many layers of a group get which treatment: what is recomputed, and whether FSDP reshards after forward
(tpplan.layouts.layer_treatments); and of each group whether FSDP shards it over shard or over shard and tp together
(tpplan.costs.step.units_over_tp). Resources: bytes of one rank at the moments at which it may hold most
(tpplan.costs.step.memory_rows).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import Boundary
from tpplan.core.mesh import Mesh
from tpplan.costs.layer_activations import Activations
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.layer_groups import Families, LayerGroups
from tpplan.costs.step.memory_rows import Peaks
from tpplan.costs.step.objective import Objective
from tpplan.costs.step.parameter_bytes import RowBytes
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import StrategyTime
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import TREATMENTS, LayerGroup, Treatment
from tpplan.layouts.rules import Strategy
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.parts import (
    COMPUTE,
    EXPERT_PARALLEL,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import Recompute, uses_fsdp
from tpplan.solvers.problem import (
    LIMIT_TOLERANCE,
    Conflict,
    Expression,
    Node,
    Problem,
    Resource,
    Term,
    constant_term,
    linear_term,
)

#: relative difference of two prices below which they count as equal
TIE_TOLERANCE = 1e-9
#: parts of a step that are work, though communication may hide behind it
_WORK = frozenset({COMPUTE, RECOMPUTATION, TENSOR_PARALLEL, TP_REDUCTION, EXPERT_PARALLEL})
#: seconds that a conversion counts in a tie: less than anything that takes time
CONVERSION_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """The ILP of a mesh, and what reads its solution."""

    priced: PricedSpace
    mesh: Mesh
    setting: Setting
    #: choices that proofs have found not to go together
    conflicts: tuple[Conflict, ...] = ()

    @property
    def space(self) -> Space:
        """The decision space."""
        return self.priced.space

    @property
    def table(self) -> Mapping[str, tuple[StrategyTime, ...]]:
        """Times of each strategy, by deciding decision."""
        return self.priced.times

    @property
    def uses_fsdp(self) -> bool:
        """True where FSDP2 shards, replicates, or casts."""
        return uses_fsdp(self.mesh, self.setting.precision)

    @cached_property
    def problem(self) -> Problem:
        """The ILP: nodes are the deciding decisions, splits say how many layers get which treatment."""
        return replace(self.unlimited, resources=tuple(self.peaks.rows()))

    @cached_property
    def limited_at_the_loss(self) -> Problem:
        """The ILP with the first of its memory rows alone, in which the activations of all layers count: its optimum is
        a lower bound of the ILP's."""
        return replace(self.unlimited, resources=tuple(islice(self.peaks.rows(), 1)))

    def fits(self, choice: Mapping[str, int], *, tolerance: float) -> bool:
        """True where a choice is within the memory limit, up to a relative tolerance. Makes the memory rows only up to
        the first that is exceeded, and none where what rests alone exceeds the limit."""
        limit = self.setting.memory_limit_bytes
        if self._rests(lambda held: held.value(choice)) > limit + tolerance * abs(limit):
            return False
        return all(row.is_kept(choice, tolerance) for row in self.peaks.rows())

    @property
    def is_too_large(self) -> bool:
        """True where parameters, optimizer states and gradients alone, at their least, are above the memory limit."""
        limit = self.setting.memory_limit_bytes
        return self._rests(lambda held: held.least) > limit + LIMIT_TOLERANCE * abs(limit)

    def _rests(self, amount: Callable[[Expression], float]) -> float:
        """The bytes of parameters, optimizer states and gradients, and of what is not the stage's: all that a rank
        holds in the optimizer's step, without its temporaries."""
        every, setting = self.space.graph.parameters, self.setting
        resting = (held(every) for held in (self.sizes.parameters, self.sizes.states, self.sizes.gradients))
        return setting.slack_bytes + setting.beside_bytes + sum(map(amount, resting))

    @cached_property
    def unlimited(self) -> Problem:
        """The ILP without its memory limit."""
        nodes, conflicts = self._over_tp
        return Problem(
            nodes=nodes,
            edges=self.priced.edges(),
            objective=self.objective.terms,
            splits=tuple(split for kind in self.groups.timed for split in kind.numbers.splits),
            conflicts=(*self.conflicts, *conflicts),
            shared=self.priced.shared,
        )

    @property
    def _over_tp(self) -> tuple[tuple[Node, ...], tuple[Conflict, ...]]:
        """All nodes, those that decide which units are over shard and tp among them, and these nodes' conflicts."""
        over_tp = self.groups.over_tp
        if not over_tp.nodes:
            return self.priced.nodes(), ()

        def made() -> tuple[tuple[Node, ...], tuple[Conflict, ...]]:
            conflicts = over_tp.conflicts(self.space, self.groups.units)
            return (*self.priced.nodes(), *over_tp.as_nodes()), tuple(conflicts)

        return self.priced.once(("nodes over tp", over_tp), made)

    @property
    def alone(self) -> Problem:
        """The ILP of kernels and tp collectives of one micro-batch alone: every plan takes at least as long."""
        return self._only(self.objective.of_micro_batch)

    def alone_in(self, numbers: Mapping[str, int]) -> Problem:
        """The ILP of kernels and tp collectives of one micro-batch in some decisions alone, so many of each class:
        every plan takes at least as long in them."""
        return self._only(self.objective.of_decisions(numbers))

    def _only(self, objective: tuple[Term, ...]) -> Problem:
        return Problem(
            nodes=self.priced.nodes(), edges=self.priced.edges(), objective=objective, shared=self.priced.shared
        )

    @property
    def beside_s(self) -> float:
        """A lower bound on the seconds of a step beside its kernels and tp collectives, whatever these are: the sum of
        the objective's other terms, each at its least."""
        _, conflicts = self._over_tp
        if not conflicts:
            return sum(term.least for term in self.objective.beside)
        return self.groups.over_tp.least(self.objective.beside, conflicts)

    def strategy(self, choice: Mapping[str, int], decision: str) -> Strategy:
        """The chosen strategy of a decision, deciding or not."""
        representative = self.space.classes[decision]
        return self.space.strategies[representative][choice[representative]]

    def treatments(self, choice: Mapping[str, int]) -> dict[str, Treatment]:
        """The chosen treatment of every layer: the first layers of a group get the first of TREATMENTS."""
        found = {}
        for kind in self.kinds:
            names = iter(unit.name for unit in kind.units)
            for treatment in TREATMENTS:
                if treatment in kind.numbers.counts:
                    number = kind.numbers.counts[treatment].value(choice)
                    found.update(dict.fromkeys(islice(names, number), treatment))
        return found

    def assignment(self, choice: Mapping[str, int], *, num_averages: int | None = None) -> Assignment:
        """The assignment that a choice makes. `num_averages` is as in Assignment."""
        treatments = self.treatments(choice)
        modes = {name: treatment.recompute for name, treatment in treatments.items()}
        return Assignment(
            graph=self.space.graph,
            mesh=self.mesh,
            strategies={name: self.strategy(choice, name) for name in self.space.deciders},
            layers=self.setting.units,
            resharded={name: treatment.reshard for name, treatment in treatments.items()},
            recomputed={name: mode for name, mode in modes.items() if mode is not Recompute.NONE},
            precision=self.setting.precision,
            optimizer=self.setting.optimizer,
            accumulation_steps=self.setting.accumulation_steps,
            is_compiled=self.priced.is_compiled,
            num_averages=num_averages,
            in_flight=self.setting.in_flight,
            beside_bytes=self.setting.beside_bytes,
            whole_gradients=self.setting.whole_gradients,
            gathered_once=self.setting.gathered_once,
            over_tp=self.groups.over_tp.chosen(choice),
            crossing=self.space.crossing,
        )

    def tie_break(self, choice: Mapping[str, int]) -> Problem:
        """The ILP that finds the choice of least work among those of a choice's price: where communication is exposed,
        the compute behind it costs nothing.

        Minimizes compute, tp collectives and reductions, hidden or not, and then the number of conversions and of
        layers that are recomputed or kept gathered. Treatments are those that the choice has, and the default: with
        all of them, breaking ties of a model with several kinds of layers takes longer than finding the price.
        """
        work = tuple(t for t in self.problem.objective if t.name in _WORK)
        conversions = (
            linear_term("conversions", name, [CONVERSION_S * (s.operands != s.results) for s in strategies], 1.0)
            for name in self.space.members
            if isinstance(self.space.deciders[name], Boundary) and len(strategies := self.space.strategies[name]) > 1
        )
        treated = (
            term
            for kind in self.kinds
            for treatment, count in kind.numbers.counts.items()
            for term in count.times(constant_term("treated layers", CONVERSION_S * _departures(treatment)))
        )
        over_tp = (
            linear_term("treated layers", node.name, [CONVERSION_S * i for i in range(len(node.strategies))], 1.0)
            for node in self.groups.over_tp.as_nodes()
        )
        unused = (
            term
            for kind in self.kinds
            for treatment, count in kind.numbers.counts.items()
            if _departures(treatment) and not count.value(choice)
            for term in count.times(constant_term("unused treatments", 1.0))
        )
        most_s = self.problem.price(choice) * (1 + TIE_TOLERANCE)
        return Problem(
            nodes=self.problem.nodes,
            edges=self.problem.edges,
            objective=(*work, *conversions, *treated, *over_tp),
            resources=(
                *self.problem.resources,
                Resource(name="unused treatments", terms=tuple(unused), limit=0.0),
                Resource(name="step time", terms=self.problem.objective, limit=most_s),
            ),
            splits=self.problem.splits,
            conflicts=self.problem.conflicts,
            shared=self.problem.shared,
        )

    @cached_property
    def objective(self) -> Objective:
        """The seconds that the ILP minimizes."""
        return Objective(priced=self.priced, mesh=self.mesh, setting=self.setting, groups=self.groups)

    @cached_property
    def peaks(self) -> Peaks:
        """The rows of the memory constraint."""
        setting = self.setting
        return Peaks(
            space=self.space,
            mesh=self.mesh,
            activations=self.activations,
            kinds=self.kinds,
            families=Families(kinds=self.kinds, activations=self.activations, first_of=setting.kin or {}),
            root=self.groups.root,
            sizes=self.sizes,
            optimizer=self.sizes.optimizer,
            precision=setting.precision,
            steps=setting.accumulation_steps,
            in_flight=setting.in_flight,
            beside_bytes=setting.beside_bytes,
            like_stages=setting.like_stages,
            whole_gradients=setting.whole_gradients and self.uses_fsdp,
            gathered_once=setting.gathered_once and self.uses_fsdp,
            slack_bytes=setting.slack_bytes,
            limit=setting.memory_limit_bytes,
            uses_fsdp=self.uses_fsdp,
            bucket_bytes=float(BUCKET_BYTES),
            once=self.priced.once,
        )

    @cached_property
    def sizes(self) -> RowBytes:
        """Bytes of parameters, gradients and optimizer states on a rank."""
        setting = self.setting
        return RowBytes(
            space=self.space,
            mesh=self.mesh,
            optimizer=optimizer_named(setting.optimizer),
            precision=setting.precision,
            over_tp=self.groups.over_tp,
            units=self.groups.units,
        )

    @cached_property
    def groups(self) -> LayerGroups:
        """The FSDP units, and the layers in groups that are interchangeable."""
        return LayerGroups(priced=self.priced, setting=self.setting, uses_fsdp=self.uses_fsdp, mesh=self.mesh)

    @property
    def kinds(self) -> tuple[LayerGroup, ...]:
        """Groups of layers with the same decisions and costs."""
        return self.groups.alike

    @property
    def activations(self) -> Activations:
        """The activations kept between forward and backward, by layer."""
        return self.priced.activations(self.setting.units)


def _departures(treatment: Treatment) -> float:
    """How many of its two parts differ from the default: nothing recomputed, resharded after forward."""
    return float((treatment.recompute is not Recompute.NONE) + (not treatment.reshard))

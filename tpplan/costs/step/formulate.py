"""The ILP of a mesh, from its priced decision space, and the assignment that a solution of it makes.

Objective: seconds of one optimizer step on one rank,

    A * (compute + tp collectives) + waiting for the CPU + exposed FSDP communication + FSDP's copies
        + gradient reductions + adding up gradients + optimizer

with A accumulation steps; tpplan.costs.cpu_launch_lag says when a GPU waits for the CPU,
tpplan.costs.step.fsdp_communication what compute hides. A recomputed layer takes as long as its kernels run again or as
issuing them takes. Besides layouts the ILP decides how many layers of a group get which treatment: what is recomputed,
and whether FSDP reshards after forward (tpplan.layouts.layer_treatments). Resources: bytes of one rank at the moments
at which it may hold most (tpplan.costs.step.memory_rows).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from tpplan.core.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import Boundary, Op, SourceKind
from tpplan.core.layout import R
from tpplan.core.mesh import Axis, Mesh
from tpplan.costs.cpu_launch_lag import LaunchLag, repeated, waiting
from tpplan.costs.gradient_sums import MOVED
from tpplan.costs.layer_activations import Activations
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.fsdp_communication import FsdpCommunication
from tpplan.costs.step.layer_groups import Families, LayerGroups
from tpplan.costs.step.memory_rows import Peaks
from tpplan.costs.step.parameter_bytes import Parameter, ParameterBytes, RowBytes
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import StrategyTime, Work
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import TREATMENTS, LayerGroup, Treatment
from tpplan.layouts.readings import has_partial_gradient
from tpplan.layouts.rules import Strategy
from tpplan.layouts.rules.indexing import COUNTED, EXCHANGES
from tpplan.machine.profile import Collective, Estimate
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    EXPERT_PARALLEL,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import Recompute, uses_fsdp
from tpplan.solvers.problem import (
    Conflict,
    Expression,
    Problem,
    Resource,
    Term,
    constant_term,
    linear_term,
    merged,
    minus,
    scaled,
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
        the first that is exceeded."""
        return all(row.is_kept(choice, tolerance) for row in self.peaks.rows())

    @cached_property
    def unlimited(self) -> Problem:
        """The ILP without its memory limit."""
        return Problem(
            nodes=self.priced.nodes(),
            edges=self.priced.edges(),
            objective=(*self._runs_every_time(), *self._beside),
            splits=tuple(split for kind in self.groups.timed for split in kind.numbers.splits),
            conflicts=self.conflicts,
            shared=self.priced.shared,
        )

    @property
    def alone(self) -> Problem:
        """The ILP of kernels and tp collectives of one micro-batch alone: every plan takes at least as long."""
        return Problem(
            nodes=self.priced.nodes(),
            edges=self.priced.edges(),
            objective=self._runs_once(),
            shared=self.priced.shared,
        )

    @property
    def beside_s(self) -> float:
        """A lower bound on the seconds of a step beside its kernels and tp collectives, whatever these are: the sum of
        the objective's other terms, each at its least."""
        return sum(term.least for term in self._beside)

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
            objective=(*work, *conversions, *treated),
            resources=(
                *self.problem.resources,
                Resource(name="unused treatments", terms=tuple(unused), limit=0.0),
                Resource(name="step time", terms=self.problem.objective, limit=most_s),
            ),
            splits=self.problem.splits,
            conflicts=self.problem.conflicts,
            shared=self.problem.shared,
        )

    # Objective

    def _runs_every_time(self) -> Iterator[Term]:
        """Seconds of kernels and of tp collectives of a step's micro-batches."""
        for term in self._runs_once():
            weight = term.weight * self.setting.accumulation_steps
            yield Term(name=term.name, expressions=term.expressions, weight=weight)

    @cached_property
    def _beside(self) -> tuple[Term, ...]:
        """The objective's terms beside kernels and tp collectives."""
        return (
            *self._issue(),
            *self._repeats(),
            *self._tp_gradient_reductions(),
            *self._accumulation(),
            *self._optimizer(),
            *self.fsdp_communication.terms(),
        )

    @property
    def fsdp_communication(self) -> FsdpCommunication:
        """FSDP's collectives and copies."""
        return FsdpCommunication(
            priced=self.priced,
            mesh=self.mesh,
            setting=self.setting,
            groups=self.groups,
            parameter_bytes=self.parameter_bytes,
        )

    def _runs_once(self) -> tuple[Term, ...]:
        return self.priced.once("runs", lambda: tuple(self._runs()))

    def _runs(self) -> Iterator[Term]:
        """Seconds of kernels and of tp collectives of a micro-batch."""
        for name, members in self.space.members.items():
            times = self.table[name]
            for part, seconds in (
                (COMPUTE, [t.forward.seconds + t.backward.seconds for t in times]),
                (
                    self._part_of_collectives(name),
                    [t.forward_collectives.seconds + t.backward_collectives.seconds for t in times],
                ),
            ):
                if any(seconds):
                    yield linear_term(part, name, seconds, float(len(members)))

    def lags(self) -> Mapping[str, LaunchLag]:
        """How far issuing a micro-batch's kernels falls behind running them; empty where the profile does not say."""
        return self.priced.once("lags", self._lags)

    def _lags(self) -> dict[str, LaunchLag]:
        issue_s = self.setting.profile.issue_s
        if issue_s is None:
            return {}
        found = {}
        for name, members in self.space.members.items():
            times = self.table[name]
            forward = [issue_s * t.forward_kernels - (t.forward.seconds + t.forward_collectives.seconds) for t in times]
            rest = [issue_s * t.backward_kernels - (t.backward.seconds + t.backward_collectives.seconds) for t in times]
            both = [first + other for first, other in zip(forward, rest, strict=True)]
            if any(forward) or any(both):
                found[name] = LaunchLag(forward=repeated(forward, len(members)), both=repeated(both, len(members)))
        return found

    def _issue(self) -> Iterator[Term]:
        if lags := self.lags():
            steps = self.setting.accumulation_steps
            yield Term(name=ISSUE, expressions=self.priced.once(("waiting", steps), lambda: waiting(lags, steps)))

    def _repeats(self) -> Iterator[Term]:
        """Seconds of what recomputed layers run again."""
        steps, issue_s = float(self.setting.accumulation_steps), self.setting.profile.issue_s
        for kind in self.groups.timed:
            for mode in Recompute:
                count = kind.count(recompute=mode)
                if not (count.constant or count.parts):
                    continue
                compute, collectives, issued = self.priced.recomputed_forward(self.setting.units, kind.unit.name, mode)
                parts = (RECOMPUTATION, compute), *self._by_part(collectives)
                for part, expression in parts:
                    if expression.terms:
                        yield from count.times(Term(name=part, expressions=(expression,), weight=steps))
                if issue_s is not None and issued.terms:
                    behind = self._issued_behind(kind.unit.name, mode, issue_s)
                    yield from count.times(Term(name=ISSUE, expressions=(Expression(), behind), weight=steps))

    def _issued_behind(self, unit: str, mode: Recompute, issue_s: float) -> Expression:
        """Seconds by which issuing what a layer runs again takes longer than running it."""
        compute, collectives, issued = self.priced.recomputed_forward(self.setting.units, unit, mode)
        key = "issued behind", self.setting.units, unit, mode, issue_s
        return self.priced.once(key, lambda: merged(minus(minus(scaled(issued, issue_s), compute), collectives)))

    def _by_part(self, collectives: Expression) -> Iterator[tuple[str, Expression]]:
        """Yields those collectives that are of tensor parallelism, and those that exchange rows of experts."""
        found: dict[str, list[tuple[str, tuple[float, ...]]]] = {TENSOR_PARALLEL: [], EXPERT_PARALLEL: []}
        for name, vector in collectives.terms:
            found[self._part_of_collectives(name)].append((name, vector))
        yield from ((part, Expression(terms=tuple(terms))) for part, terms in found.items())

    def _part_of_collectives(self, decision: str) -> str:
        """The part of the step that the collectives of a decision belong to."""
        decider = self.space.deciders[decision]
        is_exchange = isinstance(decider, Op) and decider.target in (COUNTED, *EXCHANGES)
        return EXPERT_PARALLEL if is_exchange else TENSOR_PARALLEL

    def repeats(self) -> list[Work]:
        """Recomputed work of a micro-batch, where every decision has one strategy and every layer one treatment."""
        return [
            self.table[name][0].again[treatment.recompute] * (number * count.constant)
            for kind in self.kinds
            for treatment, count in kind.numbers.counts.items()
            if treatment.recompute is not Recompute.NONE
            for name, number in self.activations.layers[kind.unit.name].again.items()
        ]

    def _tp_gradient_reductions(self) -> Iterator[Term]:
        """Seconds of summing gradients of R* readings over tp, once a step in buckets, each rank its FSDP shard."""
        rate = self.seconds_per_byte(Collective.ALL_REDUCE, Axis.TP).seconds
        if not rate:
            return
        key = "summands", self.setting.precision, self.parameter_bytes.ranks
        for expressions, number in self.priced.once(key, lambda: tuple(self._summands())):
            yield Term(name=TP_REDUCTION, expressions=expressions, weight=rate / self.mesh.shard * number)

    def _summands(self) -> Iterator[tuple[tuple[Expression, ...], int]]:
        """Bytes of a parameter's gradient where any of its readings, of which the largest counts, is R*; with the
        number of equal parameters."""
        own = self.parameter_bytes
        parameters = self.space.once_for_all_sizes(("summed", self.setting.precision), self._parameters_by_readings)
        alike: Counter[tuple[tuple[str, ...], float]] = Counter()
        for (names, parameter), number in parameters.items():
            alike[names, own.padded(parameter, R)] += number
        for (names, gradient), number in alike.items():
            vectors = [
                tuple(gradient if has_partial_gradient(s) else 0.0 for s in self.space.strategies[name])
                for name in names
            ]
            if any(map(any, vectors)):
                yield tuple(Expression(terms=(item,)) for item in zip(names, vectors, strict=True)), number

    def _parameters_by_readings(self) -> Counter[tuple[tuple[str, ...], Parameter]]:
        """The parameters that are read, equal ones counted, with the deciding decisions of their readings."""
        own, classes = self.parameter_bytes, self.space.classes
        return Counter(
            (
                tuple(dict.fromkeys(classes[reading.name] for reading in readings)),
                own.parameter(readings[0].source, own.gradients),
            )
            for readings in self.space.readings.values()
            if readings and readings[0].source.kind is SourceKind.PARAMETER
        )

    def _accumulation(self) -> Iterator[Term]:
        """Seconds of adding each micro-batch's gradients to the earlier ones', on every rank its shard, or all."""
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
        ranks = 1 if self.setting.whole_gradients else self.mesh.shard
        if added := self.setting.accumulation_steps - 1:
            for expression in self.parameter_bytes.by_placement((1.0, self.parameter_bytes.gradients)):
                yield Term(name=ACCUMULATION, expressions=(expression,), weight=MOVED * added * rate / ranks)

    def _optimizer(self) -> Iterator[Term]:
        """Seconds of the optimizer's step: it reads parameter, gradient and states, and writes parameter and states. On
        a GPU the longer of moving and issuing counts, on a CPU their sum."""
        profile = self.setting.profile
        rate = profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES / self.mesh.shard
        issuing_s = self.optimizer_issue().seconds
        moved = (3.0, self.parameter_bytes.gradients), (2.0, self.parameter_bytes.states)
        if issuing_s and profile.device_type == "cuda":
            whole = self.parameter_bytes.of(None, *moved)
            yield Term(name=OPTIMIZER, expressions=(scaled(whole, rate), Expression(constant=issuing_s)))
            return
        if issuing_s:
            yield constant_term(OPTIMIZER, issuing_s)
        for expression in self.parameter_bytes.by_placement(*moved):
            yield Term(name=OPTIMIZER, expressions=(expression,), weight=rate)

    def optimizer_issue(self) -> Estimate:
        """CPU time of issuing the optimizer's step for all parameters that train."""
        is_sharded = self.uses_fsdp or self.mesh.tp > 1
        issue = self.setting.profile.optimizer_issue(self.setting.optimizer, is_sharded=is_sharded)
        return issue * sum(source.trainable for source in self.space.graph.parameters)

    def seconds_per_byte(self, kind: Collective, axis: Axis) -> Estimate:
        """Seconds per byte of a collective over a full bucket."""
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        return self.setting.profile.collective(kind, group, BUCKET_BYTES) * (1 / BUCKET_BYTES)

    @property
    def parameter_bytes(self) -> ParameterBytes:
        """Bytes of parameters, gradients and states on a tp rank."""
        return ParameterBytes(priced=self.priced, setting=self.setting, shard=self.mesh.shard)

    # Memory

    @cached_property
    def peaks(self) -> Peaks:
        """The rows of the memory constraint."""
        setting = self.setting
        optimizer = optimizer_named(setting.optimizer)
        return Peaks(
            space=self.space,
            mesh=self.mesh,
            activations=self.activations,
            kinds=self.kinds,
            families=Families(kinds=self.kinds, activations=self.activations, first_of=setting.kin or {}),
            root=self.groups.root,
            sizes=RowBytes(
                space=self.space,
                mesh=self.mesh,
                optimizer=optimizer,
                precision=setting.precision,
            ),
            optimizer=optimizer,
            precision=setting.precision,
            steps=setting.accumulation_steps,
            in_flight=setting.in_flight,
            beside_bytes=setting.beside_bytes,
            whole_gradients=setting.whole_gradients and self.uses_fsdp,
            slack_bytes=setting.slack_bytes,
            limit=setting.memory_limit_bytes,
            uses_fsdp=self.uses_fsdp,
            bucket_bytes=float(BUCKET_BYTES),
            once=self.priced.once,
        )

    # Layers

    @cached_property
    def groups(self) -> LayerGroups:
        """The FSDP units, and the layers in groups that are interchangeable."""
        return LayerGroups(priced=self.priced, setting=self.setting, uses_fsdp=self.uses_fsdp)

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

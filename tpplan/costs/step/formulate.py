"""From a priced decision space and a mesh to the optimization problem, and from its solution back to numbers.

Objective: seconds of one optimizer step on one rank,

    A * (compute + tp collectives) + waiting for the CPU + exposed FSDP communication + FSDP's copies
        + gradient reductions + adding up gradients + optimizer

with A accumulation steps; tpplan.costs.cpu_launch_lag says when a GPU waits for the CPU. FSDP prefetches: a unit's
gather hides behind the compute of its neighbour, so of a unit only max(0, communication - compute) is exposed; the
root's is all exposed, for nothing runs before or after it. A device without streams hides nothing: on a CPU each of
FSDP's collectives is waited for where it is issued. What runs again takes as long as it runs or as issuing it takes,
layer by layer. Besides layouts, how many of the layers that are alike get which treatment is a decision: what of them
is recomputed, and whether FSDP reshards them after forward (tpplan.layouts.layer_treatments). Resources: bytes of one
rank at the moments at which it may hold most (tpplan.costs.step.memory_rows).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from tpplan.core.graph import Boundary
from tpplan.core.layout import R
from tpplan.core.mesh import Axis, Mesh
from tpplan.costs.cpu_launch_lag import LaunchLag, repeated, waiting
from tpplan.costs.gradient_sums import MOVED
from tpplan.costs.layer_activations import Activations, LayerCosts
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.memory_rows import Peaks
from tpplan.costs.step.parameter_bytes import BytesOf, ParameterBytes
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import RecomputedWork, StrategyTime
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Space, has_partial_gradient
from tpplan.layouts.layer_treatments import TREATMENTS, Count, FsdpUnit, LayerGroup, Treatment, numbers_of
from tpplan.layouts.parameter_writes import why_not_selective, write_within
from tpplan.layouts.rules import Strategy
from tpplan.machine.profile import Collective, Estimate
from tpplan.plan.gradient_buckets import BUCKET_BYTES
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    DATA_PARALLEL,
    FSDP_COPIES,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import Precision, Recompute, uses_fsdp
from tpplan.solvers.problem import (
    Conflict,
    Expression,
    Problem,
    Resource,
    Term,
    added,
    constant_term,
    linear_term,
    merged,
    minus,
    scaled,
)

#: prices that differ by less are the same
TIE_TOLERANCE = 1e-9
#: parts that are work, whatever hides behind it
_WORK = frozenset({COMPUTE, RECOMPUTATION, TENSOR_PARALLEL, TP_REDUCTION})
#: what a conversion counts among equals: less than anything that takes time
CONVERSION_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A collective and the compute it runs beside, if any, in seconds; it happens `weight` times a step for each of
    `count` units."""

    transfer: Expression
    compute: Expression | None
    weight: float
    count: Count

    def terms(self, slowdown: float) -> Iterator[Term]:
        """What a step takes longer for it: T where nothing runs beside it, else what does not hide behind the compute,
        and what hides by as much as it slows that: max(0, T - C) + s min(T, C) = (1 - s) max(0, T - C) + s T."""
        issued = Term(name=DATA_PARALLEL, expressions=(self.transfer,), weight=self.weight)
        if self.compute is None:
            yield from self.count.times(issued)
            return
        exposed = (Expression(), minus(self.transfer, self.compute))
        yield from self.count.times(replace(issued, expressions=exposed, weight=self.weight * (1 - slowdown)))
        if slowdown:
            yield from self.count.times(replace(issued, weight=self.weight * slowdown))


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """One mesh's problem and what is needed to read its solution."""

    priced: PricedSpace
    mesh: Mesh
    setting: Setting
    #: what proofs have found not to go together
    conflicts: tuple[Conflict, ...] = ()

    @property
    def space(self) -> Space:
        """The decisions."""
        return self.priced.space

    @property
    def table(self) -> Mapping[str, tuple[StrategyTime, ...]]:
        """Times by deciding decision."""
        return self.priced.times

    @property
    def uses_fsdp(self) -> bool:
        """FSDP2 shards, replicates, or casts."""
        return uses_fsdp(self.mesh, self.setting.precision)

    @cached_property
    def problem(self) -> Problem:
        """The problem; nodes are the deciding decisions, splits say how many layers get which treatment."""
        return replace(self.unlimited, resources=tuple(self.peaks.rows()))

    def fits(self, choice: Mapping[str, int], *, tolerance: float) -> bool:
        """Whether a choice is within the memory limit, up to a relative tolerance; asked for before the rest of the
        problem is made, it takes no more of the rows than up to the first that is exceeded."""
        return all(row.is_kept(choice, tolerance) for row in self.peaks.rows())

    @cached_property
    def unlimited(self) -> Problem:
        """The problem without its resources."""
        return Problem(
            nodes=self.priced.nodes(),
            edges=self.priced.edges(),
            objective=tuple(self._objective()),
            splits=tuple(split for kind in self._timed for split in kind.numbers.splits),
            conflicts=self.conflicts,
            shared=self.priced.shared,
        )

    @property
    def alone(self) -> Problem:
        """Kernels and tp collectives of one micro-batch, no layer recomputed: every plan takes at least as long."""
        return Problem(
            nodes=self.priced.nodes(),
            edges=self.priced.edges(),
            objective=self._runs_once(),
            shared=self.priced.shared,
        )

    def strategy(self, choice: Mapping[str, int], decision: str) -> Strategy:
        """The chosen strategy of any decision."""
        representative = self.space.classes[decision]
        return self.space.strategies[representative][choice[representative]]

    def treatments(self, choice: Mapping[str, int]) -> dict[str, Treatment]:
        """The chosen treatment of every layer: of each kind the first ones get the first of TREATMENTS."""
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
        )

    def tie_break(self, objective_s: float) -> Problem:
        """Among choices of this price, that of least work: where communication is exposed, compute behind it is free.

        Minimizes compute, tp collectives and reductions, hidden or not, and then the number of conversions and of
        layers that are recomputed or kept gathered.
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
        price = Resource(name="step time", terms=self.problem.objective, limit=objective_s * (1 + TIE_TOLERANCE))
        return Problem(
            nodes=self.problem.nodes,
            edges=self.problem.edges,
            objective=(*work, *conversions, *treated),
            resources=(*self.problem.resources, price),
            splits=self.problem.splits,
            conflicts=self.problem.conflicts,
            shared=self.problem.shared,
        )

    # Objective

    def _objective(self) -> Iterator[Term]:
        for term in self._runs_once():
            weight = term.weight * self.setting.accumulation_steps
            yield Term(name=term.name, expressions=term.expressions, weight=weight)
        yield from self._issue()
        yield from self._repeats()
        yield from self._tp_gradient_reductions()
        yield from self._accumulation()
        yield from self._optimizer()
        if self.mesh.data_parallel > 1:
            for overlap in self.overlaps():
                yield from overlap.terms(self.setting.profile.overlap_slowdown)
        if self.uses_fsdp:
            yield from self._fsdp_copies()

    def _runs_once(self) -> tuple[Term, ...]:
        return self.priced.once("runs", lambda: tuple(self._runs()))

    def _runs(self) -> Iterator[Term]:
        """Kernels and collectives of a micro-batch."""
        for name, members in self.space.members.items():
            times = self.table[name]
            for part, seconds in (
                (COMPUTE, [(t.forward + t.backward).seconds for t in times]),
                (TENSOR_PARALLEL, [(t.forward_collectives + t.backward_collectives).seconds for t in times]),
            ):
                if any(seconds):
                    yield linear_term(part, name, seconds, float(len(members)))

    def lags(self) -> Mapping[str, LaunchLag]:
        """How far issuing a micro-batch's kernels falls behind running them; nothing where a profile does not say."""
        return self.priced.once("lags", self._lags)

    def _lags(self) -> dict[str, LaunchLag]:
        issue_s = self.setting.profile.issue_s
        if issue_s is None:
            return {}
        found = {}
        for name, members in self.space.members.items():
            times = self.table[name]
            forward = [issue_s * t.forward_kernels - (t.forward + t.forward_collectives).seconds for t in times]
            rest = [issue_s * t.backward_kernels - (t.backward + t.backward_collectives).seconds for t in times]
            both = [first + other for first, other in zip(forward, rest, strict=True)]
            if any(forward) or any(both):
                found[name] = LaunchLag(forward=repeated(forward, len(members)), both=repeated(both, len(members)))
        return found

    def _issue(self) -> Iterator[Term]:
        if lags := self.lags():
            yield Term(name=ISSUE, expressions=waiting(lags, self.setting.accumulation_steps))

    def _repeats(self) -> Iterator[Term]:
        """What of recomputed layers runs again."""
        steps, issue_s = float(self.setting.accumulation_steps), self.setting.profile.issue_s
        for kind in self._timed:
            for mode in Recompute:
                count = kind.count(recompute=mode)
                if not (count.constant or count.parts):
                    continue
                compute, collectives, issued = self._again(kind, mode)
                for part, expression in ((RECOMPUTATION, compute), (TENSOR_PARALLEL, collectives)):
                    if expression.terms:
                        yield from count.times(Term(name=part, expressions=(expression,), weight=steps))
                if issue_s is not None and issued.terms:
                    behind = merged(minus(minus(scaled(issued, issue_s), compute), collectives))
                    yield from count.times(Term(name=ISSUE, expressions=(Expression(), behind), weight=steps))

    def repeats(self) -> list[RecomputedWork]:
        """What runs again in each micro-batch, where every decision has one strategy and every layer one treatment."""
        return [
            self.table[name][0].repeated(treatment.recompute) * (number * count.constant)
            for kind in self.kinds
            for treatment, count in kind.numbers.counts.items()
            if treatment.recompute is not Recompute.NONE
            for name, number in self._layer(kind).again.items()
        ]

    def _layer(self, kind: LayerGroup) -> LayerCosts:
        """What one of a kind costs."""
        return self.activations.layers[kind.unit.name]

    def _again(self, kind: LayerGroup, mode: Recompute) -> tuple[Expression, Expression, Expression]:
        """Of a layer's forward that runs again the seconds of kernels and of collectives, and the number of both."""
        if mode is Recompute.NONE:
            return Expression(), Expression(), Expression()
        key = "again", self.setting.units, kind.unit.name, mode
        return self.priced.once(key, lambda: self._run_again(self._layer(kind), mode))

    def _run_again(self, layer: LayerCosts, mode: Recompute) -> tuple[Expression, Expression, Expression]:
        rows: tuple[dict[str, tuple[float, ...]], ...] = ({}, {}, {})
        for name, number in layer.again.items():
            repeated = [time.repeated(mode) for time in self.table[name]]
            vectors = zip(*((r.compute.seconds, r.collectives.seconds, r.kernels) for r in repeated), strict=True)
            for row, vector in zip(rows, vectors, strict=True):
                if any(vector):
                    row[name] = tuple(number * amount for amount in vector)
        compute, collectives, kernels = (Expression(terms=tuple(row.items())) for row in rows)
        return compute, collectives, kernels

    def _tp_gradient_reductions(self) -> Iterator[Term]:
        """R* readings: gradients summed over tp once per step, in buckets, each rank its FSDP shard."""
        rate = self.seconds_per_byte(Collective.ALL_REDUCE, Axis.TP).seconds
        if not rate:
            return
        key = "summands", self.setting.precision, self.parameter_bytes.ranks
        summands = self.priced.once(key, lambda: Counter(self._summands()))
        for expressions, number in summands.items():
            yield Term(name=TP_REDUCTION, expressions=expressions, weight=rate / self.mesh.shard * number)

    def _summands(self) -> Iterator[tuple[Expression, ...]]:
        """Bytes of each parameter's gradient where any of its readings, of which the largest counts, is R*."""
        for readings in self.space.readings.values():
            if not readings:
                continue
            own = self.parameter_bytes
            gradient = own.filled(readings[0].parameter, own.gradients, R)
            # Once for a parameter, if any of its readings is R*.
            names = dict.fromkeys(self.space.classes[reading.name] for reading in readings)
            vectors = {
                name: tuple(gradient if has_partial_gradient(s) else 0.0 for s in self.space.strategies[name])
                for name in names
            }
            if any(any(vector) for vector in vectors.values()):
                yield tuple(Expression(terms=(item,)) for item in vectors.items())

    def _accumulation(self) -> Iterator[Term]:
        """Each micro-batch's gradients but the first's are added to those there are, on every rank its shard."""
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
        if added := self.setting.accumulation_steps - 1:
            for expression in self.parameter_bytes.by_placement((1.0, self.parameter_bytes.gradients)):
                yield Term(name=ACCUMULATION, expressions=(expression,), weight=MOVED * added * rate / self.mesh.shard)

    def _optimizer(self) -> Iterator[Term]:
        """Reads parameter, gradient and states, writes parameter and states; issuing that comes on top where the CPU
        itself does it, and else the longer of both counts."""
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
        """What the CPU takes of the optimizer's step for all parameters that train."""
        is_sharded = self.uses_fsdp or self.mesh.tp > 1
        issue = self.setting.profile.optimizer_issue(self.setting.optimizer, is_sharded=is_sharded)
        return issue * sum(source.trainable for source in self.space.graph.parameters)

    def overlaps(self) -> Iterator[Beside]:
        """FSDP's collectives, each with the compute that it runs beside; nothing runs beside the root's."""
        steps = float(self.setting.accumulation_steps)
        for unit in self.root:
            gather, scatter, reduce = self._collectives_of(unit)
            once = Count(constant=1)
            yield Beside(transfer=added(gather, scatter), compute=None, weight=steps, count=once)
            yield Beside(transfer=reduce, compute=None, weight=1.0, count=once)
        for kind in self._timed:
            gather, scatter, reduce = self._collectives_of(kind.unit)
            forward, backward = self._hidden_time(kind.unit)
            yield Beside(transfer=gather, compute=forward, weight=steps, count=kind.count())
            for treatment, count in kind.numbers.counts.items():
                repeated = added(gather, scatter) if treatment.reshard else scatter
                beside = backward
                if self.hides:
                    beside = merged(added(backward, self._again(kind, treatment.recompute)[0]))
                if steps > 1:
                    yield Beside(transfer=repeated, compute=beside, weight=steps - 1, count=count)
                yield Beside(transfer=added(repeated, reduce), compute=beside, weight=1.0, count=count)

    def _collectives_of(self, unit: FsdpUnit) -> tuple[Expression, Expression, Expression]:
        """Seconds of a unit's gather, of its reduce-scatter, and of the all-reduce among replicas."""
        gathered, reduced = self.parameter_bytes.computed, self.parameter_bytes.gradients
        return (
            self._transfer(unit, Collective.ALL_GATHER, Axis.SHARD, (1.0, gathered)),
            self._transfer(unit, Collective.REDUCE_SCATTER, Axis.SHARD, (1.0, reduced)),
            self._transfer(unit, Collective.ALL_REDUCE, Axis.REPLICATE, (1 / self.mesh.shard, reduced)),
        )

    def _fsdp_copies(self) -> Iterator[Term]:
        """FSDP2 gathers and reduces in flat buffers, into which and out of which it copies, one rank's shard too.

        A gather: in from a rank's own shard, which it casts, and out. A reduction: in from a unit's gradients; a single
        rank's are copied where several's are scattered. [torch 2.13, fsdp/_fully_shard/_fsdp_collectives.py]
        """
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
        steps = self.setting.accumulation_steps
        is_alone = self.mesh.shard == 1
        copies_in = 0.0 if is_alone and self.setting.precision is not Precision.BF16_MIXED else 1 / self.mesh.shard

        gathered = ((2.0 + copies_in, self.parameter_bytes.computed), (copies_in, self.parameter_bytes.resting))
        reduced = ((1.0, self.parameter_bytes.trained), (3.0 if is_alone else 1.0, self.parameter_bytes.gradients))
        every = [(unit, Count(constant=1)) for unit in self.root] + [(kind.unit, kind.count()) for kind in self._timed]
        again = [(kind.unit, kind.count(reshard=True)) for kind in self._timed]
        for units, shares in ((every, (*gathered, *reduced)), (again, gathered)):
            for unit, count in units:
                expression = self.parameter_bytes.of(unit, *shares)
                yield from count.times(Term(name=FSDP_COPIES, expressions=(expression,), weight=rate * steps))

    @property
    def hides(self) -> bool:
        """Whether collectives run beside kernels: on streams, which a CPU has none of."""
        return self.setting.profile.device_type != "cpu"

    def _hidden_time(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        """A unit's own forward and backward compute. Collectives of the tp axis hide nothing: links are shared."""
        if not self.hides:
            return Expression(), Expression()
        return self.priced.once(("hidden", self.setting.units, unit.name), lambda: self._beside(unit))

    def _beside(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        counts = Counter(unit.hides)
        forward = tuple((name, tuple(n * t.forward.seconds for t in self.table[name])) for name, n in counts.items())
        backward = tuple((name, tuple(n * t.backward.seconds for t in self.table[name])) for name, n in counts.items())
        return Expression(terms=forward), Expression(terms=backward)

    def _transfer(self, unit: FsdpUnit, kind: Collective, axis: Axis, share: tuple[float, BytesOf]) -> Expression:
        """Seconds of a collective over a unit's parameters, linear in their bytes between all and none sharded by tp.

        T(x) = T(n/t) + (T(n) - T(n/t)) (x - n/t) / (n - n/t): exact at both ends.
        """
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        own = self.parameter_bytes
        whole = share[0] * sum(own.filled(source, share[1], R) for source in unit.parameters)
        least = whole / self.mesh.tp
        profile = self.setting.profile
        low = profile.collective(kind, group, least).seconds
        if self.mesh.tp == 1 or not whole:
            return Expression(constant=low)
        slope = (profile.collective(kind, group, whole).seconds - low) / (whole - least)
        local = own.of(unit, share)
        return added(scaled(local, slope), Expression(constant=low - slope * least))

    def seconds_per_byte(self, kind: Collective, axis: Axis) -> Estimate:
        """What a byte costs in a full bucket."""
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        return self.setting.profile.collective(kind, group, BUCKET_BYTES) * (1 / BUCKET_BYTES)

    @property
    def parameter_bytes(self) -> ParameterBytes:
        """Of parameters and what belongs to them, on a rank of tp."""
        return ParameterBytes(priced=self.priced, setting=self.setting, shard=self.mesh.shard)

    # Memory

    @cached_property
    def peaks(self) -> Peaks:
        """What the memory constraint is made of."""
        setting = self.setting
        return Peaks(
            space=self.space,
            mesh=self.mesh,
            activations=self.activations,
            kinds=self.kinds,
            root=self.root,
            first_of=setting.kin or {},
            optimizer=optimizer_named(setting.optimizer),
            precision=setting.precision,
            steps=setting.accumulation_steps,
            slack_bytes=setting.slack_bytes,
            limit=setting.memory_limit_bytes,
            uses_fsdp=self.uses_fsdp,
            bucket_bytes=float(BUCKET_BYTES),
            once=self.priced.once,
        )

    # Units

    @property
    def units(self) -> tuple[FsdpUnit, ...]:
        """The FSDP units, the root last."""
        return self.priced.units(self.setting.units)

    @property
    def root(self) -> tuple[FsdpUnit, ...]:
        """The root unit, if it has parameters of its own."""
        return tuple(unit for unit in self.units if not unit.name)

    @property
    def activations(self) -> Activations:
        """What is kept between forward and backward, by layer."""
        return self.priced.activations(self.setting.units)

    @cached_property
    def kinds(self) -> tuple[LayerGroup, ...]:
        """Layers that decide alike and cost alike."""
        return self._grouped(self.priced.once(("kinship", self.setting.units), self._kinship))

    @property
    def _timed(self) -> tuple[LayerGroup, ...]:
        """The same as far as time is concerned: where no layer is recomputed, what they keep does not matter."""
        treatments = self.setting.treatments
        is_open = treatments is None or any(own.recompute is not Recompute.NONE for own in treatments.values())
        return self.kinds if is_open else self._deciding_alike

    @cached_property
    def _deciding_alike(self) -> tuple[LayerGroup, ...]:
        """Layers that decide alike."""
        return self._grouped(self.priced.once(("likeness", self.setting.units), self._likeness))

    def _grouped(self, likeness: Mapping[str, int]) -> tuple[LayerGroup, ...]:
        """Layers by their numbers, and by their treatments where those are given."""
        found: dict[object, list[FsdpUnit]] = {}
        is_open = self.setting.treatments is None  # then each may get the same
        for unit in self.units:
            if unit.name:
                key = likeness[unit.name], None if is_open else self._treatments(unit)
                found.setdefault(key, []).append(unit)
        return tuple(
            LayerGroup(
                units=tuple(units),
                numbers=numbers_of(units[0].name, len(units), self._treatments(units[0])),
            )
            for units in found.values()
        )

    def _kinship(self) -> dict[str, int]:
        """A number for each layer, equal for those that decide alike and cost alike."""
        likeness = self.priced.once(("likeness", self.setting.units), self._likeness)
        layers = self.activations.layers
        return _numbered({name: (number, layers[name].signature) for name, number in likeness.items()})

    def _likeness(self) -> dict[str, int]:
        """A number for each layer, equal for those that decide alike."""
        return _numbered({u.name: (self._reads(u), tuple(sorted(u.hides))) for u in self.units if u.name})

    def _reads(self, unit: FsdpUnit) -> tuple[str, ...]:
        """Who decides how each of a unit's parameters rests; the parameter itself where nothing reads it."""
        readings = ((source, self.space.readings[source.label]) for source in unit.parameters)
        return tuple(self.space.classes[own[0].name] if own else source.label for source, own in readings)

    def _treatments(self, unit: FsdpUnit) -> tuple[Treatment, ...]:
        """What may be done to a unit, in order. Without FSDP nothing is gathered that could be kept."""
        setting = self.setting
        if setting.treatments is not None:
            given = setting.treatments[unit.name]
            return (given if self.uses_fsdp else replace(given, reshard=True),)
        reshard = setting.reshard_after_forward if self.uses_fsdp else True
        graph = self.space.graph
        recompute = Recompute.NONE if write_within(graph, (unit.name,)) else setting.recompute
        impossible = Recompute.SELECTIVE if why_not_selective(graph, unit.name) else None
        return tuple(
            treatment
            for treatment in TREATMENTS
            if recompute in (None, treatment.recompute) and reshard in (None, treatment.reshard)
            if treatment.recompute is not impossible
        )


def _numbered(keys: Mapping[str, object]) -> dict[str, int]:
    """A number for each name, equal for equal keys."""
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}


def _departures(treatment: Treatment) -> float:
    """How far a treatment is from what is done unless something asks for another."""
    return float((treatment.recompute is not Recompute.NONE) + (not treatment.reshard))

"""The objective of the ILP of a mesh: seconds of one optimizer step on one rank, term by term.

    A * (compute + tp collectives) + waiting for the CPU + exposed FSDP communication + FSDP's copies
        + gradient reductions + adding up gradients + optimizer

with A accumulation steps; tpplan.costs.cpu_launch_lag says when a GPU waits for the CPU,
tpplan.costs.step.fsdp_communication what compute hides. A recomputed layer takes as long as its kernels run again or as
issuing them takes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import Op, SourceKind
from tpplan.core.layout import R
from tpplan.core.mesh import Axis, Mesh
from tpplan.costs.cpu_launch_lag import LaunchLag, repeated, waiting
from tpplan.costs.gradient_sums import MOVED
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.fsdp_communication import FsdpCommunication
from tpplan.costs.step.layer_groups import LayerGroups
from tpplan.costs.step.parameter_bytes import BytesOf, Parameter, ParameterBytes
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import Work
from tpplan.layouts.readings import has_partial_gradient
from tpplan.layouts.rules.indexing import COUNTED, EXCHANGES
from tpplan.machine.profile import Collective, Estimate
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
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import (
    Expression,
    Term,
    added,
    constant_term,
    linear_term,
    merged,
    minus,
    scaled,
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Seconds of a step, of layers in `groups` (tpplan.costs.step.layer_groups)."""

    priced: PricedSpace
    mesh: Mesh
    setting: Setting
    groups: LayerGroups

    @property
    def terms(self) -> tuple[Term, ...]:
        """Every term of a step."""
        steps = self.setting.accumulation_steps
        return (*(replace(term, weight=term.weight * steps) for term in self.of_micro_batch), *self.beside)

    @property
    def of_micro_batch(self) -> tuple[Term, ...]:
        """Seconds of kernels and of tp collectives of a micro-batch."""
        members = self.priced.space.members
        return self.priced.once("runs", lambda: self.of_decisions({name: len(own) for name, own in members.items()}))

    @cached_property
    def beside(self) -> tuple[Term, ...]:
        """The terms of a step beside kernels and tp collectives."""
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

    def of_decisions(self, numbers: Mapping[str, int]) -> tuple[Term, ...]:
        """Seconds of kernels and of tp collectives of a micro-batch in some decisions: so many of each class."""
        return tuple(self._runs(numbers))

    def _runs(self, numbers: Mapping[str, int]) -> Iterator[Term]:
        for name, number in numbers.items():
            times = self.priced.times[name]
            for part, seconds in (
                (COMPUTE, [t.forward.seconds + t.backward.seconds for t in times]),
                (
                    self._part_of_collectives(name),
                    [t.forward_collectives.seconds + t.backward_collectives.seconds for t in times],
                ),
            ):
                if any(seconds):
                    yield linear_term(part, name, seconds, float(number))

    def lags(self) -> Mapping[str, LaunchLag]:
        """How far issuing a micro-batch's kernels falls behind running them; empty where the profile does not say."""
        return self.priced.once("lags", self._lags)

    def _lags(self) -> dict[str, LaunchLag]:
        issue_s = self.setting.profile.issue_s
        if issue_s is None:
            return {}
        found = {}
        for name, members in self.priced.space.members.items():
            times = self.priced.times[name]
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
        decider = self.priced.space.deciders[decision]
        is_exchange = isinstance(decider, Op) and decider.target in (COUNTED, *EXCHANGES)
        return EXPERT_PARALLEL if is_exchange else TENSOR_PARALLEL

    def repeats(self) -> list[Work]:
        """Recomputed work of a micro-batch, where every decision has one strategy and every layer one treatment."""
        activations = self.priced.activations(self.setting.units)
        return [
            self.priced.times[name][0].again[treatment.recompute] * (number * count.constant)
            for kind in self.groups.alike
            for treatment, count in kind.numbers.counts.items()
            if treatment.recompute is not Recompute.NONE
            for name, number in activations.layers[kind.unit.name].again.items()
        ]

    def _tp_gradient_reductions(self) -> Iterator[Term]:
        """Seconds of summing gradients of R* readings over tp, once a step in buckets, each rank its FSDP shard."""
        rate = self.seconds_per_byte(Collective.ALL_REDUCE, Axis.TP).seconds
        if not rate:
            return
        over_tp = self.groups.over_tp
        together = over_tp.given or (over_tp if over_tp.nodes else None)
        key = "summands", self.setting.precision, self.parameter_bytes.ranks, together
        for expressions, number in self.priced.once(key, lambda: tuple(self._summands())):
            yield Term(name=TP_REDUCTION, expressions=expressions, weight=rate / self.mesh.shard * number)

    def _summands(self) -> Iterator[tuple[tuple[Expression, ...], int]]:
        """Bytes of a parameter's gradient where any of its readings, of which the largest counts, is R*; with the
        number of equal parameters. Those of units that may be over shard and tp, where FSDP sums them, are one."""
        own, space = self.parameter_bytes, self.priced.space
        alike: Counter[tuple[str, tuple[str, ...], float]] = Counter()
        for (unit, names, parameter), number in self._parameters_by_readings().items():
            alike[unit, names, own.padded(parameter, R)] += number
        together: dict[str, list[Expression]] = {}
        for (unit, names, gradient), number in alike.items():
            vectors = [
                tuple(gradient if has_partial_gradient(s) else 0.0 for s in space.strategies[name]) for name in names
            ]
            if not any(map(any, vectors)):
                continue
            expressions = tuple(Expression(terms=(item,)) for item in zip(names, vectors, strict=True))
            if not unit:
                yield expressions, number
            elif len(names) > 1:  # only a sum of single expressions is one
                less = self.groups.over_tp.times(unit, -gradient)
                yield (Expression(), *(added(each, less) for each in expressions)), number
            else:
                less = self.groups.over_tp.times(unit, -gradient * number)
                together.setdefault(unit, []).append(added(scaled(expressions[0], float(number)), less))
        for parts in together.values():
            yield (Expression(), merged(added(*parts))), 1

    def _parameters_by_readings(self) -> Counter[tuple[str, tuple[str, ...], Parameter]]:
        """The parameters that are read, equal ones counted, with the deciding decisions of their readings, and a unit
        that stands for those with its node where theirs may be over shard and tp, else ""."""
        space, over_tp = self.priced.space, self.groups.over_tp
        if not over_tp.is_possible:
            return space.once_for_all_sizes(
                ("summed", self.setting.precision), lambda: Counter(self._with_readings(dict[str, str]()))
            )
        stands, first = dict[str, str](), dict[str, str]()
        for unit in self.groups.units:
            if over_tp.may_be(unit.name):
                stand = first.setdefault(over_tp.nodes.get(unit.name, ""), unit.name)
                stands |= {source.label: stand for source in unit.parameters}
        return Counter(self._with_readings(stands))

    def _with_readings(self, stands: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], Parameter]]:
        own, space = self.parameter_bytes, self.priced.space
        for readings in space.readings.values():
            if readings and readings[0].source.kind is SourceKind.PARAMETER:
                names = tuple(dict.fromkeys(space.classes[reading.name] for reading in readings))
                source = readings[0].source
                yield stands.get(source.label, ""), names, own.parameter(source, own.gradients)

    def _accumulation(self) -> Iterator[Term]:
        """Seconds of adding each micro-batch's gradients to the earlier ones', on every rank its shard, or all of its
        own experts and of what else it computes with."""
        rate, own = self.setting.seconds_per_moved_byte, self.parameter_bytes
        is_whole = self.setting.whole_gradients
        ranks = 1 if is_whole else self.mesh.shard
        if more := self.setting.accumulation_steps - 1:
            for expression in own.by_placement((1.0, own.gradients), is_own=is_whole):
                yield Term(name=ACCUMULATION, expressions=(expression,), weight=MOVED * more * rate / ranks)
            if not is_whole:
                yield from self._over_tp(ACCUMULATION, MOVED * more * rate, (1.0, self.parameter_bytes.gradients))

    def _optimizer(self) -> Iterator[Term]:
        """Seconds of the optimizer's step: it reads parameter, gradient and states, and writes parameter and states. On
        a GPU the longer of moving and issuing counts, on a CPU their sum."""
        rate = self.setting.seconds_per_moved_byte / self.mesh.shard
        issuing_s = self.optimizer_issue().seconds
        moved = (3.0, self.parameter_bytes.gradients), (2.0, self.parameter_bytes.states)
        if issuing_s and self.setting.profile.device_type == "cuda":
            whole = scaled(self.parameter_bytes.of(None, *moved), rate)
            if less := [term.expressions[0] for term in self._over_tp(OPTIMIZER, rate * self.mesh.shard, *moved)]:
                whole = merged(added(whole, *less))
            yield Term(name=OPTIMIZER, expressions=(whole, Expression(constant=issuing_s)))
            return
        if issuing_s:
            yield constant_term(OPTIMIZER, issuing_s)
        for expression in self.parameter_bytes.by_placement(*moved):
            yield Term(name=OPTIMIZER, expressions=(expression,), weight=rate)
        yield from self._over_tp(OPTIMIZER, rate * self.mesh.shard, *moved)

    def _over_tp(self, part: str, rate: float, *shares: tuple[float, BytesOf]) -> Iterator[Term]:
        """Seconds by which moving each rank's shards takes less in layers over shard and tp; seconds per byte."""
        own, tp, over_tp = self.parameter_bytes, self.mesh.tp, self.groups.over_tp
        wide = self.mesh.size(Axis.SHARD_TP)
        for kind in self.groups.timed:
            if over_tp.may_be(kind.unit.name):
                more = sum(
                    share * (own.over_tp(kind.unit, each, tp) / wide - own.whole(kind.unit, each, 1) / self.mesh.shard)
                    for share, each in shares
                )
                expression = over_tp.times(kind.unit.name, rate * len(kind.units) * more)
                yield Term(name=part, expressions=(expression,))

    def optimizer_issue(self) -> Estimate:
        """CPU time of issuing the optimizer's step for all parameters that train."""
        is_sharded = self.groups.uses_fsdp or self.mesh.tp > 1
        issue = self.setting.profile.optimizer_issue(self.setting.optimizer, is_sharded=is_sharded)
        return issue * sum(source.trainable for source in self.priced.space.graph.parameters)

    def seconds_per_byte(self, kind: Collective, axis: Axis) -> Estimate:
        """Seconds per byte of a collective over a full bucket."""
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        return self.setting.profile.collective(kind, group, BUCKET_BYTES) * (1 / BUCKET_BYTES)

    @property
    def parameter_bytes(self) -> ParameterBytes:
        """Bytes of parameters, gradients and states on a tp rank."""
        return ParameterBytes(priced=self.priced, setting=self.setting, shard=self.mesh.shard)

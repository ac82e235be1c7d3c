"""The memory constraint: what a rank holds at the moments at which it may hold most, each a resource of the problem.

Of a step gone through node by node (tpplan.costs.step.memory_replay) most is held in one of these, and each row is at
least what the replay finds there (L what lasts: parameters, states, inputs, slack, and gradients of micro-batches
before):

    at the loss         L + all that is kept + the most around the layers
    in a layer          L + all that is kept, but for what only later nodes want, + what a layer makes again
                        + the most in a layer, which is the last of its kind: of those before it less is kept
    in the first layer  L + the gradients of all that goes back before + a layer + the most in it; where no gradients
                        were there before
    after the layers    L + the same + the most before the first layer, and where FSDP reduces the root's
    in the step         L + all gradients + the optimizer's temporaries

A layer's backward frees what it kept and leaves its gradients. Of layers that are alike the first are recomputed, so
that what is freed grows from the first layer to the last, and in one stretch of like layers most is held at an end.
Where several kinds take turns, all gradients count in every layer. When a layer goes back, FSDP2 may still reduce the
gradients of the one behind it, which then keeps nothing.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import ceil, prod
from typing import Any

from tpplan.core.graph import Source
from tpplan.core.layout import local_shape
from tpplan.core.mesh import Mesh
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.layer_activations import Activations, LayerCosts
from tpplan.costs.peak_candidates import undominated
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import Count, FsdpUnit, LayerGroup
from tpplan.plan.optimizers import Optimizer
from tpplan.plan.parts import BUFFERS, GRADIENTS, PARAMETERS, SAVED, SLACK, STATES, TRANSIENTS, UNSHARDED_PARAMETERS
from tpplan.plan.plan import Precision, Recompute
from tpplan.solvers.problem import Expression, Resource, Term, added, constant_term, merged, scaled

#: bytes per element of a parameter
Width = Callable[[Source], float]
#: of a parameter who decides how it rests, None where nothing reads it, its whole shape, and bytes per element
Resting = tuple[str | None, tuple[int, ...], float]
#: elements that count of a rank's part of a parameter, by its shape
Elements = Callable[[tuple[int, ...]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Layers that were alike before their treatments were decided. `first` names the first, `unit` is the last; each of
    layer`'s modes has a number of layers in `counts`."""

    first: str
    unit: FsdpUnit
    size: int
    layer: LayerCosts
    counts: Mapping[Recompute, Count]

    def where_lightest(
        self, mode: Recompute, expression: Expression, among: Sequence[Recompute]
    ) -> Iterator[Expression]:
        """The expression where the least recomputed layer is in one of some modes, of which this is one."""
        lighter = [self.counts[own] for own in Recompute if _WEIGHT[own] < min(map(_WEIGHT.__getitem__, among))]
        yield from self.counts[mode].where_any(expression, lighter)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What the rows are made of. `first_of` names the first layer of each one's family."""

    space: Space
    mesh: Mesh
    activations: Activations
    kinds: tuple[LayerGroup, ...]
    root: tuple[FsdpUnit, ...]
    first_of: Mapping[str, str]
    optimizer: Optimizer
    precision: Precision
    steps: int
    slack_bytes: float
    limit: float
    uses_fsdp: bool
    bucket_bytes: float
    #: computes what is the same on every mesh for the first that asks
    once: Callable[[Hashable, Callable[[], Any]], Any]

    def rows(self) -> Iterator[Resource]:
        """All of them."""
        return (Resource(name=f"memory {name}", terms=terms, limit=self.limit) for name, terms in self._rows())

    def _rows(self) -> Iterator[tuple[str, tuple[Term, ...]]]:
        lasting = tuple(self._lasting())
        gradients = (self._gradients(),)
        before = () if self._are_gradients_new else gradients
        yield "at the loss", (*lasting, *before, *self._kept_by_layers(), *self._at_the_loss())
        if self._later:
            yield "in the last layers", (*lasting, *before, *self._kept_by_layers(), *self._in_a_layer(self._later))
        if self.families:
            kept = self._kept_by_layers(self._earlier)
            yield "in a layer", (*lasting, *before, *kept, *self._in_a_layer(self._earlier))
            if self._are_gradients_new:
                yield "in the first layer", (*lasting, *self._in_the_first_layer())
        yield "after the layers", (*lasting, *self._after_the_layers())
        yield "in the step", (*lasting, *gradients, *self._in_the_step())

    # What lasts

    def _lasting(self) -> Iterator[Term]:
        everything = self.space.graph.parameters
        if self.slack_bytes:
            yield constant_term(SLACK, self.slack_bytes)
        yield self._term(PARAMETERS, everything, self._master_width, self._shard)
        yield self._term(STATES, everything, self._state_width, self._shard)
        yield self.activations.inputs

    def _kept_by_layers(self, families: Sequence[Family] | None = None) -> Iterator[Term]:
        """Between forward and backward; of all, or of some families."""
        names = None if families is None else {family.first for family in families}
        for kind in self.kinds:
            if names is not None and self._first(kind) not in names:
                continue
            for mode in Recompute:
                count = kind.count(recompute=mode)
                for term in self._kept(kind, mode):
                    yield from count.times(term)

    def _kept(self, kind: LayerGroup, mode: Recompute) -> tuple[Term, ...]:
        """By a layer."""
        terms = self.activations.terms(self.activations.layers[kind.unit.name].kept[mode])
        found: tuple[Term, ...] = self.once((*self._key("kept", kind.unit), mode), lambda: tuple(_combined(terms)))
        return found

    def _remade(self, family: Family, mode: Recompute) -> Expression:
        """What a layer makes again, at most."""
        terms = self.activations.terms(family.layer.remade[mode])
        found: Expression = self.once((*self._key("remade", family.unit), mode), lambda: _upper(terms))
        return found

    def _key(self, what: str, unit: FsdpUnit) -> tuple[str, int, str]:
        return what, id(self.activations), unit.name

    # The moments

    def _at_the_loss(self) -> Iterator[Term]:
        yield from self.activations.kept_outside()
        yield from self._gathered_throughout()
        if self.mesh.shard > 1:  # the buffer of the last one that was gathered, or of the next
            yield Term(name=BUFFERS, expressions=(Expression(), *self._gathered), weight=1 + self._cast)
        if self.uses_fsdp and self.activations.is_between:  # what the layer behind leaves may still be reduced
            yield Term(name=BUFFERS, expressions=tuple(map(self._reduced, self.families)))
        stretch = self.activations.around(self._growing(), is_before=False)
        yield Term(name=TRANSIENTS, expressions=stretch.moments if stretch is not None else (Expression(),))

    def _in_a_layer(self, families: Sequence[Family]) -> Iterator[Term]:
        last = max(max(self.activations.positions[family.unit.name]) for family in families)
        yield from self.activations.kept_outside(until=last)
        yield from self._gathered_throughout()
        if self.uses_fsdp:
            yield self._gathered_for_a_while()
        yield Term(name=TRANSIENTS, expressions=self._moments_in([(f.unit, self._growing(f)) for f in families]))
        remade = [expression for family in families for expression in self._made_again(family)]
        yield Term(name=SAVED, expressions=(Expression(), *remade))
        behind = [part for family in self._followers(families) for part in self._behind(family, families)]
        yield Term(name=BUFFERS, expressions=(Expression(), *behind))
        if self.uses_fsdp and self._are_gradients_new:
            for family in self._later:
                yield self._term(GRADIENTS, family.unit.parameters, self._gradient_width, self._shard)

    def _in_the_first_layer(self) -> Iterator[Term]:
        yield from self.activations.kept_outside(before=self.activations.first)
        family = self._largest
        own = self._alone_in(family.unit) if len(self._earlier) == 1 else ()
        yield self._gradients(without=(*self._in_the_end, *own))
        if self.uses_fsdp:
            for unit in self.root:
                yield self._term(UNSHARDED_PARAMETERS, unit.parameters, self._compute_width, self._padded)
            is_first = len(self._earlier) == 1 and self.mesh.shard > 1  # then there is no layer to gather before it
            times = 1.0 if is_first else self._gatherings
            yield Term(name=UNSHARDED_PARAMETERS, expressions=tuple(self._gathered), weight=times)
            yield Term(name=BUFFERS, expressions=tuple(map(self._reduced, self.families)))
        yield from self._kept_by_layers(self._earlier[:-1])
        yield Term(name=SAVED, expressions=(Expression(), *self._wholes(family)))
        growing = self._growing(family) if self.uses_fsdp else frozenset(source.label for source in own)
        yield Term(name=TRANSIENTS, expressions=self._moments_in([(family.unit, growing)]))

    def _after_the_layers(self) -> Iterator[Term]:
        yield from self.activations.kept_outside(before=self.activations.first)
        late = self._in_the_end if self.steps == 1 else ()
        yield self._gradients(without=late)
        found = [self._bytes(late, self._gradient_width, self._shard)]
        if self.mesh.tp > 1:  # summands over tp, in a bucket
            bucket = min(_highest(self._every_gradient), self.bucket_bytes)
            found.append(added(found[0], Expression(constant=bucket)))
        growing = self._growing() if self.uses_fsdp else frozenset(source.label for source in late)
        stretch = self.activations.around(growing, is_before=True)
        gathered = [self._bytes(u.parameters, self._compute_width, self._padded) for u in self.root if self.uses_fsdp]
        reducing = [self._reduced(family) for family in self.families] if self.uses_fsdp else [Expression()]
        for moment, buffer in product(stretch.moments if stretch is not None else (), reducing):
            found.append(merged(added(moment, *gathered, buffer)))
        for unit in self.root if self.uses_fsdp else ():
            found.append(merged(added(self._unsharded_gradients(unit), self._reducing(unit))))
        yield Term(name=TRANSIENTS, expressions=undominated(found))

    def _in_the_step(self) -> Iterator[Term]:
        parameters = self.space.graph.parameters
        if self.optimizer.of_all:
            yield Term(name=TRANSIENTS, expressions=(self._every_gradient,), weight=float(self.optimizer.of_all))
        if self.optimizer.of_largest:
            each = dict.fromkeys(
                self._summed({one: 1}, self._shard) for one in self._rest(parameters, self._gradient_width)
            )
            yield Term(name=TRANSIENTS, expressions=tuple(each), weight=float(self.optimizer.of_largest))

    # One layer

    def _moments_in(self, layers: Sequence[tuple[FsdpUnit, frozenset[str]]]) -> tuple[Expression, ...]:
        """Beside what each layer keeps and makes again; at its end FSDP reduces its gradients, and its parameters are
        gone. With it the parameters whose gradients count as soon as they are there."""
        key = "moments", id(self.activations), tuple((unit.name, growing) for unit, growing in layers)
        stretches = [self.activations.within(unit.name, growing) for unit, growing in layers]
        every = (moment for stretch in stretches for moment in stretch.moments)
        known: tuple[Expression, ...] = self.once(key, lambda: undominated(every))
        if not self.uses_fsdp:
            return known
        ends = []
        for (unit, _), stretch in zip(layers, stretches, strict=True):
            gathered = scaled(self._bytes(unit.parameters, self._compute_width, self._padded), -1.0)
            ends.append(merged(added(stretch.after, self._reducing(unit), gathered)))
        return undominated([*known, *ends], known)

    def _made_again(self, family: Family) -> Iterator[Expression]:
        """Of the least recomputed of its layers, or of one that is more so."""
        for mode in Recompute:
            tensors = self._remade(family, mode)
            heavier = [own for own in Recompute if _WEIGHT[own] >= _WEIGHT[mode]]
            for own in heavier if tensors.terms or tensors.constant else ():
                yield from family.where_lightest(own, tensors, heavier)

    def _behind(self, family: Family, kept_of: Sequence[Family]) -> Iterator[Expression]:
        """What there is of its last layer when the one before goes back: gradients, maybe still reduced, and nothing
        that was kept, as far as that counts."""
        left = self._reduced(family) if self.uses_fsdp else Expression()
        if self._are_gradients_new:
            shard = self._shard if self.uses_fsdp else prod
            left = added(left, self._bytes(family.unit.parameters, self._gradient_width, shard))
        for mode in Recompute:
            kept = _lower(self.activations.terms(family.layer.kept[mode] if family in kept_of else {}))
            found = merged(added(left, scaled(kept, -1.0)))
            yield from family.where_lightest(mode, found, [mode])

    def _wholes(self, family: Family) -> Iterator[Expression]:
        """All that there ever is of a layer, under a mode that one has."""
        for mode in Recompute:
            tensors = family.layer.kept[mode], family.layer.remade[mode]
            parts = (term for own in tensors for term in self.activations.terms(own))
            whole: Expression = self.once((*self._key("whole", family.unit), mode), partial(_upper, parts))
            yield from family.counts[mode].where_any(whole)

    # FSDP

    @property
    def _cast(self) -> float:
        """Of what is gathered a rank's shard, cast before."""
        return 1 / self.mesh.shard if self.precision is Precision.BF16_MIXED else 0.0

    @property
    def _gatherings(self) -> float:
        """How often there is a layer's whole: itself and the buffer of the next, or a copy of a parameter."""
        if self.mesh.shard > 1:
            return 2 + self._cast
        return 1 + float(self.precision is Precision.BF16_MIXED)

    def _gathered_throughout(self) -> Iterator[Term]:
        """The root, and layers that are not resharded."""
        if not self.uses_fsdp:
            return
        for unit in self.root:
            yield self._term(UNSHARDED_PARAMETERS, unit.parameters, self._compute_width, self._padded)
        for kind, gathered in zip(self.kinds, self._gathered, strict=True):
            yield from kind.count(reshard=False).times(Term(name=UNSHARDED_PARAMETERS, expressions=(gathered,)))

    def _gathered_for_a_while(self) -> Term:
        """Of layers that are resharded, the largest, with the next one's buffer; in forward any has a buffer."""
        found = [Expression()]
        for kind, gathered in zip(self.kinds, self._gathered, strict=True):
            if self.mesh.shard > 1:
                found.append(scaled(gathered, 1 + self._cast))
            found += kind.count(reshard=True).where_any(scaled(gathered, self._gatherings))
        return Term(name=UNSHARDED_PARAMETERS, expressions=tuple(found))

    @cached_property
    def _gathered(self) -> list[Expression]:
        """A layer of each kind."""
        return [self._bytes(kind.unit.parameters, self._compute_width, self._padded) for kind in self.kinds]

    def _unsharded_gradients(self, unit: FsdpUnit) -> Expression:
        trained = [source for source in unit.parameters if source.trainable]
        return self._bytes(trained, self._compute_width, prod)

    def _reducing(self, unit: FsdpUnit) -> Expression:
        """Gradients beside the buffer that they are reduced in, and the shard that comes out."""
        shard = self._bytes(unit.parameters, self._gradient_width, self._shard)
        return added(self._bytes(unit.parameters, self._gradient_width, self._padded), shard)

    def _reduced(self, family: Family) -> Expression:
        """That buffer."""
        return self._bytes(family.unit.parameters, self._gradient_width, self._padded)

    def _growing(self, family: Family | None = None) -> frozenset[str]:
        """Parameters whose gradients count as soon as they are there: FSDP's until they are reduced."""
        if self.uses_fsdp:
            units = (*self.root, *((family.unit,) if family is not None else ()))
            return frozenset(source.label for unit in units for source in unit.parameters)
        return frozenset(source.label for source in self.space.graph.parameters if self._are_gradients_new)

    # Families

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """In the order of their last layers."""
        found: dict[str, list[LayerGroup]] = {}
        for kind in self.kinds:
            found.setdefault(self._first(kind), []).append(kind)
        positions = self.activations.positions
        families = [self._family(first, kinds) for first, kinds in found.items()]
        return tuple(sorted(filter(None, families), key=lambda family: max(positions[family.unit.name])))

    def _first(self, kind: LayerGroup) -> str:
        """The first layer of its family."""
        return self.first_of.get(kind.unit.name, kind.unit.name)

    def _family(self, first: str, kinds: Sequence[LayerGroup]) -> Family | None:
        positions = self.activations.positions
        units = [
            (max(positions[unit.name]), unit, kind) for kind in kinds for unit in kind.units if unit.name in positions
        ]
        if not units:
            return None
        _, unit, last = max(units, key=lambda row: row[0])
        layer = self.activations.layers[last.unit.name]
        counts = {mode: _together(kind.count(recompute=mode) for kind in kinds) for mode in Recompute}
        return Family(first=first, unit=unit, size=len(units), layer=layer, counts=counts)

    @property
    def _largest(self) -> Family:
        """That of most layers."""
        return max(self.families, key=lambda family: family.size)

    @property
    def _later(self) -> tuple[Family, ...]:
        """Families that end behind the largest."""
        return self.families[self.families.index(self._largest) + 1 :] if self.families else ()

    @property
    def _earlier(self) -> tuple[Family, ...]:
        """The largest, last, and those before it."""
        return self.families[: self.families.index(self._largest) + 1] if self.families else ()

    def _followers(self, families: Sequence[Family]) -> tuple[Family, ...]:
        """Families of which a layer comes behind one of these."""
        positions = self.activations.positions
        first = min(positions[unit.name][0] for kind in self.kinds for unit in kind.units if unit.name in positions)
        if families == self._earlier:
            return tuple(f for f in self.families if f.size > 1 or positions[f.unit.name][0] != first)
        return tuple(families[1:])

    @property
    def _are_gradients_new(self) -> bool:
        """Whether there are no gradients before the micro-batch, and one family alone has more than one layer."""
        return self.steps == 1 and sum(family.size > 1 for family in self.families) <= 1

    # Gradients

    @cached_property
    def _every_gradient(self) -> Expression:
        """At rest, of all parameters."""
        return self._bytes(self.space.graph.parameters, self._gradient_width, self._shard)

    def _gradients(self, without: Sequence[Source] = ()) -> Term:
        """At rest, of all but some."""
        late = scaled(self._bytes(without, self._gradient_width, self._shard), -1.0)
        return Term(name=GRADIENTS, expressions=(merged(added(self._every_gradient, late)),))

    @cached_property
    def _in_the_end(self) -> tuple[Source, ...]:
        """Parameters outside the layers whose gradients come after the layers': those that are read before the first
        one alone; FSDP reduces all last."""
        outside = [source for unit in self.root for source in unit.parameters]
        before = {node.name for node in self.space.graph.nodes[: self.activations.first]}
        return tuple(source for source in outside if self.uses_fsdp or self._readers(source) <= before)

    def _alone_in(self, unit: FsdpUnit) -> tuple[Source, ...]:
        """Parameters of a layer that nothing else reads."""
        inside = {self.space.graph.nodes[i].name for i in self.activations.positions[unit.name]}
        return tuple(source for source in unit.parameters if self._readers(source) <= inside)

    def _readers(self, source: Source) -> set[str]:
        return {reading.op.name for reading in self.space.readings[source.label]}

    # Bytes of parameters

    def _master_width(self, source: Source) -> float:
        dtype = self.space.graph.values[source.result].dtype
        is_cast = self.precision is Precision.BF16_MIXED and dtype == "bfloat16"
        return float(DTYPE_BYTES["float32" if is_cast else dtype])

    def _gradient_width(self, source: Source) -> float:
        return self._master_width(source) * source.trainable

    def _state_width(self, source: Source) -> float:
        return self.optimizer.bytes_per_element(int(self._master_width(source))) * source.trainable

    def _compute_width(self, source: Source) -> float:
        return float(DTYPE_BYTES[self.space.graph.values[source.result].dtype])

    def _shard(self, shape: tuple[int, ...]) -> int:
        """What rests on a rank: FSDP cuts dim 0, and the first ranks have the most."""
        first, *others = shape or (1,)
        return ceil(first / self.mesh.shard) * prod(others)

    def _padded(self, shape: tuple[int, ...]) -> int:
        """The whole with dim 0 filled up to a multiple of FSDP's ranks, in whose buffers it lies so."""
        return self._shard(shape) * self.mesh.shard if shape else 1

    def _term(self, part: str, parameters: Iterable[Source], width: Width, elements: Elements) -> Term:
        return Term(name=part, expressions=(self._bytes(parameters, width, elements),))

    def _bytes(self, parameters: Iterable[Source], width: Width, elements: Elements) -> Expression:
        """Bytes of parameters on a rank, by the placements that their first readings choose."""
        return self._summed(self._rest(parameters, width), elements)

    def _summed(self, resting: Mapping[Resting, int], elements: Elements) -> Expression:
        """The same of so many parameters that rest so."""
        constant, vectors = 0.0, dict[str, list[float]]()
        for (name, shape, wide), number in resting.items():
            if not wide:
                continue
            if name is None:
                constant += number * wide * elements(shape)
                continue
            strategies = self.space.strategies[name]
            vector = vectors.setdefault(name, [0.0] * len(strategies))
            for i, strategy in enumerate(strategies):
                vector[i] += number * wide * elements(local_shape(shape, strategy.operands[0], self.mesh.tp))
        return Expression(constant=constant, terms=tuple((name, tuple(v)) for name, v in vectors.items()))

    def _rest(self, parameters: Iterable[Source], width: Width) -> Mapping[Resting, int]:
        """How many of the parameters rest alike and are as wide. A width is one of the methods above."""
        parameters = tuple(parameters)
        labels = tuple(source.label for source in parameters)
        key = "rest", width.__name__, self.precision, self.optimizer, labels
        found: Mapping[Resting, int] = self.once(key, lambda: Counter(self._resting(s, width) for s in parameters))
        return found

    def _resting(self, source: Source, width: Width) -> Resting:
        readings, shape = self.space.readings[source.label], self.space.graph.values[source.result].shape
        return (self.space.classes[readings[0].name] if readings else None), shape, width(source)


#: how much runs again
_WEIGHT = {Recompute.NONE: 0, Recompute.SELECTIVE: 1, Recompute.FULL: 2}


def _together(counts: Iterable[Count]) -> Count:
    found = list(counts)
    return Count(
        constant=sum(count.constant for count in found), parts=tuple(part for count in found for part in count.parts)
    )


def _upper(terms: Iterable[Term]) -> Expression:
    """At least the terms' sum: of a maximum the sum of what may be the largest, none of which is negative."""
    found = ((expression, term.weight) for term in terms for expression in undominated(term.expressions))
    return merged(added(*(scaled(expression, weight) for expression, weight in found)))


def _lower(terms: Iterable[Term]) -> Expression:
    """At most the terms' sum: of a maximum one of what it is over."""
    return merged(added(*(scaled(term.expressions[0], term.weight) for term in terms)))


def _combined(terms: Iterable[Term]) -> Iterator[Term]:
    """Terms with all linear ones as one."""
    found = list(terms)
    linear = [scaled(term.expressions[0], term.weight) for term in found if len(term.expressions) == 1]
    yield from (term for term in found if len(term.expressions) > 1)
    if linear:
        yield Term(name=found[0].name, expressions=(merged(added(*linear)),))


def _highest(expression: Expression) -> float:
    return expression.constant + sum(max(vector) for _, vector in expression.terms)

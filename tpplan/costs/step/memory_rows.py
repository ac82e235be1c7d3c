"""The memory constraint: a row of the ILP for each moment of a step at which a rank may hold most.

A step replayed op by op (tpplan.costs.prediction.memory_replay) has its peak in one of these moments, and each row is
at least what the replay finds there. L is what lasts throughout: parameters, states, inputs, slack, and the gradients
of earlier micro-batches.

    at the loss         L + all saved activations + the most around the layers
    in a layer          L + the activations saved up to the last layer of a family + the gradients of the layers behind
                        it + what a layer recomputes + the most in a layer: a row for each of few families, or one for
                        all, with the most of each
    gathering           L + what is kept before the layers + the root and a layer gathered, each beside its buffer; or,
                        of layers that do not all train, L + all saved activations + a layer and two buffers
    in the first layer  L + the gradients of all that ran backward before + a layer + the most in it + layers that are
                        still gathered; where there were no gradients before the micro-batch
    after the layers    L + these gradients + the most before the first layer, and where FSDP reduces the root's
    in the step         L + all gradients + the optimizer's temporaries

A layer's backward frees its activations and leaves its gradients. Of like layers the first are recomputed, so that each
layer frees more than the one before it, and in a stretch of like layers the peak is at one of its ends. Where several
families take turns, all gradients count in every layer. During a layer's backward FSDP2 may still reduce the gradients
of the layer after it, which has freed its activations by then.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from tpplan.core.graph import Source
from tpplan.core.mesh import Mesh
from tpplan.costs.layer_activations import Activations
from tpplan.costs.step.gathered_layers import GatheredLayers
from tpplan.costs.step.layer_groups import Families, Family
from tpplan.costs.step.parameter_bytes import RowBytes
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import FsdpUnit, LayerGroup
from tpplan.plan.optimizers import Optimizer
from tpplan.plan.parts import (
    BESIDE,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    SAVED,
    SLACK,
    STATES,
    TRANSIENTS,
    UNSHARDED_PARAMETERS,
)
from tpplan.plan.plan import Precision, Recompute
from tpplan.solvers.problem import Expression, Resource, Term, added, constant_term, merged, scaled
from tpplan.solvers.undominated import combined, lower, undominated, upper

#: families of layers that have rows of their own
MOST_APART = 4


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The rows of one mesh: `kinds` are its layer groups, `root` FSDP's root unit, `steps` the micro-batches of a
    step, `in_flight` those whose activations are kept at once, `beside_bytes` what is held of other stages;
    `like_stages` of the rank, this one among them, keep as many layers gathered."""

    space: Space
    mesh: Mesh
    activations: Activations
    kinds: tuple[LayerGroup, ...]
    families: Families
    root: tuple[FsdpUnit, ...]
    sizes: RowBytes
    optimizer: Optimizer
    precision: Precision
    steps: int
    in_flight: int
    beside_bytes: float
    like_stages: int
    #: FSDP reduces gradients once a step, and earlier micro-batches' are whole
    whole_gradients: bool
    #: FSDP gathers units that it does not reshard once a step
    gathered_once: bool
    slack_bytes: float
    limit: float
    uses_fsdp: bool
    bucket_bytes: float
    #: computes what does not depend on the mesh for the first mesh that asks
    once: Callable[[Hashable, Callable[[], Any]], Any]

    def rows(self) -> Iterator[Resource]:
        """Every row, each under the memory limit in bytes."""
        return (Resource(name=f"memory {name}", terms=terms, limit=self.limit) for name, terms in self._rows())

    def of_a_part(self, parts: int, in_flight: float) -> Resource:
        """About what a rank holds at most that has one of some equal parts of the layers, and keeps the activations of
        `in_flight` micro-batches of it: in a layer's backward, with as much less of what all layers have together."""
        together = (*self._lasting(), self._earlier_gradients(), *self.gathered.throughout())
        terms = [term if term.name == SLACK else replace(term, weight=term.weight / parts) for term in together]
        terms += (replace(term, weight=term.weight * in_flight / parts) for term in self._kept_by_layers())
        if families := self.families.earlier:
            terms += self._beside_what_is_kept(families)
        return Resource(name="memory of a part", terms=tuple(terms), limit=self.limit)

    def _rows(self) -> Iterator[tuple[str, tuple[Term, ...]]]:
        lasting = tuple(self._lasting())
        gradients = (self._gradients(),)
        before = () if self._are_gradients_new else (self._earlier_gradients(),)
        yield "at the loss", (*lasting, *before, *self._kept_by_layers(), *self._at_the_loss())
        if self.families.later:
            in_layers = self._in_a_layer(self.families.later)
            yield "in the last layers", (*lasting, *before, *self._kept_by_layers(), *in_layers)
        for families in self._looked_at_apart():
            kept = self._kept_by_layers(self.families.begun_before(families))
            name = "in a layer" if self.families.largest in families else f"in {families[-1].unit.name}"
            yield name, (*lasting, *before, *kept, *self._in_a_layer(families))
        if self.families.all:
            if self.uses_fsdp and self.mesh.shard > 1:
                yield "gathering the first layer", (*lasting, *before, *self._gathering_the_first_layer())
                if self._has_frozen_layers:
                    in_forward = self._gathering_in_forward()
                    yield "gathering a layer", (*lasting, *before, *self._kept_by_layers(), *in_forward)
            if self._are_gradients_new:
                yield "in the first layer", (*lasting, *self._in_the_first_layer())
        yield "after the layers", (*lasting, *self._after_the_layers())
        yield "in the step", (*lasting, *gradients, *self._in_the_step())

    def _looked_at_apart(self) -> list[tuple[Family, ...]]:
        """The families that end with the largest one or before it, each with a row of its own: in the backward of a
        family what later layers kept is freed. Many families share a row, which has the most of each, and so do all
        where layers do not train, whose most may be in forward, beside what the next layer keeps."""
        earlier = self.families.earlier
        if len(earlier) > MOST_APART or self._has_frozen_layers:
            return [earlier] if earlier else []
        return [(family,) for family in earlier]

    # What lasts

    def _lasting(self) -> Iterator[Term]:
        everything = self.space.graph.parameters
        if self.slack_bytes:
            yield constant_term(SLACK, self.slack_bytes)
        if self.beside_bytes:
            yield constant_term(BESIDE, self.beside_bytes)
        yield Term(name=PARAMETERS, expressions=(self.sizes.parameters(everything),))
        yield Term(name=STATES, expressions=(self.sizes.states(everything),))
        yield self.activations.inputs
        if others := self.in_flight - 1:
            for term in (*self._kept_by_layers(), *self.activations.kept_outside()):
                yield replace(term, weight=term.weight * others)
        if (others := self.like_stages - 1) and self.uses_fsdp:
            for term in self.gathered.kept():
                yield replace(term, weight=term.weight * others)

    def _kept_by_layers(self, families: Sequence[Family] | None = None) -> Iterator[Term]:
        """Activations that layers keep from forward to backward: all layers, or those of some families."""
        names = None if families is None else {family.first for family in families}
        for kind in self.kinds:
            if names is not None and self.families.first(kind) not in names:
                continue
            for mode in Recompute:
                count = kind.count(recompute=mode)
                for term in self._kept(kind, mode):
                    yield from count.times(term)

    def _kept(self, kind: LayerGroup, mode: Recompute) -> tuple[Term, ...]:
        """Activations that one layer of a group keeps, its linear terms as one."""
        terms = self.activations.terms(self.activations.layers[kind.unit.name].kept[mode])
        found: tuple[Term, ...] = self.once((*self._key("kept", kind.unit), mode), lambda: tuple(combined(terms)))
        return found

    def _remade(self, family: Family, mode: Recompute) -> Expression:
        """At least the bytes of the activations that a layer recomputes."""
        terms = self.activations.terms(family.layer.remade[mode])
        found: Expression = self.once((*self._key("remade", family.unit), mode), lambda: upper(terms))
        return found

    def _key(self, what: str, unit: FsdpUnit) -> tuple[str, int, str]:
        return what, id(self.activations), unit.name

    # The moments

    def _at_the_loss(self) -> Iterator[Term]:
        yield from self.activations.kept_outside()
        yield from self.gathered.throughout()
        if self.mesh.shard > 1:  # the flat buffer of the layer gathered last, or of the next
            yield Term(name=BUFFERS, expressions=(Expression(), *self.gathered.each), weight=1 + self.gathered.cast)
        if self.uses_fsdp and self.activations.is_between:  # a layer's gradients may still be reduced
            yield Term(name=BUFFERS, expressions=tuple(map(self._reduced, self.families.all)))
        stretch = self.activations.around(self._growing(), is_before=False)
        yield Term(name=TRANSIENTS, expressions=stretch.moments if stretch is not None else (Expression(),))

    def _in_a_layer(self, families: Sequence[Family]) -> Iterator[Term]:
        last = max(family.end for family in families)
        yield from self.activations.kept_outside(until=last)
        yield from self.gathered.throughout()
        yield from self._beside_what_is_kept(families)
        if self.uses_fsdp and self._are_gradients_new:
            yield Term(name=GRADIENTS, expressions=(self.sizes.gradients(self._parameters_behind(last)),))

    def _beside_what_is_kept(self, families: Sequence[Family]) -> Iterator[Term]:
        """Yields what a rank holds in the backward of a layer of some families beside parameters, states, gradients at
        rest and kept activations: gathered layers, transients, what is recomputed, and buffers."""
        if self.uses_fsdp:
            yield self.gathered.for_a_while()
        yield Term(name=TRANSIENTS, expressions=self._moments_in([(f.unit, self._growing(f)) for f in families]))
        yield from self._multiplied()
        remade = [expression for family in families for expression in self._made_again(family)]
        yield Term(name=SAVED, expressions=(Expression(), *remade))
        behind, begun = [Expression()], self.families.begun_before(families)
        for family in self.families.followers(families):
            if family in begun:
                behind += self._behind(family)
            elif self.uses_fsdp:  # the row has its gradients and none of its activations
                behind.append(self._reduced(family))
        yield Term(name=BUFFERS, expressions=tuple(behind))

    def _gathering_the_first_layer(self) -> Iterator[Term]:
        """The buffer of the root is freed after the first layer has been copied out of its own."""
        yield from self.activations.kept_outside(before=self.activations.first)
        for unit in self.root:
            yield Term(name=UNSHARDED_PARAMETERS, expressions=(self.sizes.gathered(unit.parameters),), weight=2.0)
        yield Term(name=UNSHARDED_PARAMETERS, expressions=tuple(self.gathered.each), weight=2.0)
        if self._has_frozen_layers:
            yield self._passed_between_layers()

    def _gathering_in_forward(self) -> Iterator[Term]:
        """A layer beside its own buffer and that of the layer before it. Where all parameters of layers train, these
        are less than a layer, a buffer and gradients in a layer's backward."""
        last = max(family.end for family in self.families.all)
        yield from self.activations.kept_outside(until=last)
        yield from self.gathered.throughout()
        found = [Expression()]
        for kind, gathered in zip(self.kinds, self.gathered.each, strict=True):
            found.append(scaled(gathered, 2.0))
            found += kind.count(reshard=True).where_any(scaled(gathered, 3.0))
        yield Term(name=UNSHARDED_PARAMETERS, expressions=tuple(found))
        yield self._passed_between_layers()

    def _passed_between_layers(self) -> Term:
        """At least what layers that do not train hand on without keeping it: the most in a layer."""
        return Term(name=TRANSIENTS, expressions=self._moments_in([(f.unit, frozenset()) for f in self.families.all]))

    @property
    def _has_frozen_layers(self) -> bool:
        return any(not source.trainable for kind in self.kinds for source in kind.unit.parameters)

    def _in_the_first_layer(self) -> Iterator[Term]:
        yield from self.activations.kept_outside(before=self.activations.first)
        family = self.families.largest
        own = self._alone_in(family.unit) if len(self.families.earlier) == 1 else ()
        before = (f.unit for f in self.families.earlier if f.end < family.begin)  # single layers: gradients are new
        later = [source for unit in before for source in self._alone_in(unit)]
        yield self._gradients(without=(*self._in_the_end, *own, *later))
        if self.uses_fsdp:
            for unit in self.root:
                yield Term(name=UNSHARDED_PARAMETERS, expressions=(self.sizes.gathered(unit.parameters),))
            is_first = len(self.families.earlier) == 1 and self.mesh.shard > 1  # then no layer before it is prefetched
            times = 1.0 if is_first else self.gathered.at_once
            yield Term(name=UNSHARDED_PARAMETERS, expressions=tuple(self.gathered.each), weight=times)
            yield from self.gathered.before_the_first()
            yield Term(name=BUFFERS, expressions=tuple(map(self._reduced, self.families.all)))
        yield from self._kept_by_layers(self.families.earlier[:-1])
        yield Term(name=SAVED, expressions=(Expression(), *self._wholes(family)))
        growing = self._growing(family) if self.uses_fsdp else frozenset(source.label for source in own)
        yield Term(name=TRANSIENTS, expressions=self._moments_in([(family.unit, growing)]))
        yield from self._multiplied()

    def _after_the_layers(self) -> Iterator[Term]:
        yield from self.activations.kept_outside(before=self.activations.first)
        late = self._in_the_end if self.steps == 1 else ()
        if self.gathered_once:
            yield from self.gathered.kept()
        yield self._gradients(without=late) if self.steps == 1 else self._earlier_gradients()
        found = [self.sizes.gradients(late)]
        if self.mesh.tp > 1:  # gradients that are summed over tp, in a bucket
            bucket = min(_highest(self._every_gradient), self.bucket_bytes)
            found.append(added(found[0], Expression(constant=bucket)))
        growing = self._growing() if self.uses_fsdp else frozenset(source.label for source in late)
        stretch = self.activations.around(growing, is_before=True)
        gathered = [self.sizes.gathered(u.parameters) for u in self.root if self.uses_fsdp]
        reducing = [self._reduced(family) for family in self.families.all] if self.uses_fsdp else [Expression()]
        for moment, buffer in product(stretch.moments if stretch is not None else (), reducing):
            found.append(merged(added(moment, *gathered, buffer)))
        for unit in self.root if self.uses_fsdp else ():
            found.append(merged(added(self.sizes.unsharded_gradients(unit.parameters), self._reducing(unit))))
        yield Term(name=TRANSIENTS, expressions=undominated(found))

    def _in_the_step(self) -> Iterator[Term]:
        if self.optimizer.of_all:
            yield Term(name=TRANSIENTS, expressions=(self._every_gradient,), weight=float(self.optimizer.of_all))
        if self.optimizer.of_largest:
            each = self.sizes.each_gradient(self.space.graph.parameters)
            yield Term(name=TRANSIENTS, expressions=each, weight=float(self.optimizer.of_largest))

    def _parameters_behind(self, last: int) -> list[Source]:
        """Parameters of the layers that begin behind position `last`: their gradients are reduced before."""
        positions = self.activations.positions
        units = (unit for kind in self.kinds for unit in kind.units if unit.name in positions)
        return [source for unit in units if positions[unit.name][0] > last for source in unit.parameters]

    # One layer

    def _moments_in(self, layers: Sequence[tuple[FsdpUnit, frozenset[str]]]) -> tuple[Expression, ...]:
        """Bytes in some layers beside what each keeps and recomputes. At a layer's end FSDP has freed its parameters
        and reduces its gradients. Each comes with the parameters whose gradients count from when they are made."""
        key = "moments", id(self.activations), tuple((unit.name, growing) for unit, growing in layers)
        stretches = [self.activations.within(unit.name, growing) for unit, growing in layers]
        every = (moment for stretch in stretches for moment in stretch.moments)
        known: tuple[Expression, ...] = self.once(key, lambda: undominated(every))
        if not self.uses_fsdp:
            return known
        ends = []
        for (unit, _), stretch in zip(layers, stretches, strict=True):
            gathered = scaled(self.sizes.gathered(unit.parameters), -1.0)
            ends.append(merged(added(stretch.after, self._reducing(unit), gathered)))
        return undominated([*known, *ends])

    def _made_again(self, family: Family) -> Iterator[Expression]:
        """Bytes that a layer recomputes: the family's least recomputed one, or one that is recomputed more."""
        for mode in Recompute:
            tensors = self._remade(family, mode)
            heavier = [own for own in Recompute if own not in mode.lighter]
            for own in heavier if tensors.terms or tensors.constant else ():
                yield from family.where_lightest(own, tensors, heavier)

    def _behind(self, family: Family) -> Iterator[Expression]:
        """Bytes of a family's last layer in the backward of the layer before it: its gradients, which FSDP may still
        reduce, less the activations that it has freed."""
        left = self._reduced(family) if self.uses_fsdp else Expression()
        if self._are_gradients_new:
            left = added(left, self.sizes.gradients(family.unit.parameters))
        for mode in Recompute:
            kept = lower(self.activations.terms(family.layer.kept[mode]))
            found = merged(added(left, scaled(kept, -1.0)))
            yield from family.where_lightest(mode, found, [mode])
            again = lower(self.activations.terms(family.layer.remade[mode]))
            for own in Recompute:  # the layer before it may be one that is recomputed more
                if mode in own.lighter and family.size > 1:
                    before = merged(added(found, self._remade(family, own), scaled(again, -1.0)))
                    lighter = [family.counts[less] for less in mode.lighter]
                    yield from family.counts[own].where_any(before, lighter)

    def _wholes(self, family: Family) -> Iterator[Expression]:
        """Bytes of all that a layer keeps and recomputes, under each mode that a layer of the family has."""
        for mode in Recompute:
            tensors = family.layer.kept[mode], family.layer.remade[mode]
            parts = (term for own in tensors for term in self.activations.terms(own))
            whole: Expression = self.once((*self._key("whole", family.unit), mode), partial(upper, parts))
            yield from family.counts[mode].where_any(whole)

    # FSDP

    @cached_property
    def gathered(self) -> GatheredLayers:
        """The parameters that FSDP holds gathered."""
        return GatheredLayers(
            kinds=self.kinds,
            families=self.families,
            root=self.root,
            sizes=self.sizes,
            mesh=self.mesh,
            precision=self.precision,
            uses_fsdp=self.uses_fsdp,
        )

    def _reducing(self, unit: FsdpUnit) -> Expression:
        """A unit's gradients in the flat buffer that they are reduced in, and the shard that comes out."""
        return added(self.sizes.reduced(unit.parameters), self.sizes.gradients(unit.parameters))

    def _reduced(self, family: Family) -> Expression:
        """The flat buffer in which a layer's gradients are reduced."""
        return self.sizes.reduced(family.unit.parameters)

    def _multiplied(self) -> Iterator[Term]:
        """The largest gradient of a layer over shard and tp, of which there is a multiple for a moment."""
        found = [
            self.sizes.over_tp.times(kind.unit.name, max(map(self.sizes.unsharded_bytes, kind.unit.parameters)))
            for kind in self.kinds
            if self.sizes.over_tp.may_be(kind.unit.name)
        ]
        if found:
            yield Term(name=TRANSIENTS, expressions=(Expression(), *dict.fromkeys(found)))

    def _growing(self, family: Family | None = None) -> frozenset[str]:
        """Names of parameters whose gradients count from when they are made; with FSDP until they are reduced."""
        if self.uses_fsdp:
            units = (*self.root, *((family.unit,) if family is not None else ()))
            return frozenset(source.label for unit in units for source in unit.parameters)
        return frozenset(source.label for source in self.space.graph.parameters if self._are_gradients_new)

    @property
    def _are_gradients_new(self) -> bool:
        """True where no gradients are there before the micro-batch, and at most one family has several layers."""
        return self.steps == 1 and sum(family.size > 1 for family in self.families.all) <= 1

    # Gradients

    @cached_property
    def _every_gradient(self) -> Expression:
        """Bytes of all parameters' gradients at rest."""
        return self.sizes.gradients(self.space.graph.parameters)

    def _gradients(self, without: Sequence[Source] = ()) -> Term:
        """Gradients at rest of all parameters but some."""
        late = scaled(self.sizes.gradients(without), -1.0)
        return Term(name=GRADIENTS, expressions=(merged(added(self._every_gradient, late)),))

    def _earlier_gradients(self) -> Term:
        """Gradients of earlier micro-batches: their shards, or all of them in the dtype that they are reduced in. Those
        that the last micro-batch has reduced by then are no more, for the whole ones of their unit are freed."""
        if not self.whole_gradients:
            return self._gradients()
        return Term(name=GRADIENTS, expressions=(self.sizes.reduced(self.space.graph.parameters),))

    @cached_property
    def _in_the_end(self) -> tuple[Source, ...]:
        """Parameters outside the layers whose gradients come after the layers': with FSDP all, for it reduces the root
        last, else those that only nodes before the first layer read."""
        outside = [source for unit in self.root for source in unit.parameters]
        before = {node.name for node in self.space.graph.nodes[: self.activations.first]}
        return tuple(source for source in outside if self.uses_fsdp or self._readers(source) <= before)

    def _alone_in(self, unit: FsdpUnit) -> tuple[Source, ...]:
        """Parameters of a layer that nothing outside of it reads."""
        inside = {self.space.graph.nodes[i].name for i in self.activations.positions[unit.name]}
        return tuple(source for source in unit.parameters if self._readers(source) <= inside)

    def _readers(self, source: Source) -> set[str]:
        return {reading.op.name for reading in self.space.readings[source.label]}


def _highest(expression: Expression) -> float:
    return expression.constant + sum(max(vector) for _, vector in expression.terms)

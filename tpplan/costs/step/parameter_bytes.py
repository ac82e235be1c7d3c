"""Bytes of parameters, and of what belongs to them, on a rank of tp, by the placements that are chosen.

FSDP2 fills dim 0 of what a rank of tp has up to a multiple of its own ranks: of each there is as much as on the first,
and that is what its buffers hold and its collectives move. A sum over the units of a mesh counts that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from tpplan.core.graph import Source
from tpplan.core.layout import Layout, LayoutKind, R, local_shape
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.layer_treatments import FsdpUnit
from tpplan.plan.optimizers import optimizer_named
from tpplan.solvers.problem import Expression, added, merged, scaled


@dataclass(frozen=True, slots=True)
class _Weight:
    """What counts of a parameter: the decision that its first reading is, if it is read, and its bytes as a whole."""

    decision: str | None
    shape: tuple[int, ...]
    num_bytes: float


#: from a parameter to the bytes of its whole
BytesOf = Callable[[Source], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Before FSDP cuts them among `shard` ranks. The first functions are of one parameter, whole; the last of what a
    rank of tp has, filled up."""

    priced: PricedSpace
    setting: Setting
    shard: int

    def states(self, source: Source) -> float:
        """Of the optimizer."""
        value = self.priced.space.graph.values[source.result]
        width = self.setting.master_bytes(value.dtype)
        each = optimizer_named(self.setting.optimizer).bytes_per_element(width)
        return value.num_elements * each * source.trainable

    def resting(self, source: Source) -> float:
        """In the master dtype."""
        value = self.priced.space.graph.values[source.result]
        return float(value.num_elements * self.setting.master_bytes(value.dtype))

    def computed(self, source: Source) -> float:
        """As forward reads it."""
        return float(self.priced.space.graph.values[source.result].num_bytes)

    def gradients(self, source: Source) -> float:
        """As they are reduced, in the master dtype; a frozen parameter has none."""
        return self.resting(source) * source.trainable

    def trained(self, source: Source) -> float:
        """As backward makes gradients."""
        return self.computed(source) * source.trainable

    def by_placement(self, *shares: tuple[float, BytesOf]) -> Iterator[Expression]:
        """Of all: an expression for each placement that decides, and one for the parameters that nothing reads."""
        whole = self.of(None, *shares)
        yield Expression(constant=whole.constant)
        for term in whole.terms:
            yield Expression(terms=(term,))

    def of(self, unit: FsdpUnit | None, *shares: tuple[float, BytesOf]) -> Expression:
        """Of a unit's parameters, or of all: a sum of shares of the functions above."""
        found = [scaled(self._once(unit, bytes_of), share) for share, bytes_of in shares]
        return found[0] if len(found) == 1 else merged(added(*found))

    def _once(self, unit: FsdpUnit | None, bytes_of: BytesOf) -> Expression:
        """By one of the functions above, which have their names and depend on nothing else."""
        setting, name = self.setting, unit.name if unit is not None else None
        key = bytes_of.__name__, name, setting.units, setting.precision, setting.optimizer
        parameters = unit.parameters if unit is not None else self.priced.space.graph.parameters
        alike = self.priced.once((*key, "alike"), lambda: Counter(self._weight(s, bytes_of) for s in parameters))
        return self.priced.once((*key, self.ranks), lambda: self._on_a_rank(alike))

    def _weight(self, source: Source, bytes_of: BytesOf) -> _Weight:
        space = self.priced.space
        readings = space.readings[source.label]
        return _Weight(
            decision=space.classes[readings[0].name] if readings else None,
            shape=space.graph.values[source.result].shape,
            num_bytes=bytes_of(source),
        )

    def _on_a_rank(self, weights: Mapping[_Weight, int]) -> Expression:
        """Of so many of each, by the placements that are chosen."""
        space, ranks, constant = self.priced.space, self.ranks, 0.0
        vectors: dict[str, list[float]] = {}
        for weight, count in weights.items():
            if weight.decision is None:
                constant += count * self._filled(weight, R, ranks)
                continue
            strategies = space.strategies[weight.decision]
            vector = vectors.setdefault(weight.decision, [0.0] * len(strategies))
            for i, strategy in enumerate(strategies):
                vector[i] += count * self._filled(weight, strategy.operands[0], ranks)
        return Expression(constant=constant, terms=tuple((name, tuple(v)) for name, v in vectors.items()))

    def filled(self, source: Source, bytes_of: BytesOf, placement: Layout) -> float:
        """By one of those functions, of a parameter on a rank of tp, filled up as FSDP does."""
        return self._filled(self._weight(source, bytes_of), placement, self.ranks)

    def _filled(self, weight: _Weight, placement: Layout, ranks: int) -> float:
        tp = self.priced.space.tp
        if ranks == 1 or 0 in weight.shape or not weight.shape:
            return weight.num_bytes / (tp if placement.kind is LayoutKind.SHARD else 1)
        first, *others = local_shape(weight.shape, placement, tp)
        return weight.num_bytes * ceil(first / ranks) * ranks * prod(others) / prod(weight.shape)

    @property
    def ranks(self) -> int:
        """FSDP's, where they fill up any parameter; 1 where all divide, however they are placed."""
        space = self.priced.space
        parts = self.shard * space.tp

        def divides_all() -> bool:
            shapes = (space.graph.values[source.result].shape for source in space.graph.parameters)
            return not any(shape and shape[0] % parts for shape in shapes)

        return 1 if self.shard == 1 or self.priced.once(("all divide", parts), divides_all) else self.shard

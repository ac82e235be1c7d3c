"""Bytes of parameters, gradients and optimizer states on one rank.

    ParameterBytes    over tp alone, padded for FSDP: what FSDP's buffers hold and its collectives move; an Expression
    RowBytes          cut by FSDP too, as the memory rows count them; an Expression

Those of an assignment, whose placements are known, are numbers (tpplan.costs.prediction.weights).
FSDP2 pads dim 0 of a tp rank's part to a multiple of the FSDP ranks.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod

from tpplan.core.graph import Source
from tpplan.core.layout import Layout, LayoutKind, R, local_shape
from tpplan.core.mesh import Mesh
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.train_config import Setting
from tpplan.costs.step.units_over_tp import UnitsOverTp
from tpplan.layouts.assignment import master_bytes
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import FsdpUnit
from tpplan.plan.optimizers import Optimizer, optimizer_named
from tpplan.plan.plan import Precision
from tpplan.solvers.problem import Expression, added, merged, scaled


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: its first reading's decision (None where nothing reads it), its whole shape, an amount, bytes of the
    whole or per element, and the number of ranks that divide its experts."""

    decision: str | None
    shape: tuple[int, ...]
    amount: float
    ep: int


def _parameter(space: Space, source: Source, amount: Callable[[Source], float]) -> Parameter:
    readings = space.readings[source.label]
    decision = space.classes[readings[0].name] if readings else None
    return Parameter(decision, space.graph.values[source.result].shape, amount(source), source.ep)


def _by_placement(
    space: Space, numbers: Mapping[Parameter, int], bytes_of: Callable[[Parameter, Layout], float]
) -> Expression:
    """Bytes on a rank, from the number of equal parameters, by the placements that are chosen."""
    constant, vectors = 0.0, dict[str, list[float]]()
    for own, number in numbers.items():
        if own.decision is None:
            constant += number * bytes_of(own, R)
            continue
        strategies = space.strategies[own.decision]
        vector = vectors.setdefault(own.decision, [0.0] * len(strategies))
        for i, strategy in enumerate(strategies):
            vector[i] += number * bytes_of(own, strategy.operands[0])
    return Expression(constant=constant, terms=tuple((name, tuple(v)) for name, v in vectors.items()))


#: from a parameter to the bytes of its whole
BytesOf = Callable[[Source], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes before FSDP cuts them among `shard` ranks: functions of the type BytesOf give those of one whole parameter,
    the others those on a tp rank, padded as in FSDP's buffers."""

    priced: PricedSpace
    setting: Setting
    shard: int

    def states(self, source: Source) -> float:
        """Bytes of the optimizer's states; 0 for a frozen parameter."""
        value = self.priced.space.graph.values[source.result]
        width = self.setting.master_bytes(value.dtype)
        each = optimizer_named(self.setting.optimizer).bytes_per_element(width)
        return value.num_elements * each * source.trainable

    def resting(self, source: Source) -> float:
        """Bytes of the parameter in the master dtype."""
        value = self.priced.space.graph.values[source.result]
        return float(value.num_elements * self.setting.master_bytes(value.dtype))

    def computed(self, source: Source) -> float:
        """Bytes of the parameter in the dtype of forward."""
        return float(self.priced.space.graph.values[source.result].num_bytes)

    def gradients(self, source: Source) -> float:
        """Bytes of the gradient as it is reduced, in the master dtype; 0 for a frozen parameter."""
        return self.resting(source) * source.trainable

    def trained(self, source: Source) -> float:
        """Bytes of the gradient as backward makes it, in the dtype of forward; 0 for a frozen parameter."""
        return self.computed(source) * source.trainable

    def by_placement(self, *shares: tuple[float, BytesOf], is_own: bool = False) -> Iterator[Expression]:
        """Bytes of all parameters, with the experts of all ranks, or with `is_own` of a rank's own: an expression for
        each deciding placement, one for parameters that nothing reads."""
        whole = self.of(None, *shares, ep=0 if is_own else 1)
        yield Expression(constant=whole.constant)
        for term in whole.terms:
            yield Expression(terms=(term,))

    def of(self, unit: FsdpUnit | None, *shares: tuple[float, BytesOf], ep: int = 1) -> Expression:
        """Bytes of those parameters of a unit whose experts `ep` ranks divide, the sum of share times bytes over
        `shares`. Where the unit is None, of all parameters: with the experts of all ranks, or where ep is 0 with a
        rank's own."""
        names = tuple((share, bytes_of.__name__) for share, bytes_of in shares)
        return self.priced.once(("bytes", names, self._key(unit, ep), self.ranks), lambda: self._sum(unit, shares, ep))

    def _key(self, unit: FsdpUnit | None, ep: int) -> Hashable:
        """Everything that bytes of some parameters depend on, beside the function that gives them."""
        setting = self.setting
        return unit.name if unit is not None else None, ep, setting.units, setting.precision, setting.optimizer

    def _sum(self, unit: FsdpUnit | None, shares: Sequence[tuple[float, BytesOf]], ep: int) -> Expression:
        found = [scaled(self._bytes(unit, bytes_of, ep), share) for share, bytes_of in shares]
        return found[0] if len(found) == 1 else merged(added(*found))

    def _bytes(self, unit: FsdpUnit | None, bytes_of: BytesOf, ep: int) -> Expression:
        """Bytes by one function."""
        space, ranks, key = self.priced.space, self.ranks, (bytes_of.__name__, self._key(unit, ep))

        def found() -> Expression:
            alike = space.once_for_all_sizes(key, lambda: self._alike(unit, bytes_of, ep))
            return _by_placement(space, alike, partial(self._padded, ranks))

        return self.priced.once((*key, ranks), found)

    def _alike(self, unit: FsdpUnit | None, bytes_of: BytesOf, ep: int) -> Counter[Parameter]:
        """The parameters that `of` counts, equal ones counted."""
        space = self.priced.space
        if unit is None and not ep:
            return Counter(_parameter(space, own, bytes_of) for own in space.graph.parameters)
        if unit is None:
            return Counter(_parameter(space, own, lambda s: s.ep * bytes_of(s)) for own in space.graph.parameters)
        return Counter(_parameter(space, own, bytes_of) for own in unit.parameters if own.ep == ep)

    def whole(self, unit: FsdpUnit, bytes_of: BytesOf, ep: int) -> float:
        """Bytes of those parameters of a unit whose experts `ep` ranks divide, whole on a rank, padded as in FSDP's
        buffers."""
        setting, ranks = self.setting, self.ranks
        key = "whole", bytes_of.__name__, unit.name, ep, setting.units, setting.precision, ranks
        parameters = (self.parameter(source, bytes_of) for source in unit.parameters if source.ep == ep)
        return self.priced.once(key, lambda: sum(self._padded(ranks, own, R) for own in parameters))

    def over_tp(self, unit: FsdpUnit, bytes_of: BytesOf, tp: int) -> float:
        """Bytes of a unit's parameters, whole on a rank, padded as in FSDP's buffers over shard and tp together."""
        ranks = self.shard * tp
        key = "over tp", bytes_of.__name__, unit.name, self.setting.units, self.setting.precision, ranks
        parameters = (self.parameter(source, bytes_of) for source in unit.parameters)
        return self.priced.once(key, lambda: sum(self._padded(ranks, own, R) for own in parameters))

    def parameter(self, source: Source, bytes_of: BytesOf) -> Parameter:
        """The parameter with the bytes of its whole."""
        return _parameter(self.priced.space, source, bytes_of)

    def padded(self, parameter: Parameter, placement: Layout) -> float:
        """Bytes of one parameter on a tp rank under a placement, padded as in FSDP's buffers."""
        return self._padded(self.ranks, parameter, placement)

    def _padded(self, ranks: int, weight: Parameter, placement: Layout) -> float:
        tp, ranks = self.priced.space.tp, max(1, ranks // weight.ep)
        if ranks == 1 or 0 in weight.shape or not weight.shape:
            return weight.amount / (tp if placement.kind is LayoutKind.SHARD else 1)
        first, *others = local_shape(weight.shape, placement, tp)
        return weight.amount * ceil(first / ranks) * ranks * prod(others) / prod(weight.shape)

    @property
    def ranks(self) -> int:
        """The FSDP ranks where they pad any parameter; 1 where dim 0 of all divides under every placement."""
        parts = self.shard * self.priced.space.tp
        divide = self.shard == 1 or self.priced.once(("all divide", parts), partial(self._divide_all, parts))
        return 1 if divide else self.shard

    def _divide_all(self, parts: int) -> bool:
        """True where dim 0 of every parameter divides into so many parts, of experts among those that have the same."""
        graph = self.priced.space.graph
        sizes = self.priced.once(
            "sizes of dim 0", lambda: {(graph.values[s.result].shape[:1], s.ep) for s in graph.parameters}
        )
        return not any(size % (parts // ep) for shape, ep in sizes for size in shape)


#: bytes per element of a parameter
Width = Callable[[Source], float]
#: elements of a parameter's part on a rank that count, by the part's shape and the ranks over which FSDP shards it
Elements = Callable[[tuple[int, ...], int], int]


def _elements(shape: tuple[int, ...], _ranks: int) -> int:
    return prod(shape)


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of parameters on a rank as the memory rows count them: by the placements that the solver chooses, each
    parameter cut among FSDP's ranks by itself. `units` are FSDP's."""

    space: Space
    mesh: Mesh
    optimizer: Optimizer
    precision: Precision
    over_tp: UnitsOverTp
    units: tuple[FsdpUnit, ...]

    def compute_width(self, source: Source) -> float:
        """Bytes per element in forward."""
        return float(DTYPE_BYTES[self.space.graph.values[source.result].dtype])

    def master_width(self, source: Source) -> float:
        """Bytes per element at rest."""
        return float(master_bytes(self.precision, self.space.graph.values[source.result].dtype))

    def gradient_width(self, source: Source) -> float:
        """Bytes per element of the gradient at rest; 0 for a frozen parameter."""
        return self.master_width(source) * source.trainable

    def state_width(self, source: Source) -> float:
        """Bytes per element of the optimizer's states; 0 for a frozen parameter."""
        return self.optimizer.bytes_per_element(int(self.master_width(source))) * source.trainable

    def parameters(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the FSDP shards, at rest."""
        return self._of(parameters, self.master_width, shard_elements)

    def states(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the optimizer's states of the FSDP shards."""
        return self._of(parameters, self.state_width, shard_elements)

    def gradients(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the gradients of the FSDP shards, at rest."""
        return self._of(parameters, self.gradient_width, shard_elements)

    def each_gradient(self, parameters: Iterable[Source]) -> tuple[Expression, ...]:
        """Bytes of each parameter's gradient at rest, equal ones once."""
        alike = self._alike(parameters, self.gradient_width)
        return tuple(dict.fromkeys(self._sum({one: 1}, shard_elements) for one in alike))

    def gathered(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the gathered parameters, as in FSDP's flat buffer."""
        return self._of(parameters, self.compute_width, padded_elements)

    def reduced(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the flat buffer in which FSDP reduces the gradients."""
        return self._of(parameters, self.gradient_width, padded_elements)

    def unsharded_gradients(self, parameters: Iterable[Source]) -> Expression:
        """Bytes of the gradients as backward makes them, before FSDP reduces them."""
        return self._of([source for source in parameters if source.trainable], self.compute_width, _elements)

    def unsharded_bytes(self, source: Source) -> float:
        """Bytes of a whole parameter's gradient as backward makes it; 0 for a frozen one."""
        value = self.space.graph.values[source.result]
        return self.compute_width(source) * prod(value.shape) * source.trainable

    def _of(self, parameters: Iterable[Source], width: Width, elements: Elements) -> Expression:
        """Bytes of parameters on a rank. `width` is one of the methods above."""
        if not self.over_tp.is_possible:
            return self._sum(self._alike(parameters, width), elements)
        own = tuple(parameters)
        return merged(added(self._sum(self._alike(own, width), elements), *self._over_tp(own, width, elements)))

    def _over_tp(self, parameters: tuple[Source, ...], width: Width, elements: Elements) -> Iterator[Expression]:
        """Yields for units over shard and tp what their bytes differ by from those over shard: all of theirs are R."""
        narrow, wide = self.mesh.shard, self.mesh.shard * self.mesh.tp
        for unit, numbers in self._alike_over_tp(parameters, width):
            more = sum(
                number * own.amount * (elements(own.shape, wide) - elements(own.shape, narrow))
                for own, number in numbers.items()
            )
            yield self.over_tp.times(unit, more)

    def _alike_over_tp(
        self, parameters: tuple[Source, ...], width: Width
    ) -> tuple[tuple[str, Mapping[Parameter, int]], ...]:
        """The number of equal parameters of the units that may be over shard and tp, with one of the units of each
        node, or each unit where it is decided."""
        key = (
            "over tp",
            width.__name__,
            self.precision,
            self.optimizer,
            self.over_tp.given or self.over_tp,
            self._labels(parameters),
        )
        return self.space.once_for_all_sizes(key, lambda: self._counted_over_tp(parameters, width))

    def _counted_over_tp(
        self, parameters: tuple[Source, ...], width: Width
    ) -> tuple[tuple[str, Mapping[Parameter, int]], ...]:
        unit_of = {source.label: unit.name for unit in self.units for source in unit.parameters}
        found: dict[str, tuple[str, Counter[Parameter]]] = {}
        for source in parameters:
            unit = unit_of[source.label]
            if self.over_tp.may_be(unit):
                _, numbers = found.setdefault(self.over_tp.nodes.get(unit, ""), (unit, Counter()))
                numbers[_parameter(self.space, source, width)] += 1
        return tuple(found.values())

    @staticmethod
    def _labels(parameters: Iterable[Source]) -> tuple[str, ...]:
        return tuple(source.label for source in parameters)

    def _sum(self, numbers: Mapping[Parameter, int], elements: Elements) -> Expression:
        def num_bytes(own: Parameter, placement: Layout) -> float:
            shape = local_shape(own.shape, placement, self.mesh.tp)
            return own.amount * elements(shape, self.mesh.shard // own.ep)

        return _by_placement(self.space, {own: number for own, number in numbers.items() if own.amount}, num_bytes)

    def _alike(self, parameters: Iterable[Source], width: Width) -> Mapping[Parameter, int]:
        """The number of equal parameters, by the bytes per element."""
        parameters = tuple(parameters)
        key = "rest", width.__name__, self.precision, self.optimizer, self._labels(parameters)
        return self.space.once_for_all_sizes(
            key, lambda: Counter(_parameter(self.space, source, width) for source in parameters)
        )


def shard_elements(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a tensor's largest FSDP shard: FSDP cuts dim 0, and the first ranks have the most."""
    first, *others = shape or (1,)
    return ceil(first / ranks) * prod(others)


def padded_elements(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a tensor with dim 0 padded to a multiple of the FSDP ranks, as FSDP2's flat buffers hold it."""
    return shard_elements(shape, ranks) * ranks if shape else 1

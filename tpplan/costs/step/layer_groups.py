"""Groups the layers of a model: those that the ILP treats as interchangeable, and those that ran the same code.

Layers of one LayerGroup have the same decisions and costs: the ILP decides how many of them get which treatment
(tpplan.layouts.layer_treatments). A Family joins groups that were one before their treatments were decided.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from tpplan.core.mesh import Mesh
from tpplan.costs.layer_activations import Activations, LayerCosts
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.train_config import Setting
from tpplan.costs.step.units_over_tp import UnitsOverTp, can_be_over_tp
from tpplan.layouts.layer_treatments import TREATMENTS, Count, FsdpUnit, LayerGroup, Treatment, numbers_of
from tpplan.layouts.parameter_writes import why_not_recomputed, write_within
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Expression

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """The FSDP units of a mesh, and its layers in groups."""

    priced: PricedSpace
    setting: Setting
    uses_fsdp: bool
    mesh: Mesh

    @property
    def units(self) -> tuple[FsdpUnit, ...]:
        """The FSDP units, the root last."""
        return self.priced.units(self.setting.units)

    @property
    def root(self) -> tuple[FsdpUnit, ...]:
        """The root unit, if it has parameters of its own."""
        return tuple(unit for unit in self.units if not unit.name)

    @cached_property
    def alike(self) -> tuple[LayerGroup, ...]:
        """Groups of layers with the same decisions, costs and saved activations."""
        return self._once("groups of the same costs", lambda: self._grouped(self._numbers_by_cost()), *self._open)

    @cached_property
    def timed(self) -> tuple[LayerGroup, ...]:
        """Groups of layers that take the same time: where no layer is recomputed, saved activations do not matter."""
        treatments = self.setting.treatments
        is_open = treatments is None or any(own.recompute is not Recompute.NONE for own in treatments.values())
        return self.alike if is_open else self._deciding_alike

    @cached_property
    def _deciding_alike(self) -> tuple[LayerGroup, ...]:
        return self._once(
            "groups of the same decisions", lambda: self._grouped(self._numbers_by_decision()), *self._open
        )

    @cached_property
    def _open(self) -> tuple[Hashable, ...]:
        """Everything that decides which treatments each layer may get."""
        setting = self.setting
        given = None if setting.treatments is None else tuple(setting.treatments.items())
        return self.uses_fsdp, setting.recompute, setting.reshard_after_forward, given, setting.units_over_tp

    @cached_property
    def over_tp(self) -> UnitsOverTp:
        """The units that are, or may be, over shard and tp together: none without several ranks on either axis."""
        given, wanted = self.setting.units_over_tp, self.setting.fsdp_over_tp
        if given is not None:
            return UnitsOverTp(given=given)
        if 1 in (self.mesh.shard, self.mesh.tp) or not self.uses_fsdp or wanted is False:
            return UnitsOverTp()
        return self._once("units over tp", lambda: self._open_over_tp(wanted), wanted)

    def _open_over_tp(self, wanted: bool | None) -> UnitsOverTp:
        possible, first = can_be_over_tp(self.priced.space, self.units), dict[int, str]()
        nodes = {
            name: f"{first.setdefault(number, name)} and like: FSDP over tp"
            for name, number in self._numbers_by_decision().items()
            if name in possible
        }
        return UnitsOverTp(nodes=nodes, options=(True,) if wanted else (False, True))

    def _grouped(self, numbers: Mapping[str, int]) -> tuple[LayerGroup, ...]:
        """Groups layers with the same number, and with the same treatment where treatments are given."""
        found: dict[object, list[FsdpUnit]] = {}
        given = self.setting.treatments  # without any, all layers of a number have the same treatments to choose from
        over_tp = self.setting.units_over_tp or ()
        for unit in self.units:
            if unit.name:
                treatment = None if given is None else self._given(given[unit.name])
                key = numbers[unit.name], treatment, unit.name in over_tp
                found.setdefault(key, []).append(unit)
        return tuple(
            LayerGroup(units=tuple(own), numbers=numbers_of(own[0].name, len(own), self._treatments(own[0])))
            for own in found.values()
        )

    def _numbers_by_cost(self) -> dict[str, int]:
        """A number for each layer, equal for layers with the same decisions and costs."""
        layers = self.priced.activations(self.setting.units).layers
        numbers = self._numbers_by_decision()
        return self._once(
            "same decisions and costs",
            lambda: _numbered({name: (number, layers[name].signature) for name, number in numbers.items()}),
        )

    def _numbers_by_decision(self) -> dict[str, int]:
        """A number for each layer, equal for layers with the same decisions."""
        return self.priced.space.once_for_all_sizes(
            ("same decisions", self.setting.units),
            lambda: _numbered(
                {u.name: (self._placed_by(u), tuple(sorted(u.hides)), u.calls) for u in self.units if u.name}
            ),
        )

    def _once(self, what: str, make: Callable[[], T], *about: Hashable) -> T:
        return self.priced.once((what, self.setting.units, *about), make)

    def _placed_by(self, unit: FsdpUnit) -> tuple[str, ...]:
        """The decision that places each parameter of a unit; the parameter's own name where nothing reads it."""
        space = self.priced.space
        readings = ((source, space.readings[source.label]) for source in unit.parameters)
        return tuple(space.classes[own[0].name] if own else source.label for source, own in readings)

    def _treatments(self, unit: FsdpUnit) -> tuple[Treatment, ...]:
        """The treatments that a unit may get, in the order of TREATMENTS; without FSDP all of them reshard."""
        setting = self.setting
        if setting.treatments is not None:
            return (self._given(setting.treatments[unit.name]),)
        reshard = setting.reshard_after_forward if self.uses_fsdp else True
        graph = self.priced.space.graph
        recompute = Recompute.NONE if write_within(graph, (unit.name,)) else setting.recompute
        impossible = [mode for mode in Recompute if why_not_recomputed(graph, unit.name, mode)]
        return tuple(
            treatment
            for treatment in TREATMENTS
            if recompute in (None, treatment.recompute) and reshard in (None, treatment.reshard)
            if treatment.recompute not in impossible
        )

    def _given(self, treatment: Treatment) -> Treatment:
        """A treatment as it is where it is given; without FSDP all of them reshard."""
        return treatment if self.uses_fsdp or treatment.reshard else replace(treatment, reshard=True)


def _numbered(keys: Mapping[str, object]) -> dict[str, int]:
    """A number for each name, equal for equal keys."""
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Layers that were alike before their treatments were decided: `first` names the first, `unit` is the last, `layer`
    its costs, `counts` the number of layers by mode of recomputation. The first begins at position `begin` among the
    nodes of the graph, the last ends at `end`."""

    first: str
    unit: FsdpUnit
    size: int
    begin: int
    end: int
    layer: LayerCosts
    counts: Mapping[Recompute, Count]

    def where_lightest(
        self, mode: Recompute, expression: Expression, among: Sequence[Recompute]
    ) -> Iterator[Expression]:
        """The expression where layers have `mode` and none is recomputed less than every mode of `among`."""
        lighter = set(Recompute).intersection(*(other.lighter for other in among))
        yield from self.counts[mode].where_any(expression, [self.counts[own] for own in Recompute if own in lighter])


@dataclass(frozen=True, kw_only=True)
class Families:
    """The families of some layer groups. `first_of` names the first layer of a layer's family where it is not the
    group's own first."""

    kinds: tuple[LayerGroup, ...]
    activations: Activations
    first_of: Mapping[str, str]

    @cached_property
    def all(self) -> tuple[Family, ...]:
        """Every family with a layer that runs, in the order of their last layers."""
        found: dict[str, list[LayerGroup]] = {}
        for kind in self.kinds:
            found.setdefault(self.first(kind), []).append(kind)
        families = [self._family(first, kinds) for first, kinds in found.items()]
        return tuple(sorted(filter(None, families), key=lambda family: family.end))

    def first(self, kind: LayerGroup) -> str:
        """The name of the first layer of a group's family."""
        return self.first_of.get(kind.unit.name, kind.unit.name)

    def _family(self, first: str, kinds: Sequence[LayerGroup]) -> Family | None:
        positions = self.activations.positions
        units = [
            (max(positions[unit.name]), unit, kind) for kind in kinds for unit in kind.units if unit.name in positions
        ]
        if not units:
            return None
        end, unit, last = max(units, key=lambda row: row[0])
        begin = min(positions[unit.name][0] for _, unit, _ in units)
        layer = self.activations.layers[last.unit.name]
        counts = {mode: _together(kind.count(recompute=mode) for kind in kinds) for mode in Recompute}
        return Family(first=first, unit=unit, size=len(units), begin=begin, end=end, layer=layer, counts=counts)

    @property
    def largest(self) -> Family:
        """The family with most layers."""
        return max(self.all, key=lambda family: family.size)

    @property
    def later(self) -> tuple[Family, ...]:
        """Families that end after the largest one."""
        return self.all[self.all.index(self.largest) + 1 :] if self.all else ()

    @property
    def earlier(self) -> tuple[Family, ...]:
        """Families that end before the largest one, and the largest one as the last."""
        return self.all[: self.all.index(self.largest) + 1] if self.all else ()

    def followers(self, families: Sequence[Family]) -> tuple[Family, ...]:
        """Families of which a layer runs after one of `families` has begun."""
        begin, positions = min(family.begin for family in families), self.activations.positions
        return tuple(family for family in self.all if positions[family.unit.name][0] > begin)

    def begun_before(self, families: Sequence[Family]) -> tuple[Family, ...]:
        """Families of which a layer has run when the last layer of `families` ends, these among them."""
        end = max(family.end for family in families)
        return tuple(family for family in self.all if family.begin < end)


def _together(counts: Iterable[Count]) -> Count:
    """The sum of some numbers of layers."""
    found = list(counts)
    return Count(
        constant=sum(count.constant for count in found), parts=tuple(part for count in found for part in count.parts)
    )

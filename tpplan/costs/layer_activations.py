"""Finds, for each layer and each mode of recomputation, the activations that it keeps and remakes, and what runs again.

A recomputed layer's forward runs again as under torch.utils.checkpoint: up to the last op that saves anything, and
that op too where it saves a result. A mode keeps the results of some kinds of work
(tpplan.plan.sections.modes.Recompute).

A layer owns the tensors that enter it, which it keeps in every mode, and those that are made inside it. All other
tensors are kept in every mode and belong to no layer.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from tpplan.core.graph import Boundary, Direction, Op, enclosing
from tpplan.core.layout import Conversion
from tpplan.costs.held_storages import Form, Holding, forms_of
from tpplan.costs.peak_candidates import KeptStorage, PeakCandidates, Region, positions_in
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.kernels import WORK
from tpplan.costs.saved_tensors import (
    SavedStorage,
    copies_read,
    extra_terms,
    gives_sum,
    is_wanted,
    kept_expressions,
    segments_in,
    segments_of,
    sources,
    unsummed_expressions,
)
from tpplan.layouts.decision_space import Decider, Space
from tpplan.layouts.readings import Reading
from tpplan.plan.parts import SAVED
from tpplan.plan.plan import Recompute, WorkKind
from tpplan.solvers.problem import Expression, Term

#: number of a kind of tensors with the same bytes
Key = int
#: expressions whose maximum is the bytes of one tensor
Bytes = tuple[Expression, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The tensors of one layer by mode of recomputation, and the decisions that run again."""

    #: number of tensors by key that are kept from forward to backward
    kept: Mapping[Recompute, Mapping[Key, int]]
    #: number of tensors by key that exist again while the layer's backward runs
    remade: Mapping[Recompute, Mapping[Key, int]]
    #: number of decisions that run again, by class
    again: Mapping[str, int]

    @property
    def signature(self) -> object:
        """A value that is equal for layers with the same costs under every mode."""
        tensors = tuple(frozenset(table.items()) for table in (*self.kept.values(), *self.remade.values()))
        return tensors, frozenset(self.again.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpan:
    """A storage that is kept without recomputation, and when it exists."""

    key: Key
    #: position of the node that makes the storage
    maker: int
    #: position of the earliest node, over all modes, after whose backward the storage is freed
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activations of a model for a micro-batch on one rank, and the moments at which memory may peak."""

    #: storages that no layer owns
    outside: tuple[StorageSpan, ...]
    layers: Mapping[str, LayerCosts]
    sizes: Mapping[Key, Bytes]
    #: bytes of inputs and buffers
    inputs: Term
    #: positions of each layer's nodes, ascending, for layers that run
    positions: Mapping[str, tuple[int, ...]]
    #: True where nodes outside of layers run between layers
    is_between: bool
    _candidates: PeakCandidates
    #: by layer: the storages that it keeps without recomputation
    _kept: Mapping[str, tuple[StorageSpan, ...]]
    _regions: dict[object, Region] = field(default_factory=dict)

    def terms(self, tensors: Mapping[Key, int]) -> Iterator[Term]:
        """Yields the terms of tensors given by key with their number."""
        for key, count in tensors.items():
            yield Term(name=SAVED, expressions=self.sizes[key], weight=float(count))

    def kept_outside(self, *, until: float = math.inf, before: float = math.inf) -> Iterator[Term]:
        """Yields terms of storages of no layer, made before position `before` and saved at `until` or before."""
        found = Counter(entry.key for entry in self.outside if entry.until <= until and entry.maker < before)
        yield from self.terms(found)

    @property
    def first(self) -> int:
        """The position at which the first layer begins; 0 without layers."""
        return min((own[0] for own in self.positions.values()), default=0)

    def within(self, unit: str, parameters: frozenset[str]) -> Region:
        """Returns the moments of a layer; gradients of these parameters count from the backward that makes them."""
        key = unit, parameters
        if key not in self._regions:
            kept = self._parts(self._kept[unit])
            self._regions[key] = self._candidates.region(self.positions[unit], kept, parameters, is_repeated=True)
        return self._regions[key]

    def around(self, parameters: frozenset[str], *, is_before: bool) -> Region | None:
        """Returns the moments before the first layer, or of all other nodes outside of layers; None without nodes."""
        key = is_before, parameters
        if key not in self._regions:
            inside = {i for own in self.positions.values() for i in own}
            ours = range(self.first) if is_before else range(self.first, self._candidates.num_nodes)
            positions = [i for i in ours if i not in inside]
            if not positions:
                return None
            kept = self._parts(entry for entry in self.outside if not is_before or entry.maker < self.first)
            self._regions[key] = self._candidates.region(positions, kept, parameters, is_repeated=False)
        return self._regions[key]

    def _parts(self, spans: Iterable[StorageSpan]) -> list[KeptStorage]:
        """Returns each storage with one expression for its bytes that never exceeds the bytes counted for it."""
        return [KeptStorage(num_bytes=self.sizes[span.key][0], maker=span.maker, until=span.until) for span in spans]


def layer_activations(space: Space, executor: Executor, units: tuple[str, ...]) -> Activations:
    """Returns the saved activations of a micro-batch on one rank, for the layers `units` and each mode."""
    return _ActivationFinder(space, executor, units).activations()


class _ActivationFinder:
    """Sorts the saved tensors of a model by owner, under each mode of recomputation."""

    def __init__(self, space: Space, executor: Executor, units: tuple[str, ...]) -> None:
        self.space = space
        self.executor = executor
        self.units = units
        self._is_unit = frozenset(units)
        self.sizes: dict[Key, Bytes] = {}
        self._unit_of: dict[str, str | None] = {}
        self._work: dict[str, frozenset[WorkKind]] = {}
        self._numbers: dict[object, Key] = {}
        self._position = positions_in(space.graph)
        self._places = space.graph.once_for_all_sizes((_ActivationFinder, units), self._places_of_units)

    def _places_of_units(self) -> dict[str, tuple[int, ...]]:
        """Returns the positions of each layer's nodes, for layers that run."""
        found: dict[str, list[int]] = {}
        for i, node in enumerate(self.space.graph.nodes):
            if (unit := self.unit_of(node)) is not None:
                found.setdefault(unit, []).append(i)
        return {unit: tuple(places) for unit, places in found.items()}

    def activations(self) -> Activations:
        """Returns the activations of the model."""
        outside: list[StorageSpan] = []
        own: dict[str, list[StorageSpan]] = {unit: [] for unit in self.units}
        kept = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        remade = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        extras = list(self._extras())
        makers = {name for _, _, _, name in extras}
        for mode in Recompute:
            stays = {name: mode is Recompute.NONE or self._keeps_inside(name, mode) for name in makers}
            held = ((who, key, at, at, stays[name]) for who, key, at, name in extras)
            for owner, key, maker, until, is_there in chain(self._segments(mode), held):
                if owner is not None:
                    (kept if is_there else remade)[owner][mode][key] += 1
                # A tensor that leaves a layer has no owner: it is kept in every mode of that layer.
                if mode is Recompute.NONE:
                    (outside if owner is None else own[owner]).append(StorageSpan(key=key, maker=maker, until=until))
        again = self._repeated_classes()
        return Activations(
            outside=tuple(outside),
            layers={unit: LayerCosts(kept=kept[unit], remade=remade[unit], again=again[unit]) for unit in self.units},
            sizes=self.sizes,
            inputs=sources(self.space),
            positions=self._places,
            is_between=self._is_between(),
            _candidates=PeakCandidates(self.space, self.executor, segments_in(self.space.graph, self.executor)),
            _kept={unit: tuple(found) for unit, found in own.items()},
        )

    def _is_between(self) -> bool:
        inside = {i for own in self._places.values() for i in own}
        return bool(inside) and len(inside) < max(inside) + 1 - min(inside)

    # Who owns what

    def unit_of(self, decider: Decider) -> str | None:
        """Returns the layer that a decision is in, its border included; None outside of layers."""
        module = decider.module
        if module not in self._unit_of:
            self._unit_of[module] = next((name for name in enclosing(module) if name in self._is_unit), None)
        return self._unit_of[module]

    def _entered_unit(self, decider: Decider) -> str | None:
        """Returns the layer whose input a boundary is; None for all other decisions."""
        if isinstance(decider, Boundary) and decider.direction is Direction.INPUT:
            return decider.module if self.unit_of(decider) == decider.module else None
        return None

    def _interior_unit(self, decider: Decider) -> str | None:
        """Returns the layer that a decision is in, without its border; None elsewhere."""
        unit = self.unit_of(decider)
        return None if isinstance(decider, Boundary) and decider.module == unit else unit

    def _segments(self, mode: Recompute) -> Iterator[tuple[str | None, Key, int, float, bool]]:
        """Yields (owner, key, position of the maker, StorageSpan.until, is_there) of the storages kept under a mode.

        Keys depend on classes only, so that they are found once for like layers.
        """
        graph = self.space.graph
        memo_key = Holding, mode, self.units, self.executor.saving(graph)
        segments, holdings = graph.once_for_all_sizes(memo_key, lambda: self._holdings(mode))
        classes, found = self.space.classes, []
        forms, numbers = self.space.once_for_all_sizes((Form, memo_key), lambda: forms_of(classes, holdings))
        for form, segment in forms:
            key = self._key_of(segments, segment, form)
            found.append((key, self._sums_held(form.maker, key) if form.may_be_sum else None))
        keeps_sums = _keeps_sums(mode)
        for held, number in zip(holdings, numbers, strict=True):
            key, parts = found[number]
            until = min(held.segment.until, held.made) if parts is not None else held.until
            if parts is not None and keeps_sums and (held.owner is not None or not held.is_needed):
                yield held.owner or held.crossed_in, parts[0], held.made, until, True
                key = parts[1]
            if held.is_needed:
                yield held.owner, key, held.made, until, held.is_there

    def _key_of(self, segments: dict[str, SavedStorage], segment: SavedStorage, form: Form) -> Key:
        """Returns the key of the kept bytes of a storage: all, the part that these classes of boundaries read, or what
        these do not sum."""
        readers, summed_by = (own and tuple(sorted(set(own))) for own in (form.readers, form.summed_by))
        unsummed = unsummed_expressions(self.space, segment, form.summed_by) if form.summed_by else None
        what = self.space.classes[segment.maker], segment.position, readers, summed_by if unsummed is not None else ()
        key = self._number(what)
        if key not in self.sizes:
            self.sizes[key] = unsummed or kept_expressions(self.space, segments, segment)
        return key

    def _number(self, what: object) -> Key:
        return self._numbers.setdefault(what, len(self._numbers))

    def _holdings(self, mode: Recompute) -> tuple[dict[str, SavedStorage], list[Holding]]:
        """Returns the segments, and the storages that are kept under a mode or may be, under one that keeps sums."""
        space, segments = self.space, segments_of(self.space, self.executor)
        found = []
        summed_by = {name: own for name, segment in segments.items() if (own := self._summed_by(segment, mode))}
        if mode is not Recompute.NONE:
            for segment in segments.values():
                maker = space.deciders[segment.maker]
                if self._entered_unit(maker) is not None or self._keeps_inside(segment.maker, mode):
                    segment.is_kept = True
        for name, segment in segments.items():
            wanted = tuple(name for name in segment.exits if is_wanted(segments, name))
            is_needed = segment.is_kept or bool(wanted)
            maker = space.deciders[segment.maker]
            crossed_in = self.unit_of(maker) if isinstance(maker, Boundary) else None
            if not is_needed and (crossed_in is None or not _keeps_sums(mode)):
                continue
            made, until = self._position[segment.maker], segment.until
            owner, is_there = self._entered_unit(maker) or self._first_entered_unit(segments, segment), True
            is_given = owner is not None and is_needed
            if owner is not None and is_given:
                until = min(until, self._places[owner][0])  # a layer that runs again needs its input at its start
            else:
                leaves = any(self._leaves_unit(segments, name) for name in segment.exits)
                owner = None if leaves else self._interior_unit(maker)
                is_there = mode is Recompute.NONE or self._keeps_inside(segment.maker, mode)
                if any(self._keeps_inside(segment.maker, own) for own in Recompute):
                    until = min(until, made)
            found.append(
                Holding(
                    segment=segment,
                    wanted=wanted,
                    owner=owner,
                    is_there=is_there,
                    is_needed=is_needed,
                    is_given=is_given,
                    crossed_in=crossed_in,
                    summed_by=summed_by.get(name, ()),
                    made=made,
                    until=until,
                )
            )
        return segments, found

    def _first_entered_unit(self, segments: dict[str, SavedStorage], segment: SavedStorage) -> str | None:
        """Returns the first layer that a storage enters from outside; None where it enters none."""
        for name in segment.exits:
            decider = self.space.deciders[name]
            found = self._entered_unit(decider) or self._first_entered_unit(segments, segments[f"{name}:0"])
            if found is not None:
                return found
        return None

    def _leaves_unit(self, segments: dict[str, SavedStorage], boundary: str) -> bool:
        """True where a storage behind a boundary, or behind further ones, leaves a layer and an op outside saves it."""
        decider = self.space.deciders[boundary]
        if isinstance(decider, Boundary) and decider.module == self.unit_of(decider) and is_wanted(segments, boundary):
            return True
        return any(self._leaves_unit(segments, name) for name in segments[f"{boundary}:0"].exits)

    def _keeps_inside(self, name: str, mode: Recompute) -> bool:
        """True where a selective mode keeps the results of an op inside a layer, decided for its class."""
        decider = self.space.deciders[name]
        if not mode.is_selective or not isinstance(decider, Op) or self._interior_unit(decider) is None:
            return False
        return not mode.keeps.isdisjoint(self._work_of(decider))

    def _work_of(self, op: Op) -> frozenset[WorkKind]:
        representative = self.space.classes[op.name]
        if representative not in self._work:
            kernels = self.executor.whole(self.space.graph, op).forward
            self._work[representative] = frozenset(WORK[type(kernel)] for kernel in kernels)
        return self._work[representative]

    def _summed_by(self, segment: SavedStorage, mode: Recompute) -> tuple[str, ...]:
        """The boundaries that alone read a product that a mode keeps, which lets it go where all of them give a sum
        that it keeps too; () where something else reads it, or a boundary of another layer."""
        maker = self.space.deciders[segment.maker]
        if not _keeps_sums(mode) or not self._keeps_inside(segment.maker, mode) or not isinstance(maker, Op):
            return ()
        units = {self.unit_of(self.space.deciders[name]) for name in segment.exits}
        is_alone = not segment.is_read and units == {self.unit_of(maker)}
        return tuple(segment.exits) if is_alone and WorkKind.PRODUCT in self._work_of(maker) else ()

    def _sums_held(self, name: str, key: Key) -> tuple[Key, Key] | None:
        """Splits the kept bytes of a class of boundaries (`key`) by whether the conversion gives a sum over ranks.

        Returns the key of the bytes under the strategies that do and the key of the bytes under the others; None where
        no strategy does.
        """
        conversions = (Conversion(s.operands[0], s.results[0]) for s in self.space.strategies[name])
        is_held = tuple(map(gives_sum, conversions))
        if not any(is_held):
            return None
        held, rest = self._number(("held", key)), self._number(("not held", key))
        if held not in self.sizes:
            (whole,) = self.sizes[key]
            ((_, vector),) = whole.terms
            for own, wanted in ((held, True), (rest, False)):
                part = tuple(entry * (yes is wanted) for entry, yes in zip(vector, is_held, strict=True))
                self.sizes[own] = (Expression(terms=((name, part),)),)
        return held, rest

    def _extras(self) -> Iterator[tuple[str | None, Key, int, str]]:
        """Yields (owner, key, position, decision) of saved statistics and masks, and of converted copies of weights."""
        for name, members in self.space.members.items():
            terms = [*extra_terms(self.space, name, self.executor), *copies_read(self.space, name)]
            for i, term in enumerate(terms):
                key = self._number(("extra", name, i))
                self.sizes[key] = term.expressions
                for member in members:
                    own = self.space.deciders[member]
                    place = self._position[own.op.name if isinstance(own, Reading) else own.name]
                    yield self._interior_unit(own), key, place, member

    # What runs again

    def _repeated_classes(self) -> dict[str, Counter[str]]:
        """Returns by layer the number of decisions that run again, by class."""
        space, key = self.space, ("run again", self.units, self.executor.saving(self.space.graph))
        again = space.graph.once_for_all_sizes(key, self._repeated_names)
        return space.once_for_all_sizes(
            key, lambda: {unit: Counter(map(space.classes.__getitem__, names)) for unit, names in again.items()}
        )

    def _repeated_names(self) -> dict[str, list[str]]:
        """Returns by layer the decisions up to the last op that saves anything; that op too where it saves a result."""
        inside: dict[str, list[str]] = {unit: [] for unit in self.units}
        for name, decider in self.space.deciders.items():
            unit = self._interior_unit(decider)
            if unit is not None:
                inside[unit].append(name)
        found = {}
        for unit, names in inside.items():
            last = 0
            for place, name in enumerate(names):
                decider = self.space.deciders[name]
                if isinstance(decider, Op):
                    execution = self.executor.whole(self.space.graph, decider)
                    if execution.saves or execution.saves_results or execution.saved_bytes:
                        last = place + bool(execution.saves_results or execution.saved_bytes)
            found[unit] = names[:last]
        return found


def _keeps_sums(mode: Recompute) -> bool:
    return mode.is_selective and WorkKind.SUM in mode.keeps

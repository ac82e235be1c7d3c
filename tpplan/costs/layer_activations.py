"""What each layer costs under each way of recomputing it: what it keeps, what it makes again, and what runs again.

A layer's forward runs again as tpplan.costs.step.recompute_cost says of torch.utils.checkpoint: up to the last op that
keeps anything, and that one too where what it keeps is a result. Selective recomputation holds the results of products
and attention.

A tensor that enters a layer is the layer's, whoever makes it: the layer keeps it, recomputed or not. All else that is
made inside is the layer's own. What is neither is there whatever is chosen.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, enclosing
from tpplan.core.layout import Conversion
from tpplan.costs.execute import Execution, Executor, whole_strategy
from tpplan.costs.kernels import MemoryBound
from tpplan.costs.peak_candidates import Kept, Moments, Stretch
from tpplan.costs.saved_tensors import (
    HELD_STEPS,
    Segment,
    copies_read,
    extra_terms,
    is_wanted,
    kept_expressions,
    segments_of,
    sources,
)
from tpplan.layouts.decision_space import Decider, Reading, Space
from tpplan.layouts.rules import Call
from tpplan.plan.parts import SAVED
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Expression, Term

#: bytes of like tensors: expressions whose maximum one of them takes, and a number that equals where they do
Key = int
Bytes = tuple[Expression, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer's tensors by key with their number, by mode, and the decisions (classes) that run again.

    `kept` is there from forward to backward, `remade` only while the layer's own backward runs.
    """

    kept: Mapping[Recompute, Mapping[Key, int]]
    remade: Mapping[Recompute, Mapping[Key, int]]
    again: Mapping[str, int]

    @property
    def signature(self) -> object:
        """Equal for layers that cost alike under every mode."""
        tensors = tuple(frozenset(table.items()) for table in (*self.kept.values(), *self.remade.values()))
        return tensors, frozenset(self.again.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A storage that is kept where nothing is recomputed: its key, the position that makes it, and that whose backward
    it is kept for in the end, under whichever mode."""

    key: Key
    maker: int
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activations of a model: terms of what no layer owns, costs by layer, bytes by key, and what is there at each
    moment of the layers and around them. `positions` are the nodes of each layer that runs, in order."""

    outside: tuple[Owned, ...]
    layers: Mapping[str, LayerCosts]
    sizes: Mapping[Key, Bytes]
    inputs: Term
    positions: Mapping[str, tuple[int, ...]]
    _moments: Moments
    _kept: Mapping[str, tuple[Owned, ...]]
    _stretches: dict[object, Stretch] = field(default_factory=dict)

    def terms(self, tensors: Mapping[Key, int]) -> Iterator[Term]:
        """Terms of one layer's tensors."""
        for key, count in tensors.items():
            yield Term(name=SAVED, expressions=self.sizes[key], weight=float(count))

    def kept_outside(self, *, until: float = math.inf, before: float = math.inf) -> Iterator[Term]:
        """Terms of what no layer owns, made before a position and maybe wanted by one up to another."""
        found = Counter(entry.key for entry in self.outside if entry.until <= until and entry.maker < before)
        yield from self.terms(found)

    @property
    def first(self) -> int:
        """The position at which the first layer begins; 0 without layers."""
        return min((own[0] for own in self.positions.values()), default=0)

    @property
    def is_between(self) -> bool:
        """Whether nodes that are in no layer run between layers."""
        inside = {i for own in self.positions.values() for i in own}
        return bool(inside) and len(inside) < max(inside) + 1 - min(inside)

    def within(self, unit: str, parameters: frozenset[str]) -> Stretch:
        """Moments of a layer; gradients of these parameters count as soon as they are there."""
        key = unit, parameters
        if key not in self._stretches:
            kept = self._parts(self._kept[unit])
            self._stretches[key] = self._moments.stretch(self.positions[unit], kept, parameters, is_repeated=True)
        return self._stretches[key]

    def around(self, parameters: frozenset[str], *, is_before: bool) -> Stretch | None:
        """Moments before the first layer, or of all else that is in no layer; None where there are no nodes."""
        key = is_before, parameters
        if key not in self._stretches:
            inside = {i for own in self.positions.values() for i in own}
            ours = range(self.first) if is_before else range(self.first, self._moments.num_nodes)
            positions = [i for i in ours if i not in inside]
            if not positions:
                return None
            kept = self._parts(entry for entry in self.outside if not is_before or entry.maker < self.first)
            self._stretches[key] = self._moments.stretch(positions, kept, parameters, is_repeated=False)
        return self._stretches[key]

    def _parts(self, owned: Iterable[Owned]) -> list[Kept]:
        """Of each storage one expression that is no more than what is counted of it."""
        return [Kept(num_bytes=self.sizes[entry.key][0], maker=entry.maker, until=entry.until) for entry in owned]


def layer_activations(space: Space, executor: Executor, units: tuple[str, ...]) -> Activations:
    """Saved activations of a micro-batch on one rank, by layer and mode; the largest op's own; inputs and buffers."""
    return _Ledger(space, executor, units).activations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A storage, the boundaries behind which it is wanted, the layer that owns it, and whether it is there all the
    time."""

    segment: Segment
    wanted: tuple[str, ...]
    owner: str | None
    is_there: bool
    #: whether anything wants it, whether a layer is given it, the layer that a boundary makes it in, the position that
    #: makes it, and Owned.until
    is_needed: bool
    is_given: bool
    crossed_in: str | None
    made: int
    until: float


class _Ledger:
    """Tensors by who owns them, under each mode."""

    def __init__(self, space: Space, executor: Executor, units: tuple[str, ...]) -> None:
        self.space = space
        self.executor = executor
        self.units = units
        self._is_unit = frozenset(units)
        self.sizes: dict[Key, Bytes] = {}
        self._unit_of: dict[str, str | None] = {}
        self._holding: dict[str, bool] = {}
        self._numbers: dict[object, Key] = {}
        self._position = {node.name: i for i, node in enumerate(space.graph.nodes)}
        self._places: dict[str, list[int]] = {}
        for i, node in enumerate(space.graph.nodes):
            if (unit := self.unit_of(node)) is not None:
                self._places.setdefault(unit, []).append(i)

    def activations(self) -> Activations:
        outside: list[Owned] = []
        own: dict[str, list[Owned]] = {unit: [] for unit in self.units}
        kept = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        remade = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        extras = list(self._extras())
        for mode in Recompute:
            held = ((owner, key, place, place, self._keeps(name, mode)) for owner, key, place, name in extras)
            for owner, key, maker, until, is_there in chain(self._segments(mode), held):
                if owner is not None:
                    (kept if is_there else remade)[owner][mode][key] += 1
                # What leaves a layer is there whatever the layer does.
                if mode is Recompute.NONE:
                    (outside if owner is None else own[owner]).append(Owned(key=key, maker=maker, until=until))
        again = self._again()
        return Activations(
            outside=tuple(outside),
            layers={unit: LayerCosts(kept=kept[unit], remade=remade[unit], again=again[unit]) for unit in self.units},
            sizes=self.sizes,
            inputs=sources(self.space),
            positions={unit: tuple(found) for unit, found in self._places.items()},
            _moments=Moments(self.space, self.executor, segments_of(self.space, self.executor)),
            _kept={unit: tuple(found) for unit, found in own.items()},
        )

    # Who owns what

    def unit_of(self, decider: Decider) -> str | None:
        """The layer that a decision is inside of."""
        module = decider.op.module if isinstance(decider, Reading) else decider.module
        if module not in self._unit_of:
            self._unit_of[module] = next((name for name in enclosing(module) if name in self._is_unit), None)
        return self._unit_of[module]

    def _entered(self, decider: Decider) -> str | None:
        """The layer that a boundary leads into."""
        if isinstance(decider, Boundary) and decider.direction is Direction.INPUT:
            return decider.module if self.unit_of(decider) == decider.module else None
        return None

    def _around(self, decider: Decider) -> str | None:
        """The layer that a decision is inside of and not at the border."""
        unit = self.unit_of(decider)
        return None if isinstance(decider, Boundary) and decider.module == unit else unit

    def _segments(self, mode: Recompute) -> Iterator[tuple[str | None, Key, int, float, bool]]:
        """(owner, key, position of the maker, Owned.until, whether it is there all the time) of every storage that is
        kept under a mode. What depends on classes alone is found once for those of like layers."""
        graph, classes = self.space.graph, self.space.classes
        memo_key = Holding, mode, self.units, id(graph)
        segments, holdings = self.executor.once(memo_key, graph, lambda: self._holdings(mode))
        known: dict[object, tuple[Key, tuple[Key, Key] | None]] = {}
        for held in holdings:
            segment = held.segment
            maker, may_be_sum = classes[segment.maker], held.crossed_in is not None and not held.is_given
            readers = None if segment.is_kept else tuple(classes[name] for name in held.wanted)
            form = maker, segment.position, readers, may_be_sum
            if form not in known:
                key = self._key_of(segments, segment, readers)
                known[form] = key, self._sums_held(maker, key) if may_be_sum else None
            key, parts = known[form]
            until = min(segment.until, held.made) if parts is not None else held.until
            if parts is not None and mode is Recompute.SELECTIVE and (held.owner is not None or not held.is_needed):
                yield held.owner or held.crossed_in, parts[0], held.made, until, True
                key = parts[1]
            if held.is_needed:
                yield held.owner, key, held.made, until, held.is_there

    def _key_of(self, segments: dict[str, Segment], segment: Segment, readers: tuple[str, ...] | None) -> Key:
        """Of what is kept of a storage: all, or what these classes of boundaries read of it."""
        what = self.space.classes[segment.maker], segment.position, readers and tuple(sorted(set(readers)))
        key = self._number(what)
        if key not in self.sizes:
            self.sizes[key] = kept_expressions(self.space, segments, segment)
        return key

    def _number(self, what: object) -> Key:
        return self._numbers.setdefault(what, len(self._numbers))

    def _holdings(self, mode: Recompute) -> tuple[dict[str, Segment], list[Holding]]:
        """Every storage that is kept under a mode, whatever its layout, or that selective recomputation may hold."""
        space, segments = self.space, segments_of(self.space, self.executor)
        found = []
        if mode is not Recompute.NONE:
            for segment in segments.values():
                maker = space.deciders[segment.maker]
                if self._entered(maker) is not None or self._holds(segment.maker, mode):
                    segment.is_kept = True
        for segment in segments.values():
            wanted = tuple(name for name in segment.exits if is_wanted(segments, name))
            is_needed = segment.is_kept or bool(wanted)
            maker = space.deciders[segment.maker]
            crossed_in = self.unit_of(maker) if isinstance(maker, Boundary) else None
            if not is_needed and (crossed_in is None or mode is not Recompute.SELECTIVE):
                continue
            made, until = self._position[segment.maker], segment.until
            owner, is_there = self._entered(maker) or self._enters(segments, segment), True
            is_given = owner is not None and is_needed
            if owner is not None and is_given:
                until = min(until, self._places[owner][0])  # a layer that runs again is given it again
            else:
                leaves = any(self._leaves(segments, name) for name in segment.exits)
                owner = None if leaves else self._around(maker)
                is_there = mode is Recompute.NONE or self._holds(segment.maker, mode)
                if self._holds(segment.maker, Recompute.SELECTIVE):
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
                    made=made,
                    until=until,
                )
            )
        return segments, found

    def _enters(self, segments: dict[str, Segment], segment: Segment) -> str | None:
        """The first layer that a storage goes into from elsewhere."""
        for name in segment.exits:
            decider = self.space.deciders[name]
            found = self._entered(decider) or self._enters(segments, segments[f"{name}:0"])
            if found is not None:
                return found
        return None

    def _leaves(self, segments: dict[str, Segment], boundary: str) -> bool:
        """True where what crosses a boundary, and maybe further ones, leaves a layer and is wanted behind it."""
        decider = self.space.deciders[boundary]
        if isinstance(decider, Boundary) and decider.module == self.unit_of(decider) and is_wanted(segments, boundary):
            return True
        return any(self._leaves(segments, name) for name in segments[f"{boundary}:0"].exits)

    def _holds(self, name: str, mode: Recompute) -> bool:
        """True where selective recomputation holds an op's results, by its class."""
        decider = self.space.deciders[name]
        if mode is not Recompute.SELECTIVE or not isinstance(decider, Op) or self._around(decider) is None:
            return False
        representative = self.space.classes[name]
        if representative not in self._holding:
            kernels = _execution_of(self.space.graph, decider, self.executor).forward
            self._holding[representative] = any(not isinstance(kernel, MemoryBound) for kernel in kernels)
        return self._holding[representative]

    def _sums_held(self, name: str, key: Key) -> tuple[Key, Key] | None:
        """Keys of what selective recomputation holds of the results of a class of boundaries, sums over ranks and what
        moves as much, and of what it does not; None where it holds nothing. `key` is that of all."""
        conversions = (Conversion(s.operands[0], s.results[0]) for s in self.space.strategies[name])
        is_held = tuple(not HELD_STEPS.isdisjoint(conversion.forward) for conversion in conversions)
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

    def _keeps(self, name: str, mode: Recompute) -> bool:
        """Whether what an op keeps for itself is there all the time."""
        return mode is Recompute.NONE or (isinstance(self.space.deciders[name], Op) and self._holds(name, mode))

    def _extras(self) -> Iterator[tuple[str | None, Key, int, str]]:
        """(owner, key, position, decision) of tensors that are no operands or results, and of copies of weights."""
        for name, members in self.space.members.items():
            terms = [*extra_terms(self.space, name, self.executor), *copies_read(self.space, name)]
            for i, term in enumerate(terms):
                key = self._number(("extra", name, i))
                self.sizes[key] = term.expressions
                for member in members:
                    own = self.space.deciders[member]
                    place = self._position[own.op.name if isinstance(own, Reading) else own.name]
                    yield self._around(own), key, place, member

    # What runs again

    def _again(self) -> dict[str, Counter[str]]:
        """The same by class, with their number."""
        key = "run again", self.units, id(self.space.graph)
        again = self.executor.once(key, self.space.graph, self._run_again)
        return {unit: Counter(self.space.classes[name] for name in names) for unit, names in again.items()}

    def _run_again(self) -> dict[str, list[str]]:
        """Of each layer, the decisions before the last op that keeps anything, and it too if that is a result."""
        inside: dict[str, list[str]] = {unit: [] for unit in self.units}
        for name, decider in self.space.deciders.items():
            unit = self._around(decider)
            if unit is not None:
                inside[unit].append(name)
        found = {}
        for unit, names in inside.items():
            last = 0
            for place, name in enumerate(names):
                decider = self.space.deciders[name]
                if isinstance(decider, Op):
                    execution = _execution_of(self.space.graph, decider, self.executor)
                    if execution.saves or execution.saves_results or execution.saved_bytes:
                        last = place + bool(execution.saves_results or execution.saved_bytes)
            found[unit] = names[:last]
        return found


def _execution_of(graph: ModelGraph, op: Op, executor: Executor) -> Execution:
    """What an op does where nothing is sharded."""
    call = Call.of(graph, op)
    return executor.execute(call, whole_strategy(call), 1)

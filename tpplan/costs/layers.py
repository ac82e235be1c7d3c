"""What each layer costs under each way of recomputing it: what it keeps, what it makes again, and what runs again.

A layer's forward runs again as tpplan.reruns says of torch.utils.checkpoint: up to the last op that keeps anything, and
that one too where what it keeps is a result. Selective recomputation holds the results of products and attention.

A tensor that enters a layer is the layer's, whoever makes it: the layer keeps it, recomputed or not. All else that is
made inside is the layer's own. What is neither is there whatever is chosen.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpplan.costs.compute import Execution, Executor, MemoryBound, whole_strategy
from tpplan.costs.memory import (
    SAVED,
    Segment,
    copies_read,
    extra_terms,
    gradients_passing,
    is_wanted,
    kept_expressions,
    largest_move,
    largest_op,
    segments_of,
    sources,
)
from tpplan.graph import Boundary, Direction, ModelGraph, Op, enclosing
from tpplan.plan import Recompute
from tpplan.problem import Expression, Term
from tpplan.rules import Call
from tpplan.space import Decider, Reading, Space

#: bytes of like tensors: expressions whose maximum one of them takes, and a key that equals where they do
Key = tuple[object, ...]
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
class Activations:
    """Activations of a model: terms of what no layer owns, costs by layer, and bytes by key."""

    outside: tuple[Term, ...]
    layers: Mapping[str, LayerCosts]
    sizes: Mapping[Key, Bytes]

    def terms(self, tensors: Mapping[Key, int]) -> Iterator[Term]:
        """Terms of one layer's tensors."""
        for key, count in tensors.items():
            yield Term(name=SAVED, expressions=self.sizes[key], weight=float(count))


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

    def activations(self) -> Activations:
        outside: dict[Recompute, Counter[Key]] = {mode: Counter() for mode in Recompute}
        kept = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        remade = {unit: {mode: Counter[Key]() for mode in Recompute} for unit in self.units}
        extras = list(self._extras())
        for mode in Recompute:
            held = ((owner, key, self._keeps(member, mode)) for owner, key, member in extras)
            for owner, key, is_there in (*self._segments(mode), *held):
                if owner is None:
                    outside[mode][key] += 1
                else:
                    (kept if is_there else remade)[owner][mode][key] += 1
        again = self._again()
        # What leaves a layer is there whatever the layer does.
        rest = tuple(
            Term(name=SAVED, expressions=self.sizes[key], weight=float(count))
            for key, count in outside[Recompute.NONE].items()
        )
        passing = (largest_op(self.space, self.executor), largest_move(self.space), gradients_passing(self.space))
        return Activations(
            outside=(*rest, *passing, sources(self.space)),
            layers={unit: LayerCosts(kept=kept[unit], remade=remade[unit], again=again[unit]) for unit in self.units},
            sizes=self.sizes,
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

    def _segments(self, mode: Recompute) -> Iterator[tuple[str | None, Key, bool]]:
        """(owner, key, whether it is there all the time) of every storage that is kept under a mode."""
        space = self.space
        key = Holding, mode, self.units, id(space.graph)
        segments, holdings = self.executor.once(key, space.graph, lambda: self._holdings(mode))
        for held in holdings:
            segment = held.segment
            readers = tuple(sorted({space.classes[name] for name in held.wanted}))
            key_of_it = (space.classes[segment.maker], segment.position, segment.is_kept or readers)
            if key_of_it not in self.sizes:
                self.sizes[key_of_it] = kept_expressions(space, segments, segment)
            yield held.owner, key_of_it, held.is_there

    def _holdings(self, mode: Recompute) -> tuple[dict[str, Segment], list[Holding]]:
        """Every storage that is kept under a mode, whatever its layout."""
        space, segments = self.space, segments_of(self.space, self.executor)
        found = []
        if mode is not Recompute.NONE:
            for segment in segments.values():
                maker = space.deciders[segment.maker]
                if self._entered(maker) is not None or self._holds(segment.maker, mode):
                    segment.is_kept = True
        for segment in segments.values():
            wanted = [name for name in segment.exits if is_wanted(segments, name)]
            if not segment.is_kept and not wanted:
                continue
            maker = space.deciders[segment.maker]
            owner, is_there = self._entered(maker) or self._enters(segments, segment), True
            if owner is None:
                leaves = any(self._leaves(segments, name) for name in segment.exits)
                owner = None if leaves else self._around(maker)
                is_there = mode is Recompute.NONE or self._holds(segment.maker, mode)
            found.append(Holding(segment=segment, wanted=tuple(wanted), owner=owner, is_there=is_there))
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

    def _keeps(self, name: str, mode: Recompute) -> bool:
        """Whether what an op keeps for itself is there all the time."""
        return mode is Recompute.NONE or (isinstance(self.space.deciders[name], Op) and self._holds(name, mode))

    def _extras(self) -> Iterator[tuple[str | None, Key, str]]:
        """(owner, key, decision) of tensors that are neither operands nor results, and of copies of weights."""
        for name, members in self.space.members.items():
            terms = [*extra_terms(self.space, name, self.executor), *copies_read(self.space, name)]
            for i, term in enumerate(terms):
                key = ("extra", name, i)
                self.sizes[key] = term.expressions
                for member in members:
                    yield self._around(self.space.deciders[member]), key, member

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

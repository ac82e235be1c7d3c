"""Lifetimes of a plan's activations: which node makes each, which reads it last, which ops save it for backward.

An op that makes a new tensor starts a storage; so does a boundary whose conversion makes one. While a module's forward
runs, its caller holds its arguments, and the module holds the objects whose fields it was given; other values are freed
after their last read.

A recomputed module runs its forward once more in backward, as under torch.utils.checkpoint. It stops early: at the last
op that saves something, and before that op's kernels where it saves only its operands. A layer that ends in a product
and a sum with its residual repeats neither. What the mode keeps is not repeated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, enclosing
from tpplan.core.layout import Conversion, Layout
from tpplan.core.repeated_blocks import like_ops
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import Execution
from tpplan.costs.runs.kernels import WORK
from tpplan.costs.saved_tensors import call_exits, gives_sum, returned_until
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.readings import reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.plan import Recompute, WorkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of a recomputed module: its nodes, by position in the graph."""

    module: str
    mode: Recompute
    positions: range


def calls_of(graph: ModelGraph, modes: Mapping[str, Recompute]) -> Iterator[Run]:
    """Yields the calls of each module; one ends where nodes of others follow, or where its module is entered again. A
    module that does not run has none."""
    positions: dict[str, list[int]] = {module: [] for module in modes}
    for i, node in enumerate(graph.nodes):
        for module in enclosing(node.module):
            if module in positions:
                positions[module].append(i)
    for module, mode in modes.items():
        inside = positions[module]
        within_it = frozenset(inside)
        starts = [i for i in inside if i - 1 not in within_it or _is_new_call(graph, i, module)]
        for first, following in pairwise([*starts, len(graph.nodes)]):
            last = max(i for i in inside if i < following)
            yield Run(module=module, mode=mode, positions=range(first, last + 1))


def _is_new_call(graph: ModelGraph, position: int, module: str) -> bool:
    """True where the node at `position` enters the module and the node before leaves it."""
    ways = [
        node.direction if isinstance(node, Boundary) and node.module == module else None
        for node in graph.nodes[position - 1 : position + 1]
    ]
    return ways == [Direction.OUTPUT, Direction.INPUT]


@dataclass(slots=True, eq=False)
class Storage:
    """Memory of an activation on a rank in bytes; by position in the graph the node that makes it, the last that reads
    it, those that save it for their backward, and the boundaries that sum it; whether other nodes read it than those,
    and than views of it."""

    num_bytes: float
    maker: int
    last_reader: int
    keepers: set[int] = field(default_factory=set)
    summed_at: set[int] = field(default_factory=set)
    is_read: bool = False


class Lifetimes:
    """The storages of an assignment, and the calls of its recomputed modules."""

    def __init__(self, assignment: Assignment, executor: Executor) -> None:
        self.assignment = assignment
        self.graph = assignment.graph
        self.executor = executor
        self.nodes = self.graph.nodes
        self.runs = tuple(calls_of(self.graph, assignment.recomputed))
        self.run_at = {position: run for run in self.runs for position in run.positions}
        self.executions = dict(self._executions())
        self.made: dict[int, list[Storage]] = {i: [] for i in range(len(self.nodes))}
        self._conversions: dict[int, Conversion] = {}
        #: positions at which a storage enters a module
        self.entered: dict[Storage, list[int]] = {}
        self._exits, self._returned = call_exits(self.graph), returned_until(self.graph)
        self._make_storages()

    def strategy(self, decision: str) -> Strategy:
        """The strategy of a decision."""
        return self.assignment.strategy(decision)

    def conversion(self, boundary: Boundary) -> Conversion:
        """The conversion of a value at a boundary."""
        key = id(self.assignment.strategies[boundary.name])  # the assignment holds it
        if key not in self._conversions:
            self._conversions[key] = self.assignment.conversion(boundary)
        return self._conversions[key]

    def is_held(self, position: int) -> bool:
        """True where the node is in a module that is recomputed, in a mode that keeps the node's results."""
        run, node = self.run_at.get(position), self.nodes[position]
        if run is None:
            return False
        if isinstance(node, Boundary):
            return WorkKind.SUM in run.mode.keeps and gives_sum(self.conversion(node))
        return any(WORK[type(kernel)] in run.mode.keeps for kernel in self.executions[position].forward)

    def uses(self, storage: Storage) -> set[int]:
        """Positions whose backward reads the storage as it was kept from forward."""
        own = self.run_at.get(storage.maker)
        found = {i for i in storage.keepers if (run := self.run_at.get(i)) is None or run is not own}
        for i in self.entered.get(storage, ()):
            run = self.run_at.get(i)
            if run is not None and self.nodes[i].module == run.module:  # FSDP's cast of it is in the run already
                found.add(i)
        if self.is_held(storage.maker) and not self.is_let_go(storage):
            found.add(storage.maker)
        return found

    def is_let_go(self, storage: Storage) -> bool:
        """True for a product whose mode keeps it, but lets it go as nothing reads it but sums that it keeps too."""
        run, node = self.run_at.get(storage.maker), self.nodes[storage.maker]
        if run is None or isinstance(node, Boundary) or not run.mode.keeps >= {WorkKind.PRODUCT, WorkKind.SUM}:
            return False
        if storage.is_read or not storage.summed_at or any(self.run_at.get(i) is not run for i in storage.summed_at):
            return False
        return any(WORK[type(kernel)] is WorkKind.PRODUCT for kernel in self.executions[storage.maker].forward)

    def stop(self, run: Run) -> int:
        """The last position that runs again in backward: that of the last op that saves anything; -1 for none."""
        return max((i for i in run.positions if i in self.executions and _keeps(self.executions[i])), default=-1)

    def run_again(self) -> Iterator[tuple[Run, tuple[str, ...]]]:
        """Yields each call of a recomputed module with the decisions whose forward runs again in backward."""
        readings: dict[str, list[str]] = {}
        for own in self.assignment.readings.values():
            for reading in own:
                readings.setdefault(reading.op.name, []).append(reading.name)
        for run in self.runs:
            yield run, tuple(self._run_again(run, readings))

    def _run_again(self, run: Run, readings: Mapping[str, list[str]]) -> Iterator[str]:
        """The decisions of a call whose forward runs again, readings of weights included."""
        stop = self.stop(run)
        for i in range(run.positions.start, stop + 1):
            name = self.nodes[i].name
            yield from readings.get(name, ())  # code reads a weight again though the product of it is kept
            if self.is_held(i):
                continue
            if i < stop or self.executions[i].saves_results or self.executions[i].saved_bytes:
                yield name

    def _make_storages(self) -> None:
        storage_of: dict[str, Storage | None] = {source.result: None for source in self.graph.sources}
        for position, node in enumerate(self.nodes):
            until = self._exits.get(position, position)
            for name in node.operands:
                if (storage := storage_of[name]) is not None:
                    storage.last_reader = max(storage.last_reader, until)
            if isinstance(node, Boundary):
                self._cross(position, node, storage_of, until)
            else:
                self._run(position, node, storage_of)
        self._make_copies_of_weights()

    def _cross(self, position: int, node: Boundary, storage_of: dict[str, Storage | None], until: int) -> None:
        storage = storage_of[node.operand]
        if storage is not None and node.direction is Direction.INPUT:
            self.entered.setdefault(storage, []).append(position)
        if (conversion := self.conversion(node)).forward:
            if storage is not None and gives_sum(conversion):
                storage.summed_at.add(position)
            elif storage is not None:
                storage.is_read = True
            storage = self._new(position, node.result, self.strategy(node.name).results[0])
            storage.last_reader = until
        if storage is not None and position in self._returned:
            storage.last_reader = max(storage.last_reader, self._returned[position])
        storage_of[node.result] = storage

    def _run(self, position: int, op: Op, storage_of: dict[str, Storage | None]) -> None:
        execution = self.executions[position]
        for i, result in enumerate(op.results):
            viewed = self._viewed(op, result)
            storage_of[result] = (
                self._new(position, result, self.strategy(op.name).results[i]) if viewed is None else storage_of[viewed]
            )
        views = {storage_of[result] for result in op.results}
        for name in op.operands:
            if (storage := storage_of[name]) is not None and storage not in views:
                storage.is_read = True
        kept = [op.operands[i] for i in execution.saves] + [op.results[i] for i in execution.saves_results]
        for name in kept:
            if (storage := storage_of[name]) is not None:
                storage.keepers.add(position)
        if execution.saved_bytes:
            self._add(position, float(execution.saved_bytes)).keepers.add(position)

    def _make_copies_of_weights(self) -> None:
        """Adds the copy of each weight that is read in another layout than it rests in; the op saves the copy."""
        position_of = {node.name: position for position, node in enumerate(self.nodes)}
        for readings in self.assignment.readings.values():
            for reading in readings:
                strategy = self.strategy(reading.name)
                if reading_conversion(strategy).forward and strategy.results[0].dim is not None:
                    position = position_of[reading.op.name]
                    self._new(position, reading.source.result, strategy.results[0]).keepers.add(position)

    def _new(self, position: int, value: str, layout: Layout) -> Storage:
        return self._add(position, self.graph.values[value].num_bytes / layout.num_slices(self.assignment.tp))

    def _add(self, position: int, num_bytes: float) -> Storage:
        storage = Storage(num_bytes, position, position)
        self.made[position].append(storage)
        return storage

    def _viewed(self, op: Op, result: str) -> str | None:
        """The operand that a result is a view of; None for a new tensor."""
        values = self.graph.values
        return next((name for name in op.operands if values[name].storage == values[result].storage), None)

    def _executions(self) -> Iterator[tuple[int, Execution]]:
        """Yields the position and the execution of each op, asked once for like ops with one strategy."""
        like, known = like_ops(self.graph), dict[tuple[str, int], Execution]()
        for position, node in enumerate(self.nodes):
            if isinstance(node, Op):
                strategy = self.strategy(node.name)
                key = like[node.name], id(strategy)  # the assignment holds it
                if key not in known:
                    known[key] = self.executor.execute(Call.of(self.graph, node), strategy, self.assignment.tp)
                yield position, known[key]


def _keeps(execution: Execution) -> bool:
    return bool(execution.saves or execution.saves_results or execution.saved_bytes)

"""What recomputation costs and what it saves, in a plan whose modules to recompute are known.

A module that is recomputed runs its forward once more in backward, as torch.utils.checkpoint does it:

- It stops early: at the last op that keeps something for its backward, and before that op's kernels where all it keeps
  are its operands. A layer that ends in a product and a sum with its residual repeats neither.
- Between forward and backward there are its inputs, and of what it makes that which others keep. Selective
  recomputation also holds the results of products, attention and sums over ranks, and does not repeat them.
- While its backward runs there is also all that its own ops keep, made anew. Backward goes from the end to the start,
  so what only later ops keep is gone by then: the peak is the larger of the one before backward starts and the largest
  of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpplan.costs.compute import Attention, Execution, Matmul
from tpplan.costs.memory import LARGEST_OP
from tpplan.costs.table import Transfer
from tpplan.formulate import Formulation
from tpplan.graph import Boundary, Direction, ModelGraph, Op, within
from tpplan.layout import Conversion, Layout, Step
from tpplan.plan import Pass, Recompute
from tpplan.profile import Estimate
from tpplan.rules import Call, Strategy
from tpplan.space import reading_conversion

#: sums over ranks, and what moves as much; tpplan.recompute.KEPT says the same to torch
_HELD_STEPS = frozenset({Step.ALL_REDUCE, Step.REDUCE_SCATTER, Step.ALL_TO_ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What recomputation changes, per micro-batch on one rank.

    `compute` and `collectives` are what of the forward runs again, `kernels` their number; `transfers` are those
    collectives, each with its module. Of what autograd keeps otherwise `freed_bytes` are not kept. `remade_bytes` is
    what the peak has on top of saved activations and the largest op, because modules make again what they had not kept.
    """

    compute: Estimate
    collectives: Estimate
    kernels: float
    transfers: tuple[tuple[str, Transfer], ...]
    freed_bytes: float
    remade_bytes: float


def rerun(formulation: Formulation, modes: Mapping[str, Recompute]) -> Rerun:
    """The effect of recomputing these modules, where every decision has one strategy left."""
    walk = _Walk(formulation, tuple(_runs(formulation.space.graph, modes)))
    names = [name for run in walk.runs for name in walk.repeated(run)]
    times = [formulation.table[name][0] for name in names]
    deciders = formulation.space.deciders
    return Rerun(
        compute=sum((time.forward for time in times), Estimate.zero()),
        collectives=sum((time.forward_collectives for time in times), Estimate.zero()),
        kernels=sum(time.forward_kernels for time in times),
        transfers=tuple(
            (decider.module, transfer)
            for name, time in zip(names, times, strict=True)
            if isinstance(decider := deciders[name], Op | Boundary)
            for transfer in time.transfers
            if transfer.during is Pass.FORWARD
        ),
        freed_bytes=walk.freed_bytes(),
        remade_bytes=walk.remade_bytes(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One call of a module that is recomputed: its nodes, by position in the graph."""

    module: str
    mode: Recompute
    positions: range


def _runs(graph: ModelGraph, modes: Mapping[str, Recompute]) -> Iterator[_Run]:
    """The calls of each module. A call ends where other nodes come, or where its module is entered anew."""
    for module, mode in modes.items():
        inside = [i for i, node in enumerate(graph.nodes) if within(node.module, module)]
        starts = [i for i in inside if i - 1 not in set(inside) or _is_new_call(graph, i, module)]
        for first, following in zip(starts, [*starts[1:], len(graph.nodes)], strict=True):
            last = max(i for i in inside if i < following)
            yield _Run(module=module, mode=mode, positions=range(first, last + 1))


def _is_new_call(graph: ModelGraph, position: int, module: str) -> bool:
    """The node before leaves the module, and this one enters it."""
    ways = [
        node.direction if isinstance(node, Boundary) and node.module == module else None
        for node in graph.nodes[position - 1 : position + 1]
    ]
    return ways == [Direction.OUTPUT, Direction.INPUT]


@dataclass(slots=True)
class _Storage:
    """Memory of an activation: a rank's bytes, the position of the node that makes it, and of those that keep it."""

    num_bytes: float
    maker: int
    keepers: set[int] = field(default_factory=set)


class _Walk:
    """The graph's nodes in order, with the storages they make, and the runs among them."""

    def __init__(self, formulation: Formulation, runs: Sequence[_Run]) -> None:
        self.formulation = formulation
        self.space = formulation.space
        self.nodes = self.space.graph.nodes
        self.runs = runs
        self.run_at = {position: run for run in runs for position in run.positions}
        self.executions = {i: self._execution(node) for i, node in enumerate(self.nodes) if isinstance(node, Op)}
        self.storages: list[_Storage] = []
        self.entering: dict[int, _Storage] = {}
        self._make_storages()

    # What runs again

    def repeated(self, run: _Run) -> Iterator[str]:
        """The decisions whose forward runs again, those of the weights that are read among them."""
        stop = max((i for i in run.positions if i in self.executions and _keeps(self.executions[i])), default=-1)
        readings = self._readings_by_op()
        for i in range(run.positions.start, stop + 1):
            if self._is_held(i):
                continue
            name = self.nodes[i].name
            yield from readings.get(name, ())
            if i < stop or self.executions[i].saves_results or self.executions[i].saved_bytes:
                yield name

    def _readings_by_op(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for readings in self.space.readings.values():
            for reading in readings:
                found.setdefault(reading.op.name, []).append(reading.name)
        return found

    def _is_held(self, position: int) -> bool:
        """True where selective recomputation keeps the node's results."""
        run, node = self.run_at.get(position), self.nodes[position]
        if run is None or run.mode is not Recompute.SELECTIVE:
            return False
        if isinstance(node, Boundary):
            return not _HELD_STEPS.isdisjoint(self._steps(node))
        return any(isinstance(kernel, Matmul | Attention) for kernel in self.executions[position].forward)

    # What is kept

    def freed_bytes(self) -> float:
        """What autograd keeps without recomputation and not with it; negative where little is freed and much held."""
        kept = sum(storage.num_bytes for storage in self.storages if self._uses(storage))
        return sum(storage.num_bytes for storage in self.storages if storage.keepers) - kept

    def remade_bytes(self) -> float:
        """By how much the largest peak while a module's backward runs exceeds the one before backward starts."""
        kept = [(storage, min(uses)) for storage in self.storages if (uses := self._uses(storage))]
        largest = self._largest_ops()
        before = sum(storage.num_bytes for storage, _ in kept) + max(largest.values(), default=0.0)
        peaks = [
            sum(storage.num_bytes for storage, use in kept if use < run.positions.stop)
            + sum(storage.num_bytes for storage in self.storages if self._is_remade(storage, run))
            + max(largest.get(self.nodes[i].name, 0.0) for i in run.positions)
            for run in self.runs
        ]
        return max([0.0, *(peak - before for peak in peaks)])

    def _uses(self, storage: _Storage) -> set[int]:
        """Positions at which what was kept of it from the forward on is needed in backward."""
        own = self.run_at.get(storage.maker)
        uses = {i for i in storage.keepers if (run := self.run_at.get(i)) is None or run is not own}
        entered = (i for i, other in self.entering.items() if other is storage)
        uses.update(i for i in entered if (run := self.run_at.get(i)) and self.nodes[i].module == run.module)
        if self._is_held(storage.maker):
            uses.add(storage.maker)
        return uses

    def _is_remade(self, storage: _Storage, run: _Run) -> bool:
        is_own = storage.maker in run.positions and not self._is_held(storage.maker)
        return is_own and any(i in run.positions for i in storage.keepers)

    def _largest_ops(self) -> dict[str, float]:
        """Bytes of each op's gradients while it runs backward."""
        everything = dict.fromkeys(self.space.deciders, 0)
        return {
            expression.terms[0][0]: expression.value(everything)
            for term in self.formulation.priced.activations
            if term.name == LARGEST_OP
            for expression in term.expressions
            if expression.terms
        }

    def _make_storages(self) -> None:
        """A storage starts at an op that makes a new tensor, or at a boundary whose conversion does."""
        storage_of: dict[str, _Storage] = {}
        for position, node in enumerate(self.nodes):
            if isinstance(node, Boundary):
                storage = storage_of.get(node.operand)
                if storage is not None and node.direction is Direction.INPUT:
                    self.entering[position] = storage
                if self._steps(node):
                    storage = self._new(position, node.result, self._strategy(node.name).results[0])
                if storage is not None:
                    storage_of[node.result] = storage
                continue
            execution = self.executions[position]
            for i, result in enumerate(node.results):
                storage_of[result] = self._viewed(node, result, storage_of) or self._new(
                    position, result, self._strategy(node.name).results[i]
                )
            kept = [node.operands[i] for i in execution.saves] + [node.results[i] for i in execution.saves_results]
            for name in kept:
                if name in storage_of:
                    storage_of[name].keepers.add(position)
            if execution.saved_bytes:
                self.storages.append(_Storage(float(execution.saved_bytes), position, {position}))
        self._make_copies_of_weights()

    def _make_copies_of_weights(self) -> None:
        """A weight that is read otherwise than it rests is a copy, which the op keeps."""
        position_of = {node.name: position for position, node in enumerate(self.nodes)}
        for readings in self.space.readings.values():
            for reading in readings:
                strategy = self._strategy(reading.name)
                if reading_conversion(strategy).forward and strategy.results[0].dim is not None:
                    position = position_of[reading.op.name]
                    self._new(position, reading.parameter.result, strategy.results[0]).keepers.add(position)

    def _new(self, position: int, value: str, layout: Layout) -> _Storage:
        num_bytes = self.space.graph.values[value].num_bytes / layout.num_slices(self.space.tp)
        self.storages.append(_Storage(num_bytes, position))
        return self.storages[-1]

    def _viewed(self, op: Op, result: str, storage_of: Mapping[str, _Storage]) -> _Storage | None:
        """The storage of the operand that a result is a view of."""
        values = self.space.graph.values
        for operand in op.operands:
            if operand in storage_of and values[operand].storage == values[result].storage:
                return storage_of[operand]
        return None

    def _steps(self, boundary: Boundary) -> tuple[Step, ...]:
        strategy = self._strategy(boundary.name)
        return Conversion(strategy.operands[0], strategy.results[0]).forward

    def _strategy(self, decision: str) -> Strategy:
        return self.space.strategies[decision][0]

    def _execution(self, op: Op) -> Execution:
        executor = self.formulation.priced.executor
        return executor.execute(Call.of(self.space.graph, op), self._strategy(op.name), self.space.tp)


def _keeps(execution: Execution) -> bool:
    return bool(execution.saves or execution.saves_results or execution.saved_bytes)

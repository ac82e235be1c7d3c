"""Finds the moments of a region of nodes at which memory may peak, as expressions over the decisions.

A region is a layer, or the nodes around the layers. A moment is the forward or the backward of one of its nodes. An
expression has the bytes at that moment besides all that autograd keeps of the region:

    forward of i    tensors that autograd does not keep and a later node reads or code holds; temporaries of i;
                    less the tensors that nodes after i will make and keep
    backward of i   gradients of i's results and operands; temporaries of i; gradients of values that wait for their
                    producer's backward; gradients of parameters that later nodes read;
                    less the tensors that were kept only for nodes after i

Each is at least the bytes that tpplan.costs.prediction.memory_replay finds at that moment: where the replay knows which
tensors a conversion makes, the expression has the most that it may make. A moment that another one exceeds in every
assignment is left out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.layout import Conversion
from tpplan.costs.conversion_memory import backward_move, forward_move
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import local_bytes
from tpplan.costs.saved_tensors import SavedStorage, held_bytes, operands_saved_too, own_bytes
from tpplan.layouts.decision_space import Space
from tpplan.layouts.readings import reading_conversion, reading_name
from tpplan.layouts.rules import Call, Strategy
from tpplan.solvers.problem import Expression
from tpplan.solvers.undominated import undominated

#: in regions of more nodes (a model without layers) all kept storages count at every moment, an upper bound
MANY_NODES = 400

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStorage:
    """A storage that autograd keeps."""

    #: bytes of the storage that every sum of the kept bytes contains
    num_bytes: Expression
    #: position of the node that makes the storage
    maker: int
    #: position of the node after whose backward the storage is freed
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a region besides those that autograd keeps of it; they may be negative."""

    #: bytes at each moment that may have the most; the largest counts
    moments: tuple[Expression, ...]
    #: bytes when the region's backward has ended
    after: Expression


class _Sum:
    """A sum that is made into an Expression: a constant, and by decision a vector with a number per strategy."""

    def __init__(self) -> None:
        self.constant = 0.0
        self.vectors: dict[str, Vector] = {}

    def add(self, name: str, vector: Vector) -> None:
        known = self.vectors.get(name)
        self.vectors[name] = vector if known is None else tuple(map(add, known, vector))

    def subtract(self, expression: Expression) -> None:
        self.constant -= expression.constant
        for name, vector in expression.terms:
            self.add(name, tuple(-entry for entry in vector))

    def expression(self) -> Expression:
        rows = ((name, vector) for name, vector in self.vectors.items() if any(vector))
        return Expression(constant=self.constant, terms=tuple(sorted(rows)))


def positions_in(graph: ModelGraph) -> Mapping[str, int]:
    """Returns the position of each node of a graph by its name."""
    return graph.once_for_all_sizes(positions_in, lambda: {node.name: i for i, node in enumerate(graph.nodes)})


def _behind_the_loss(graph: ModelGraph) -> frozenset[str]:
    """Names of the nodes whose backward runs: the loss follows from a result of theirs. All nodes of a graph without
    loss."""
    if graph.loss is None:
        return frozenset(node.name for node in graph.nodes)
    found, reached = set(), {graph.loss}
    for node in reversed(graph.nodes):
        if not reached.isdisjoint(node.results):
            found.add(node.name)
            reached |= {operand for operand in node.operands if graph.values[operand].carries_gradient}
    return frozenset(found)


class PeakCandidates:
    """Finds the moments of regions of one decision space."""

    def __init__(self, space: Space, executor: Executor, segments: Mapping[str, SavedStorage]) -> None:
        self.space = space
        self.executor = executor
        self.segments = segments
        self.nodes = space.graph.nodes
        self.num_nodes = len(self.nodes)
        self.position = positions_in(space.graph)
        self.parameters = {source.result: source for source in space.graph.parameters}
        self._gives_gradients = space.graph.once_for_all_sizes(_behind_the_loss, lambda: _behind_the_loss(space.graph))
        self._waits = space.graph.once_for_all_sizes(PeakCandidates, lambda: tuple(self._gradients_that_wait()))
        self._vectors: dict[object, Vector] = {}

    def region(
        self, positions: Sequence[int], kept: Sequence[KeptStorage], parameters: Collection[str], *, is_repeated: bool
    ) -> Region:
        """Returns the moments of the nodes at `positions` (ascending), whose kept storages are `kept`.

        Gradients of `parameters` (labels) count from the backward that makes them. `is_repeated` says that the nodes
        may run again in backward, when all gradients behind the region are there.
        """
        read = list(self._last_reads(parameters))
        waits = [wait for wait in self._waits if wait[0] <= positions[-1] and wait[1] >= positions[0]]
        temporary, returned = self._temporary(positions), self._returned(positions)
        if len(positions) > MANY_NODES:
            kept = ()
        found = []
        for i in positions:
            forward = self._forward_sum(i, temporary, returned)
            for entry in kept:
                if entry.maker > i:
                    forward.subtract(entry.num_bytes)
            if is_repeated:
                self._add_gradients(forward, positions[-1] + 0.5, waits, read)
            backward = self._backward_sum(i)
            self._add_gradients(backward, i, waits, read)
            for entry in kept:
                if entry.until > i:
                    backward.subtract(entry.num_bytes)
            found += [forward.expression(), backward.expression()]
        after = _Sum()
        self._add_gradients(after, positions[0] - 0.5, waits, read)
        for entry in kept:
            after.subtract(entry.num_bytes)
        return Region(moments=undominated(found), after=after.expression())

    # Forward

    def _temporary(self, positions: Sequence[int]) -> list[tuple[int, int, str, Vector]]:
        """Returns the storages that live only while nodes read them and are not fully among the kept ones.

        Each is (position of the maker, position of the last reader, deciding class, a rank's bytes).
        """
        first, last = positions[0], positions[-1]
        return [
            (
                self.position[segment.maker],
                segment.last_reader,
                self.space.classes[segment.maker],
                own_bytes(self.space, segment),
            )
            for segment in self.segments.values()
            if not segment.is_kept
            and (not segment.is_wanted or isinstance(self.space.deciders[segment.maker], Op))
            and self.position[segment.maker] <= last
            and segment.last_reader >= first
        ]

    def _returned(self, positions: Sequence[int]) -> list[tuple[SavedStorage, str, Vector]]:
        """Returns results of modules that code holds after their last use, each with its deciding class and bytes."""
        first, last = positions[0], positions[-1]
        return [
            (segment, *held_bytes(self.space, self.segments, segment))
            for segment in self.segments.values()
            if segment.held_until > segment.last_reader
            and not segment.is_kept
            and segment.last_reader < last
            and segment.held_until >= first
        ]

    def _forward_sum(
        self,
        i: int,
        temporary: Iterable[tuple[int, int, str, Vector]],
        returned: Iterable[tuple[SavedStorage, str, Vector]],
    ) -> _Sum:
        found = _Sum()
        for segment, name, vector in returned:
            if segment.last_reader < i <= segment.held_until:
                found.add(name, vector)
        for maker, last, name, num_bytes in temporary:
            if maker <= i <= last:
                found.add(name, num_bytes)
        found.add(self.space.classes[self.nodes[i].name], self._vector("forward", self.nodes[i]))
        return found

    # Backward

    def _backward_sum(self, i: int) -> _Sum:
        node, found = self.nodes[i], _Sum()
        found.add(self.space.classes[node.name], self._vector("backward", node))
        for index, operand in enumerate(node.operands):
            if operand in self.parameters:
                if isinstance(node, Op) and self.parameters[operand].trainable:
                    self._add_reading(found, node, index)
            elif self._is_summed(operand, i):
                found.add(*self._bytes_of(operand))
        return found

    def _is_summed(self, value: str, i: int) -> bool:
        """True where gradients from nodes behind i exist when i's arrives: the sum may be a new tensor."""
        is_computed = value in self.space.layouts and self.space.graph.values[value].carries_gradient
        return is_computed and max(self._readers(value), default=i) > i

    def _add_reading(self, found: _Sum, op: Op, index: int) -> None:
        """Adds the bytes of converting a parameter's gradient, of operand `index` of `op`, to its layout at rest."""
        name = reading_name(op, index)
        source = self.parameters[op.operands[index]]
        value = self.space.graph.values[source.result]
        again = 2 * (len(self.space.readings[source.label]) > 1)

        def held(strategy: Strategy) -> float:
            move = backward_move(reading_conversion(strategy), value.shape, value.dtype, self.space.tp)
            return float(move.held_bytes + again * local_bytes(value, strategy.operands[0], self.space.tp))

        representative = self.space.classes[name]
        found.add(representative, tuple(map(held, self.space.strategies[representative])))

    def _add_gradients(
        self,
        found: _Sum,
        i: float,
        waits: Iterable[tuple[int, int, str]],
        read: Iterable[tuple[int, str, Vector]],
    ) -> None:
        """Adds the gradients that exist, besides those of i's results, after the backward of all nodes behind i."""
        for maker, last, value in waits:
            if maker < i < last:
                found.add(*self._bytes_of(value))
        for last, name, vector in read:
            if last > i:
                found.add(name, vector)

    def _gradients_that_wait(self) -> Iterator[tuple[int, int, str]]:
        """Yields (position of the producer, position of the last reader that gives it a gradient, value)."""
        for name, (maker, _) in self.space.layouts.items():
            if self.space.graph.values[name].carries_gradient and (readers := self._readers(name)):
                yield self.position[maker], max(readers), name

    def _last_reads(self, parameters: Collection[str]) -> Iterator[tuple[int, str, Vector]]:
        """Yields (position of the last reader, deciding class, gradient's bytes on a rank) of trained parameters."""
        for label, readings in self.space.readings.items():
            if label in parameters and readings and readings[0].source.trainable:
                value = self.space.graph.values[readings[0].source.result]
                name = self.space.classes[readings[0].name]
                vector = tuple(
                    float(local_bytes(value, s.operands[0], self.space.tp)) for s in self.space.strategies[name]
                )
                yield max(self.position[reading.op.name] for reading in readings), name, vector

    def _readers(self, value: str) -> list[int]:
        """Positions of the nodes that give a value gradients: nodes that only lead to other outputs than the loss have
        no backward."""
        readers = self.space.graph.consumers.get(value, ())
        return [self.position[reader.name] for reader in readers if reader.name in self._gives_gradients]

    # Vectors, once for a class

    def _bytes_of(self, value: str) -> tuple[str, Vector]:
        """Returns the class that decides the layout of a computed value, and by its strategies a rank's bytes."""
        maker, result = self.space.layouts[value]
        name = self.space.classes[maker]
        if (name, result) not in self._vectors:
            whole = self.space.graph.values[value]
            self._vectors[name, result] = tuple(
                float(local_bytes(whole, s.results[result], self.space.tp)) for s in self.space.strategies[name]
            )
        return name, self._vectors[name, result]

    def _vector(self, kind: str, node: Op | Boundary) -> Vector:
        name = self.space.classes[node.name]
        if (name, kind) not in self._vectors:
            forward, backward = self._op_vectors(node) if isinstance(node, Op) else self._boundary_vectors(node)
            self._vectors[name, "forward"], self._vectors[name, "backward"] = forward, backward
        return self._vectors[name, kind]

    def _op_vectors(self, op: Op) -> tuple[Vector, Vector]:
        """Returns an op's bytes in forward and in backward, by strategy.

        Forward: temporaries besides the results, less the operands that count among the kept tensors too. Backward: the
        most that it holds, or if more, the gradients of its results and operands.
        """
        call, tp = Call.of(self.space.graph, op), self.space.tp
        forward, backward = [], []
        for strategy in self.space.strategies[self.space.classes[op.name]]:
            execution = self.executor.execute(call, strategy, tp)
            given = sum(
                local_bytes(value, layout, tp)
                for value, layout in zip(call.results, strategy.results, strict=True)
                if value.carries_gradient
            )
            new = sum(g.num_bytes for g in execution.gradients if g is not None and not g.is_view)
            is_twice = operands_saved_too(call, strategy, tp, self.executor)  # made before, and kept from here on
            forward.append(float(execution.forward_bytes) - is_twice)
            backward.append(float(max(execution.backward_bytes, given + new)))
        return tuple(forward), tuple(backward)

    def _boundary_vectors(self, boundary: Boundary) -> tuple[Vector, Vector]:
        value, tp = self.space.graph.values[boundary.operand], self.space.tp
        forward, backward = [], []
        for strategy in self.space.strategies[self.space.classes[boundary.name]]:
            conversion = Conversion(strategy.operands[0], strategy.results[0])
            there = forward_move(conversion, value.shape, value.dtype, tp)
            back = backward_move(conversion, value.shape, value.dtype, tp)
            arrived = local_bytes(value, strategy.results[0], tp)
            forward.append(float(there.held_bytes - there.result_bytes))
            backward.append(float((arrived + back.held_bytes) * value.carries_gradient))
        return tuple(forward), tuple(backward)

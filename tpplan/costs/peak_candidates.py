"""What a stretch of nodes holds at each of its moments, as expressions over the decisions: the candidates for the peak.

A moment is a node's forward or its backward. Beside all that autograd keeps of the stretch there is then

    forward of i    what nobody keeps and a later node still reads or code holds, what i makes for a while;
                    less what nodes after i will keep
    backward of i   gradients of i's results and operands and what i makes for a while, of values that wait for their
                    producers, of parameters that later nodes read;
                    less what was kept for later nodes alone

Each is at least what tpplan.costs.step.memory_replay finds there: where the replay knows what a conversion makes anew,
this takes the most that it may be. A moment that another one exceeds whatever is chosen is left out.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub

from tpplan.core.graph import Boundary, Op
from tpplan.core.layout import Conversion
from tpplan.costs.conversion_memory import backward_move, forward_move
from tpplan.costs.execute import Executor
from tpplan.costs.saved_tensors import Segment, held_bytes, local_bytes, own_bytes
from tpplan.layouts.decision_space import Space, reading_conversion, reading_name
from tpplan.layouts.rules import Call, Strategy
from tpplan.solvers.problem import Expression

#: moments that may exceed a given one, which are looked at
RIVALS = 12
#: stretches of more nodes (a model without layers) are taken as if nothing went before the end of their backward
MANY_NODES = 400

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A storage that autograd keeps: bytes of it that are in any sum of what is kept, the position that makes it, and
    that whose backward it is kept for in the end."""

    num_bytes: Expression
    maker: int
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bytes beside what is kept of some nodes: at each moment that may have the most, and when their backward is over.

    The largest of `moments` counts; they may be negative.
    """

    moments: tuple[Expression, ...]
    after: Expression


class _Sum:
    """An expression in the making."""

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


class Moments:
    """Those of one decision space."""

    def __init__(self, space: Space, executor: Executor, segments: dict[str, Segment]) -> None:
        self.space = space
        self.executor = executor
        self.segments = segments
        self.nodes = space.graph.nodes
        self.num_nodes = len(self.nodes)
        self.position = {node.name: i for i, node in enumerate(self.nodes)}
        self.parameters = {source.result: source for source in space.graph.parameters}
        self._waits = tuple(self._gradients_that_wait())
        self._vectors: dict[object, Vector] = {}

    def stretch(
        self, positions: Sequence[int], kept: Sequence[Kept], parameters: Collection[str], *, is_repeated: bool
    ) -> Stretch:
        """Of nodes by position, ascending, and what is kept of them. Gradients of `parameters` count when they are
        there; `is_repeated` where the nodes may run again in backward."""
        read = list(self._last_reads(parameters))
        waits = [wait for wait in self._waits if wait[0] <= positions[-1] and wait[1] >= positions[0]]
        temporary, returned = self._temporary(positions), self._returned(positions)
        if len(positions) > MANY_NODES:
            kept = ()
        found = []
        for i in positions:
            forward = self._while_running(i, temporary, returned)
            for entry in kept:
                if entry.maker > i:
                    forward.subtract(entry.num_bytes)
            if is_repeated:
                self._add_gradients(forward, positions[-1] + 0.5, waits, read)
            backward = self._while_going_back(i)
            self._add_gradients(backward, i, waits, read)
            for entry in kept:
                if entry.until > i:
                    backward.subtract(entry.num_bytes)
            found += [forward.expression(), backward.expression()]
        after = _Sum()
        self._add_gradients(after, positions[0] - 0.5, waits, read)
        for entry in kept:
            after.subtract(entry.num_bytes)
        return Stretch(moments=undominated(found), after=after.expression())

    # Forward

    def _temporary(self, positions: Sequence[int]) -> list[tuple[int, int, str, Vector]]:
        """(maker, last reader, who decides, a rank's bytes) of storages that are there while something reads them, and
        that no sum of what is kept has in full."""
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

    def _returned(self, positions: Sequence[int]) -> list[tuple[Segment, str, Vector]]:
        """What modules returned, and is held after it has been read: who decides it, and its bytes."""
        first, last = positions[0], positions[-1]
        return [
            (segment, *held_bytes(self.space, self.segments, segment))
            for segment in self.segments.values()
            if segment.held_until > segment.last_reader
            and not segment.is_kept
            and segment.last_reader < last
            and segment.held_until >= first
        ]

    def _while_running(
        self,
        i: int,
        temporary: Iterable[tuple[int, int, str, Vector]],
        returned: Iterable[tuple[Segment, str, Vector]],
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

    def _while_going_back(self, i: int) -> _Sum:
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
        """Others' gradients of it are there when i's comes: the sum may be a new tensor."""
        is_computed = value in self.space.layouts and self.space.graph.values[value].carries_gradient
        return is_computed and max(self._readers(value)) > i

    def _add_reading(self, found: _Sum, op: Op, index: int) -> None:
        """A parameter's gradient on its way to what it is at rest."""
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
        """Gradients that are there, beside those of results at i, when all after i have gone back."""
        for maker, last, value in waits:
            if maker < i < last:
                found.add(*self._bytes_of(value))
        for last, name, vector in read:
            if last > i:
                found.add(name, vector)

    def _gradients_that_wait(self) -> Iterator[tuple[int, int, str]]:
        """(producer, last reader, value) by position."""
        for name, (maker, _) in self.space.layouts.items():
            if self.space.graph.values[name].carries_gradient and (readers := self._readers(name)):
                yield self.position[maker], max(readers), name

    def _last_reads(self, parameters: Collection[str]) -> Iterator[tuple[int, str, Vector]]:
        """(position of its last reader, who decides how it rests, a rank's bytes of its gradient) of parameters."""
        for label, readings in self.space.readings.items():
            if label in parameters and readings and readings[0].parameter.trainable:
                value = self.space.graph.values[readings[0].parameter.result]
                name = self.space.classes[readings[0].name]
                vector = tuple(
                    float(local_bytes(value, s.operands[0], self.space.tp)) for s in self.space.strategies[name]
                )
                yield max(self.position[reading.op.name] for reading in readings), name, vector

    def _readers(self, value: str) -> list[int]:
        return [self.position[reader.name] for reader in self.space.graph.consumers.get(value, ())]

    # Vectors, once for a class

    def _bytes_of(self, value: str) -> tuple[str, Vector]:
        """Who decides the layout of a computed value, and a rank's bytes of it."""
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
            forward, backward = self._of_op(node) if isinstance(node, Op) else self._of_boundary(node)
            self._vectors[name, "forward"], self._vectors[name, "backward"] = forward, backward
        return self._vectors[name, kind]

    def _of_op(self, op: Op) -> tuple[Vector, Vector]:
        """Forward: what it makes besides what it leaves. Backward: gradients of results with the most that it holds
        beside them, or with those of its operands."""
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
            forward.append(float(execution.forward_bytes))
            backward.append(float(max(execution.backward_bytes, given + new)))
        return tuple(forward), tuple(backward)

    def _of_boundary(self, boundary: Boundary) -> tuple[Vector, Vector]:
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


def undominated(expressions: Iterable[Expression], known: Sequence[Expression] = ()) -> tuple[Expression, ...]:
    """Those of which the largest is the largest of all, whatever is chosen. `known` are some of them as this gave them,
    which need not be held against each other again."""
    numbers = {id(expression): number for number, expression in enumerate(known)}
    found: list[Expression] = []
    rivals: list[tuple[_Rival, bool]] = []
    for expression in sorted(dict.fromkeys(expressions), key=_most, reverse=True):
        is_known = id(expression) in numbers
        if any(not (is_known and was_held) and rival.exceeds(expression) for rival, was_held in rivals):
            continue
        found.append(expression)
        if len(rivals) < RIVALS:
            rivals.append((_Rival(expression), numbers.get(id(expression), RIVALS) < RIVALS))
    return tuple(found)


def _most(expression: Expression) -> tuple[float, float]:
    middle = sum(sum(vector) / len(vector) for _, vector in expression.terms)
    return expression.constant + sum(max(vector) for _, vector in expression.terms), middle


class _Rival:
    """An expression that many are held against, with the least that each of its nodes gives."""

    def __init__(self, expression: Expression) -> None:
        self.constant = expression.constant
        self.rows = {name: (vector, min(vector)) for name, vector in expression.terms}

    def exceeds(self, smaller: Expression) -> bool:
        """Whether this is at least the other, node by node."""
        lead, shared = smaller.constant - self.constant, set[str]()
        for name, vector in smaller.terms:
            row = None if name in shared else self.rows.get(name)
            if row is None:
                lead += max(vector)
            else:
                lead += max(map(sub, vector, row[0]))
                shared.add(name)
        return lead - sum(least for name, (_, least) in self.rows.items() if name not in shared) <= 0

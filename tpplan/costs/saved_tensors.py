"""What autograd keeps between forward and backward, by storage, as expressions over the decisions.

A storage starts at an op that makes a new tensor, or at a boundary whose conversion does. It is kept once, however
many ops save a view of it. A boundary that only renames (identity, R -> R*) passes its reader's wish on to the storage
it renames, so that storage is kept if any such reader wants it: a maximum over readers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter

from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, SourceKind, Value, within
from tpplan.core.layout import Conversion, Layout, Step, local_shape
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.execute import Executor, whole_strategy
from tpplan.layouts.decision_space import Reading, Space, reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.parts import SAVED, SOURCES
from tpplan.solvers.problem import Expression, Term

#: sums over ranks, and what moves as much, which selective recomputation holds; tpplan.apply.recompute.KEPT says it to
#: torch
HELD_STEPS = frozenset({Step.ALL_REDUCE, Step.REDUCE_SCATTER, Step.ALL_TO_ALL})


def local_bytes(value: Value, layout: Layout, tp: int) -> int:
    """Bytes of a value on one rank."""
    elements = 1
    for size in local_shape(value.shape, layout, tp):
        elements *= size
    return elements * DTYPE_BYTES[value.dtype]


@dataclass(slots=True)
class Segment:
    """A storage between the boundaries it crosses: who makes it, whether an op keeps it, which boundaries read it.

    By position in the graph, through all further boundaries: `last_reader`, while whose call or op it is read, and
    `until`, the first that may keep it, infinite where none does. `is_wanted`: one behind a boundary keeps it. What a
    module returned may be there up to `held_until`, read or not.
    """

    maker: str
    value: Value
    position: int
    is_kept: bool = False
    exits: list[str] = field(default_factory=list)
    last_reader: int = -1
    held_until: int = -1
    until: float = math.inf
    is_wanted: bool = False

    def copy(self) -> "Segment":
        """Another with the same; dataclasses.replace takes five times as long."""
        return Segment(*_FIELDS(self))


_FIELDS = attrgetter(*(field.name for field in fields(Segment)))


def sources(space: Space) -> Term:
    """The model's inputs and buffers."""
    values = [space.graph.values[s.result] for s in space.graph.sources if s.kind is not SourceKind.PARAMETER]
    return Term(name=SOURCES, expressions=(Expression(constant=float(sum(value.num_bytes for value in values))),))


def call_exits(graph: ModelGraph) -> dict[int, int]:
    """By position of a boundary into a module, where that call of it ends: its caller holds what it gave until then."""
    found: dict[int, int] = {}
    running: list[tuple[int, str]] = []
    for i, node in enumerate(graph.nodes):
        while running and not within(node.module, running[-1][1]):
            found[running.pop()[0]] = i - 1
        if isinstance(node, Boundary) and node.direction is Direction.INPUT:
            running.append((i, node.module))
    found.update((position, len(graph.nodes) - 1) for position, _ in running)
    return found


def returned_until(graph: ModelGraph) -> dict[int, int]:
    """By position of a boundary out of a module, under whose path a field of a dict or dataclass comes out, where the
    forward that called it ends: while its code uses the one, all fields are there. A tensor alone, or unpacked from a
    tuple, is taken to be replaced or used up."""
    found: dict[int, int] = {}
    returned: dict[str | None, list[int]] = {None: []}
    running: list[str] = []
    for i, node in enumerate(graph.nodes):
        while running and (node.module == LOSS_SCOPE or not within(node.module, running[-1])):
            found.update(dict.fromkeys(returned.pop(running.pop()), i - 1))
        if not isinstance(node, Boundary):
            continue
        if node.direction is Direction.INPUT and node.module not in returned:
            running.append(node.module)
            returned[node.module] = []
        elif node.direction is Direction.OUTPUT and any(not part.isdecimal() for part in node.path.split(".")[1:]):
            returned[next((name for name in reversed(running) if name != node.module), None)].append(i)
    return found | {i: len(graph.nodes) - 1 for positions in returned.values() for i in positions}


def segments_of(space: Space, executor: Executor) -> dict[str, Segment]:
    """Segments by maker; an op with several results has one for each that is new. They are the caller's own."""
    found = executor.once((segments_of, id(space.graph)), space.graph, lambda: _segments_of(space.graph, executor))
    return {name: segment.copy() for name, segment in found.items()}


def _segments_of(graph: ModelGraph, executor: Executor) -> dict[str, Segment]:
    exits, returned = call_exits(graph), returned_until(graph)
    fixed = {s.result for s in graph.sources if s.kind is not SourceKind.INPUT}
    segment_of: dict[str, str] = {}
    segments: dict[str, Segment] = {}

    def start(node: Op | Boundary, place: int, position: int) -> None:
        result = node.results[place]
        key = f"{node.name}:{place}"
        segments[key] = Segment(
            node.name,
            graph.values[result],
            place,
            last_reader=exits.get(position, position),
            held_until=returned.get(position, -1),
        )
        segment_of[result] = key

    for position, node in enumerate(graph.nodes):
        own = [segments[segment_of[operand]] for operand in node.operands if operand in segment_of]
        for segment in own:
            segment.last_reader = max(segment.last_reader, exits.get(position, position))
        if isinstance(node, Boundary):
            for segment in own:
                segment.exits.append(node.name)
            start(node, 0, position)
            continue
        execution = executor.execute(call := Call.of(graph, node), whole_strategy(call), 1)
        for place, result in enumerate(node.results):
            alias = _aliased_operand(graph, node, result, segment_of)
            if alias is None:
                start(node, place, position)
            else:
                segment_of[result] = alias
        kept = [segment_of[node.results[place]] for place in execution.saves_results]
        kept += [
            segment_of[operand]
            for operand in (node.operands[index] for index in execution.saves)
            if operand in segment_of and operand not in fixed
        ]
        for key in kept:
            segments[key].is_kept = True
            segments[key].until = min(segments[key].until, position)
    _pass_on(segments)
    return segments


def _pass_on(segments: dict[str, Segment]) -> None:
    """What is read and kept behind boundaries may be the storage before them."""
    for segment in reversed(segments.values()):
        for behind in (segments[f"{name}:0"] for name in segment.exits):
            segment.last_reader = max(segment.last_reader, behind.last_reader)
            segment.until = min(segment.until, behind.until)
            segment.is_wanted = segment.is_wanted or behind.is_kept or behind.is_wanted


def _aliased_operand(graph: ModelGraph, op: Op, result: str, segment_of: dict[str, str]) -> str | None:
    """The segment of the operand that a result is a view of."""
    storage = graph.values[result].storage
    for operand in op.operands:
        if operand in segment_of and graph.values[operand].storage == storage:
            return segment_of[operand]
    return None


def kept_expressions(space: Space, segments: dict[str, Segment], segment: Segment) -> tuple[Expression, ...]:
    """Expressions whose maximum is the bytes that this segment's storage keeps."""
    maker = space.classes[segment.maker]
    if segment.is_kept or isinstance(space.deciders[maker], Boundary):
        # Whether this boundary makes a tensor and the next one renames it is a product of choices: counted where made.
        return (Expression(terms=((maker, own_bytes(space, segment)),)),)
    readers = dict.fromkeys(space.classes[name] for name in segment.exits if is_wanted(segments, name))
    return tuple(
        Expression(
            terms=(
                (
                    reader,
                    tuple(
                        _local(space, segment.value, s.operands[0]) if _renames(space, reader, s) else 0.0
                        for s in space.strategies[reader]
                    ),
                ),
            )
        )
        for reader in readers
    )


def own_bytes(space: Space, segment: Segment) -> tuple[float, ...]:
    """A rank's bytes of a storage by its maker's strategies; none where a boundary only renames."""
    maker = space.classes[segment.maker]
    return tuple(
        0.0 if _renames(space, maker, s) else _local(space, segment.value, s.results[segment.position])
        for s in space.strategies[maker]
    )


def held_bytes(space: Space, segments: dict[str, Segment], segment: Segment) -> tuple[str, tuple[float, ...]]:
    """A rank's bytes of what is held of a module's result (returned_until), and who decides them: none of what is kept
    anyway. It is not where what is kept of it is a copy that a boundary behind makes."""
    wanted = next((name for name in segment.exits if is_wanted(segments, name)), None)
    decider = space.classes[segment.maker if wanted is None else wanted]
    return decider, tuple(
        0.0
        if segment.is_kept or (wanted is not None and _renames(space, decider, s))
        else _local(space, segment.value, s.results[segment.position] if wanted is None else s.operands[0])
        for s in space.strategies[decider]
    )


def _local(space: Space, value: Value, layout: Layout) -> float:
    """A rank's part of a storage. The layout may be that of a view, whose dims are others, but not how many parts."""
    return value.num_bytes / layout.num_slices(space.tp)


def is_wanted(segments: dict[str, Segment], boundary: str) -> bool:
    """True when an op behind a boundary, or behind further ones, keeps its value."""
    segment = segments[f"{boundary}:0"]
    return segment.is_kept or any(is_wanted(segments, name) for name in segment.exits)


def _renames(space: Space, name: str, strategy: Strategy) -> bool:
    """True for a boundary's strategy that makes no new tensor."""
    if not isinstance(space.deciders[name], Boundary):
        return False
    return not Conversion(strategy.operands[0], strategy.results[0]).forward


def extra_terms(space: Space, name: str, executor: Executor) -> Iterator[Term]:
    """What an op of a class keeps that is neither operand nor result: statistics, masks, log-probabilities."""
    op = space.deciders[name]
    if isinstance(op, Op):
        call = Call.of(space.graph, op)
        vector = tuple(_extra_bytes(call, s, space.tp, executor) for s in space.strategies[name])
        if any(vector):
            yield Term(name=SAVED, expressions=(Expression(terms=((name, vector),)),))


def _extra_bytes(call: Call, strategy: Strategy, tp: int, executor: Executor) -> float:
    """What an op keeps besides the values that it keeps where nothing is sharded."""
    execution, whole = executor.execute(call, strategy, tp), executor.execute(call, whole_strategy(call), 1)
    more = execution.saves - whole.saves
    return execution.saved_bytes + sum(local_bytes(call.operands[i], strategy.operands[i], tp) for i in more)


def copies_read(space: Space, name: str) -> Iterator[Term]:
    """A weight that is read otherwise than it rests is a copy, which the op keeps for its backward."""
    reading = space.deciders[name]
    if not isinstance(reading, Reading):
        return
    value = space.graph.values[reading.parameter.result]
    vector = tuple(
        float(local_bytes(value, strategy.results[0], space.tp))
        if conversion.forward and strategy.results[0].dim is not None
        else 0.0
        for strategy in space.strategies[name]
        for conversion in (reading_conversion(strategy),)
    )
    if any(vector):
        yield Term(name=SAVED, expressions=(Expression(terms=((name, vector),)),))

"""What autograd keeps between forward and backward, by storage, as expressions over the decisions.

A storage starts at an op that makes a new tensor, or at a boundary whose conversion does. It is kept once, however
many ops save a view of it. A boundary that only renames (identity, R -> R*) passes its reader's wish on to the storage
it renames, so that storage is kept if any such reader wants it: a maximum over readers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tpplan.costs.compute import Executor, whole_strategy
from tpplan.costs.moves import backward_move, forward_move
from tpplan.graph import Boundary, ModelGraph, Op, SourceKind, Value
from tpplan.layout import Conversion, Layout, local_shape
from tpplan.ledger import BUFFERS
from tpplan.problem import Expression, Term
from tpplan.rules import Call, Strategy
from tpplan.space import Reading, Space, reading_conversion
from tpplan.units import DTYPE_BYTES

#: parts of the peak
SAVED, LARGEST_OP, SOURCES = "saved activations", "largest op", "inputs and buffers"
#: gradients of activations that wait at once for their producers
PASSING = 2.0


def local_bytes(value: Value, layout: Layout, tp: int) -> int:
    """Bytes of a value on one rank."""
    elements = 1
    for size in local_shape(value.shape, layout, tp):
        elements *= size
    return elements * DTYPE_BYTES[value.dtype]


@dataclass(slots=True)
class Segment:
    """A storage between the boundaries it crosses: who makes it, whether an op keeps it, which boundaries read it."""

    maker: str
    value: Value
    position: int
    is_kept: bool
    exits: list[str]


def sources(space: Space) -> Term:
    """The model's inputs and buffers."""
    values = [space.graph.values[s.result] for s in space.graph.sources if s.kind is not SourceKind.PARAMETER]
    return Term(name=SOURCES, expressions=(Expression(constant=float(sum(value.num_bytes for value in values))),))


def largest_op(space: Space, executor: Executor) -> Term:
    """What an op holds while it runs: forward what it drops again, backward gradients and what it makes of them.

    Gradients of parameters count elsewhere.
    """
    parameters = {source.result for source in space.graph.parameters}
    expressions = []
    for name in space.members:
        op = space.deciders[name]
        if not isinstance(op, Op):
            continue
        call = Call.of(space.graph, op)
        vector = tuple(
            _held_bytes(call, strategy, parameters, space.tp, executor) for strategy in space.strategies[name]
        )
        expressions.append(Expression(terms=((name, vector),)))
    return Term(name=LARGEST_OP, expressions=tuple(expressions) or (Expression(),))


def largest_move(space: Space) -> Term:
    """What a conversion holds while it runs, forward or backward, and a reading of a parameter likewise."""
    expressions = []
    for name in space.members:
        match space.deciders[name]:
            case Op():
                continue
            case Boundary(operand=moved):
                conversions = [Conversion(s.operands[0], s.results[0]) for s in space.strategies[name]]
            case Reading(parameter=parameter):
                moved = parameter.result
                conversions = [reading_conversion(s) for s in space.strategies[name]]
        vector = tuple(_moved_bytes(conversion, space.graph.values[moved], space.tp) for conversion in conversions)
        if any(vector):
            expressions.append(Expression(terms=((name, vector),)))
    return Term(name=BUFFERS, expressions=tuple(expressions) or (Expression(),))


def _moved_bytes(conversion: Conversion, value: Value, tp: int) -> float:
    forward, backward = (
        move(conversion, value.shape, value.dtype, tp).held_bytes for move in (forward_move, backward_move)
    )
    return float(max(forward, backward * value.carries_gradient))


def gradients_passing(space: Space) -> Term:
    """Gradients of values that wait while others are computed: of a residual beside its branch, say."""
    expressions = []
    for name in space.members:
        decider = space.deciders[name]
        if isinstance(decider, Boundary) and space.graph.values[decider.operand].carries_gradient:
            value = space.graph.values[decider.operand]
            vector = tuple(float(local_bytes(value, s.operands[0], space.tp)) for s in space.strategies[name])
            expressions.append(Expression(terms=((name, vector),)))
    return Term(name=LARGEST_OP, expressions=tuple(expressions) or (Expression(),), weight=PASSING)


def _held_bytes(call: Call, strategy: Strategy, parameters: set[str], tp: int, executor: Executor) -> float:
    execution = executor.execute(call, strategy, tp)
    counted = sum(
        local_bytes(value, layout, tp)
        for value, layout in zip(call.operands, strategy.operands, strict=True)
        if value.name in parameters and value.carries_gradient
    )
    return float(max(execution.forward_bytes, execution.backward_bytes - counted))


def segments_of(space: Space, executor: Executor) -> dict[str, Segment]:
    """Segments by maker; an op with several results has one for each that is new. They are the caller's own."""
    found = executor.once((segments_of, id(space.graph)), space.graph, lambda: _segments_of(space.graph, executor))
    return {name: Segment(s.maker, s.value, s.position, s.is_kept, s.exits) for name, s in found.items()}


def _segments_of(graph: ModelGraph, executor: Executor) -> dict[str, Segment]:
    fixed = {s.result for s in graph.sources if s.kind is not SourceKind.INPUT}
    segment_of: dict[str, str] = {}
    segments: dict[str, Segment] = {}

    def start(node: Op | Boundary, position: int) -> None:
        result = node.results[position]
        key = f"{node.name}:{position}"
        segments[key] = Segment(node.name, graph.values[result], position, is_kept=False, exits=[])
        segment_of[result] = key

    for node in graph.nodes:
        if isinstance(node, Boundary):
            if node.operand in segment_of:
                segments[segment_of[node.operand]].exits.append(node.name)
            start(node, 0)
            continue
        execution = executor.execute(call := Call.of(graph, node), whole_strategy(call), 1)
        for position, result in enumerate(node.results):
            alias = _aliased_operand(graph, node, result, segment_of)
            if alias is None:
                start(node, position)
                segments[f"{node.name}:{position}"].is_kept = position in execution.saves_results
            else:
                segment_of[result] = alias
        for index in execution.saves:
            operand = node.operands[index]
            if operand in segment_of and operand not in fixed:
                segments[segment_of[operand]].is_kept = True
    return segments


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
    is_boundary = isinstance(space.deciders[maker], Boundary)
    if segment.is_kept or is_boundary:
        # Whether this boundary makes a tensor and the next one renames it is a product of choices: counted where made.
        own = tuple(
            0.0 if _renames(space, maker, s) else _local(space, segment.value, s.results[segment.position])
            for s in space.strategies[maker]
        )
        return (Expression(terms=((maker, own),)),)
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

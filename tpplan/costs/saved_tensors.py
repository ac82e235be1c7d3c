"""Finds the storages that autograd keeps between forward and backward, as expressions over the decisions.

A storage starts at an op that makes a new tensor, or at a boundary whose conversion makes one. It is kept once, however
many ops save a view of it. A boundary that makes no tensor (identity, R -> R*) only renames the storage before it, so
that storage is kept if a reader behind any such boundary saves it: a maximum over boundaries.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter

from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, SourceKind, within
from tpplan.core.layout import SUM_STEPS, Conversion, Layout, R
from tpplan.costs.runs.execute import Executor, whole_strategy
from tpplan.costs.runs.execution import local_bytes
from tpplan.layouts.decision_space import Space
from tpplan.layouts.readings import Reading, reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.parts import SAVED, SOURCES
from tpplan.solvers.problem import Expression, Term


def gives_sum(conversion: Conversion) -> bool:
    """True where a conversion's forward sums or exchanges over ranks, so that a mode that keeps sums keeps its result.

    A gather of slices does not: its result is cheap to make again, and large.
    """
    return not SUM_STEPS.isdisjoint(conversion.forward)


@dataclass(slots=True)
class SavedStorage:
    """A storage from the node that makes it to the boundaries that it crosses.

    `last_reader`, `held_until` and `until` are positions of nodes in the graph, also behind further boundaries.
    """

    #: name of the op or boundary that makes the storage
    maker: str
    #: name of the value
    value: str
    #: index of the value among the maker's results
    position: int
    #: True where an op before the next boundaries saves the storage
    is_kept: bool = False
    #: True where an op before the next boundaries reads the storage, other than by a view
    is_read: bool = False
    #: names of the boundaries that read the storage
    exits: list[str] = field(default_factory=list)
    #: the last op that reads the storage, or the end of the last call that it is passed to
    last_reader: int = -1
    #: the end of the forward that holds the storage because a module returned it; -1 where none does
    held_until: int = -1
    #: the first node that may save the storage; infinite where none does
    until: float = math.inf
    #: True where an op behind a boundary saves the storage
    is_wanted: bool = False

    def copy(self) -> "SavedStorage":
        """Returns a copy; dataclasses.replace would take five times as long."""
        return SavedStorage(*_FIELDS(self))


_FIELDS = attrgetter(*(field.name for field in fields(SavedStorage)))


def sources(space: Space) -> Term:
    """Returns the term for the bytes of the model's inputs and buffers."""
    names = [source.result for source in space.graph.sources if source.kind is not SourceKind.PARAMETER]
    num_bytes = sum(local_bytes(space.graph.values[x], space.crossing.get(x, R), space.tp) for x in names)
    return Term(name=SOURCES, expressions=(Expression(constant=float(num_bytes)),))


def call_exits(graph: ModelGraph) -> dict[int, int]:
    """Returns by position of an input boundary the position at which that call of the module ends.

    The caller holds the argument until then.
    """
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
    """Returns by position of an output boundary the position up to which the calling forward may hold the output.

    Only fields of a returned dict or dataclass are listed: code that uses one field holds all of them until the calling
    forward ends. A tensor alone or in a tuple is assumed to be freed after its last use.
    """
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


def segments_of(space: Space, executor: Executor) -> dict[str, SavedStorage]:
    """Returns the segments, one for each new result, by maker and index of the result; the caller may change them."""
    found = segments_in(space.graph, executor)
    return {name: segment.copy() for name, segment in found.items()}


def segments_in(graph: ModelGraph, executor: Executor) -> Mapping[str, SavedStorage]:
    """Returns the segments of a graph, which all callers share."""
    key = segments_in, executor.saving(graph)
    return graph.once_for_all_sizes(key, lambda: _segments_of(graph, executor))


def _segments_of(graph: ModelGraph, executor: Executor) -> dict[str, SavedStorage]:
    exits, returned = call_exits(graph), returned_until(graph)
    fixed = {s.result for s in graph.sources if s.kind is not SourceKind.INPUT}
    segment_of: dict[str, str] = {}
    segments: dict[str, SavedStorage] = {}

    def start(node: Op | Boundary, place: int, position: int) -> None:
        result = node.results[place]
        key = f"{node.name}:{place}"
        segments[key] = SavedStorage(
            node.name,
            result,
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
        execution = executor.whole(graph, node)
        viewed = set[str]()
        for place, result in enumerate(node.results):
            alias = _aliased_operand(graph, node, result, segment_of)
            if alias is None:
                start(node, place, position)
            else:
                segment_of[result] = alias
                viewed.add(alias)
        for operand in node.operands:
            if (key := segment_of.get(operand)) is not None and key not in viewed:
                segments[key].is_read = True
        saved = [node.results[place] for place in execution.saves_results]
        saved += [operand for index in execution.saves if (operand := node.operands[index]) not in fixed]
        for segment in (segments[segment_of[value]] for value in saved if value in segment_of):
            segment.is_kept, segment.until = True, min(segment.until, position)
    _pass_on(segments)
    return segments


def _pass_on(segments: dict[str, SavedStorage]) -> None:
    """Extends last_reader, until and is_wanted by those behind boundaries, which may only rename the storage."""
    for segment in reversed(segments.values()):
        for behind in (segments[f"{name}:0"] for name in segment.exits):
            segment.last_reader = max(segment.last_reader, behind.last_reader)
            segment.until = min(segment.until, behind.until)
            segment.is_wanted = segment.is_wanted or behind.is_kept or behind.is_wanted


def _aliased_operand(graph: ModelGraph, op: Op, result: str, segment_of: dict[str, str]) -> str | None:
    """Returns the segment of the operand that a result is a view of; None for a new tensor."""
    storage = graph.values[result].storage
    for operand in op.operands:
        if operand in segment_of and graph.values[operand].storage == storage:
            return segment_of[operand]
    return None


def kept_expressions(
    space: Space, segments: Mapping[str, SavedStorage], segment: SavedStorage
) -> tuple[Expression, ...]:
    """Returns expressions whose maximum is the bytes that autograd keeps of a segment's storage."""
    maker = space.classes[segment.maker]
    if segment.is_kept or isinstance(space.deciders[maker], Boundary):
        # That this boundary makes a tensor and the next one only renames it would be a product of two decisions, so
        # the bytes are counted here, where the tensor is made.
        return (Expression(terms=((maker, own_bytes(space, segment)),)),)
    readers = dict.fromkeys(space.classes[name] for name in segment.exits if is_wanted(segments, name))
    return tuple(
        Expression(
            terms=(
                (
                    reader,
                    tuple(
                        _local(space, segment, s.operands[0]) if _renames(space, reader, s) else 0.0
                        for s in space.strategies[reader]
                    ),
                ),
            )
        )
        for reader in readers
    )


def unsummed_expressions(space: Space, segment: SavedStorage, exits: tuple[str, ...]) -> tuple[Expression, ...] | None:
    """Returns expressions whose maximum is the bytes of a product, which only boundaries read, that a mode keeps that
    keeps sums: none where each of them gives a sum. None where none of them may.
    """
    found, may_sum = [], False
    for reader in dict.fromkeys(space.classes[name] for name in exits):
        conversions = [Conversion(s.operands[0], s.results[0]) for s in space.strategies[reader]]
        may_sum |= any(map(gives_sum, conversions))
        vector = tuple(0.0 if gives_sum(own) else _local(space, segment, own.source) for own in conversions)
        found.append(Expression(terms=((reader, vector),)))
    return tuple(found) if may_sum else None


def own_bytes(space: Space, segment: SavedStorage) -> tuple[float, ...]:
    """Returns a rank's bytes of a storage by its maker's strategies; 0 where a boundary makes no tensor."""
    maker = space.classes[segment.maker]
    return tuple(
        0.0 if _renames(space, maker, s) else _local(space, segment, s.results[segment.position])
        for s in space.strategies[maker]
    )


def held_bytes(
    space: Space, segments: Mapping[str, SavedStorage], segment: SavedStorage
) -> tuple[str, tuple[float, ...]]:
    """Returns the deciding class, and by strategy the bytes of a module's result that code holds (returned_until).

    Bytes that autograd keeps anyway are 0. Where a boundary behind wants the storage, its decision counts: if it makes
    a copy, the copy is kept, and the result itself is only held.
    """
    wanted = next((name for name in segment.exits if is_wanted(segments, name)), None)
    decider = space.classes[segment.maker if wanted is None else wanted]
    return decider, tuple(
        0.0
        if segment.is_kept or (wanted is not None and _renames(space, decider, s))
        else _local(space, segment, s.results[segment.position] if wanted is None else s.operands[0])
        for s in space.strategies[decider]
    )


def _local(space: Space, segment: SavedStorage, layout: Layout) -> float:
    """Returns a rank's bytes of a storage. A view's layout will do: its dims differ, its number of slices does not."""
    return space.graph.values[segment.value].num_bytes / layout.num_slices(space.tp)


def is_wanted(segments: Mapping[str, SavedStorage], boundary: str) -> bool:
    """True where an op behind a boundary, or behind further boundaries, saves the boundary's result."""
    segment = segments[f"{boundary}:0"]
    return segment.is_kept or any(is_wanted(segments, name) for name in segment.exits)


def _renames(space: Space, name: str, strategy: Strategy) -> bool:
    """True for a strategy of a boundary that makes no new tensor."""
    if not isinstance(space.deciders[name], Boundary):
        return False
    return not Conversion(strategy.operands[0], strategy.results[0]).forward


def extra_terms(space: Space, name: str, executor: Executor) -> Iterator[Term]:
    """Yields the term for tensors that an op of a class saves besides operands and results (statistics, masks)."""
    op = space.deciders[name]
    if isinstance(op, Op):
        call = Call.of(space.graph, op)
        vector = tuple(_extra_bytes(call, s, space.tp, executor) for s in space.strategies[name])
        if any(vector):
            yield Term(name=SAVED, expressions=(Expression(terms=((name, vector),)),))


def _extra_bytes(call: Call, strategy: Strategy, tp: int, executor: Executor) -> float:
    """Returns the bytes that an op saves besides the operands and results that it also saves unsharded."""
    return executor.execute(call, strategy, tp).saved_bytes + operands_saved_too(call, strategy, tp, executor)


def operands_saved_too(call: Call, strategy: Strategy, tp: int, executor: Executor) -> float:
    """Returns the bytes of the operands that an op saves and would not save unsharded."""
    more = executor.execute(call, strategy, tp).saves - executor.execute(call, whole_strategy(call), 1).saves
    return float(sum(local_bytes(call.operands[i], strategy.operands[i], tp) for i in more))


def copies_read(space: Space, name: str) -> Iterator[Term]:
    """Yields the term for a weight that is read in another layout than it rests in: the op saves the converted copy."""
    reading = space.deciders[name]
    if not isinstance(reading, Reading):
        return
    value = space.graph.values[reading.source.result]
    vector = tuple(
        float(local_bytes(value, strategy.results[0], space.tp))
        if conversion.forward and strategy.results[0].dim is not None
        else 0.0
        for strategy in space.strategies[name]
        for conversion in (reading_conversion(strategy),)
    )
    if any(vector):
        yield Term(name=SAVED, expressions=(Expression(terms=((name, vector),)),))

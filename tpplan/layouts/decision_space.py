"""The decision space: the nodes that choose a layout, their strategies, and which nodes decide together.

Every op, every boundary and every reading (of a parameter, or of a buffer that may be read as a slice) is a decision;
its strategies are tuples of layouts. A flow carries a value from one decision to another, and both ends must
name the same layout. Corresponding nodes of repeated blocks share one decision (a *class*), represented by the first
block's node. Where different classes flow into a boundary it has its own class, so that the first block may convert
what the others need not; an op that makes a view in one block and a copy in another has two, which cost differently.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from tpplan.core.errors import ModelError
from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.layout import Layout
from tpplan.core.repeated_blocks import like_ops, members
from tpplan.layouts.readings import Reading, reading_name, sources_read
from tpplan.layouts.rules import Strategy

T = TypeVar("T")

#: a node of the graph, or a reading, that chooses a strategy
Decider = Op | Boundary | Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A value flows from a result of one decision to an operand of another."""

    source: str
    result: int
    target: str
    operand: int


@dataclass(frozen=True, kw_only=True)
class Space:
    """The decisions of a graph on tp ranks: their strategies, the flows between them, and each decision's class.

    `members` are the decisions of each class by its representative, in order.
    """

    graph: ModelGraph
    tp: int
    deciders: dict[str, Decider]
    strategies: dict[str, tuple[Strategy, ...]]
    flows: tuple[Flow, ...]
    classes: dict[str, str]
    members: dict[str, tuple[str, ...]]
    #: layouts other than R of values that cross between stages
    crossing: Mapping[str, Layout] = field(default_factory=dict)

    @cached_property
    def readings(self) -> dict[str, tuple[Reading, ...]]:
        """Readings by the name of the parameter or buffer, in order."""
        return readings_of(self.graph)

    def once_for_all_sizes(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, cached under `key` for all spaces with these classes on the graph in any size, on any
        number of tp ranks. The value must follow from the classes, the parameters, and what graphs share by
        ModelGraph.once_for_all_sizes."""
        # What is cached holds the classes, so that their id is not reused; parameters say how many ranks divide them.
        own = key, id(self.classes), self.graph.ep
        _, found = self.graph.once_for_all_sizes(own, lambda: (self.classes, make()))
        return found

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of decisions that must be equal to be applied: a boundary in several calls of its module, and several
        readings of a parameter in one module."""
        return self.graph.once_for_all_sizes("shared", self._shared)

    def _shared(self) -> tuple[tuple[str, ...], ...]:
        found: dict[object, list[str]] = defaultdict(list)
        for name, decider in self.deciders.items():
            match decider:
                case Boundary():
                    for place in decider.places:
                        found[place].append(name)
                case Reading():
                    found[decider.source.label, decider.op.module].append(name)
        return tuple(dict.fromkeys(tuple(names) for names in found.values() if len(names) > 1))

    @cached_property
    def layouts(self) -> dict[str, tuple[str, int]]:
        """Computed value -> (decision, position of the result) that decides the value's layout."""
        return self.graph.once_for_all_sizes(
            "layouts",
            lambda: {result: (node.name, i) for node in self.graph.nodes for i, result in enumerate(node.results)},
        )


def deciders_of(graph: ModelGraph) -> dict[str, Decider]:
    """The decisions of a graph by name, in the order of its nodes: an op's readings of parameters precede the op."""
    return graph.once(deciders_of, lambda: _own_deciders(graph))


def _own_deciders(graph: ModelGraph) -> dict[str, Decider]:
    """The decisions with the nodes of this graph, whose order is that in graphs of other sizes."""
    found = dict(graph.once_for_all_sizes((_deciders, graph.ep), lambda: dict(_deciders(graph))))
    found.update((node.name, node) for node in graph.nodes)
    for name, decider in found.items():
        if isinstance(decider, Reading) and decider.op is not (own := found[decider.op.name]):
            assert isinstance(own, Op)
            found[name] = replace(decider, op=own)
    return found


def _deciders(graph: ModelGraph) -> Iterator[tuple[str, Decider]]:
    read = sources_read(graph)
    for node in graph.nodes:
        if isinstance(node, Op):
            for position, operand in enumerate(node.operands):
                if operand in read:
                    name = reading_name(node, position)
                    yield name, Reading(name=name, source=read[operand], op=node, position=position)
        yield node.name, node


def flows_of(graph: ModelGraph) -> tuple[Flow, ...]:
    """The values that go from decision to decision, readings of parameters among them. Raises ModelError for a
    parameter that is passed to a module as an argument."""
    return graph.once_for_all_sizes(flows_of, lambda: tuple(_flows(graph)))


def _flows(graph: ModelGraph) -> Iterator[Flow]:
    parameters = {source.result: source for source in graph.parameters}
    read = sources_read(graph)
    origin = {result: (node.name, i) for node in graph.nodes for i, result in enumerate(node.results)}
    for node in graph.nodes:
        for position, operand in enumerate(node.operands):
            if operand in read and isinstance(node, Op):
                yield Flow(source=reading_name(node, position), result=0, target=node.name, operand=position)
            elif operand in parameters:
                assert isinstance(node, Boundary)
                raise ModelError(
                    f"parameter {parameters[operand].label} crosses into module {node.module!r} as an argument "
                    f"({node.path}): tpplan cannot shard a weight that is passed around; let the module that owns "
                    "it compute with it"
                )
            elif operand in origin:
                source, result = origin[operand]
                yield Flow(source=source, result=result, target=node.name, operand=position)


def readings_of(graph: ModelGraph) -> dict[str, tuple[Reading, ...]]:
    """The readings of each parameter of a graph, and of each buffer that has any, by its name and in order."""
    return graph.once(readings_of, lambda: _readings(graph))


def _readings(graph: ModelGraph) -> dict[str, tuple[Reading, ...]]:
    found: dict[str, list[Reading]] = {source.label: [] for source in graph.parameters}
    for decider in deciders_of(graph).values():
        if isinstance(decider, Reading):
            found.setdefault(decider.source.label, []).append(decider)
    return {label: tuple(readings) for label, readings in found.items()}


def classes_of(
    graph: ModelGraph, apart: Callable[[str], Hashable] | None = None
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Decision -> the decision that represents its class; and representative -> the decisions of its class, in order.
    `apart` is as in build_space."""
    kinds = {block: dict[Hashable, int]() for block in graph.blocks}  # numbered, so that any two tell apart alike
    unlike = {
        name: kinds[block].setdefault(apart(name) if apart is not None else None, len(kinds[block]))
        for block in graph.blocks
        for name in block.names
    }

    def found() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        classes = _classes_where(graph, deciders_of(graph), unlike)
        return classes, members_of(classes)

    return graph.once_for_all_sizes((classes_of, tuple(unlike.items())), found)


def members_of(classes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The decisions of each class by its representative, in order."""
    found = defaultdict[str, list[str]](list)
    for name, representative in classes.items():
        found[representative].append(name)
    return {name: tuple(names) for name, names in found.items()}


def _classes_where(graph: ModelGraph, deciders: dict[str, Decider], unlike: Mapping[str, int]) -> dict[str, str]:
    position: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for block in graph.blocks:
        for name in block.names:
            place = enumerate(members(graph, name))  # blocks of different structure may share a pattern
            own = unlike[name]
            position.update({node.name: (block.pattern, block.indices, i, own) for i, node in place})
    representatives: dict[object, str] = {}
    classes: dict[str, str] = {}

    def producer_class(value: str) -> str:
        node = graph.producers.get(value)
        return classes[node.name] if node is not None else ""

    like = like_ops(graph)
    for name, decider in deciders.items():
        node = decider.op if isinstance(decider, Reading) else decider
        key: object = name
        if node.name in position:
            apart = tuple(map(producer_class, node.operands)) if isinstance(node, Boundary) else like[node.name]
            key = (position[node.name], decider.position if isinstance(decider, Reading) else None, apart)
        classes[name] = representatives.setdefault(key, name)
    return classes

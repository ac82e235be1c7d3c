"""Gradients that autograd adds up: a value that is used k times has k - 1 additions in its backward.

Each adds one gradient onto another, of the value's own shape and dtype: two are read and one is written. A boundary
counts as one use, for it hands on one gradient. A weight that is read k times is added up the same way, once per
micro-batch; adding up over micro-batches is the formulation's.
"""

from collections.abc import Mapping

from tpplan.core.graph import Boundary, ModelGraph, Op, Value
from tpplan.core.layout import Layout
from tpplan.layouts.decision_space import Reading, Space

#: bytes that an addition moves, of what is added
MOVED = 3.0


def additions(space: Space) -> Mapping[str, tuple[float, ...]]:
    """Additions behind each result of a decision, one entry per class: the mean over its members."""
    found, by_member = {}, space.graph.once(additions, lambda: {name: _counted(space, name) for name in space.deciders})
    for name, members in space.members.items():
        counts = [by_member[member] for member in members]
        mean = tuple(sum(column) / len(counts) for column in zip(*counts, strict=True))
        if any(mean):
            found[name] = mean
    return found


def _counted(space: Space, name: str) -> tuple[float, ...]:
    decider = space.deciders[name]
    if isinstance(decider, Reading):
        readings = space.readings[decider.parameter.label]
        # Which of them comes first, and adds nothing, does not matter to the sum.
        return ((len(readings) - 1) / len(readings) if decider.parameter.trainable else 0.0,)
    return tuple(float(max(0, _uses(space.graph, result) - 1)) for result in decider.results)


def _uses(graph: ModelGraph, value: str) -> int:
    """How many gradients reach a value."""
    if not graph.values[value].carries_gradient:
        return 0
    return sum(_reads(graph, reader, value) for reader in dict.fromkeys(graph.consumers.get(value, ())))


def _reads(graph: ModelGraph, reader: Op | Boundary, value: str) -> int:
    reaches = any(graph.values[result].carries_gradient for result in reader.results)
    return reader.operands.count(value) if reaches else 0


def moved_bytes(value: Value, layout: Layout, tp: int) -> float:
    """Bytes that one addition of the value's gradients moves on a rank."""
    return MOVED * value.num_bytes / layout.num_slices(tp)

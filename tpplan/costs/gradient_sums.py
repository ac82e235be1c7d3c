"""Counts the additions by which autograd sums gradients: a value that is used k times has k - 1 in its backward.

An addition reads two gradients and writes one, in the value's shape and dtype. A boundary counts as one use, because it
passes on one gradient. The gradient of a weight that is read k times takes k - 1 additions per micro-batch; its
accumulation over micro-batches is priced by tpplan.costs.step.formulate.
"""

from collections.abc import Mapping

from tpplan.core.graph import Boundary, ModelGraph, Op, Value
from tpplan.core.layout import Layout
from tpplan.layouts.decision_space import Decider, Space, deciders_of, readings_of
from tpplan.layouts.readings import Reading

#: bytes that an addition reads and writes, as a multiple of the gradient's bytes
MOVED = 3.0


def additions(space: Space) -> Mapping[str, tuple[float, ...]]:
    """Returns the additions of gradients per result of each class of decisions: the mean over the class's members.

    Classes without additions are left out.
    """
    return space.once_for_all_sizes(additions, lambda: _by_class(space))


def _by_class(space: Space) -> Mapping[str, tuple[float, ...]]:
    found, by_decision = {}, additions_behind(space.graph)
    for name, members in space.members.items():
        counts = [by_decision[member] for member in members]
        mean = tuple(sum(column) / len(counts) for column in zip(*counts, strict=True))
        if any(mean):
            found[name] = mean
    return found


def additions_behind(graph: ModelGraph) -> Mapping[str, tuple[float, ...]]:
    """Returns the additions of gradients per result of each decision of a graph."""
    return graph.once_for_all_sizes(
        additions_behind, lambda: {name: _counted(graph, decider) for name, decider in deciders_of(graph).items()}
    )


def _counted(graph: ModelGraph, decider: Decider) -> tuple[float, ...]:
    if isinstance(decider, Reading):
        readings = readings_of(graph)[decider.source.label]
        # One of the readings adds nothing; spread evenly, as only their sum counts.
        return ((len(readings) - 1) / len(readings) if decider.source.trainable else 0.0,)
    return tuple(float(max(0, _uses(graph, result) - 1)) for result in decider.results)


def _uses(graph: ModelGraph, value: str) -> int:
    """Returns how many gradients reach a value in backward."""
    if not graph.values[value].carries_gradient:
        return 0
    return sum(_reads(graph, reader, value) for reader in dict.fromkeys(graph.consumers.get(value, ())))


def _reads(graph: ModelGraph, reader: Op | Boundary, value: str) -> int:
    reaches = any(graph.values[result].carries_gradient for result in reader.results)
    return reader.operands.count(value) if reaches else 0


def moved_bytes(value: Value, layout: Layout, tp: int) -> float:
    """Returns the bytes that one addition of the value's gradients reads and writes on a rank."""
    return MOVED * value.num_bytes / layout.num_slices(tp)

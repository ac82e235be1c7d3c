"""The literals and local shapes that a node of the model must have on a rank, found once for like nodes."""

from collections.abc import Hashable

from tpplan.core.graph import Argument, Boundary, Direction, Op, Ref
from tpplan.core.layout import local_shape
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Call, localized_arguments, takes_sizes


class LocalNodes:
    """The nodes of an assignment's graph as they must be on any of its tp ranks."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._like = like_ops(assignment.graph)
        self._known: dict[Hashable, tuple[object, tuple[tuple[int, ...], ...]]] = {}

    def of(self, node: Op | Boundary) -> tuple[object, tuple[tuple[int, ...], ...]]:
        """The literals that a node must have, None where any would do, and the local shapes of its results."""
        key = self._like.get(node.name, node.name), self.assignment.strategy(node.name)
        if key not in self._known:
            literals = expected_literals(self.assignment, node) if isinstance(node, Op) else None
            self._known[key] = literals, self._shapes(node)
        return self._known[key]

    def _shapes(self, node: Op | Boundary) -> tuple[tuple[int, ...], ...]:
        strategy, tp = self.assignment.strategy(node.name), self.assignment.tp
        # What enters a module is marked in front of its conversion, what leaves it behind.
        is_entry = isinstance(node, Boundary) and node.direction is Direction.INPUT
        layouts = strategy.operands if is_entry else strategy.results
        values = [self.assignment.graph.values[name] for name in node.results]
        return tuple(local_shape(value.shape, layout, tp) for value, layout in zip(values, layouts, strict=True))


def expected_literals(assignment: Assignment, op: Op) -> object:
    """The literals that an op must have on a rank; None where they are sizes, which the result's shape covers."""
    if takes_sizes(op.target):
        return None
    call = Call.of(assignment.graph, op)
    return literals_of((localized_arguments(call, assignment.strategy(op.name), assignment.tp), op.kwargs))


def literals_of(argument: Argument | object) -> object:
    """An argument with "tensor" in place of each tensor."""
    if isinstance(argument, Ref):
        return "tensor"
    return tuple(map(literals_of, argument)) if isinstance(argument, tuple) else argument

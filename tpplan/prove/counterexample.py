"""A counterexample to a plan, and the decisions to blame for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpplan.core.graph import Boundary, Direction, Op
from tpplan.core.layout import local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.readings import Reading
from tpplan.prove.module_scope import given_nodes, parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """A difference of the applied model: the op, what was expected and seen, and the decisions to blame."""

    message: str
    blamed: tuple[str, ...]
    node: Op | Boundary | None = None
    #: a module whose own code differs under every sharding
    culprit: str | None = None
    #: sizes among the op's literals or results that it has neither in the plan nor in the original
    strange: frozenset[int] = frozenset()
    #: the tp rank that applies the model so
    rank: int = 0


def blame(
    assignment: Assignment, node: Op | Boundary | None, message: str, strange: frozenset[int] = frozenset()
) -> Counterexample:
    """The counterexample with the decisions to blame: those that show the module's code strange sizes; else the op
    where it is sharded; else all sharded values that the code of its module, or of the next one around it, sees."""
    module = node.module if node is not None else ""
    visible = tuple(_visible(assignment, module))
    blamed = tuple(name for name in visible if local_sizes(assignment, name) & strange)
    if not blamed and strange:  # computed from other sizes: `dim // heads` of an input's dim
        entries = (b for b in assignment.graph.boundaries if (b.module, b.direction) == (module, Direction.INPUT))
        blamed = tuple(_sharded(assignment, entries))
    if not blamed:
        is_sharded = isinstance(node, Op) and node.name in _sharded(assignment, (node,))
        blamed = (node.name,) if node is not None and is_sharded else visible
    while not blamed and module:
        module = parent(assignment.graph, module)
        blamed = tuple(_visible(assignment, module))
    blamed = blamed or tuple(_sharded(assignment, assignment.graph.nodes))
    line = assignment.graph.lines.get(node.name, "") if node is not None else ""
    at = f", at {line}" if line and " at " not in message else ""
    return Counterexample(message=message + at, blamed=blamed, node=node, strange=strange)


def local_sizes(assignment: Assignment, name: str) -> set[int]:
    """Sizes on a rank of the sharded dims of a decision's results."""
    node = assignment.deciders[name]
    assert not isinstance(node, Reading)
    values = [assignment.graph.values[result] for result in node.results]
    tp = assignment.tp
    return {
        local_shape(value.shape, layout, tp)[layout.dim]
        for value, layout in zip(values, assignment.strategy(name).results, strict=True)
        if layout.dim is not None
    }


def _visible(assignment: Assignment, module: str) -> Iterator[str]:
    """Decisions that give sharded values to a module's own code."""
    yield from _sharded(assignment, given_nodes(assignment.graph, module))


def _sharded(assignment: Assignment, nodes: Iterable[Op | Boundary]) -> Iterator[str]:
    for node in nodes:
        strategy = assignment.strategy(node.name)
        if any(layout.dim is not None for layout in (*strategy.operands, *strategy.results)):
            yield node.name

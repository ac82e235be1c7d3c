"""A node as it ran in the applied model on a rank, and how it differs from what the model's node must be there."""

from dataclasses import dataclass

import torch

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op, Ref
from tpplan.core.layout import local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Call, takes_sizes
from tpplan.prove.local_nodes import LocalNodes, expected_literals, literals_of
from tpplan.torch_internals import pytree
from tpplan.trace.fx_to_graph import argument_of

BOUNDARY = "tpplan.boundary.default"
#: ops that give a view of all elements in their order: two of them with equal operand and shape give the same
VIEWS_IN_ORDER = frozenset(
    f"aten.{name}" for name in ("view.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNode:
    """Name, literals and result shapes of a node of an applied model's graph."""

    title: str
    literals: object
    shapes: tuple[tuple[int, ...], ...]


def node_of(graph: ModelGraph, node: Op | Boundary) -> RankNode:
    """A node of a graph."""
    shapes = tuple(graph.values[name].shape for name in node.results)
    literals = literals_of((node.args, node.kwargs)) if isinstance(node, Op) else None
    return RankNode(title=title_of(node), literals=literals, shapes=shapes)


def ran_node(node: torch.fx.Node) -> RankNode:
    """A node of a trace that stopped."""
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)]
    shapes = tuple(tuple(map(int, tensor.shape)) for tensor in tensors)
    if str(node.target) == BOUNDARY:
        _, module, direction, path = node.args
        return RankNode(title=f"{direction} {path} of {module or 'the root'}", literals=None, shapes=shapes)
    args = argument_of(node.args, _AnyTensor())
    kwargs = tuple((key, argument_of(value, _AnyTensor())) for key, value in node.kwargs.items())
    return RankNode(title=str(node.target), literals=literals_of((args, kwargs)), shapes=shapes)


class _AnyTensor(dict[str, Argument]):
    """A mapping in which every name of a stopped graph is a tensor."""

    def __missing__(self, name: str) -> Argument:
        return Ref(name)


def difference_of(local: LocalNodes, original: Op | Boundary, image: RankNode) -> str | None:
    """The difference between a node and its image in words; None where there is none."""
    title = title_of(original)
    targets = {text.partition(" in ")[0] for text in (title, image.title)}
    if len(targets) > 1 and not targets <= VIEWS_IN_ORDER:
        return f"{title} became {image.title}"
    wanted, shapes = local.of(original)
    if len(targets) == 1 and wanted is not None and wanted != image.literals:
        before, after = _first_change(wanted, image.literals)
        return f"{title}: the number {before} became {after}"
    if shapes and not image.shapes:
        return f"{title}: does not run where the result would be {shapes} on a rank"
    if shapes != image.shapes:
        return f"{title}: expected the local shapes {shapes}, got {image.shapes}"
    return None


def is_like(one: RankNode, other: RankNode) -> bool:
    """True where two nodes are of the same op, with equal literals and shapes."""
    titles = (own.title.partition(" in ")[0] for own in (one, other))
    return len({*titles}) == 1 and (one.literals, one.shapes) == (other.literals, other.shapes)


def _first_change(before: object, after: object) -> tuple[object, object]:
    """The innermost place where two literals differ."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return next(_first_change(a, b) for a, b in zip(before, after, strict=True) if a != b)
    return before, after


def title_of(node: Op | Boundary | None) -> str:
    """A node in the words of messages; it begins with the operator, or with the boundary's direction."""
    match node:
        case Op():
            return f"{node.target} in {node.module or 'the root'}"
        case Boundary():
            return f"{node.direction} {node.path} of {node.module or 'the root'}"
        case None:
            return "nothing"


def strange_sizes(assignment: Assignment, node: Op | Boundary | None, image: RankNode) -> frozenset[int]:
    """Sizes among an op's literals and results in the image that it should not have on a rank."""
    if not isinstance(node, Op):
        return frozenset()
    if not takes_sizes(node.target):
        wanted = expected_literals(assignment, node)
        after = _first_change(wanted, image.literals)[1] if wanted != image.literals else None
        return frozenset({after} if type(after) is int else ())
    tp, strategy = assignment.tp, assignment.strategy(node.name)
    call = Call.of(assignment.graph, node)
    pairs = zip(call.results, strategy.results, strict=True)
    shapes = [local_shape(value.shape, layout, tp) for value, layout in pairs]
    expected = {size for shape in shapes for size in shape}
    found = {leaf for leaf in pytree.tree_leaves((image.literals, image.shapes)) if isinstance(leaf, int)}
    strange = found - expected - {-1} - set(pytree.tree_leaves(call.args))
    return frozenset(strange | _misplaced(image.literals, (call.args, call.kwargs), shapes[0]))


def _misplaced(literals: object, written: object, shape: tuple[int, ...]) -> set[int]:
    """Sizes in lists of one size per dim that are neither the dim's size nor the one written in the original."""
    if not isinstance(literals, tuple) or not isinstance(written, tuple) or len(literals) != len(written):
        return set()
    if len(literals) == len(shape) and all(isinstance(size, int) for size in (*literals, *written)):
        triples = zip(literals, written, shape, strict=True)
        return {found for found, own, size in triples if found not in (own, size, -1)}
    return {size for one, other in zip(literals, written, strict=True) for size in _misplaced(one, other, shape)}

"""The dims of a graph's values whose size data decides (`varying`)."""

from collections.abc import Mapping
from dataclasses import replace

from tpplan.core.errors import ModelError
from tpplan.core.graph import Boundary, ModelGraph, Op


def with_varying(graph: ModelGraph, other: ModelGraph, guessed: Mapping[str, str]) -> ModelGraph:
    """The graph with its `varying` dims, those whose size differs in `other`, which was traced with one element more
    wherever data decides how many there are. `guessed` are the lines of code whose sizes were guessed, and the guesses.

    Raises ModelError where `other` has other ops.
    """
    if graph.values.keys() != other.values.keys():
        raise ModelError(
            f"data decides a size, and which ops run depends on it: {', '.join(guessed)}. Make the code run "
            "the same ops at every size"
        )
    values = {
        name: replace(value, varying=tuple(i for i, size in enumerate(value.shape) if size != there.shape[i]))
        for (name, value), there in zip(graph.values.items(), other.values.values(), strict=True)
    }
    found = ((line, guess, False) for line, guess in guessed.items())
    return replace(graph, values=values, questions=(*graph.questions, *found))


def varying_as(graph: ModelGraph, known: ModelGraph) -> ModelGraph | None:
    """The graph with the `varying` dims of a graph that runs the same ops in the same modules on values of as many
    dims; None where `known` runs others."""
    if tuple(graph.values) != tuple(known.values) or len(graph.nodes) != len(known.nodes):
        return None
    pairs = list(zip(graph.values.values(), known.values.values(), strict=True))
    if any(len(own.shape) != len(other.shape) for own, other in pairs):
        return None
    if any(_outline(own) != _outline(other) for own, other in zip(graph.nodes, known.nodes, strict=True)):
        return None
    values = {own.name: replace(own, varying=other.varying) if other.varying else own for own, other in pairs}
    return replace(graph, values=values)


def _outline(node: Op | Boundary) -> tuple[object, ...]:
    """A node without its literals."""
    return node.name, node.module, node.results, node.operands, node.target if isinstance(node, Op) else None

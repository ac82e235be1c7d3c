"""Reuses the result of a walk over a graph for the same graph in another size, where all questions have equal answers.

A walk goes from node to node and asks what an op hands on. All other input of a walk is the same in all sizes of a
graph. So where every question has the answer that it had in another size, the walk would give the same result. There
are few questions, as ops at the same place in like blocks are asked about once.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

from tpplan.core.graph import ModelGraph, Op

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")
T = TypeVar("T")


def walked(
    graph: ModelGraph,
    about: Hashable,
    ask: Callable[[Question], Answer],
    walk: Callable[[Callable[[Question], Answer]], T],
) -> T:
    """The value of walk(ask), or the value found for the graph in another size where `ask` gave the same answers.

    The result of `walk` must follow from the answers and from what all sizes of a graph share
    (ModelGraph.once_for_all_sizes). `about` is the key of the walk in the cache.
    """
    known: dict[Question, Answer] = {}

    def answer(question: Question) -> Answer:
        if question not in known:
            known[question] = ask(question)
        return known[question]

    earlier: list[tuple[dict[Question, Answer], T]] = graph.once_for_all_sizes((walked, about), list)
    for answers, found in earlier:
        # Asked in the order of the earlier walk, and only while answers agree: a walk over this graph asks the same.
        if all(answer(question) == own for question, own in answers.items()):
            return found
    asked: dict[Question, Answer] = {}

    def noted(question: Question) -> Answer:
        if question not in asked:
            asked[question] = answer(question)
        return asked[question]

    found = walk(noted)
    earlier.append((asked, found))
    return found


def op_named(graph: ModelGraph, name: str) -> Op:
    """The op of a graph with this name."""
    places = graph.once_for_all_sizes(op_named, lambda: {node.name: place for place, node in enumerate(graph.nodes)})
    node = graph.nodes[places[name]]
    assert isinstance(node, Op), f"{name} is a boundary"
    return node

"""Takes over what a walk over a graph found, for the same graph in another size that answers all questions alike.

A walk goes from node to node and asks what an op hands on. All else that it looks at is the same in all sizes of a
graph. So where every question has the answer that it had in another size, a walk would take the same way and find the
same; and there are few questions, as like ops are asked once.
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
    """The value of walk(ask), that of the graph in another size where `ask` answers alike there.

    `walk` must follow from the answers and from what ModelGraph.once_for_all_sizes says. `about` names the walk.
    """
    known: dict[Question, Answer] = {}

    def answer(question: Question) -> Answer:
        if question not in known:
            known[question] = ask(question)
        return known[question]

    earlier: list[tuple[dict[Question, Answer], T]] = graph.once_for_all_sizes((walked, about), list)
    for answers, found in earlier:
        # In the order of that walk: each question is one that a walk over this graph would ask.
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

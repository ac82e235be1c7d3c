"""What a walk found in one size of a graph is taken over in another where all answers are the same, and only there."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from examples import example

from tpplan.core.graph import ModelGraph
from tpplan.layouts.fused.extra_layouts import find_extra_layouts
from tpplan.layouts.fused.retold_walks import walked
from tpplan.search.models.grown_graph import grown
from tpplan.trace.trace import trace


def traced(name: str, batch: int) -> ModelGraph:
    module = example(name)
    with torch.device("meta"):
        model, inputs = module.build_model(), module.example_inputs(batch, 32)
    return trace(model, inputs, loss=module.loss)


def in_another_size(graph: ModelGraph) -> ModelGraph:
    return graph.resized({}, {})


@pytest.mark.parametrize("name", ["llama", "nanogpt", "gpt"])
def test_extra_layouts_are_those_of_a_graph_that_shares_nothing(name: str) -> None:
    first, second = traced(name, 2), traced(name, 4)
    for tp in (2, 4):  # each size and number of ranks after the others: their walks are there to be taken over
        for size in (6, 8, 12):
            own = grown(first, second, (2, 4), size)
            assert own is not None
            alone = replace(own, lines=own.lines)
            assert not alone.is_resized_of(own)
            assert find_extra_layouts(own, tp) == find_extra_layouts(alone, tp)


def test_a_walk_is_taken_over_where_all_answers_are_the_same() -> None:
    graph, walks = traced("mlp", 1), list[str]()

    def found(own: ModelGraph, first: int, second: int) -> int:
        answers = {"first": first, "second": second}

        def walk(ask: Callable[[str], int]) -> int:
            walks.append("walked")
            return 10 * ask("first") + (ask("second") if ask("first") else 0)

        return walked(own, "sum", answers.__getitem__, walk)

    sizes = [in_another_size(graph) for _ in range(5)]
    answers = [(1, 2), (1, 2), (1, 3), (0, 2), (0, 4)]
    assert [found(own, *given) for own, given in zip(sizes, answers, strict=True)] == [12, 12, 13, 0, 0]
    assert len(walks) == 3  # in the last size nothing asks for the second number, which differs

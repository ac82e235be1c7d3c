"""Rows of experts that code picks one after the other: an even share of all for each, in whatever way it picks them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpplan.core.graph import ModelGraph, Op
from tpplan.trace.trace import trace

BATCH, LENGTH, DIM, EXPERTS, TOP = 4, 6, 8, 4, 2
TOKENS = BATCH * LENGTH

#: x [N, D], the experts' weights for it [N, K], their numbers [N, K], and the experts -> [N, D]
Way = Callable[[Tensor, Tensor, Tensor, nn.ModuleList], Tensor]


def where(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        y[token] += weights[token, place, None] * expert(x[token])
    return y


def masks(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As litgpt does."""
    y = torch.zeros_like(x)
    every = (chosen.unsqueeze(-1) == torch.arange(len(experts), device=x.device)).permute(2, 0, 1)
    for mask, expert in zip(every, experts, strict=True):
        token, place = torch.where(mask)
        y[token] += weights[token, place, None] * expert(x[token])
    return y


def one_hot(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y, mask = torch.zeros_like(x), F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for number, expert in enumerate(experts):
        place, token = torch.where(mask[number])
        y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return y


def any_of_its_experts(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        is_its = (chosen == number).any(-1)
        y[is_its] += expert(x[is_its])
    return y


def flattened(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    rows, flat = x.repeat_interleave(TOP, 0), chosen.view(-1)
    y = torch.empty_like(rows)
    for number, expert in enumerate(experts):
        y[flat == number] = expert(rows[flat == number])
    return (y.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Experts that are walked by a loop: x [B, T, D] -> [B, T, D]."""

    def __init__(self, way: Way, experts: int = EXPERTS) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(DIM, experts)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        weights, chosen = self.router(flat).softmax(-1).topk(TOP)
        return self.way(flat, weights, chosen, self.experts).view(x.shape)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def traced(*layers: Mixture) -> ModelGraph:
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    return trace(Model(*layers).to("meta"), {"x": x})


def rows_of(graph: ModelGraph, layer: int = 0) -> list[int]:
    """The rows that each expert of a layer gets."""
    found = []
    for op in graph.ops:
        if (
            isinstance(op, Op)
            and op.target == "aten.linear.default"
            and op.module.startswith(f"layers.{layer}.experts")
        ):
            value = graph.values[op.results[0]]
            assert value.varying == (0,)
            found.append(value.shape[0])
    return found


@pytest.mark.parametrize("way", [where, masks, one_hot, any_of_its_experts, flattened])
def test_experts_share_what_is_routed(way: Way) -> None:
    graph = traced(Mixture(way), Mixture(way))
    for layer in range(2):
        assert rows_of(graph, layer) == [TOKENS * TOP // EXPERTS] * EXPERTS
    assert {answer for _, answer, _ in graph.questions} == {f"{TOKENS * TOP // EXPERTS} elements, an even share of all"}


@pytest.mark.parametrize("way", [where, masks])
def test_shares_that_do_not_divide_are_rounded_up(way: Way) -> None:
    assert rows_of(traced(Mixture(way, 5))) == [10] * 5  # of 48


def test_layers_of_other_numbers_of_experts_share_by_their_own() -> None:
    graph = traced(Mixture(where, 4), Mixture(where, 8))
    assert rows_of(graph, 0) == [12] * 4
    assert rows_of(graph, 1) == [6] * 8


def test_masks_that_are_written_to_are_not_taken_as_they_were() -> None:
    """The second expert's rows are those of a mask that the first one's changed: nothing is known of them."""

    def written(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
        mask = F.one_hot(chosen, len(experts)).sum(1)
        first = mask[:, 0].nonzero()[:, 0]
        y = x.index_add(0, first, experts[0](x[first]))
        mask[:, 1] += mask[:, 0]
        second = mask[:, 1].nonzero()[:, 0]
        return y.index_add(0, second, experts[1](x[second]))

    assert rows_of(traced(Mixture(written))) == [TOKENS * TOP // EXPERTS, TOKENS]


def test_one_value_alone_may_be_met_by_all() -> None:
    def first(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
        token = (chosen[:, 0] == 0).nonzero()[:, 0]
        return x.index_add(0, token, experts[0](x[token]))

    graph = traced(Mixture(first))
    assert rows_of(graph) == [TOKENS]
    assert [answer for _, answer, _ in graph.questions] == [f"{TOKENS} elements, all there can be"]

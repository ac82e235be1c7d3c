"""Modules that ask for values which training alone decides: seen as if each expert were chosen as often."""

import pytest
import torch
from expert_loops import ASKING, DIM, EXPERTS, TOP, Mixture, Model, Way
from torch import Tensor, nn

from tpplan.core.errors import ModelError
from tpplan.core.graph import AS_IF_EVEN, ModelGraph
from tpplan.trace.retrace_opaque import trace_marking
from tpplan.trace.whole.opaque import Opaques

BATCH, LENGTH = 8, 16
ROWS = BATCH * LENGTH * TOP // EXPERTS


def traced(model: nn.Module, batch: int = BATCH) -> tuple[ModelGraph, Opaques]:
    tokens = torch.zeros(batch, LENGTH, dtype=torch.int64)
    return trace_marking(model.to("meta"), lambda: model, {"tokens": tokens}, loss=lambda y, _: y.sum())


def rows_of_experts(opaques: Opaques) -> list[int]:
    """The rows of each product with an expert's weight in forward."""
    (seen,) = opaques.calls.values()
    products = [op for op in seen.forward if "addmm" in str(op.op)]
    return [op.results[0].shape[0] for op in products]


@pytest.mark.parametrize("way", ASKING)
def test_each_expert_gets_an_even_share(way: Way) -> None:
    graph, opaques = traced(Model(way))
    assert set(opaques.reasons) == {"layers.0.mixture", "layers.1.mixture"}
    assert rows_of_experts(opaques) == [ROWS] * EXPERTS
    assert [answer for _, answer, _ in graph.questions] == [AS_IF_EVEN] * len(graph.questions)
    assert graph.questions
    assert graph.is_uneven


class Experts(Mixture):
    """Experts that are given the experts' numbers, and have no router of their own."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.way(x, weights, chosen, self.experts)


class Apart(nn.Module):
    """A router beside its experts."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS), Experts(way)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.zeros(tokens.numel(), DIM, device=tokens.device)
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return self.experts(x, weights, chosen.to(torch.int64))


@pytest.mark.parametrize("way", ASKING)
def test_numbers_of_experts_may_come_from_another_module(way: Way) -> None:
    _, opaques = traced(Apart(way))
    assert set(opaques.reasons) == {"experts"}
    assert rows_of_experts(opaques) == [ROWS] * EXPERTS


class Picks(nn.Module):
    """A module whose result, or the code around it, depends on what data decides."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        chosen = self.layer(x).argmax(-1).flatten()
        if (chosen == 0).any():
            x = self.layer(x)
        if self.what == "rows":
            return x.flatten(0, 1)[chosen == 0], None
        return x, int((chosen == 0).sum())


class Around(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.embedding, self.picks = nn.Embedding(4, DIM), Picks(what)

    def forward(self, tokens: Tensor) -> Tensor:
        y, number = self.picks(self.embedding(tokens))
        return y.sum() if number is None else y.sum() * float(number)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["rows", "number"])
def test_what_a_guess_decides_does_not_leave_a_module(what: str) -> None:
    """The whole model returns neither the rows nor their number."""
    _, opaques = traced(Around(what))
    assert set(opaques.reasons) == {""}


class Waits(Picks):
    """A loop that the values of activations end, which on a guess would go on for ever."""

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        x.new_zeros(1, 10**6).sub(self.layer.bias[0]).argmax(-1)  # indices of many places do not let it go on longer
        while (x > 0.5).any():
            x = self.layer(x)
        return x, None


def test_a_loop_that_values_end_is_refused() -> None:
    model = Around("")
    model.picks = Waits("")
    with pytest.raises(ModelError, match=r"asks 257 times at .*a loop that values end"):
        traced(model)


class Branches(Picks):
    """One row or all, by a comparison of activations."""

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        y = self.layer(x)
        return (y if (y > 0).any() else y[:1]), None


def test_branches_that_give_other_shapes_are_seen() -> None:
    model = Around("")
    model.picks = Branches("")
    _, opaques = traced(model)
    assert set(opaques.reasons) == {""}


class Refuses(nn.Module):
    """Code that no guess helps: it asks a float."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(torch.zeros(*tokens.shape, DIM, device=tokens.device))
        return x * 2 if float(x.sum()) > 0.5 else x


def test_floats_are_not_guessed() -> None:
    with pytest.raises(ModelError, match="asks a tensor for its values"):
        traced(Refuses())

"""Modules of experts are found by how they are called, and divided only where they compute row by row."""

import re

import pytest
import torch
import torch.nn.functional as F
from moe_models import LENGTH, Experts, OwnMoe, loss, text
from test_expert_parallel import solved
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import UsageError
from tpplan.experts.find_experts import find_experts
from tpplan.experts.row_wise import why_not_row_wise
from tpplan.plan.plan import ExpertCall
from tpplan.trace.trace import trace

CALL = ExpertCall(experts=4, rows="x", index="index", weight="weight")


class OverTokens(Experts):
    """Subtracts the mean over tokens, which a rank with other tokens does not know."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), index, weight)


class Neighbour(Experts):
    """Uses the weights of the next expert too."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, (index + 1) % self.experts, weight)


class Normalizing(Experts):
    """Normalizes the weights of a token's experts, which are on several ranks."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index, weight / weight.sum(1, keepdim=True))


class Residual(Experts):
    """Adds its input, which each of the experts' ranks would."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return x + super().forward(x, index, weight)


class Twice(Experts):
    """Applies the weights twice where there are several experts."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index, weight if index.shape[1] == 1 else weight * weight)


class FixedNumber(Experts):
    """Has the number of experts written down, so that a rank's own cannot replace it."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        chosen = F.one_hot(index, 4).to(x.dtype)
        hidden = F.silu(torch.einsum("td,ehd->teh", x, self.up))
        return torch.einsum("teh,edh,tke,tk->td", hidden, self.down, chosen, weight)


class NoGradient(Experts):
    """Right results, and gradients that stop."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        scale = weight if index.shape[1] > 1 else weight.detach()
        return super().forward(x, index, scale)


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_on_rows_are_row_wise(ep: int) -> None:
    assert why_not_row_wise(Experts(4, 16, 32), CALL, top_k=2, width=16, ep=ep) == ""


@pytest.mark.parametrize("kind", [OverTokens, Neighbour, Normalizing, Residual, Twice, FixedNumber, NoGradient])
def test_what_is_not_row_wise_is_refused(kind: type[Experts]) -> None:
    assert why_not_row_wise(kind(4, 16, 32), CALL, top_k=2, width=16, ep=2)


class Buffered(Experts):
    """Has a buffer with a number for each expert, which is not divided."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("bias", torch.zeros(sizes[0]))


class Dropping(Experts):
    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(super().forward(x, index, weight), 0.1, self.training)


class Keeping(Experts):
    """Copies the number of experts, as which a rank's own would stay."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        self.kept = self.experts
        return super().forward(x, index, weight)


class NeedsRows(Experts):
    """Fails on a rank that gets no rows."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index, weight) + 0 * x.max()


class NeedsEach(Experts):
    """Right only where each of several experts gets a row: it scales by how many do."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        reached = F.one_hot(index.flatten(), self.experts).amax(0) if len(index) else index.new_ones(self.experts)
        return super().forward(x, index, weight * reached.float().mean())


class UndroppedInTraining(Experts):
    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(super().forward(x, index, weight), 0.0, self.training)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Buffered, "it has a buffer, bias"),
        (Dropping, "draws random numbers"),
        (Keeping, r"keeps the number of experts at self\.kept"),
        (NeedsRows, "fails on fewer experts or rows"),
        (NeedsEach, "does not compute row by row"),
    ],
)
def test_what_a_rank_cannot_do_is_named(kind: type[Experts], said: str) -> None:
    assert re.search(said, why_not_row_wise(kind(4, 16, 32), CALL, top_k=2, width=16, ep=2))


def test_dropout_that_drops_nothing_is_fine() -> None:
    assert why_not_row_wise(UndroppedInTraining(4, 16, 32), CALL, top_k=2, width=16, ep=2) == ""


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_any_number_of_experts_a_row(top_k: int) -> None:
    assert why_not_row_wise(Experts(4, 16, 32), CALL, top_k=top_k, width=16, ep=4) == ""


def test_an_uneven_division_is_refused() -> None:
    assert "do not divide among 3" in why_not_row_wise(Experts(4, 16, 32), CALL, top_k=2, width=16, ep=3)


def test_the_check_leaves_the_module_and_random_numbers_as_they_were() -> None:
    module = Experts(4, 16, 32)
    before, state = {name: id(p) for name, p in module.named_parameters()}, torch.get_rng_state()
    assert why_not_row_wise(module, CALL, top_k=2, width=16, ep=2) == ""
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert module.experts == 4


def test_a_module_on_meta_is_checked_in_a_small_copy() -> None:
    with torch.device("meta"):
        module = Experts(8, 4096, 1024)
    call = ExpertCall(experts=8, rows="x", index="index", weight="weight")
    assert why_not_row_wise(module, call, top_k=2, width=4096, ep=4) == ""


def test_modules_of_experts_are_found_by_their_call() -> None:
    with torch.device("meta"):
        model = OwnMoe(experts=4)
    graph = trace(model, {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)})
    assert find_experts(graph) == {f"layers.{i}.experts": CALL for i in range(2)}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


def test_a_model_without_experts_refuses_a_degree() -> None:
    with pytest.raises(UsageError, match="no module is called as experts are"):
        solved(Dense, gpus=2, ep=2, fsdp=2)


class ScaledExperts(Experts):
    """Has a number for each expert, beside matrices."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(sizes[0]))


def test_what_may_be_experts_is_named_with_its_call() -> None:
    class Model(OwnMoe):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.experts = ScaledExperts(4, 16, 32)

    said = (
        r"at least two dims.*layers\.0\.experts\.down is called with x \[12, 16\] of float32, index \[12, 2\] of int64"
    )
    with pytest.raises(UsageError, match=said):
        solved(Model, gpus=2, ep=2, fsdp=2)


class NotRowWise(OwnMoe):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.experts = Residual(4, 16, 32)


def test_a_degree_that_the_code_does_not_allow_names_the_module() -> None:
    with pytest.raises(UsageError, match=r"layers\.0\.experts: .*row by row"):
        solved(NotRowWise, gpus=2, ep=2, fsdp=2)


def test_experts_are_left_whole_where_they_cannot_be_divided() -> None:
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile="h100-sxm")
    plan = tpplan.solve(
        NotRowWise, text, cluster=cluster, global_batch=2, seq_len=LENGTH, loss=loss, fsdp=2, all_gpus=True
    )
    assert plan.experts is None


class Capacity(Experts):
    """Drops the choices of an expert beyond the first ones, of which a rank sees others than one process does."""

    most = 100

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        chosen = F.one_hot(index.flatten(), self.experts)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        return super().forward(x, index, weight * (place <= self.most))


class ManyRows(Experts):
    """Runs other code on many rows."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        y = super().forward(x, index, weight)
        return y if len(y) < 100 else y - y.mean(0)


@pytest.mark.parametrize("kind", [Capacity, ManyRows])
def test_code_that_differs_with_many_rows_alone_is_refused(kind: type[Experts]) -> None:
    assert "does not compute row by row" in why_not_row_wise(kind(4, 16, 32), CALL, top_k=2, width=16, ep=2)

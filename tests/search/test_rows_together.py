"""Which ops pair rows of the batch with each other: contrasts are found, attention and norms of one row are not. Which
losses are sums over rows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from examples import NAMES, eager_to_shard, example
from torch import Tensor, nn

import tpplan
from tpplan.search.models.rows import rows_together
from tpplan.trace.trace import trace

ROWS, LENGTH, DIM, HEADS = 4, 4, 8, 2


class Model(nn.Module):
    """Features [B, T, D] of one and of another kind, and what is made of both."""

    def __init__(self, joined: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.joined = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), joined

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.one(x), self.other(x)).square().mean()


def pooled(joined: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda one, other: joined(F.normalize(one.mean(1), dim=-1), F.normalize(other.mean(1), dim=-1))


def heads(x: Tensor) -> Tensor:
    return x.view(len(x), LENGTH, HEADS, -1).transpose(1, 2)


def count(joined: Callable[[Tensor, Tensor], Tensor]) -> int:
    with torch.device("meta"):
        model = Model(joined)
    return len(rows_together(trace(model, {"x": torch.randn(ROWS, LENGTH, DIM)})).pairs)


@pytest.mark.parametrize(
    "joined",
    [
        pooled(lambda one, other: one @ other.t()),
        pooled(lambda one, _: one @ one.t()),
        pooled(lambda one, other: one[:, None] - other[None]),
        pooled(lambda one, other: torch.einsum("id,jd->ij", one, other)),
        lambda one, other: one.flatten(1) @ other.flatten(1).t(),
        lambda one, other: one.transpose(0, 1) @ other.permute(1, 2, 0),
    ],
)
def test_pairs_of_rows_are_found(joined: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert count(joined) == 1


@pytest.mark.parametrize(
    "joined",
    [
        lambda one, other: one + other,
        lambda one, other: one @ other.transpose(1, 2),
        lambda one, other: (heads(one) @ heads(other).transpose(2, 3)).softmax(-1) @ heads(one),
        lambda one, other: F.scaled_dot_product_attention(heads(one), heads(other), heads(one)),
        lambda one, other: one[:, :, None] - other[:, None],
        lambda one, other: torch.einsum("btd,bsd->bts", one, other),
        lambda one, other: one.flatten(0, 1).t() @ other.flatten(0, 1),
    ],
)
def test_what_stays_within_a_row_or_sums_over_rows_pairs_none(joined: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert count(joined) == 0


@pytest.mark.parametrize("name", NAMES)
def test_plain_models_pair_none_and_average(name: str) -> None:
    model = example(name)
    with torch.device("meta"):
        built = model.build_model()
    found = rows_together(trace(built, model.example_inputs(2, 16), loss=getattr(model, "loss", None)))
    assert not found.pairs
    assert found.sum is None


def labels(outputs: Tensor, inputs: dict[str, Tensor], reduction: str) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), inputs["labels"].flatten(), reduction=reduction)


LOSSES: dict[str, tuple[Callable[[Tensor, dict[str, Tensor]], Tensor], bool]] = {
    "sum": (lambda y, _: y.square().sum(), True),
    "sum of means": (lambda y, _: y.square().mean((1, 2)).sum(), True),
    "mean of sums": (lambda y, _: y.square().sum((1, 2)).mean(), False),
    "sum, scaled": (lambda y, _: -0.5 * y.square().flatten().sum(0) + y.sum(), True),
    "sum of classes": (lambda y, inputs: labels(y, inputs, "sum"), True),
    "sum of errors": (lambda y, inputs: F.mse_loss(y, inputs["x"], reduction="sum"), True),
    "sum over the rows, mean over the rest": (lambda y, _: y.sum(0).square().mean(), False),
    "mean": (lambda y, inputs: labels(y, inputs, "mean"), False),
    "each": (lambda y, inputs: labels(y, inputs, "none").mean(), False),
    "sum by number": (lambda y, _: y.square().sum() / len(y), False),
    "sum by weights": (lambda y, inputs: y.square().sum() / inputs["x"].abs().sum(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_sums_over_rows_are_found(name: str) -> None:
    loss, is_sum = LOSSES[name]
    inputs = {"x": torch.randn(ROWS, LENGTH, DIM), "labels": torch.zeros(ROWS, LENGTH, dtype=torch.long)}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(DIM, DIM))
    step = {"input": inputs["x"]} | inputs
    assert (rows_together(trace(model, step, loss=loss)).sum is not None) is is_sum


@pytest.mark.parametrize(("data_parallel", "is_noted"), [(2, True), (1, False)])
def test_a_note_says_by_how_much_gradients_of_a_sum_are_smaller(data_parallel: int, is_noted: bool) -> None:
    plan = tpplan.solve(
        lambda: nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM)),
        lambda batch, length: {"input": torch.randn(batch, length, DIM)},
        loss=lambda outputs, _: outputs.square().sum(),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=ROWS,
        seq_len=LENGTH,
        precision="fp32",
        fsdp=data_parallel,
        tp=2 // data_parallel,
    )
    said = "the loss is a sum over rows (test_rows_together.py"
    assert any(said in note and note.endswith("one process divided by 2") for note in plan.notes or ()) is is_noted

"""Which ops pair rows of the batch with each other: contrasts are found, attention and norms of one row are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from examples import NAMES, example
from torch import Tensor, nn

from tpplan.search.models.row_pairs import pairing_ops
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
    return len(pairing_ops(trace(model, {"x": torch.randn(ROWS, LENGTH, DIM)})))


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
def test_plain_models_pair_none(name: str) -> None:
    model = example(name)
    with torch.device("meta"):
        built = model.build_model()
    assert not pairing_ops(trace(built, model.example_inputs(2, 16), loss=getattr(model, "loss", None)))

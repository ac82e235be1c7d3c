"""Heads in the dims of weights: each number is one that the model was built with."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpplan.layouts.fused.heads import heads_of_parameters
from tpplan.trace.trace import trace

BATCH, LENGTH, HEADS, GROUPS, SIZE = 3, 8, 6, 2, 4
DIM, HIDDEN = HEADS * SIZE, 40


class Attention(nn.Module):
    """Queries of HEADS heads, keys and values of GROUPS, by one or by three projections; a bias for each head."""

    def __init__(self, *, is_fused: bool, is_eager: bool) -> None:
        super().__init__()
        self.is_fused, self.is_eager = is_fused, is_eager
        self.sizes = (DIM, GROUPS * SIZE, GROUPS * SIZE)
        self.into = nn.ModuleList([nn.Linear(DIM, n) for n in ([sum(self.sizes)] if is_fused else self.sizes)])
        self.bias = nn.Embedding(LENGTH, HEADS)
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into[0](x).split(self.sizes, -1) if self.is_fused else [own(x) for own in self.into]
        q, k, v = (own.view(BATCH, LENGTH, -1, SIZE).transpose(1, 2) for own in parts)
        k, v = (
            own[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1).reshape(BATCH, HEADS, LENGTH, SIZE)
            for own in (k, v)
        )
        bias = self.bias(torch.arange(LENGTH, device=x.device)[None].expand(LENGTH, -1)).permute(2, 0, 1)[None]
        if self.is_eager:
            mixed = F.softmax(q @ k.transpose(2, 3) + bias, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, DIM))
        return (x + y + self.down(F.relu(self.up(y)))).sum()


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_heads_are_those_of_the_model(is_fused: bool, is_eager: bool) -> None:
    """The MLP's weights, and those that read a whole input, have no heads."""
    with torch.device("meta"):
        model, x = Attention(is_fused=is_fused, is_eager=is_eager), torch.empty(BATCH, LENGTH, DIM)
    own: dict[str, dict[int, tuple[int, ...]]] = {
        "into.0.weight": {0: (HEADS, GROUPS, GROUPS)} if is_fused else {0: (HEADS,)}
    }
    if not is_fused:
        own |= {"into.1.weight": {0: (GROUPS,)}, "into.2.weight": {0: (GROUPS,)}}
    expected = own | {"out.weight": {1: (HEADS,)}, "bias.weight": {1: (HEADS,)}}
    found = heads_of_parameters(trace(model, {"x": x}))
    assert {name: dims for name, dims in found.items() if name.endswith("weight")} == expected


class Stacked(nn.Module):
    """torch's own attention: one weight of three parts, and a dim of batch and heads as one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].sum()


def test_heads_of_torch_s_own_attention() -> None:
    with torch.device("meta"):
        model, x = Stacked(), torch.empty(BATCH, LENGTH, DIM)
    found = heads_of_parameters(trace(model, {"x": x}))
    assert found["attention.in_proj_weight"] == {0: (HEADS,) * 3}
    assert found["attention.out_proj.weight"] == {1: (HEADS,)}


def test_a_softmax_over_experts_or_classes_shows_no_heads() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Softmax(dim=-1)), torch.empty(BATCH, LENGTH, DIM)
    assert heads_of_parameters(trace(model, {"input": x})) == {}

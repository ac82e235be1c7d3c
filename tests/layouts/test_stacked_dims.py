"""Stacked dims of attention whose weights are parts of one: the batch and heads that a view joins."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpplan.core.graph import Op
from tpplan.core.layout import S
from tpplan.layouts.fused.stacked_dims import stacked_dims
from tpplan.layouts.rules import call_strategies
from tpplan.layouts.rules.views import Stride, regrouped
from tpplan.trace.trace import trace

LENGTH, BATCH, HEADS, SIZE = 5, 3, 4, 2
DIM = HEADS * SIZE


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        query, _, value = (F.linear(x, part) for part in self.weight.chunk(3))
        query, value = (y.view(LENGTH, BATCH * HEADS, SIZE).transpose(0, 1) for y in (query, value))
        return (query @ value.transpose(1, 2)).sum()


def test_parts_of_a_weight_make_stacked_dims() -> None:
    with torch.device("meta"):
        model, x = Packed(), torch.empty(LENGTH, BATCH, DIM)
    graph = trace(model, {"x": x})
    found = stacked_dims(graph, lambda call: call_strategies(call, 1))
    named = {node.target: found.get(node.results[0]) for node in graph.nodes if isinstance(node, Op)}
    heads = (HEADS,) * BATCH
    assert named["aten.view.default"] == {S(1, *heads)}
    assert named["aten.transpose.int"] == {S(0, *heads)}
    assert named["aten.matmul.default"] == {S(0, *heads)}
    assert named["aten.linear.default"] is None  # a slice of it is a plain one


def test_shards_of_as_many_parts_as_tokens_are_not_written_down() -> None:
    """Rows of 8 tokens each of 2**40 sequences: a shard inside of rows has a part for each sequence."""
    found = list(regrouped((2**40, 8), (2**42, 2)))
    assert found == [(Stride(1, 1, 8), Stride(0, 2**40, 4)), (Stride(1, 4, 2), Stride(1, 1, 2))]
    assert not found[0][1].is_among({(4, 4)})
    assert found[1][0].is_among({(2, 2, 2, 2)})
    assert found[1][0].layout == S(1, 2, 2, 2, 2)

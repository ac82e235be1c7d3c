"""What of an op's bytes is left when a compiler fuses it with its neighbours, counted by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpplan.core.graph import ModelGraph
from tpplan.costs.fusion import moved_shares
from tpplan.trace.trace import trace


class Layer(nn.Module):
    """x [B, D] -> [B, D]: three elementwise ops, of which one kernel is made, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(x).tanh() * x)


class Layers(nn.Module):
    """x [B, D] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8, bias=False), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x.cos().sum()


def shares() -> tuple[ModelGraph, dict[str, float]]:
    with torch.device("meta"):
        graph = trace(Layers(), {"x": torch.empty(4, 8)})
    return graph, moved_shares(graph)


def test_a_kernel_reads_what_enters_it_and_writes_what_leaves_it() -> None:
    graph, found = shares()
    layer = [found[op.name] for op in graph.ops if op.module.startswith("layers.1")]
    # gelu reads x and writes nothing, tanh moves nothing, the product of both reads x and is written; then the matmul.
    assert layer == [1 / 2, 0, 2 / 3, 1]


def test_a_layers_border_ends_a_kernel() -> None:
    graph, found = shares()
    sin = next(op for op in graph.ops if op.target.startswith("aten.sin"))
    # Without a border between them it would be fused with the first layer's gelu and product, and write nothing.
    assert found[sin.name] == 1


def test_what_stands_after_a_product_is_another_kernel() -> None:
    graph, found = shares()
    cos, total = (op for op in graph.ops if op.target.startswith(("aten.cos", "aten.sum")))
    assert (found[cos.name], found[total.name]) == (1 / 2, 4 / (4 * 8 * 4 + 4))


class Turns(nn.Module):
    """x [B, D] -> [B, D], pairs as complex numbers: elementwise ops on both sides of a product of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex((x * self.weight).sin().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * pairs).flatten(1).cos().sum()


def test_complex_numbers_are_not_fused() -> None:
    with torch.device("meta"):
        graph = trace(Turns(), {"x": torch.empty(4, 8)})
    found = moved_shares(graph)
    sin, product, cos = (
        found[next(op.name for op in ops)]
        for ops in (
            [op for op in graph.ops if op.target.startswith("aten.sin")],
            [op for op in graph.ops if graph.values[op.results[0]].dtype == "complex64" and "mul" in op.target],
            [op for op in graph.ops if op.target.startswith("aten.cos")],
        )
    )
    # sin reads what its kernel made and writes for the product, which reads and writes all; cos reads that.
    assert (sin, product, cos) == (1 / 2, 1, 1 / 2)

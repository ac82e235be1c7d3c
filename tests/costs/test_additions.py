"""Gradients that are added up, against those that autograd is seen to add."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.core.layout import R
from tpplan.costs.gradient_sums import MOVED, additions, moved_bytes
from tpplan.layouts.build_space import build_space
from tpplan.trace.trace import trace


class Uses(nn.Module):
    """x [B, D] -> a scalar: a value with three uses, one of which leads nowhere, and a weight with two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = h + self.second(self.norm(h)) * h.sigmoid()
        nowhere = h.argmax(-1)
        z = torch.nn.functional.linear(y, self.second.weight)
        return (z * z).sum() + nowhere.sum()


class Adds(TorchDispatchMode):
    """Bytes of the gradients that were added to others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(("aten.add.Tensor", "aten.add_.Tensor")):
            self.num_bytes += result.numel() * result.element_size()
        return result


def test_as_many_bytes_are_added_as_autograd_adds() -> None:
    model, x = Uses(), torch.randn(4, 8)
    loss = model(x)
    with Adds() as adds:
        loss.backward()
    with torch.device("meta"):
        graph = trace(Uses(), {"x": torch.empty(4, 8)})
    space = build_space(graph, 1)
    found = 0.0
    for name, counts in additions(space).items():
        decider = space.deciders[name]
        results = (decider.source.result,) if not hasattr(decider, "results") else decider.results
        for count, result in zip(counts, results, strict=True):
            found += count * len(space.members[name]) * moved_bytes(graph.values[result], R, 1)
    assert found == MOVED * adds.num_bytes > 0

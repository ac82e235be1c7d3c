"""Calls of recomputed modules in a traced graph."""

import torch
from torch import Tensor, nn

from tpplan.costs.prediction.activation_lifetimes import calls_of
from tpplan.plan.plan import Recompute
from tpplan.trace.trace import trace


class Model(nn.Module):
    """One layer that runs twice, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(x)).sum()


def test_each_call_is_a_run_and_a_module_that_does_not_run_has_none() -> None:
    graph = trace(Model(), {"x": torch.randn(2, 4)})
    runs = list(calls_of(graph, dict.fromkeys(("idle", "twice"), Recompute.FULL)))
    assert [run.module for run in runs] == ["twice", "twice"]
    assert runs[0].positions.stop == runs[1].positions.start

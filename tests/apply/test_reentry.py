"""A model's own reentrant checkpoints under FSDP2, on real ranks against one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from one_process import assert_same, gradients
from plans import handmade_plan
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tpplan.apply.apply import apply_plan
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Recompute

DIM, MESH = 8, Mesh(shard=2)
reentrant = functools.partial(checkpoint, use_reentrant=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + reentrant(self.inner, x)


class Twice(nn.Module):
    """x [B, D] -> a loss. The first of two layers runs twice; what is checkpointed checkpoints, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in (0, 1, 0):
            x = reentrant(self.layers[i], x)
        return self.head(x).square().mean()


class Listed(Twice):
    """What a reentrant checkpoint returns in a list has no gradient, and without one nothing inside has."""

    def forward(self, x: Tensor) -> Tensor:
        without = reentrant(self.layers[1], x)
        y = self.first(x)
        y, aside = reentrant(lambda given: (self.layers[0](given), [self.layers[1](given)]), y)
        return self.head(y + aside[0] + without).square().mean()


def same_gradients(build: type[nn.Module], recomputed: Recompute | None) -> None:
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    reference, model = models
    recompute = {"layers.0": recomputed, "layers.1": recomputed} if recomputed is not None else {}
    apply_plan(model, handmade_plan(model, MESH, units=("layers.0", "layers.1"), recompute=recompute))
    torch_own = CheckpointFunction.apply
    for _ in range(2):
        for each in models:
            each.zero_grad()
            each(x).backward()
        assert_same(gradients(model), gradients(reference))
    assert CheckpointFunction.apply == torch_own


@pytest.mark.parametrize(("build", "recomputed"), [(Twice, None), (Twice, Recompute.FULL), (Listed, None)])
def test_reentrant_checkpoints_under_fsdp_give_the_gradients_of_one_process(
    build: type[nn.Module], recomputed: Recompute | None
) -> None:
    run_ranks(2, same_gradients, build, recomputed)

"""Experts are divided only where other code sees nothing of them but what they return."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from moe_models import Experts, Layer, OwnMoe
from test_expert_parallel import assert_as_one_process, solved
from torch import Tensor, nn

from tpplan.core.errors import UsageError


def with_experts(kind: type[Experts]) -> type[Layer]:
    class Own(Layer):
        def __init__(self, experts: int, dim: int) -> None:
            super().__init__(experts, dim)
            self.experts = kind(experts, dim, 2 * dim)

    return Own


class Keeping(Experts):
    """Keeps how much each expert was weighted."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        self.load = torch.einsum("tke,tk->e", F.one_hot(index, self.experts).to(x.dtype), weight)
        return super().forward(x, index, weight)


class Writing(Experts):
    """Writes to the index, with which its caller goes on."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index.add_(1).remainder_(self.experts), weight)


class Reaching(Experts):
    """Reads what its caller has left on it."""

    scale: Tensor

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index, weight) * self.scale


class Scoring(Layer):
    """Scores experts by their own weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight, index = F.linear(rows, self.experts.down.mean(-1)).softmax(-1).topk(2)
        return x + self.experts(rows, index, weight).view_as(x)


class Scaling(with_experts(Reaching)):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        self.experts.scale = x.mean()
        return super().forward(x)


def model_of(layer: type[Layer], extra: Callable[[nn.Module], Tensor] | None = None) -> Callable[[], nn.Module]:
    class Model(OwnMoe):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(4, 16) for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            y = super().forward(input_ids)
            return y if extra is None else y + sum(extra(own.experts) for own in self.layers)

    return Model


OPEN = {
    "scored by their weights": (model_of(Scoring), r"layers\.0\.experts\.down is read outside .*test_closed_module.py"),
    "a penalty": (model_of(Layer, lambda own: own.up.square().mean()), r"layers\.0\.experts\.up is read outside"),
    "a load": (model_of(with_experts(Keeping), lambda own: own.load.square().mean()), "does not return that"),
    "a load left behind": (model_of(with_experts(Keeping)), r"left at layers\.0\.experts\.load .* detach it"),
    "an index written to": (model_of(with_experts(Writing)), "writes to a tensor that it is given"),
    "a scale left for it": (model_of(Scaling), "reads a tensor that it is not called with"),
}


@pytest.mark.parametrize("name", OPEN)
def test_experts_that_other_code_sees_are_refused_by_the_line(name: str) -> None:
    build, said = OPEN[name]
    with pytest.raises(UsageError) as caught:
        solved(build, gpus=2, ep=2, fsdp=2)
    assert re.search(said, str(caught.value))


def test_they_stay_whole_where_nobody_asks_for_a_division() -> None:
    build, _ = OPEN["scored by their weights"]
    plan = solved(build, gpus=2, ep=None, fsdp=2)
    assert plan.experts is None
    assert_as_one_process(build, plan)

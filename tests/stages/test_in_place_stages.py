"""Models whose code writes to tensors in place, where stages meet: on what a stub gives, and on what is received."""

from typing import Any

import pytest
import torch
from stage_models import WIDTH, Layer, Stack
from stage_runs import assert_solved_as_one_process
from torch import Tensor, nn

from tpplan.plan.pipeline_plan import Schedule
from tpplan.torch_internals.tensors import until_written


class Scaling(Stack):
    """A model whose root scales the embedding in place: in later stages, what its stub gives."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x *= WIDTH**0.5
        x[:, 0] += 1.0
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Masking(Stack):
    """A model whose root writes to what each layer gives: a stage to what it received."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, padding = self.embedding(tokens), (tokens == 5).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x).masked_fill_(padding, 0.0)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Shifting(Stack):
    """A model whose root adds a weight of its own to what each layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x += self.shifts[index]
        logits: Tensor = self.head(self.norm(x))
        return logits


class Writing(Layer):
    """A layer that begins with a write to what it is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(0.9), mask)


class Halving(Stack):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing() for _ in range(4))


@pytest.mark.parametrize("build", [Scaling, Masking, Halving])
@pytest.mark.parametrize("how", [{"stages": 2, "gpus": 2, "virtual": 2}, {"stages": 2, "gpus": 4, "tp": 2}], ids=str)
def test_writes_where_stages_meet(build: Any, how: dict[str, Any]) -> None:
    assert_solved_as_one_process(build, **how)


def test_a_weight_that_is_added_in_place() -> None:
    assert_solved_as_one_process(Shifting, stages=2, gpus=2)


def test_writes_under_a_schedule_that_defers_gradients() -> None:
    assert_solved_as_one_process(Halving, stages=2, gpus=2, schedule=Schedule.ZERO_BUBBLE)


def test_memory_comes_with_the_first_write() -> None:
    shared = until_written(torch.zeros(()).expand(2, 3))
    made = shared * 2.0 + shared.transpose(0, 1).reshape(2, 3)
    assert shared.untyped_storage().nbytes() == 4
    assert type(made) is Tensor
    shared += torch.ones(3)
    assert shared.untyped_storage().nbytes() == 6 * 4
    with pytest.raises(RuntimeError, match="size of tensor"):
        shared += torch.ones(4)

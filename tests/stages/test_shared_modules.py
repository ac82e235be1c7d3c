"""Modules that layers of several stages share: each stage has its own, with equal weights, and runs its own calls."""

from typing import Any

import pytest
import torch
from stage_models import WIDTH, Layer, Stack
from stage_runs import assert_solved_as_one_process
from torch import Tensor, nn


class OneNorm(Stack):
    """A model whose layers have one norm, which is the root's last one too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.norm


class OneUp(Stack):
    """A model whose layers have one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.up = self.layers[0].up


class Angles(nn.Module):
    """Cosines of angles by position, as of rotary embeddings; without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return torch.outer(positions, self.frequencies.to(x.device)).cos()


class TwoAngles(nn.Module):
    """Cosines of angles of two kinds, near and far, each with frequencies of its own; without weights."""

    def __init__(self) -> None:
        super().__init__()
        for kind, base in (("near", 10.0), ("far", 100.0)):
            self.register_buffer(kind, base ** -torch.arange(WIDTH), persistent=False)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return torch.outer(positions, getattr(self, kind).to(x.device)).cos()


class Kinds(Stack):
    """A model whose root makes both tables, of which a layer is given one: the last layer alone the far one."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = TwoAngles()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        tables = {kind: self.angles(x, kind) for kind in ("near", "far")}
        for index, layer in enumerate(self.layers):
            x = layer(x * tables["far" if index == 3 else "near"])
        logits: Tensor = self.head(self.norm(x))
        return logits


class LearnedAngles(nn.Module):
    """Cosines of angles by position, of a learned frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.outer(torch.arange(x.shape[1], device=x.device), self.frequencies).cos()


class Turned(Layer):
    """A layer that multiplies what it is given with what a shared module gives."""

    def __init__(self, angles: nn.Module) -> None:
        super().__init__()
        self.angles = angles

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x * self.angles(x), mask)


class Turning(Stack):
    """A model whose layers share a module without weights."""

    def __init__(self, angles: type[nn.Module] = Angles) -> None:
        super().__init__()
        own = angles()
        self.layers = nn.ModuleList(Turned(own) for _ in range(4))


class OfTheRoot(Turning):
    """A model whose root has that module too, under a name before the layers'."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.layers
        del self.layers
        self.angles, self.layers = layers[0].angles, layers


def learned() -> nn.Module:
    """A model whose layers share a module with a weight."""
    return Turning(LearnedAngles)


def activated() -> nn.Module:
    """A model whose layers share an activation."""
    return Turning(nn.Tanh)


@pytest.mark.parametrize("build", [OneNorm, OneUp, learned])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}], ids=str)
def test_a_shared_weight_gets_the_gradients_of_all_stages(build: Any, degrees: dict[str, Any]) -> None:
    assert_solved_as_one_process(build, stages=2, gpus=4 if degrees else 2, **degrees)


@pytest.mark.parametrize("build", [Turning, OfTheRoot, activated])
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_layer_ends_where_it_gives_its_output(build: Any, virtual: int) -> None:
    """Not where another layer calls what it shares with it."""
    assert_solved_as_one_process(build, stages=2, gpus=2, virtual=virtual)


@pytest.mark.parametrize("how", [{}, {"virtual": 2}], ids=str)
def test_a_table_that_no_layer_of_a_stage_reads(how: dict[str, Any]) -> None:
    assert_solved_as_one_process(Kinds, stages=2, gpus=2, **how)

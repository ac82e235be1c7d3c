"""A model without some of its like layers has the graph that is said of it, and what needs all of them is compared
whole."""

from collections.abc import Callable, Hashable

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from torch import Tensor, nn

from tpplan.core.graph import ModelGraph
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.plan.plan import OtherShapes, Plan
from tpplan.prove import structure
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.fewer_layers import FewerLayers
from tpplan.search import other_shapes
from tpplan.trace.trace import trace

DIM, HIDDEN, HEADS, BATCH, LENGTH = 32, 64, 4, 4, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, DIM // HEADS).transpose(1, 2) for part in self.qkv(x).split(DIM, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.gelu(self.up(x)))


class Short(nn.Module):
    """A layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Chain(nn.Module):
    """x [B, T, D] -> a loss, through layers one after the other."""

    def __init__(self, kinds: str = "LLLLL") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() if kind == "L" else Short() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


class Average(Chain):
    """The layers' outputs are averaged: with fewer layers other values are summed."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x := self.first(x)]
        for layer in self.layers:
            found.append(x := layer(x))
        return self.last(torch.stack(found).mean(0)).square().mean()


class Numbered(Chain):
    """The number of layers is a number of the code."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(5):
            x = self.layers[i](x)
        return self.last(x).square().mean()


class Tied(Chain):
    """All layers have one weight in common."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.up.weight = self.layers[0].up.weight


class Penalized(Chain):
    """The loss has a penalty on the layers' weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.up.weight.square().mean() for layer in self.layers)


class Lending(Chain):
    """A layer computes with a weight of another, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) + F.linear(x, self.layers[3].out.weight)
        return self.last(x).square().mean()


def vectors(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq_len, DIM)}


def traced(model: nn.Module) -> ModelGraph:
    return trace(model, vectors(BATCH, LENGTH))


def alike(name: str) -> Hashable:
    return None


@pytest.mark.parametrize(("kinds", "kept"), [("LLLLL", "LL"), ("LLSSSL", "LLSS"), ("SLSLSL", "SLSL")])
def test_a_graph_without_layers_is_that_of_a_model_without_them(kinds: str, kept: str) -> None:
    graph, wanted = traced(Chain(kinds)), traced(Chain(kept))
    fewer = FewerLayers.of(graph, alike)
    assert len(fewer.standing) == len(kinds) - len(kept)
    assert graph_fingerprint(fewer.graph(graph)) == graph_fingerprint(wanted)


@pytest.mark.parametrize("make", [Chain, Average, Numbered])
def test_the_model_holds_its_layers_again(make: Callable[[], nn.Module]) -> None:
    model = make()
    before, fewer = [name for name, _ in model.named_modules()], FewerLayers.of(traced(model), alike)
    with fewer.left_out(model):
        assert [name for name, _ in model.get_submodule("layers").named_children()] == ["0", "1"]
    assert [name for name, _ in model.named_modules()] == before


def test_layers_that_a_plan_treats_otherwise_stay() -> None:
    graph = traced(Chain())
    assert set(FewerLayers.of(graph, lambda name: name in ("layers.3", "layers.4")).standing) == {"layers.2"}


@pytest.mark.parametrize("make", [Tied, Penalized, Lending])
def test_layers_whose_weights_others_read_all_stay(make: Callable[[], nn.Module]) -> None:
    assert not FewerLayers.of(traced(make()), alike).standing


def solved(make: Callable[[], nn.Module]) -> Plan:
    return solve_eagerly(make, vectors, batch=BATCH, seq_len=LENGTH)


def shapes_proven(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> tuple[OtherShapes, list[int]]:
    """The other shapes of a model's plan, and the number of layers of each applied model that was
    compared there."""
    compared: list[int] = []
    compare = structure.find_difference

    def counted(original: structure.Original, plan: Plan) -> Counterexample | None:
        with original.fewer.left_out(original.model):
            compared.append(sum(isinstance(module, Layer) for module in original.model.modules()))
        return compare(original, plan)

    monkeypatch.setattr(other_shapes, "find_difference", counted)
    plan = solved(make)
    assert plan.mesh.tp == 2
    assert plan.proof.other_shapes is not None
    return plan.proof.other_shapes, compared


def whole_only(graph: ModelGraph, digest: object) -> FewerLayers:
    return FewerLayers()


@pytest.mark.parametrize(("make", "compared"), [(Chain, [2]), (Average, [2, 5]), (Numbered, [2, 5]), (Penalized, [5])])
def test_what_needs_all_layers_is_compared_whole(
    make: Callable[[], nn.Module], compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shapes that are proven are those that comparing all layers proves."""
    found, counts = shapes_proven(make, monkeypatch)
    assert counts == compared
    assert found.batch.multiple
    assert found.length.multiple
    monkeypatch.setattr(FewerLayers, "of", whole_only)
    assert shapes_proven(make, monkeypatch)[0] == found

"""Layers that look alike and are not: what their code reads past their attributes decides what they do. Each model is
planned, and equal to one process; a trace that lets the first layer stand for the others is wrong without a word."""

import contextvars
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from test_traps import HIDDEN, MLP, PLAIN, ROWS, Named, Stack, step
from torch import Tensor, nn

import tpplan
from tpplan.core.graph import ModelGraph
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.trace.trace import trace

NUM_LAYERS = 3
#: by layer: does it take the softmax of what the ranks may have slices of?
WHOLE = (False, True, False)


def act(h: Tensor, is_whole: bool) -> Tensor:
    """Something that may run on slices of the hidden dim, or something that may not."""
    return h.softmax(-1) if is_whole else F.relu(h)


@dataclass
class Choices:
    """An object that is asked what to do, and counts."""

    asked: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def next(self) -> bool:
        self.asked += 1
        return WHOLE[(self.asked - 1) % NUM_LAYERS]


class Residual(MLP):
    """A layer that leaves nothing on itself."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x), *rest))


class Chain(Stack):
    """Layers one after the other; `extra` gives what each is passed beside x."""

    layer: type[nn.Module] = Residual

    def __init__(self) -> None:
        super().__init__(self.layer)

    def extra(self) -> object:
        return ()

    def forward(self, x: Tensor) -> Tensor:
        given = self.extra()
        for layer in self.layers:
            x = layer(x, *given)  # type: ignore[misc]
        return x.square().mean()


class _Object(Residual):
    def between(self, h: Tensor, *rest: Choices) -> Tensor:  # type: ignore[override]
        return act(h, rest[0].next())


class ObjectGiven(Chain):
    layer = _Object

    def extra(self) -> object:
        return (Choices(),)


class _Iterator(Residual):
    def forward(self, x: Tensor, *, choices: Iterator[bool]) -> Tensor:  # type: ignore[override]
        return x + self.down(act(self.up(x), next(choices)))


class IteratorGiven(Chain):
    layer = _Iterator

    def forward(self, x: Tensor) -> Tensor:
        choices = iter(WHOLE)
        for layer in self.layers:
            x = layer(x, choices=choices)
        return x.square().mean()


class _Holding(Residual):
    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return act(h, self.choices.next())


class ObjectShared(Chain):
    layer = _Holding

    def __init__(self) -> None:
        super().__init__()
        shared = Choices()
        for layer in self.layers:
            layer.choices = shared  # type: ignore[assignment]


class _Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, h: Tensor) -> Tensor:
        return act(h, WHOLE[next(self.calls) % NUM_LAYERS])


class _WithModule(Residual):
    shared: nn.Module

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return self.shared(h)


class ModuleShared(Chain):
    layer = _WithModule

    def __init__(self) -> None:
        super().__init__()
        shared = _Switch()
        for layer in self.layers:
            layer.shared = shared


class _WithFunction(Residual):
    function: Callable[[Tensor], Tensor]

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return self.function(h)


class Closure(Chain):
    layer = _WithFunction

    def __init__(self) -> None:
        super().__init__()
        number = 0

        def choose(h: Tensor) -> Tensor:
            nonlocal number
            number += 1
            return act(h, WHOLE[(number - 1) % NUM_LAYERS])

        for layer in self.layers:
            layer.function = choose  # type: ignore[assignment]


QUEUE: list[bool] = []


class _OfQueue(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return act(h, QUEUE.pop(0))


class ListOfTheFile(Chain):
    layer = _OfQueue

    def extra(self) -> object:
        QUEUE[:] = WHOLE
        return ()


REGISTRY: dict[int, bool] = {}


class _ByIdentity(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return act(h, REGISTRY[id(self)])


class TableByIdentity(Chain):
    layer = _ByIdentity

    def extra(self) -> object:
        REGISTRY.update({id(layer): is_whole for layer, is_whole in zip(self.layers, WHOLE, strict=True)})
        return ()


class _CountingClass(Residual):
    calls = 0

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        _CountingClass.calls += 1
        return act(h, WHOLE[(_CountingClass.calls - 1) % NUM_LAYERS])


class ClassAttribute(Chain):
    layer = _CountingClass

    def extra(self) -> object:
        _CountingClass.calls = 0
        return ()


class _MutableDefault(Residual):
    def between(self, h: Tensor, *rest: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(0)
        return act(h, WHOLE[(len(seen) - 1) % NUM_LAYERS])


class MutableDefault(Chain):
    layer = _MutableDefault


_LAYER = contextvars.ContextVar("_LAYER", default=0)


class _OfContext(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return act(h, WHOLE[_LAYER.get()])


class ContextVariable(Chain):
    layer = _OfContext

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            _LAYER.set(i)
            x = layer(x)
        return x.square().mean()


class _OfEnvironment(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        number = int(os.environ["TEST_ALIKE"])
        os.environ["TEST_ALIKE"] = str(number + 1)
        return act(h, WHOLE[number])


class EnvironmentVariable(Chain):
    layer = _OfEnvironment

    def extra(self) -> object:
        os.environ["TEST_ALIKE"] = "0"
        return ()


class _OfGenerator(Residual):
    def between(self, h: Tensor, *rest: Iterator[bool]) -> Tensor:  # type: ignore[override]
        return act(h, next(rest[0]))


class GeneratorGiven(Chain):
    layer = _OfGenerator

    def extra(self) -> object:
        return ((is_whole for is_whole in WHOLE),)


class _OfFunctionAttribute(Residual):
    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        act.number = getattr(act, "number", -1) + 1  # type: ignore[attr-defined]
        return act(h, WHOLE[act.number % NUM_LAYERS])  # type: ignore[attr-defined]


class FunctionAttribute(Chain):
    layer = _OfFunctionAttribute

    def extra(self) -> object:
        act.number = -1  # type: ignore[attr-defined]
        return ()


class _Scaling(torch.autograd.Function):
    """A function with a backward of its own that asks an object what to do."""

    @staticmethod
    def forward(ctx: object, h: Tensor, choices: Choices) -> Tensor:
        return h - h.mean(-1, keepdim=True) if choices.next() else h * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _WithOwnBackward(Residual):
    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return F.relu(_Scaling.apply(h, self.choices))


class OwnBackward(ObjectShared):
    layer = _WithOwnBackward


class _ByPartial(Residual):
    function: Callable[[Tensor], Tensor]

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return self.function(h)


class PartialShared(Chain):
    layer = _ByPartial

    def __init__(self) -> None:
        super().__init__()
        choices = Choices()
        choose = functools.partial(lambda choices, h: act(h, choices.next()), choices)
        for layer in self.layers:
            layer.function = choose  # type: ignore[assignment]


class _ByAnotherModule(Residual):
    """Reads what the root keeps for it outside its modules."""

    root: list[nn.Module]

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        number = next(i for i, layer in enumerate(self.root[0].layers) if layer is self)  # type: ignore[arg-type]
        return act(h, WHOLE[number])


class KnowsItsPlace(Chain):
    layer = _ByAnotherModule

    def __init__(self) -> None:
        super().__init__()
        root: list[nn.Module] = [self]
        for layer in self.layers:
            layer.root = root  # type: ignore[assignment]


class _OtherDims(Residual):
    """The same op along another dim."""

    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        return h.softmax(-1 if self.choices.next() else 0)


class OtherLiteral(ObjectShared):
    layer = _OtherDims


class _OtherOrder(Residual):
    """The same ops in another order, on values of one shape."""

    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        first = F.relu(h)
        second = h * 2
        return (first if self.choices.next() else second).exp().log() + 0 * second


class OtherOperand(ObjectShared):
    layer = _OtherOrder


class _Leaving(Residual):
    """What it leaves behind is not on itself."""

    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        h = F.relu(h)
        self.choices.kept.append(h.square().mean(0))
        return h


class TensorsLeftInAnObject(ObjectShared):
    layer = _Leaving

    def forward(self, x: Tensor) -> Tensor:
        choices = self.layers[0].choices
        choices.kept.clear()
        loss = super().forward(x)
        return loss + sum((i + 1) * h.softmax(-1).square().sum() for i, h in enumerate(choices.kept))


class _LeavingLast(Residual):
    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        h = F.relu(h)
        self.choices.kept = [h]
        return h


class LastTensorLeft(ObjectShared):
    layer = _LeavingLast

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].choices.kept[0].softmax(-1).square().mean()


class _ReadingWhatWasLeft(Residual):
    """Each layer but the first reads what the one before it left in an object."""

    choices: Choices

    def between(self, h: Tensor, *rest: Tensor) -> Tensor:
        kept = self.choices.kept
        h = F.relu(h) + (kept.pop().softmax(-1) if kept else 0)
        kept.append(h)
        return h


class TensorsHandedOn(ObjectShared):
    layer = _ReadingWhatWasLeft

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].choices.kept.clear()
        return super().forward(x)


class _WritesToItsInput(Residual):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x.view(-1).mul_(2.0)
        return x + self.down(self.up(x))


class WritesToItsInput(Chain):
    layer = _WritesToItsInput


class _ReturnsView(Residual):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(0).expand(2, *x.shape)).sum(0).view(-1).view_as(x)


class ReturnsView(Chain):
    layer = _ReturnsView


class _WritesToTheSecond(Residual):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        h = self.up(other.view_as(other))
        other.view(-1).mul_(2.0)
        return x.view_as(x) + self.down(h)


class OneTensorTwice(Chain):
    """The first layer is given a tensor and a view of it, the others are given two tensors."""

    layer = _WritesToTheSecond

    def forward(self, x: Tensor) -> Tensor:
        h, other = x * 1.0, x * 1.0
        for place, layer in enumerate(self.layers):
            h = layer(h, other * 1.0 if place else h.view(-1).view_as(h))
        return h.square().mean()


class _Scaled(Residual):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.down(F.relu(self.up(x)) * scale)


class OneWeightEach(Chain):
    """Each layer is given a weight of its own that the model holds, the last one the first's."""

    layer = _Scaled

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(HIDDEN) for _ in range(NUM_LAYERS - 1))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x, self.scales[place % len(self.scales)])
        return x.square().mean()


class OneTableEach(Chain):
    """Each layer is given one of two tables of the model."""

    layer = _Scaled

    def __init__(self) -> None:
        super().__init__()
        for place in range(2):
            self.register_buffer(f"table_{place}", torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x, self.table_0 if place % 2 else self.table_1)
        return x.square().mean()


class ForwardsAlone(Chain):
    """The forward of each layer but the first is called past the layer's own call, and then the layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer.forward(x) if place else layer(x)  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _ReturnsItsInput(Residual):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), other


class ReturnsItsInput(Chain):
    layer = _ReturnsItsInput

    def forward(self, x: Tensor) -> Tensor:
        other = x * 2.0
        for layer in self.layers:
            x, other = layer(x, other)
        return (x * other).square().mean()


class _ReadsAsThePair(Residual):
    def forward(self, x: Tensor, pair: list[Tensor], *, names: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x + pair[0]) * names["scale"]


class _Adds(Residual):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        h = super().forward(x)
        total.add_(h)
        return h


class WritesWithGradient(Chain):
    """Each layer writes to a tensor of its own, which then carries a gradient, and which the model reads."""

    layer = _Adds

    def forward(self, x: Tensor) -> Tensor:
        totals = [torch.zeros_like(x) for _ in self.layers]
        for layer, total in zip(self.layers, totals, strict=True):
            x = layer(x, total)
        return (x * sum(totals)).square().mean()


class ContainersGiven(Chain):
    """Layers are given a list and a dict; the second layer one tensor in both."""

    layer = _ReadsAsThePair

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            one, other = x * 1.0, x * 0.5
            x = layer(x, [one], names={"scale": one if place == 1 else other})
        return x.square().mean()


#: models whose second layer cannot do on slices what the others can
MODELS = [
    ObjectGiven, IteratorGiven, ObjectShared, ModuleShared, Closure, ListOfTheFile, TableByIdentity, ClassAttribute,
    MutableDefault, ContextVariable, EnvironmentVariable, GeneratorGiven, FunctionAttribute, PartialShared,
    KnowsItsPlace, OtherLiteral,
]  # fmt: skip
VIEWING = [WritesToItsInput, ReturnsView, OneTensorTwice]
GIVEN = [OneWeightEach, OneTableEach, ForwardsAlone, ReturnsItsInput, ContainersGiven, WritesWithGradient]
OTHERS = [OwnBackward, OtherOperand, TensorsLeftInAnObject, LastTensorLeft, TensorsHandedOn]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_one_layer_does_decides_for_it_alone(model: type[nn.Module]) -> None:
    plan = solve(model, {"model.layers.*": "megatron"})
    _equals_one_process(model, plan)


@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.__name__)
def test_layers_that_do_something_else_equal_one_process(model: type[nn.Module]) -> None:
    _equals_one_process(model, solve(model, {}))


@pytest.mark.parametrize("carries", [False, True])
def test_a_trace_with_siblings_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch, carries: bool) -> None:
    """Whichever layers stand for others, the graph is the one that tracing each of them gives.

    Where the model's input carries a gradient the first layer, which is given a view of it, is like the others."""
    for model in (*MODELS, *OTHERS, *VIEWING, *GIVEN, Chain):
        with torch.device("meta"):
            few, every = Named(model()), Named(model())
        inputs = {"x": PLAIN["x"].detach().requires_grad_(carries)}
        graph = trace(few, inputs, fresh=lambda model=model: Named(model()).to("meta"))
        with monkeypatch.context() as patch:
            patch.setattr("tpplan.trace.dedup_layers.alike_layers", lambda _: [])
            whole = trace(every, inputs)
        assert graph_fingerprint(graph) == graph_fingerprint(whole), model.__name__
        assert _carrying(graph) == _carrying(whole), model.__name__


def _carrying(graph: ModelGraph) -> list[bool]:
    """Which results carry a gradient, in order."""
    return [graph.values[result].carries_gradient for node in graph.nodes for result in node.results]


@pytest.mark.parametrize("model", [OneWeightEach, OneTableEach, ReturnsItsInput], ids=lambda model: model.__name__)
def test_layers_are_copied_where_arguments_are_sources_but_not_where_they_are_returned(model: type[nn.Module]) -> None:
    """A source that enters a layer is its argument. What a layer returns of its arguments is no result of its own."""
    with torch.device("meta"):
        graph = trace(Named(model()), {"x": PLAIN["x"].detach().requires_grad_()})  # as what later layers are given
    copied = sum("@" in op.name for op in graph.ops if op.target == "aten.relu.default")
    assert copied == (0 if model is ReturnsItsInput else NUM_LAYERS - 1)


def solve(model: type[nn.Module], pins: Mapping[str, str]) -> Plan:
    """On two ranks that shard what they can."""
    return tpplan.solve(
        lambda: Named(model()),
        lambda batch, seq_len: dict(PLAIN),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=ROWS,
        micro_batch=ROWS,
        seq_len=1,
        tp=2,
        precision="fp32",
        pins=pins,
    )


def _equals_one_process(model: type[nn.Module], plan: Plan) -> None:
    assert plan.proof.status is ProofStatus.PROVEN
    loss, gradients = step(model, PLAIN, None)
    for applied_loss, applied in run_ranks(2, step, model, PLAIN, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert applied.keys() == gradients.keys()
        assert max(relative_errors(applied, gradients).values()) < 1e-5


class Scale(nn.Module):
    """A layer without parameters, of which one object may stand in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + x


class Shared(nn.Module):
    """Two lists of layers that are alike, with one object in both."""

    def __init__(self) -> None:
        super().__init__()
        both = Scale()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.before, self.after = nn.ModuleList([Scale(), both]), nn.ModuleList([both, Scale()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = layer(x)
        x = self.down(self.up(x))
        for layer in self.after:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_stands_in_two_lists_is_traced_in_both() -> None:
    with torch.device("meta"):
        model = Shared()
    graph = trace(model, {"x": torch.ones(2, 4, 8)})
    assert sum(op.target == "aten.relu.default" for op in graph.ops) == 4
    assert "forward" not in vars(model.before[1])

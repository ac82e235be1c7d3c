"""Tracing small models: what crosses where, what aliases what, where gradients flow, which blocks repeat."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from tpplan.core.errors import ModelError
from tpplan.core.graph import LOSS_SCOPE, Direction, ModelGraph, Op, SourceKind, Value
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.core.layout import S
from tpplan.stages.like_modules import are_alike
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import assumptions, trace

B, D = 6, 4


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


def crossings(graph: ModelGraph) -> list[tuple[str, str, str]]:
    return [(boundary.module, str(boundary.direction), boundary.path) for boundary in graph.boundaries]


def ops(graph: ModelGraph, module: str | None = None) -> list[str]:
    """Targets without their namespace and overload."""
    return [op.target.split(".")[1] for op in graph.ops if module is None or op.module == module]


def result_of(graph: ModelGraph, target: str, number: int = 0) -> Value:
    """The result of the n-th op whose target starts so."""
    found = [op for op in graph.ops if op.target.startswith(f"aten.{target}.")]
    return graph.values[found[number].results[0]]


class Model(nn.Module):
    """A weight and any function of it and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(meta(D))
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x, self.weight)


def traced(function: Callable[[Tensor, Tensor], object]) -> ModelGraph:
    return trace(Model(function), {"x": meta(B, D)})


# Boundaries.


class Inner(nn.Module):
    def forward(self, a: Tensor, pair: tuple[Tensor, Tensor], *rest: Tensor, scale: Tensor, flag: bool) -> dict:
        total = a + pair[0] * pair[1] + scale * rest[0]
        return {"sum": total if flag else a, "list": [a, (total,)]}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(D, D, device="meta")
        self.container = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(input=x)
        out = self.inner(hidden, (x, hidden), x, scale=x, flag=True)
        return self.container[0](out["sum"] + out["list"][1][0])


def test_boundaries_stand_in_order_under_argument_names():
    assert crossings(trace(Outer(), {"x": meta(B, D)})) == [
        ("", "input", "x"),
        ("linear", "input", "input"),
        ("linear", "output", "output"),
        ("inner", "input", "a = pair.1"),
        ("inner", "input", "pair.0 = args2 = scale"),
        ("inner", "output", "output.sum"),
        ("inner", "output", "output.list.0"),
        ("inner", "output", "output.list.1.0"),
        ("container.0", "input", "input"),
        ("container.0", "output", "output"),
        ("", "output", "output"),
    ]


def test_a_path_does_not_depend_on_how_a_call_is_written():
    class Calls(nn.Module):
        def __init__(self, by_keyword: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D, device="meta")
            self.by_keyword = by_keyword

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(input=x) if self.by_keyword else self.linear(x)

    assert crossings(trace(Calls(True), (meta(B, D),))) == crossings(trace(Calls(False), {"x": meta(B, D)}))


def test_arguments_of_a_static_forward_have_their_own_names():
    class Scaled(nn.Module):
        @staticmethod
        def forward(hidden: Tensor, scale: Tensor) -> Tensor:
            return hidden * scale

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.scaled(x, y) + self.scaled(x, scale=y)

    found = crossings(trace(Calls(), {"x": meta(B, D), "y": meta(B, D)}))
    assert [path for module, side, path in found if (module, side) == ("scaled", "input")] == ["hidden", "scale"] * 2


def test_what_is_inside_reads_the_boundary_and_its_module_is_named():
    graph = trace(Outer(), {"x": meta(B, D)})
    linear = next(op for op in graph.ops if op.target == "aten.linear.default")
    boundary = graph.producers[linear.operands[0]]
    assert (boundary.module, boundary.path, boundary.direction) == ("linear", "input", Direction.INPUT)
    assert linear.module == "linear"
    assert ops(graph, "inner") == ["mul", "add", "mul", "add"]
    assert ops(graph, "") == ["add"]


def test_values_of_forward_and_outputs():
    class TwoOutputs(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict:
            return {"logits": x + y, "extra": (x * y, None, 3)}

    graph = trace(TwoOutputs(), {"x": meta(B, D), "y": meta(B, D)})
    assert [path for path, _ in graph.outputs] == ["logits", "extra.0"]
    assert graph.loss is None
    assert [source.label for source in graph.sources] == ["x", "y"]


def test_one_output_is_called_output():
    graph = traced(lambda x, w: x * w)
    assert [path for path, _ in graph.outputs] == ["output"]
    assert graph.loss is None


def test_a_scalar_output_with_a_gradient_is_the_loss():
    graph = traced(lambda x, w: {"counted": x.sum(), "loss": (x * w).sum(), "logits": x * w})
    assert graph.loss == dict(graph.outputs)["loss"]


def test_the_loss_is_traced_with_the_model():
    linear = nn.Linear(D, D, device="meta")
    inputs = {"input": meta(B, D), "targets": torch.zeros(B, dtype=torch.long, device="meta")}
    graph = trace(linear, inputs, loss=lambda out, given: F.cross_entropy(out, given["targets"]))
    assert ops(graph, LOSS_SCOPE) == ["cross_entropy_loss"]
    assert graph.loss == graph.ops[-1].results[0]
    assert [s.label for s in graph.sources if s.kind is SourceKind.INPUT] == ["input", "targets"]
    assert crossings(graph) == [("", "input", "input"), ("", "output", "output")]


def test_inputs_that_are_not_tensors_are_literals():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0, rows: int = 1, extra: None = None, on: bool = False) -> Tensor:
            return x[:rows] * scale if on else x

    graph = trace(Scaled(), {"x": meta(B, D), "scale": 0.5, "rows": 2, "extra": None, "on": True})
    assert [source.label for source in graph.sources] == ["x"]
    assert [(op.target, op.args[1:]) for op in graph.ops] == [
        ("aten.slice.Tensor", (0, 0, 2)),
        ("aten.mul.Tensor", (0.5,)),
    ]


def test_nested_inputs_have_paths():
    class Nested(nn.Module):
        def forward(self, batch: dict) -> Tensor:
            return batch["tokens"][0] + batch["tokens"][1]

    graph = trace(Nested(), {"batch": {"tokens": (meta(B), meta(B))}})
    assert [source.label for source in graph.sources] == ["batch.tokens.0", "batch.tokens.1"]
    assert crossings(graph)[:2] == [("", "input", "batch.tokens.0"), ("", "input", "batch.tokens.1")]


# Parameters.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(B, D, device="meta")
        self.head = nn.Linear(D, B, bias=False, device="meta")
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(meta(D), requires_grad=False)
        self.unused = nn.Parameter(meta(D))
        self.register_buffer("table", meta(D))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + self.frozen * self.table + torch.ones(D, device="meta"))


def test_tied_parameters_are_one_source():
    graph = trace(Tied(), {"tokens": torch.zeros(B, dtype=torch.long, device="meta")})
    weight = next(source for source in graph.parameters if source.label == "embedding.weight")
    assert weight.aliases == ("head.weight",)
    readers = [node.target for node in graph.consumers[weight.result] if isinstance(node, Op)]
    assert readers == ["aten.embedding.default", "aten.linear.default"]


def test_parameters_and_buffers_have_names_and_say_whether_they_train():
    graph = trace(Tied(), {"tokens": torch.zeros(B, dtype=torch.long, device="meta")})
    assert {source.label: source.trainable for source in graph.parameters} == {
        "embedding.weight": True,
        "frozen": False,
        "unused": True,
    }
    assert [source.label for source in graph.sources if source.kind is SourceKind.BUFFER] == ["table"]
    assert graph.values[next(s.result for s in graph.parameters if s.label == "unused")].carries_gradient


# Aliasing.


def storage_of_input(graph: ModelGraph) -> str:
    return graph.values[graph.sources[-1].result].storage


@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("view", lambda x, w: x.view(-1) * 1),
        ("transpose", lambda x, w: x.transpose(0, 1) * 1),
        ("slice", lambda x, w: x[1:] * 1),
        ("chunk", lambda x, w: x.chunk(2)[1] * 1),
        ("reshape", lambda x, w: x.reshape(-1) * 1),
        ("expand", lambda x, w: x[None].expand(2, B, D) * 1),
        ("detach", lambda x, w: x.detach() * 1),
    ],
)
def test_views_share_storage(target, function):
    graph = traced(function)
    assert result_of(graph, target).storage == storage_of_input(graph)
    assert result_of(graph, "mul").storage != storage_of_input(graph)


@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("reshape", lambda x, w: x.transpose(0, 1).reshape(-1)),
        ("contiguous", lambda x, w: x.transpose(0, 1).contiguous()),
        ("clone", lambda x, w: x.clone()),
        ("add", lambda x, w: x + w),
    ],
)
def test_copies_have_storage_of_their_own(target, function):
    graph = traced(function)
    assert result_of(graph, target).storage != storage_of_input(graph)


def test_boundaries_are_views():
    graph = trace(Outer(), {"x": meta(B, D)})
    assert all(graph.values[b.result].storage == graph.values[b.operand].storage for b in graph.boundaries)


def test_an_in_place_op_writes_to_its_operand():
    graph = traced(lambda x, w: (x * w).relu_() + 1)
    assert ops(graph) == ["mul", "relu_", "add"]
    assert result_of(graph, "relu_").storage == result_of(graph, "mul").storage
    assert graph.ops[2].operands == graph.ops[1].results


def test_what_is_written_to_carries_the_gradient_of_what_was_written():
    def fill(x: Tensor, w: Tensor) -> Tensor:
        rows = torch.zeros(B, D, device="meta")
        rows[:2] = x[:2] * w
        return rows * 2

    graph = traced(fill)
    assert result_of(graph, "mul", 1).carries_gradient


def test_what_is_written_without_gradients_keeps_its_own():
    def clamped(x: Tensor, w: Tensor) -> Tensor:
        product = x * w
        with torch.no_grad():
            product.clamp_(max=1.0)
        return product + 1

    assert result_of(traced(clamped), "add").carries_gradient


def test_what_is_drawn_outside_torch_is_the_same_in_every_trace():
    """The proof compares traces; what the caller draws next is not changed by one."""

    def drawn(x: Tensor, w: Tensor) -> Tensor:
        noise = torch.tensor(np.random.rand(D), dtype=torch.float32, device=x.device)
        return x * w * noise * random.random()

    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    assert graph_fingerprint(traced(drawn)) == graph_fingerprint(traced(drawn))
    assert (random.random(), np.random.rand()) == expected


# Gradients.


def test_gradients_flow_from_parameters_through_floating_values():
    graph = traced(lambda x, w: ((x * w).argmax(-1), (x * w) > 0, x * 2, (x * w).to(torch.bfloat16), (x * w).sum()))
    assert not graph.values[graph.sources[-1].result].carries_gradient
    assert result_of(graph, "mul").carries_gradient
    for target in ("argmax", "gt"):
        assert not result_of(graph, target).carries_gradient
    assert not result_of(graph, "mul", 2).carries_gradient  # x * 2
    assert result_of(graph, "to").carries_gradient
    assert result_of(graph, "sum").carries_gradient


def test_ops_that_no_gradient_goes_through_end_it():
    def masked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x * w
        rows = torch.zeros_like(y)
        filled = torch.zeros_like(y)
        filled[:2] = y[:2]
        return rows + y, y.new_ones(3), filled * 2, y.floor()  # floor has a gradient: zero

    graph = traced(masked)
    assert not result_of(graph, "zeros_like").carries_gradient
    assert result_of(graph, "zeros_like", 1).carries_gradient  # of what is written to it
    assert not result_of(graph, "new_ones").carries_gradient
    assert all(result_of(graph, name).carries_gradient for name in ("add", "mul", "floor"))


def test_detach_ends_a_gradient():
    graph = traced(lambda x, w: (x * w).detach() + (x * w))
    assert not result_of(graph, "detach").carries_gradient
    assert result_of(graph, "add").carries_gradient


def test_no_grad_regions_are_inlined_without_gradients():
    def partly(x: Tensor, w: Tensor) -> Tensor:
        before = x * w
        with torch.no_grad():
            scale = before.amax(-1, keepdim=True)
            with torch.enable_grad():
                again = scale * w
        return before / scale + again

    graph = traced(partly)
    assert ops(graph) == ["mul", "amax", "mul", "div", "add"]
    assert not result_of(graph, "amax").carries_gradient
    assert result_of(graph, "mul", 1).carries_gradient
    assert result_of(graph, "add").carries_gradient


def test_modules_under_no_grad_carry_no_gradient():
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(D, D, device="meta") for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.layers[0](x)
            return self.layers[1](x)

    graph = trace(Teacher(), {"x": meta(B, D)})
    assert [graph.values[op.results[0]].carries_gradient for op in graph.ops] == [False, True]
    assert graph.blocks == ()


def test_checkpointed_regions_are_inlined():
    graph = traced(lambda x, w: checkpoint(lambda y: (y * w).relu(), x, use_reentrant=False) + 1)
    assert ops(graph) == ["mul", "relu", "add"]
    assert result_of(graph, "relu").carries_gradient


def test_a_trace_that_stops_in_a_checkpoint_leaves_no_hook_behind():
    def fail(x: Tensor) -> Tensor:
        return x * x.sum().item()

    with pytest.raises(TraceError) as kept:
        traced(lambda x, w: checkpoint(lambda y: fail(y * w), x, use_reentrant=False))
    x = torch.ones(2, requires_grad=True)
    x.exp().sum().backward()
    assert kept.value is not None  # until here, with all that its frames hold
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_checkpointed_layers_are_found_alike():
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(D, D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    graph = trace(Recomputed(), {"x": meta(B, D)})
    assert ops(graph) == ["linear", "relu", "linear", "add"] * 3
    assert sorted(op.module for op in graph.ops if op.target == "aten.add.Tensor") == [f"layers.{i}" for i in range(3)]


def test_autocast_regions_are_inlined_with_their_dtypes():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(D, D, device="meta") for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = self.layers[0](x)
            return self.layers[1](hidden.float())

    graph = trace(Mixed(), {"x": meta(B, D)})
    assert ops(graph).count("linear") == 2
    assert [op.module for op in graph.ops if op.target == "aten.linear.default"] == ["layers.0", "layers.1"]
    assert result_of(graph, "linear", 1).dtype == "float32"


# Repeated blocks.


class Layer(nn.Module):
    """x + down(relu(up(x))) with a constant."""

    def __init__(self, dim: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, device="meta")
        self.down = nn.Linear(hidden, dim, device="meta")
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.up(x).relu())
        return x + (out * self.scale if self.scale != 1.0 else out)


class Stack(nn.Module):
    """A first layer that gives the input a gradient, then the layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, device="meta")
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(*layers: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(block.prefix, block.indices) for block in trace(Stack(*layers), {"x": meta(B, D)}).blocks]


def test_alike_siblings_are_one_block():
    assert blocks(*(Layer(D, 8) for _ in range(4))) == [("layers", (0, 1, 2, 3))]


def test_a_sibling_of_another_width_stands_alone():
    assert blocks(Layer(D, 8), Layer(D, 8), Layer(D, 16), Layer(D, 8)) == [("layers", (0, 1, 3))]


def test_other_constants_are_other_blocks():
    layers = [Layer(D, 8, scale) for scale in (2.0, 3.0, 2.0, 3.0, 4.0)]
    assert blocks(*layers) == [("layers", (0, 2)), ("layers", (1, 3))]


def test_a_frozen_sibling_stands_alone():
    layers = [Layer(D, 8) for _ in range(3)]
    layers[1].requires_grad_(False)
    assert blocks(*layers) == [("layers", (0, 2))]


def test_a_layer_without_siblings_is_no_block():
    assert blocks(Layer(D, 8)) == []


def test_blocks_within_blocks_are_not_listed():
    pairs = [nn.Sequential(Layer(D, 8), Layer(D, 8)) for _ in range(2)]
    assert blocks(*pairs) == [("layers", (0, 1))]


def test_layers_that_know_themselves_and_the_model_are_found_alike():
    class Knows(Layer):
        def __init__(self, owner: nn.Module) -> None:
            super().__init__(D, 8)
            self.around = [owner, self]

    owner = nn.Module()
    owned = [Knows(owner) for _ in range(2)]
    owner.layers = nn.ModuleList(owned)
    assert are_alike(*owned)
    owned[0].around.append(owned[1])
    owned[1].around.append(owned[1])
    assert not are_alike(*owned)


def test_copies_of_a_layer_are_what_tracing_it_gives():
    """Layers whose names alone differ are traced once; an attribute that differs without meaning forces a trace."""
    alike, forced = ([Layer(D, 8) for _ in range(3)] for _ in range(2))
    for index, layer in enumerate(forced):
        layer.index = index
    copied, each = (
        trace(Stack(*layers), {"x": meta(B, D)}, loss=lambda out, _: out.sum()) for layers in (alike, forced)
    )
    assert copied.blocks == each.blocks
    assert [normalized(copied, node) for node in copied.nodes] == [normalized(each, node) for node in each.nodes]


def normalized(graph: ModelGraph, node: object) -> object:
    """A node with values by the order of their making."""
    order = {name: i for i, name in enumerate(value_order(graph))}
    names = [*node.operands, *node.results]  # type: ignore[attr-defined]
    kinds = [
        (graph.values[n].shape, graph.values[n].dtype, graph.values[n].carries_gradient, order[graph.values[n].storage])
        for n in names
    ]
    what = node.target if isinstance(node, Op) else (node.direction, node.path)  # type: ignore[attr-defined]
    return what, node.module, [order[name] for name in names], kinds  # type: ignore[attr-defined]


def value_order(graph: ModelGraph) -> list[str]:
    sources = sorted(graph.sources, key=lambda source: source.label)
    return [*(s.result for s in sources), *(result for node in graph.nodes for result in node.results)]


def test_a_layer_called_twice_is_traced_twice():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(D, D, device="meta") for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 0, 1):
                x = self.layers[index](x)
            return x

    graph = trace(Shared(), {"x": meta(B, D)})
    assert [op.module for op in graph.ops] == [f"layers.{index}" for index in (0, 1, 0, 1)]
    assert len(crossings(graph)) == 2 + 4 * 2


# Literals.


def test_a_minus_one_in_a_view_is_kept():
    graph = traced(lambda x, w: (x.view(-1, 2) * 1).reshape(2, -1).expand(-1, -1).unflatten(-1, (2, -1)))
    literals = [op.args[1:] for op in graph.ops if op.target != "aten.mul.Tensor"]
    assert literals == [((-1, 2),), ((2, -1),), ((-1, -1),), (-1, (2, -1))]


def test_dtypes_and_devices_are_text():
    graph = traced(lambda x, w: torch.zeros(2, dtype=torch.float16, device="meta"))
    assert dict(graph.ops[0].kwargs)["dtype"] == "dtype:float16"
    assert dict(graph.ops[0].kwargs)["device"] == "device:meta"


# Failures.


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, device="meta")
        self.body = nn.Sequential(nn.Linear(D, D, device="meta"), Branching())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


class Choosing(nn.Module):
    """Calls a layer in a function of torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(D, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.layers[0], self.layers[1], (x,))


class Looping(nn.Module):
    """A higher-order op that is not followed."""

    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda y: y.sum() < 9, lambda y: (2 * y,), (x,))[0]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_model_that_cannot_be_traced_is_named_by_module():
    with pytest.raises(ModelError, match=r"in module 'body.1'"):
        trace(Failing(), {"x": meta(B, D)})


@pytest.mark.parametrize(
    ("model", "message"),
    [(Choosing(), "a branch of torch.cond reads a parameter"), (Looping(), "while_loop: of torch's")],
)
def test_a_higher_order_op_that_is_not_followed_is_named(model, message):
    with pytest.raises(ModelError, match=message) as error:
        trace(model, {"x": meta(B, D)})
    assert "meta tensors" not in str(error.value)  # it runs on those


def test_a_failing_loss_is_told_apart():
    with pytest.raises(ModelError, match="KeyError in the loss: 'absent'"):
        trace(nn.Linear(D, D, device="meta"), {"input": meta(B, D)}, loss=lambda out, given: given["absent"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"inptu": meta(B, D), "y": meta(B)},
            r"gives 'inptu', 'y': missing .*'input'. Did you mean 'input' by 'inptu'",
        ),
        ({"y": meta(B)}, r"Linear.forward takes \(input.*and example_inputs gives 'y': missing .*the loss alone"),
        (
            (meta(B, D), meta(B)),
            r"gives 2 values: too many positional arguments. Every value of a tuple goes to forward",
        ),
    ],
)
def test_inputs_that_forward_does_not_take_are_named(inputs, message):
    with pytest.raises(ModelError, match=message) as error:
        trace(nn.Linear(D, D, device="meta"), inputs)
    assert "meta tensors" not in str(error.value)


def test_an_error_of_the_model_s_own_is_not_taken_for_one_of_forward_s_arguments():
    class Adding(nn.Linear):
        def forward(self, input):
            return super().forward(input) + "1"

    with pytest.raises(
        ModelError, match=r"TypeError in the model's forward: (.|\n)*without tpplan: where that fails too"
    ):
        trace(Adding(D, D, device="meta"), {"input": meta(B, D)})


@pytest.mark.parametrize("model", [Failing(), Stack(Layer(D, 8), Layer(D, 8))], ids=["failing", "fine"])
def test_no_hooks_stay(model):
    before = [dict(vars(module)) for module in model.modules()]
    try:
        trace(model, {"x": meta(B, D)})
    except ModelError:
        assert isinstance(model, Failing)
    assert hooks(model) == 0
    assert [list(vars(module)) for module in model.modules()] == [list(names) for names in before]
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_trace_does_not_change_the_training_mode():
    model = Stack(Layer(D, 8))
    model.eval()
    trace(model, {"x": meta(B, D)})
    assert not any(module.training for module in model.modules())


def test_a_cast_changes_what_crosses_before_the_mark():
    def halved(tensor: Tensor, module: str, direction: Direction, path: str) -> Tensor:
        return tensor[: B // 2] if (module, direction, path) == ("first", Direction.INPUT, "input") else tensor

    graph = trace(Stack(), {"x": meta(B, D)}, cast=halved)
    entered = next(b for b in graph.boundaries if (b.module, b.direction) == ("first", Direction.INPUT))
    assert graph.values[entered.operand].shape == (B // 2, D)
    assert graph.values[graph.outputs[0][1]].shape == (B // 2, D)


def test_a_trace_is_deterministic():
    first, second = (trace(Stack(*(Layer(D, 8) for _ in range(3))), {"x": meta(B, D)}) for _ in range(2))
    assert graph_fingerprint(first) == graph_fingerprint(second)


# Values that are asked for.


def small(x: Tensor) -> bool:
    return bool((torch.arange(3, device=x.device) < 2).sum().item() == 2)


@pytest.mark.parametrize(
    ("asks", "runs"),
    [
        (lambda x: small(x), "relu"),
        (lambda x: bool((torch.diff(torch.arange(x.shape[0], device=x.device)) == 1).all()), "relu"),
        (lambda x: torch.linspace(0, 1, 5, device=x.device).tolist()[-1] == 1.0, "relu"),
        (lambda x: int(torch.full((2,), 3, device=x.device)[1]) == 4, "sigmoid"),
        (lambda x: 7 in torch.arange(5, device=x.device), "sigmoid"),
        (lambda x: len(x.view(torch.div(torch.tensor(B * D), 2, rounding_mode="trunc"), 2)) == B * D // 2, "relu"),
        (lambda x: len(x.view(torch.full((), 2, device=x.device), -1)) == 2, "relu"),
        (lambda x: bool(torch.tensor(0.5) > 0), "relu"),
        (lambda x: torch.compiler.is_compiling() or torch.compiler.is_exporting(), "sigmoid"),
    ],
)
def test_what_depends_on_no_data_is_known(asks: Callable[[Tensor], bool], runs: str) -> None:
    """And code that asks whether it is being compiled is not."""
    graph = traced(lambda x, w: (x * w).relu() if asks(x) else (x * w).sigmoid())
    assert ops(graph)[-1] == runs


def incremented(x: Tensor) -> Tensor:
    flags = torch.zeros(2, device=x.device)
    flags += 1
    return flags


def written_through_a_view(x: Tensor) -> Tensor:
    flags = torch.zeros(2, device=x.device)
    view = flags.view(1, 2)
    view += 1
    return flags


def written_behind_autograd(x: Tensor) -> Tensor:
    flags = torch.zeros(2, device=x.device)
    flags.data.fill_(1)
    return flags


def overwritten(x: Tensor) -> Tensor:
    flags = torch.zeros(2, device=x.device)
    flags[0] = 1
    return flags


@pytest.mark.parametrize(
    "makes",
    [
        lambda x: x.sum(),  # the example itself has no values here
        lambda x: torch.arange(3, device=x.device) * x[0, 0],
        lambda x: torch.rand(3, device=x.device),
        lambda x: torch.rand(3) < 0.5,
        lambda x: overwritten(x),
        lambda x: overwritten(x).view(1, 2)[0],
        lambda x: torch.zeros(2, device=x.device).add_(1),
        lambda x: incremented(x),
        lambda x: incremented(x).view(1, 2),
        lambda x: written_through_a_view(x),
        lambda x: written_behind_autograd(x),
        lambda x: torch.zeros_like(x).normal_(),
        lambda x: F.dropout(torch.ones(4, device=x.device)),
        lambda x: torch.bernoulli(torch.full((2,), 0.5, device=x.device)),
        lambda x: torch.empty(2, device=x.device),
    ],
)
def test_what_depends_on_data_or_chance_is_not(makes: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="could not be traced"):
        traced(lambda x, w: x * w if makes(x).sum() > 0 else w)


@pytest.mark.parametrize(
    ("picks", "shape", "varying"),
    [
        (lambda x: x[x > 0], (B * D,), (0,)),
        (lambda x: x[x.sum(1) > 0], (B, D), (0,)),
        (lambda x: x[:, x.sum(0) > 0].transpose(0, 1), (D, B), (0,)),
        (lambda x: x[torch.where(x.sum(1) > 0)[0]].unflatten(1, (2, -1)), (B, 2, D // 2), (0,)),
        (lambda x: x.nonzero(), (B * D, 2), (0,)),
        (lambda x: torch.argwhere(x[0]), (D, 1), (0,)),
        (lambda x: x.masked_select(x[0] > 0), (B * D,), (0,)),
        (lambda x: torch.unique(x, return_counts=True)[1], (B * D,), (0,)),
        (lambda x: torch.unique(x, dim=1), (B, D), (1,)),
        (lambda x: torch.unique_consecutive(x, return_inverse=True, dim=0)[1], (B,), ()),
        (lambda x: torch.bincount(x[0].argsort(), minlength=D), (D,), (0,)),
        (lambda x: x.repeat_interleave(x[:, 0].argsort(), dim=0), (B, D), (0,)),
        (lambda x: torch.cat([x[x.sum(1) > 0][1:], x[:1]]), (B, D), (0,)),
        (lambda x: x.split((x[:2] > 0).sum(1).tolist(), 1)[0], (B, D // 2), (1,)),
        (lambda x: torch.split(x.T, (x[:3] > 0).sum(1).tolist())[2] @ x, (D // 3, D), (0,)),
        (lambda x: x[torch.arange(B, device=x.device) > 0], (B - 1, D), ()),
        (lambda x: x.repeat_interleave(torch.arange(B, device=x.device), 0), (B * (B - 1) // 2, D), ()),
    ],
)
def test_sizes_that_data_decides_are_all_there_can_be(
    picks: Callable[[Tensor], Tensor], shape: tuple[int, ...], varying: tuple[int, ...]
) -> None:
    """And what is known is counted."""
    graph = traced(lambda x, w: (x * w, picks(x)))
    found = graph.values[graph.outputs[1][1]]
    assert (found.shape, found.varying) == (shape, varying)
    assert bool(graph.questions) == any(value.varying for value in graph.values.values())
    assert not any(found.can_be(S(dim), tp) for dim in varying for tp in (1, 2, shape[dim]))


def test_a_size_that_the_inputs_decide_is_counted_and_varies() -> None:
    model, real = Picking(lambda x, m: x[m]), {"x": meta(B, D), "m": torch.arange(B) > 0}
    graph = trace(model, real)
    found = graph.values[graph.outputs[0][1]]
    assert (found.shape, found.varying) == ((B - 1, D), (0,))
    assert [answer for _, answer, _ in graph.questions] == [f"{B - 1} elements"]


def test_code_that_needs_the_very_number_that_the_inputs_give_gets_it() -> None:
    model, real = Picking(lambda x, m: x[m].view(2, -1)), {"x": meta(B, D), "m": torch.arange(B) < 2}
    assert graph_shape(trace(model, real)) == (2, D)


def test_code_that_needs_a_number_that_weights_decide_is_refused() -> None:
    with pytest.raises(ModelError, match="could not be traced"):
        traced(lambda x, w: x[x.sum(1) > 0].view(B, D) * w)


@pytest.mark.parametrize("makes", [lambda n: range(n), lambda n: n > 1, lambda n: n + 1, lambda n: [0] * n])
def test_a_number_that_weights_decide_splits_and_does_nothing_else(makes: Callable[[int], object]) -> None:
    with pytest.raises(ModelError, match="could not be traced: UnknownValueError"):
        traced(lambda x, w: x * w if makes((x > 0).sum(1).tolist()[0]) else x)


def test_what_runs_may_not_hang_on_a_number_that_weights_decide() -> None:
    with pytest.raises(ModelError, match="which ops run depends on it: test_trace"):
        traced(lambda x, w: x * w if len(x[x.sum(1) > 0]) > B else x)


class Picking(nn.Module):
    """Any code with a mask."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.code(x, m)


def graph_shape(graph: ModelGraph) -> tuple[int, ...]:
    return graph.values[graph.outputs[0][1]].shape


def raising(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x


@pytest.mark.parametrize(
    ("function", "target", "expected"),
    [
        (lambda x, w: (x * w).relu() if x.sum() > 0 else x * w, "relu", [True]),
        (lambda x, w: (x * w).relu() if -1.0 in x else (x * w).sigmoid(), "sigmoid", [False]),
        (lambda x, w: raising(x) * w, "mul", []),
        (lambda x, w: (x * w, x.all() and None)[0], "all", []),
        (lambda x, w: (x * w).mul(int(x.sum())), "mul", [B * D]),
        (lambda x, w: (x * w).mul(float(x.detach().view(-1)[0] + 1)), "mul", [2.0]),
    ],
    ids=["matters", "matters, contained", "raises", "does not matter", "a number", "another number"],
)
def test_the_examples_answer_for_the_inputs_and_what_that_decides_is_told(
    function: Callable[[Tensor, Tensor], object], target: str, expected: list[object]
) -> None:
    model, inputs = Model(function), {"x": torch.ones(B, D)}
    graph = trace(model, inputs)
    assert ops(graph)[-1] == target
    found = assumptions(graph, model, inputs)
    assert [text.rpartition(" is ")[2] for text in found] == list(map(repr, expected))
    assert all(text.startswith("test_trace.py:") for text in found)


def test_weights_answer_nothing() -> None:
    with pytest.raises(ModelError, match="depend on weights"):
        trace(Model(lambda x, w: x * w if w.sum() > 0 else x), {"x": torch.ones(B, D)})


class Aligned(nn.Module):
    """A loss inside the model whose op torch has no meta kernel of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = x.new_full((x.shape[0],), x.shape[1], dtype=torch.long)
        return F.ctc_loss(scores, targets, lengths, lengths - 5)


class Fitted(nn.Module):
    """An op that torch has no meta kernel of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(self.head(x), x).solution.sum()


class Decides(nn.Module):
    """A branch on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).sum() if self.head.weight.sum() > 0 else x.sum()


def test_a_ctc_loss_is_traced() -> None:
    inputs = {"x": torch.zeros(2, 8, 4), "targets": torch.ones(2, 3, dtype=torch.long)}
    graph = trace(Aligned().to("meta"), inputs)
    assert any(op.target.startswith("aten.ctc_loss") for op in graph.ops)


def test_what_cannot_be_traced_is_named_with_its_line_and_what_to_try() -> None:
    inputs = {"x": torch.zeros(2, 8, 4)}
    with pytest.raises(TraceError, match=r"aten::linalg_lstsq.*\nat test_trace.py:\d+: return .*\n.*register_fake"):
        trace(Fitted().to("meta"), inputs)
    with pytest.raises(TraceError, match=r"\nat test_trace.py:\d+: return .* if self.head.*\n.*torch.where"):
        trace(Decides().to("meta"), inputs)

"""Code that computes with a tensor's shape, or takes another path for some shapes, is told that of one process."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import gradients, relative_errors
from ranks import RankError, run_ranks
from test_attention import DIM, HEADS, LENGTH, VOCAB, around, by_heads, loss, losses_and_gradients, text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.apply.modules.local_sizes import LocalSizes
from tpplan.core.errors import VerificationError
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import SHAPE, Plan, SizePlan
from tpplan.plan.report.details import provenance
from tpplan.verify.shrink import on_mesh

WIDTH = DIM // HEADS


def taken_apart(heads: int) -> Callable[[Tensor], Tensor]:
    """A function that takes [B, T, D] apart into [B, H, T, D / H]: the number of heads stands nowhere else."""

    def apart(x: Tensor) -> Tensor:
        if x.shape[-1] % heads or x.size(dim=-1) < heads * WIDTH:
            raise ValueError(f"a width of {x.shape[-1]} does not have {heads} heads")
        return x.view(x.size(0), x.size(1), heads, x.shape[-1] // heads).transpose(1, 2)

    return apart


class InClosure(nn.Module):
    """Attention whose number of heads stands in a closure, and which checks the width that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.apart = taken_apart(HEADS)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.apart(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        attended = self.attended(query, key, value).transpose(1, 2)
        return self.to_out(attended.reshape(*x.shape[:2], attended.shape[-2] * attended.shape[-1]))


class OnAnotherPath(InClosure):
    """Attends in other words where there is one head, as with keys that all heads share."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[1] == 1:
            key, value = key.squeeze(1), value.squeeze(1)
            scores = torch.einsum("bhid,bjd->bhij", query, key).softmax(-1)
            return torch.einsum("bhij,bjd->bhid", scores, value)
        return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", query, key).softmax(-1), value)


class Checkpointed(InClosure):
    """Runs again in backward, and asks then."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    """Two layers around which the model's own code asks for shapes too, and a third call of the first."""

    def __init__(self, attention: type[InClosure] = InClosure) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(attention() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in (*self.layers, self.layers[0]):
            x = x + layer(x) / x.shape[-1]
        return self.head(x)


def told_by(plan: Plan) -> dict[str, set[tuple[int, int, int, int]]]:
    """By module, (number of dims, dim, size in one process, size on a rank) of what its code is told."""
    return {
        name: {(own.count, own.position, own.written, own.local) for own in sizes if own.call == SHAPE}
        for name, sizes in plan.size_plans().items()
    }


def assert_divided(plan: Plan, module: str) -> None:
    read = {name: layout for name, own in plan.parameter_plans().items() for layout in own.reads.values()}
    layouts = {str(read[f"{module}.to_{name}.weight"]) for name in ("q", "k", "v")}
    assert (layouts, str(read[f"{module}.to_out.weight"])) == ({"S(0)"}, "S(1)")


def assert_right(build: Callable[[], nn.Module], plan: Plan, tp: int, batches: tuple[int, ...] = (1, 3)) -> None:
    for batch in batches:
        trained, evaluated, expected = losses_and_gradients(build, None, batch)
        for found in run_ranks(tp, losses_and_gradients, build, plan, batch):
            assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
            assert max(relative_errors(found[2], expected).values()) < 1e-4


@pytest.mark.parametrize(
    ("attention", "tp"),
    [(InClosure, 2), (InClosure, HEADS), (OnAnotherPath, HEADS), (Checkpointed, 2)],
)
def test_code_that_computes_with_shapes_is_divided_by_heads(attention: type[InClosure], tp: int) -> None:
    build = around(attention)
    plan = by_heads(build, tp)
    assert (3, 2, DIM, DIM // tp) in told_by(plan)["1"]
    assert_divided(plan, "1")
    assert_right(build, plan, tp)


@functools.cache
def plan_of_layers() -> Plan:
    return by_heads(Model, 2)


def test_each_layer_is_told_and_the_model_around_them_is_not() -> None:
    told = told_by(plan_of_layers())
    assert told.keys() == {"layers.0", "layers.1"}
    assert_divided(plan_of_layers(), "layers.1")
    assert_right(Model, plan_of_layers(), 2)


def test_reports_say_what_code_is_told() -> None:
    lines = [text for name, text in provenance(plan_of_layers(), "") if name == "sizes"]
    assert any("told 32 of 16 where it asks a tensor of 3 dims for dim 2" in line for line in lines), lines


def test_a_plan_on_fewer_ranks_tells_the_same() -> None:
    build = around(InClosure)
    fewer = on_mesh(by_heads(build, HEADS), Mesh(tp=2))
    assert (3, 2, DIM, DIM // 2) in told_by(fewer)["1"]
    assert_right(build, fewer, 2, (1,))


def test_layers_that_are_recomputed_are_told_again() -> None:
    plan = by_heads(Model, 2, recompute="full")
    assert told_by(plan).keys() == {"layers.0", "layers.1"}
    assert plan.recomputed_modules()
    assert_right(Model, plan, 2)


def steps_with_hooks(plan: Plan | None) -> tuple[float, dict[str, Tensor], list[tuple[int, ...]]]:
    """A step in which hooks, of a layer and inside it, note the shapes that they see."""
    torch.manual_seed(0)
    model, inputs, seen = Model(), text(2, LENGTH), list[tuple[int, ...]]()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _args, output: seen.append(tuple(output.shape)))
    found = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
    found.backward()
    return found.item(), gradients(model), seen


@pytest.mark.long
def test_hooks_and_fsdp_around_code_that_is_told() -> None:
    expected, expected_gradients, shapes = steps_with_hooks(None)
    plan = by_heads(Model, 2, 2, gpus=4, shard=2)
    for found, own, seen in run_ranks(4, steps_with_hooks, plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert max(relative_errors(own, expected_gradients).values()) < 1e-4
        assert seen == shapes


def wrong_size(size: SizePlan) -> SizePlan:
    return replace(size, written=2 * size.written) if size.call == SHAPE else size


@pytest.mark.parametrize("change", [lambda size: None, wrong_size], ids=["not told", "told another"])
def test_what_is_told_wrong_is_a_counterexample(change: Callable[[SizePlan], SizePlan | None]) -> None:
    plan = plan_of_layers()
    kept = {name: [change(size) for size in sizes if size.call == SHAPE] for name, sizes in plan.sizes.items()}
    wrong = replace(plan, sizes={name: tuple(filter(None, sizes)) for name, sizes in kept.items()})
    with pytest.raises(VerificationError):
        tpplan.prove_plan(wrong, Model, text, loss=loss)


def test_the_model_that_is_told_what_only_its_layers_are_is_a_counterexample() -> None:
    """It divides by the width that it asks for."""
    plan = plan_of_layers()
    size = SizePlan(call=SHAPE, of=(), count=3, position=2, written=2 * DIM, local=DIM)
    with pytest.raises(VerificationError):
        tpplan.prove_plan(replace(plan, sizes={**plan.sizes, "<root>": (size,)}), Model, text, loss=loss)


def test_compiled_layers_refuse_code_that_is_told() -> None:
    with pytest.raises(RankError, match=r"module layers\.0 is told .* where it asks for a tensor's shape"):
        run_ranks(2, lambda: tpplan.apply_plan(Model(), plan_of_layers(), compile=True))


TOLD = SizePlan(call=SHAPE, of=(), count=3, position=2, written=32, local=16)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda x: tuple(x.shape), (2, 16, 32)),
        (lambda x: tuple(x.size()), (2, 16, 32)),
        (lambda x: x.size(2), 32),
        (lambda x: x.size(dim=-1), 32),
        (lambda x: x.size(1), 16),
        (lambda x: tuple(x[0].shape), (16, 16)),  # of other dims
        (lambda x: tuple(x[..., :8].shape), (2, 16, 8)),  # another size
    ],
)
def test_a_shape_is_told_as_planned(ask: Callable[[Tensor], Any], answer: object) -> None:
    told = LocalSizes((TOLD,))
    with Telling(told):
        assert ask(torch.zeros(2, 16, 16)) == answer


class Telling(torch.overrides.TorchFunctionMode):
    def __init__(self, told: LocalSizes) -> None:
        super().__init__()
        self.told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.told(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


def compiled_step(plan: Plan | None, fullgraph: bool) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Model(), text(1, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        model.layers[1].compile(backend="eager", fullgraph=fullgraph)
    found = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
    found.backward()
    return found.item(), gradients(model)


@pytest.mark.long
def test_a_layer_that_its_user_compiles_runs_uncompiled_or_not_at_all() -> None:
    value, expected = compiled_step(None, False)
    for found, applied in run_ranks(2, compiled_step, plan_of_layers(), False, timeout_s=300):
        assert found == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, expected).values()) < 1e-4
    with pytest.raises(RankError, match=r"raise PlanMismatchError"):
        run_ranks(2, compiled_step, plan_of_layers(), True, timeout_s=300)

"""Layers that are not called: the code around them calls their parts, a method or the forward, or reads their weights;
and layers that share weights, whose weights are read in other layers' calls.

FSDP gathers a module, and a checkpoint runs it again, where it is called, so that plans do this to modules that are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard
from one_process import mean_over_replicas, part, relative_errors, whole
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.verify.collective_log import differences, listed
from tpplan.verify.fake_step import fake_step

BATCH, LENGTH, DIM, VOCAB, LAYERS = 8, 6, 32, 48, 4


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.b(self.a(self.norm(x)).tanh())
        return mixed


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = Mixer(), Mixer(), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.second(self.first(x)) * self.scale
        return mixed


#: makes a layer, and runs it
Way = tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]


def each(layer: Any, x: Tensor) -> Tensor:
    for module in layer:
        x = module(x)
    return x


WAYS: dict[str, Way] = {
    "list": (lambda: nn.ModuleList([Mixer(), Mixer()]), each),
    "sequence": (lambda: nn.Sequential(Mixer(), Mixer()), each),
    "dict": (lambda: nn.ModuleDict({"x": Mixer(), "y": Mixer()}), lambda layer, x: layer["y"](layer["x"](x))),
    "parts": (Pair, lambda layer, x: layer.second(layer.first(x)) * layer.scale),
    "method": (Pair, lambda layer, x: layer.run(x)),
    "forward": (Pair, lambda layer, x: layer.forward(x)),
    "call and method": (Pair, lambda layer, x: layer.run(layer(x))),
    "weight": (Pair, lambda layer, x: layer(x) @ layer.first.a.weight[:DIM]),
    "bare": (lambda: nn.ModuleList([nn.Linear(DIM, DIM), nn.LayerNorm(DIM)]), each),
    "nested": (lambda: nn.ModuleList([nn.ModuleList([Mixer()]), Mixer()]), lambda layer, x: layer[1](layer[0][0](x))),
    "call": (Pair, lambda layer, x: layer(x)),
}
#: the FSDP units in a layer; the rest of it is of the root
UNITS: dict[str, tuple[str, ...]] = {
    "list": (".0", ".1"),
    "sequence": (".0", ".1"),
    "dict": (".x", ".y"),
    **dict.fromkeys(("parts", "method", "forward", "call and method"), (".first", ".second")),
    "weight": (".first.b", ".second"),
    "bare": (".0",),
    "nested": (".0.0", ".1"),
    "call": ("",),
}


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        make, self.run = WAYS[way]
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        logits: Tensor = self.head(x)
        return logits


class OneModule(Model):
    """All layers have one of their modules in common."""

    def __init__(self) -> None:
        super().__init__("call")
        for layer in self.layers:
            layer.second.a = self.layers[0].second.a  # type: ignore[union-attr]


class OneWeight(Model):
    """All layers have a weight in common, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__("call")
        for layer in self.layers:
            layer.second.a.weight = self.layers[0].second.a.weight  # type: ignore[union-attr]


class Again(Model):
    """Each layer stands in the list twice."""

    def __init__(self) -> None:
        super().__init__("call")
        first, second, *_ = self.layers
        self.layers = nn.ModuleList([first, second, first, second])


class InFloat32(Model):
    """What goes from part to part is in float32, which FSDP casts as it enters one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in self.layers:
            x = second(first(x.float()).float())
        logits: Tensor = self.head(x)
        return logits


def text(batch: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(build: Callable[[], nn.Module], gpus: int, **options: Any) -> Plan:
    plan = tpplan.solve(
        build,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        all_gpus=True,
        **{"global_batch": BATCH, "seq_len": LENGTH, "fsdp": 2, "tp": gpus // 2, "precision": "fp32", **options},
    )
    assert plan.proof.status is ProofStatus.PROVEN
    return plan


def one_backward(
    build: Callable[[], nn.Module], plan: Plan | None, *, compile: bool = False
) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), text(BATCH, LENGTH)
    if plan is None:
        value = loss(model(inputs["tokens"]), inputs)
        value.backward()
        return value.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model = tpplan.apply_plan(model, plan, compile=compile)
    assert plan.batch.accumulation_steps == 1
    own = part(inputs, plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    value = loss(model(own["tokens"]), own)
    value.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return mean_over_replicas(value), gradients


def assert_as_one_process(build: Callable[[], nn.Module], plan: Plan, tolerance: float = 1e-4) -> None:
    expected, reference = one_backward(build, None)
    for found, gradients in run_ranks(plan.mesh.num_gpus, one_backward, build, plan):
        assert found == pytest.approx(expected, rel=tolerance)
        assert gradients.keys() == reference.keys()
        assert max(relative_errors(gradients, reference).values()) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_units_are_modules_that_are_called(way: str) -> None:
    plan = solved(partial(Model, way), 2)
    expected = (f"layers.{layer}{unit}" for layer in range(LAYERS) for unit in UNITS[way])
    assert set(plan.fsdp_units()) == {*expected, ""}
    assert_as_one_process(partial(Model, way), plan)


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (
            OneModule,
            {f"layers.{i}.{part}" for i in range(LAYERS) for part in ("first", "second.b")} | {"layers.0.second.a"},
        ),
        (OneWeight, {f"layers.{i}.{part}" for i in range(LAYERS) for part in ("first", "second.b")}),
        (Again, {"layers.0", "layers.1"}),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 2},
        {"gpus": 2, "micro_batch": BATCH // 4, "reshard_after_forward": True},
        {"gpus": 2, "micro_batch": BATCH // 4, "reshard_after_forward": False},
        {"gpus": 4},
    ],
)
def test_what_layers_share_is_in_none_of_their_units(
    build: Callable[[], nn.Module], units: set[str], options: dict[str, Any]
) -> None:
    plan = solved(build, **options)
    assert set(plan.fsdp_units()) == {*units, ""}
    if plan.batch.accumulation_steps == 1:
        assert_as_one_process(build, plan)
    seen = fake_step(build, text(plan.batch.micro_batch, LENGTH), loss, plan)
    assert differences(plan, listed(plan), seen.issued) == []
    assert seen.tracked is not None
    assert sum(plan.predicted.memory_bytes.values()) == pytest.approx(seen.tracked.peak_bytes, rel=0.1)


@pytest.mark.parametrize("way", ["list", "method", "weight"])
def test_units_divided_over_tp_too(way: str) -> None:
    build = partial(Model, way)
    assert_as_one_process(build, solved(build, 4, fsdp_over_tp=False))
    over_tp = solved(build, 4, fsdp_over_tp=True)
    assert over_tp.units_over_tp()
    assert_as_one_process(build, over_tp)


@pytest.mark.parametrize(("way", "recompute"), [("list", "full"), ("parts", "selective"), ("method", "full")])
def test_what_is_recomputed_is_called(way: str, recompute: str) -> None:
    """A layer that is recomputed in the plan alone would keep what the plan counts as freed."""
    build = partial(Model, way)
    plan = solved(build, 2, recompute=recompute, seq_len=8 * LENGTH)
    assert set(plan.recomputed_modules()) == set(plan.fsdp_units()) - {""}
    seen = fake_step(build, text(plan.batch.micro_batch, 8 * LENGTH), loss, plan)
    assert differences(plan, listed(plan), seen.issued) == []
    assert seen.tracked is not None
    assert sum(plan.predicted.memory_bytes.values()) == pytest.approx(seen.tracked.peak_bytes, rel=0.1)


def test_a_unit_casts_what_enters_it() -> None:
    build = partial(InFloat32, "list")
    plan = solved(build, 2, precision="bf16-mixed")
    expected, _ = one_backward(build, None)
    for found, _ in run_ranks(2, one_backward, build, plan):
        assert found == pytest.approx(expected, rel=1e-2)

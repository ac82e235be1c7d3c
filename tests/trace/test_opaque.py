"""Modules that run whole, each inside a model whose other layers are sharded, against one process on real ranks."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.tensor import DTensor
from torch.nn.utils import weight_norm

import tpplan
from tpplan.core.errors import ModelError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import R_STAR, Layout, LayoutKind, P, R, S
from tpplan.layouts.typecheck import typecheck
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.plan.report import render
from tpplan.prove.apply_as_rank import applied_as, copied
from tpplan.trace.retrace_opaque import trace_marking
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import trace
from tpplan.trace.whole.opaque import Opaques

DIM, HIDDEN, VOCAB, LENGTH, BATCH, RANKS = 16, 64, 32, 8, 2, 4

Inputs = dict[str, Tensor]


class Picks(nn.Module):
    """torch.cond between two layers with weights, by a number of which the inputs decide."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.one(y), lambda y: self.other(y).relu(), (x,))


class Shares(Picks):
    """A layer under two names, the first of which leads through another module."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.again(super().forward(x))


class Iterates(nn.Module):
    """A loop over a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, self.layer(y).tanh()), (first, x))[1]


class Scans(nn.Module):
    """A recurrence over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        def combine(carry: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.layer(token) + carry)
            return state, state.clone()

        return scan(combine, torch.zeros_like(x[:, 0]), x, dim=1)[1]


class Maps(nn.Module):
    """A function of one sequence, for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return map_rows(lambda row: self.layer(row).tanh(), x)


class Numbers(nn.Module):
    """A Python number made of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.item()


class Hooked(nn.Module):
    """A hook on a weight's gradient that needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.layer.weight.register_hook(lambda gradient: gradient / gradient.norm())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class Normed(nn.Module):
    """torch's old weight_norm, which computes a plain attribute before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class Block(nn.Module):
    """A module that is to run whole, and a feed-forward that is to be sharded."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix, self.norm = mix(), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Block(mix) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SHARDED = {"layers.*.up.weight", "layers.*.down.weight", "head.weight"}


def text(batch: int, length: int, seed: int = 1) -> Inputs:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: Inputs) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solve(build: Callable[[], nn.Module], *, gpus: int = RANKS, **options: object) -> Plan:
    return tpplan.solve(
        build,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        **{"global_batch": BATCH * 2, "micro_batch": BATCH, "seq_len": LENGTH, "tp": 2, "precision": "fp32", **options},
    )


def step(build: Callable[[], nn.Module], plan: Plan | None, seeds: tuple[int, ...]) -> tuple[float, dict[str, Tensor]]:
    """The means of losses and gradients of one process on each batch, or those of a rank on its own.

    A hook that is not linear sees one batch's gradient in both.
    """
    torch.manual_seed(0)
    model = build()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        seeds = (seeds[plan.mesh.data_rank(dist.get_rank())],)
    batches = [text(BATCH, LENGTH, seed) for seed in seeds]
    values = [loss(model(batch["tokens"]), batch) for batch in batches]
    for value in values:
        value.backward()
    found = {name: weight.grad / len(batches) for name, weight in model.named_parameters() if weight.grad is not None}
    return sum(value.item() for value in values) / len(batches), {
        n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()
    }


def check_equals_one_process(build: Callable[[], nn.Module], plan: Plan, seeds: tuple[int, ...] = (1, 2)) -> None:
    seeds = seeds[: plan.mesh.data_parallel]
    value, gradients = step(build, None, seeds)
    applied = run_ranks(plan.mesh.num_gpus, step, build, plan, seeds, timeout_s=300)
    values = [applied[plan.mesh.tp * i][0] for i in range(len(seeds))]
    assert sum(values) / len(values) == pytest.approx(value, rel=1e-5)
    for _, found in applied:
        assert found.keys() == gradients.keys()
        assert max(relative_errors(found, gradients).values()) < 1e-4


def sharded(plan: Plan) -> set[str]:
    return {name for name, p in plan.parameters.items() if p.placement.kind is LayoutKind.SHARD}


@pytest.mark.parametrize(
    ("mix", "opaque", "reason", "gpus"),
    [
        (Hooked, "layers.*.mix.layer", "has a parameter with a gradient hook", 2),
        (Shares, "layers.*.mix", "torch.cond", 2),
        pytest.param(Numbers, "layers.*.mix", "values, which depend on weights", RANKS, marks=pytest.mark.long),
        pytest.param(Normed, None, "", RANKS, marks=pytest.mark.long),
        pytest.param(Picks, "layers.*.mix", "torch.cond", RANKS, marks=pytest.mark.long),
        pytest.param(Iterates, "layers.*.mix", "while_loop", RANKS, marks=pytest.mark.long),
        pytest.param(Scans, "layers.*.mix", "scan", RANKS, marks=pytest.mark.long),
        pytest.param(Maps, "layers.*.mix", "map", RANKS, marks=pytest.mark.long),
    ],
)
def test_what_runs_whole_equals_one_process(mix: type[nn.Module], opaque: str | None, reason: str, gpus: int) -> None:
    def build() -> nn.Module:
        return Model(mix)

    plan = solve(build, gpus=gpus)
    assert plan.proof.status is ProofStatus.PROVEN
    assert set(plan.opaque or {}) == ({opaque} if opaque else set())
    assert all(re.search(reason, whole.reason) and whole.seconds > 0 for whole in (plan.opaque or {}).values())
    assert sharded(plan) >= SHARDED
    check_equals_one_process(build, plan)


@pytest.mark.long
def test_data_ranks_that_pick_otherwise_reduce_alike() -> None:
    """Of the function of torch.cond that is not taken, torch gives zeros: every data rank has every gradient."""

    def build() -> nn.Module:
        return Model(Picks)

    def taken(seed: int) -> bool:
        return step(build, None, (seed,))[1]["layers.0.mix.one.weight"].abs().sum().item() > 0

    seeds = (next(seed for seed in range(20) if taken(seed)), next(seed for seed in range(20) if not taken(seed)))
    check_equals_one_process(build, solve(build), seeds)


class Remembers(nn.Module):
    """Gives a number that data decides to the code around it: only the model as a whole has a description."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> float:
        return self.scale.item()


class Scaled(nn.Module):
    """Code that is given that number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.number, self.head = nn.Embedding(VOCAB, DIM), Remembers(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x * self.number(x))


def test_where_a_module_cannot_stand_as_one_operator_the_one_around_it_does() -> None:
    plan = solve(Scaled, gpus=2)
    assert plan.proof.status is ProofStatus.PROVEN
    assert set(plan.opaque or {}) == {"<root>"}
    assert not sharded(plan)
    assert plan.predicted.time_s["compute"] >= plan.opaque["<root>"].seconds > 0
    check_equals_one_process(Scaled, plan)


class Fails(nn.Module):
    """A model that fails when it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(HIDDEN, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(F.one_hot(tokens, DIM).float())


def test_a_model_that_does_not_run_fails_where_it_fails() -> None:
    with pytest.raises(ModelError, match=r"in module 'layers\.1'"):
        solve(Fails, gpus=2)


@functools.cache
def numbers() -> Plan:
    return solve(lambda: Model(Numbers), gpus=2)


@functools.cache
def traced() -> tuple[nn.Module, ModelGraph, Opaques]:
    with torch.device("meta"):
        model = Model(Numbers)
    return model, *trace_marking(model, lambda: copied(model), text(BATCH, LENGTH), loss=loss)


def tampered(change: str) -> Plan:
    """The plan of a model with numbers made of weights, with something changed about the first module that is whole."""
    plan = numbers()
    match change:
        case "a weight below it rests sharded":
            own = dict(plan.parameters)
            weight = own.pop("layers.*.mix.layer.weight")
            reads = {"layers.*.mix": S(0)}
            own["layers.*.mix.layer.weight"] = replace(weight, placement=S(0), reads=reads)
            return replace(plan, parameters=own)
        case "its input enters sharded":
            return entering(plan, S(1))
        case "its input enters as summands":
            return entering(plan, P)
        case "its weight is read as summands":
            own = dict(plan.parameters)
            weight = own["layers.*.mix.layer.weight"]
            own["layers.*.mix.layer.weight"] = replace(weight, reads={"layers.*.mix": R_STAR})
            return replace(plan, parameters=own)
        case "it is not said to run whole":
            return replace(plan, opaque=None)
        case "another module is said to run whole":
            return replace(plan, opaque={**(plan.opaque or {}), "layers.*.up": next(iter(plan.opaque.values()))})
        case _:
            return plan


def entering(plan: Plan, target: Layout) -> Plan:
    """The plan with what enters the module converted to another layout."""
    boundary = plan.boundaries["layers.*.mix"]
    crossing = boundary.inputs["x"]
    assert crossing.conversion.target == R
    changed = replace(crossing, conversion=replace(crossing.conversion, target=target))
    return replace(plan, boundaries={**plan.boundaries, "layers.*.mix": replace(boundary, inputs={"x": changed})})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("nothing", None),
        ("a weight below it rests sharded", "tpplan.opaque.default"),
        ("its input enters sharded", "tpplan.opaque.default"),
        ("its input enters as summands", "tpplan.opaque.default"),
        ("its weight is read as summands", "tpplan.opaque.default"),
        ("it is not said to run whole", "runs whole, but the plan does not say so"),
        ("another module is said to run whole", "the plan says that it runs whole, but it does not"),
    ],
)
def test_a_module_that_runs_whole_types_only_where_all_of_it_is_whole(change: str, complaint: str | None) -> None:
    found = typecheck(traced()[1], tampered(change))
    assert (found is None) == (complaint is None)
    assert complaint is None or complaint in found.message


def test_the_structure_of_a_module_that_runs_whole_is_held_against_what_is_applied() -> None:
    """A weight below it handed over as a slice: another call than was seen. The right plan passes."""
    model, _, opaques = traced()
    inputs = text(BATCH, LENGTH)
    assert len(opaques.calls) == 1  # layers that are alike are observed once
    assert not numbers().proof.cuts
    trace(applied_as(model, numbers(), 0), inputs, loss=loss, opaques=opaques)
    with pytest.raises(TraceError, match="is called with other shapes or modes than it was before"):
        trace(applied_as(model, tampered("a weight below it rests sharded"), 0), inputs, loss=loss, opaques=opaques)


def test_a_module_that_runs_whole_is_in_the_report_with_its_reason_and_price() -> None:
    plan = Plan.from_dict(numbers().to_dict())
    assert plan == numbers()
    shown = " ".join(render(plan, width=200).split())
    assert re.search(r"runs whole layers\.\*\.mix \(\S+ \S+ of the step\): .*depend on weights", shown)

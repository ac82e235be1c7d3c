"""The typing half of the proof: right plans type, planted wrong ones do not, random changes are right or refused.

What is planted runs on every rank: its local shapes fit, and only its numbers are wrong, which is shown too.
"""

import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import tiny_llama
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import NAMES, eager_to_shard, example, solve_example
from one_process import relative_errors
from plans import Boundaries, Parameters, handmade_plan
from ranks import run_ranks
from test_prove import DIM as PROVE_DIM
from test_prove import LENGTH, Scaled
from test_prove import Model as ProveModel
from test_prove import solve as solve_prove
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.apply.collectives.cross_entropy import cross_entropy
from tpplan.core.errors import ModelError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import R_STAR, ROWS, Conversion, P, R, S
from tpplan.core.mesh import Mesh
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.plan import SHAPE, BoundaryPlan, CrossingPlan, Plan, ProofStatus
from tpplan.plan.proof_hash import as_proven
from tpplan.search import counterexamples
from tpplan.trace.trace import trace

#: relative to the largest entry: what float32 sums in another order differ by, and what no rounding explains
SAME, WRONG = 1e-5, 1e-3

TP2 = Mesh(tp=2)


# ---- right plans type


@pytest.mark.parametrize("name", NAMES)
def test_solved_plans_type(name: str) -> None:
    """As their files say them, whatever dtype crosses. (The planner checks each plan it proves in its own graph.)"""
    module = example(name)
    with torch.device("meta"):
        model = module.build_model()
    graph = trace(model, module.example_inputs(4, 32), loss=module.loss)
    for ranks, precision in ((2, "fp32"), (4, "bf16-mixed")):
        plan = solve_example(name, eager_to_shard(), gpus=ranks, tp=ranks, precision=precision, prove=False)
        assert typecheck(graph, Plan.from_dict(plan.to_dict())) is None


@functools.cache
def llama_graph(*, is_tied: bool = False) -> ModelGraph:
    ids, targets = tiny_llama.batch()
    return trace(
        tiny_llama.build(is_tied=is_tied),
        {"ids": ids, "targets": targets},
        loss=lambda outputs, inputs: cross_entropy(outputs, inputs["targets"]),
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_plans_by_hand_type(is_tied: bool) -> None:
    graph, model = llama_graph(is_tied=is_tied), tiny_llama.build(is_tied=is_tied)
    for style in (tiny_llama.tensor_parallel, tiny_llama.sequence_parallel, tiny_llama.vocabulary_parallel):
        for tp in (2, 4):
            assert typecheck(graph, style(model, Mesh(tp=tp))) is None
    assert typecheck(graph, tiny_llama.data_parallel(model, Mesh(shard=2))) is None


# ---- fifteen wrong plans, and a right neighbour of each
# B batch, T sequence, D model, F hidden, H heads, E their width

B, T, D, F_, H, E = 2, 8, 16, 32, 4, 4


class Model(nn.Module):
    """A body between what is R and carries a gradient, and a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(D, D), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x)).square().mean()


class Between(nn.Module):
    """down(op(up(x))): columns, and then an op that sees a slice of F."""

    def __init__(self, op: Callable[[Tensor], Tensor], *, bias: bool = False, num_down: int = F_) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F_, bias=False), nn.Linear(num_down, D, bias=bias)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.op(self.up(x)))


class Reduced(nn.Module):
    """op(up(x)), where op takes F away."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(D, F_, bias=False)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.up(x))


class Grouped(nn.Module):
    """Group norm over F as channels, which are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, F_, bias=False), nn.GroupNorm(1, F_), nn.Linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))


class Shifted(nn.Module):
    """A constant after the product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F_, bias=False), nn.Linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + 1.0


def heads(x: Tensor) -> Tensor:
    """[B, T, H E] -> [B, H, T, E], for as many heads as there are."""
    return x.unflatten(-1, (-1, E)).transpose(1, 2)


class Mix(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Queries(nn.Module):
    """Attention whose tensors cross a boundary, where their layouts may change."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(heads(self.q(x)), heads(self.k(x)), heads(self.v(x))).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Attention with as many heads as the weights give it; keys and values may have fewer than queries."""

    def __init__(self, num_kv_heads: int = H) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = (nn.Linear(D, num_kv_heads * E, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class SharedKeys(nn.Module):
    """One head of keys and values for all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = nn.Linear(D, E, bias=False), nn.Linear(D, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        y = torch.softmax(q @ k.transpose(-1, -2) / E**0.5, -1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """Tokens side by side, each normalized, by itself or by the others."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)) * torch.arange(D, device=x.device)


class Positions(nn.Module):
    """Positions from the length that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.arange(x.shape[1], device=x.device)[:, None]


class GivenPositions(nn.Module):
    """Positions from outside, sliced as the tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Added()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.arange(x.shape[1], device=x.device)[:, None])


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * self.scale + positions


class Doubled(nn.Module):
    """What the inner module is given is read again afterwards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(D, F_, bias=False), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.inner(y) + y


class Twice(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0) if self.in_place else x * 2.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A module under a plan."""

    build: Callable[[], nn.Module]
    parameters: Parameters
    boundaries: Boundaries

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self.build())

    def plan(self) -> Plan:
        return handmade_plan(self.model(), TP2, parameters=self.parameters, boundaries=self.boundaries)

    def graph(self) -> ModelGraph:
        return trace(self.model(), {"x": inputs()})


def inputs() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


COLUMN, ROW, SPLIT = ("S(0)", "S(0)"), ("S(1)", "S(1)"), ("R", "R*")
#: Megatron's f and g at the body
PAIR: Boundaries = {"body": ({"x": "R -> R*"}, {"output": "P -> R"})}
#: columns, and what comes of them gathered before anything else reads it
GATHERED: Boundaries = {"body": ({"x": "R -> R*"}, {}), "body.up": ({}, {"output": "S(2) -> R"})}
UP: Parameters = {"body.up.weight": COLUMN}
UP_DOWN: Parameters = {**UP, "body.down.weight": ROW}
ATTENTION: Parameters = {f"body.{name}.weight": COLUMN for name in "qkv"} | {"body.o.weight": ROW}


def between(op: Callable[[Tensor], Tensor]) -> tuple[Case, Case]:
    """An op on slices of F, and on all of it."""
    return Case(lambda: Between(op), UP_DOWN, PAIR), Case(lambda: Between(op), UP, GATHERED)


def at(module: str, inputs: Mapping[str, str], output: str) -> Boundaries:
    return {module: (inputs, {"output": output})}


def mixed(queries: str, others: str, output: str) -> Case:
    conversions = {"q": f"R -> {queries}", "k": f"R -> {others}", "v": f"R -> {others}"}
    return Case(Queries, {}, at("body.mix", conversions, f"{output} -> R"))


def normalized(norm: Callable[[], nn.Module], read: str) -> Case:
    weights = {f"body.norm.{name}": ("R", read) for name in ("weight", "bias")}
    return Case(lambda: Tokens(norm()), weights, at("body.norm", {"input": "R -> S(0)"}, "S(0) -> R"))


def topk(x: Tensor) -> Tensor:
    return x.topk(D, -1).values


def root_mean_square_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


#: by name: the op that must be refused, the wrong plan, and its right neighbour
PLANTED: dict[str, tuple[str, Case, Case]] = {
    "softmax over a sharded dim": ("aten.softmax.int", *between(lambda x: x.softmax(-1))),
    "norm over a sharded dim": ("aten.mean.dim", *between(root_mean_square_norm)),
    "layer norm over a sharded dim": ("aten.layer_norm.default", *between(lambda x: F.layer_norm(x, x.shape[-1:]))),
    "topk over a sharded dim": (
        "aten.topk.default",
        Case(lambda: Between(topk, num_down=D), UP, at("body", {"x": "R -> R*"}, "R -> R")),
        Case(lambda: Between(topk, num_down=D), UP, GATHERED),
    ),
    "cumsum over a sharded dim": ("aten.cumsum.default", *between(lambda x: x.cumsum(-1))),
    "mean taken as partial": (
        "aten.mean.dim",
        Case(lambda: Reduced(lambda x: x.mean(-1)), UP, PAIR),
        Case(lambda: Reduced(lambda x: x.sum(-1) / F_), UP, PAIR),
    ),
    "causal attention on sharded queries": (
        "aten.scaled_dot_product_attention.default", mixed("S(2)", "R*", "S(2)"), mixed("S(1)", "S(1)", "S(1)"),
    ),
    "fused q, k, v sharded contiguously": (
        "aten.chunk.default",
        Case(Fused, {"body.qkv.weight": COLUMN, "body.o.weight": ROW}, PAIR),
        Case(Fused, {"body.qkv.weight": ("S(0)", f"S(0; {D}, {D}, {D})"), "body.o.weight": ROW}, PAIR),
    ),
    "a bias added on every rank": (
        "aten.linear.default",
        Case(lambda: Between(torch.relu, bias=True), {**UP_DOWN, "body.down.bias": ("R", "R")}, PAIR),
        Case(lambda: Between(torch.relu, bias=True), {**UP_DOWN, "body.down.bias": ("R", "P")}, PAIR),
    ),
    "a constant added to a partial": (
        "aten.add.Tensor",
        Case(Shifted, UP_DOWN, PAIR),
        Case(Shifted, UP_DOWN, {"body": ({"x": "R -> R*"}, {}), "body.down": ({}, {"output": "P -> R"})}),
    ),
    "group norm on sharded channels of one group": (
        "aten.group_norm.default",
        Case(Grouped, {**UP_DOWN, "body.norm.weight": COLUMN, "body.norm.bias": COLUMN}, PAIR),
        Case(Grouped, UP, GATHERED),
    ),
    "batch norm on a sharded batch": (
        "aten.batch_norm.default",
        normalized(lambda: nn.BatchNorm1d(D), "R*"),
        normalized(lambda: nn.LayerNorm(D), "R*"),
    ),
    "a norm's weight read as R": (
        "aten.layer_norm.default",
        normalized(lambda: nn.LayerNorm(D), "R"),
        normalized(lambda: nn.LayerNorm(D), "R*"),
    ),
    "positions from a local length": (
        "aten.add.Tensor",
        Case(Positions, {"body.scale": SPLIT}, at("body", {"x": "R -> S(1)"}, "S(1) -> R")),
        Case(
            GivenPositions,
            {"body.inner.scale": SPLIT},
            at("body.inner", {"x": "R -> S(1)", "positions": "R -> S(0)"}, "S(1) -> R"),
        ),
    ),
    "keys and values whole, their gradients too": (
        "aten.linear.default",
        Case(SharedKeys, {"body.q.weight": COLUMN, "body.o.weight": ROW}, PAIR),
        Case(
            SharedKeys,
            {"body.q.weight": COLUMN, "body.o.weight": ROW, "body.k.weight": SPLIT, "body.v.weight": SPLIT},
            PAIR,
        ),
    ),
    "half the query heads with all key heads": (
        "aten.scaled_dot_product_attention.default",
        Case(
            lambda: Separate(2),
            {"body.q.weight": COLUMN, "body.o.weight": ROW, "body.k.weight": SPLIT, "body.v.weight": SPLIT},
            PAIR,
        ),
        Case(lambda: Separate(2), ATTENTION, PAIR),
    ),
    "written to after it crossed": (
        "input x of body.inner",
        Case(lambda: Doubled(Twice(in_place=True)), {}, at("body.inner", {"x": "R -> S(2)"}, "S(2) -> R")),
        Case(lambda: Doubled(Twice(in_place=False)), {}, at("body.inner", {"x": "R -> S(2)"}, "S(2) -> R")),
    ),
}  # fmt: skip


def test_what_was_written_to_before_it_crosses_may_be_converted() -> None:
    class Before(Doubled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone().mul_(3.0))

    case = Case(lambda: Before(Twice(in_place=False)), {}, at("body.inner", {"x": "R -> S(2)"}, "S(2) -> R"))
    assert any(op.target == "aten.mul_.Tensor" for op in case.graph().ops)
    assert typecheck(case.graph(), case.plan()) is None


@pytest.mark.parametrize("name", PLANTED)
def test_planted_wrong_plan_is_refused_and_its_neighbour_is_not(name: str) -> None:
    title, wrong, right = PLANTED[name]
    graph = wrong.graph()
    found = typecheck(graph, wrong.plan())
    assert found is not None
    assert found.message.startswith(f"{title} in body" if title.startswith("aten") else title)
    assert set(found.blamed) <= {node.name for node in graph.nodes}
    assert len(found.blamed) == 1
    assert typecheck(right.graph(), right.plan()) is None


Outcome = tuple[float, dict[str, Tensor]]


def one_step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Outcome:
    torch.manual_seed(2)
    loss = loss_of(model)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def loss_of_case(model: nn.Module) -> Tensor:
    return model(inputs())


def error(found: Outcome, expected: Outcome) -> float:
    """The largest relative error of the loss and of any gradient."""
    assert found[1].keys() == expected[1].keys()
    return max(abs(found[0] / expected[0] - 1), *relative_errors(found[1], expected[1]).values())


def applied_cases() -> list[Outcome]:
    return [
        one_step(tpplan.apply_plan(case.model(), case.plan()), loss_of_case)
        for _, *cases in PLANTED.values()
        for case in cases
    ]


def test_planted_plans_are_wrong_and_their_neighbours_right() -> None:
    """On two real ranks: the checker would prove nothing if what it refuses were right."""
    expected = [one_step(case.model(), loss_of_case) for _, *cases in PLANTED.values() for case in cases]
    every = run_ranks(2, applied_cases)
    errors = [max(error(found, one) for found in ranks) for one, *ranks in zip(expected, *every, strict=True)]
    for name, wrong, right in zip(PLANTED, errors[::2], errors[1::2], strict=True):
        assert wrong > WRONG, name
        assert right < SAME, name


def test_tied_weights_laid_out_apart_are_refused() -> None:
    """The fifteenth: the plan of the untied model would untie them. apply_plan refuses it, too."""
    graph, untied, tied = llama_graph(is_tied=True), tiny_llama.build(), tiny_llama.build(is_tied=True)
    found = typecheck(graph, tiny_llama.vocabulary_parallel(untied, TP2))
    assert found is not None
    assert found.message == "parameter head.weight: in the plan, not in the model"
    plan = tiny_llama.vocabulary_parallel(tied, TP2)
    assert typecheck(graph, plan) is None
    apart = {"embedding.weight": dataclasses.replace(plan.parameters["embedding.weight"], aliases=())}
    found = typecheck(graph, dataclasses.replace(plan, parameters={**plan.parameters, **apart}))
    assert found is not None
    assert found.message.startswith("parameter embedding.weight: tied to nothing in the plan, to head.weight in")


def changed_parameter(plan: Plan, name: str, **changes: Any) -> Plan:
    parameter = dataclasses.replace(plan.parameters[name], **changes)
    return dataclasses.replace(plan, parameters={**plan.parameters, name: parameter})


def changed_boundary(plan: Plan, module: str, inputs: Mapping[str, Conversion]) -> Plan:
    crossings = {path: CrossingPlan(conversion, "float32") for path, conversion in inputs.items()}
    boundary = BoundaryPlan(inputs=crossings, outputs={})
    return dataclasses.replace(plan, boundaries={**plan.boundaries, module: boundary})


HEAD, Q = "head.weight", "layers.0.attention.q.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: changed_parameter(p, Q, shape=(64, 32)),
            f"{Q}: shape (64, 32), trainable True in the plan; (32, 32)",
        ),
        (lambda p: changed_parameter(p, Q, trainable=False), f"{Q}: shape (32, 32), trainable False in the plan"),
        (lambda p: changed_parameter(p, Q, aliases=("x",)), f"{Q}: tied to x in the plan, to nothing"),
        (lambda p: changed_parameter(p, Q, placement=P), f"{Q}: (32, 32) cannot rest as P on 2 ranks"),
        (lambda p: changed_parameter(p, Q, placement=S(0, 16, 16)), f"{Q}: (32, 32) cannot rest as S(0; 16, 16)"),
        (lambda p: changed_parameter(p, Q, placement=S(2)), f"{Q}: (32, 32) cannot rest as S(2)"),
        (
            lambda p: changed_parameter(p, HEAD, reads={}),
            f"{HEAD}: head reads it, but the plan gives no layout for that",
        ),
        (lambda p: changed_parameter(p, HEAD, reads={"head": R, "norm": R}), f"{HEAD}: norm does not read it"),
        (lambda p: changed_parameter(p, HEAD, reads={"head": ROWS}), f"{HEAD}: head cannot read (64, 32) as rows"),
        (lambda p: changed_parameter(p, HEAD, placement=S(0), reads={"head": R_STAR}), "as R* where it rests as S(0)"),
        (lambda p: changed_boundary(p, "head", {"x": Conversion(R, R_STAR)}), "input x of head: the plan converts it"),
        (lambda p: changed_boundary(p, "tail", {}), "module tail: in the plan, not in the model"),
        (
            lambda p: changed_boundary(p, "", {"ids": Conversion(R, S(2))}),
            "input ids of <root>: the plan converts R -> S",
        ),
        (lambda p: changed_boundary(p, "", {"ids": Conversion(R, P)}), "the tensor carries no gradient"),
        (lambda p: changed_boundary(p, "", {"ids": Conversion(R, ROWS)}), "the module is not one lookup"),
        (lambda p: dataclasses.replace(p, outputs={"logits": S(2)}), "output logits: in the plan, not in the model"),
        (lambda p: dataclasses.replace(p, outputs={"output": S(2)}), "output output is R, expected S(2)"),
    ],
)
def test_what_the_graph_has_not_or_cannot_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    plan = tiny_llama.tensor_parallel(tiny_llama.build(), TP2)
    found = typecheck(llama_graph(), change(plan))
    assert found is not None
    assert message in found.message


class Classified(nn.Module):
    """A loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, F_, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(B * T, device=x.device) % (F_ // 2)
        return F.cross_entropy(self.up(x).flatten(0, 1), targets)


def test_a_loss_in_the_model_is_told_of_its_slices() -> None:
    sharded = Case(Classified, UP, {"body": ({"x": "R -> R*"}, {})})
    whole = Case(Classified, {}, {})
    graph = sharded.graph()
    for case, losses, message in (
        (sharded, {"body": F_}, None),
        (sharded, {}, "tpplan.cross_entropy.default in body: reads"),
        (sharded, {"body": 2 * F_}, "tpplan.cross_entropy.default in body: reads"),
        (whole, {}, None),
        (whole, {"body": 2 * F_}, "tpplan.cross_entropy.default in body: reads"),
        (whole, {"<root>": F_}, "loss of <root>: in the plan, not in the model"),
    ):
        found = typecheck(graph, dataclasses.replace(case.plan(), losses=losses))
        assert (found is None) == (message is None)
        assert message is None or (found is not None and found.message.startswith(message))


class Summed(Model):
    """A loss that is linear in what the body gives, and so partial where that is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x)).sum()


def test_the_loss_is_not_a_summand() -> None:
    model = Summed(Between(torch.relu))
    graph = trace(model, {"x": inputs()})
    parts: Boundaries = {"body": ({"x": "R -> R*"}, {})}
    for outputs, message in (
        ({}, "output output is P, expected R"),
        ({"output": "P"}, "output output is P, expected P"),
    ):
        found = typecheck(graph, handmade_plan(model, TP2, parameters=UP_DOWN, boundaries=parts, outputs=outputs))
        assert found is not None
        assert found.message == message
    assert typecheck(graph, handmade_plan(model, TP2, parameters=UP_DOWN, boundaries=PAIR)) is None


def test_numbers_read_off_a_local_shape_are_the_other_half() -> None:
    """Every layout is right where a module divides by the width it sees: that the proof's other half finds, and the
    module is told the width of one process."""
    build: Callable[[], nn.Module] = lambda: ProveModel(Scaled())  # noqa: E731
    graph = trace(build(), {"x": torch.randn(1, LENGTH, PROVE_DIM)})
    unproven = solve_prove(build, prove=False)
    assert unproven.proof.status is ProofStatus.UNPROVEN
    assert typecheck(graph, unproven) is None
    assert not unproven.size_plans()
    proven = solve_prove(build)
    assert proven.proof.status is ProofStatus.PROVEN
    assert {size.call for sizes in proven.size_plans().values() for size in sizes} == {SHAPE}


# ---- one entry changed at random

NUM_MUTATIONS = 150
STYLES = (tiny_llama.tensor_parallel, tiny_llama.sequence_parallel, tiny_llama.vocabulary_parallel)
LAYOUTS = (R, R_STAR, P, S(0), S(1), S(2), ROWS)


def mutations(plan: Plan, graph: ModelGraph, rng: random.Random) -> Iterator[tuple[str, Plan]]:
    """The plan with one entry changed, again and again: what was changed, and the plan."""
    kinds = (_other_placement, _other_reading, _other_crossing, _other_output)
    while True:
        try:
            what, mutated = rng.choices(kinds, (1, 2, 4, 0.2))[0](plan, graph, rng)
        except ValueError:  # no such conversion exists
            continue
        if mutated != plan:
            yield what, mutated


def _other_placement(plan: Plan, graph: ModelGraph, rng: random.Random) -> tuple[str, Plan]:
    name, layout = rng.choice(sorted(plan.parameters)), rng.choice(LAYOUTS)
    parameter = dataclasses.replace(plan.parameters[name], placement=layout)
    return f"{name} rests as {layout}", dataclasses.replace(plan, parameters={**plan.parameters, name: parameter})


def _other_reading(plan: Plan, graph: ModelGraph, rng: random.Random) -> tuple[str, Plan]:
    name, layout = rng.choice(sorted(plan.parameters)), rng.choice(LAYOUTS)
    old = plan.parameters[name]
    reader = rng.choice(sorted(old.reads))
    parameter = dataclasses.replace(old, reads={**old.reads, reader: layout})
    return f"{reader} reads {name} as {layout}", dataclasses.replace(
        plan, parameters={**plan.parameters, name: parameter}
    )


def _other_crossing(plan: Plan, graph: ModelGraph, rng: random.Random) -> tuple[str, Plan]:
    """A conversion added, taken away, or with another end."""
    boundary = rng.choice(graph.boundaries)
    old = plan.boundaries.get(boundary.module, BoundaryPlan(inputs={}, outputs={}))
    sides = {"input": dict(old.inputs), "output": dict(old.outputs)}
    known = sides[boundary.direction].pop(boundary.path, None)
    conversion = Conversion(rng.choice(LAYOUTS), rng.choice(LAYOUTS))
    if known is not None:
        source, target = known.conversion.source, known.conversion.target
        conversion = rng.choice((Conversion(source, conversion.target), Conversion(conversion.source, target)))
    if known is None or rng.random() < 0.7:
        if conversion.is_identity:
            raise ValueError(f"{conversion} changes nothing")
        sides[boundary.direction][boundary.path] = CrossingPlan(conversion, graph.values[boundary.operand].dtype)
    changed = BoundaryPlan(inputs=sides["input"], outputs=sides["output"])
    what = f"{boundary.direction} {boundary.path} of {boundary.module}: {sides[boundary.direction].get(boundary.path)}"
    return what, dataclasses.replace(plan, boundaries={**plan.boundaries, boundary.module: changed})


def _other_output(plan: Plan, graph: ModelGraph, rng: random.Random) -> tuple[str, Plan]:
    layout = rng.choice(LAYOUTS)
    return f"output as {layout}", dataclasses.replace(plan, outputs={"output": layout})


def loss_of_llama(model: nn.Module) -> Tensor:
    return tiny_llama.loss_of(model, *tiny_llama.batch())


def applied_plans(plans: list[Plan]) -> list[Outcome]:
    return [one_step(tpplan.apply_plan(tiny_llama.build(), plan), loss_of_llama) for plan in plans]


def test_a_plan_with_one_entry_changed_is_refused_or_right() -> None:
    """What still types equals one process on two real ranks."""
    graph, accepted = llama_graph(), {}
    for seed, style in enumerate(STYLES):
        found = mutations(style(tiny_llama.build(), TP2), graph, random.Random(seed))
        some = itertools.islice(found, NUM_MUTATIONS // len(STYLES))
        accepted |= {f"{style.__name__}: {what}": plan for what, plan in some if typecheck(graph, plan) is None}
    assert 1 <= len(accepted) < NUM_MUTATIONS // 5
    expected = one_step(tiny_llama.build(), loss_of_llama)
    for name, *ranks in zip(accepted, *run_ranks(2, applied_plans, list(accepted.values())), strict=True):
        assert max(error(found, expected) for found in ranks) < SAME, name


# ---- what the planner makes of it


def test_what_does_not_type_is_cut_and_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that the planner believes and the checker does not is a counterexample like any other."""
    original = counterexamples.typecheck

    def strict(graph: ModelGraph, plan: Plan, **options: Any) -> Mistyped | None:
        assert original(graph, plan, **options) is None
        relu = next(op for op in graph.ops if op.target == "aten.relu.default")
        sharded = plan.parameters["mlp.up_proj.weight"].placement == S(0)
        return Mistyped(message="relu is not believed", blamed=(relu.name,)) if sharded else None

    monkeypatch.setattr(counterexamples, "typecheck", strict)
    plan = solve_prove(lambda: ProveModel(nn.Identity()))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts
    assert all(cut.startswith("on 2 ranks ") and cut.endswith(": relu is not believed") for cut in plan.proof.cuts)
    assert plan.parameters["mlp.up_proj.weight"].placement != S(0)


def test_a_plan_that_is_another_graph_s_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        counterexamples, "typecheck", lambda graph, plan, **options: Mistyped(message="parameter x: unknown")
    )
    with pytest.raises(ModelError, match="no sharding explains it: parameter x: unknown; plan with --tp 1"):
        solve_prove(lambda: ProveModel(nn.Identity()))


def say_that_it_is_unproven() -> None:
    plan = tiny_llama.tensor_parallel(tiny_llama.build(), TP2)
    proven = as_proven(plan)
    edited = dataclasses.replace(proven, optimizer="sgd")
    of_before = dataclasses.replace(proven, proof=dataclasses.replace(proven.proof, plan_hash=None))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tpplan.apply_plan(tiny_llama.build(), proven)
        assert not said
        for unproven in (plan, edited, of_before):
            tpplan.apply_plan(tiny_llama.build(), unproven)
    reasons = ["nothing was checked", "it was changed after it was proven", "its proof carries no hash"]
    begins = [f"the plan is unproven: {why}" for why in reasons] if dist.get_rank() == 0 else []
    assert [str(warning.message)[: len(begin)] for warning, begin in zip(said, begins, strict=True)] == begins


def test_applying_an_unproven_plan_warns_once() -> None:
    run_ranks(2, say_that_it_is_unproven)

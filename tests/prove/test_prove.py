"""The structure check finds what only running the applied model shows, and the planner then keeps what can be kept."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from plans import handmade_plan
from ranks import run_ranks
from test_planner import formulate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan import solvers
from tpplan.apply.collectives import redistribute
from tpplan.apply.modules import local_modules, parameter_reads
from tpplan.apply.modules.local_sizes import LocalSizes
from tpplan.core.errors import PlanMismatchError, VerificationError
from tpplan.core.graph import Boundary, ModelGraph
from tpplan.core.layout import R_STAR, Conversion, LayoutKind, R, S
from tpplan.core.mesh import Mesh
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.plan_sections import boundary_plans, outputs, parameter_plans
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import SHAPE, Plan, ProofStatus, SizePlan
from tpplan.prove import original
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.module_scope import given_nodes, shards_in
from tpplan.prove.original import Original
from tpplan.prove.structure import check_structure
from tpplan.search import counterexamples
from tpplan.solvers.problem import Expression, Term
from tpplan.trace.trace import trace, unchanged

DIM, HIDDEN, HEADS, LENGTH = 32, 128, 4, 16


class Attention(nn.Module):
    """Causal attention; `split` turns [B, T, D] into [B, T, H, D / H]."""

    def __init__(self, split: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.split = split
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(p(x)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(y.flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return (x + self.mlp(x)).square().mean()


def vectors(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq_len, DIM)}


def solve(
    model: Callable[[], nn.Module],
    *,
    inputs: Callable[[int, int], dict[str, Tensor]] = vectors,
    **options: object,
) -> Plan:
    return tpplan.solve(
        model,
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
        **{"micro_batch": 1, **options},  # type: ignore[arg-type]
    )


def open_sizes(t: Tensor) -> Tensor:
    return t.view(t.shape[0], t.shape[1], -1, DIM // HEADS)


def head_parallel(plan: Plan) -> bool:
    return all(str(plan.parameters[f"first.{n}.weight"].placement) == "S(0)" for n in ("q_proj", "k_proj", "v_proj"))


def test_sizes_left_open_keep_their_heads_sharded() -> None:
    plan = solve(lambda: Model(Attention(open_sizes)))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert head_parallel(plan)
    equals_one_process(lambda: Model(Attention(open_sizes)), plan)


@pytest.mark.parametrize(
    "split",
    [
        lambda t: t.view(t.shape[0], t.shape[1], HEADS, DIM // HEADS),
        lambda t: t.view(t.shape[0], t.shape[1], HEADS, -1),  # runs on half the width, and is silently another model
        lambda t: t.reshape((t.shape[0], t.shape[1], HEADS, DIM // HEADS)),
        lambda t: torch.reshape(t, shape=(t.shape[0], t.shape[1], HEADS, DIM // HEADS)),
        lambda t: t.unflatten(2, (HEADS, DIM // HEADS)),
    ],
    ids=["both baked", "heads baked", "reshape", "keyword", "unflatten"],
)
def test_baked_head_counts_are_replaced_by_a_rank_s_own(split: Callable[[Tensor], Tensor]) -> None:
    build = lambda: Model(Attention(split))  # noqa: E731
    plan = solve(build)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert head_parallel(plan)
    assert {size.written: size.local for size in plan.sizes["first"]}[HEADS] == HEADS // 2
    equals_one_process(build, plan)


class OneHead(Attention):
    """A head for each rank, where what one process copies to make it contiguous is so already."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__(lambda t: t.view(t.shape[0], t.shape[1], -1, DIM // 2))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(p(x)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.writes:
            v = v.contiguous().add_(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.o_proj(y.view(*x.shape[:2], -1))


@pytest.mark.parametrize("writes", [False, True])
def test_copies_that_are_needless_on_a_rank_matter_where_they_are_written_to(writes: bool) -> None:
    build = lambda: Model(OneHead(writes=writes))  # noqa: E731
    plan = solve(build)
    assert plan.proof.status is ProofStatus.PROVEN
    assert head_parallel(plan) == (not writes)
    equals_one_process(build, plan)


class Turned(nn.Module):
    """An MLP's tokens lie in memory in another order than their dims, so that to turn them copies nothing."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp = TurningMLP()
        self.mixing = nn.Linear(LENGTH, LENGTH, bias=False)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.mlp(x))
        turned = self.turn(y.transpose(1, 2)).view(-1, LENGTH)
        return y + self.mixing(turned).view(x.shape[0], DIM, LENGTH).transpose(1, 2)


class TurningMLP(nn.Module):
    """An MLP without modules inside, whose sum over ranks is made where it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(HIDDEN, DIM) / DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (F.relu(x @ self.up.T) @ self.down).transpose(1, 2).contiguous().transpose(1, 2)


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda t: t.contiguous(),
    "view": lambda t: t.view(t.shape[0], -1),
    "write to what is no copy": lambda t: t.contiguous().mul_(2.0),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_converted_values_keep_their_order_in_memory(turn: Callable[[Tensor], Tensor]) -> None:
    build = lambda: Model(Turned(turn))  # noqa: E731
    plan = solve(build)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert plan.parameters["first.mlp.up"].placement == S(0)
    equals_one_process(build, plan)


def test_copies_that_only_a_rank_makes_are_proven_unless_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here conversions lose the order in memory, as those of dims of size 1 do."""
    copies, views, writes = ((lambda turn=turn: Model(Turned(turn))) for turn in TURNS.values())
    plans = [solve(build) for build in (copies, views, writes)]
    monkeypatch.setattr(redistribute, "_memory_order", lambda x: None)
    tpplan.prove_plan(plans[0], copies, vectors)
    with pytest.raises(VerificationError, match="does not run"):
        tpplan.prove_plan(plans[1], views, vectors)
    with pytest.raises(VerificationError, match=r"became aten\.contiguous"):
        tpplan.prove_plan(plans[2], writes, vectors)


class Fused(nn.Module):
    """nanoGPT's attention: one projection, the width and the number of heads written into the code."""

    def __init__(self, take: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.take = take
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.take(self.c_attn(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


@pytest.mark.parametrize(
    "take",
    [
        lambda y: y.split(DIM, dim=2),
        lambda y: torch.split(y, [DIM, DIM, DIM], -1),
        lambda y: y.chunk(3, -1),
        lambda y: (y[..., :DIM], y[:, :, DIM : 2 * DIM], y[..., -DIM:]),
        lambda y: tuple(y.narrow(-1, i * DIM, DIM) for i in range(3)),
        lambda y: y.view(*y.shape[:2], 3, DIM).unbind(2),
    ],
    ids=["split", "split by sizes", "chunk", "slices", "narrow", "unbind"],
)
def test_fused_projections_are_sharded_part_by_part(take: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    build = lambda: Model(Fused(take))  # noqa: E731
    plan = solve(build)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert plan.parameters["first.c_attn.weight"].placement == S(0)
    assert plan.parameters["first.c_proj.weight"].placement == S(1)
    assert plan.sizes["first"]
    equals_one_process(build, plan)


def test_a_batch_written_into_code_is_refused_in_another_batch() -> None:
    """view(4, T, -1, d) of a rank's 2 samples would be taken for 4 samples with half the heads."""
    planned = LocalSizes((SizePlan(call="view", of=(1, 0, 0), count=4, position=0, written=2, local=1),))
    assert planned(Tensor.view, (torch.zeros(1, 16, 32), 2, 16, -1, 8), {}).shape == (1, 16, 4, 8)
    assert planned(Tensor.view, (torch.zeros(4, 16, 32), 4, 16, -1, 8), {}).shape == (4, 16, 4, 8)
    with pytest.raises(PlanMismatchError, match=r"view of a tensor of shape \[2, 16, 32\] with size 4: .* for 2 and"):
        planned(Tensor.view, (torch.zeros(2, 16, 32), 4, 16, -1, 8), {})


def test_slices_are_replaced_in_the_dim_that_the_plan_names() -> None:
    x = torch.arange(4 * 4 * 8).reshape(4, 4, 8)
    end = LocalSizes((SizePlan(call="slice", of=(0, 0, 8), count=3, position=5, written=4, local=2),))
    length = LocalSizes((SizePlan(call="narrow", of=(0, 0, 8), count=3, position=5, written=4, local=2),))

    def sliced(index: object) -> Tensor:
        return end(Tensor.__getitem__, (x, index), {})

    mask = torch.ones(4, 4, dtype=torch.bool)
    for whole in (
        (slice(4), slice(4)),
        (..., slice(4), slice(None)),
        slice(4),
        (0, slice(4)),
        (..., slice(0, 4, 2)),
        3,
    ):
        assert torch.equal(sliced(whole), x[whole])
    for cut in (
        (..., slice(4)),
        (0, 1, slice(4)),
        (None, 0, ..., slice(4)),
        (mask, slice(0, 4)),
        (slice(4), [1], slice(4)),
    ):
        assert torch.equal(sliced(cut), x[cut][..., :2])
    assert length(Tensor.narrow, (x, 1, 0, 4), {}).shape == (4, 4, 8)
    for args, kwargs in (
        ((x, 2, 0, 4), {}),
        ((x, -1), {"start": 0, "length": 4}),
        ((x,), {"dim": 2, "start": 0, "length": 4}),
    ):
        assert length(torch.narrow, args, kwargs).shape == (4, 4, 2)


class Depthwise(nn.Module):
    """A convolution over time of each channel, or of each group of them, between a split and a joining projection."""

    def __init__(self, groups: int, width: int = HIDDEN) -> None:
        super().__init__()
        self.up_proj = nn.Linear(DIM, width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        self.down_proj = nn.Linear(width, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.up_proj(x).transpose(1, 2))
        return self.down_proj(F.silu(y).transpose(1, 2))


@pytest.mark.parametrize("groups", [HIDDEN, 4])
def test_grouped_convolutions_are_sharded_by_groups(groups: int) -> None:
    build = lambda: Model(Depthwise(groups))  # noqa: E731
    plan = solve(build)
    assert plan.proof.cuts == ()
    assert plan.parameters["first.conv.weight"].placement == S(0)
    assert [(size.written, size.local) for size in plan.sizes["first.conv"]] == [(groups, groups // 2)]
    equals_one_process(build, plan)


class Widths(nn.Module):
    """Depthwise convolutions, each of another width, so that none is like another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Depthwise(width, width) for width in (64, 128))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = x + layer(x)
        return x.square().mean()


def test_sizes_that_one_class_has_written_take_one_retrace(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> ModelGraph:
        ran.append(args)
        return trace(*args, **kwargs)

    monkeypatch.setattr(original, "trace", counted)
    plan = solve(Widths)
    assert plan.proof.cuts == ()
    assert {name: [size.local for size in sizes] for name, sizes in plan.size_plans().items()} == {
        f"first.{i}.conv": [width // 2] for i, width in enumerate((64, 128))
    }
    assert len(ran) == 5  # what is written; then both ranks without it, here and at another batch and length


class CastTwice(nn.Module):
    """A weight that is cast where it is no other dtype, so that what comes back is the weight; and then read again."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        first = self.scale.float()
        y = self.up_proj(x) * first
        return self.down_proj(y + self.scale.float().contiguous())


def test_a_weight_cast_in_vain_and_read_again_is_itself() -> None:
    plan = solve(lambda: Model(CastTwice()))
    assert plan.proof.cuts == ()
    assert plan.parameters["first.scale"].placement == S(0)
    equals_one_process(lambda: Model(CastTwice()), plan)


def test_code_that_differs_however_it_is_sharded_soon_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each way to shard what `first` sees is found wrong on its own."""

    def found_wrong(original: Original, plan: Plan, **_: Any) -> Plan | Counterexample:
        assignment = original.assignment
        nodes = given_nodes(assignment.graph, "first")
        node = next((node for node in nodes if shards_in("first", node, assignment.strategy(node.name))), None)
        differs = next(op for op in assignment.graph.ops if op.module == "first")
        return plan if node is None else Counterexample(message="wrong", blamed=(node.name,), node=differs)

    monkeypatch.setattr(counterexamples, "check_structure", found_wrong)
    monkeypatch.setattr(counterexamples, "PATIENCE", 2)
    plan = solve(lambda: Model(Attention(open_sizes)))
    assert plan.proof.rounds == 3  # without end to its patience it takes 5
    guess = "on 2 ranks slices that the code of first sees: 2 counterexamples in code of Attention, the last: wrong"
    assert plan.proof.cuts[-1] == guess
    assert plan.parameters["mlp.up_proj.weight"].placement.kind is LayoutKind.SHARD


class TwoMeanings(Attention):
    """The same number in the same place counts groups of a whole once, and a rank's heads once."""

    def __init__(self, width: int) -> None:
        super().__init__(lambda t: t.view(t.shape[0], t.shape[1], HEADS, DIM // HEADS))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        groups = x[..., : self.width].view(x.shape[0], x.shape[1], HEADS, self.width // HEADS).amax(3, keepdim=True)
        x = (x.unflatten(2, (HEADS, -1)) - groups).flatten(2)
        return super().forward(x)


@pytest.mark.parametrize("width", [DIM, DIM // 2])
def test_a_number_with_two_meanings_is_replaced_where_shapes_tell_them_apart(width: int) -> None:
    """Half the width is what a rank has of the projections, too."""
    build = lambda: Model(TwoMeanings(width))  # noqa: E731
    plan = solve(build)
    assert bool(plan.proof.cuts) == (width == DIM // 2)
    assert head_parallel(plan) == (width == DIM)
    assert plan.parameters["mlp.up_proj.weight"].placement.kind is LayoutKind.SHARD  # what is not to blame stays
    equals_one_process(build, plan)


class Coinciding(Attention):
    """A number of heads stands where the length stands in another call: alike at a length of HEADS."""

    def __init__(self) -> None:
        super().__init__(open_sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(p(x)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        v = v[:, :, None].reshape(x.shape[0], HEADS, x.shape[1], DIM // HEADS)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(y.flatten(2))


def test_a_length_that_happens_to_be_a_number_of_heads_is_left_alone() -> None:
    plan = solve(lambda: Model(Coinciding()))
    assert head_parallel(plan)
    assert [(s.count, s.position, s.written, s.local) for s in plan.sizes["first"]] == [(4, 1, HEADS, HEADS // 2)]
    equals_one_process(lambda: Model(Coinciding()), plan, length=HEADS)


def test_an_unproven_plan_says_so() -> None:
    assert solve(lambda: Model(Attention(open_sizes)), prove=False).proof.status is ProofStatus.UNPROVEN


class Positions(nn.Module):
    """Adds a signal made from the length that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)  # rows of a sequence are all it can be sharded by

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + torch.arange(y.shape[1], dtype=y.dtype, device=y.device)[:, None]


class Scaled(nn.Module):
    """Divides by the width that it sees: right shapes everywhere, another function where the width is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up_proj(x)
        return self.down_proj(F.relu(y) * y.shape[-1] ** -0.5)


@pytest.mark.parametrize("module", [Positions, Scaled])
def test_numbers_read_off_a_sharded_shape_are_found(module: type[nn.Module]) -> None:
    """A width read as a number is told as in one process; positions made whole cannot meet slices of a sequence."""
    plan = solve(lambda: Model(module()))
    assert plan.proof.status is ProofStatus.PROVEN
    assert not plan.proof.cuts
    told = {(size.position, size.written, size.local) for size in plan.sizes.get("first", ()) if size.call == SHAPE}
    assert told == ({(2, HIDDEN, HIDDEN // 2)} if module is Scaled else set())
    assert plan.parameters["mlp.up_proj.weight"].placement.kind is LayoutKind.SHARD
    equals_one_process(lambda: Model(module()), plan)


class Rotary(nn.Module):
    """Positions are made from the embedding's output, and break attention one module further down."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.attention = RotaryAttention()
        self.mlp = MLP()
        self.last = nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10.0
        x = x + self.attention(self.norm(x), angles.cos())
        return self.last(x + self.mlp(x)).square().mean()


class RotaryAttention(Attention):
    def __init__(self) -> None:
        super().__init__(open_sizes)

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (open_sizes(p(x)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q * cos, k * cos, v, is_causal=True).transpose(1, 2)
        return self.o_proj(y.flatten(2))


def test_a_trace_that_breaks_is_blamed_where_it_first_went_astray() -> None:
    """Sharding the sequence at the embedding makes the multiplication by cos fail; arange is where it began."""
    inputs = {"tokens": torch.zeros(1, LENGTH, dtype=torch.long)}
    with torch.device("meta"):
        model = Rotary()
    formulation = formulate(trace(model, inputs), eager_to_shard(), Mesh(tp=2))
    boundaries = {(b.module, b.direction): b.name for b in formulation.space.graph.boundaries}
    embedded = boundaries["embedding", "output"]
    penalty = tuple(float(s.results[0] != S(1)) for s in formulation.space.strategies[embedded])
    wish = Term(name="wish", expressions=(Expression(terms=((embedded, penalty),)),))
    problem = dataclasses.replace(formulation.problem, objective=(*formulation.problem.objective, wish))
    choice = solvers.solve(problem).choice
    assert choice is not None
    assignment = formulation.assignment(choice)
    assert assignment.layout(embedded) == S(1)
    plan = dataclasses.replace(
        handmade_plan(model, Mesh(tp=2)),
        parameters=parameter_plans(assignment),
        boundaries=boundary_plans(assignment),
        outputs=outputs(assignment),
    )
    found = check_structure(original_of(model, inputs, assignment), plan)
    assert isinstance(found, Counterexample)
    said = f"aten.arange.default in the root: the number {LENGTH} became {LENGTH // 2}, at test_prove.py:"
    assert found.message.startswith(said)
    assert embedded in found.blamed


def original_of(model: nn.Module, inputs: Any, assignment: Assignment) -> Original:
    return Original(model=model, inputs=inputs, assignment=assignment, loss=None, cast=unchanged)


class Tower(nn.Module):
    """Takes what its embedding gives, and is not who calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, DIM)
        self.attention = RotaryAttention()
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        return x + self.mlp(self.attention(x, cos))


class Around(nn.Module):
    """Calls the embedding of a child, and makes positions from what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.head = nn.Linear(DIM, 64, bias=False)
        self.head.weight = self.tower.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tower.embedding(tokens)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10.0
        return F.cross_entropy(self.head(self.tower(x, angles.cos())).flatten(0, 1), tokens.flatten())


def test_code_sees_what_the_child_of_a_child_gives_it() -> None:
    with torch.device("meta"):
        graph = trace(Around(), {"tokens": torch.zeros(1, LENGTH, dtype=torch.long)})
    seen = {
        name: {node.module for node in given_nodes(graph, name) if isinstance(node, Boundary)} - {name}
        for name in ("", "tower", "tower.attention")
    }
    assert seen[""] == {"tower", "tower.embedding", "head"}
    assert seen["tower"] == {"tower.embedding", "tower.attention", "tower.mlp"}
    assert seen["tower.attention"] == {f"tower.attention.{name}_proj" for name in "qkvo"}


def test_the_length_read_off_an_embedding_blames_its_sequence_and_no_more() -> None:
    """The one cut is of slices of the sequence: the table, which is the head's too, stays sharded along its width."""
    plan = solve(Around, inputs=lambda batch, seq_len: {"tokens": torch.arange(batch * seq_len).view(batch, seq_len)})
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.parameters["tower.embedding.weight"].placement.kind is LayoutKind.SHARD
    assert len(plan.proof.cuts) <= 1


class Normed(nn.Module):
    """Sequence parallelism around Megatron's pair: every kind of conversion at a boundary but one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = MLP()
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.second = MLP()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.second(self.head(x + self.mlp(self.norm(x))))


def megatron(model: nn.Module) -> Plan:
    return handmade_plan(
        model,
        Mesh(tp=2),
        parameters={
            "embedding.weight": ("S(0)", "S(0)"),
            "norm.weight": ("R", "R*"),
            "norm.bias": ("R", "R*"),
            "mlp.up_proj.weight": ("S(0)", "S(0)"),
            "mlp.down_proj.weight": ("S(1)", "S(1)"),
            "head.weight": ("R", "R"),
            "second.up_proj.weight": ("S(0)", "S(0)"),
            "second.down_proj.weight": ("S(1)", "S(1)"),
        },
        boundaries={
            "embedding": ({"input": "R -> rows"}, {"output": "rows -> S(1)"}),
            "mlp.up_proj": ({"input": "S(1) -> R*"}, {}),
            "mlp.down_proj": ({}, {"output": "P -> S(1)"}),
            "head": ({"input": "S(1) -> R"}, {}),
            "second.up_proj": ({"input": "R -> R*"}, {}),
            "second.down_proj": ({}, {"output": "P -> R"}),
        },
    )


def assigned_as(plan: Plan, graph: ModelGraph) -> Assignment:
    """The choice of every decision that says what the plan says."""
    formulation = formulate(graph, eager_to_shard(), Mesh(tp=2))
    space = formulation.space
    boundaries, parameters = plan.boundary_plans(), plan.parameter_plans()
    fixed: dict[str, Callable[[Strategy], bool]] = {}
    for boundary in graph.boundaries:
        planned = boundaries.get(boundary.module)
        crossings = {} if planned is None else planned.inputs if boundary.direction == "input" else planned.outputs
        crossing = crossings.get(boundary.path)
        fixed[boundary.name] = (
            (lambda s: s.operands == s.results)
            if crossing is None
            else (lambda s, c=crossing: (s.operands, s.results) == ((c.conversion.source,), (c.conversion.target,)))
        )
    for name, readings in space.readings.items():
        for reading in readings:
            layout = parameters[name].reads[reading.op.module]
            fixed[reading.name] = lambda s, layout=layout: s.results == (layout,)
    penalties = tuple(
        Term(
            name="wish",
            expressions=(Expression(terms=((name, tuple(float(not is_planned(s)) for s in space.strategies[name])),)),),
        )
        for name, is_planned in fixed.items()
    )
    solution = solvers.solve(dataclasses.replace(formulation.problem, objective=penalties))
    assert solution.objective == 0.0
    assert solution.choice is not None
    return formulation.assignment(solution.choice)


def structure_of_megatron() -> Plan | Counterexample:
    inputs = {"tokens": torch.zeros(1, LENGTH, dtype=torch.long)}
    with torch.device("meta"):
        model = Normed()
    plan = megatron(model)
    assignment = assigned_as(plan, trace(model, inputs))
    return check_structure(original_of(model, inputs, assignment), plan)


def test_what_apply_makes_of_megatron_s_plan_is_the_model() -> None:
    assert isinstance(structure_of_megatron(), Plan)


def on_the_last_rank_alone(wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """`wrong` where the group's rank is 1, and right elsewhere."""

    def run(*args: Any) -> Any:
        group = next(a.group if hasattr(a, "group") else a for a in args if hasattr(a, "group") or hasattr(a, "rank"))
        return wrong(*args) if group.rank == 1 else right(*args)

    return run


def outputs_stay(self: local_modules.ModuleBinding, output: object) -> object:
    return output


right_forward, right_reduce = redistribute.Converter.forward, redistribute._reduce_scatter
right_call = local_modules.BoundaryConversion.__call__


def without_f(self: local_modules.BoundaryConversion, x: Tensor, frames: list[local_modules.Frame]) -> Tensor:
    """What Megatron calls f does nothing forward."""
    return x if self.conversion == Conversion(R, R_STAR) else right_call(self, x, frames)


@pytest.mark.parametrize(
    ("place", "name", "sabotaged", "message"),
    [
        (local_modules.ModuleBinding, "convert_outputs", outputs_stay, "expected the local shapes"),
        (
            local_modules.ModuleBinding,
            "convert_inputs",
            lambda self, args, kwargs: (args, kwargs),
            "expected the local shapes|run",
        ),
        (
            parameter_reads.ParameterReads,
            "converted",
            lambda self, parameter, converter: parameter.full_tensor(),
            "cannot run",
        ),
        (redistribute, "_reduce_scatter", lambda x, dim, group: x.chunk(2, dim)[0].clone(), "is converted by .* take "),
        (redistribute, "_all_gather", lambda x, dim, group: torch.cat([x, x], dim), "is converted by"),
        (
            redistribute,
            "_reduce_scatter",
            on_the_last_rank_alone(lambda x, dim, group: x.chunk(2, dim)[0].clone(), right_reduce),
            "is converted by",
        ),
        (redistribute.Converter, "forward", lambda self, x: right_forward(self, right_forward(self, x)), "shapes|run"),
        (local_modules.BoundaryConversion, "__call__", lambda self, x, frames: x, "shapes|run|reads what entered"),
        (
            local_modules.BoundaryConversion,
            "__call__",
            lambda self, x, frames: right_call(self, x, frames) * 1,
            "aten.mul",
        ),
        (redistribute.Converter, "forward", lambda self, x: right_forward(self, x) * 2, "converted by .*mul"),
        (local_modules.BoundaryConversion, "__call__", without_f, "reads what entered"),
    ],
    ids=[
        "outputs stay",
        "inputs stay",
        "weights whole",
        "no reduction",
        "no gather",
        "no reduction on the last rank",
        "twice",
        "no conversion",
        "a product beside it",
        "a product in it",
        "no f",
    ],
)
def test_what_apply_does_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, sabotaged: Callable[..., Any], message: str
) -> None:
    """Shapes alone would not show a collective that is left out, nor the first rank alone what the last one does."""
    monkeypatch.setattr(place, name, sabotaged)
    found = structure_of_megatron()
    assert isinstance(found, Counterexample)
    assert re.search(message, found.message), found.message


def equals_one_process(build: Callable[[], nn.Module], plan: Plan, length: int = LENGTH) -> None:
    """Loss and every gradient on two real ranks."""

    def run(on: Plan | None) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = build()
        model = model if on is None else tpplan.apply_plan(model, on)
        x = torch.randn(1, length, DIM, generator=torch.Generator().manual_seed(1))
        loss = model(x)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}

    loss, gradients = run(None)
    for applied_loss, applied in run_ranks(2, run, plan):
        torch.testing.assert_close(applied_loss, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(applied[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_an_unchecked_plan_of_baked_sizes_is_another_model() -> None:
    """What the check is for: the same plan without it runs, and is wrong."""
    build = lambda: Model(Attention(lambda t: t.view(t.shape[0], t.shape[1], HEADS, -1)))  # noqa: E731
    with pytest.raises(AssertionError, match="not close"):
        equals_one_process(build, solve(build, prove=False))
    equals_one_process(build, solve(build))

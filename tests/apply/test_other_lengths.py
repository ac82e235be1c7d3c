"""Batches and lengths that a plan was not made for: as in one process, or an error on every rank of the group."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.errors import PlanError, PlanMismatchError, VerificationError
from tpplan.core.graph import Boundary, ModelGraph
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import SHAPE, Multiples, Plan, ProofStatus
from tpplan.plan.sections.input_dims import BATCH, BOTH, LENGTH, Dim, dim_through, parse_dim

DIM, HIDDEN, HEADS, TEXTS, SEQ, ROWS = 32, 64, 4, 4, 8, 24
Allows = Callable[[ModelGraph], Callable[[str, Strategy], bool]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    """x [B, T, D] -> a loss, by way of what a subclass puts in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(DIM, DIM), nn.Sequential(Mlp(), Mlp())

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.before(self.first(x))).square().mean()


class Table(Base):
    """Positions are a table that is cut at the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, DIM))

    def before(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class TableByNarrow(Table):
    def before(self, x: Tensor) -> Tensor:
        return x + self.table.narrow(0, 0, x.shape[1])


class TableBySplit(Table):
    def before(self, x: Tensor) -> Tensor:
        return x + self.table.split([x.shape[1], ROWS - x.shape[1]])[0]


class TableFromItsEnd(Table):
    def before(self, x: Tensor) -> Tensor:
        return x + self.table[-x.shape[1] :]


class TableInTheMiddle(Table):
    def before(self, x: Tensor) -> Tensor:
        return x + self.table[4 : 4 + x.shape[1]]


class TableOfTwo(Table):
    """The table's halves begin where the length says."""

    def before(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x + self.table[:length] * self.table[length : 2 * length]


class TableByBatch(Table):
    """A row for each text of the batch."""

    def before(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[0], None]


class Bias(Base):
    """A bias of two dims, both of which are cut at the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, ROWS))

    def before(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.table[:length, :length].softmax(-1) @ x


class Pairs(Base):
    """Neighbours are mixed: a view that holds more of the length than the dim it makes."""

    def before(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, DIM).flip(1).tanh().reshape(x.shape)


class Heads(Base):
    """A number of heads in code, and lengths beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def before(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, DIM // HEADS).transpose(1, 2) for part in self.qkv(x).split(DIM, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, DIM))


class Masked(Heads):
    """A mask is made of the length, and of positions that code counts."""

    def before(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return super().before(x * (places % 3 > 0)[None, :, None])


class Repeated(Base):
    """A row of weights is repeated as often as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, DIM))

    def before(self, x: Tensor) -> Tensor:
        return x + self.row.repeat(x.shape[1], 1) * torch.ones(x.shape[1], 1, device=x.device)


def slices(dim: int, *, has_parts: bool = False) -> Allows:
    """What crosses boundaries as x [B, T, D] is sharded along a dim or not at all, and a table part by part."""

    def allows(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
        values = graph.values
        crossing = {b.name for b in graph.nodes if isinstance(b, Boundary) and len(values[b.result].shape) == 3}
        tables = {source.result for source in graph.parameters if source.label == "table"}
        readers = {f"{op.name}<-{i}" for op in graph.ops for i, name in enumerate(op.operands) if name in tables}

        def allow(name: str, strategy: Strategy) -> bool:
            if name in readers:
                return not has_parts or any(layout.parts for layout in strategy.results)
            return name not in crossing or strategy.results[0].dim in (None, dim)

        return allow

    return allows


class Scores(Base):
    """Attention of heads that are folded into the batch: a length of HEADS looks like the heads in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def before(self, x: Tensor) -> Tensor:
        (batch, length, _), width = x.shape, DIM // HEADS
        q, k, v = (of(x).view(batch, length, HEADS, width).transpose(1, 2) for of in (self.q, self.k, self.v))
        q, k = (one.reshape(batch * HEADS, length, width) for one in (q, k))
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, HEADS, length, length)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, DIM)


class ScoresOfEveryThird(Scores):
    """The length of its attention is no length of an input."""

    def before(self, x: Tensor) -> Tensor:
        return super().before(x[:, ::3] + 0)


class Spread(Base):
    """A number of heads, and a length inside the model, in calls of the same kind: which of the two a call means shows
    in nothing but the number."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def spread(self, row: Tensor, size: int) -> Tensor:
        """row [B, D] repeated `size` times: [B, size, D]."""
        raise NotImplementedError

    def before(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        thirds, width = x[:, ::3], DIM // HEADS
        queries = self.q(x).view(batch, length, HEADS, width)
        # As many rows as there are heads, and as every third token.
        row = x[:, 0, :width].detach()
        scales, others = self.spread(row, HEADS), self.spread(row, thirds.shape[1])
        mixed = (queries * scales[:, None]).reshape(batch, length, DIM)
        return self.out(mixed) + thirds.mean(1, keepdim=True) * others.sum((1, 2))[:, None, None]


class SpreadByExpand(Spread):
    def spread(self, row: Tensor, size: int) -> Tensor:
        return row[:, None].expand(row.shape[0], size, row.shape[1])


class SpreadByZeros(Spread):
    def spread(self, row: Tensor, size: int) -> Tensor:
        return torch.zeros(row.shape[0], size, row.shape[1], device=row.device) + row[:, None]


def parted(heads: int) -> Callable[[Tensor], Tensor]:
    """Takes [B, T, D] apart into [B, T, H, D / H]; the number of heads stands nowhere else."""
    return lambda x: x.view(x.shape[0], x.shape[1], heads, x.shape[-1] // heads)


class Asking(Base):
    """Computes with the width that it asks for, and divides by a length that it asks of a tensor in which it stands
    where the heads do in another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.parted = parted(HEADS)

    def before(self, x: Tensor) -> Tensor:
        q, k, v = (self.parted(of(x)) for of in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in (q / q.shape[1], k, v))
        attended = ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)
        return x + attended.reshape(x.shape[0], x.shape[1], attended.shape[2] * attended.shape[3])


class AskingOfEveryThird(Asking):
    """The length that it asks for is no length of an input."""

    def before(self, x: Tensor) -> Tensor:
        return super().before(x[:, ::3] + 0)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    return {"x": torch.randn(batch, length, DIM, generator=generator)}


def solve(model: Callable[[], nn.Module], **options: object) -> Plan:
    return tpplan.solve(
        model,
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=TEXTS,
        micro_batch=TEXTS,
        seq_len=SEQ,
        tp=2,
        precision="fp32",
        **options,
    )


Found = tuple[float, dict[str, Tensor]] | str
SHAPES = ((TEXTS, SEQ), (TEXTS, 4), (TEXTS, 16), (TEXTS, 6), (2, SEQ), (6, 10), (TEXTS, 7), (3, 4), (TEXTS, 2))


def steps(model: Callable[[], nn.Module], plan: Plan | None, **options: object) -> list[Found]:
    """A step of each shape: loss and gradients, or the error."""
    torch.manual_seed(0)
    built = model() if plan is None else tpplan.apply_plan(model(), plan, **options)
    found: list[Found] = []
    for shape in SHAPES:
        built.zero_grad()
        try:
            loss = built(**inputs(*shape))
            loss.backward()
        except (PlanMismatchError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        gradients = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
        whole = {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()}
        found.append((loss.item(), whole))
    return found


def assert_right_or_refused(expected: list[Found], ranks: list[list[Found]]) -> int:
    """How many shapes are right."""
    num_right = 0
    for shape, wanted, *found in zip(SHAPES, expected, *ranks, strict=True):
        assert len({one if isinstance(one, str) else "" for one in found}) == 1, shape
        if isinstance(found[0], str):
            assert shape != SHAPES[0], found[0]
            assert isinstance(wanted, str) or found[0].startswith("PlanMismatchError: ")
            continue
        assert not isinstance(wanted, str)
        num_right += 1
        for loss, gradients in found:
            assert loss == pytest.approx(wanted[0], rel=1e-5), shape
            assert max(relative_errors(gradients, wanted[1]).values()) < 1e-4, shape
    return num_right


TABLES = (Table, TableByNarrow, TableFromItsEnd, TableOfTwo)


@pytest.mark.parametrize("model", TABLES, ids=lambda model: model.__name__)
def test_a_table_that_is_cut_at_the_length_holds_for_that_length(model: type[nn.Module]) -> None:
    plan = solve(model, allows=slices(1, has_parts=True))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.parameter_plans()["table"].reads[""].parts
    assert plan.proof.other_shapes is not None
    assert plan.proof.other_shapes.length.multiple is None
    assert "aten." in (plan.proof.other_shapes.length.reason or "")
    assert_right_or_refused(steps(model, None), run_ranks(2, steps, model, plan))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "model",
    [Table, TableBySplit, TableInTheMiddle, TableByBatch, Bias, Pairs, Heads, Masked, Repeated],
    ids=lambda model: model.__name__,
)
def test_other_shapes_are_as_in_one_process_or_an_error(model: type[nn.Module], dim: int) -> None:
    plan = solve(model, allows=slices(dim))
    assert plan.proof.status is ProofStatus.PROVEN
    assert assert_right_or_refused(steps(model, None), run_ranks(2, steps, model, plan)) > 1


def divided_heads(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
    """Projections in front of the scores are split by columns, and so is what leaves them."""
    inside = {op.name: op for op in graph.ops if op.module in ("q", "k", "v")}
    made = {result for op in inside.values() for result in op.results}
    names = {*inside, *(node.name for node in graph.nodes if isinstance(node, Boundary) and node.operand in made)}
    return lambda name, strategy: name not in names or strategy.results[0].dim == 2


@pytest.mark.parametrize(("model", "shape"), [(Scores, (TEXTS, HEADS)), (ScoresOfEveryThird, (6, 3 * HEADS - 2))])
def test_a_length_that_looks_like_the_heads_is_refused(model: type[nn.Module], shape: tuple[int, int]) -> None:
    plan = solve(model, allows=divided_heads)
    assert plan.proof.status is ProofStatus.PROVEN
    assert any(size.dims is None and not any(size.of) for size in plan.size_plans()[""])
    expected, ranks = steps(model, None), run_ranks(2, steps, model, plan)
    assert assert_right_or_refused(expected, ranks) > 1
    assert not isinstance(expected[SHAPES.index(shape)], str)
    assert all(isinstance(found[SHAPES.index(shape)], str) for found in ranks)


#: every third of so many tokens are as many as the heads
AS_MANY = 3 * HEADS - 2


@pytest.mark.parametrize("model", [SpreadByExpand, SpreadByZeros], ids=lambda model: model.__name__)
def test_a_length_inside_the_model_that_looks_like_the_heads_is_refused(model: type[nn.Module]) -> None:
    plan = solve(model, allows=divided_heads)
    assert plan.proof.status is ProofStatus.PROVEN
    numbers = [size for size in plan.size_plans()[""] if size.dims is None and size.written == HEADS]
    assert {size.call for size in numbers} & {"expand", "new"}, plan.size_plans()
    assert plan.proof.other_shapes is not None
    assert "look alike" in (plan.proof.other_shapes.length.reason or "")
    assert plan.proof.other_shapes.batch.multiple is not None
    expected, ranks = steps(model, None), run_ranks(2, steps, model, plan)
    assert assert_right_or_refused(expected, ranks) > 1
    at = SHAPES.index((6, AS_MANY))
    assert not isinstance(expected[at], str)
    assert all(isinstance(found[at], str) for found in ranks)


@pytest.mark.parametrize(("model", "length"), [(Asking, HEADS // 2), (AskingOfEveryThird, 6)])
def test_a_length_that_looks_like_what_code_is_told_is_refused(model: type[nn.Module], length: int) -> None:
    """It is as many as a rank's heads, in whose place it stands."""
    plan = solve(model, allows=divided_heads)
    assert (4, 1, HEADS, HEADS // 2) in {
        (own.count, own.position, own.written, own.local) for own in plan.size_plans()[""] if own.call == SHAPE
    }
    assert plan.proof.other_shapes is not None
    assert plan.proof.other_shapes.batch.multiple is not None
    reason = plan.proof.other_shapes.length.reason or ""
    assert ("look alike" in reason) == (model is AskingOfEveryThird)
    expected, ranks = steps(model, None), run_ranks(2, steps, model, plan)
    assert assert_right_or_refused(expected, ranks) >= 1
    at = SHAPES.index((TEXTS, length))
    assert all(isinstance(found[at], str) for found in ranks)
    for unchecked in run_ranks(2, functools.partial(steps, check=False), model, plan):
        assert unchecked[at][0] != pytest.approx(expected[at][0], rel=1e-3)  # what the refusal is for


def test_a_check_may_warn_or_be_left_out() -> None:
    plan = solve(Table, allows=slices(1, has_parts=True))

    def wrong_ones(check: bool | str) -> tuple[int, int]:
        """Shapes with a result, and warnings of others."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = steps(Table, plan, check=check)
        return sum(not isinstance(one, str) for one in found), sum(
            "Results may be wrong" in str(w.message) for w in caught
        )

    (with_warnings, warned), _ = run_ranks(2, wrong_ones, "warn")
    (without, silent), _ = run_ranks(2, wrong_ones, False)
    assert (with_warnings, silent) == (without, 0)
    assert warned >= 3


@pytest.mark.parametrize(
    ("sizes", "dim", "text"),
    [
        ((7, 7, 7), Dim(7), "7"),
        ((4, 5, 4), Dim(0, 1, BATCH), "batch"),
        ((9, 9, 8), Dim(1, 1, LENGTH), "length + 1"),
        ((14, 14, 12), Dim(-2, 2, LENGTH), "2 length - 2"),
        ((32, 40, 28), Dim(0, 1, BOTH), "batch * length"),
        ((4, 3, 4), Dim(4), "4"),
        ((32, 41, 28), Dim(32), "32"),
    ],
)
def test_a_dim_is_found_from_three_shapes(sizes: tuple[int, int, int], dim: Dim, text: str) -> None:
    """At batches 4 and 5, lengths 8 and 7."""
    found = dim_through(sizes, (4, 5), (8, 7))
    assert found == dim == parse_dim(text)
    assert str(found) == text
    assert found.size(4, 8) == sizes[0]


def test_a_dim_counts_what_it_grows_with() -> None:
    assert parse_dim("2 length - 2").count(10) == 6
    assert parse_dim("2 length - 2").count(9) is None
    assert parse_dim("batch * length").count(12) == 12
    assert parse_dim("7").count(7) is None
    for text in ("batch*length", "length +1", "0 batch", "lengths", "-1"):
        with pytest.raises(PlanError, match="expected a dim"):
            parse_dim(text)


def test_a_plan_that_shards_no_input_holds_for_all_others() -> None:
    plan = solve(Heads, allows=slices(2))
    shapes = plan.proof.other_shapes
    assert shapes is not None
    assert shapes.inputs == {"x": (Dim(0, 1, BATCH), Dim(0, 1, LENGTH), Dim(DIM))}
    assert shapes.batch == shapes.length == Multiples(multiple=1)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_that_was_edited_to_hold_for_more_is_refused() -> None:
    plan = solve(Table, allows=slices(1, has_parts=True))
    tpplan.prove_plan(plan, Table, inputs)
    shapes = plan.proof.other_shapes
    assert shapes is not None
    edited = replace(plan, proof=replace(plan.proof, other_shapes=replace(shapes, length=Multiples(multiple=1))))
    with pytest.raises(VerificationError, match=r"proof.other_shapes: the plan says .*length=Multiples\(multiple=1"):
        tpplan.prove_plan(edited, Table, inputs)


def test_a_plan_may_hold_for_fewer_shapes_than_a_proof_shows_for_any_reason() -> None:
    """As where solving saw at another size that a call may be taken for another one."""
    plan = solve(Heads, allows=slices(2))
    shapes = plan.proof.other_shapes
    assert shapes is not None
    fewer = replace(shapes, batch=Multiples(multiple=6), length=Multiples(reason="at length 9: two calls look alike"))
    edited = replace(plan, proof=replace(plan.proof, other_shapes=fewer))
    assert tpplan.prove_plan(edited, Heads, inputs).plan.proof.other_shapes == fewer


@pytest.mark.parametrize("length", [Multiples(multiple=2), Multiples(multiple=3)])
def test_a_plan_of_no_other_length_claims_none(length: Multiples) -> None:
    plan = solve(Table, allows=slices(1, has_parts=True))
    shapes = plan.proof.other_shapes
    assert shapes is not None
    edited = replace(plan, proof=replace(plan.proof, other_shapes=replace(shapes, length=length)))
    with pytest.raises(VerificationError, match=r"proof\.other_shapes: the plan says"):
        tpplan.prove_plan(edited, Table, inputs)

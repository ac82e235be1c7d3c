"""Bags of rows of a table that is sharded by its rows: proven, and equal to one process in loss and every gradient."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.core.layout import R, S
from tpplan.layouts.typecheck import typecheck
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.trace.trace import trace

#: V rows, D columns, B bags, n ids in each
ROWS, DIM, BAGS, LENGTH = 24, 8, 4, 6


class Model(nn.Module):
    """A table whose bags a head reads: ids [B, n] -> []."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(ROWS, DIM, **options), nn.Linear(DIM, DIM)  # type: ignore[arg-type]

    def bags(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bags(ids)).square().mean()


class Weighted(Model):
    """Weights of ids that are learned."""

    def __init__(self) -> None:
        super().__init__(mode="sum", padding_idx=ROWS - 1)
        self.weights = nn.Parameter(torch.randn(LENGTH))

    def bags(self, ids: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=self.weights.expand(ids.shape))


class Ragged(Model):
    """Bags of several lengths, one of which is empty, by where they start."""

    def bags(self, ids: Tensor) -> Tensor:
        starts = torch.tensor([0, 1, 1, ids.numel() - 2], device=ids.device)
        ends = [torch.tensor([ids.numel()], device=ids.device)] if self.table.include_last_offset else []
        return self.table(ids.flatten(), torch.cat((starts, *ends)))


class TwoTables(Model):
    """F.embedding_bag in the root's own code, of tables of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(ROWS // 3, DIM))
        self.large = nn.Parameter(torch.randn(ROWS, DIM))

    def bags(self, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids % (ROWS // 3), self.small) + F.embedding_bag(ids, self.large, mode="sum")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids, self.rows, mode="sum", padding_idx=-1)


class OwnTable(Model):
    """A module of the model's own, with a padding counted from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Own()  # type: ignore[assignment]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sum": lambda: Model(mode="sum"),
    "mean": Model,
    "mean with padding": lambda: Model(padding_idx=2),
    "weights": Weighted,
    "ragged mean": lambda: Ragged(padding_idx=ROWS - 1),
    "ragged sum, last offset": lambda: Ragged(mode="sum", include_last_offset=True),
    "ragged mean, last offset": lambda: Ragged(padding_idx=0, include_last_offset=True),
    "own table": OwnTable,
}


def inputs(bags: int, length: int) -> dict[str, Tensor]:
    """Ids [B, n], the first and the last of which are in all tables' paddings."""
    ids = torch.randint(ROWS, (bags, length), generator=torch.Generator().manual_seed(1))
    ids[0, :], ids[1, :3] = 2, torch.tensor([0, ROWS - 1, ROWS - 1])
    return {"ids": ids}


def solve(build: Callable[[], nn.Module], pins: dict[str, str], tp: int = 2) -> Plan:
    return solve_eagerly(build, inputs, batch=BAGS, seq_len=LENGTH, pins=pins, tp=tp)


def step(build: Callable[[], nn.Module], ids: Tensor, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients."""
    torch.manual_seed(0)
    model = build() if plan is None else tpplan.apply_plan(build(), plan)
    loss = model(ids)
    loss.backward()
    return loss.item(), gradients(model)


def assert_equal_to_one_process(build: Callable[[], nn.Module], plan: Plan, tp: int) -> None:
    assert plan.proof.status is ProofStatus.PROVEN
    ids = inputs(BAGS, LENGTH)["ids"]
    loss, expected = step(build, ids, None)
    for own_loss, own in run_ranks(tp, step, build, ids, plan):
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert max(relative_errors(own, expected).values()) < 1e-5


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_table_of_bags_is_sharded_by_rows(name: str, tp: int) -> None:
    plan = solve(MODELS[name], {"table": "vocabulary"}, tp)
    table = next(own for key, own in plan.parameter_plans().items() if key.startswith("table."))
    assert table.placement == S(0)
    assert plan.row_bags() == {"table": (ROWS,)}
    assert_equal_to_one_process(MODELS[name], plan, tp)


def test_tables_of_two_sizes_in_one_module_are_told_apart() -> None:
    plan = solve(TwoTables, {"<root>": "vocabulary"})
    assert plan.row_bags() == {"": (ROWS // 3, ROWS)}
    assert_equal_to_one_process(TwoTables, plan, 2)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_rows_whose_summands_are_no_sum_are_not_sharded(options: dict[str, object]) -> None:
    with pytest.raises((InfeasibleError, UsageError), match="table"):
        solve(lambda: Model(**options), {"table": "vocabulary"})


@pytest.mark.parametrize("options", [{"mode": "max"}, {"padding_idx": 2}])
@pytest.mark.parametrize("style", ["columns", "slices"])
def test_a_table_of_bags_is_sharded_by_columns_or_bags(options: dict[str, object], style: str) -> None:
    def build() -> nn.Module:
        return Model(**options)

    assert_equal_to_one_process(build, solve(build, {"table": style}), 2)


def raised(plan: Plan | None, id_outside: int) -> str:
    """The error's type of a step with an id that no table has."""
    torch.manual_seed(0)
    model = MODELS["sum"]() if plan is None else tpplan.apply_plan(MODELS["sum"](), plan)
    ids = inputs(BAGS, LENGTH)["ids"]
    ids[-1, -1] = id_outside
    try:
        model(ids)
    except (IndexError, RuntimeError) as error:
        return str(id_outside) * (str(id_outside) in str(error)) or str(error)
    return ""


@pytest.mark.parametrize("id_outside", [ROWS, -1, ROWS + ROWS // 2])
def test_an_id_outside_the_table_raises_on_every_rank(id_outside: int) -> None:
    plan = solve(MODELS["sum"], {"table": "vocabulary"})
    assert raised(None, id_outside)
    assert run_ranks(2, raised, plan, id_outside) == [str(id_outside)] * 2


class Halves(Model):
    """F.embedding_bag in the root's own code, of tables one of which has as many rows as a rank has of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.all = nn.Parameter(torch.randn(ROWS // 2, DIM)), nn.Parameter(torch.randn(ROWS, DIM))

    def bags(self, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids % (ROWS // 2), self.lower) + F.embedding_bag(ids, self.all)


def test_a_plan_that_takes_a_table_for_rows_of_another_does_not_type() -> None:
    plan = solve(Halves, {"<root>": "vocabulary"})
    assert plan.row_bags() == {"": (ROWS // 2, ROWS)}
    inside = inputs(BAGS, LENGTH)
    graph = trace(Halves().to("meta"), {name: own.to("meta") for name, own in inside.items()})
    assert typecheck(graph, plan) is None
    missing = typecheck(graph, replace(plan, bags={"<root>": (ROWS,)}))
    assert missing is not None
    assert "tpplan.embedding_bag" in missing.message
    half = plan.parameters["lower"]
    kept = replace(plan, parameters={**plan.parameters, "lower": replace(half, placement=R, reads={"": R})})
    mistaken = typecheck(graph, replace(kept, bags={"<root>": (ROWS,)}))
    assert mistaken is not None
    assert "its rule allows nothing" in mistaken.message
    assert typecheck(graph, replace(plan, bags=None)) is not None

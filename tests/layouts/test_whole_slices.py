"""Tables cut by exactly their own length, and the many ways of writing that: planned, and equal to one process."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.plan.plan import Plan, ProofStatus

ROWS, LENGTH, DIM, HIDDEN = 4, 8, 16, 64
Cut = Callable[[Tensor, Tensor], Tensor]


def rows(x: Tensor) -> Tensor:
    """0 ... LENGTH - 1."""
    return torch.arange(LENGTH, device=x.device)


#: (table [LENGTH, DIM], x [ROWS, LENGTH, DIM]) -> what is added to x
CUTS: dict[str, Cut] = {
    "end": lambda table, x: table[:LENGTH],
    "length of x": lambda table, x: table[: x.shape[1]],
    "both bounds": lambda table, x: table[0:LENGTH],
    "no bound": lambda table, x: table[:],
    "past the end": lambda table, x: table[:100],
    "negative start": lambda table, x: table[-LENGTH:],
    "start before the first": lambda table, x: table[-100:],
    "step of one": lambda table, x: table[::1],
    "step past the end": lambda table, x: table[::100],
    "every second": lambda table, x: table[::2].repeat(2, 1),
    "every second, past the end": lambda table, x: F.pad(table[1:100:2], (0, 0, 0, LENGTH // 2)),
    "both dims": lambda table, x: table[:LENGTH, :DIM],
    "second dim": lambda table, x: table[:, :DIM],
    "ellipsis": lambda table, x: table[..., :DIM],
    "new dim": lambda table, x: table[None, :LENGTH],
    "again and again": lambda table, x: table[:LENGTH][:LENGTH][0:LENGTH],
    "empty in front": lambda table, x: torch.cat([table[:0], table[:LENGTH]]),
    "empty behind": lambda table, x: torch.cat([table[:LENGTH], table[LENGTH:]]),
    "empty between": lambda table, x: torch.cat([table[3:3], table[5:2], table]),
    "empty beyond": lambda table, x: torch.cat([table[100:], table]),
    "all but the last": lambda table, x: F.pad(table[:-1], (0, 0, 0, 1)),
    "in two": lambda table, x: torch.cat([table[: LENGTH // 2], table[LENGTH // 2 :]]),
    "narrow": lambda table, x: table.narrow(0, 0, LENGTH),
    "narrow from behind": lambda table, x: table.narrow(0, -LENGTH, LENGTH),
    "narrow to nothing": lambda table, x: torch.cat([table.narrow(0, 2, 0), table]),
    "narrow of the second dim": lambda table, x: torch.narrow(table, 1, 0, DIM),
    "index_select": lambda table, x: table.index_select(0, rows(x)),
    "index": lambda table, x: table[rows(x)],
    "expand": lambda table, x: table[:LENGTH].expand(x.shape[0], LENGTH, DIM),
    "expand of a new dim": lambda table, x: table[None, :LENGTH].expand(x.shape[0], -1, -1),
    "split into one": lambda table, x: table.split(LENGTH)[0],
    "split with nothing": lambda table, x: table.split([0, LENGTH])[1],
    "chunk of one": lambda table, x: table.chunk(1)[0],
    "tensor_split": lambda table, x: torch.tensor_split(table, [LENGTH])[0],
    "slice_scatter": lambda table, x: torch.slice_scatter(table, table[:LENGTH] * 2, 0, 0, LENGTH),
    "flat": lambda table, x: table.view(-1)[: LENGTH * DIM].view(LENGTH, DIM),
    "of x too": lambda table, x: table[:LENGTH] * x[:, :LENGTH],
    "nothing of x": lambda table, x: torch.cat([x[:, :0], x[:, :LENGTH, :DIM]], 1) * table,
}


class Table(nn.Module):
    """Adds a table that is cut in one way."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.table = nn.Parameter(torch.randn(LENGTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + CUTS[self.name](self.table, x)


class Positions(nn.Module):
    """A table and two layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.positions = Table(name)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.positions(x)))).square().mean()


class AllPositions(nn.Module):
    """Ways, each with a table of its own."""

    def __init__(self, names: Iterable[str] = CUTS) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({f"way_{i}": Positions(name) for i, name in enumerate(names)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([way(x) for way in self.ways.values()]).sum()


def inputs(batch: int) -> dict[str, Tensor]:
    """The same random x for a batch in each process."""
    return {"x": torch.randn(batch, LENGTH, DIM, generator=torch.Generator().manual_seed(1))}


def solve(build: Callable[[], nn.Module], **options: object) -> Plan:
    """On two ranks that shard what they can."""
    return solve_eagerly(build, lambda batch, seq_len: inputs(batch), batch=ROWS, seq_len=LENGTH, **options)


def step(build: Callable[[], nn.Module], plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients."""
    torch.manual_seed(0)
    model = build()
    model = model if plan is None else tpplan.apply_plan(model, plan)
    loss = model(**inputs(ROWS))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


@pytest.mark.long  # what test_whole_cuts_equal_one_process asks of one plan for all ways, of one plan for each
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_a_whole_table_is_planned(name: str) -> None:
    plan = solve(lambda: Positions(name))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.parameter_plans()["up.weight"].placement.dim == 0


#: ways that take all of dim 0 and know no length: tables may be sharded along it
OF_DIM_0 = (
    "end", "both bounds", "no bound", "past the end", "step of one", "both dims", "second dim", "ellipsis", "new dim",
    "again and again", "narrow", "narrow of the second dim", "expand of a new dim", "of x too",
)  # fmt: skip
#: ways that need all of dim 1
NOT_OF_DIM_1 = (
    "every second, past the end", "all but the last", "expand", "tensor_split", "slice_scatter", "flat",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "pins"),
    [
        (tuple(CUTS), {}),
        pytest.param(tuple(CUTS), {"ways.*": "sequence"}, marks=pytest.mark.long),
        (OF_DIM_0, {"ways.*.positions": "split dim 0"}),
        (tuple(name for name in CUTS if name not in NOT_OF_DIM_1), {"ways.*.positions": "split dim 1"}),
    ],
    ids=["free", "sequence", "rows", "columns"],
)
def test_whole_cuts_equal_one_process(names: tuple[str, ...], pins: dict[str, str]) -> None:
    def build() -> nn.Module:
        return AllPositions(names)

    plan = solve(build, pins=pins)
    assert plan.proof.status is ProofStatus.PROVEN
    if not pins:
        placements = {name: p.placement for name, p in plan.parameter_plans().items()}
        assert [placements[f"ways.way_{i}.up.weight"].dim for i in range(len(names))] == [0] * len(names)
    loss, gradients = step(build, None)
    for applied_loss, applied in run_ranks(2, step, build, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-5

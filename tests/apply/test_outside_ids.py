"""Ids and targets that point outside of what is sharded: every rank raises what one process raises, before it waits for
another. Unchecked, a rank masks such an id as another rank's, on every rank, and what is looked up is zero."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import solve_eagerly
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.apply.collectives.redistribute import TpGroup, local_rows
from tpplan.plan.plan import Plan, ProofStatus

VOCAB, DIM, BATCH, LENGTH = 24, 8, 2, 4
PINS = {"embedding": "vocabulary"}


class Model(nn.Module):
    """A table, and a head over the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)

    def looked_up(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.looked_up(tokens))


class Shifted(Model):
    """Ids that the code computes."""

    def looked_up(self, ids: Tensor) -> Tensor:
        return self.embedding(ids * 2 - ids)


class Again(Model):
    """A forward that runs again in backward."""

    def looked_up(self, ids: Tensor) -> Tensor:
        return checkpoint(self.embedding, ids, use_reentrant=False)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class OwnTable(Model):
    """F.embedding in a module of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Table()  # type: ignore[assignment]


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Positions(Model):
    """A learned table of positions, shorter than a text may be."""

    def looked_up(self, ids: Tensor) -> Tensor:
        return self.embedding(torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + ids[:, :1])


def text(batch: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return {name: torch.randint(VOCAB - LENGTH, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solve(model: Callable[[], nn.Module], **pins: str) -> Plan:
    return solve_eagerly(model, text, loss=loss, batch=BATCH, seq_len=LENGTH, pins=PINS | pins)


def outcome(
    model: Callable[[], nn.Module], plan: Plan | None, name: str, number: int | None, dtype: torch.dtype
) -> str:
    """The error's type, or the loss, of a step where the last token's id or target is `number`."""
    torch.manual_seed(0)
    built = model() if plan is None else tpplan.apply_plan(model(), plan)
    inputs = text(BATCH, LENGTH)
    inputs["tokens"] = inputs["tokens"].to(dtype)
    if number is not None:
        inputs[name][-1, 0 if model is Positions else -1] = number
    try:
        found = loss(built(inputs["tokens"]), inputs)
        found.backward()
    except Exception as error:
        says = plan is None or str(number) in str(error)
        return type(error).__name__ if says else str(error)
    return f"{found.item():.4f}"


#: outside of the whole table, by the ids' type; the last would wrap where a rank's first row is taken away
OUTSIDE = [
    *((number, torch.int64) for number in (VOCAB, -1, -100, VOCAB + VOCAB // 2, 2**40, -(2**63), 2**63 - 1)),
    *((number, torch.int32) for number in (VOCAB, -1, -(2**31))),
]


@pytest.mark.parametrize("model", [Model, Shifted, Again, OwnTable, Tied, Positions])
def test_an_id_outside_the_table_raises_as_one_process_does(model: Callable[[], nn.Module]) -> None:
    plan = solve(model)
    assert plan.proof.status is ProofStatus.PROVEN
    assert any("rows" in repr(crossing) for b in plan.boundaries.values() for crossing in b.inputs.values())
    cases = [(None, torch.int64), *(OUTSIDE if model is Model else OUTSIDE[:2])]

    def on_a_rank() -> list[str]:
        return [outcome(model, plan, "tokens", number, dtype) for number, dtype in cases]

    expected = [outcome(model, None, "tokens", number, dtype) for number, dtype in cases]
    assert expected[1:] == ["IndexError"] * (len(cases) - 1)
    assert run_ranks(2, on_a_rank) == [expected] * 2


@pytest.mark.parametrize("pins", [{}, {"embedding": "columns"}])
def test_a_target_outside_the_classes_raises_as_one_process_does(pins: dict[str, str]) -> None:
    plan = solve(Model, head="columns", **pins)
    assert str(plan.outputs["output"]) == "S(2)"
    cases = [None, VOCAB, -1, -101, 2**40]

    def on_a_rank() -> list[str]:
        return [outcome(Model, plan, "targets", number, torch.int64) for number in [*cases, -100]]

    expected = [outcome(Model, None, "targets", number, torch.int64) for number in [*cases, -100]]
    assert expected[1:-1] == ["IndexError"] * (len(cases) - 1)
    assert expected[-1] != "IndexError"  # what torch ignores
    assert run_ranks(2, on_a_rank) == [expected] * 2


class _Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_checking_ids_asks_no_other_rank() -> None:
    """No process group is there to ask."""
    assert not dist.is_initialized()
    with _Ran() as ran:
        local, foreign = local_rows(torch.tensor([0, 5, 6, 11]), 6, TpGroup(name="none", size=2, rank=1))
    assert not any("c10d" in op for op in ran.ops)
    assert local.tolist() == [0, 0, 0, 5]
    assert foreign.tolist() == [True, True, False, False]
    with pytest.raises(IndexError, match="12 rows: got 12"):
        local_rows(torch.tensor([3, 12]), 6, TpGroup(name="none", size=2, rank=0))


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_ids_and_one_id_are_looked_up(shape: tuple[int, ...]) -> None:
    local, foreign = local_rows(torch.zeros(shape, dtype=torch.long), 6, TpGroup(name="none", size=2, rank=0))
    assert local.shape == foreign.shape == shape


def test_compiled_code_checks_too_without_a_break() -> None:
    group = TpGroup(name="none", size=2, rank=0)
    compiled = torch.compile(lambda ids: local_rows(ids, 6, group), fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([1, 7]))[0].tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="12 rows"):
        compiled(torch.tensor([1, 12]))

"""Rows are exchanged by counts that every rank tells: any integer dtype, ranks without rows, an index of no expert."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from tpplan.core.errors import PlanMismatchError, RankFailedError
from tpplan.experts.exchange import EpGroup, exchanged_counts, send, send_back
from tpplan.experts.expert_share import ExpertShare, _dispatch
from tpplan.plan.plan import ExpertCall

RANKS, EXPERTS = 2, 4


def group() -> EpGroup:
    world = dist.group.WORLD
    assert world is not None
    return EpGroup(world.group_name, RANKS)


def there_and_back(
    chosen: list[list[int]], dtype: torch.dtype
) -> tuple[list[int], list[int], list[float], list[float]]:
    """The experts of arrived rows, what each expert gets, the arrived rows, and the rows that came back, doubled."""
    own = torch.tensor(chosen[dist.get_rank()], dtype=dtype)
    arrived, counts = exchanged_counts(own, EXPERTS, group())
    assert arrived.dtype is dtype
    rows = send(own.float() + 10 * dist.get_rank(), counts)
    return arrived.tolist(), counts.load.tolist(), rows.tolist(), send_back(2 * rows, counts).tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_rows_reach_the_rank_of_their_expert_and_come_back(dtype: torch.dtype) -> None:
    first, second = run_ranks(RANKS, there_and_back, [[0, 1, 1, 3], [1, 2]], dtype)
    assert first == ([0, 1, 1, 1], [1, 3], [0.0, 1.0, 1.0, 11.0], [0.0, 2.0, 2.0, 6.0])
    assert second == ([1, 0], [1, 1], [3.0, 12.0], [22.0, 24.0])


def test_ranks_without_rows_to_send_and_to_compute() -> None:
    first, second = run_ranks(RANKS, there_and_back, [[], [2, 2]], torch.int64)
    assert first == ([], [0, 0], [], [])
    assert second == ([0, 0], [2, 0], [12.0, 12.0], [24.0, 24.0])


def refused(chosen: list[list[int]], dtype: torch.dtype) -> str:
    with pytest.raises(RankFailedError) as error:
        exchanged_counts(torch.tensor(chosen[dist.get_rank()], dtype=dtype), EXPERTS, group())
    return str(error.value)


@pytest.mark.parametrize(
    ("chosen", "dtype"), [([[0, 1], [-1, 0, 7]], torch.int64), ([[0, 1], [2, 4, 200]], torch.uint8)]
)
def test_an_index_of_no_expert_raises_on_every_rank(chosen: list[list[int]], dtype: torch.dtype) -> None:
    first, second = run_ranks(RANKS, refused, chosen, dtype, timeout_s=20)
    assert first == second
    assert "rank 1 of the 2 that divide 4 experts has 2 rows whose index is below 0 or above 3" in first
    assert "weight 0" in first


@pytest.mark.parametrize("index", [torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.zeros(3).long()])
def test_an_index_that_was_not_planned_is_refused(index: Tensor) -> None:
    share = ExpertShare(ExpertCall(experts=EXPERTS, rows="x", index="index", weight="weight"), RANKS)
    with pytest.raises(PlanMismatchError, match=r"^Experts: its experts are divided for .*solve again, or plan with"):
        _dispatch(torch.zeros(3, 8), index, torch.zeros(3, 2), share, "Experts")

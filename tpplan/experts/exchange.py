"""Rows sent to the ranks that have their experts, and back: all-to-alls with sizes that data decides.

Gradients: FSDP averages the gradients of a rank's experts over the ranks that have the same experts alone, whereas each
of them sums over the rows of all `ep` ranks of a group. So a gradient is divided by ep where it enters the experts, and
multiplied by ep where it leaves them to the rows: weights get the mean over all data-parallel ranks, rows their own.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from tpplan.core.errors import RankFailedError
from tpplan.torch_internals.operators import collectives
from tpplan.trace.hooks.call_rewriting import own_code


@final
@dataclass(frozen=True, slots=True)
class EpGroup:
    """The process group of `ranks` ranks that divide experts among them, by its registered name."""

    name: str
    ranks: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Numbers of rows that this rank sends to, and gets from, each rank of a group; `load` [experts] is on the device
    what each of its experts gets."""

    group: EpGroup
    sent: tuple[int, ...]
    got: tuple[int, ...]
    load: Tensor


@own_code
def exchanged_counts(chosen: Tensor, experts: int, group: EpGroup) -> tuple[Tensor, Counts]:
    """The expert, among a rank's own, of each row that arrives [rows], and the counts; `chosen` [rows] are the experts
    of the rows to send, ascending, of `experts` in all. Waits for the device, as sizes on the host depend on it. Raises
    RankFailedError on all ranks of the group where some rank has rows for no expert."""
    own = experts // group.ranks
    edges = torch.searchsorted(chosen.long(), torch.arange(experts + 1, device=chosen.device))
    sent = edges.diff()
    lost = chosen.shape[0] - sent.sum()
    told = torch.where(lost > 0, -lost, sent)  # a rank that has rows for no expert tells their number, negative
    got = _all_to_all(told, (own,) * group.ranks, (own,) * group.ranks, group).view(group.ranks, own)
    given, taken = _on_host(torch.stack((sent.view(group.ranks, own).sum(1), got.sum(1))), chosen.shape[0])
    for rank, number in enumerate(taken):
        if number < 0:
            raise RankFailedError(
                f"rank {rank} of the {group.ranks} that divide {experts} experts has {-number // own} rows whose index "
                f"is below 0 or above {experts - 1}: each index must be an expert's; for a row without one take any "
                "expert and weight 0, or plan with --ep 1"
            )
    experts_of_rank = torch.arange(own, device=chosen.device, dtype=chosen.dtype).repeat(group.ranks)
    arrived = experts_of_rank.repeat_interleave(got.flatten(), output_size=sum(taken))
    return arrived, Counts(group, given, taken, got.sum(0))


def _on_host(by_rank: Tensor, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of rows that are sent to, and come from, each rank, from `by_rank` [2, ranks]. Runs on fake tensors need
    another such function, which makes them from `rows`, the number of rows that this rank sends."""
    given, taken = by_rank.tolist()
    return tuple(given), tuple(taken)


@own_code
def send(rows: Tensor, counts: Counts) -> Tensor:
    """The rows that arrive, for rows [sent, ...] in the order of their experts."""
    found: Tensor = _Exchange.apply(rows, counts, False)  # type: ignore[no-untyped-call]
    return found


@own_code
def send_back(rows: Tensor, counts: Counts) -> Tensor:
    """The rows that come back, in the order in which they were sent; `rows` [got, ...] as they arrived."""
    found: Tensor = _Exchange.apply(rows, counts, True)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def loads(load: Tensor, group: EpGroup) -> Tensor:
    """The rows of all experts of a group [ranks, experts of a rank], from what this rank's got [experts of a rank]."""
    ops = collectives()
    found: Tensor = ops.wait_tensor.default(ops.all_gather_into_tensor.default(load, group.ranks, group.name))
    return found.view(group.ranks, -1)


def _all_to_all(rows: Tensor, given: tuple[int, ...], taken: tuple[int, ...], group: EpGroup) -> Tensor:
    """Rows by rank: `given` are sent, `taken` arrive."""
    ops = collectives()
    found = ops.all_to_all_single.default(rows.contiguous(), list(taken), list(given), group.name)
    waited: Tensor = ops.wait_tensor.default(found)
    return waited


def _moved(rows: Tensor, counts: Counts, is_back: bool) -> Tensor:
    given, taken = (counts.got, counts.sent) if is_back else (counts.sent, counts.got)
    return _all_to_all(rows, given, taken, counts.group)


class _Exchange(torch.autograd.Function):
    """Rows go to the ranks of their experts, or back; their gradients take the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts, is_back: bool) -> Tensor:
        ctx.counts, ctx.is_back = counts, is_back
        return _moved(rows, counts, is_back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        counts: Counts = ctx.counts
        ranks = counts.group.ranks
        scaled = gradient / ranks if ctx.is_back else gradient * ranks
        return _moved(scaled, counts, not ctx.is_back), None, None

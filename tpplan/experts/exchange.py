"""Rows sent to the ranks that have their experts, and back: all-to-alls with sizes that data decides.

Gradients: FSDP averages the gradients of a rank's experts over the ranks that have the same experts alone, whereas each
of them sums over the rows of all `ep` ranks of a group. So a gradient is divided by ep where it enters the experts, and
multiplied by ep where it leaves them to the rows: weights get the mean over all data-parallel ranks, rows their own.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from tpplan.torch_internals.fakes import FakeTensor
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
    of the rows to send, ascending, of `experts` in all. Waits for the device, as sizes on the host depend on it."""
    own = experts // group.ranks
    is_fake = isinstance(chosen, FakeTensor)  # without values: an even routing stands for any
    sent = chosen.new_zeros(experts) if is_fake else torch.bincount(chosen, minlength=experts)
    got = _all_to_all(sent, (own,) * group.ranks, (own,) * group.ranks, group)
    if is_fake:
        even = (chosen.shape[0] // group.ranks,) * group.ranks
        return chosen.new_empty(sum(even)), Counts(group, even, even, got[:own])
    by_rank = torch.stack((sent.view(group.ranks, own).sum(1), got.view(group.ranks, own).sum(1))).tolist()
    arrived = torch.arange(own, device=chosen.device).repeat(group.ranks).repeat_interleave(got)
    return arrived, Counts(group, tuple(by_rank[0]), tuple(by_rank[1]), got.view(group.ranks, own).sum(0))


@own_code
def send(rows: Tensor, counts: Counts) -> Tensor:
    """The rows that arrive, for rows [sent, ...] in the order of their experts."""
    found: Tensor = _Send.apply(rows, counts)  # type: ignore[no-untyped-call]
    return found


@own_code
def send_back(rows: Tensor, counts: Counts) -> Tensor:
    """The rows that come back, in the order in which they were sent; `rows` [got, ...] as they arrived."""
    found: Tensor = _SendBack.apply(rows, counts)  # type: ignore[no-untyped-call]
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


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts) -> Tensor:
        ctx.counts = counts
        return _all_to_all(rows, counts.sent, counts.got, counts.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        counts: Counts = ctx.counts
        return _all_to_all(gradient * counts.group.ranks, counts.got, counts.sent, counts.group), None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts) -> Tensor:
        ctx.counts = counts
        return _all_to_all(rows, counts.got, counts.sent, counts.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        counts: Counts = ctx.counts
        return _all_to_all(gradient / counts.group.ranks, counts.sent, counts.got, counts.group), None

"""Bags of rows of a table of which each rank has some rows: F.embedding_bag without gathering the table.

With y_b the sum of w_i W[i] over the ids i of a bag b, and W[i] on one rank, each rank adds up the rows that it has,
and the sum of the ranks' sums is y_b. A mean divides each rank's sum by the number of all ids of the bag. An id whose
row is on another rank, or is the padding, has weight 0 and reads the rank's first row, whose numbers must be finite.

The plan says which modules see how many rows; their calls of F.embedding_bag are made here. No rank asks another: the
planned layout of the result, partial, says who adds up and when.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpplan.apply.collectives.redistribute import TpGroup, local_rows
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import own_code
from tpplan.trace.hooks.custom_ops import Bags


@dataclass(frozen=True, slots=True)
class RowBags:
    """A rewriter of calls that adds up a rank's rows in the bags of tables of which it has 1 / t.

    `num_rows` are the numbers of all rows of such tables.
    """

    num_rows: tuple[int, ...]
    group: TpGroup

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        bags = custom_ops.plain_embedding_bag(func, args, kwargs)
        if bags is None or bags.table.shape[0] * self.group.size not in self.num_rows:
            return NotImplemented
        return of_own_rows(bags, self.group)


@own_code
def of_own_rows(bags: Bags, group: TpGroup) -> Tensor:
    """Returns a rank's summand [B, D] of bags whose table is the rank's rows [V/t, D]; ids number all V.

    Raises IndexError for an id outside of them, on all ranks, as all have the same ids.
    """
    local, left_out = local_rows(bags.ids, bags.table.shape[0], group)
    padding = _padding(bags, group)
    if padding is not None:
        left_out = left_out | padding
    weights = bags.per_sample_weights
    weights = left_out.logical_not().to(bags.table.dtype) if weights is None else weights.masked_fill(left_out, 0)
    summed = F.embedding_bag(
        local,
        bags.table,
        bags.offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=bags.include_last_offset,
    )
    return summed if bags.mode == "sum" else summed / _num_ids(bags, padding).clamp_min(1).unsqueeze(1).to(summed.dtype)


def _padding(bags: Bags, group: TpGroup) -> Tensor | None:
    """True for the ids that count in no bag; None where all do."""
    if bags.padding_idx is None:
        return None
    return bags.ids == bags.padding_idx % (bags.table.shape[0] * group.size)


def _num_ids(bags: Bags, padding: Tensor | None) -> Tensor:
    """The number of ids of each bag [B] that count."""
    counts = (torch.zeros_like(bags.ids, dtype=torch.bool) if padding is None else padding).logical_not()
    if bags.offsets is None:
        return counts.sum(1)
    before = F.pad(counts.cumsum(0), (1, 0))
    starts = before[bags.offsets]
    if bags.include_last_offset:
        return starts[1:] - starts[:-1]
    return torch.cat((starts[1:], before[-1:])) - starts

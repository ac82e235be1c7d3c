"""Gradients of parameters that are read as R*: summands on each tensor-parallel rank, reduced once a backward.

A norm's weight under sequence parallelism sees a part of the tokens on each rank, so its gradient there is a summand.
Reducing at every read would cost a collective per norm and micro-batch; left as DTensor Partial it would be reduced
again by clip_grad_norm_ and by every optimizer step. So the summands are accumulated as they are, and the last thing a
backward does, after FSDP has reduced over its own axes, is one all-reduce per bucket. Whoever reads `.grad` after
backward reads the sum.

Accumulation needs no context manager. A backward that adds to a gradient already reduced, G, first divides it by t:

    sum over t ranks of (G / t + summand_i)  =  G + sum of the summands

`no_sync` leaves summands as they are until the next backward outside it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.buckets import bucketed
from tpplan.convert import TpGroup, all_reduce_in_place
from tpplan.units import MIB

#: gradients are copied together up to this size: large enough to be bound by bandwidth, small beside the model
BUCKET_BYTES = 25 * MIB


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter that is read as R*, found by its module and name because to_empty and loading may replace it.

    `is_summand`: what stands in `.grad` is to be reduced still. `sharded` is the parameter as FSDP keeps it at rest,
    for the time in which the module holds the gathered one.
    """

    module: nn.Module
    name: str
    is_summand: bool = False
    sharded: nn.Parameter | None = None

    def parameter(self) -> nn.Parameter:
        """The parameter that the optimizer sees."""
        registered = self.module._parameters[self.name]
        assert registered is not None
        if self.sharded is None or _num_axes(registered) >= _num_axes(self.sharded):
            self.sharded = registered
        return self.sharded

    def gradient(self) -> Tensor | None:
        """The local part of its gradient."""
        gradient = self.parameter().grad
        return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Reducer:
    """Reduces the slots' gradients at the end of each backward; `is_enabled` is off inside no_sync."""

    group: TpGroup
    slots: list[Slot] = field(default_factory=list)
    is_enabled: bool = True
    #: the backward (autograd's graph task) at whose end a reduction is due already
    backward: int = -1

    def reading_backward(self, slot: Slot | None) -> None:
        """Called by a parameter's read when its gradient comes by, before that is accumulated anywhere."""
        if slot is not None and not slot.is_summand:
            reduced = slot.gradient()
            if reduced is not None:
                reduced.div_(self.group.size)
            slot.is_summand = True
        running = torch._C._current_graph_task_id()
        if self.is_enabled and self.slots and running != self.backward:
            self.backward = running
            torch.autograd.Variable._execution_engine.queue_callback(self._after_other_callbacks)

    def _after_other_callbacks(self) -> None:
        """FSDP finishes its reduce-scatters in a callback of its own, which may have been queued after this one."""
        torch.autograd.Variable._execution_engine.queue_callback(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums every gradient that is a summand still, over the ranks."""
        due = [(slot, gradient) for slot in self.slots if slot.is_summand and (gradient := slot.gradient()) is not None]
        for bucket in buckets([gradient for _, gradient in due], BUCKET_BYTES):
            _all_reduce_bucket(bucket, self.group)
        for slot, _ in due:
            slot.is_summand = False


def buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors grouped by dtype and size, each group at most bucket_bytes unless one tensor alone is larger."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        for positions in bucketed([tensor.nbytes for tensor in alike], bucket_bytes):
            yield [alike[position] for position in positions]


def _all_reduce_bucket(bucket: list[Tensor], group: TpGroup) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        all_reduce_in_place(bucket[0], group)
        return
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    all_reduce_in_place(flat, group)
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _num_axes(parameter: Tensor) -> int:
    """Mesh axes a parameter is laid out on: more at rest under FSDP than when gathered."""
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0

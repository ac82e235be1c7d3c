"""Gradients of parameters that are read as R*: summands on each tensor-parallel rank, reduced once a backward.

A norm's weight under sequence parallelism sees a part of the tokens on each rank, so its gradient there is a summand.
Reducing at every read would cost a collective per norm and micro-batch; left as DTensor Partial it would be reduced
again by clip_grad_norm_ and by every optimizer step. So the summands are accumulated as they are, and the last thing a
backward does, after FSDP has reduced over its own axes, is one all-reduce per bucket. Whoever reads `.grad` after
backward reads the sum.

Accumulation needs no context manager. A backward that adds to a gradient already reduced, G, first divides it by t:

    sum over t ranks of (G / t + summand_i)  =  G + sum of the summands

`no_sync` leaves summands as they are until the next backward outside it.

Two want the sum at once, and get it by an all-reduce at each read: hooks on a parameter's gradient, and
torch.autograd.grad. And what reaches a parameter past its reads (a penalty on weights in the loss) is no summand, but
the whole on each rank: where it is to be added to summands, a t-th of it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from tpplan.apply.collectives.redistribute import TpGroup, all_reduce, all_reduce_in_place
from tpplan.plan.gradient_buckets import BUCKET_BYTES, bucketed
from tpplan.torch_internals.autograd import NO_BACKWARD, at_end_of_backward, is_captured, running_backward
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.operators import copy_each
from tpplan.torch_internals.tensors import accumulated_hooks, gradient_hooks, labelled, local_part, spec_of


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter that is read as R*, found by its module and name because to_empty and loading may replace it.

    `is_summand`: what stands in `.grad` is to be reduced still. `sharded` is the parameter as FSDP keeps it at rest,
    for the time in which the module holds the gathered one. `arrived`: by backward, what reads have given of a gradient
    that is not accumulated yet. `at_once`: the last backward in which they gave sums.
    """

    module: nn.Module
    name: str
    is_summand: bool = False
    sharded: nn.Parameter | None = None
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)
    at_once: int = NO_BACKWARD

    def parameter(self) -> nn.Parameter:
        """The parameter that the optimizer sees."""
        registered = own_parameters(self.module)[self.name]
        assert registered is not None
        if self.sharded is None or _num_axes(registered) >= _num_axes(self.sharded):
            self.sharded = registered
        return self.sharded

    def gradient(self) -> Tensor | None:
        """The local part of its gradient."""
        gradient = self.parameter().grad
        return local_part(gradient) if isinstance(gradient, DTensor) else gradient

    def is_watched_by_others(self, num_ranks: int) -> bool:
        """True where somebody has a hook on its gradient. From now on we do: on what reads read, and, where FSDP has
        gathered that, on the parameter at rest, too, which code outside of forward reads."""
        registered, at_rest = own_parameters(self.module)[self.name], self.parameter()
        assert registered is not None
        for parameter in (registered,) if registered is at_rest else (registered, at_rest):
            if not any(isinstance(hook, _Watch) for hook in gradient_hooks(parameter).values()):
                assert isinstance(parameter, DTensor)
                is_read = parameter is registered
                parameter.register_hook(_Watch(self, num_ranks, parameter.placements, is_read))  # type: ignore[no-untyped-call]
        return len(gradient_hooks(at_rest)) > 1 or bool(accumulated_hooks(at_rest))


@final
@dataclass(slots=True, eq=False)
class _Watch:
    """A hook on the gradient of a slot's parameter, about to be accumulated: what no read gave becomes a summand."""

    slot: Slot
    num_ranks: int
    placements: tuple[Placement, ...]
    is_read: bool
    __torch_unserializable__: ClassVar[bool] = True  # as torch.save asks: a copy gets its own

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor | None:
        running = running_backward()
        arrived = self.slot.arrived.pop(running, []) if self.is_read else []
        if not self.slot.is_summand or self.slot.at_once == running:
            return None
        assert isinstance(gradient, DTensor)
        if len(arrived) == 1 and local_part(gradient) is arrived[0]:
            return None
        laid = gradient.redistribute(placements=self.placements)
        share = local_part(laid) / self.num_ranks
        for summand in arrived:
            share.add_(summand, alpha=1 - 1 / self.num_ranks)
        return labelled(share, spec_of(laid))


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Reducer:
    """Reduces the slots' gradients at the end of each backward; `is_enabled` is off inside no_sync."""

    group: TpGroup
    slots: list[Slot] = field(default_factory=list)
    is_enabled: bool = True
    #: the backward (autograd's graph task) at whose end a reduction is due already
    backward: int = NO_BACKWARD

    def reading_backward(self, slot: Slot | None, gradient: Tensor, read: Any) -> Tensor:
        """Called by a parameter's read, a node of autograd's, when its gradient comes by, before that is accumulated
        anywhere. Returns what is to be accumulated."""
        running = running_backward()
        if slot is not None:
            gradient = self._counted(slot, gradient, read, running)
        if self.is_enabled and self.slots and running != self.backward:
            self.backward = running
            at_end_of_backward(self._after_other_callbacks)
        return gradient

    def _counted(self, slot: Slot, summand: Tensor, read: Any, running: int) -> Tensor:
        """The summand, to be reduced later; the sum where that is wanted now, or as much of it as makes a summand."""
        is_traced = torch.compiler.is_compiling()
        is_returned = not is_traced and _is_returned(read)
        if is_returned or (not is_traced and slot.is_watched_by_others(self.group.size)):
            slot.at_once = running
            total = all_reduce(summand, "sum", self.group)
            return total / self.group.size if slot.is_summand and not is_returned else total
        if not slot.is_summand:
            reduced = slot.gradient()
            if reduced is not None:
                reduced.div_(self.group.size)
            slot.is_summand = True
        if not is_traced:
            slot.arrived.setdefault(running, []).append(summand)
        return summand

    def _after_other_callbacks(self) -> None:
        """FSDP finishes its reduce-scatters in a callback of its own, which may have been queued after this one."""
        at_end_of_backward(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums every gradient that is a summand still, over the ranks."""
        due = [(slot, gradient) for slot in self.slots if slot.is_summand and (gradient := slot.gradient()) is not None]
        for bucket in buckets([gradient for _, gradient in due], BUCKET_BYTES):
            _all_reduce_bucket(bucket, self.group)
        for slot, _ in due:
            slot.is_summand = False


def _is_returned(read: Any) -> bool:
    """True in torch.autograd.grad for what a read gives to a parameter that was asked for, which is not accumulated."""
    return is_captured(read.next_functions[0][0])


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
    copy_each(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _num_axes(parameter: Tensor) -> int:
    """Mesh axes a parameter is laid out on: more at rest under FSDP than when gathered."""
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0

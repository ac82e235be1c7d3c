"""Reduces gradients of parameters that are read as R*, which are summands on each tensor-parallel rank, per backward.

A norm's weight under sequence parallelism sees a part of the tokens on each rank, so its gradient there is a summand.
Reducing at every read would cost a collective per norm and micro-batch; as a DTensor Partial it would be reduced again
by clip_grad_norm_ and by every optimizer step. So summands are accumulated unreduced, and each backward ends, after
FSDP has reduced over its own axes, with one all-reduce per bucket. Code that reads `.grad` after backward sees the sum.

Accumulation needs no context manager. A backward that adds to a gradient already reduced, G, first divides it by t:

    sum over t ranks of (G / t + summand_i)  =  G + sum of the summands

Inside `no_sync` summands stay unreduced until the next backward outside it.

Hooks on a parameter's gradient and torch.autograd.grad need the sum at once: for them each read is all-reduced. A
gradient that reaches a parameter other than through a read (a weight penalty in the loss) is whole on each rank: where
it is added to summands, it is divided by t.

Of a weight that FSDP shards over shard and tp, it averages gradients over tp too. A summand is multiplied by t there: t
times it, averaged over tp, is the sum. What is whole on each rank is its own average.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES, bucketed
from tpplan.apply.collectives.redistribute import TpGroup, all_reduce, all_reduce_in_place
from tpplan.torch_internals.autograd import NO_BACKWARD, at_end_of_backward, is_captured, running_backward
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.operators import copy_each
from tpplan.torch_internals.tensors import accumulated_hooks, gradient_hooks, labelled, local_part, spec_of


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter whose gradient a Reducer or Averager reduces, by module and name: loading may replace the object."""

    module: nn.Module
    name: str
    #: True while `.grad` still has to be reduced
    has_partial_gradient: bool = False
    #: the parameter that FSDP keeps at rest, for the time in which the module holds the gathered one
    sharded: nn.Parameter | None = None
    #: gradients that reads gave and autograd has not accumulated yet, by backward (autograd's graph task)
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)
    #: the last backward in which reads were all-reduced at once
    at_once: int = NO_BACKWARD
    #: True where FSDP averages the gradient over tp too
    is_averaged_over_tp: bool = False

    def parameter(self) -> nn.Parameter:
        """Returns the parameter that the optimizer holds: FSDP's sharded one, if any."""
        registered = own_parameters(self.module)[self.name]
        assert registered is not None
        if self.sharded is None or _num_axes(registered) >= _num_axes(self.sharded):
            self.sharded = registered
        return self.sharded

    def gradient(self) -> Tensor | None:
        """Returns the local part of the parameter's gradient."""
        gradient = self.parameter().grad
        return local_part(gradient) if isinstance(gradient, DTensor) else gradient

    def is_watched_by_others(self, num_ranks: int) -> bool:
        """True where user code has a hook on the parameter's gradient.

        The first call registers a _Watch on the parameter that reads use, and on the one at rest, which code outside
        of forward uses while FSDP has gathered the other.
        """
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
    """A hook on the gradient of a slot's parameter that turns the part which no read gave into a summand.

    Autograd calls it with the sum G + R before accumulating it: R from reads, a summand, and G from elsewhere, whole on
    each rank. The hook returns G / t + R.
    """

    slot: Slot
    num_ranks: int
    placements: tuple[Placement, ...]
    is_read: bool
    __torch_unserializable__: ClassVar[bool] = True  # torch.save leaves it out, and a copy registers its own

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor | None:
        running = running_backward()
        arrived = self.slot.arrived.pop(running, []) if self.is_read else []
        if not self.slot.has_partial_gradient or self.slot.at_once == running:
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
    """Reduces the gradients of its slots over the tp group at the end of each backward; no_sync disables it."""

    group: TpGroup
    slots: list[Slot] = field(default_factory=list)
    is_enabled: bool = True
    #: the backward (autograd's graph task) at whose end a reduction is queued already
    backward: int = NO_BACKWARD

    def reading_backward(self, slot: Slot | None, gradient: Tensor, read: Any) -> Tensor:
        """Returns the gradient to accumulate for one read, and queues the reduction at the end of the backward.

        `gradient` is the read's gradient; `read` its autograd node, None in a compiled backward; `slot` is None where
        the gradient is no summand.
        """
        running = running_backward()
        if slot is not None:
            gradient = self._counted(slot, gradient, read, running)
        self._queue(running)
        return gradient

    def _counted(self, slot: Slot, summand: Tensor, read: Any, running: int) -> Tensor:
        """Returns the read's summand, to be reduced later, or the sum over ranks if a hook or autograd.grad needs it.

        Where the slot already holds summands, the sum is divided by t, so that the later reduction restores it.
        """
        is_returned = read is not None and _is_returned(read)
        if is_returned or slot.is_watched_by_others(self.group.size):
            slot.at_once = running
            total = all_reduce(summand, "sum", self.group)
            return total / self.group.size if slot.has_partial_gradient and not is_returned else total
        if slot.is_averaged_over_tp:
            return summand * self.group.size
        self._await_summands(slot)
        slot.arrived.setdefault(running, []).append(summand)
        return summand

    def nothing_came(self, slot: Slot) -> None:
        """Says that this rank read the slot's parameter nowhere in a backward in which other data-parallel ranks may
        have: FSDP averages their summands into its gradient."""
        if not slot.is_averaged_over_tp:
            self._await_summands(slot)
            self._queue(running_backward())

    def reduce_at_the_end(self) -> None:
        """Queues the reduction at the end of the running backward."""
        self._queue(running_backward())

    def _await_summands(self, slot: Slot) -> None:
        """Makes the slot's gradient a summand, to which others are added before it is reduced."""
        if not slot.has_partial_gradient:
            reduced = slot.gradient()
            if reduced is not None:
                reduced.div_(self.group.size)
            slot.has_partial_gradient = True

    def _queue(self, running: int) -> None:
        if self.is_enabled and self.slots and running != self.backward:
            self.backward = running
            at_end_of_backward(self._after_other_callbacks)

    def _after_other_callbacks(self) -> None:
        """Queues the reduction behind FSDP's own callback, which ends its reduce-scatters and may be queued later."""
        at_end_of_backward(self.reduce)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums every gradient that is still a summand over the tp ranks."""
        due = [
            (slot, gradient)
            for slot in self.slots
            if slot.has_partial_gradient and (gradient := slot.gradient()) is not None
        ]
        for bucket in buckets([gradient for _, gradient in due], BUCKET_BYTES):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                all_reduce_in_place(bucket[0], self.group)
            else:
                change_as_one(bucket, lambda flat: all_reduce_in_place(flat, self.group))
        for slot, _ in due:
            slot.has_partial_gradient = False


def _is_returned(read: Any) -> bool:
    """True where torch.autograd.grad returns the read's gradient to its caller instead of accumulating it."""
    return is_captured(read.next_functions[0][0])


def buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yields groups of tensors of one dtype, each of at most bucket_bytes unless one tensor alone is larger."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        for positions in bucketed([tensor.nbytes for tensor in alike], bucket_bytes):
            yield [alike[position] for position in positions]


def change_as_one(bucket: list[Tensor], change: Callable[[Tensor], None]) -> None:
    """Changes tensors in place: change(flat) changes a flat copy of all, whose parts are copied back."""
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    change(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    copy_each(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _num_axes(parameter: Tensor) -> int:
    """Returns the number of mesh axes of a parameter: more at rest under FSDP than when gathered."""
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0

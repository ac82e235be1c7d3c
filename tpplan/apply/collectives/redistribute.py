"""Converts tensors between the layouts of tpplan.core.layout: autograd functions directly on functional collectives.

A conversion has a forward half, which converts the value, and a backward half, which converts the gradient; a tensor
that needs no gradient runs the forward half only. Values are plain local tensors, so a conversion costs its collective
and little else: no DTensor is built or dispatched.

With t ranks, "join" is the dim along which slices become whole and "split" the dim along which the whole is sliced:

| step           | local result                                                        |
|----------------|---------------------------------------------------------------------|
| all_reduce     | sum over ranks                                                      |
| all_gather     | the ranks' slices, concatenated along join                          |
| reduce_scatter | this rank's slice along split of the sum over ranks                 |
| all_to_all     | the ranks' slices joined along join, then this rank's slice of split |
| slice          | this rank's slice along split (a copy: a view would keep the whole) |
| pad            | zeros, with this rank's slice in its place along join               |
| divide         | x / t                                                               |

A result lies in memory in the order of dims of the tensor that it was made of, which may be transposed or have its
channels last. Collectives work on the first dim in this order; along another dim the whole tensor is copied as well,
unless all dims before it have size 1.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tpplan.core.errors import PlanMismatchError
from tpplan.core.layout import COLLECTIVE_STEPS, ROWS, SUM_STEPS, Conversion, Layout, Step, fits
from tpplan.core.part_intervals import Interval, exchange, held, in_order, rank_by_rank
from tpplan.torch_internals.autograd import below_autograd
from tpplan.torch_internals.operators import check_within, collectives

_ops = collectives()


class _Running(threading.local):
    """Whether a thread runs the forward half of a conversion that sums or exchanges."""

    is_summing = False


_running = _Running()


def is_summing() -> bool:
    """True while this thread runs the forward half of a conversion that sums over ranks or exchanges slices."""
    return _running.is_summing


@dataclass(frozen=True, slots=True, kw_only=True)
class TpGroup:
    """A process group for functional collectives: its registered name, its size, and this process's rank in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup) -> "TpGroup":
        """Returns the TpGroup of a torch process group."""
        return cls(name=group.group_name, size=group.size(), rank=group.rank())


def convert(x: Tensor, conversion: Conversion, group: ProcessGroup) -> Tensor:
    """Returns x in its new layout on this rank; x itself where nothing changes.

    Raises PlanMismatchError, before any collective, where the dim to be sharded does not divide.
    """
    return Converter(conversion, TpGroup.of(group), where=str(conversion))(x)


@final
class Converter:
    """A conversion prepared for one process group.

    `where` starts error messages: module, direction, path. `is_read` marks the read of a parameter, whose result code
    may write to in place.
    """

    __slots__ = (
        "_backward", "_forward", "_has_dims", "_is_nothing", "conversion", "group", "is_read", "where", "witness"
    )  # fmt: skip

    def __init__(self, conversion: Conversion, group: TpGroup, *, where: str, is_read: bool = False) -> None:
        if ROWS in (conversion.source, conversion.target):
            raise ValueError(f"{conversion} needs its mask: local_rows and mask_rows")
        self.conversion = conversion
        self.group = group
        self.where = where
        self.is_read = is_read
        self._forward = next(iter(conversion.forward), Step.NONE)
        self._backward = next(iter(conversion.backward), Step.NONE)
        self._is_nothing = group.size == 1 or conversion.is_identity
        self._has_dims = conversion.source.dim is not None or conversion.target.dim is not None
        #: if set, called with `where` before each conversion that runs collectives
        self.witness: Callable[[str], None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the converted tensor, differentiable where x needs a gradient.

        Raises PlanMismatchError, before any collective, for a shape that the conversion does not fit.
        """
        if self._is_nothing:
            return x
        known = self.conversion.of(tuple(x.shape)) if self.conversion.target.each is not None else self.conversion
        if known != self.conversion:
            return Converter(known, self.group, where=self.where, is_read=self.is_read)(x)
        if self._has_dims:
            self._check(x)
        is_differentiated = x.requires_grad and torch.is_grad_enabled()
        if self.witness is not None and self._communicates(with_backward=is_differentiated):
            self.witness(self.where)
        if is_differentiated:
            converted: Tensor = _Converted.apply(x, self)  # type: ignore[no-untyped-call]
            return converted
        return self.forward(x)

    def _communicates(self, *, with_backward: bool) -> bool:
        return self._forward in COLLECTIVE_STEPS or (with_backward and self._backward in COLLECTIVE_STEPS)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the converted value: the forward half of the conversion."""
        if self._forward not in SUM_STEPS or torch.compiler.is_compiling():
            return _keep_order(self._forward, x, self.conversion.source, self.conversion.target, self.group)
        before, _running.is_summing = _running.is_summing, True
        try:
            return _keep_order(self._forward, x, self.conversion.source, self.conversion.target, self.group)
        finally:
            _running.is_summing = before

    def backward(self, gradient: Tensor) -> Tensor:
        """Returns the converted gradient: the backward half of the conversion."""
        return _keep_order(self._backward, gradient, self.conversion.target, self.conversion.source, self.group)

    def _check(self, x: Tensor) -> None:
        """Raises PlanMismatchError on every rank for a shape with which gloo would abort and NCCL would hang."""
        source, target = self.conversion.source, self.conversion.target
        if source.dim is not None and source.dim >= x.dim():
            raise PlanMismatchError(
                f"{self.where}: {self.conversion}: shape {list(x.shape)} has no dim {source.dim}; solve again for a "
                "model with this shape here"
            )
        whole = list(x.shape)
        if source.dim is not None:
            whole[source.dim] *= source.num_slices(self.group.size)
            if source.parts and sum(source.parts) != whole[source.dim]:
                raise PlanMismatchError(
                    f"{self.where}: {self.conversion}: dim {source.dim} of shape {list(x.shape)} is not 1 / "
                    f"{source.num_slices(self.group.size)} of the parts {source.parts}; solve again for this shape"
                )
        if not fits(tuple(whole), target, self.group.size):
            raise PlanMismatchError(
                f"{self.where}: {self.conversion}: dim {target.dim} of shape {whole} does not divide by "
                f"tp = {self.group.size}; pad the batch to a multiple, or solve again for this shape"
            )


class _Converted(torch.autograd.Function):
    """A conversion as one autograd node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, converter: Converter) -> Tensor:
        ctx.converter = converter
        converted = converter.forward(x)
        if converted is not x:
            return converted
        return x.detach() if converter.is_read else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.converter.backward(gradient), None


def _keep_order(step: Step, x: Tensor, source: Layout, target: Layout, group: TpGroup) -> Tensor:
    """Runs one step on x with its dims in the order in which they lie in memory, which the result has too: code behind
    it views, copies and writes what it would without the conversion."""
    order = None if step is Step.NONE or x.is_contiguous() else _memory_order(x)
    if order is None:
        return _run_step(step, x, source, target, group)
    own, other = _permuted(source, order), _permuted(target, order)
    return _run_step(step, x.permute(order), own, other, group).permute([order.index(dim) for dim in range(x.dim())])


def _memory_order(x: Tensor) -> tuple[int, ...] | None:
    """The dims of x, those with the largest strides first; None where x is not dense in this order."""
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    return order if x.permute(order).is_contiguous() else None


def _permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of a tensor whose dims were put in another order."""
    return layout if layout.dim is None else replace(layout, dim=order.index(layout.dim))


def _run_step(step: Step, x: Tensor, source: Layout, target: Layout, group: TpGroup) -> Tensor:
    """Runs one step of the module docstring's table: join is the dim of `source`, split the dim of `target`.

    A dim with parts is reordered around the step, so that the slices of each rank are contiguous.
    """
    match step:
        case Step.NONE:
            return x
        case Step.DIVIDE:
            return x / group.size
        case Step.ALL_REDUCE:
            return all_reduce(x, "sum", group)
        case Step.ALL_GATHER:
            return _in_order(_all_gather(x, _dim(source), group), source, group)
        case Step.REDUCE_SCATTER:
            return _reduce_scatter(_rank_by_rank(x, target, group), _dim(target), group)
        case Step.ALL_TO_ALL:
            if source.dim == target.dim:
                return _exchange(x, source, target, group)
            moved = _all_to_all(_rank_by_rank(x, target, group), _dim(source), _dim(target), group)
            return _in_order(moved, source, group)
        case Step.SLICE:
            slices = held(target.parts or (x.shape[_dim(target)],), target.num_slices(group.size))
            own = slices[_slice_of(target, group)]
            part = _pick_intervals(x, _dim(target), own)
            return part if len(own) > 1 else part.clone(memory_format=torch.contiguous_format)
        case Step.PAD:
            return _in_order(_pad(x, source, group), source, group)
        case Step.LOCAL_ROWS | Step.MASK:
            raise ValueError(f"{step} is not a step of one tensor")
        case _:
            assert_never(step)


def _dim(layout: Layout) -> int:
    assert layout.dim is not None
    return layout.dim


def _pick_intervals(x: Tensor, dim: int, intervals: Sequence[Interval]) -> Tensor:
    """Returns the given intervals (start, length) of x along dim, concatenated; a view where there is just one."""
    pieces = [x.narrow(dim, start, length) for start, length in intervals]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _rank_by_rank(x: Tensor, layout: Layout, group: TpGroup) -> Tensor:
    """Reorders a dim with parts so that each rank's slices of all parts are contiguous, rank by rank."""
    return _pick_intervals(x, _dim(layout), rank_by_rank(layout.parts, group.size)) if layout.parts else x


def _in_order(x: Tensor, layout: Layout, group: TpGroup) -> Tensor:
    """Reorders a dim with parts from rank by rank to the order of its parts: the inverse of _rank_by_rank."""
    return _pick_intervals(x, _dim(layout), in_order(layout.parts, group.size)) if layout.parts else x


def _exchange(x: Tensor, source: Layout, target: Layout, group: TpGroup) -> Tensor:
    """Converts contiguous slices of a dim to slices of its parts, or back, by one all-to-all."""
    dim, whole = _dim(source), (x.shape[_dim(source)] * group.size,)
    mine = exchange(source.parts or whole, target.parts or whole, group.size, group.rank)
    outgoing = _pick_intervals(x, dim, mine.send).movedim(dim, 0).contiguous()
    received = _run_collective(_ops.all_to_all_single.default, outgoing, mine.num_received, mine.num_sent, group.name)
    return _pick_intervals(received.movedim(0, dim), dim, mine.lay).contiguous()


# ---- collectives: the ops below torch.distributed._functional_collectives, whose wrappers were renamed in torch 2.13


def _run_collective(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """Runs a collective op, waits for it and returns its result.

    It runs below autograd, because _Converted has the backward already and torch's autograd formulas for collectives
    take longer than issuing one. torch.compile traces through autograd at no cost.
    """
    if torch.compiler.is_compiling():
        return _wait(op(*args))
    with below_autograd():
        return _wait(op(*args))


def all_reduce(x: Tensor, operation: str, group: TpGroup) -> Tensor:
    """Returns the sum ("sum") or maximum ("max") of x over the ranks, a new tensor. One rank needs no process group."""
    if group.size == 1:
        return x.clone()
    return _run_collective(_ops.all_reduce.default, x, operation, group.name)


def all_reduce_in_place(x: Tensor, group: TpGroup) -> None:
    """Replaces x by its sum over the ranks."""
    _run_collective(_ops.all_reduce_.default, x, "sum", group.name)


def _all_gather(x: Tensor, dim: int, group: TpGroup) -> Tensor:
    gathered = _run_collective(_ops.all_gather_into_tensor.default, x.contiguous(), group.size, group.name)
    return _join_blocks(gathered, dim, group.size)


def _reduce_scatter(x: Tensor, dim: int, group: TpGroup) -> Tensor:
    blocks = _split_blocks(x, dim, group.size)
    return _run_collective(_ops.reduce_scatter_tensor.default, blocks, "sum", group.size, group.name)


def _all_to_all(x: Tensor, join: int, split: int, group: TpGroup) -> Tensor:
    blocks = _split_blocks(x, split, group.size)
    lengths = [blocks.shape[0] // group.size] * group.size
    received = _run_collective(_ops.all_to_all_single.default, blocks, lengths, lengths, group.name)
    return _join_blocks(received, join, group.size)


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor.default(x)
    return waited


def _split_blocks(x: Tensor, dim: int, num_blocks: int) -> Tensor:
    """Returns the num_blocks slices of x along dim, concatenated along dim 0: rank i receives block i."""
    if dim == 0:
        return x.contiguous()
    if math.prod(x.shape[:dim]) == 1:  # the slices already follow each other in memory
        return x.contiguous().view(num_blocks, *x.shape[1:dim], x.shape[dim] // num_blocks, *x.shape[dim + 1 :])
    return torch.cat(x.chunk(num_blocks, dim))


def _join_blocks(blocks: Tensor, dim: int, num_blocks: int) -> Tensor:
    """Concatenates the num_blocks blocks of dim 0 along dim: the inverse of _split_blocks."""
    if dim == 0:
        return blocks
    if blocks.shape[0] == num_blocks and math.prod(blocks.shape[1:dim]) == 1:
        return blocks.view(1, *blocks.shape[1:dim], num_blocks * blocks.shape[dim], *blocks.shape[dim + 1 :])
    return torch.cat(blocks.chunk(num_blocks), dim)


def _slice_of(layout: Layout, group: TpGroup) -> int:
    """Returns the index of the slice that this rank holds; where slices are fewer than ranks, neighbours share one."""
    return group.rank * layout.num_slices(group.size) // group.size


def _pad(x: Tensor, layout: Layout, group: TpGroup) -> Tensor:
    dim = _dim(layout)
    length = x.shape[dim]
    padded = x.new_zeros(*x.shape[:dim], length * layout.num_slices(group.size), *x.shape[dim + 1 :])
    padded.narrow(dim, _slice_of(layout, group) * length, length).copy_(x)
    return padded


# ---- an embedding sharded by rows: R -> rows converts the ids, rows -> P the looked-up rows


def local_rows(ids: Tensor, num_local_rows: int, group: TpGroup) -> tuple[Tensor, Tensor]:
    """Converts R -> rows: returns the ids as row numbers of this rank, and the mask of ids whose rows are elsewhere.

    Masked ids read row 0. Raises IndexError for an id outside the table, on all ranks, as all have the same ids.
    """
    num_rows = num_local_rows * group.size
    check_within(
        ids, num_rows, f"index out of range: expected ids from 0 to {num_rows - 1} for a table of {num_rows} rows"
    )
    local = ids - group.rank * num_local_rows
    foreign = (local < 0) | (local >= num_local_rows)
    return local.masked_fill_(foreign, 0), foreign


def mask_rows(looked_up: Tensor, foreign: Tensor) -> Tensor:
    """Converts rows -> P: zeroes looked_up [*ids, ...], and its gradient, where the id's row is on another rank."""
    extra_dims = looked_up.dim() - foreign.dim()
    return looked_up.masked_fill(foreign.view(*foreign.shape, *(1,) * extra_dims), 0)

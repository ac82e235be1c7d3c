"""Results that a selectively recomputed module keeps from its forward to its replay in backward.

torch's selective checkpoint keeps the results of products, attention and sums over ranks, of all-to-alls only those of
conversions: rows that travel to experts and back, several times as many as a layer's own, travel again.

A product that only conversions read, which sum it over ranks or exchange its slices, is needed no more once their
result is kept: of a projection by rows it would be tp times as large as that. So it is let go when the conversion has
read it, and so are copies that the conversion makes of it. In the replay, where the conversion's collective gives its
kept result, a tensor of NaNs stands for it.

A product that something else reads is kept: if it is read before the conversion it is not let go, and if it is read
after it, the reader has it still.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from tpplan.apply.collectives.redistribute import is_summing
from tpplan.core.errors import UsageError
from tpplan.plan.plan import Recompute, WorkKind
from tpplan.torch_internals.checkpoints import KeptResult, KeptResults, selective_contexts
from tpplan.torch_internals.operators import gives_views, is_op, written_by
from tpplan.torch_internals.pytree import tree_leaves
from tpplan.torch_internals.recording import is_recording
from tpplan.torch_internals.tensors import StorageRef, has_storage, storage_key

#: ops by the kind of work that they do, for a mode of recomputation that keeps the results of this kind
_OPS = {
    WorkKind.PRODUCT: (
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
        "aten::convolution", "aten::_convolution", "aten::mkldnn_linear", "mkldnn::_linear_pointwise",
    ),
    WorkKind.ATTENTION: (
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
    ),
    WorkKind.SUM: (
        "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    ),
}  # fmt: skip
#: by mode, the ops whose results it keeps
KEPT_OPS = {mode: frozenset(op for kind, ops in _OPS.items() if kind in mode.keeps for op in ops) for mode in Recompute}

_PRODUCTS, _SUMS = frozenset(_OPS[WorkKind.PRODUCT]), frozenset(_OPS[WorkKind.SUM])
#: the sum's op by which rows travel to experts, too
_EXCHANGE = "_c10d_functional::all_to_all_single"
#: ops that return views without telling autograd: a write through one would change a kept result unseen
_UNSAFE = ("aten::unsafe_chunk", "aten::unsafe_split")
#: the view of torch's own that says so nowhere: of the result of a product with a tensor of more than two dims
_UNSAFE_VIEW = "aten::_unsafe_view"


def contexts_keeping(kept: frozenset[str]) -> tuple[Any, Any]:
    """The contexts of a checkpoint's forward and of its replay, which keeps the results of the ops `kept`."""
    if is_recording():  # of these results, torch.compile saves those that backward needs
        return selective_contexts(lambda _: functools.partial(_policy, kept))
    return selective_contexts(functools.partial(_Policy, kept))


def _policy(kept: frozenset[str], _context: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    if op.name().startswith(_UNSAFE):
        raise UsageError(
            f"{op.name()} runs in a module that is recomputed selectively: a write to its results would change a "
            "kept matrix product; recompute that module fully"
        )
    return CheckpointPolicy.MUST_SAVE if _base(op) in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _base(op: Any) -> str:
    name: str = op.name()
    return name.partition(".")[0]


@dataclass(slots=True, eq=False)
class _Product:
    """A kept product, or a copy of such that a conversion made of `sources`."""

    result: KeptResult
    storage: StorageRef
    shape: torch.Size
    strides: tuple[int, ...]
    offset: Any
    sources: tuple["_Product", ...] = ()
    #: True where something else than conversions reads it
    is_read: bool = False
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _Policy:
    """The ops whose results are kept, in one forward of a module; called with each op in order, it notes what reads
    products.

    torch before 2.13 calls it in the replay too, after which copies are kept or not as in the forward.
    """

    kept: frozenset[str]
    results: KeptResults
    #: products by the number of their storage, which is no other's while they are here
    products: dict[int, _Product] = field(default_factory=dict)
    #: the op before, if its result is a product or a copy of products, and these
    before: tuple[Any, tuple[_Product, ...]] | None = None
    ran: int = 0
    replayed: int = 0
    #: which of the ops, in order, copied a product
    copies: set[int] = field(default_factory=set)

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        found = _policy(self.kept, context, op)
        if _base(op) == _EXCHANGE and not is_summing():
            found = CheckpointPolicy.PREFER_RECOMPUTE
        if context.is_recompute:
            self.replayed += 1
            return CheckpointPolicy.MUST_SAVE if self.replayed in self.copies else found
        self.ran += 1
        self._take_up()
        copied = self._read(op, (args, kwargs)) if self.products else ()
        if copied:
            self.copies.add(self.ran)
            found = CheckpointPolicy.MUST_SAVE
        if copied or _base(op) in _PRODUCTS:
            self.before = op, copied
        return found

    def _take_up(self) -> None:
        """Notes the result of the op before."""
        if self.before is None:
            return
        (op, sources), self.before = self.before, None
        result = self.results.last(op)
        if result is not None and (tensor := result.tensor).is_floating_point():
            storage = StorageRef(tensor)
            self.products[storage.key] = _Product(
                result, storage, tensor.shape, tensor.stride(), tensor.storage_offset(), sources
            )

    def _read(self, op: Any, operands: Any) -> tuple[_Product, ...]:
        """Notes that an op reads products, and lets go of those that a sum reads; returns those that a conversion
        copies with it."""
        found = {id(own): (own, tensor) for own, tensor in self._products_in(operands)}
        if not found or _is_view(op):
            return ()
        if not (is_summing() and self.kept >= _SUMS):
            for own, tensor in found.values():
                _keep(own, tensor, op, operands)
            return ()
        products = tuple(own for own, _ in found.values())
        if _base(op) not in _SUMS:
            return products
        for own in products:
            _let_go(own)
        return ()

    def _products_in(self, operands: Any) -> Iterator[tuple[_Product, Tensor]]:
        for tensor in tree_leaves(operands):
            key = storage_key(tensor) if isinstance(tensor, Tensor) and has_storage(tensor) else None
            if key in self.products:
                yield self.products[key], tensor


def _is_view(op: Any) -> bool:
    """True for an op whose results share memory with its operands, and that writes to none."""
    return is_op(op) and (op.name() == _UNSAFE_VIEW or gives_views(op))


def _let_go(product: _Product) -> None:
    """Keeps a tensor of NaNs in place of a product and what it is a copy of, but where that is read by others."""
    for source in product.sources:
        _let_go(source)
    if product.is_read or product.is_gone:
        return
    product.is_gone = True
    tensor = product.result.tensor
    made = functools.partial(
        _nans, tensor.dtype, tensor.device, product.shape, None if product.sources else product.strides
    )
    product.result.put_made(made)


def _nans(dtype: torch.dtype, device: torch.device, shape: torch.Size, strides: tuple[int, ...] | None) -> Tensor:
    """A tensor of NaNs; without strides, on the memory of one."""
    if strides is None:
        return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(torch.nan)


def _keep(product: _Product, tensor: Tensor, op: Any, operands: Any) -> None:
    """Keeps a product that an op reads through a view of it. Raises UsageError for an op that writes to it, of which
    torch does not learn through a view."""
    if is_op(op) and any(storage_key(written) == product.storage.key for written in written_by(op, *operands)):
        raise UsageError(
            f"{op.name()} writes to the result of a product, in a module that is recomputed selectively, which keeps "
            "that result: recompute the module fully"
        )
    product.is_read = True
    if product.is_gone:
        product.is_gone = False
        product.result.put(tensor.detach().as_strided(product.shape, product.strides, product.offset))

"""tpplan's own operators in traced graphs: `torch.ops.tpplan.*`.

boundary  a tensor crosses into or out of a module's forward; a view, so aliasing stays as it was
frame     a tensor enters or leaves a layer that its siblings may copy, outside of its boundary; a view
sibling   a layer that is like one already traced: gives tensors like the traced layer's outputs
opaque    a call of a module that runs whole: gives tensors like the outputs observed for this call
whole     an operand or result of an autograd.Function, which must be whole on every rank; a view
cross_entropy  F.cross_entropy as one operator
embedding_bag  F.embedding_bag as one operator, of ids in rows of a matrix too
flex_attention, flex_mask  torch's flex_attention, and the mask of which its blocks are made
arriving, send_rows, return_rows  the exchange of rows among ranks that have different experts (tpplan.experts)
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: outputs of traced layers by name, one table for each trace that is running
running_traces: list[dict[str, list[Tensor]]] = []

#: outputs of opaque modules by the key of the call, one table for each trace that is running
running_opaques: list[dict[str, tuple[Tensor, ...]]] = []

#: makes a call of an operator with arguments that a hook or a sibling adds to a trace, and gives its results;
#: NotImplemented where the call is to be made as any other, through all modes that are on
Caller = Callable[[Any, tuple[Any, ...]], Any]
#: the callers of what is running, the innermost last
_callers: list[Caller] = []


@contextlib.contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    """Makes the calls that hooks and siblings add go to the caller, past all modes."""
    _callers.append(caller)
    try:
        yield
    finally:
        _callers.pop()


def caller() -> Caller:
    """The function that makes the calls which hooks and siblings add to the running trace."""
    return _callers[-1] if _callers else lambda _op, _args: NotImplemented


def _called(op: Any, *args: Any) -> Any:
    result = caller()(op, args)
    return op(*args) if result is NotImplemented else result


def boundary(x: Tensor, module: str, direction: str, path: str) -> Tensor:
    """Marks a tensor that crosses the boundary of `module`; path is the argument's or output's place."""
    marked: Tensor = _called(torch.ops.tpplan.boundary, x, module, direction, path)
    return marked


def frame(x: Tensor, module: str, side: str) -> None:
    """Notes in the trace that a tensor enters a layer ("enter") or has left it ("leave")."""
    _called(torch.ops.tpplan.frame, x, module, side)


def sibling(inputs: list[Tensor], module: str, like: str) -> list[Tensor]:
    """The outputs of the layer `module`, like those of the traced layer `like`."""
    outputs: list[Tensor] = _called(torch.ops.tpplan.sibling, inputs, module, like)
    return list(outputs)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the dtype in which it crosses a boundary."""
    changed: Tensor = _called(torch.ops.aten.to.dtype, x, dtype)
    return changed


def opaque(inputs: list[Tensor], weights: list[Tensor], key: str, written: list[int]) -> list[Tensor]:
    """The outputs of a call of a module that runs whole, observed under `key`; `written` are positions of the weights
    that the call changes."""
    outputs: list[Tensor] = torch.ops.tpplan.opaque(inputs, weights, key, written)
    return list(outputs)


def whole(x: Tensor, carries_gradient: bool) -> Tensor:
    """Marks a tensor that must be whole on every rank, and its gradient too."""
    marked: Tensor = torch.ops.tpplan.whole(x, carries_gradient)
    return marked


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], code: str, batch: bool, heads: bool, scale: float
) -> tuple[Tensor, ...]:
    """Output [B, H, T, E], logs of sums and maxima of scores [B, H, T]. `others`: what its functions read; `code`: what
    they compute; batch, heads: whether these dims may be cut."""
    found = torch.ops.tpplan.flex_attention(query, key, value, others, code, batch, heads, scale)
    return tuple(found)


def flex_mask(others: list[Tensor], code: str, sizes: list[int]) -> Tensor:
    """The mask of booleans [B, H, T, J] that a function of flex_attention gives."""
    mask: Tensor = torch.ops.tpplan.flex_mask(others, code, sizes, torch.device("meta"))
    return mask


def arriving(chosen: Tensor, experts: int, ep: int, imbalance: float) -> Tensor:
    """Experts [rows] of the rows that arrive on a rank, numbered among its own `experts`.

    `chosen` [sent] are the experts of the rows that the rank sends to `ep` ranks, which tell each other how many they
    send. Data decides how many rows arrive; the trace takes `imbalance` times as many as are sent.
    """
    found: Tensor = torch.ops.tpplan.arriving(chosen, experts, ep, imbalance)
    return found


def send_rows(rows: Tensor, arrived: Tensor, ep: int) -> Tensor:
    """The rows that arrive on a rank, one for each of `arrived`, where `ep` ranks send theirs."""
    found: Tensor = torch.ops.tpplan.send_rows(rows, arrived, ep)
    return found


def return_rows(rows: Tensor, chosen: Tensor, ep: int) -> Tensor:
    """The computed rows that come back to a rank, one for each of `chosen`, from `ep` ranks."""
    found: Tensor = torch.ops.tpplan.return_rows(rows, chosen, ep)
    return found


def _as_many(rows: Tensor, like: Tensor, ep: int) -> Tensor:
    """As many rows as `like` has, in memory of their own."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, like.shape[0] - rows.shape[0]))


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], code: str, batch: bool, heads: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by the fused kernel without a mask, for its shapes, work and saved tensors."""
    for other in others:
        query = query + other.sum() if other.requires_grad else query
    found = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return found, statistics, statistics.clone()


def _sibling(inputs: list[Tensor], module: str, like: str) -> list[Tensor]:
    return [output.new_empty_strided(output.shape, output.stride()) for output in running_traces[-1][like]]


def _opaque(inputs: list[Tensor], weights: list[Tensor], key: str, written: list[int]) -> list[Tensor]:
    return [output.new_empty_strided(output.shape, output.stride()) for output in running_opaques[-1][key]]


def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index)


def plain_cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int] | None:
    """(logits [N, V], targets [N], ignore_index) where a call is F.cross_entropy in its plain form: a mean over targets
    that are class indices, without class weights and without label smoothing. None for any other call."""
    if func is not F.cross_entropy:
        return None
    given = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    given.apply_defaults()
    logits, targets, weight, *rest = given.args  # a weight is not compared: a tensor's == is a call
    is_plain = weight is None and rest == [None, rest[1], None, "mean", 0.0] and logits.dim() == targets.dim() + 1 == 2
    return (logits, targets, rest[1]) if is_plain else None


class Bags(NamedTuple):
    """Ids [n] in bags that start at `offsets`, or [B, n] in B bags, of rows of a table [V, D], which give [B, D]."""

    table: Tensor
    ids: Tensor
    offsets: Tensor | None
    per_sample_weights: Tensor | None
    mode: str
    include_last_offset: bool
    padding_idx: int | None


def plain_embedding_bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bags | None:
    """The bags where a call is F.embedding_bag in its plain form: rows are not renormed, and their gradients are dense
    and not scaled by an id's count. None for any other call, and for one that torch refuses."""
    if func is not F.embedding_bag:
        return None
    given = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
    given.apply_defaults()
    ids, table, offsets, *renorm, scaled, mode, sparse, weights, include_last_offset, padding_idx = given.args
    is_dense = renorm[0] is None and not scaled and not sparse and table.dim() == 2
    are_ids = not ids.is_nested and not ids.is_floating_point() and ids.dim() == (2 if offsets is None else 1)
    is_weighted = weights is None or (mode == "sum" and weights.shape == ids.shape)
    if not (is_dense and are_ids and is_weighted and mode in ("sum", "mean", "max")):
        return None
    return Bags(table, ids, offsets, weights, mode, include_last_offset, padding_idx)


class OwnOperators(TorchFunctionMode):
    """A mode that runs F.cross_entropy and F.embedding_bag in their plain forms as operators of tpplan."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (loss := plain_cross_entropy(func, args, kwargs)) is not None:
            return cross_entropy(*loss)
        bags = plain_embedding_bag(func, args, kwargs)
        return embedding_bag(*bags) if bags is not None else func(*args, **kwargs)


def _embedding_bag(*bags: Any) -> Tensor:
    own = Bags(*bags)
    return F.embedding_bag(
        own.ids,
        own.table,
        own.offsets,
        mode=own.mode,
        per_sample_weights=own.per_sample_weights,
        include_last_offset=own.include_last_offset,
        padding_idx=own.padding_idx,
    )


_LIBRARY: Any = torch.library.Library("tpplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("boundary(Tensor(a) x, str module, str direction, str path) -> Tensor(a)")
_LIBRARY.define("frame(Tensor(a) x, str module, str side) -> Tensor(a)")
_LIBRARY.define("sibling(Tensor[] inputs, str module, str like) -> Tensor[]")
_LIBRARY.define("opaque(Tensor[] inputs, Tensor[] weights, str key, int[] written) -> Tensor[]")
_LIBRARY.define("whole(Tensor(a) x, bool carries_gradient) -> Tensor(a)")
_LIBRARY.impl("whole", lambda x, carries_gradient: x.view_as(x), "CompositeImplicitAutograd")
_LIBRARY.define("cross_entropy(Tensor logits, Tensor targets, int ignore_index) -> Tensor")
_LIBRARY.impl("cross_entropy", _cross_entropy, "CompositeImplicitAutograd")
_LIBRARY.define(
    "embedding_bag(Tensor table, Tensor ids, Tensor? offsets, Tensor? per_sample_weights, str mode, "
    "bool include_last_offset, int? padding_idx) -> Tensor"
)
_LIBRARY.impl("embedding_bag", _embedding_bag, "CompositeImplicitAutograd")
_LIBRARY.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] others, str code, bool batch, bool heads, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("flex_attention", _flex_attention, "CompositeImplicitAutograd")
_LIBRARY.define("arriving(Tensor chosen, int experts, int ep, float imbalance) -> Tensor")
_LIBRARY.impl("arriving", lambda chosen, *_: torch.empty_like(chosen), "CompositeExplicitAutograd")
_LIBRARY.define("send_rows(Tensor rows, Tensor arrived, int ep) -> Tensor")
_LIBRARY.impl("send_rows", _as_many, "CompositeImplicitAutograd")
_LIBRARY.define("return_rows(Tensor rows, Tensor chosen, int ep) -> Tensor")
_LIBRARY.impl("return_rows", _as_many, "CompositeImplicitAutograd")
_LIBRARY.define("flex_mask(Tensor[] others, str code, int[] sizes, Device device) -> Tensor")
_LIBRARY.impl(
    "flex_mask",
    lambda _others, _code, sizes, device: torch.empty(sizes, dtype=torch.bool, device=device),
    "CompositeExplicitAutograd",
)
_LIBRARY.impl("boundary", lambda x, module, direction, path: x.view_as(x), "CompositeImplicitAutograd")
_LIBRARY.impl("frame", lambda x, module, side: x.view_as(x), "CompositeImplicitAutograd")
_LIBRARY.impl("opaque", _opaque, "CompositeExplicitAutograd")
_LIBRARY.impl("sibling", _sibling, "CompositeExplicitAutograd")

#: cross_entropy(logits [..., V], targets [...], ignore_index): the mean loss over targets that are not ignored
cross_entropy = torch.ops.tpplan.cross_entropy
#: embedding_bag(*Bags): the sum, mean or maximum of the rows of each bag
embedding_bag = torch.ops.tpplan.embedding_bag

"""Chooses the function to run for an operator: the GPU's fused kernel where meta tensors would take another path."""

from collections.abc import Callable
from typing import Any

import torch

from tpplan.apply.collectives.cross_entropy import vocabulary_parallel
from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.row_bags import of_own_rows
from tpplan.core.layout import LayoutKind, S
from tpplan.layouts.rules import Call, Strategy
from tpplan.layouts.rules.matmul import GROUPED_PRODUCTS
from tpplan.torch_internals.operators import efficient_attention, flash_attention
from tpplan.trace.hooks.custom_ops import Bags


def callable_of(call: Call, strategy: Strategy) -> Callable[..., Any]:
    """Returns the operator of a call, or a function in its place.

    In its place stand: a GPU's fused kernel where meta tensors would take a decomposed path; the cross entropy over
    slices of the classes; embedding bags over a rank's own rows.
    """
    match call.target:
        case "tpplan.cross_entropy.default" if strategy.operands[0].kind is LayoutKind.SHARD:
            return _sharded_cross_entropy
        case "tpplan.embedding_bag.default" if strategy.operands[0] == S(0):
            return _row_bags
        case "aten.scaled_dot_product_attention.default":
            return fused_attention
        case "aten.rms_norm.default":
            return fused_rms_norm
        case target if target in GROUPED_PRODUCTS:
            return _grouped_product
    return operator_of(call)


def operator_of(call: Call) -> Callable[..., Any]:
    """Returns the operator of torch.ops that a call's target names."""
    namespace, name, overload = call.target.split(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_options: Any,
) -> Any:
    """Runs flash attention, or memory-efficient attention with a mask; on meta the plain op takes the math path."""
    if query.dim() != 4 or key.shape[1] != value.shape[1]:
        return torch.ops.aten.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is None:
        return flash_attention(query, key, value, dropout_p, is_causal)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    return efficient_attention(query, key, value, bias, dropout_p, is_causal)


def fused_rms_norm(
    x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Stands for aten._fused_rms_norm, a GPU's one kernel per direction, by layer norm, which moves the same bytes."""
    normalized: torch.Tensor = torch.ops.aten.layer_norm(x, normalized_shape, weight, None, eps or 1e-6)
    return normalized


def _sharded_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Runs the cross entropy on slices without its collectives, which strategy_times prices."""
    return vocabulary_parallel(logits, targets, ignore_index, TpGroup(name="", size=1, rank=0))


def _row_bags(*bags: Any) -> torch.Tensor:
    """Runs embedding bags over a rank's rows of the table, without the sum over ranks."""
    return of_own_rows(Bags(*bags), TpGroup(name="", size=1, rank=0))


def _grouped_product(rows: torch.Tensor, experts: torch.Tensor, _offsets: torch.Tensor) -> Any:
    """Stands for aten._grouped_mm, which runs on few dtypes and sizes: rows [N, K], experts [E, K, J]."""
    return _GroupedProduct.apply(rows, experts)  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """A grouped product, whose gradients are grouped products too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: torch.Tensor) -> Any:
        ctx.save_for_backward(rows, experts)
        return torch.ops.tpplan.grouped_product(rows, experts, len(experts))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (rows, experts), (gradient,) = ctx.saved_tensors, gradients
        of_rows, of_experts = ctx.needs_input_grad
        product = torch.ops.tpplan.grouped_product
        return (
            product(gradient, experts.mT, len(experts)) if of_rows else None,
            product(rows.mT, gradient, len(experts)) if of_experts else None,
        )


def _empty_product(left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    sizes = left.shape[-2], right.shape[-1]
    return left.new_empty(sizes if right.dim() == 3 else (groups, *sizes))


_LIBRARY: Any = torch.library.Library("tpplan", "FRAGMENT")  # type: ignore[no-untyped-call]
#: left [N, K] by right [groups, K, J]: [N, J]; left [K, N] by right [N, J]: [groups, K, J]
_LIBRARY.define("grouped_product(Tensor left, Tensor right, int groups) -> Tensor")
_LIBRARY.impl("grouped_product", _empty_product, "CompositeExplicitAutograd")

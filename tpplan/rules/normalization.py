"""Norms. Where rows are sharded, weight and bias see only some of them: R*."""

from collections.abc import Iterable

from tpplan.rules.call import Call, Strategy, op_rule
from tpplan.rules.equation import einsum


@op_rule("aten.layer_norm.default", "aten.rms_norm.default")
def norm(call: Call) -> Iterable[Strategy]:
    """`... n0 n1 -> ... n0 n1` with the normalized trailing dims whole."""
    sizes = call.integers(1, "normalized_shape") or ()
    normalized = " ".join(f"n{i}" for i in range(len(sizes)))
    affine = f", {normalized}" * (len(call.operands) - 1)
    return einsum(call, f"... {normalized}{affine} -> ... {normalized}", whole=normalized)


@op_rule("aten.group_norm.default")
def group_norm(call: Call) -> Iterable[Strategy]:
    """b batch, c channels in groups, whose number is a literal: only the batch may be sharded."""
    rest = " ".join(("c", *(f"s{i}" for i in range(len(call.operands[0].shape) - 2))))
    affine = ", c" * (len(call.operands) - 1)
    return einsum(call, f"b {rest}{affine} -> b {rest}", whole=rest)

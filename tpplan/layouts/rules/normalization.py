"""Rules of norms. Where rows are sharded, each rank has summands of the gradients of weight and bias: R*."""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import einsum


@op_rule("aten.layer_norm.default", "aten.rms_norm.default")
def norm(call: Call) -> Iterable[Strategy]:
    """`... n0 n1 -> ... n0 n1`; the normalized trailing dims stay whole."""
    sizes = call.integers(1, "normalized_shape") or ()
    normalized = " ".join(f"n{i}" for i in range(len(sizes)))
    affine = f", {normalized}" * (len(call.operands) - 1)
    return einsum(call, f"... {normalized}{affine} -> ... {normalized}", whole=normalized)


@op_rule("aten.group_norm.default")
def group_norm(call: Call) -> Iterable[Strategy]:
    """b batch, c channels. Only the batch may be sharded: the number of groups is a literal in the call."""
    rest = " ".join(("c", *(f"s{i}" for i in range(len(call.operands[0].shape) - 2))))
    affine = ", c" * (len(call.operands) - 1)
    return einsum(call, f"b {rest}{affine} -> b {rest}", whole=rest)


@op_rule("aten.batch_norm.default", "aten.instance_norm.default")
def statistics_norm(call: Call) -> Iterable[Strategy]:
    """b batch, c channels, each with its own mean and variance, which are those of the batch or given.

    What is averaged over stays whole: for a batch norm of the batch's own statistics b and space, and for an instance
    norm space, and b too where it keeps a mean over the batch.
    """
    space = " ".join(f"s{i}" for i in range(len(call.operands[0].shape) - 2))
    is_measured = bool(call.argument(5, "training"))
    is_of_batch = call.target == "aten.batch_norm.default" or call.operand_index(3, "running_mean") is not None
    whole = (space if is_measured or call.target == "aten.instance_norm.default" else "") + " b" * (
        is_measured and is_of_batch
    )
    each = ", c" * (len(call.operands) - 1)
    return einsum(call, f"b c {space}{each} -> b c {space}", whole=whole)


@op_rule("aten._weight_norm.default")
def weight_norm(call: Call) -> Iterable[Strategy]:
    """`k n1 ..., k u1 ... -> k n1 ...`, directions and lengths; k is sharded. No rule for dim -1, which has one
    length."""
    dim = call.integer(2, "dim", 0)
    if dim == -1:
        return ()
    others = [i for i in range(len(call.operands[0].shape)) if i != dim]
    directions, lengths = (_with_k(dim, (f"{name}{i}" for i in others)) for name in ("n", "u"))
    whole = (f"{name}{i}" for name in ("n", "u") for i in others)
    return einsum(call, f"{directions}, {lengths} -> {directions}", whole=" ".join(whole))


def _with_k(dim: int, others: Iterable[str]) -> str:
    names = list(others)
    names.insert(dim, "k")
    return " ".join(names)

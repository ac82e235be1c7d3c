"""Rules of ops along dims, and of norms: a sum over a sharded dim is partial; every other op needs the dim whole.

Where the rows of a norm are sharded, each rank has summands of the gradients of weight and bias: R*.
"""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, dim_letters, einsum, elementwise

_FIRST = (frozenset({0}),)


def _reduced(call: Call, dims: tuple[int, ...] | None, *, keepdim: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rank = len(call.operands[0].shape)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    letters = tuple(dim_letters(rank))
    kept = tuple(NEVER if i in reduced else letter for i, letter in enumerate(letters) if keepdim or i not in reduced)
    return letters, kept


@op_rule("aten.sum.default", "aten.sum.dim_IntList")
def total(call: Call) -> Iterable[Strategy]:
    """The sum over a sharded dim is partial."""
    letters, kept = _reduced(call, call.integers(1, "dim"), keepdim=bool(call.argument(2, "keepdim", False)))
    return Equation(operands=(letters,), results=(kept,), summed=True, linear_in=_FIRST).strategies()


@op_rule("aten.mean.default", "aten.mean.dim")
def mean(call: Call) -> Iterable[Strategy]:
    """Linear, but each rank would divide by its own count: the reduced dims stay whole, unless nothing reads the mean
    (such as the attention weights that some attention modules return beside their output)."""
    dims = call.integers(1, "dim") if call.target == "aten.mean.dim" else None
    letters, kept = _reduced(call, dims, keepdim=bool(call.argument(2, "keepdim", False)))
    whole = frozenset(letters) - frozenset(kept)
    return Equation(
        operands=(letters,),
        results=(kept,),
        whole=whole if call.results[0].is_read else frozenset(),
        summed=not call.results[0].is_read,
        linear_in=_FIRST,
    ).strategies()


@op_rule(
    "aten.amax.default", "aten.amin.default", "aten.argmax.default", "aten.argmin.default", "aten.max.dim",
    "aten.min.dim", "aten.max.default", "aten.min.default", "aten.any.dim", "aten.all.dim", "aten.any.default",
    "aten.all.default", "aten.var.correction", "aten.var.dim", "aten.std.correction", "aten.std.dim",
    "aten.var_mean.correction", "aten.var_mean.dim", "aten.logsumexp.default", "aten.prod.dim_int",
    "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim",
)  # fmt: skip
def order_or_spread(call: Call) -> Iterable[Strategy]:
    """Not linear: the reduced dims stay whole.

    keepdim is found by comparing ranks of shapes, since its position differs among these ops.
    """
    position = 2 if "norm" in call.target else 1
    keepdim = len(call.results[0].shape) == len(call.operands[0].shape)
    letters, kept = _reduced(call, call.integers(position, "dim"), keepdim=keepdim)
    whole = frozenset(letters) - frozenset(kept)
    return Equation(operands=(letters,), results=(kept,) * len(call.results), whole=whole).strategies()


@op_rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default")
def softmax(call: Call) -> Iterable[Strategy]:
    """The dim of the softmax stays whole."""
    return elementwise(call, whole_dims=frozenset({call.integer(1, "dim")}))


@op_rule("aten.glu.default")
def gated(call: Call) -> Iterable[Strategy]:
    """One half of a dim gates the other: the dim stays whole."""
    letters = dim_letters(len(call.operands[0].shape))
    letters[call.integer(1, "dim", -1)] = NEVER
    return Equation(operands=(tuple(letters),), results=(tuple(letters),)).strategies()


@op_rule("aten.cumsum.default", "aten.flip.default", "aten.roll.default")
def along(call: Call) -> Iterable[Strategy]:
    """Linear; the dims along which the op runs stay whole. A roll without dims runs along all of them."""
    position = 2 if call.target == "aten.roll.default" else 1
    name = "dim" if call.target == "aten.cumsum.default" else "dims"
    dims = call.integers(position, name) or tuple(range(len(call.results[0].shape)))
    return elementwise(call, linear_in=_FIRST, whole_dims=frozenset(dims))


@op_rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Iterable[Strategy]:
    """Linear; the last two dims stay whole."""
    return elementwise(call, linear_in=_FIRST, whole_dims=frozenset({-1, -2}))


@op_rule("aten.layer_norm.default", "aten.rms_norm.default")
def norm(call: Call) -> Iterable[Strategy]:
    """`... n0 n1 -> ... n0 n1`; the normalized trailing dims stay whole."""
    sizes = call.integers(1, "normalized_shape") or ()
    normalized = " ".join(f"n{i}" for i in range(len(sizes)))
    affine = f", {normalized}" * (len(call.operands) - 1)
    return einsum(call, f"... {normalized}{affine} -> ... {normalized}", whole=normalized)


@op_rule("aten.group_norm.default")
def group_norm(call: Call) -> Iterable[Strategy]:
    """b batch, c channels, sharded by whole groups (size_literals.groups_divide); a group averages over space."""
    space = " ".join(f"s{i}" for i in range(len(call.operands[0].shape) - 2))
    affine = ", c" * (len(call.operands) - 1)
    return einsum(call, f"b c {space}{affine} -> b c {space}", whole=space)


BATCH_NORM = "aten.batch_norm.default"
#: target -> the positions of running statistics, which an op with a true sixth argument writes to and does not read
STATISTICS = {BATCH_NORM: (3, 5), "aten.instance_norm.default": (3, 5)}


@op_rule(*STATISTICS)
def statistics_norm(call: Call) -> Iterable[Strategy]:
    """b batch, c channels, each with its own mean and variance, which are those of the batch or given.

    What is averaged over stays whole: for a batch norm of the batch's own statistics b and space, and for an instance
    norm space, and b too where it keeps a mean over the batch.
    """
    space = " ".join(f"s{i}" for i in range(len(call.operands[0].shape) - 2))
    is_measured = bool(call.argument(5, "training"))
    is_of_batch = call.target == BATCH_NORM or call.operand_index(3, "running_mean") is not None
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

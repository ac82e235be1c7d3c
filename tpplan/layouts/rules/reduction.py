"""Rules of ops along dims: a sum over a sharded dim is partial; every other op needs the dim whole."""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, dim_letters, elementwise

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
    """Linear, but each rank would divide by its own count: the reduced dims of a mean that is read stay whole. Nothing
    depends on one that is not, such as the weights that attention gives besides its output."""
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

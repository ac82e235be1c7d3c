"""Rules of elementwise ops: shards pass through; partial values pass only where the op is linear without a constant."""

import itertools
from collections.abc import Iterable

from tpplan.core.layout import R_STAR, R, joint
from tpplan.layouts.rules.call import Call, Strategy, base_target, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, dim_letters, elementwise

_FIRST = frozenset({0})


@op_rule(
    *(f"aten.{name}.default" for name in (
        "relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal",
        "abs", "sign", "sin", "cos", "square", "erf", "softplus", "leaky_relu", "elu", "hardtanh", "hardswish",
        "hardsigmoid", "mish", "log_sigmoid", "clamp", "clamp_min", "clamp_max", "relu6", "selu", "floor", "ceil",
        "round", "isnan", "isinf", "logical_not", "bitwise_not", "zeros_like", "ones_like", "full_like", "celu",
        "logical_and", "logical_or", "nan_to_num", "tan", "atan", "hardshrink", "softshrink", "erfc", "exp2", "log2",
        "log10", "acos", "asin", "cosh", "sinh", "trunc", "frac", "isfinite", "logical_xor", "logaddexp", "absolute",
        "clip", "special_expit", "threshold", "maximum", "minimum", "atan2", "floor_divide", "addcdiv",
    )),
    "aten.where.Scalar", "aten.masked_fill.Tensor", "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor",
    "aten.pow.Scalar", "aten.rsub.Scalar", "aten.add.Scalar", "aten.sub.Scalar", "aten.lerp.Tensor",
    "aten.clamp.Tensor", "aten.clip.Tensor", "aten.xlogy.Tensor", "aten.__and__.Tensor", "aten.__or__.Tensor",
    "aten.floor_divide.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode",
    *(f"aten.{name}.{overload}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or",
                                             "bitwise_xor", "remainder", "fmod")
      for overload in ("Scalar", "Tensor")),
)  # fmt: skip
def nonlinear(call: Call) -> Iterable[Strategy]:
    """Shards pass through, partial values do not."""
    return elementwise(call)


@op_rule(
    "aten.neg.default", "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
    "aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.positive.default",
    "aten.negative.default", "aten.lift_fresh_copy.default",
)  # fmt: skip
def linear_unary(call: Call) -> Iterable[Strategy]:
    """Shards, partial values and joint slices of two dims pass through."""
    yield from elementwise(call, linear_in=(_FIRST,))
    for dim in range(len(call.results[0].shape) - 1):
        yield Strategy((joint(dim),), (joint(dim),))


@op_rule("aten.to.other", "aten.type_as.default")
def as_type_of(call: Call) -> Iterable[Strategy]:
    """The second tensor is read for its dtype alone, in whatever layout."""
    own = dim_letters(len(call.results[0].shape))
    kept = Equation(operands=(tuple(own),), results=(tuple(own),), linear_in=(_FIRST,)).strategies()
    whole = (Strategy((layout,), (layout,)) for layout in (R, R_STAR))
    for first, other in itertools.product((*whole, *kept), call.every_layout(call.operands[1])):
        yield Strategy((*first.operands, other), first.results)


@op_rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor")
def multiply(call: Call) -> Iterable[Strategy]:
    """Linear in each factor alone: the product of two partial values is not partial."""
    factors = range(len(call.operands))
    return elementwise(call, linear_in=tuple(frozenset({i}) for i in factors))


@op_rule("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def divide(call: Call) -> Iterable[Strategy]:
    """Linear in the dividend."""
    starts_with_tensor = call.operand_index(0, "self") == 0
    return elementwise(call, linear_in=(_FIRST,) if starts_with_tensor else ())


@op_rule("aten.add.Tensor", "aten.sub.Tensor", "aten.subtract.Tensor", "aten.rsub.Tensor", "aten.lerp.Scalar")
def add(call: Call) -> Iterable[Strategy]:
    """Two partial values add up; a partial value and a constant do not (every rank would add the constant)."""
    return elementwise(call, linear_in=(frozenset({0, 1}),) if len(call.operands) == 2 else ())


@op_rule("aten.addcmul.default")
def addcmul(call: Call) -> Iterable[Strategy]:
    """a + b * c: the term and one factor may be partial together."""
    return elementwise(call, linear_in=(frozenset({0, 1}), frozenset({0, 2})))


@op_rule("aten.where.self")
def where(call: Call) -> Iterable[Strategy]:
    """The condition is whole; both choices may be partial together."""
    return elementwise(call, linear_in=(frozenset({1, 2}),))


#: target -> (operand that is filled, position and name of the argument with the fill value)
_FILLING = {
    "aten.masked_fill.Scalar": (0, 2, "value"),
    "aten.where.ScalarOther": (1, 2, "other"),
    "aten.where.ScalarSelf": (1, 1, "self"),
}


@op_rule(*_FILLING)
def filled(call: Call) -> Iterable[Strategy]:
    """A partial value passes where the fill value is zero."""
    operand, position, name = _FILLING[base_target(call.target)]
    return elementwise(call, linear_in=(frozenset({operand}),) if call.argument(position, name) == 0 else ())


@op_rule("aten.broadcast_tensors.default")
def broadcast_tensors(call: Call) -> Iterable[Strategy]:
    """Each operand is stretched to the common shape."""
    return elementwise(call, linear_in=(frozenset(range(len(call.operands))),))


@op_rule("aten.prelu.default")
def prelu(call: Call) -> Iterable[Strategy]:
    """One slope for all elements, or one for each index of dim 1."""
    letters = tuple(dim_letters(len(call.results[0].shape)))
    slope = tuple(letters[1] if size > 1 else NEVER for size in call.operands[1].shape)
    return Equation(operands=(letters, slope), results=(letters,)).strategies()

"""Elementwise ops: a layout passes through; a partial value only where the op is linear without a constant."""

from collections.abc import Iterable

from tpplan.rules.call import Call, Strategy, op_rule
from tpplan.rules.equation import elementwise

_FIRST = frozenset({0})


@op_rule(
    *(f"aten.{name}.default" for name in (
        "relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal",
        "abs", "sign", "sin", "cos", "square", "erf", "softplus", "leaky_relu", "elu", "hardtanh", "hardswish",
        "hardsigmoid", "mish", "log_sigmoid", "clamp", "clamp_min", "clamp_max", "relu6", "selu", "floor", "ceil",
        "round", "isnan", "isinf", "logical_not", "bitwise_not", "zeros_like", "ones_like", "full_like", "celu",
        "logical_and", "logical_or", "nan_to_num", "tan", "atan", "hardshrink", "softshrink", "erfc", "exp2", "log2",
    )),
    "aten.maximum.default", "aten.minimum.default", "aten.where.self", "aten.where.ScalarOther",
    "aten.where.ScalarSelf", "aten.where.Scalar", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor",
    "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.rsub.Scalar", "aten.atan2.default",
    "aten.lerp.Scalar", "aten.lerp.Tensor", "aten.addcmul.default", "aten.addcdiv.default", "aten.clamp.Tensor",
    *(f"aten.{name}.{overload}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or",
                                             "bitwise_xor", "floor_divide", "remainder", "fmod")
      for overload in ("Scalar", "Tensor")),
    "aten.__and__.Tensor", "aten.__or__.Tensor", "aten.floor_divide.default", "aten.xlogy.Tensor",
)  # fmt: skip
def nonlinear(call: Call) -> Iterable[Strategy]:
    """Shards pass, partial values do not."""
    return elementwise(call)


@op_rule(
    "aten.neg.default", "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
    "aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other",
    "aten.type_as.default", "aten.positive.default",
)  # fmt: skip
def linear_unary(call: Call) -> Iterable[Strategy]:
    """A sum of summands stays one. `to.other` and `type_as` read a second tensor only for its type."""
    if call.target in ("aten.to.other", "aten.type_as.default"):
        return ()
    return elementwise(call, linear_in=(_FIRST,))


@op_rule("aten.mul.Tensor", "aten.mul.Scalar")
def multiply(call: Call) -> Iterable[Strategy]:
    """Linear in each factor alone: the product of two partial values is not partial."""
    factors = range(len(call.operands))
    return elementwise(call, linear_in=tuple(frozenset({i}) for i in factors))


@op_rule("aten.div.Tensor", "aten.div.Scalar")
def divide(call: Call) -> Iterable[Strategy]:
    """Linear in the dividend."""
    starts_with_tensor = call.operand_index(0, "self") == 0
    return elementwise(call, linear_in=(_FIRST,) if starts_with_tensor else ())


@op_rule("aten.add.Tensor", "aten.sub.Tensor")
def add(call: Call) -> Iterable[Strategy]:
    """Two partial values add up; a partial value and a constant do not (every rank would add it)."""
    return elementwise(call, linear_in=(frozenset({0, 1}),) if len(call.operands) == 2 else ())

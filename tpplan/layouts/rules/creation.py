"""Rules of new tensors and of what code writes into them.

A tensor that is made and then filled slice by slice (`y = x.new_empty(...); y[..., :n] = a; y[..., n:] = b`) has one
layout from the beginning: a write keeps the layout of the tensor that it writes to.
"""

from collections.abc import Iterable

from tpplan.core.graph import Value
from tpplan.core.layout import R_STAR, Layout, P, R, S
from tpplan.core.units import FLOATING_DTYPES
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, dim_letters, elementwise
from tpplan.layouts.rules.size_literals import CREATIONS

_BOTH = (frozenset({0, 1}),)
#: target -> position of the value with which the new tensor is filled
_FILLS = {"aten.full.default": 1, "aten.new_full.default": 2}


@op_rule(*CREATIONS)
def created(call: Call) -> Iterable[Strategy]:
    """A tensor, if any, is read for its dtype and device alone, in whatever layout.

    Numbers may be sharded, and are summands if they are zero or not yet written. Integers and masks count positions:
    they are whole, or a slice beside a slice of equal size.
    """
    result = call.results[0]
    is_zero = "ones" not in call.target and call.argument(_FILLS.get(call.target, -1), "fill_value", 0) == 0
    summand = (P,) if is_zero else ()
    shards = tuple(map(S, range(len(result.shape))))
    for given in call.every_layout(call.operands[0]) if call.operands else (R,):
        beside = (s for s in shards if given.dim is not None and _size(result, s) == _size(call.operands[0], given))
        made = (R, R_STAR, *summand, *shards) if result.dtype in FLOATING_DTYPES else (R, *beside)
        yield from (Strategy((given,) * len(call.operands), (layout,)) for layout in made)


def _size(value: Value, layout: Layout) -> int:
    return value.shape[layout.dim or 0]


@op_rule("aten.copy.default", "aten.fill.Tensor")
def copy(call: Call) -> Iterable[Strategy]:
    """Overwrites the first tensor with the second, which is stretched to its shape."""
    return elementwise(call, linear_in=_BOTH)


@op_rule("aten.fill.Scalar", "aten.zero.default")
def fill(call: Call) -> Iterable[Strategy]:
    """Overwrites a tensor with a number; summands of zero are zeros."""
    return elementwise(call, linear_in=(frozenset({0}),) if call.argument(1, "value", 0) == 0 else ())


@op_rule("aten.slice_scatter.default", "aten.select_scatter.default")
def scatter_slice(call: Call) -> Iterable[Strategy]:
    """A copy of the first tensor with the second in place of a slice; the sliced dim stays whole."""
    letters = dim_letters(len(call.operands[0].shape))
    letters[call.integer(2, "dim", 0)] = NEVER
    own = tuple(letters)
    is_one = call.target == "aten.select_scatter.default"
    source = tuple(letter for letter in own if letter != NEVER) if is_one else own
    return Equation(operands=(own, source), results=(own,), linear_in=_BOTH).strategies()

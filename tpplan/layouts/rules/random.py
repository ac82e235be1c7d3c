"""Random ops: on whole values every rank of the group draws the same numbers; on slices each rank needs its own.

The plan says in which modules' forwards that is so, and tpplan.apply.modules.dropout_rng sees to it. What is then drawn
has the right distribution and is not what one process would draw.
"""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import elementwise

_ATTENTION = "aten.scaled_dot_product_attention.default"


def draws(call: Call) -> bool:
    """True for a call that drops elements at random."""
    match call.target:
        case "aten.dropout.default" | "aten.dropout_.default":
            return bool(call.argument(2, "train") and call.argument(1, "p"))
        case target:
            return target == _ATTENTION and bool(call.argument(4, "dropout_p", 0.0))


@op_rule("aten.dropout.default")
def dropout(call: Call) -> Iterable[Strategy]:
    """Pointwise, and linear under one mask."""
    return elementwise(call, linear_in=(frozenset({0}),))

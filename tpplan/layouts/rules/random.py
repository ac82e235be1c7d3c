"""Rules of random ops. On whole values all ranks draw the same numbers; on slices each rank draws its own.

The plan lists the modules whose ops draw on slices, and tpplan.apply.modules.dropout_rng seeds them. Such draws have
the right distribution but differ from the draws of one process.
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
    """Pointwise; linear, because one mask applies to all summands."""
    return elementwise(call, linear_in=(frozenset({0}),))

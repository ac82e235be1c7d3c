"""Random ops: on whole values every rank of the group draws the same numbers, on shards they would be the same too."""

from collections.abc import Iterable

from tpplan.layout import P
from tpplan.rules.call import Call, Strategy, op_rule
from tpplan.rules.equation import elementwise


@op_rule("aten.dropout.default")
def dropout(call: Call) -> Iterable[Strategy]:
    """Pointwise where nothing is dropped. Else whole, or partial: one mask for all ranks, and linear under it."""
    if call.argument(2, "train") and call.argument(1, "p"):
        return (Strategy((P,), (P,)),)
    return elementwise(call, linear_in=(frozenset({0}),))

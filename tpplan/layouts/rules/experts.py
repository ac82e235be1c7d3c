"""Rules of the exchange of rows among ranks that have different experts (tpplan.experts)."""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation

#: operators in which each rank sends rows to ranks that have other experts, and gets theirs
EXCHANGES = frozenset({"tpplan.send_rows.default", "tpplan.return_rows.default"})


@op_rule(*EXCHANGES)
def exchanged(call: Call) -> Iterable[Strategy]:
    """Whole rows travel. Linear in them: summands may travel, and be added up where they arrive."""
    rows, like = ((NEVER,) * len(value.shape) for value in call.operands)
    return Equation(operands=(rows, like), results=(rows,), linear_in=(frozenset({0}),)).strategies()

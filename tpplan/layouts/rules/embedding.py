"""The rule of embedding lookups: the table sharded by columns or by rows, or the ids sharded."""

from collections.abc import Iterable

from tpplan.core.layout import ROWS, S
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import einsum


@op_rule("aten.embedding.default")
def embedding(call: Call) -> Iterable[Strategy]:
    """V rows, D columns. By rows, ids become local rows; the result is masked and then partial (`rows -> ...`).

    With a padding id, which would be on one rank alone, rows stay whole. Gradients scaled by an id's count need all
    ids.
    """
    ids = " ".join(f"i{axis}" for axis in range(len(call.operands[1].shape)))
    counts_ids = bool(call.argument(3, "scale_grad_by_freq", False))
    yield from einsum(call, f"V D, {ids} -> {ids} D", whole=f"V {ids}" if counts_ids else "V")
    if call.argument(2, "padding_idx", -1) == -1 and not counts_ids:
        yield Strategy((S(0), ROWS), (ROWS,))

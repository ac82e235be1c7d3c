"""The rules of embedding lookups: the table sharded by columns or by rows, or the ids sharded; bags by columns."""

from collections.abc import Iterable

from tpplan.core.layout import R_STAR, ROWS, R, S
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


@op_rule("aten.embedding_bag.padding_idx", "aten.embedding_bag.default")
def embedding_bag(call: Call) -> Iterable[Strategy]:
    """V rows, D columns, of which columns are sharded; n ids in bags that start at given places.

    By rows, ids of other ranks would have to be left out of the bags' sums and maxima: rows stay whole. A gradient of
    rows alone (sparse) is not sharded.
    """
    if call.argument(5, "sparse", False):
        return ()
    of_bags = (S(1) if value.shape == call.results[0].shape else R for value in call.results[1:])  # places of maxima
    return (Strategy((S(1), *(R_STAR,) * (len(call.operands) - 1)), (S(1), *of_bags)),)

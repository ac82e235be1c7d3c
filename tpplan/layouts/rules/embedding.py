"""The rules of embedding lookups: the table sharded by columns or by rows, or the ids sharded; bags alike."""

from collections.abc import Iterable

from tpplan.core.layout import R_STAR, ROWS, P, R, S
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import einsum

EMBEDDING = "aten.embedding.default"
BAGS = "tpplan.embedding_bag.default"


@op_rule(EMBEDDING)
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


@op_rule(BAGS)
def bags(call: Call) -> Iterable[Strategy]:
    """V rows, D columns; bags of ids [B, n], or of ids [n] and where each bag starts, with weights or without.

    By rows a rank adds up what it has of each bag (tpplan.apply.collectives.row_bags). A maximum of what it has would
    be a summand of nothing: its rows stay whole. Ids in a matrix are sharded by bags.
    """
    _, *others = call.operands
    whole = (R_STAR,) * len(others)
    yield Strategy((S(1), *whole), (S(1),))
    if call.argument(4, "mode") != "max":
        yield Strategy((S(0), *whole), (P,))
    if len(others[0].shape) == 2:
        yield Strategy((R_STAR, *(S(0) for _ in others)), (S(0),))


@op_rule("aten.embedding_bag.padding_idx", "aten.embedding_bag.default")
def embedding_bag(call: Call) -> Iterable[Strategy]:
    """Bags in no plain form: rows renormed, gradients scaled by counts, or a call below F.embedding_bag. By columns.

    A gradient of rows alone (sparse) is not sharded.
    """
    if call.argument(5, "sparse", False):
        return ()
    of_bags = (S(1) if value.shape == call.results[0].shape else R for value in call.results[1:])  # places of maxima
    return (Strategy((S(1), *(R_STAR,) * (len(call.operands) - 1)), (S(1), *of_bags)),)

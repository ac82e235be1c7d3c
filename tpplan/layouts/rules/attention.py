"""Rules of attention and of dropout, which attention may contain.

Random ops: on whole values all ranks draw the same numbers; on slices each rank draws its own. The plan lists the
modules whose ops draw on slices, and tpplan.apply.modules.dropout_rng seeds them. Such draws have the right
distribution but differ from the draws of one process.
"""

from collections.abc import Iterable

from tpplan.core.layout import R_STAR, Layout, S, copied
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, Letters, elementwise

FLEX_ATTENTION = "tpplan.flex_attention.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"


@op_rule(_ATTENTION)
def attention(call: Call) -> Iterable[Strategy]:
    """Shards of batch and heads, and of query positions without a mask or causality.

    B batch, H query heads, T query positions, J key positions, D and E head dims.

    Grouped key and value heads are sharded like the query heads, in contiguous groups. Where key heads are fewer than
    ranks, each rank holds the head that its queries use; a single key head is broadcast.
    """
    query, key, value = (call.operands[i].shape for i in range(3))
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        return
    is_causal = bool(call.argument(5, "is_causal", False))
    mask_index = call.operand_index(3, "attn_mask")
    shared = "H" if key[1] == query[1] or key[1] > 1 else NEVER
    terms: list[Letters] = [("B", "H", "T", "D"), ("B", shared, "J", "D"), ("B", shared, "J", "E")]
    if mask_index is not None:
        mask = call.operands[mask_index].shape
        letters = ("B", "H", "T", "J")[4 - len(mask) :]
        terms.append(tuple(NEVER if size == 1 else letter for letter, size in zip(letters, mask, strict=True)))
    if key[0] != query[0] or (key[1] != query[1] and not call.argument(7, "enable_gqa", False)):
        return
    whole = frozenset("TJDE") if is_causal else frozenset("JDE")
    for strategy in Equation(operands=tuple(terms), results=(("B", "H", "T", "E"),), whole=whole).strategies():
        yield strategy
        if strategy.results == (S(1),) and 1 < key[1] < query[1]:
            heads = copied(1, key[1])
            yield Strategy((S(1), heads, heads, *strategy.operands[3:]), strategy.results)


@op_rule(FLEX_ATTENTION)
def flex_attention(call: Call) -> Iterable[Strategy]:
    """Shards of batch and of heads, where no function and no mask of the call tells them apart (arguments 5 and 6).

    What the functions read besides is whole, and a rank's heads or batch give a summand of its gradient.
    """
    query, key, _, *others = (value.shape for value in call.operands)
    is_cut = (call.argument(5, "batch") and query[0] == key[0], call.argument(6, "heads") and query[1] % key[1] == 0)
    for dim in (0, 1):
        if is_cut[dim]:
            shared: Layout = R_STAR if dim == 1 and key[1] == 1 else S(dim)
            yield Strategy((S(dim), shared, shared, *(R_STAR,) * len(others)), (S(dim),) * 3)
    if is_cut[1] and 1 < key[1] < query[1]:
        heads = copied(1, key[1])
        yield Strategy((S(1), heads, heads, *(R_STAR,) * len(others)), (S(1),) * 3)


#: dropouts, whose second argument is the probability, and the third whether it is used
_DROPOUTS = frozenset({"aten.dropout.default", "aten.dropout_.default"})


def may_drop(target: str) -> bool:
    """True for the ops of which `draws` says whether a call drops elements at random."""
    return target in _DROPOUTS or target == _ATTENTION


def draws(call: Call) -> bool:
    """True for a call that drops elements at random."""
    match call.target:
        case target if target in _DROPOUTS:
            return bool(call.argument(2, "train") and call.argument(1, "p"))
        case target:
            return target == _ATTENTION and bool(call.argument(4, "dropout_p", 0.0))


@op_rule("aten.dropout.default")
def dropout(call: Call) -> Iterable[Strategy]:
    """Pointwise; linear, because one mask applies to all summands."""
    return elementwise(call, linear_in=(frozenset({0}),))

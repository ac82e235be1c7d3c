"""Losses that can run on sharded classes."""

from collections.abc import Iterable

from tpplan.layout import R, S
from tpplan.rules.call import Call, Strategy, op_rule


@op_rule("tpplan.cross_entropy.default")
def cross_entropy(call: Call) -> Iterable[Strategy]:
    """Classes sharded: maximum, sum of exponentials and the target's logit are reduced, logits never gathered."""
    return (Strategy((S(len(call.operands[0].shape) - 1), R), (R,)),)

"""Rules of losses: tpplan's cross entropy on sharded classes, torch's losses where they do not average.

A mean would divide by a rank's own count, so a loss that averages runs on whole operands.
"""

from collections.abc import Iterable
from enum import IntEnum

from tpplan.core.layout import R, S
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import Equation, dim_letters, einsum, elementwise


class Reduction(IntEnum):
    """The reduction of a loss, as aten encodes it."""

    NONE = 0
    MEAN = 1
    SUM = 2


#: the only op that may take a sharded output and plain tensors together in the user's loss
CROSS_ENTROPY = "tpplan.cross_entropy.default"


@op_rule(CROSS_ENTROPY)
def cross_entropy(call: Call) -> Iterable[Strategy]:
    """Classes sharded: maximum, sum of exponentials and the target's logit are reduced; logits are never gathered."""
    return (Strategy((S(len(call.operands[0].shape) - 1), R), (R,)),)


#: target -> position of the argument `reduction`
_REDUCTION_ARGUMENT = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
}


@op_rule(*_REDUCTION_ARGUMENT)
def elementwise_loss(call: Call) -> Iterable[Strategy]:
    """A loss for each element, or the sum of the losses."""
    reduction = call.integer(_REDUCTION_ARGUMENT[call.target], "reduction", Reduction.MEAN)
    if reduction == Reduction.NONE:
        return elementwise(call)
    if reduction == Reduction.SUM:
        return einsum(call, ", ".join(["..."] * len(call.operands)) + " -> ", summed=True)
    return ()


@op_rule("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
def class_loss(call: Call) -> Iterable[Strategy]:
    """A loss for each sample (and position), or the sum of the losses; classes and their weights stay whole."""
    reduction = call.integer(3, "reduction", Reduction.MEAN)
    rank = len(call.operands[0].shape)
    if reduction == Reduction.MEAN or rank < 2:
        return ()
    scores = ("n", "c", *dim_letters(rank - 2))
    samples = tuple(letter for letter in scores if letter != "c")
    targets = samples if len(call.operands[1].shape) == rank - 1 else scores
    return Equation(
        operands=(scores, targets, ("c",))[: len(call.operands)],
        results=(samples if reduction == Reduction.NONE else (),),
        whole=frozenset({"c"}),
        summed=reduction == Reduction.SUM,
    ).strategies()

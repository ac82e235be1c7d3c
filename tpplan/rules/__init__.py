"""Sharding rules: for a call of an operator, the consistent tuples of operand and result layouts.

A rule is one function in one file of this folder, named by `@op_rule(targets...)`. It says nothing of how many ranks
there are: strategies whose shards do not divide are dropped afterwards. Rules are validated against numerics over all
layouts, all ranks and both directions (tests/test_rules.py finds them by itself): what a rule allows is right, what it
leaves out is merely slower. An operator without a rule runs on whole operands, all R or all R*.
"""

import importlib
import pkgutil
from functools import cache

from tpplan.graph import ModelGraph, Op
from tpplan.rules.call import Call, Rule, Strategy, base_target, registered_rules
from tpplan.rules.equation import whole_operands

__all__ = [
    "Call",
    "Strategy",
    "base_target",
    "call_strategies",
    "has_rule",
    "localized_sizes",
    "registered_rules",
    "strategies",
]


@cache
def _load_families() -> dict[str, Rule]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return registered_rules()


def has_rule(target: str) -> bool:
    """True when a rule is registered for the target, or for the op it is the in-place form of."""
    return base_target(target) in _load_families()


def strategies(graph: ModelGraph, op: Op, tp: int) -> tuple[Strategy, ...]:
    """Every way to run `op` on tp ranks, without duplicates, the replicated one first."""
    return call_strategies(Call.of(graph, op), tp)


def call_strategies(call: Call, tp: int) -> tuple[Strategy, ...]:
    """The same for a call that stands alone."""
    rule = _load_families().get(base_target(call.target))
    proposed = (*whole_operands(call), *(rule(call) if rule and call.results else ()))
    found: dict[Strategy, None] = {}
    for strategy in proposed:
        for variant in strategy.without_idle_gradients(call):
            if variant.fits(call, tp) and (not call.is_in_place or variant.results[0] == variant.operands[0]):
                found[variant] = None
    return tuple(found)


#: position of the sizes among the arguments of ops that are given their result's sizes as literals
_SIZE_ARGUMENT = {
    "aten.view.default": 1,
    "aten.reshape.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.expand.default": 1,
    "aten.broadcast_to.default": 1,
    "aten.unflatten.int": 2,
}


def localized_sizes(call: Call, result_shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """For an op that is given its result's sizes: the argument's position and the sizes that make `result_shape`."""
    position = _SIZE_ARGUMENT.get(call.target)
    if position is None:
        return None
    if call.target == "aten.unflatten.int":
        rank = len(call.operands[0].shape)
        dim = call.integer(1, "dim") % rank
        return position, result_shape[dim : dim + 1 + len(result_shape) - rank]
    return position, result_shape

"""Sharding rules: for a call of an operator, the consistent tuples of operand and result layouts.

A rule is one function in one file of this folder, named by `@op_rule(targets...)`. It says nothing of how many ranks
there are: strategies whose shards do not divide are dropped afterwards. Rules are validated against numerics over all
layouts, all ranks and both directions (tests/test_rules.py finds them by itself): what a rule allows is right, what it
leaves out is merely slower. An operator without a rule runs on whole operands, all R or all R*.

In: a `Call` (an operator with its operands' shapes) and a number of ranks. Out: its strategies. Needs no torch.

Imports: core, plan.
"""

import importlib
import pkgutil
from functools import cache, lru_cache

from tpplan.core.graph import ModelGraph, Op
from tpplan.core.layout import R
from tpplan.layouts.rules.call import (
    OPAQUE,
    Call,
    Extra,
    Rule,
    Strategy,
    base_target,
    crossings_before_writes,
    registered_rules,
    written_operands,
)
from tpplan.layouts.rules.equation import whole_operands
from tpplan.layouts.rules.random import draws
from tpplan.layouts.rules.size_literals import groups_divide, localized_arguments, takes_sizes, written_sizes

__all__ = [
    "OPAQUE",
    "Call",
    "Extra",
    "Strategy",
    "base_target",
    "call_strategies",
    "crossings_before_writes",
    "draws",
    "has_rule",
    "localized_arguments",
    "registered_rules",
    "strategies",
    "takes_sizes",
    "written_operands",
    "written_sizes",
]

#: calls whose strategies are remembered; a large model has some hundreds of kinds
MOST_REMEMBERED = 10_000


@cache
def _load_families() -> dict[str, Rule]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return registered_rules()


def has_rule(target: str) -> bool:
    """True when a rule is registered for the target, or for the op it is the in-place form of."""
    return base_target(target) in _load_families()


def strategies(graph: ModelGraph, op: Op, tp: int, extra: Extra | None = None) -> tuple[Strategy, ...]:
    """Every way to run `op` on tp ranks, without duplicates, the replicated one first.

    Dims are cut part by part, or into fewer slices than ranks, as `extra` says of each value.
    """
    names = (*op.operands, *op.results)
    own = {name: extra[name] for name in names if extra is not None and name in extra}
    found = call_strategies(Call.of(graph, op, frozenset().union(*own.values())), tp)
    return tuple(
        strategy
        for strategy in found
        if all(
            layout.dim is None or layout.is_plain or layout in own.get(name, ())
            for name, layout in zip(names, (*strategy.operands, *strategy.results), strict=True)
        )
    )


def call_strategies(call: Call, tp: int) -> tuple[Strategy, ...]:
    """The same for a call that stands alone."""
    if call.target == OPAQUE:
        return (Strategy((R,) * len(call.operands), (R,) * len(call.results)),)
    rule = _load_families().get(base_target(call.target))
    like = call.anonymous()
    return _strategies_of(rule, like, repr((like.args, like.kwargs)), tp)


@lru_cache(maxsize=MOST_REMEMBERED)
def _strategies_of(rule: Rule | None, call: Call, _literals: str, tp: int) -> tuple[Strategy, ...]:
    """Found once for like calls. `_literals` tells 1 from True and from 1.0, which are equal otherwise."""
    proposed = (*whole_operands(call), *(rule(call) if rule and call.results else ()))
    if not call.target.startswith(_POSITIONAL):
        by_parts = (variant for strategy in proposed for variant in strategy.part_by_part(call))
        shared = proposed if call.slices and not draws(call) else ()
        copies = (variant for strategy in shared for variant in strategy.with_copies(call))
        proposed = (*proposed, *by_parts, *copies)
    found: dict[Strategy, None] = {}
    for strategy in proposed:
        for variant in strategy.without_idle_gradients(call):
            if not variant.fits(call, tp) or not groups_divide(call, variant, tp):
                continue
            if not call.is_in_place or variant.results[0] == variant.operands[0]:
                found[variant] = None
    return tuple(found)


#: ops of ours that communicate: they count positions from the first rank's, and know of as many slices as ranks
_POSITIONAL = "tpplan."

"""Sharding rules: the consistent tuples of operand and result layouts of each operator.

A rule is one function in one file of this folder, registered by `@op_rule(targets...)`. It does not depend on the
number of ranks: strategies whose shards do not divide are dropped afterwards. tests/layouts/test_rules.py finds every
rule and validates it numerically over all layouts, all ranks and both directions: a strategy that a rule allows is
right, a strategy that it leaves out only costs speed. An operator without a rule has that of nonlinear elementwise ops
where torch tags it as pointwise; else it runs on whole operands, all R or all R*.

In: a `Call` (an operator with its operands' shapes) and a number of ranks. Out: its strategies. Needs no torch.

Imports: core, plan.
"""

import importlib
import pkgutil
from functools import cache, lru_cache

from tpplan.core.graph import ModelGraph, Op
from tpplan.core.layout import R
from tpplan.layouts.rules.attention import FLEX_ATTENTION, draws, may_drop
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
from tpplan.layouts.rules.pointwise import nonlinear
from tpplan.layouts.rules.size_literals import (
    groups_divide,
    localized_arguments,
    num_sizes,
    quotients,
    size_literals,
    size_places,
    takes_sizes,
    written_sizes,
)

__all__ = [
    "FLEX_ATTENTION",
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
    "may_drop",
    "num_sizes",
    "quotients",
    "registered_rules",
    "size_literals",
    "size_places",
    "strategies",
    "takes_sizes",
    "written_operands",
    "written_sizes",
]

#: most calls whose strategies are cached; a large model has a few hundred distinct calls
MOST_REMEMBERED = 10_000


@cache
def _load_families() -> dict[str, Rule]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return registered_rules()


def has_rule(target: str) -> bool:
    """True where a rule is registered for the target, or for the plain form of an in-place target."""
    return base_target(target) in _load_families()


def strategies(graph: ModelGraph, op: Op, tp: int, extra: Extra | None = None) -> tuple[Strategy, ...]:
    """Every strategy of `op` on tp ranks, without duplicates, the replicated ones first.

    `extra` gives the values' layouts with separately sharded parts or shared slices; others of these kinds are left
    out.
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
    """Every strategy of a call on tp ranks, without duplicates, the replicated ones first."""
    if call.target == OPAQUE:
        return (Strategy((R,) * len(call.operands), (R,) * len(call.results)),)
    rule = _load_families().get(base_target(call.target), nonlinear if call.is_pointwise else None)
    like = call.anonymous()
    return _strategies_of(rule, like, repr((like.args, like.kwargs)), tp)


@lru_cache(maxsize=MOST_REMEMBERED)
def _strategies_of(rule: Rule | None, call: Call, literals: str, tp: int) -> tuple[Strategy, ...]:
    """Strategies, cached by call. `literals` tells 1, True and 1.0 apart, which are equal as cache keys."""
    return tuple(
        strategy
        for strategy in _on_any_ranks(rule, call, literals)
        if strategy.fits(call, tp) and groups_divide(call, strategy, tp)
    )


@lru_cache(maxsize=MOST_REMEMBERED)
def _on_any_ranks(rule: Rule | None, call: Call, _literals: str) -> tuple[Strategy, ...]:
    """Strategies of a call on ranks that divide every size."""
    proposed = (*whole_operands(call), *(rule(call) if rule and call.results else ()))
    if not call.target.startswith(_POSITIONAL):
        by_parts = (variant for strategy in proposed for variant in strategy.part_by_part(call))
        shared = proposed if call.slices and not draws(call) else ()
        copies = (variant for strategy in shared for variant in strategy.with_copies(call))
        proposed = (*proposed, *by_parts, *copies)
    found: dict[Strategy, None] = {}
    for strategy in proposed:
        for variant in strategy.without_idle_gradients(call):
            if not (call.is_in_place and variant.results) or variant.results[0] == variant.operands[0]:
                found[variant] = None
    return tuple(found)


#: prefix of tpplan's own ops, which communicate: they take plain shards alone, whose offsets follow from the rank
_POSITIONAL = "tpplan."

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
from tpplan.rules.call import Call, Rule, Strategy, base_target, registered_rules, written_operands
from tpplan.rules.equation import whole_operands
from tpplan.rules.literals import groups_divide, localized_arguments, takes_sizes, written_sizes
from tpplan.rules.parts import Fused, fused_dims, fused_parts
from tpplan.rules.random import draws

__all__ = [
    "Call",
    "Fused",
    "Strategy",
    "base_target",
    "call_strategies",
    "draws",
    "find_fused_dims",
    "fused_parts",
    "has_rule",
    "localized_arguments",
    "registered_rules",
    "strategies",
    "takes_sizes",
    "written_operands",
    "written_sizes",
]


@cache
def _load_families() -> dict[str, Rule]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return registered_rules()


def has_rule(target: str) -> bool:
    """True when a rule is registered for the target, or for the op it is the in-place form of."""
    return base_target(target) in _load_families()


def strategies(graph: ModelGraph, op: Op, tp: int, fused: Fused | None = None) -> tuple[Strategy, ...]:
    """Every way to run `op` on tp ranks, without duplicates, the replicated one first.

    What is sharded part by part is what `fused` says consists of these parts.
    """
    names = (*op.operands, *op.results)
    marks = {name: fused[name] for name in names if fused is not None and name in fused}
    found = call_strategies(Call.of(graph, op, fused_parts(marks)), tp)
    return tuple(
        strategy
        for strategy in found
        if all(
            not layout.parts or layout.parts in marks.get(name, {}).get(layout.dim or 0, ())
            for name, layout in zip(names, (*strategy.operands, *strategy.results), strict=True)
        )
    )


def find_fused_dims(graph: ModelGraph) -> Fused:
    """Dims of the graph's values that consist of parts, and of which."""
    return fused_dims(graph, lambda call: call_strategies(call, 1))


def call_strategies(call: Call, tp: int) -> tuple[Strategy, ...]:
    """The same for a call that stands alone."""
    rule = _load_families().get(base_target(call.target))
    proposed = (*whole_operands(call), *(rule(call) if rule and call.results else ()))
    if not call.target.startswith(_POSITIONAL):
        proposed = (*proposed, *(variant for strategy in proposed for variant in strategy.part_by_part(call)))
    found: dict[Strategy, None] = {}
    for strategy in proposed:
        for variant in strategy.without_idle_gradients(call):
            if not variant.fits(call, tp) or not groups_divide(call, variant, tp):
                continue
            if not call.is_in_place or variant.results[0] == variant.operands[0]:
                found[variant] = None
    return tuple(found)


#: ops of ours that communicate: they count positions from the first rank's
_POSITIONAL = "tpplan."

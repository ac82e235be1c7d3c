"""Layouts that only some values may have: separately sharded parts of a fused dim, and shared slices."""

from tpplan.core.graph import ModelGraph
from tpplan.core.layout import S
from tpplan.layouts.fused_dims import fused_dims
from tpplan.layouts.rules import Extra, call_strategies
from tpplan.layouts.shared_heads import copied_dims
from tpplan.layouts.stacked_dims import stacked_dims


def find_extra_layouts(graph: ModelGraph, tp: int) -> Extra:
    """Value name -> its S(d; parts) and S(d)/m layouts, for the values of the graph that may have any on tp ranks."""
    fused = graph.once(fused_dims, lambda: fused_dims(graph, lambda call: call_strategies(call, 1)))
    copied = copied_dims(graph, lambda call: call_strategies(call, tp))
    by_parts = {
        name: frozenset(S(dim, *parts) for dim, found in dims.items() for parts in found)
        for name, dims in fused.items()
    }
    found = (by_parts, copied, stacked_dims(graph, lambda call: call_strategies(call, 1)))
    names = dict.fromkeys(name for layouts in found for name in layouts)
    return {name: frozenset().union(*(layouts.get(name, ()) for layouts in found)) for name in names}

"""Layouts that only some values may have: separately sharded parts of a fused dim, and shared slices."""

from tpplan.core.graph import ModelGraph
from tpplan.core.layout import S
from tpplan.layouts.fused.fused_dims import fused_dims
from tpplan.layouts.fused.shared_heads import copied_dims
from tpplan.layouts.fused.stacked_dims import stacked_dims
from tpplan.layouts.rules import Extra, call_strategies


def find_extra_layouts(graph: ModelGraph, tp: int) -> Extra:
    """Value name -> its S(d; parts) and S(d)/m layouts, for the values of the graph that may have any on tp ranks."""
    by_parts = graph.once(_layouts_by_parts, lambda: _layouts_by_parts(graph))
    copied = copied_dims(graph, lambda call: call_strategies(call, tp))
    if not by_parts or not copied:
        return by_parts or copied
    return {**by_parts, **{name: by_parts.get(name, frozenset()) | layouts for name, layouts in copied.items()}}


def _layouts_by_parts(graph: ModelGraph) -> Extra:
    """Value name -> its layouts S(d; parts) of a fused or stacked dim, on any number of ranks."""
    fused = fused_dims(graph, lambda call: call_strategies(call, 1))
    found = {
        name: frozenset(S(dim, *parts) for dim, own in dims.items() for parts in own) for name, dims in fused.items()
    }
    for name, layouts in stacked_dims(graph, lambda call: call_strategies(call, 1)).items():
        found[name] = found.get(name, frozenset()) | layouts
    return found

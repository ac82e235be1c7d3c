"""Finds stacked dims: dims that join a whole dim with one that weights make, such as the batch and heads of attention.

`x.view(T, B * H, D)` of x [T, B, H * D] gives a rank H / t heads of each sample: its dim of B * H is sharded part by
part, in B parts of H. The parts follow from the batch, so a plan does not name them: such a value keeps its layout
where it crosses a boundary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.layout import Layout, S
from tpplan.layouts.fused_dims import matrices
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.layouts.rules.views import RESHAPES, regrouped

#: most parts of a stacked dim
MOST_STACKED = 1024


def stacked_dims(
    graph: ModelGraph, strategies: Callable[[Call], Iterable[Strategy]]
) -> Mapping[str, frozenset[Layout]]:
    """Value name -> its layouts S(d; parts) of a stacked dim d, for values between the reshape that stacks dims and the
    ones that take them apart.

    `strategies` gives the strategies of a call without regard to parts.
    """
    return graph.once(stacked_dims, lambda: _Finder(graph, strategies).found())


@dataclass
class _Finder:
    """One walk over a graph. `made`: layouts S(d) that come from a sharded weight; `stacked`: S(d; parts) likewise."""

    graph: ModelGraph
    strategies: Callable[[Call], Iterable[Strategy]]
    made: dict[str, set[Layout]] = field(default_factory=lambda: defaultdict(set))
    stacked: dict[str, set[Layout]] = field(default_factory=lambda: defaultdict(set))

    def found(self) -> dict[str, frozenset[Layout]]:
        """The stacked layouts by value."""
        for name in matrices(self.graph):
            self.made[name] = {S(dim) for dim in range(len(self.graph.values[name].shape))}
        for node in self.graph.nodes:
            if isinstance(node, Boundary):
                self.made[node.result] |= self.made[node.operand]
                self.stacked[node.result] |= self.stacked[node.operand]
            elif any(self.made[name] or self.stacked[name] for name in node.operands):
                self._hand_on(node)
        return {name: frozenset(layouts) for name, layouts in self.stacked.items() if layouts}

    def _hand_on(self, op: Op) -> None:
        call = Call.of(self.graph, op)
        options = tuple(self.strategies(call))
        for name, layout in _results(call, options, self.made):
            self.made[name].add(layout)
        if op.target in RESHAPES:
            for own, other in regrouped(call.operands[0].shape, call.results[0].shape):
                if S(own.dim or 0) not in self.made[op.operands[0]]:
                    continue
                if not other.parts:  # of a fused dim
                    self.made[op.results[0]].add(other)
                elif not own.parts and len(other.parts) <= MOST_STACKED:
                    self.stacked[op.results[0]].add(other)
            return
        for given, operand in {(name, own) for name in op.operands for own in self.stacked[name]}:
            for value, layout in _results(call, options, {given: {S(operand.dim or 0)}}):
                if self.graph.values[value].shape[layout.dim or 0] == sum(operand.parts):
                    self.stacked[value].add(S(layout.dim or 0, *operand.parts))


def _results(
    call: Call, options: Iterable[Strategy], sharded: Mapping[str, set[Layout]]
) -> Iterator[tuple[str, Layout]]:
    """Yields (value, layout) of each sharded result of a strategy that shards an operand as given."""
    for strategy in options:
        pairs = zip(call.operands, strategy.operands, strict=True)
        if any(layout in sharded.get(value.name, ()) for value, layout in pairs):
            for value, layout in zip(call.results, strategy.results, strict=True):
                if layout.dim is not None:
                    yield value.name, layout

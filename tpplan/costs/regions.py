"""Regions that are recomputed: what of them runs again in backward, and what is kept for it.

A region is a module whose forward is run again when its backward begins. It keeps what entered it; selective
recomputation also keeps the results of products and attention. It stops as soon as all that backward needs is there:
what comes after the last op that keeps anything (the last reduce-scatter of a layer, say) does not run again.
"""

from dataclasses import dataclass

from tpplan.costs.compute import Execution, Executor, MemoryBound, whole_strategy
from tpplan.graph import Boundary, Direction, ModelGraph, Op, within
from tpplan.plan import Recompute
from tpplan.rules import Call
from tpplan.space import Decider, Reading, Space


@dataclass(frozen=True, slots=True)
class Regions:
    """Modules that are recomputed, all in one way. None of them is inside another."""

    modules: tuple[str, ...] = ()
    mode: Recompute = Recompute.NONE

    def around(self, decider: Decider) -> str | None:
        """The region that a decision is in. What enters it is outside."""
        if self.mode is Recompute.NONE or self.is_entry(decider):
            return None
        module = decider.op.module if isinstance(decider, Reading) else decider.module
        return next((region for region in self.modules if within(module, region)), None)

    def is_entry(self, decider: Decider) -> bool:
        """True where a tensor enters a region, which keeps it."""
        if self.mode is Recompute.NONE or not isinstance(decider, Boundary):
            return False
        return decider.direction is Direction.INPUT and decider.module in self.modules

    def is_there(self, graph: ModelGraph, decider: Decider, executor: Executor) -> bool:
        """True where what a decision makes is there at the peak: it is kept, or is in the region that is running, which
        is the first of its kind."""
        region = self.around(decider)
        if region is None or region not in {name for block in graph.blocks for name in block.names[1:]}:
            return True
        if self.mode is not Recompute.SELECTIVE or not isinstance(decider, Op):
            return False
        return any(not isinstance(kernel, MemoryBound) for kernel in _execution(graph, decider, executor).forward)

    def run_again(self, space: Space, executor: Executor) -> frozenset[str]:
        """Decisions in regions up to the last op of each that keeps anything for backward."""
        graph = space.graph
        inside = {name: self.around(decider) for name, decider in space.deciders.items()}
        last: dict[str, int] = {}
        for place, (name, region) in enumerate(inside.items()):
            decider = space.deciders[name]
            if region is not None and isinstance(decider, Op):
                execution = _execution(graph, decider, executor)
                if execution.saves or execution.saves_results or execution.saved_bytes:
                    last[region] = place
        return frozenset(
            name
            for place, (name, region) in enumerate(inside.items())
            if region is not None and place <= last.get(region, -1)
        )


NO_REGIONS = Regions()


def _execution(graph: ModelGraph, op: Op, executor: Executor) -> Execution:
    call = Call.of(graph, op)
    return executor.execute(call, whole_strategy(call), 1)

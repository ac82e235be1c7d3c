"""Regions that are recomputed: what of them runs again in backward, and what is kept for it.

A region is a module whose forward is run again when its backward begins. It keeps what entered it; selective
recomputation also keeps the results of products and attention. It stops as soon as all that backward needs is there:
the last op that keeps anything does not run again if it keeps what it was given, nor does what comes after it (the last
reduce-scatter of a layer, say).
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
        """The region that a decision is in. What enters or leaves it is outside."""
        if self.mode is Recompute.NONE or self.is_border(decider):
            return None
        module = decider.op.module if isinstance(decider, Reading) else decider.module
        return next((region for region in self.modules if within(module, region)), None)

    def is_border(self, decider: Decider) -> bool:
        """True where a tensor enters or leaves a region."""
        return self.mode is not Recompute.NONE and isinstance(decider, Boundary) and decider.module in self.modules

    def is_entry(self, decider: Decider) -> bool:
        """True where a tensor enters a region, which keeps it."""
        return self.is_border(decider) and isinstance(decider, Boundary) and decider.direction is Direction.INPUT

    def is_there(self, graph: ModelGraph, decider: Decider, executor: Executor) -> bool:
        """True where what a decision makes is there at the peak: it is kept, or is in the region that is running, which
        is the first of its kind."""
        region = self.around(decider)
        if region is None or region not in {name for block in graph.blocks for name in block.names[1:]}:
            return True
        return self.keeps(graph, decider, executor)

    def keeps(self, graph: ModelGraph, decider: Decider, executor: Executor) -> bool:
        """True for an op in a region whose results are kept, whether backward needs them or not."""
        if self.mode is not Recompute.SELECTIVE or not isinstance(decider, Op) or self.around(decider) is None:
            return False
        return any(not isinstance(kernel, MemoryBound) for kernel in execution_of(graph, decider, executor).forward)

    def run_again(self, space: Space, executor: Executor) -> frozenset[str]:
        """Decisions in regions before the last op of each that keeps anything, and it too if that is a result."""
        graph = space.graph
        inside = {name: self.around(decider) for name, decider in space.deciders.items()}
        last: dict[str, int] = {}
        for place, (name, region) in enumerate(inside.items()):
            decider = space.deciders[name]
            if region is not None and isinstance(decider, Op):
                execution = execution_of(graph, decider, executor)
                if execution.saves or execution.saves_results or execution.saved_bytes:
                    last[region] = place + bool(execution.saves_results or execution.saved_bytes)
        return frozenset(
            name
            for place, (name, region) in enumerate(inside.items())
            if region is not None and place < last.get(region, 0)
        )


NO_REGIONS = Regions()


def execution_of(graph: ModelGraph, op: Op, executor: Executor) -> Execution:
    """What an op does where nothing is sharded."""
    call = Call.of(graph, op)
    return executor.execute(call, whole_strategy(call), 1)

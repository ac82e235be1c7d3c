"""Parameters that several stages read: each stage has them in the same layout, so that gradients can be added."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tpplan.core.graph import ModelGraph
from tpplan.core.layout import Layout
from tpplan.layouts.decision_space import readings_of
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.points.options import Allows


@dataclass(frozen=True, slots=True)
class Resting:
    """The layouts in which stages that are planned have the parameters that others read too. It is solve's option
    `allows` for those others, beside another one."""

    layouts: tuple[tuple[str, Layout], ...] = ()
    other: Callable[[ModelGraph], Allows] | None = None

    def beside(self, other: Callable[[ModelGraph], Allows] | None) -> "Callable[[ModelGraph], Allows] | None":
        """Returns an option `allows` that keeps these layouts and what another such option allows."""
        return replace(self, other=other) if self.layouts else other

    def of(self, stage: StagePlan) -> "Resting":
        """The layouts of the parameters that a stage reads."""
        own = {one.name for one in stage.ties}
        return Resting(tuple((name, layout) for name, layout in self.layouts if name in own))

    def after(self, plan: Plan) -> "Resting":
        """The layouts with those of one more stage's plan."""
        assert plan.stage is not None
        known, planned = dict(self.layouts), plan.parameter_plans()
        for one in plan.stage.ties:
            known.setdefault(one.name, planned[one.name].placement)
        return Resting(tuple(known.items()))

    def __call__(self, graph: ModelGraph) -> Allows:
        """Returns a function that says of a decision of the graph whether it may choose a strategy."""
        readings = readings_of(graph)
        asked = {reading.name: layout for name, layout in self.layouts for reading in readings.get(name, ())}
        allows = self.other(graph) if self.other is not None else None

        def is_allowed(decision: str, strategy: Strategy) -> bool:
            if decision in asked and strategy.operands[0] != asked[decision]:
                return False
            return allows is None or allows(decision, strategy)

        return is_allowed

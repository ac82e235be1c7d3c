"""Says why tensor parallelism leaves an op whole: code, rules, sizes, pins, or prices.

The ILP is solved again with the op divided. Where that has a solution, the plan is faster without, and the price says
by how much; where it has none, tpplan.search.obstacles says what stands against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from tpplan.core.errors import SolverError
from tpplan.core.graph import Op
from tpplan.core.units import format_seconds
from tpplan.costs.prediction.step_time import Priced
from tpplan.layouts.decision_space import Space
from tpplan.layouts.in_words import placed
from tpplan.layouts.rules import OPAQUE, Call, Strategy, call_strategies, has_rule
from tpplan.plan.plan import Plan
from tpplan.plan.tp_shares import BY_PRICES
from tpplan.search.models.trace_cache import Traced
from tpplan.search.obstacles import Obstacles
from tpplan.search.points.point_solver import Candidate, PointSolver
from tpplan.search.tp_shares import OpWork, module_pattern, op_work
from tpplan.solvers.problem import Conflict

#: numbers of ranks on which a rule is tried, to tell a rule that never divides from sizes that do not
OTHER_DEGREES = (2, 3, 5, 7, 11, 13)


def with_reasons(plan: Plan, solver: PointSolver, best: Candidate, traced: Traced, priced: Priced) -> Plan:
    """The plan with the reason of the dearest whole op of each module that its tp_shares list."""
    shares = plan.tp_shares
    if shares is None:
        return plan
    finder = _Reasons(solver=solver, best=best, traced=traced)
    listed = {name for name, _ in shares.listed(plan.predicted.step_time_s)}
    dearest: dict[str, tuple[float, float, Op]] = {}
    for op in traced.graph.ops:
        module = module_pattern(traced.graph, op)
        if module in listed and not (work := finder.chosen_work(op)).is_divided:
            cost = work.flop, priced.op_seconds[op.name], op
            if module not in dearest or cost[:2] > dearest[module][:2]:
                dearest[module] = cost
    modules = dict(shares.modules)
    for module, (_, _, op) in dearest.items():
        modules[module] = replace(modules[module], reason=finder.reason(op))
    return replace(plan, tp_shares=replace(shares, modules=modules))


@dataclass(frozen=True, kw_only=True)
class _Reasons:
    """The reasons why ops are whole in a search's best candidate."""

    solver: PointSolver
    best: Candidate
    traced: Traced

    @property
    def space(self) -> Space:
        """The decisions under all pins and cuts."""
        return self.best.formulation.space

    @cached_property
    def obstacles(self) -> Obstacles:
        """The pins, counterexamples, rules and sizes that may keep an op whole."""
        return Obstacles.of(self.solver, self.traced.micro_batch, self.space.tp)

    def chosen_work(self, op: Op) -> OpWork:
        """The work of an op as the candidate lays it out."""
        choice = self.best.solution.choice
        assert choice is not None
        return self._work(op, self.best.formulation.strategy(choice, op.name))

    def reason(self, op: Op) -> str:
        """Why the op is not divided, in words, with the line of the model's code."""
        if op.target == OPAQUE:
            return f"its code runs whole: {self.traced.opaques.reasons[op.module]}"
        if not has_rule(op.target):
            return f"no rule for {placed(self.space.graph, op)}"
        if (price := self._price(op)) is not None:
            return price
        dividing = self._dividing(self.obstacles.space, op)
        if not dividing:
            return self._own_sizes(op)
        found = self.obstacles.against({self.space.classes[op.name]: dividing}) or "not known"
        return found + (self._one_left if self._leaves_one(op, dividing) else "")

    def _leaves_one(self, op: Op, dividing: Iterable[Strategy]) -> bool:
        """True where a rank would have one head, or one of what else the op is divided by besides the batch."""
        values = [self.space.graph.values[name] for name in (*op.operands, *op.results)]
        return any(
            layout.dim and layout.is_plain and value.shape[layout.dim] == self.space.tp
            for strategy in dividing
            for value, layout in zip(values, (*strategy.operands, *strategy.results), strict=True)
        )

    @property
    def _one_left(self) -> str:
        """Says that a rank would have one head, and that a smaller tp leaves it more."""
        return (
            f"; a rank would have 1 of {self.space.tp}, for which code may take another path: a smaller tp leaves more"
        )

    def _work(self, op: Op, strategy: Strategy) -> OpWork:
        return op_work(Call.of(self.space.graph, op), strategy, self.space.tp, self.solver.traces.reuse.executor)

    def _dividing(self, space: Space, op: Op) -> frozenset[Strategy]:
        """The op's strategies that divide it."""
        return frozenset(s for s in space.strategies[op.name] if self._work(op, s).is_divided)

    def _price(self, op: Op) -> str | None:
        """The least that a step on the plan's mesh takes more where the op is divided, in words; None where no layouts
        divide it."""
        formulation, solved = self.best.formulation, self.best.solution.objective
        assert solved is not None
        dividing, options = self._dividing(self.space, op), self.space.strategies[op.name]
        if not dividing:
            return None
        others = frozenset(i for i, strategy in enumerate(options) if strategy not in dividing)
        divided = Conflict(choices=((self.space.classes[op.name], others),))
        for problem in (formulation.unlimited, formulation.problem):
            forced = replace(problem, conflicts=(*problem.conflicts, divided))
            try:
                found = self.solver.solver_of(forced).objective
            except SolverError:
                return "not known: the time limit ended the search for a plan that divides it"
            if found is None:
                return None if problem is formulation.unlimited else "divided, no plan fits in memory"
            if found > solved:
                return f"{BY_PRICES}: divided, a step takes at least {format_seconds(found - solved)} more"
        return f"{BY_PRICES}, or as fast"

    def _own_sizes(self, op: Op) -> str:
        """Why no strategy of an op with a rule divides it: sizes that do not divide, or the rule itself."""
        call, executor = Call.of(self.space.graph, op), self.solver.traces.reuse.executor
        for tp in OTHER_DEGREES:
            if any(op_work(call, strategy, tp, executor).is_divided for strategy in call_strategies(call, tp)):
                return f"its sizes cannot be cut into {self.space.tp}: {placed(self.space.graph, op)}"
        return f"no layout divides {placed(self.space.graph, op)}"

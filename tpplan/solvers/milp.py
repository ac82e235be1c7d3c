"""Solves a problem as an integer linear program by a given solver of such programs, and checks its answer.

The problem is presolved (tpplan.solvers.presolve), built (tpplan.solvers.build_program) and run. A choice that the
solver gives is priced by the problem itself. Where the first optimum is far below the unit in which it was solved,
choices that cost more are removed and the rest is solved again in a unit that fits.
"""

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tpplan.core.errors import SolverError
from tpplan.solvers.build_program import Model, build
from tpplan.solvers.matrix import Floats, Program
from tpplan.solvers.presolve import Reduced, is_solvable, reduce
from tpplan.solvers.problem import CUTOFF_TOLERANCE, Problem, Solution, Status

#: feasibility tolerance that solvers are set to, in the program's units; HiGHS allows down to 1e-10
SOLVER_TOLERANCE = 1e-9

#: largest relative difference between the solver's objective and the price of its choice
PRICE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A solver's result for a program, in the Model's unit; `values` is the incumbent.

    status None: stopped without an incumbent. BOUNDED: every solution costs at least `bound`. objective and bound are
    without the Model's offset.
    """

    status: Status | None
    objective: float = math.nan
    bound: float = -math.inf
    values: Floats | None = None


class Run(Protocol):
    """Runs a program for at most time_limit_s seconds. Solutions above `cutoff` may be missed. With is_relaxed, the
    linear relaxation is enough; `known` is a cache in which a solver keeps the basis of one relaxation for the next."""

    def __call__(
        self,
        program: Program,
        time_limit_s: float | None,
        *,
        cutoff: float = math.inf,
        is_relaxed: bool = False,
        known: dict[Hashable, object] | None = None,
    ) -> Outcome: ...


def solve(
    problem: Problem,
    *,
    solver: str,
    run: Run,
    time_limit_s: float | None,
    cutoff: float = math.inf,
    is_relaxed: bool = False,
) -> Solution:
    """Presolves, builds, runs and checks. `solver` is the name in the Solution.

    Columns of choices that cost more than the cutoff are dropped, except with is_relaxed, where the solution is to tell
    whether any choice is feasible at any cost.

    Raises SolverError where time_limit_s was too short to find a feasible choice.
    """
    task = _Task(problem=problem, solver=solver, run=run, cutoff=cutoff, is_relaxed=is_relaxed)
    found = _solved(task, time_limit_s)
    if found.bound is None or task.ceiling == math.inf:
        return found
    # A choice with a dropped column costs more than the ceiling.
    bound = min(found.bound, task.ceiling)
    if bound > cutoff:
        return Solution(status=Status.BOUNDED, solver=solver, bound=bound)
    return replace(found, bound=bound)


def _solved(task: "_Task", time_limit_s: float | None) -> Solution:
    """The solution among the choices up to the task's ceiling."""
    started, solver = time.monotonic(), task.solver
    first, unit = task.attempt(time_limit_s, ceiling=task.ceiling)
    if first is None:
        raise SolverError(
            f"{solver}: found no feasible choice in {time_limit_s} s, and no proof that there is none; "
            "allow more time, or try another solver"
        )
    if first.status is not Status.OPTIMAL or first.objective is None or unit <= abs(first.objective):
        return first
    seconds_left = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - started))
    finer, _ = task.attempt(seconds_left, ceiling=first.objective)
    if finer is None or finer.objective is None or finer.bound is None:
        # Out of time, or rounding at the ceiling: only the result in the coarse unit is known.
        return replace(first, status=Status.FEASIBLE, bound=first.objective - unit * SOLVER_TOLERANCE)
    if finer.objective > first.objective:
        return replace(first, status=finer.status, bound=min(finer.bound, first.objective))
    return finer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A problem, the solver that runs it, and the precision that is needed."""

    problem: Problem
    solver: str
    run: Run
    cutoff: float
    is_relaxed: bool

    @property
    def ceiling(self) -> float:
        """The objective above which no choice matters."""
        if self.is_relaxed:
            return math.inf
        return self.cutoff + CUTOFF_TOLERANCE * abs(self.cutoff)

    def attempt(self, time_limit_s: float | None, *, ceiling: float) -> tuple[Solution | None, float]:
        """(solution, unit of the objective) of one run among choices up to `ceiling`; (None, unit) when out of time."""
        solver = self.solver
        reduced = reduce(self.problem, ceiling=ceiling)
        if reduced is None:
            if ceiling < math.inf and is_solvable(self.problem):
                return Solution(status=Status.BOUNDED, solver=solver, bound=ceiling), 0.0
            return Solution(status=Status.INFEASIBLE, solver=solver), 0.0
        if reduced.objective.low > self.cutoff:
            return Solution(status=Status.BOUNDED, solver=solver, bound=reduced.objective.low), 0.0
        model = build(reduced)
        outcome = Outcome(status=Status.OPTIMAL, objective=0.0, values=np.zeros(0))
        if model.program.num_columns:
            known = self.problem.shared.relaxed
            scaled = (self.cutoff - model.offset) / model.unit if model.unit else math.inf
            outcome = self.run(model.program, time_limit_s, cutoff=scaled, is_relaxed=self.is_relaxed, known=known)
        match outcome.status:
            case None:
                return None, model.unit
            case Status.INFEASIBLE if ceiling < math.inf:
                return Solution(status=Status.BOUNDED, solver=solver, bound=ceiling), model.unit
            case Status.INFEASIBLE:
                return Solution(status=Status.INFEASIBLE, solver=solver), model.unit
            case Status.BOUNDED:
                return Solution(status=Status.BOUNDED, solver=solver, bound=model.bound(outcome.bound)), model.unit
            case Status.OPTIMAL | Status.FEASIBLE as status:
                choice, price, bound = self.checked(reduced, model, outcome)
                solution = Solution(status=status, solver=solver, choice=choice, objective=price, bound=bound)
                return solution, model.unit

    def checked(self, reduced: Reduced, model: Model, outcome: Outcome) -> tuple[dict[str, int], float, float]:
        """(choice, objective, bound) of an outcome, priced from scratch.

        Asserts that the choice is feasible and that its price agrees with the solver's objective and bound.
        """
        solver = self.solver
        choice = _chosen(reduced, model, outcome)
        assert self.problem.is_feasible(choice), f"{solver}: its choice breaks an edge or a limit: {choice}"
        price = self.problem.price(choice)
        claimed = model.offset + model.unit * outcome.objective
        slack = PRICE_TOLERANCE * max(abs(price), model.unit)
        assert price <= claimed + slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
        if outcome.status is Status.OPTIMAL:
            assert price >= claimed - slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
            bound = price
        else:
            bound = model.bound(outcome.bound)
        assert bound <= price + slack, f"{solver}: bound {bound!r} above the objective {price!r}"
        return choice, price, min(bound, price)


def _chosen(reduced: Reduced, model: Model, outcome: Outcome) -> dict[str, int]:
    """The choice that an outcome's values stand for."""
    assert outcome.values is not None
    is_free = model.binaries >= 0
    is_chosen = np.ones(len(reduced.columns), bool)
    is_chosen[is_free] = outcome.values[model.binaries[is_free]] > 0.5
    chosen = reduced.columns[is_chosen]
    groups = np.searchsorted(reduced.skeleton.starts, chosen, side="right") - 1
    assert np.array_equal(groups, np.arange(len(reduced.starts))), f"{outcome.values} is not one-hot"
    numbers = {
        part.name: round(outcome.values[model.numbers[i]] * part.total) if i in model.numbers else part.most
        for i, part in enumerate(reduced.parts)
    }
    return reduced.choice(chosen, numbers)

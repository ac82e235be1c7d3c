"""The problem as an integer linear program, in PuLP. One binary x_ns per node n and strategy s that is still alive.

    minimize    sum_n,s c_ns x_ns  +  sum_j w_j t_j
    subject to  (1)  sum_s x_ns = 1                                     for each node n
                (2)  sum_{s: l(s) = l} x_us = sum_{s: l(s) = l} x_vs    for each link (u, v) and label l but the last
                (3)  t_j >= e_ja(x)                                     for each peak j and expression a
                (4)  sum_n,s r_ns x_ns + sum_j w_j t_j <= limit         for each resource

c, r >= 0 are what a strategy adds to its node's cheapest (see `reduction`), t_j >= 0 what a peak adds to its own lower
bound. The last label of (2) follows from (1). Nodes with one strategy left are constants and have no variable.

Units. A solver's tolerances are absolute, seconds and bytes are not: the objective is divided by a cost near its
optimum, each peak by its own size, each resource by its limit. Where the first optimum turns out to be far below the
unit it was solved in, what costs more than that optimum is removed and the rest is solved again in a fitting unit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pulp

from tpplan.errors import SolverError
from tpplan.problem import Problem, Solution, Status
from tpplan.solvers.reduction import LIMIT_TOLERANCE, Alive, Link, Peak, Reduced, Total, reduce

#: asked of the solvers, in the units above; HiGHS allows down to 1e-10
SOLVER_TOLERANCE = 1e-9

#: how far the solver's objective may be from the choice's price, relative
PRICE_TOLERANCE = 1e-6

#: largest over smallest magnitude that objective coefficients and optimum should span
MAX_OBJECTIVE_RANGE = 1e3

#: coefficient by variable
Row = dict[pulp.LpVariable, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a solver says of a Model, in the Model's unit. The variables hold the incumbent.

    status None: stopped without an incumbent. objective and bound do not contain the Model's offset.
    """

    status: Status | None
    objective: float = math.nan
    bound: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The program; objective of the problem = offset + unit * objective of the program."""

    program: pulp.LpProblem
    binaries: Mapping[str, Sequence[pulp.LpVariable]]
    offset: float
    unit: float


#: runs a program for at most so many seconds
Run = Callable[[pulp.LpProblem, float | None], Outcome]


def solve(problem: Problem, *, solver: str, run: Run, time_limit_s: float | None) -> Solution:
    """Reduce, build, run, check. `solver` is the name for the report.

    Raises SolverError when time_limit_s was too short to find any feasible choice.
    """
    started = time.monotonic()
    first, unit = _attempt(problem, solver, run, time_limit_s, ceiling=math.inf)
    if first is None:
        raise SolverError(
            f"{solver}: found no feasible choice in {time_limit_s} s, and no proof that there is none; "
            "allow more time, or try another solver"
        )
    if first.status is not Status.OPTIMAL or first.objective is None or unit <= abs(first.objective):
        return first
    seconds_left = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - started))
    finer, _ = _attempt(problem, solver, run, seconds_left, ceiling=first.objective)
    if finer is None or finer.objective is None or finer.bound is None:
        # Out of time, or rounding at the ceiling: what is known is what the coarse unit could tell.
        return replace(first, status=Status.FEASIBLE, bound=first.objective - unit * SOLVER_TOLERANCE)
    if finer.objective > first.objective:
        return replace(first, status=finer.status, bound=min(finer.bound, first.objective))
    return finer


def _attempt(
    problem: Problem, solver: str, run: Run, time_limit_s: float | None, *, ceiling: float
) -> tuple[Solution | None, float]:
    """(solution, unit of the objective): one run among choices that cost at most `ceiling`; None: out of time."""
    reduced = reduce(problem, ceiling=ceiling)
    if reduced is None:
        return Solution(status=Status.INFEASIBLE, solver=solver), 0.0
    model = build(reduced)
    outcome = run(model.program, time_limit_s) if model.binaries else Outcome(status=Status.OPTIMAL, objective=0.0)
    match outcome.status:
        case None:
            return None, model.unit
        case Status.INFEASIBLE:
            return Solution(status=Status.INFEASIBLE, solver=solver), model.unit
        case Status.OPTIMAL | Status.FEASIBLE as status:
            choice, price, bound = _checked(problem, reduced, model, outcome, solver)
            solution = Solution(status=status, solver=solver, choice=choice, objective=price, bound=bound)
            return solution, model.unit


def _checked(
    problem: Problem, reduced: Reduced, model: Model, outcome: Outcome, solver: str
) -> tuple[dict[str, int], float, float]:
    """(choice, objective, bound), priced from scratch. Asserts that it is feasible and costs what the solver says."""
    choice = {name: _chosen(strategies, model.binaries.get(name)) for name, strategies in reduced.alive.items()}
    assert problem.is_feasible(choice), f"{solver}: its choice breaks an edge or a limit: {choice}"
    price = problem.price(choice)
    claimed = model.offset + model.unit * outcome.objective
    slack = PRICE_TOLERANCE * max(abs(price), model.unit)
    assert price <= claimed + slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
    if outcome.status is Status.OPTIMAL:
        assert price >= claimed - slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
        bound = price
    else:
        bound = max(model.offset, model.offset + model.unit * outcome.bound)
    assert bound <= price + slack, f"{solver}: bound {bound!r} above the objective {price!r}"
    return choice, price, min(bound, price)


def _chosen(strategies: Sequence[int], binaries: Sequence[pulp.LpVariable] | None) -> int:
    """The strategy whose binary is 1."""
    if binaries is None:
        (only,) = strategies
        return only
    chosen = [s for s, binary in zip(strategies, binaries, strict=True) if binary.varValue > 0.5]
    assert len(chosen) == 1, f"{[b.varValue for b in binaries]} is not one-hot"
    return chosen[0]


def build(reduced: Reduced) -> Model:
    """Variables, objective and constraints (1) to (4)."""
    program = pulp.LpProblem("tpplan")
    binaries = {
        name: [program.add_variable(f"x{i:06d}_{s:04d}", 0, 1, pulp.LpInteger) for s in strategies]
        for i, (name, strategies) in enumerate(reduced.alive.items())
        if len(strategies) > 1
    }
    _add_one_hot(program, binaries)
    for i, link in enumerate(reduced.links):
        _add_agreement(program, binaries, reduced.alive, link, name=f"link{i:06d}")
    unit = _objective_unit(reduced.objective)
    objective = _row(program, binaries, reduced.objective, unit, name="objective")
    program.setObjective(pulp.LpAffineExpression(objective))
    for i, resource in enumerate(reduced.resources):
        _add_limit(program, binaries, resource, name=f"resource{i:02d}")
    return Model(program=program, binaries=binaries, offset=reduced.objective.low, unit=unit)


def _add_one_hot(program: pulp.LpProblem, binaries: Mapping[str, Sequence[pulp.LpVariable]]) -> None:
    """(1): each node has exactly one strategy."""
    for i, columns in enumerate(binaries.values()):
        _add(program, dict.fromkeys(columns, 1.0), pulp.LpConstraintEQ, 1.0, name=f"one_hot{i:06d}")


def _add_agreement(
    program: pulp.LpProblem,
    binaries: Mapping[str, Sequence[pulp.LpVariable]],
    alive: Alive,
    link: Link,
    *,
    name: str,
) -> None:
    """(2): a label is chosen on one side when it is chosen on the other. Fixed nodes have left one label: no row."""
    if link.source == link.target or link.source not in binaries or link.target not in binaries:
        return
    rows: dict[tuple[str, ...], Row] = {}
    for strategy, column in zip(alive[link.source], binaries[link.source], strict=True):
        rows.setdefault(link.source_labels[strategy], {})[column] = 1.0
    for strategy, column in zip(alive[link.target], binaries[link.target], strict=True):
        rows[link.target_labels[strategy]][column] = -1.0
    for i, row in enumerate(list(rows.values())[:-1]):
        _add(program, row, pulp.LpConstraintEQ, 0.0, name=f"{name}_{i:04d}")


def _add_peak(
    program: pulp.LpProblem, binaries: Mapping[str, Sequence[pulp.LpVariable]], peak: Peak, *, name: str
) -> tuple[pulp.LpVariable, float]:
    """(3): a variable t that is at least each expression, above the peak's lower bound. (t, its unit)."""
    unit = peak.high - peak.low
    variable = program.add_variable(name, 0, 1)
    for i, expression in enumerate(peak.expressions):
        if expression.high <= peak.low:
            continue  # t >= 0 says it
        row: Row = {variable: -1.0}
        for node, vector in expression.extras.items():
            row.update((x, extra / unit) for x, extra in zip(binaries[node], vector, strict=True) if extra)
        _add(program, row, pulp.LpConstraintLE, (peak.low - expression.low) / unit, name=f"{name}_{i:04d}")
    return variable, unit


def _add_limit(
    program: pulp.LpProblem, binaries: Mapping[str, Sequence[pulp.LpVariable]], resource: Total, *, name: str
) -> None:
    """(4): the resource is within its limit."""
    unit = abs(resource.limit) or resource.high - resource.low
    row = _row(program, binaries, resource, unit, name=name)
    right = (resource.limit + LIMIT_TOLERANCE * abs(resource.limit) - resource.low) / unit
    _add(program, row, pulp.LpConstraintLE, right, name=name)


def _row(
    program: pulp.LpProblem,
    binaries: Mapping[str, Sequence[pulp.LpVariable]],
    total: Total,
    unit: float,
    *,
    name: str,
) -> Row:
    """Coefficients of (total - its lower bound) / unit, with a variable (3) for each peak."""
    row: Row = {}
    for node, vector in total.linear.extras.items():
        row.update((x, extra / unit) for x, extra in zip(binaries[node], vector, strict=True) if extra)
    for i, peak in enumerate(total.peaks):
        variable, peak_unit = _add_peak(program, binaries, peak, name=f"{name}_peak{i:05d}")
        row[variable] = peak.weight * peak_unit / unit
    return row


def _objective_unit(objective: Total) -> float:
    """What the objective is divided by: its lower bound, if coefficients then stay within MAX_OBJECTIVE_RANGE."""
    sizes = [max(vector) for vector in objective.linear.extras.values()]
    sizes += [peak.weight * (peak.high - peak.low) for peak in objective.peaks]
    largest = max(sizes, default=0.0)
    if largest == 0:
        return abs(objective.low)  # nothing is divided, all choices cost the same
    return min(largest, max(objective.low, largest / MAX_OBJECTIVE_RANGE))


def _add(program: pulp.LpProblem, row: Row, sense: int, right: float, *, name: str) -> None:
    """One constraint, without PuLP's operators, each of which would copy the row."""
    program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(row), sense, rhs=right), name)

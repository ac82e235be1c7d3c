"""CBC, run as a process by PuLP: the executable that PuLP ships, or else the one on PATH."""

import math
import shutil
from collections.abc import Hashable

import numpy as np
import pulp

from tpplan.core.errors import SolverError
from tpplan.solvers import milp
from tpplan.solvers.matrix import Program
from tpplan.solvers.problem import Problem, Solution, Status

#: fixed seeds and absolute tolerances; `increment` is the least improvement of a new incumbent
OPTIONS = (
    "randomSeed 1",
    "randomCbcSeed 1",
    f"primalTolerance {milp.SOLVER_TOLERANCE}",
    f"dualTolerance {milp.SOLVER_TOLERANCE}",
    f"increment {milp.SOLVER_TOLERANCE}",
)


def solve(
    problem: Problem, *, time_limit_s: float | None = None, cutoff: float = math.inf, is_relaxed: bool = False
) -> Solution:
    """Solves the ILP by CBC; see `milp.solve`. Raises SolverError where there is no executable.

    A run that is stopped early may take the time limit a second time, for the relaxation.
    """
    return milp.solve(problem, solver="cbc", run=_run, time_limit_s=time_limit_s, cutoff=cutoff, is_relaxed=is_relaxed)


def _run(
    program: Program,
    time_limit_s: float | None,
    *,
    cutoff: float = math.inf,
    is_relaxed: bool = False,
    known: dict[Hashable, object] | None = None,
) -> milp.Outcome:
    """Runs CBC on the integer program, ignoring cutoff, is_relaxed and known.

    CBC does not report its bound; where it is stopped early, the bound is the optimum of the linear relaxation.
    """
    model = _model(program)
    _call(model, integer=True, time_limit_s=time_limit_s)
    if model.status == pulp.LpStatusInfeasible:
        # CBC 2.10 also reports "integer infeasible" when time runs out in preprocessing, which proves nothing.
        # PuLP's time includes writing the file, so it is never below CBC's own.
        out_of_time = time_limit_s is not None and model.solutionTime >= time_limit_s
        return milp.Outcome(status=None if out_of_time else Status.INFEASIBLE)
    # PuLP's status is Optimal for an incumbent at a timeout, too: only sol_status tells them apart.
    match model.sol_status:
        case pulp.LpSolutionOptimal:
            status = Status.OPTIMAL
        case pulp.LpSolutionIntegerFeasible:
            status = Status.FEASIBLE
        case _:
            return milp.Outcome(status=None)
    found = {variable.name: variable.varValue for variable in model.variables()}
    values = np.array([found.get(_name(i)) or 0.0 for i in range(program.num_columns)])
    objective = float(program.cost @ values)
    bound = objective if status is Status.OPTIMAL else _relaxed_optimum(model, time_limit_s)
    return milp.Outcome(status=status, objective=objective, bound=bound, values=values)


def _name(column: int) -> str:
    return f"x{column:07d}"


def _model(program: Program) -> pulp.LpProblem:
    """The program as PuLP objects; variables without a cost or a row are left out."""
    model = pulp.LpProblem("tpplan")
    variables = [
        model.add_variable(_name(i), lower, upper, pulp.LpInteger if is_integer else pulp.LpContinuous)
        for i, (lower, upper, is_integer) in enumerate(
            zip(program.lower.tolist(), program.upper.tolist(), program.is_integer.tolist(), strict=True)
        )
    ]
    costs = {variable: cost for variable, cost in zip(variables, program.cost.tolist(), strict=True) if cost}
    model.setObjective(pulp.LpAffineExpression(costs))
    starts, indices, values = program.starts.tolist(), program.indices.tolist(), program.values.tolist()
    for i, (lower, upper) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        own = range(starts[i], starts[i + 1])
        row = {variables[indices[place]]: values[place] for place in own}
        sides = [(pulp.LpConstraintEQ, lower)] if lower == upper else []
        if not sides:
            sides += [(pulp.LpConstraintGE, lower)] if lower > -math.inf else []
            sides += [(pulp.LpConstraintLE, upper)] if upper < math.inf else []
        for sense, right in sides:
            # Built directly: each of PuLP's operators would copy the row.
            constraint = pulp.LpConstraint(pulp.LpAffineExpression(row), sense, rhs=right)
            model.addConstraint(constraint, f"row{i:07d}_{sense + 1}")
    return model


def _relaxed_optimum(model: pulp.LpProblem, time_limit_s: float | None) -> float:
    """The optimum of the linear relaxation; -inf where it exceeds the time limit."""
    _call(model, integer=False, time_limit_s=time_limit_s)
    is_optimal = model.sol_status == pulp.LpSolutionOptimal
    return model.objective.valueOrDefault() - milp.SOLVER_TOLERANCE if is_optimal else float("-inf")


def _call(model: pulp.LpProblem, *, integer: bool, time_limit_s: float | None) -> None:
    """Runs the executable; status and values are left in the model."""
    solver = pulp.COIN_CMD(
        path=_executable(),
        mip=integer,
        msg=False,
        timeLimit=time_limit_s,
        gapRel=0.0,
        gapAbs=0.0,
        options=list(OPTIONS),
    )
    try:
        model.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"cbc: {error}; try solver 'highs'") from error


def _executable() -> str:
    """Path of CBC. PULP_CBC_CMD knows the bundled one; calling it would warn that it is deprecated."""
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", "cbc")
    executable = shutil.which(bundled) or shutil.which("cbc")
    if executable is None:
        raise SolverError("cbc: no executable, neither PuLP's nor on PATH: pip install highspy, and use solver 'highs'")
    return executable

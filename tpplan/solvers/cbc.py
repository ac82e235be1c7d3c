"""CBC, as a process, by the executable that PuLP brings along or else the one on PATH."""

import shutil

import pulp

from tpplan.errors import SolverError
from tpplan.problem import Problem, Solution, Status
from tpplan.solvers import milp

#: a fixed seed, and CBC's absolute tolerances. `increment` is by how much a better solution must be better.
OPTIONS = (
    "randomSeed 1",
    "randomCbcSeed 1",
    f"primalTolerance {milp.SOLVER_TOLERANCE}",
    f"dualTolerance {milp.SOLVER_TOLERANCE}",
    f"increment {milp.SOLVER_TOLERANCE}",
)


def solve(problem: Problem, *, time_limit_s: float | None = None) -> Solution:
    """The ILP by CBC; see `milp.solve`. Raises SolverError when there is no executable.

    A run that is stopped early may take the time limit once more, for the relaxation.
    """
    return milp.solve(problem, solver="cbc", run=_run, time_limit_s=time_limit_s)


def _run(program: pulp.LpProblem, time_limit_s: float | None) -> milp.Outcome:
    """Run CBC. It does not report its bound: stopped early, the bound is the linear relaxation's optimum."""
    _call(program, integer=True, time_limit_s=time_limit_s)
    if program.status == pulp.LpStatusInfeasible:
        # CBC 2.10 says "integer infeasible" when its clock runs out in preprocessing: then it proves nothing.
        # PuLP's measure includes writing the file, so it never lies below CBC's own.
        out_of_time = time_limit_s is not None and program.solutionTime >= time_limit_s
        return milp.Outcome(status=None if out_of_time else Status.INFEASIBLE)
    # PuLP's status is Optimal for a timed-out incumbent too: only sol_status tells.
    match program.sol_status:
        case pulp.LpSolutionOptimal:
            status = Status.OPTIMAL
        case pulp.LpSolutionIntegerFeasible:
            status = Status.FEASIBLE
        case _:
            return milp.Outcome(status=None)
    values = {variable.name: variable.varValue for variable in program.variables()}
    objective = program.objective.valueOrDefault()  # "default": PuLP leaves a dummy without a value in an empty one
    bound = objective if status is Status.OPTIMAL else _relaxed_optimum(program, time_limit_s)
    program.assignVarsVals(values)
    return milp.Outcome(status=status, objective=objective, bound=bound)


def _relaxed_optimum(program: pulp.LpProblem, time_limit_s: float | None) -> float:
    """The optimum of the linear relaxation, -inf when it takes longer than the time limit too."""
    _call(program, integer=False, time_limit_s=time_limit_s)
    is_optimal = program.sol_status == pulp.LpSolutionOptimal
    return program.objective.valueOrDefault() - milp.SOLVER_TOLERANCE if is_optimal else float("-inf")


def _call(program: pulp.LpProblem, *, integer: bool, time_limit_s: float | None) -> None:
    """Run the executable; status and values are left in the program."""
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
        program.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"cbc: {error}; try solver 'highs'") from error


def _executable() -> str:
    """Path of CBC. PULP_CBC_CMD knows where the bundled one lies; calling it would warn that it is deprecated."""
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", "cbc")
    executable = shutil.which(bundled) or shutil.which("cbc")
    if executable is None:
        raise SolverError("cbc: no executable, neither PuLP's nor on PATH: pip install highspy, and use solver 'highs'")
    return executable

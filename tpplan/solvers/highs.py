"""HiGHS, in process, through pulp.HiGHS and highspy.

Its status and bound are read from HiGHS itself. PuLP's translation calls a timed-out incumbent optimal, leaves out the
bound, and has no entry for some statuses.
"""

import time

import highspy
import numpy as np
import pulp

from tpplan.errors import SolverError
from tpplan.problem import Problem, Solution, Status
from tpplan.solvers import milp

#: HiGHS drops matrix entries below this; its default, 1e-9, would drop nanoseconds next to seconds
SMALLEST_ENTRY = 1e-12


def solve(problem: Problem, *, time_limit_s: float | None = None) -> Solution:
    """The ILP by HiGHS; see `milp.solve`."""
    return milp.solve(problem, solver="highs", run=_run, time_limit_s=time_limit_s)


def _run(program: pulp.LpProblem, time_limit_s: float | None) -> milp.Outcome:
    """Run the linear relaxation, which is often integral, and the integer program only where it is not."""
    started = time.monotonic()
    highs = _loaded(program, time_limit_s)
    _execute(highs)
    match highs.getModelStatus():
        case highspy.HighsModelStatus.kInfeasible:
            return milp.Outcome(status=Status.INFEASIBLE)
        case highspy.HighsModelStatus.kTimeLimit:
            return milp.Outcome(status=None)
    integers = [variable.index for variable in program.variables() if variable.cat == pulp.LpInteger]
    relaxed = highs.getInfo().objective_function_value
    if highs.getModelStatus() == highspy.HighsModelStatus.kOptimal and _is_integral(highs, integers):
        return _incumbent(program, highs, Status.OPTIMAL, bound=relaxed)
    _mark_integers(highs, integers)
    if time_limit_s is not None:
        highs.setOptionValue("time_limit", max(0.0, time_limit_s - (time.monotonic() - started)))
    _execute(highs)
    return _outcome(program, highs)


def _loaded(program: pulp.LpProblem, time_limit_s: float | None) -> highspy.Highs:
    """HiGHS with options and the program, without its integrality."""
    solver = pulp.HiGHS(
        mip=False,
        msg=False,
        gapRel=0.0,
        gapAbs=0.0,
        threads=1,
        timeLimit=time_limit_s,
        parallel="off",
        random_seed=0,
        primal_feasibility_tolerance=milp.SOLVER_TOLERANCE,
        dual_feasibility_tolerance=milp.SOLVER_TOLERANCE,
        mip_feasibility_tolerance=milp.SOLVER_TOLERANCE,
        small_matrix_value=SMALLEST_ENTRY,
    )
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    highs: highspy.Highs = program.solverModel
    return highs


def _execute(highs: highspy.Highs) -> None:
    """Run what is loaded. Threads are shared by the process: another user may have started another number of them."""
    if highs.run() == highspy.HighsStatus.kError:
        highspy.Highs.resetGlobalScheduler(True)
        highs.run()


def _is_integral(highs: highspy.Highs, integers: list[int]) -> bool:
    """True when these columns are whole numbers."""
    values = np.array(highs.getSolution().col_value)[integers]
    return bool(np.all(np.abs(values - np.round(values)) <= milp.SOLVER_TOLERANCE))


def _mark_integers(highs: highspy.Highs, integers: list[int]) -> None:
    """All at once: PuLP marks one by one, each of which costs HiGHS the number of columns (1 s for 20,000)."""
    kinds = np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
    highs.changeColsIntegrality(len(integers), np.array(integers, dtype=np.int32), kinds)


def _outcome(program: pulp.LpProblem, highs: highspy.Highs) -> milp.Outcome:
    """HiGHS's verdict on the integer program. Raises SolverError for a status of failure."""
    status = highs.getModelStatus()
    info = highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return milp.Outcome(status=Status.INFEASIBLE)
    has_incumbent = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == highspy.HighsModelStatus.kTimeLimit and not has_incumbent:
        return milp.Outcome(status=None)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit) or not has_incumbent:
        raise SolverError(f"highs: stopped with status {highs.modelStatusToString(status)!r}; try solver 'cbc'")
    proven = Status.OPTIMAL if status == highspy.HighsModelStatus.kOptimal else Status.FEASIBLE
    return _incumbent(program, highs, proven, bound=info.mip_dual_bound)


def _incumbent(program: pulp.LpProblem, highs: highspy.Highs, status: Status, *, bound: float) -> milp.Outcome:
    """The values at hand go into the variables; their objective and the bound into the outcome."""
    values = highs.getSolution().col_value
    for variable in program.variables():
        variable.varValue = values[variable.index]
    return milp.Outcome(status=status, objective=highs.getInfo().objective_function_value, bound=bound)

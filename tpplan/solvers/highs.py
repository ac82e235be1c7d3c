"""HiGHS, in process, through pulp.HiGHS and highspy."""

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
    """Run HiGHS and read its own status and bound.

    PuLP's translation is not used: it calls a timed-out incumbent optimal and has no entry for some statuses.
    """
    solver = pulp.HiGHS(
        mip=False,  # _mark_integers does that
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
    highs = program.solverModel
    _mark_integers(program, highs)
    if highs.run() == highspy.HighsStatus.kError:
        # Threads are shared by the process: someone else's run has started another number of them.
        highspy.Highs.resetGlobalScheduler(True)
        highs.run()
    return _outcome(program, highs)


def _mark_integers(program: pulp.LpProblem, highs: highspy.Highs) -> None:
    """All at once: PuLP marks one by one, each of which costs HiGHS the number of columns (1 s for 20,000)."""
    integers = [variable.index for variable in program.variables() if variable.cat == pulp.LpInteger]
    kinds = np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
    highs.changeColsIntegrality(len(integers), np.array(integers, dtype=np.int32), kinds)


def _outcome(program: pulp.LpProblem, highs: highspy.Highs) -> milp.Outcome:
    """HiGHS's verdict; the variables get the incumbent's values. Raises SolverError for a status of failure."""
    status = highs.getModelStatus()
    info = highs.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return milp.Outcome(status=Status.INFEASIBLE)
    has_incumbent = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == highspy.HighsModelStatus.kTimeLimit and not has_incumbent:
        return milp.Outcome(status=None)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit) or not has_incumbent:
        raise SolverError(f"highs: stopped with status {highs.modelStatusToString(status)!r}; try solver 'cbc'")
    values = highs.getSolution().col_value
    for variable in program.variables():
        variable.varValue = values[variable.index]
    return milp.Outcome(
        status=Status.OPTIMAL if status == highspy.HighsModelStatus.kOptimal else Status.FEASIBLE,
        objective=info.objective_function_value,
        bound=info.mip_dual_bound,
    )

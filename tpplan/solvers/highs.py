"""HiGHS, run in process through highspy; status and bound are HiGHS's own."""

import math
import time
from collections.abc import Hashable

import highspy
import numpy as np

from tpplan.core.errors import SolverError
from tpplan.solvers import milp
from tpplan.solvers.branching import Branching, Incumbent, execute
from tpplan.solvers.build_program import BOUND_MARGIN
from tpplan.solvers.matrix import Program
from tpplan.solvers.problem import Problem, Solution, Status

#: HiGHS drops matrix entries below this; its default of 1e-9 would drop nanoseconds next to seconds
SMALLEST_ENTRY = 1e-12

#: excess over a cutoff, in the program's unit, that counts as rounding
CUTOFF_MARGIN = 1e-7
#: of a time limit, what a search by relaxations may take before HiGHS's own, which gives a bound at any time
_SHARE_OF_TIME = 0.5


def solve(
    problem: Problem, *, time_limit_s: float | None = None, cutoff: float = math.inf, is_relaxed: bool = False
) -> Solution:
    """Solves the ILP by HiGHS; see `milp.solve`."""
    return milp.solve(
        problem, solver="highs", run=_run, time_limit_s=time_limit_s, cutoff=cutoff, is_relaxed=is_relaxed
    )


def _run(
    program: Program,
    time_limit_s: float | None,
    *,
    cutoff: float = math.inf,
    is_relaxed: bool = False,
    known: dict[Hashable, object] | None = None,
) -> milp.Outcome:
    """Solves the linear relaxation, which is often integral, and branches only where it is not."""
    started = time.monotonic()
    highs = _loaded(program, time_limit_s)
    if is_relaxed:
        _relax(highs, program, {} if known is None else known, cutoff)
    else:
        execute(highs)
    status, relaxed = highs.getModelStatus(), highs.getInfo().objective_function_value
    if status == highspy.HighsModelStatus.kInfeasible:
        return milp.Outcome(status=Status.INFEASIBLE)
    if status == highspy.HighsModelStatus.kTimeLimit:
        return milp.Outcome(status=Status.BOUNDED if is_relaxed else None)
    if status == highspy.HighsModelStatus.kOptimal:
        if _is_integral(highs, program):
            return _incumbent(highs, Status.OPTIMAL, bound=relaxed)
        if is_relaxed or relaxed > cutoff + CUTOFF_MARGIN:
            return milp.Outcome(status=Status.BOUNDED, bound=relaxed)
    elif status == highspy.HighsModelStatus.kObjectiveBound:
        return milp.Outcome(status=Status.BOUNDED, bound=_search_bound(cutoff))
    elif is_relaxed:
        return milp.Outcome(status=Status.BOUNDED)
    known_best = Incumbent(_search_bound(cutoff) + milp.SOLVER_TOLERANCE)
    deadline = math.inf if time_limit_s is None else started + _SHARE_OF_TIME * time_limit_s
    branching = Branching(highs=highs, program=program, known=known_best, deadline=deadline)
    if branching.search():
        return _best(known_best, cutoff)
    _whole(highs, program, known_best, cutoff)
    if time_limit_s is not None:
        highs.setOptionValue("time_limit", max(0.0, time_limit_s - (time.monotonic() - started)))
    execute(highs)
    found = _outcome(highs, cutoff)
    if found.status is None and known_best.values is not None:
        bound = relaxed if status == highspy.HighsModelStatus.kOptimal else -math.inf
        return milp.Outcome(
            status=Status.FEASIBLE, objective=known_best.objective, bound=bound, values=known_best.values
        )
    return found


def _best(known: Incumbent, cutoff: float) -> milp.Outcome:
    """The outcome of a search that has ended; solutions above the cutoff were left out."""
    objective = known.objective
    if known.values is None or objective > cutoff + CUTOFF_MARGIN:
        if math.isinf(cutoff):
            return milp.Outcome(status=Status.INFEASIBLE)
        return milp.Outcome(status=Status.BOUNDED, bound=min(_search_bound(cutoff), objective))
    return milp.Outcome(status=Status.OPTIMAL, objective=objective, bound=objective, values=known.values)


def _whole(highs: highspy.Highs, program: Program, known: Incumbent, cutoff: float) -> None:
    """Gives HiGHS the integer program of the relaxations that it had, and the best solution that is known."""
    # From the relaxation's basis, 1.16 may report a wrong objective.
    highs.clearSolver()
    columns = np.arange(program.num_columns, dtype=np.int32)
    highs.changeColsBounds(len(columns), columns, program.lower, program.upper)
    highs.setOptionValue("objective_bound", _search_bound(cutoff))
    # It finds any solution, which is of use only where no cutoff is known.
    highs.setOptionValue("mip_heuristic_run_feasibility_jump", math.isinf(cutoff))
    integers = np.flatnonzero(program.is_integer).astype(np.int32)
    kinds = np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
    highs.changeColsIntegrality(len(integers), integers, kinds)
    if known.values is not None:
        start = highspy.HighsSolution()
        start.col_value = known.values.tolist()
        highs.setSolution(start)


class _Silent(highspy.Highs):
    """HiGHS that prints nothing: from 1.16 on it prints its version while callbacks are set, in its constructor."""

    def enableCallbacks(self) -> None:  # noqa: N802
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _loaded(program: Program, time_limit_s: float | None) -> highspy.Highs:
    """HiGHS with its options and the linear relaxation of the program. HiGHS's own presolve is off: after
    tpplan.solvers.presolve it takes as long as the search and finds little."""
    highs = _Silent()  # type: ignore[no-untyped-call]
    for name, value in (
        ("output_flag", False),
        ("presolve", "off"),
        ("threads", 1),
        ("parallel", "off"),
        ("random_seed", 0),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.0),
        ("primal_feasibility_tolerance", milp.SOLVER_TOLERANCE),
        ("dual_feasibility_tolerance", milp.SOLVER_TOLERANCE),
        ("mip_feasibility_tolerance", milp.SOLVER_TOLERANCE),
        ("small_matrix_value", SMALLEST_ENTRY),
        ("time_limit", math.inf if time_limit_s is None else time_limit_s),
    ):
        highs.setOptionValue(name, value)
    columns, rows, by_row = program.num_columns, program.num_rows, int(highspy.MatrixFormat.kRowwise)
    status = highs.passModel(
        *(columns, rows, len(program.values), by_row, int(highspy.ObjSense.kMinimize), 0.0),
        *(program.cost, program.lower, program.upper, program.row_lower, program.row_upper),
        *(program.starts[:-1].astype(np.int32), program.indices.astype(np.int32), program.values),
        np.zeros(columns, np.int32),
    )
    if status == highspy.HighsStatus.kError:
        raise SolverError("highs: HiGHS rejects the integer program; try solver 'cbc'")
    return highs


def _relax(highs: highspy.Highs, program: Program, known: dict[Hashable, object], cutoff: float) -> None:
    """Solves the linear relaxation from the last optimal basis of a program with as many columns and rows: for the same
    decisions at other prices (another mesh) that basis is optimal, or nearly so."""
    shape = program.num_columns, program.num_rows
    highs.setOptionValue("objective_bound", _search_bound(cutoff))
    basis = known.get(shape)
    if isinstance(basis, highspy.HighsBasis):
        highs.setBasis(basis)
    execute(highs)
    if highs.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        known[shape] = highs.getBasis()


def _is_integral(highs: highspy.Highs, program: Program) -> bool:
    """True where all integer columns have whole numbers, up to the tolerance."""
    values = np.array(highs.getSolution().col_value)[program.is_integer]
    return bool(np.all(np.abs(values - np.round(values)) <= milp.SOLVER_TOLERANCE))


def _search_bound(cutoff: float) -> float:
    """The objective above which HiGHS need not search: above the cutoff by more than the margin of a bound."""
    return cutoff + 2 * BOUND_MARGIN


def _outcome(highs: highspy.Highs, cutoff: float) -> milp.Outcome:
    """The outcome of the integer program, whose solutions above the cutoff HiGHS may leave out. Raises SolverError for
    a failure of HiGHS."""
    status = highs.getModelStatus()
    info = highs.getInfo()
    # Where no solution is left, HiGHS says infeasible, or names the best of those that it met before.
    if math.isfinite(cutoff):
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
            return milp.Outcome(status=Status.BOUNDED, bound=_search_bound(cutoff))
        best = info.objective_function_value
        if status == highspy.HighsModelStatus.kOptimal and best > cutoff + CUTOFF_MARGIN:
            return milp.Outcome(status=Status.BOUNDED, bound=min(_search_bound(cutoff), best))
    if status == highspy.HighsModelStatus.kInfeasible:
        return milp.Outcome(status=Status.INFEASIBLE)
    has_incumbent = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == highspy.HighsModelStatus.kTimeLimit and not has_incumbent:
        return milp.Outcome(status=None)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit) or not has_incumbent:
        raise SolverError(f"highs: stopped with status {highs.modelStatusToString(status)!r}; try solver 'cbc'")
    proven = Status.OPTIMAL if status == highspy.HighsModelStatus.kOptimal else Status.FEASIBLE
    return _incumbent(highs, proven, bound=info.mip_dual_bound)


def _incumbent(highs: highspy.Highs, status: Status, *, bound: float) -> milp.Outcome:
    """The outcome with HiGHS's values, their objective and a bound."""
    values = np.array(highs.getSolution().col_value)
    return milp.Outcome(status=status, objective=highs.getInfo().objective_function_value, bound=bound, values=values)

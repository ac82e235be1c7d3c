"""What a plan's certificate says of points that were not solved."""

from typing import Any

from tpplan.core.errors import SolverError
from tpplan.layouts.build_space import NoLayoutError
from tpplan.search.best_first import Progress
from tpplan.search.branch_and_bound import BOUNDED, NO_LAYOUT, TOO_LARGE, TOO_WIDE, UNDECIDED, _certificate
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.point_solver import Candidate
from tpplan.solvers.problem import Solution, Status

UNUSED: Any = None


def test_every_point_is_counted_once_under_one_reason() -> None:
    points = [Point(4, tp, 4 // tp, micro_batch) for micro_batch in (1, 2) for tp in (1, 2, 4)]
    solved, slower, late, first, large, wide = points
    solution = Solution(status=Status.OPTIMAL, solver="none", choice={}, objective=2.0, bound=2.0)
    best = Candidate(point=solved, formulation=UNUSED, solution=solution)
    known = Progress(
        solved={solved: best},
        bounds={slower: 3.0, late: 1.5, wide: 1.0},
        without={first.space: NoLayoutError("an op", 1)},
        too_large={first, large},  # a mesh of `first` was too large before its layouts were looked at
        too_wide={wide},
        undecided={late: SolverError("out of time")},
    )
    report = _certificate(best, known, points, ())
    assert report.meshes_tried == 1
    assert report.skipped == {BOUNDED: 1, UNDECIDED: 1, NO_LAYOUT: 1, TOO_LARGE: 1, TOO_WIDE: 1}
    assert report.bound_s == 1.5
    assert report.status is Status.FEASIBLE
    known.bounds[late] = 2.5  # it may be undecided: the best plan is faster
    report = _certificate(best, known, points, ())
    assert report.skipped[BOUNDED] == 2
    assert (report.status, report.gap) == (Status.OPTIMAL, 0.0)

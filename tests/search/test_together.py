"""Points that one relaxation bounds together, against the optimum of each."""

from functools import cache

import pytest
from examples import example

from tpplan.machine.profile import load_profile
from tpplan.search.best_first import Progress, explore
from tpplan.search.planner import prepare
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.point_solver import FEWEST_TOGETHER, Candidate, PointSolver, Solvers
from tpplan.search.points.request import Request
from tpplan.solvers.problem import total


@cache
def tight() -> tuple[PointSolver, list[Point]]:
    """Points of one space, of which each has less memory than its fastest plan needs."""
    module = example("llama")
    cluster = Cluster(gpus=64, gpus_per_node=8, profile=load_profile("h100-sxm"))
    options = Options(loss=module.loss, unused_outputs=tuple(getattr(module, "unused_outputs", ())))
    request = Request.of(module.build_model, module.example_inputs, cluster, Batch(64, 1, 512), options, None)
    solver, points, _ = prepare(request, options)
    own = [point for point in points if point.tp == 2 and point.num_gpus == 64]
    for point in own:
        fastest = solver.light(point)
        assert isinstance(fastest, Candidate)
        assert fastest.solution.choice is not None
        row, *_ = solver.formulate(point).peaks.rows()
        light = fastest.formulation.limited_at_the_loss.resources[0]
        needed = total(light.terms, fastest.solution.choice) - request.profile.slack_bytes
        solver.lower_limit(point, row.limit - request.profile.slack_bytes - 0.7 * needed)
    return solver, own


@cache
def optima() -> dict[Point, float]:
    solver, points = tight()
    found = {point: solver.full(point) for point in points}
    return {point: own.solution.objective or 0.0 for point, own in found.items() if isinstance(own, Candidate)}


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_points_that_are_bounded_together_are_each_slower(share: float) -> None:
    solver, points = tight()
    cutoff = share * min(optima().values())
    bounds = solver.relaxed_together(points, cutoff=cutoff)
    assert all(cutoff < bounds[point] <= optima()[point] for point in bounds)
    assert bool(bounds) is (share < 0.9)
    assert not bounds or len(bounds) >= FEWEST_TOGETHER


def test_points_that_do_not_fit_are_left_to_be_looked_at_alone() -> None:
    solver, points = tight()
    alone = solver.changed(solver.request)
    for point in points:
        alone.lower_limit(point, solver.request.limit)
    assert alone.relaxed_together(points, cutoff=0.0) == {}


def test_the_point_of_a_refuted_plan_is_looked_at_first_and_bounds_what_is_left() -> None:
    solver, points = tight()
    solvers, known = Solvers({1: solver}), Progress()
    best = explore(solvers, points, known)
    refuted = {point: own.solution.objective for point, own in known.solved.items() if own.solution.objective}
    left = Progress(bounds=dict(known.bounds), stages=dict(known.stages), refuted=refuted)
    again = explore(solvers, points, left)
    assert (again.point, again.solution.objective) == (best.point, best.solution.objective)
    assert next(iter(left.solved)) == best.point
    assert all(left.bounds[point] >= bound for point, bound in refuted.items())
    assert not left.refuted

"""The cuts that balance the ranks of a pipeline, against all cuts."""

import random
from itertools import combinations, pairwise

import pytest
from stage_models import LENGTH, Stack, loss, text

import tpplan
from profiles import synthetic_profile
from tpplan.core.errors import SolverError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Precision
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.pipelines.stage_loads import Loads, least_step_s
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.options import Batch, Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.solvers.problem import Problem, Solution

MACHINE = HardwareProfile.from_dict(synthetic_profile(), origin="synthetic")
PIPELINE = PipelineShape(parts=2)


def every(parts: int, stages: int) -> list[Sizes]:
    """All numbers of parts in stages, none of them 0."""
    cuts = combinations(range(1, parts), stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *own, parts))) for own in cuts]


def fullest(loads: Loads, sizes: Sizes, shape: PipelineShape) -> float:
    """What the rank with the most to do does, layer by layer."""
    ranks, layer = [0.0] * shape.parts, 0
    for stage, number in enumerate(sizes):
        ranks[stage % shape.parts] += sum(loads.parts[layer : layer + number])
        layer += number
    return max(ranks)


@pytest.mark.parametrize("seed", range(12))
def test_one_stage_a_rank_is_cut_where_the_fullest_has_the_least(seed: int) -> None:
    draw = random.Random(seed)
    loads = Loads(tuple(draw.choice([0.0, 0.5, 1.0, draw.random(), 3 * draw.random()]) for _ in range(9)))
    for count in (2, 3, 5, 9):
        shape = PipelineShape(parts=count)
        sizes = loads.balanced(shape)
        least = min(fullest(loads, other, shape) for other in every(9, count))
        assert sum(sizes) == 9
        assert min(sizes) > 0
        assert fullest(loads, sizes, shape) == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.1, 2.1), (1.5, 0.3), (4.0, 4.0)])
@pytest.mark.parametrize(("parts", "virtual"), [(2, 2), (2, 4), (3, 2), (4, 2)])
def test_several_stages_a_rank_of_like_layers_too(first: float, last: float, parts: int, virtual: int) -> None:
    """Layers of equal loads, with what runs before the first and after the last."""
    own = [1.0] * 11
    own[0], own[-1] = own[0] + first, own[-1] + last
    loads, shape = Loads(tuple(own)), PipelineShape(parts=parts, virtual_stages=virtual)
    least = min(fullest(loads, other, shape) for other in every(11, shape.count))
    assert fullest(loads, loads.balanced(shape), shape) == pytest.approx(least)


def test_without_loads_stages_are_even() -> None:
    assert Loads((0.0,) * 7).balanced(PipelineShape(parts=3)) == (2, 3, 2)


def test_a_pipeline_of_one_stage_a_rank_waits_for_all_others_once() -> None:
    """Four micro-batches of stages that take 1, 2 and 1 s: the second runs for 8 s, and waits for 1 s before and after
    (forward and backward of the first, of the third)."""
    each = [1.0, 2.0, 1.0]
    assert least_step_s([4 * own for own in each], each, PipelineShape(parts=3)) == 10.0


def test_a_rank_of_several_stages_waits_for_those_before_its_first() -> None:
    each = [1.0, 2.0, 1.0, 2.0]
    assert least_step_s([4 * own for own in each], each, PipelineShape(parts=2, virtual_stages=2)) == 4 * 4.0 + 1.0


def stages_of_a_stack(time_limit_s: float | None = None) -> StageSolver:
    return StageSolver(
        build_model=Stack,
        example_inputs=text,
        cluster=tpplan.Cluster(gpus=4, gpus_per_node=4, profile=MACHINE),
        batch=Batch(8, None, LENGTH),
        options=Options(loss=loss, precision=Precision.FP32, all_gpus=True, ep=1, time_limit_s=time_limit_s),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_loads_add_up_to_no_more_than_the_whole_model_takes(tp: int) -> None:
    """On one rank, where nothing is converted, to exactly that."""
    solver = stages_of_a_stack()
    loads = solver.loads(PIPELINE, Degrees(tp=tp, micro_batch=1))
    points = PointSolver(request=solver.request, traces=solver.points(1).traces)
    whole = points.floor(Point(num_gpus=tp, tp=tp, shard=1, micro_batch=1)) / 8
    assert min(loads.parts) > 0
    assert sum(loads.parts) <= whole * (1 + 1e-9)
    if tp == 1:
        assert sum(loads.parts) == pytest.approx(whole)


def test_out_of_time_stages_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of which nothing is known would else be taken for one that takes no time."""
    solver, solve, solved = stages_of_a_stack(time_limit_s=60.0), PointSolver.solver_of, list[Problem]()

    def slow(self: PointSolver, problem: Problem) -> Solution:
        solved.append(problem)
        if len(solved) == 2:
            raise SolverError("out of time")
        return solve(self, problem)

    monkeypatch.setattr(PointSolver, "solver_of", slow)
    assert not any(solver.loads(PIPELINE, Degrees(tp=1, micro_batch=1)).parts)
    assert len(solved) == 2

"""The least that the parts of a model between its possible cuts take, and the layers of each stage that they balance.

A load is a lower bound on the seconds of a micro-batch in one part: its kernels and tp collectives at their least,
without FSDP, recomputation and a memory limit. Stages are whole parts in order, so that the loads of a stage add up.

One stage a rank: the least load of the fullest stage is found exactly, by bisection over what a stage may take; parts
then move between neighbours while the fuller of the two has less to do. Several stages a rank: parts move from the
fullest rank to others while that leaves it less full; for parts of equal loads, that gives the least.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tpplan.core.errors import SolverError
from tpplan.core.graph import Boundary, Op
from tpplan.search.pipelines.pipeline_shape import PipelineShape, Sizes
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.point_solver import PointSolver
from tpplan.solvers.problem import Problem, Status

#: of the load of the fullest stage, how exactly it is known
_EXACT = 1e-6


@dataclass(frozen=True, slots=True)
class Loads:
    """Least seconds of a micro-batch in each part, in order."""

    parts: tuple[float, ...]

    def of_stages(self, sizes: Sizes) -> list[float]:
        """The least seconds of a micro-batch in each stage, of stages of so many parts."""
        ends = [0, *accumulate(sizes)]
        return [sum(self.parts[start:end]) for start, end in pairwise(ends)]

    def floor_s(self, sizes: Sizes, shape: PipelineShape, steps: int) -> float:
        """Seconds that no step of `steps` micro-batches is below."""
        each = self.of_stages(sizes)
        return least_step_s([steps * seconds for seconds in each], each, shape)

    def balanced(self, shape: PipelineShape) -> Sizes:
        """The parts in each stage that leave the fullest rank the least to do."""
        if not sum(self.parts):
            return shape.even(len(self.parts))
        if shape.virtual_stages == 1:
            return self._bisected(shape.count)
        sizes, found = shape.even(len(self.parts)), True
        while found:
            sizes, found = self._moved(sizes, shape)
        return sizes

    def _bisected(self, count: int) -> Sizes:
        """The sizes of stages of which the fullest has the least to do."""
        low, high = max(self.parts), sum(self.parts)
        best = self._filled(high, count)
        while high - low > _EXACT * high:
            middle = (low + high) / 2
            sizes = self._filled(middle, count)
            if sizes is None:
                low = middle
            else:
                high, best = middle, sizes
        assert best is not None, "stages that may take everything are possible"
        return self._evened(best)

    def _evened(self, sizes: Sizes) -> Sizes:
        """The sizes with parts moved between neighbours where the fuller of the two then has less to do."""
        found = list(sizes)
        is_done = False
        while not is_done:
            is_done = True
            for i in range(len(found) - 1):
                for source, target in ((i, i + 1), (i + 1, i)):
                    other = list(found)
                    other[source], other[target] = other[source] - 1, other[target] + 1
                    if other[source] and self._fuller(other, i) < self._fuller(found, i) * (1 - _EXACT):
                        found, is_done = other, False
        return tuple(found)

    def _fuller(self, sizes: Sequence[int], first: int) -> float:
        return max(self.of_stages(tuple(sizes))[first : first + 2])

    def _filled(self, most: float, count: int) -> Sizes | None:
        """Sizes of stages none of which has more than `most` to do, the last ones filled first; None without any."""
        sizes: list[int] = []
        left = len(self.parts)
        for before in range(count - 1, -1, -1):
            end, load = left, 0.0
            while left > before and load + self.parts[left - 1] <= most * (1 + _EXACT):
                left -= 1
                load += self.parts[left]
            sizes.append(end - left)
        return None if left or 0 in sizes else tuple(reversed(sizes))

    def _moved(self, sizes: Sizes, shape: PipelineShape) -> tuple[Sizes, bool]:
        """The sizes with one part moved from a stage of the fullest rank, where that leaves the fullest less to do, or
        fewer ranks as much."""

        def of_ranks(own: Sizes) -> list[tuple[float, int]]:
            loads = self.of_stages(own)
            return sorted(((sum(loads[rank :: shape.parts]), rank) for rank in range(shape.parts)), reverse=True)

        def fullness(own: Sizes) -> list[float]:
            return [load for load, _ in of_ranks(own)]

        _, rank = of_ranks(sizes)[0]
        for source in sorted(range(rank, len(sizes), shape.parts), key=lambda i: (-sizes[i], -i)):
            for target in sorted(range(len(sizes)), key=lambda i: (sizes[i], -i)):
                if sizes[source] > 1 and target % shape.parts != rank:
                    other = tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))
                    if fullness(other) < fullness(sizes):
                        return other, True
        return sizes, False


def least_step_s(steps_s: Sequence[float], each_s: Sequence[float], shape: PipelineShape) -> float:
    """Seconds that a step is not below, of stages with least seconds for a step and for one micro-batch of it.

    With one stage a rank all others are waited for while the pipeline fills and drains, with several those before a
    rank's first; where weights' gradients are deferred, none is known to be.
    """
    if shape.is_one_f_one_b:
        return max(steps_s) + sum(each_s) - max(each_s)
    if shape.is_zero_bubble:
        return max(sum(steps_s[rank :: shape.parts]) for rank in range(shape.parts))
    return max(sum(steps_s[rank :: shape.parts]) + sum(each_s[:rank]) for rank in range(shape.parts))


def loads_of(solver: PointSolver, point: Point, positions: Sequence[int]) -> Loads:
    """The loads of parts of the model at a point's tp degree and micro-batch; a part ends before the node at each of
    `positions`, ascending, and the last with the graph. All are 0, so that stages get equally many parts, where the
    time limit does not suffice for one of them."""
    formulation = solver.on_fewest(point)
    space, known = formulation.space, dict[frozenset[tuple[str, int]], float]()
    places = {node.name: place for place, node in enumerate(space.graph.nodes)}
    classes: list[Counter[str]] = [Counter() for _ in range(len(positions) + 1)]
    for name, decider in space.deciders.items():
        place = places[(decider if isinstance(decider, Op | Boundary) else decider.op).name]
        classes[bisect_right(positions, place)][space.classes[name]] += 1
    for numbers in classes:
        key = frozenset(numbers.items())
        if key not in known:
            least = _optimum(solver, formulation.alone_in(numbers))
            if least is None:
                return Loads((0.0,) * len(classes))
            known[key] = least
    return Loads(tuple(known[frozenset(numbers.items())] for numbers in classes))


def _optimum(solver: PointSolver, problem: Problem) -> float | None:
    """The optimum of a problem in seconds; None where the time limit does not suffice for it."""
    try:
        found = solver.solver_of(problem)
    except SolverError:
        if solver.request.time_limit_s is None:
            raise
        return None
    return found.objective if found.status is Status.OPTIMAL else None

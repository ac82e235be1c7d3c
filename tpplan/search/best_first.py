"""Looks at points best first, and leaves out those that cannot be the fastest.

The point with the least lower bound is looked at more closely, until the least bound is that of a plan. An early plan
excludes most points by their first bounds; so, until there is one, points of one tp degree after the other are looked
at; and of a model whose experts may be divided among several numbers of ranks, which has several times as many points,
those of all micro-batches and numbers together. A point's bounds are its floor
(tpplan.search.points.point_solver.PointSolver.floor), with the least of every other term; its optimum without a memory
limit; and that of the relaxation of its ILP with one memory row, or of one that is below those of several points
(tpplan.search.points.common_bound). A point is left out before it is traced or priced where a smaller micro-batch on
its mesh does not fit, and where its GPUs at the best rates of the profile would take too long
(tpplan.search.points.best_rates).
"""

import heapq
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NoReturn, assert_never

from tpplan.core.errors import InfeasibleError, SolverError
from tpplan.core.units import format_bytes
from tpplan.layouts.build_space import NoLayoutError
from tpplan.search.diagnose import infeasible, no_layout, unkept, unproven
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.point_solver import Candidate, PointSolver, Solvers
from tpplan.solvers.problem import Status

logger = logging.getLogger(__name__)


class NotFasterError(Exception):
    """Every plan that fits is slower than the cutoff."""


class Stage(IntEnum):
    """The next solve of a point: none but a sum of least terms, of its lightest treatment, of its ILP relaxed with one
    memory row and with all of them, of its ILP. The first and the last but one are of use before there is a plan."""

    LEAST = 0
    LIGHT = 1
    RELAXED = 2
    LIMITED = 3
    FULL = 4


@dataclass
class Progress:
    """The state of a search: each point's optimum or lower bound in seconds, its next stage, or why it is left out."""

    solved: dict[Point, Candidate] = field(default_factory=dict)
    bounds: dict[Point, float] = field(default_factory=dict)
    stages: dict[Point, Stage] = field(default_factory=dict)
    too_large: set[Point] = field(default_factory=set)
    #: points across nodes with more tp ranks than a degree that is too slow at their micro-batch
    too_wide: set[Point] = field(default_factory=set)
    #: by Point.space
    without: dict[tuple[int, int, int], NoLayoutError] = field(default_factory=dict)
    #: points of which the time limit left a bound alone
    undecided: dict[Point, SolverError] = field(default_factory=dict)
    #: optima of points under a memory limit that their plans did not keep, before it was lowered
    lowered: dict[Point, float] = field(default_factory=dict)
    #: optima that were refuted, which bound what is left of their points
    refuted: dict[Point, float] = field(default_factory=dict)
    #: seconds above which no plan is looked for
    cutoff_s: float = math.inf

    def best(self) -> Candidate | None:
        """The fastest candidate; of equal ones that of the least point."""
        feasible = [candidate for candidate in self.solved.values() if candidate.solution.objective is not None]
        return min(feasible, key=lambda candidate: (candidate.solution.objective, candidate.point), default=None)

    @property
    def ceiling(self) -> float:
        """Seconds of the fastest plan that is known, or of the cutoff: no point with a bound above is looked at."""
        best = self.best()
        return self.cutoff_s if best is None or best.solution.objective is None else best.solution.objective

    def larger_than_unfit(self, points: list[Point]) -> set[Point]:
        """The points among `points` of whose mesh a smaller micro-batch is known not to fit: a larger one keeps as much
        or more."""
        least: dict[tuple[int, ...], int] = {}
        for point, candidate in self.solved.items():
            if candidate.solution.status is Status.INFEASIBLE:
                least[point.ranks] = min(point.micro_batch, least.get(point.ranks, point.micro_batch))
        return {point for point in points if point.micro_batch > least.get(point.ranks, math.inf)} if least else set()


def explore(solvers: Solvers, points: list[Point], known: Progress) -> Candidate:
    """The fastest candidate: solves every point that may be it, one micro-batch (and trace) after the other.

    Raises InfeasibleError where nothing fits, and where the pins leave a decision no layout; NotFasterError where
    bounds above the cutoff are all that is known of some points.
    """
    request = solvers.request
    groups = _groups(points)
    known.too_wide.clear()
    _look_again(solvers, known)
    if len(solvers.by_ep) > 1 and known.best() is None:
        _scout(solvers, points, known)
    done = 0
    for number, (size, ep) in enumerate(groups):
        members = [point for point in points if (point.micro_batch, point.ep) == (size, ep)]
        if own := _open_points(solvers.by_ep[ep], points, size, known):
            request.report("trace", number, len(groups))
            solvers.by_ep[ep].traces.traced(size)
            _explore_size(solvers.by_ep[ep], own, members, known, done, len(points))
        done += len(members)
    for stage, total in (("trace", len(groups)), ("costs", len(points)), ("solve", len(points))):
        request.report(stage, total, total)
    return known.best() or _raise_without(solvers, points, known)


def _groups(points: list[Point]) -> list[tuple[int, int]]:
    """The (micro-batch, number of ranks that divide experts) of points, in the order in which they are looked at."""
    return sorted({(point.micro_batch, point.ep) for point in points}, key=lambda group: (group[0], -group[1]))


def _open_points(solver: PointSolver, points: list[Point], size: int, known: Progress) -> list[Point]:
    """The solver's points of a micro-batch that may fit and be the fastest, as far as that is known without their
    trace."""
    ep = solver.traces.degree
    every = [point for point in points if point.ep == ep]
    members = [point for point in every if point.micro_batch == size]
    known.too_large |= known.larger_than_unfit(members)
    own = [point for point in members if point not in known.too_large]
    pace = solver.pace(sorted({point.micro_batch for point in every}))
    for point in own:
        known.bounds[point] = max(known.bounds.get(point, 0.0), pace / point.num_gpus)
    return [point for point in own if known.bounds[point] <= known.ceiling]


def _scout(solvers: Solvers, points: list[Point], known: Progress) -> None:
    """Finds an early plan: looks, of the points on most GPUs and with tp inside nodes, at that with the least bound,
    whatever its micro-batch, until one has a plan."""
    most, per_node = max(point.num_gpus for point in points), solvers.request.cluster.gpus_per_node
    every = [point for point in points if point.num_gpus == most and point.tp <= per_node]
    waiting: list[tuple[float, Point]] = []
    for number, (size, ep) in enumerate(groups := _groups(every)):
        if own := _open_points(solvers.by_ep[ep], every, size, known):
            solvers.request.report("trace", number, len(groups))
            solvers.by_ep[ep].traces.traced(size)
            waiting += ((known.bounds[point], point) for point in _priced(solvers.by_ep[ep], own, known))
    heapq.heapify(waiting)
    stages: dict[Point, Stage] = {}
    while waiting and known.best() is None:
        _, point = heapq.heappop(waiting)
        stage = stages.get(point, Stage.LEAST)
        try:
            found = _looked_at(solvers.of(point), point, stage, known.ceiling)
        except SolverError as error:
            logger.info("%s is looked at later: %s", point, error)
            continue
        if _noted(known, point, stage, found):
            stages[point] = Stage(stage + 1)
            heapq.heappush(waiting, (known.bounds[point], point))


def _look_again(solvers: Solvers, known: Progress) -> None:
    """Looks first at the point of the fastest plan that was refuted: what is left there excludes most other points."""
    refuted = min(known.refuted, key=lambda point: (known.refuted[point], point), default=None)
    if refuted is None:
        return
    known.bounds |= {point: max(known.bounds.get(point, 0.0), bound) for point, bound in known.refuted.items()}
    known.refuted.clear()
    solver, is_open = solvers.of(refuted), True
    try:
        while is_open:
            stage = known.stages.get(refuted, Stage.LIGHT)
            is_open = _noted(known, refuted, stage, _looked_at(solver, refuted, stage, known.ceiling))
    except (NoLayoutError, SolverError) as error:
        logger.info("%s is looked at later: %s", refuted, error)


def _raise_without(solvers: Solvers, points: list[Point], known: Progress) -> NoReturn:
    """Raises the error where no point has a candidate."""
    if known.undecided:
        raise next(iter(known.undecided.values()))
    unsolved = (point for point in points if point not in known.solved and point not in known.too_large)
    if known.cutoff_s < math.inf and any(point.space not in known.without for point in unsolved):
        raise NotFasterError
    left = [point for point in points if point.space not in known.without]
    if left:
        stage = solvers.request.stage
        if stage is not None and not solvers.request.pins:  # what would help is for all stages to say
            raise InfeasibleError(
                f"no plan of stage {stage.index} fits {format_bytes(solvers.request.limit)} per GPU beside "
                f"{format_bytes(stage.beside_bytes)} of its rank's other stages"
            )
        if not solvers.request.is_explained:
            raise InfeasibleError(f"no plan fits {format_bytes(solvers.request.limit)} per GPU")
        raise unkept(solvers, left) or infeasible(solvers, left)
    (size, _, ep), first = next(iter(known.without.items()))
    solver = solvers.by_ep[ep]
    if solver.cuts.wrong:
        raise unproven(solver, size, first)
    raise no_layout(solver, size, {tp: e for (own, tp, of), e in known.without.items() if (own, of) == (size, ep)})


def _explore_size(
    solver: PointSolver, own: list[Point], members: list[Point], known: Progress, done: int, total: int
) -> None:
    """Solves points of one micro-batch that may be the fastest, `own` of its `members`: tp inside nodes first, then
    across, by degree. `done` of all `total` points were looked at before."""
    per_node = solver.request.cluster.gpus_per_node
    _explore_some(solver, [point for point in own if point.tp <= per_node], known, done, total)
    before = per_node
    for tp in sorted({point.tp for point in members if point.tp > per_node}):
        if _is_slow(solver, [point for point in members if point.tp == before], known):
            known.too_wide.update(point for point in own if point.tp >= tp and point not in known.solved)
            return
        _explore_some(solver, [point for point in own if point.tp == tp], known, done, total)
        before = tp


def _explore_some(solver: PointSolver, own: list[Point], known: Progress, done: int, total: int) -> None:
    """Prices points of one micro-batch and solves those that may be the fastest."""
    solver.request.report("costs", done, total)
    own = _priced(solver, own, known)
    _best_first(solver, own, known, partial(_report_left, solver, done + len(own), total))


def _priced(solver: PointSolver, own: list[Point], known: Progress) -> list[Point]:
    """Prices points of one micro-batch and notes their floors; returns those that have a layout."""
    for size, tp, ep in sorted({point.space for point in own}):
        try:
            solver.priced(size, tp)
        except NoLayoutError as error:
            known.without[size, tp, ep] = error
    own = [point for point in own if point.space not in known.without]
    for point in own:
        known.bounds[point] = max(known.bounds.get(point, 0.0), solver.floor(point))
    return own


def _is_slow(solver: PointSolver, own: list[Point], known: Progress) -> bool:
    """True where compute and collectives alone make a tp degree too slow. Larger degrees are then left out: a rank
    computes no less of a step, and more of the group's traffic crosses nodes."""
    left = [point for point in own if point.space not in known.without and point not in known.too_large]
    return bool(left) and all(solver.has_floor(point) and solver.floor(point) > known.ceiling for point in left)


def _report_left(solver: PointSolver, end: int, total: int, left: int) -> None:
    """Reports the progress of the points up to `end`, of which `left` are left."""
    solver.request.report("solve", end - left, total)


def _best_first(solver: PointSolver, points: list[Point], known: Progress, report: Callable[[int], None]) -> None:
    """Looks at the point with the least bound until no point may be the fastest; before the first plan at points of
    one tp degree after the other."""
    waiting: list[tuple[float, Point]] = []
    aside = _by_degree([(known.bounds[point], point) for point in points if point not in known.solved])
    #: spaces of which points were looked at together
    tried: set[tuple[int, int, int]] = set()
    while True:
        while aside and (not waiting or known.best() is not None):
            waiting += aside.pop(0)
            heapq.heapify(waiting)
        if not waiting or waiting[0][0] > known.ceiling:
            break
        report(len(waiting) + sum(map(len, aside)))
        _, point = heapq.heappop(waiting)
        stage = known.stages.get(point, Stage.LIGHT)
        try:
            found = _looked_at(solver, point, stage, known.ceiling)
        except SolverError as error:
            logger.info("%s stays undecided: %s", point, error)
            known.undecided[point] = error
            continue
        known.undecided.pop(point, None)
        if _noted(known, point, stage, found):
            heapq.heappush(waiting, (known.bounds[point], point))
        elif stage is Stage.RELAXED and known.bounds[point] > known.ceiling and point.space not in tried:
            tried.add(point.space)
            waiting = _left_together(solver, waiting, point, known)


def _left_together(
    solver: PointSolver, waiting: list[tuple[float, Point]], point: Point, known: Progress
) -> list[tuple[float, Point]]:
    """The points that wait, without those of a space that one relaxation bounds away together, as that of `point` was
    by its own."""
    alike = [
        other
        for bound, other in waiting
        if other.space == point.space and known.stages.get(other) is Stage.RELAXED and bound <= known.ceiling
    ]
    try:
        found = solver.relaxed_together(alike, cutoff=known.ceiling)
    except SolverError as error:
        logger.info("points of %s are not bounded together: %s", point.space, error)
        return waiting
    for other, bound in found.items():
        _noted(known, other, Stage.RELAXED, bound)
    left = [entry for entry in waiting if entry[1] not in found]
    heapq.heapify(left)
    return left


def _noted(known: Progress, point: Point, stage: Stage, found: Candidate | float) -> bool:
    """Keeps what a stage found of a point; True where the point may still be the fastest, at its next stage."""
    if isinstance(found, Candidate):
        known.solved[point] = found
        return False
    known.bounds[point] = max(known.bounds[point], found)
    known.stages[point] = Stage.FULL if stage >= Stage.RELAXED else Stage(stage + 1)
    return stage is not Stage.FULL and known.bounds[point] <= known.ceiling


def _by_degree(bounds: list[tuple[float, Point]]) -> list[list[tuple[float, Point]]]:
    """Points with their bounds by tp degree, the degree with the least bound first."""
    found: dict[int, list[tuple[float, Point]]] = {}
    for bound, point in sorted(bounds):
        found.setdefault(point.tp, []).append((bound, point))
    return list(found.values())


def _looked_at(solver: PointSolver, point: Point, stage: Stage, ceiling: float) -> Candidate | float:
    """A point's optimum, or a lower bound on it."""
    match stage:
        case Stage.LEAST:
            return solver.least(point)
        case Stage.LIGHT:
            return solver.light(point, cutoff=ceiling)
        case Stage.RELAXED:
            return solver.relaxed(point, cutoff=ceiling)
        case Stage.LIMITED:
            return solver.relaxed(point, cutoff=ceiling, is_at_the_loss=False)
        case Stage.FULL:
            return solver.full(point, cutoff=ceiling)
        case _:
            assert_never(stage)

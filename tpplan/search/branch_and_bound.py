"""Branch and bound over all points, which are meshes with micro-batches; the best plan is proven.

The answer is the optimum over every point, whatever the number of ranks that divide experts: a point names it, and the
solver of that number has its graphs (tpplan.search.expert_degrees). A counterexample to its proof forbids the choices
that together make it (tpplan.search.conflicts), and the search goes on. Best first: the point with the least lower
bound is looked at more closely, until the least bound is that of a plan. An early plan excludes most points by their
first bounds; so, until there is one, points of one tp degree after the other are looked at. A point's bounds are its
floor (tpplan.search.points.point_solver.PointSolver.floor), with the least of every other term; its optimum without a
memory limit; and that of the relaxation of its ILP with one memory row, or of one that is below those of several points
(tpplan.solvers.common_bound). A point is left out before it is traced or priced where a smaller micro-batch on its mesh
does not fit, and where its GPUs at the best rates of the profile would take too long
(tpplan.search.points.best_rates). Guesses, which forbid more than a counterexample shows, may hide a faster plan: the
bound is then that of the problem without them.

The search assumes three things, and the plan notes where it did: that graphs at other micro-batches grow as from the
smallest to the next, and with each size what an op runs (tpplan.search.points.grown_graph,
tpplan.costs.runs.grown_executions; the answer's graph is traced, its ops are run, and both compared); that graphs of
other numbers of ranks that divide experts follow from those of two (tpplan.experts.degree_graph, likewise compared);
and that across nodes more tp ranks are no faster where compute and collectives alone make fewer too slow.
"""

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import NoReturn, assert_never

from tpplan.core.errors import InfeasibleError, SolverError, UsageError
from tpplan.core.units import format_bytes
from tpplan.costs.step.step_time import Priced, price
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import NoLayoutError
from tpplan.plan.plan import Plan, ProofStatus, SolverReport
from tpplan.plan.proof_hash import as_proven
from tpplan.search.build_plan import plan_of
from tpplan.search.counterexamples import culprit_of, forbid, put_to_proof
from tpplan.search.diagnose import infeasible, no_layout, unkept, unproven
from tpplan.search.other_shapes import with_other_shapes
from tpplan.search.points.mesh_points import Point, applicable
from tpplan.search.points.point_solver import Candidate, PointSolver, Solvers
from tpplan.search.why_whole import with_reasons
from tpplan.solvers.problem import Status

logger = logging.getLogger(__name__)

#: counterexamples before giving up; each forbids some of finitely many choices
MAX_ROUNDS = 50
#: what progress counts of a proof: the planned shapes, reasons of what is whole, other batches and lengths (as long as
#: two of these)
_PROOF_PARTS = 4
#: relative difference of prices that rounding explains
SAME = 1e-6
#: reasons why points are not solved, as the plan's certificate counts them
BOUNDED, NO_LAYOUT, TOO_LARGE = "slower by a bound", "without a layout", "larger than what does not fit"
TOO_WIDE, UNDECIDED = "of more tp ranks than are too slow", "undecided within the time limit"


class Stage(IntEnum):
    """The next solve of a point: of its lightest treatment, of its relaxed ILP, of its ILP."""

    LIGHT = 0
    RELAXED = 1
    FULL = 2


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

    def best(self) -> Candidate | None:
        """The fastest candidate; of equal ones that of the least point."""
        feasible = [candidate for candidate in self.solved.values() if candidate.solution.objective is not None]
        return min(feasible, key=lambda candidate: (candidate.solution.objective, candidate.point), default=None)

    @property
    def ceiling(self) -> float:
        """Seconds of the fastest plan that is known: no point with a bound above is looked at."""
        best = self.best()
        return math.inf if best is None or best.solution.objective is None else best.solution.objective

    def larger_than_unfit(self, points: list[Point]) -> set[Point]:
        """The points among `points` of whose mesh a smaller micro-batch is known not to fit: a larger one keeps as much
        or more."""
        least: dict[tuple[int, ...], int] = {}
        for point, candidate in self.solved.items():
            if candidate.solution.status is Status.INFEASIBLE:
                least[point.ranks] = min(point.micro_batch, least.get(point.ranks, point.micro_batch))
        return {point for point in points if point.micro_batch > least.get(point.ranks, math.inf)} if least else set()


def search(solvers: Solvers, points: list[Point], unsearched: tuple[str, ...], *, prove: bool) -> Plan:
    """The fastest plan over all points; with `prove` the fastest that no counterexample refutes."""
    known = Progress()
    rounds, last = 1, ""
    while rounds <= MAX_ROUNDS:
        best = _explore(solvers, points, known)
        solver = solvers.of(best.point)
        best = known.solved[best.point] = _settled(solver, best)
        choice = best.solution.choice
        assert choice is not None
        traced = solver.traces.really_traced(best.point.micro_batch)
        if not solver.has_grown_right(best):
            solver.distrust_grown()
            known = Progress()
            continue
        num_averages = traced.opaques.num_averages(best.formulation.setting.accumulation_steps)
        assignment = replace(best.formulation.assignment(choice, num_averages=num_averages), graph=traced.graph)
        priced, micro_batch = _priced(solver, assignment, best), best.point.micro_batch
        excess = priced.predicted.peak_memory_bytes + priced.predicted.slack_bytes - solver.request.limit
        if excess > SAME * solver.request.limit:
            _lower_limit(solver, known, best, excess)
            continue
        certificate = _certificate(best, known, points, (*unsearched, *_unsearched(solvers, points, known)))
        if not prove:
            plan = plan_of(solver, assignment, priced, micro_batch, certificate, ProofStatus.UNPROVEN, rounds)
            return with_reasons(plan, solver, best, traced, priced)
        solver.request.report("prove", 0, _PROOF_PARTS)
        plan = plan_of(solver, assignment, priced, micro_batch, certificate, ProofStatus.PROVEN, rounds)
        checked = put_to_proof(solver, traced, plan, assignment)
        if isinstance(checked, Plan):
            solver.request.report("prove", 1, _PROOF_PARTS)
            settled = replace(checked, solver=_without_guesses(solvers, points, certificate))
            settled = with_reasons(settled, solver, best, traced, priced)
            solver.request.report("prove", 2, _PROOF_PARTS)
            proven = as_proven(with_other_shapes(solver.traces, settled, traced, assignment))
            solver.request.report("prove", _PROOF_PARTS, _PROOF_PARTS)
            return proven
        if (culprit := culprit_of(checked)) is not None:
            solver.run_whole(culprit, checked.message)
            points, known = _applicable(solvers, points, best.point.ep), Progress()
        else:
            forbid(solver, checked, assignment, best.formulation, traced, plan)
            _forget_cut(solver, known, best.point.ep)
        last = solver.cuts.messages[-1]
        rounds += 1
    raise SolverError(f"no plan could be proven in {MAX_ROUNDS} rounds; the last: {last}")


def _applicable(solvers: Solvers, points: list[Point], ep: int) -> list[Point]:
    """The points after a module of the graphs with this ep was made to run whole; none with this ep where it then
    cannot be laid out and others are left."""
    others = [point for point in points if point.ep != ep]
    solver = solvers.by_ep[ep]
    try:
        own = applicable([point for point in points if point.ep == ep], solver.request, solver.traces)
    except UsageError as error:
        if not others:
            raise
        logger.info("experts are no longer divided among %d ranks: %s", ep, error)
        own = []
    return [*others, *own]


def _priced(solver: PointSolver, assignment: Assignment, best: Candidate) -> Priced:
    """The price of the best assignment: its time is the ILP's up to rounding."""
    request, executor = solver.request, solver.traces.reuse.executor
    per_node = request.cluster.gpus_per_node
    priced = price(assignment, request.profile, per_node, executor, memory_limit_bytes=request.limit)
    solved, seconds = best.solution.objective, priced.predicted.step_time_s
    assert solved is not None
    assert abs(solved - seconds) <= SAME * max(solved, seconds), f"the ILP says {solved} s, the plan costs {seconds} s"
    return priced


def _lower_limit(solver: PointSolver, known: Progress, best: Candidate, excess: float) -> None:
    """Lowers the limit at a point by the bytes that its plan needs beyond it: the ILP's rows miss the plan's peak. The
    certificate's bound remains the optimum before."""
    point, objective = best.point, best.solution.objective
    assert objective is not None
    logger.warning("%s: a plan needs %.0f bytes more than the ILP counts; solving with less memory", point, excess)
    known.lowered.setdefault(point, objective)
    solver.lower_limit(point, excess)
    del known.solved[point]


def _explore(solvers: Solvers, points: list[Point], known: Progress) -> Candidate:
    """The fastest candidate: solves every point that may be it, one micro-batch (and trace) after the other.

    Raises InfeasibleError where nothing fits, and where the pins leave a decision no layout.
    """
    request = solvers.request
    groups = sorted({(point.micro_batch, -point.ep) for point in points})
    known.too_wide.clear()
    done = 0
    for number, (size, negative) in enumerate(groups):
        solver = solvers.by_ep[-negative]
        every = [point for point in points if point.ep == -negative]
        members = [point for point in every if point.micro_batch == size]
        known.too_large |= known.larger_than_unfit(members)
        own = [point for point in members if point not in known.too_large]
        pace = solver.pace(sorted({point.micro_batch for point in every}))
        for point in own:
            known.bounds[point] = max(known.bounds.get(point, 0.0), pace / point.num_gpus)
        own = [point for point in own if known.bounds[point] <= known.ceiling]
        if own:
            request.report("trace", number, len(groups))
            solver.traces.traced(size)
            _explore_size(solver, own, known, done, len(points))
        done += len(members)
    for stage, total in (("trace", len(groups)), ("costs", len(points)), ("solve", len(points))):
        request.report(stage, total, total)
    return known.best() or _raise_without(solvers, points, known)


def _raise_without(solvers: Solvers, points: list[Point], known: Progress) -> NoReturn:
    """Raises the error where no point has a candidate."""
    if known.undecided:
        raise next(iter(known.undecided.values()))
    left = [point for point in points if point.space not in known.without]
    if left:
        stage = solvers.request.stage
        if stage is not None and not solvers.request.pins:  # what would help is for all stages to say
            raise InfeasibleError(f"no plan of stage {stage.index} fits beside {format_bytes(stage.beside_bytes)}")
        raise unkept(solvers, left) or infeasible(solvers, left)
    (size, _, ep), first = next(iter(known.without.items()))
    solver = solvers.by_ep[ep]
    if solver.cuts.wrong:
        raise unproven(solver, size, first)
    raise no_layout(solver, size, {tp: e for (own, tp, of), e in known.without.items() if (own, of) == (size, ep)})


def _explore_size(solver: PointSolver, own: list[Point], known: Progress, done: int, total: int) -> None:
    """Solves points of one micro-batch that may be the fastest: tp inside nodes first, then across, by degree. `done`
    of all `total` points were looked at before."""
    per_node = solver.request.cluster.gpus_per_node
    _explore_some(solver, [point for point in own if point.tp <= per_node], known, done, total)
    before = per_node
    for tp in sorted({point.tp for point in own if point.tp > per_node}):
        if _is_slow(solver, [point for point in own if point.tp == before], known):
            known.too_wide.update(point for point in own if point.tp >= tp and point not in known.solved)
            return
        _explore_some(solver, [point for point in own if point.tp == tp], known, done, total)
        before = tp


def _explore_some(solver: PointSolver, own: list[Point], known: Progress, done: int, total: int) -> None:
    """Prices points of one micro-batch and solves those that may be the fastest."""
    for size, tp, ep in sorted({point.space for point in own}):
        solver.request.report("costs", done, total)
        try:
            solver.priced(size, tp)
        except NoLayoutError as error:
            known.without[size, tp, ep] = error
    own = [point for point in own if point.space not in known.without]
    for point in own:
        known.bounds[point] = max(known.bounds.get(point, 0.0), solver.floor(point))
    _best_first(solver, own, known, partial(_report_left, solver, done + len(own), total))


def _is_slow(solver: PointSolver, own: list[Point], known: Progress) -> bool:
    """True where compute and collectives alone make a tp degree too slow. Larger degrees are then left out: a rank
    computes no less of a step, and more of the group's traffic crosses nodes."""
    left = [point for point in own if point.space not in known.without]
    return bool(left) and all(solver.floor(point) > known.ceiling for point in left)


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
    known.stages[point] = Stage(min(stage + 1, Stage.FULL))
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
        case Stage.LIGHT:
            return solver.light(point, cutoff=ceiling)
        case Stage.RELAXED:
            return solver.relaxed(point, cutoff=ceiling)
        case Stage.FULL:
            return solver.full(point, cutoff=ceiling)
        case _:
            assert_never(stage)


def _certificate(best: Candidate, known: Progress, points: list[Point], unsearched: tuple[str, ...]) -> SolverReport:
    """The certificate: the best objective, the least bound of any point, and the points that were not solved."""
    objective = best.solution.objective or 0.0
    solved = known.solved.values()
    skipped = Counter(_why_unsolved(point, known, objective) for point in points if point not in known.solved)
    undecided = [known.bounds[point] for point in known.undecided if known.bounds[point] <= objective]
    bounds = (c.solution.bound for c in solved if c.solution.bound is not None)
    bound = min([objective, *undecided, *known.lowered.values(), *bounds])
    is_solved = all(c.solution.status in (Status.OPTIMAL, Status.INFEASIBLE) for c in solved) and not undecided
    is_proven = is_solved and objective - bound <= SAME * objective
    return SolverReport(
        name=best.solution.solver,
        status=Status.OPTIMAL if is_proven else Status.FEASIBLE,
        objective_s=objective,
        bound_s=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        meshes_tried=len(known.solved),
        skipped=dict(sorted(skipped.items())),
        unsearched=unsearched or None,
    )


def _why_unsolved(point: Point, known: Progress, objective: float) -> str:
    """Why a point has no candidate, in the certificate's words."""
    if point.space in known.without:
        return NO_LAYOUT
    if point in known.too_large:
        return TOO_LARGE
    if point in known.too_wide:
        return TOO_WIDE
    return UNDECIDED if point in known.undecided and known.bounds[point] <= objective else BOUNDED


def _unsearched(solvers: Solvers, points: list[Point], known: Progress) -> tuple[str, ...]:
    """Lines on points that were left out, or priced, under an assumption."""
    found = []
    if known.too_wide:
        shown = ", ".join(
            f"{size} from tp {min(p.tp for p in known.too_wide if p.micro_batch == size)}"
            for size in sorted({point.micro_batch for point in known.too_wide})
        )
        found.append(
            f"tp across nodes beyond a degree whose compute and collectives alone are too slow: micro-batch {shown}"
        )
    if known.lowered:
        shown = ", ".join(f"{point.mesh}, micro-batch {point.micro_batch}" for point in sorted(known.lowered))
        found.append(f"plans that fill memory, as the ILP counts too little of it there: {shown}")
    return (*found, *solvers.assumed(points))


def _settled(solver: PointSolver, best: Candidate) -> Candidate:
    """The best candidate with its ties broken, unchanged where the time limit does not suffice for that."""
    formulation, solution = best.formulation, best.solution
    assert solution.objective is not None
    assert solution.choice is not None
    problem = formulation.tie_break(solution.objective)
    try:
        chosen = solver.solver_of(problem, cutoff=problem.price(solution.choice)).choice
    except SolverError as error:
        logger.info("ties stay unbroken: %s", error)
        return best
    if chosen is None:
        return best
    price = formulation.problem.price(chosen)
    return replace(best, solution=replace(solution, choice=chosen, objective=price))


def _without_guesses(solvers: Solvers, points: list[Point], certificate: SolverReport) -> SolverReport:
    """The certificate with the bound of the problem without guesses."""
    if not any(solver.cuts.guesses for solver in solvers.by_ep.values()):
        return certificate
    solvers.request.report("solve", 0, len(points))
    sound = solvers.changed(lambda solver: solver.without_guesses() if solver.cuts.guesses else solver)
    known = Progress()
    try:
        bound = _certificate(_explore(sound, points, known), known, points, ()).bound_s
    except SolverError as error:
        logger.info("without guesses there is a bound and no plan: %s", error)
        bound = min(known.bounds.values(), default=0.0)
    bound = min(certificate.bound_s, bound)
    objective = certificate.objective_s
    gap = (objective - bound) / objective if objective else 0.0
    is_optimal = certificate.status is Status.OPTIMAL and gap <= SAME
    return replace(
        certificate, status=Status.OPTIMAL if is_optimal else Status.FEASIBLE, bound_s=bound, gap=max(0.0, gap)
    )


def _forget_cut(solver: PointSolver, known: Progress, ep: int) -> None:
    """Forgets the optima with this ep that chose what is now forbidden; other optima, and all bounds, still hold."""
    solver.forget(solver.cuts.degrees)
    for point, candidate in list(known.solved.items()):
        choice, formulation = candidate.solution.choice, candidate.formulation
        if choice is None or point.ep != ep:
            continue
        is_cut = solver.is_cut(point.micro_batch, point.tp)
        conflicts = solver.cuts.conflicts_in(formulation.space)
        if any(is_cut(name, formulation.strategy(choice, name)) for name in formulation.space.deciders) or not all(
            conflict.is_avoided(choice) for conflict in conflicts
        ):
            del known.solved[point]

"""Over all meshes and micro-batches: what a bound does not exclude is solved, the best is checked, and the choices that
together make a counterexample (tpplan.search.conflicts) are forbidden to be made together, wherever they were.

The answer is the optimum over every point. Best first: of all points that with the least lower bound is looked at more
closely, until the least bound is that of a plan. A plan that is known early leaves most points out by their first
bounds, and so, until there is one, only points of one tp degree are looked at, and then of the next. A point's bounds
are its floor (tpplan.search.job.Job.floor), its optimum without a memory limit, and that of the relaxation of its ILP.
A point is left out where a smaller micro-batch on its mesh does not fit, and where its GPUs at the best rates of the
profile would take too long (tpplan.costs.best_rates), before it is traced or priced. What is forbidden beyond a
counterexample, for the search to end sooner, may hide a faster plan: the bound is then that of the problem without it,
and the gap says so.

Two things are taken for granted, and the plan says where they were: that graphs at other micro-batches grow as from the
smallest to the next (tpplan.search.grown_graph; that of the answer is traced, and compared), and that across nodes more
ranks of tp are no faster where compute and collectives alone make fewer too slow.
"""

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import assert_never

from tpplan import solvers
from tpplan.core.errors import ModelError, SolverError
from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op
from tpplan.core.name_patterns import ROOT
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.step_time import Priced, price
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import NoLayoutError, Space
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.plan import Plan, ProofStatus, SolverReport
from tpplan.plan.proof_hash import as_proven
from tpplan.prove.module_scope import given_nodes, parent, shards_in
from tpplan.prove.structure import Counterexample, check_structure
from tpplan.search.build_plan import laid_out_as, plan_of
from tpplan.search.conflicts import conflict_of, in_like_blocks
from tpplan.search.diagnose import infeasible, no_layout, unkept, unproven
from tpplan.search.job import Candidate, Cuts, Job, Point
from tpplan.search.other_shapes import with_other_shapes
from tpplan.search.trace_cache import Traced
from tpplan.solvers.problem import Status
from tpplan.trace.answers.planned_device import planning_for

logger = logging.getLogger(__name__)

#: counterexamples before giving up; each forbids some of finitely many choices
MAX_ROUNDS = 50
#: counterexamples in the code of one class before what its modules' own code sees is no longer sharded: code that
#: compares sizes, say, differs by another line for each way to shard it
PATIENCE = 4
#: relative difference of prices that rounding explains
SAME = 1e-6
#: why points are not solved
BOUNDED, NO_LAYOUT, TOO_LARGE = "slower by a bound", "without a layout", "larger than what does not fit"
TOO_WIDE = "of more tp ranks than are too slow"


class Stage(IntEnum):
    """How closely a point is looked at next."""

    LIGHT = 0
    RELAXED = 1
    FULL = 2


@dataclass
class _Progress:
    """What is known of each point: its optimum, or a lower bound, why no more was asked, and what would be asked."""

    solved: dict[Point, Candidate] = field(default_factory=dict)
    bounds: dict[Point, float] = field(default_factory=dict)
    stages: dict[Point, Stage] = field(default_factory=dict)
    too_large: set[Point] = field(default_factory=set)
    #: points across nodes of more tp ranks than a degree that is too slow at their micro-batch
    too_wide: set[Point] = field(default_factory=set)
    without: dict[tuple[int, int], NoLayoutError] = field(default_factory=dict)
    #: points of which the time limit left only a bound
    undecided: dict[Point, SolverError] = field(default_factory=dict)

    def best(self) -> Candidate | None:
        """The fastest plan; of equals the first in the order of points."""
        feasible = [candidate for candidate in self.solved.values() if candidate.solution.objective is not None]
        return min(feasible, key=lambda candidate: (candidate.solution.objective, candidate.point), default=None)

    @property
    def ceiling(self) -> float:
        """Seconds above which nothing need be looked at."""
        best = self.best()
        return math.inf if best is None or best.solution.objective is None else best.solution.objective

    def is_too_large(self, point: Point) -> bool:
        """True where a smaller micro-batch on the same mesh does not fit: a larger one keeps no less."""
        return any(
            replace(other, micro_batch=point.micro_batch) == point and point.micro_batch > other.micro_batch
            for other, candidate in self.solved.items()
            if candidate.solution.status is Status.INFEASIBLE
        )


def search(job: Job, points: list[Point], *, prove: bool) -> Plan:
    """The fastest plan over all points; a counterexample is cut away wherever it was chosen, until one is proven."""
    known = _Progress()
    for rounds in range(1, MAX_ROUNDS + 1):
        best = _settled(job, _explore(job, points, known))
        known.solved[best.point] = best
        choice = best.solution.choice
        assert choice is not None
        traced = job.really_traced(best.point.micro_batch)
        if traced.graph != best.formulation.space.graph:
            job.distrust_grown()
            known = _Progress()
            continue
        num_averages = traced.opaques.num_averages(best.formulation.setting.accumulation_steps)
        assignment = best.formulation.assignment(choice, num_averages=num_averages)
        priced = _priced(job, assignment, best)
        num_without = sum((point.micro_batch, point.tp) in known.without for point in points)
        certificate = _certificate(best, known, len(points), num_without, _unsearched(job, points, known))
        if not prove:
            return plan_of(job, assignment, priced, best.point.micro_batch, certificate, ProofStatus.UNPROVEN, rounds)
        job.report("prove", rounds - 1, rounds)
        plan = plan_of(job, assignment, priced, best.point.micro_batch, certificate, ProofStatus.PROVEN, rounds)
        checked = put_to_proof(job, traced, plan, assignment)
        if isinstance(checked, Plan):
            job.report("prove", rounds, rounds)
            settled = replace(checked, solver=_without_guesses(job, points, certificate))
            return as_proven(with_other_shapes(job, settled, traced))
        problem = checked
        if (culprit := _culprit(problem)) is not None:
            job.run_whole(culprit, problem.message)
            points, known = job.applicable(points), _Progress()
            continue
        _forbid(job, problem, assignment, best.formulation, traced, plan)
        _forget_cut(job, known)
    raise SolverError(f"no plan could be proven in {MAX_ROUNDS} rounds; the last: {job.cut_messages[-1]}")


def _priced(job: Job, assignment: Assignment, best: Candidate) -> Priced:
    """What the best assignment costs; that is what the ILP said that it does."""
    priced = price(assignment, job.profile, job.cluster.gpus_per_node, job.reuse.executor, memory_limit_bytes=job.limit)
    solved, seconds = best.solution.objective, priced.predicted.step_time_s
    assert solved is not None
    assert abs(solved - seconds) <= SAME * max(solved, seconds), f"the ILP says {solved} s, the plan costs {seconds} s"
    return priced


def _explore(job: Job, points: list[Point], known: _Progress) -> Candidate:
    """Solves every point that may be the fastest: by micro-batch, which each need a trace, and by their bounds.

    Raises InfeasibleError where nothing fits, and where the pins leave a decision no layout.
    """
    sizes = sorted({point.micro_batch for point in points})
    known.too_wide.clear()
    for number, size in enumerate(sizes):
        own = [point for point in points if point.micro_batch == size]
        known.too_large.update(point for point in own if known.is_too_large(point))
        own = [point for point in own if point not in known.too_large]
        pace = job.pace(sizes)
        for point in own:
            known.bounds[point] = max(known.bounds.get(point, 0.0), pace / point.num_gpus)
        own = [point for point in own if known.bounds[point] <= known.ceiling]
        if not own:
            continue
        job.report("trace", number, len(sizes))
        job.traced(size)
        _explore_size(job, own, points, known)
    for stage, total in (("trace", len(sizes)), ("costs", len(points)), ("solve", len(points))):
        job.report(stage, total, total)
    best = known.best()
    if best is not None:
        return best
    if known.undecided:
        raise next(iter(known.undecided.values()))
    left = [point for point in points if (point.micro_batch, point.tp) not in known.without]
    if left:
        raise unkept(job, left) or infeasible(job, left)
    (size, _), first = next(iter(known.without.items()))
    if job.cuts:
        raise unproven(job, first)
    raise no_layout(job, size, {tp: found for (own, tp), found in known.without.items() if own == size})


def _explore_size(job: Job, own: list[Point], points: list[Point], known: _Progress) -> None:
    """Solves every point of one micro-batch that may be the fastest: tp inside nodes first, then across, by degrees."""
    size, per_node = own[0].micro_batch, job.cluster.gpus_per_node
    done, total = sum(point.micro_batch < size for point in points), len(points)
    inside = [point for point in own if point.tp <= per_node]
    _explore_some(job, inside, size, done, total, known)
    before = per_node
    for tp in sorted({point.tp for point in own if point.tp > per_node}):
        if _is_slow(job, [point for point in own if point.tp == before], known):
            known.too_wide.update(point for point in own if point.tp >= tp and point not in known.solved)
            return
        _explore_some(job, [point for point in own if point.tp == tp], size, done, total, known)
        before = tp


def _explore_some(job: Job, own: list[Point], size: int, done: int, total: int, known: _Progress) -> None:
    """Prices and solves points of one micro-batch, as far as one may be the fastest."""
    for tp in sorted({point.tp for point in own}):
        job.report("costs", done, total)
        try:
            job.priced(size, tp)
        except NoLayoutError as error:
            known.without[size, tp] = error
    own = [point for point in own if (size, point.tp) not in known.without]
    for point in own:
        known.bounds[point] = max(known.bounds.get(point, 0.0), job.floor(point))
    _best_first(job, own, known, partial(_report_left, job, done + len(own), total))


def _is_slow(job: Job, own: list[Point], known: _Progress) -> bool:
    """Whether the compute and the collectives of a tp degree alone make it too slow. More ranks of tp then are left
    out: a rank computes no less of a step for it, and more of what the group sends goes from node to node."""
    left = [point for point in own if (point.micro_batch, point.tp) not in known.without]
    return bool(left) and all(job.floor(point) > known.ceiling for point in left)


def _report_left(job: Job, end: int, total: int, left: int) -> None:
    """Progress of the points up to `end`, of which so many are left."""
    job.report("solve", end - left, total)


def _best_first(job: Job, points: list[Point], known: _Progress, report: Callable[[int], None]) -> None:
    """Looks at the point of the least bound until none may be the fastest; until there is a plan, at those of one
    tp degree after the other."""
    waiting: list[tuple[float, Point]] = []
    aside = _by_degree([(known.bounds[point], point) for point in points if point not in known.solved])
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
            found = _looked_at(job, point, stage, known.ceiling)
        except SolverError as error:
            logger.info("%s stays undecided: %s", point, error)
            known.undecided[point] = error
            continue
        if isinstance(found, Candidate):
            known.solved[point] = found
            continue
        known.bounds[point] = max(known.bounds[point], found)
        known.stages[point] = Stage(min(stage + 1, Stage.FULL))
        if stage is not Stage.FULL:
            heapq.heappush(waiting, (known.bounds[point], point))


def _by_degree(bounds: list[tuple[float, Point]]) -> list[list[tuple[float, Point]]]:
    """Points with their bounds by tp degree, that of the least bound first."""
    found: dict[int, list[tuple[float, Point]]] = {}
    for bound, point in sorted(bounds):
        found.setdefault(point.tp, []).append((bound, point))
    return list(found.values())


def _looked_at(job: Job, point: Point, stage: Stage, ceiling: float) -> Candidate | float:
    """A point's optimum, or a bound on it."""
    match stage:
        case Stage.LIGHT:
            return job.light(point, cutoff=ceiling)
        case Stage.RELAXED:
            return job.full(point, is_relaxed=True)
        case Stage.FULL:
            return job.full(point, cutoff=ceiling)
        case _:
            assert_never(stage)


def _certificate(
    best: Candidate, known: _Progress, num_points: int, num_without: int, unsearched: tuple[str, ...]
) -> SolverReport:
    """The best objective against the least bound of any point, and what no point is of."""
    objective = best.solution.objective or 0.0
    solved = known.solved.values()
    undecided = {point: known.bounds[point] for point in known.undecided if known.bounds[point] <= objective}
    bound = min([objective, *undecided.values(), *(c.solution.bound for c in solved if c.solution.bound is not None)])
    is_proven = all(c.solution.status in (Status.OPTIMAL, Status.INFEASIBLE) for c in solved) and not undecided
    left = num_points - len(known.solved) - len(known.too_large) - len(known.too_wide) - len(undecided)
    reasons = {
        BOUNDED: left - num_without,
        NO_LAYOUT: num_without,
        TOO_LARGE: len(known.too_large),
        TOO_WIDE: len(known.too_wide),
    }
    return SolverReport(
        name=best.solution.solver,
        status=Status.OPTIMAL if is_proven else Status.FEASIBLE,
        objective_s=objective,
        bound_s=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        meshes_tried=len(known.solved),
        skipped={reason: count for reason, count in reasons.items() if count},
        unsearched=unsearched or None,
    )


def _unsearched(job: Job, points: list[Point], known: _Progress) -> tuple[str, ...]:
    """What was left out without a bound, or on a bound that takes something for granted."""
    found = list(job.unsearched)
    if known.too_wide:
        shown = ", ".join(
            f"{size} from tp {min(p.tp for p in known.too_wide if p.micro_batch == size)}"
            for size in sorted({point.micro_batch for point in known.too_wide})
        )
        found.append(
            f"tp across nodes beyond a degree whose compute and collectives alone are too slow: micro-batch {shown}"
        )
    if sizes := job.grown_sizes({point.micro_batch for point in points}):
        shown = ", ".join(map(str, sizes))
        found.append(f"micro-batch {shown}: priced as if the code did what it does at smaller ones, on larger tensors")
    return tuple(found)


def _settled(job: Job, best: Candidate) -> Candidate:
    """The best mesh with its ties broken; as it was where that does not come out within the time limit."""
    formulation, solution = best.formulation, best.solution
    assert solution.objective is not None
    problem = formulation.tie_break(solution.objective)
    try:
        chosen = solvers.solve(problem, solver=job.solver, time_limit_s=job.time_limit_s).choice
    except SolverError as error:
        logger.info("ties stay unbroken: %s", error)
        return best
    if chosen is None:
        return best
    price = formulation.problem.price(chosen)
    return replace(best, solution=replace(solution, choice=chosen, objective=price))


def _without_guesses(job: Job, points: list[Point], certificate: SolverReport) -> SolverReport:
    """The certificate with the bound of the problem without what was cut only to end sooner."""
    if not job.guesses:
        return certificate
    job.report("solve", 0, len(points))
    sound = job.changed(guesses={}, spaces={})
    known = _Progress()
    try:
        bound = _certificate(_explore(sound, points, known), known, len(points), 0, ()).bound_s
    except SolverError as error:
        logger.info("the bound without guesses is that of no plan: %s", error)
        bound = min(known.bounds.values(), default=0.0)
    bound = min(certificate.bound_s, bound)
    objective = certificate.objective_s
    gap = (objective - bound) / objective if objective else 0.0
    is_optimal = certificate.status is Status.OPTIMAL and gap <= SAME
    return replace(
        certificate, status=Status.OPTIMAL if is_optimal else Status.FEASIBLE, bound_s=bound, gap=max(0.0, gap)
    )


def put_to_proof(job: Job, traced: Traced, plan: Plan, assignment: Assignment) -> Plan | Counterexample | Mistyped:
    """The plan with the sizes that it replaces, where both halves of the proof hold; else what does not."""
    with planning_for(job.device):
        checked = check_structure(
            traced.model,
            traced.inputs,
            assignment,
            plan,
            loss=job.loss,
            cast=job.cast(traced.units),
            opaques=traced.opaques,
        )
    if isinstance(checked, Counterexample):
        return checked
    return _mistyped(traced.graph, checked, assignment) or checked


def _mistyped(graph: ModelGraph, plan: Plan, assignment: Assignment) -> Mistyped | None:
    """Derives every layout from the plan as its file says it."""
    return typecheck(graph, Plan.from_dict(plan.to_dict()), local_shapes=assignment.local_shapes())


def _culprit(problem: Counterexample | Mistyped) -> str | None:
    """The module that is to run whole: no sharding is to blame for what it does."""
    if isinstance(problem, Mistyped):
        return None
    if problem.culprit is None and not problem.blamed and isinstance(problem.node, Op):
        return None if problem.node.module == LOSS_SCOPE else problem.node.module
    return problem.culprit


def _forbid(
    job: Job,
    found: Counterexample | Mistyped,
    assignment: Assignment,
    formulation: Formulation,
    traced: Traced,
    plan: Plan,
) -> None:
    """Forbids the choices that together make a counterexample, in all like blocks; after many in the code of one class,
    all that shows it slices, which is a guess."""
    tp = formulation.mesh.tp
    if not found.blamed:
        raise ModelError(f"the plan cannot be proven, and no sharding explains it: {found.message}")
    logger.info("counterexample on tp %d: %s", tp, found.message)
    job.cut_messages.append(found.message)

    def check(trial: Assignment) -> Counterexample | Mistyped | None:
        checked = put_to_proof(job, traced, laid_out_as(plan, trial), trial)
        return None if isinstance(checked, Plan) else checked

    for choices in in_like_blocks(traced.graph, conflict_of(found, assignment, formulation, check)):
        if len(choices) > 1:
            job.conflicts.setdefault(tp, []).append(choices)
        for name, group in choices.items() if len(choices) == 1 else ():
            _cut(job.cuts, formulation.space, name, group)
    module = _whose_code(traced.graph, found.node) if isinstance(found, Counterexample) and found.node else LOSS_SCOPE
    code = None if module == LOSS_SCOPE else type(traced.model.get_submodule(module))
    job.counterexamples[tp, code] += 1
    if job.counterexamples[tp, code] < PATIENCE:
        return
    if code is None:
        for name in found.blamed:
            _cut(job.guesses, formulation.space, name, (assignment.strategy(name),))
        return
    whole = f"{PATIENCE} counterexamples in code of {code.__name__}: what that of {module or ROOT} sees stays whole"
    logger.info("tp %d: %s", tp, whole)
    job.cut_messages.append(whole)
    for name, strategy in _sharding_in(module, formulation):
        _cut(job.guesses, formulation.space, name, (strategy,))


def _cut(cuts: Cuts, space: Space, name: str, strategies: Iterable[Strategy]) -> None:
    """Forbids strategies of a decision, wherever it is made."""
    for member in space.members[space.classes[name]]:
        cuts.setdefault((space.tp, member), set()).update(strategies)


def _whose_code(graph: ModelGraph, node: Op | Boundary) -> str:
    """The module whose code ran an op, or called the module that an input enters."""
    is_call = isinstance(node, Boundary) and node.direction is Direction.INPUT
    return parent(graph, node.module) if is_call else node.module


def _sharding_in(module: str, formulation: Formulation) -> Iterator[tuple[str, Strategy]]:
    """Every strategy that shows a module's own code a slice, by decision."""
    space = formulation.space
    return (
        (node.name, strategy)
        for node in given_nodes(space.graph, module)
        for strategy in space.strategies[space.classes[node.name]]
        if shards_in(module, node, strategy)
    )


def _forget_cut(job: Job, known: _Progress) -> None:
    """A cut changes only the optima that chose what it forbids; those of other points, and all bounds, still hold."""
    cut_degrees = {tp for tp, _ in (*job.cuts, *job.guesses)}
    job.spaces = {key: entry for key, entry in job.spaces.items() if key[1] not in cut_degrees}
    for point, candidate in list(known.solved.items()):
        choice, formulation = candidate.solution.choice, candidate.formulation
        if choice is None:
            continue
        is_cut = job.is_cut(point.micro_batch, point.tp)
        conflicts = job.conflicts_in(formulation.space)
        if any(is_cut(name, formulation.strategy(choice, name)) for name in formulation.space.deciders) or not all(
            conflict.is_avoided(choice) for conflict in conflicts
        ):
            del known.solved[point]

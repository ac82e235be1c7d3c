"""Branch and bound over all points, which are meshes with micro-batches; the best plan is proven.

The answer is the optimum over every point, whatever the number of ranks that divide experts: a point names it, and the
solver of that number has its graphs (tpplan.search.expert_degrees). A counterexample to its proof forbids the choices
that together make it (tpplan.search.conflicts), and the search goes on. Points are looked at best first
(tpplan.search.best_first). Guesses, which forbid more than a counterexample shows, may hide a faster plan: the bound is
then that of the problem without them.

The search assumes three things, and the plan notes where it did: that graphs at other micro-batches grow as from the
smallest to the next, and with each size what an op runs (tpplan.search.models.grown_graph,
tpplan.costs.runs.grown_executions; the answer's graph is traced, its ops are run, and both compared); that graphs of
other numbers of ranks that divide experts follow from those of two (tpplan.experts.degree_graph, likewise compared);
and that across nodes more tp ranks are no faster where compute and collectives alone make fewer too slow.
"""

import logging
from collections import Counter
from dataclasses import dataclass, replace

from tpplan.core.errors import SolverError, UsageError
from tpplan.costs.prediction.step_time import Priced, price
from tpplan.layouts.assignment import Assignment
from tpplan.plan.plan import Plan, ProofStatus, SolverReport
from tpplan.plan.proof_hash import as_proven
from tpplan.search.best_first import Progress, explore
from tpplan.search.build_plan import plan_of
from tpplan.search.counterexamples import culprit_of, forbid, put_to_proof
from tpplan.search.models.trace_cache import Traced
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The best candidate as a plan to be proven, with what it is made of."""

    solver: PointSolver
    best: Candidate
    traced: Traced
    assignment: Assignment
    priced: Priced
    certificate: SolverReport

    def plan(self, status: ProofStatus, rounds: int) -> Plan:
        """The plan, with this status of its proof in that many rounds."""
        size = self.best.point.micro_batch
        return plan_of(self.solver, self.assignment, self.priced, size, self.certificate, status, rounds)

    def explained(self, plan: Plan) -> Plan:
        """The plan with reasons of what stays whole, where the request asks for them."""
        if not self.solver.request.is_explained:
            return plan
        return with_reasons(plan, self.solver, self.best, self.traced, self.priced)


def search(solvers: Solvers, points: list[Point], unsearched: tuple[str, ...], *, prove: bool) -> Plan:
    """The fastest plan over all points; with `prove` the fastest that no counterexample refutes.

    Raises InfeasibleError where nothing fits, NotFasterError where what fits is slower than the request's cutoff, and
    SolverError where no plan could be proven in MAX_ROUNDS rounds.
    """
    known, last = Progress(cutoff_s=solvers.request.cutoff_s), ""
    for rounds in range(1, MAX_ROUNDS + 1):
        known, answer = _answered(solvers, points, known, unsearched)
        if not prove:
            return answer.explained(answer.plan(ProofStatus.UNPROVEN, rounds))
        solver, point = answer.solver, answer.best.point
        solver.request.report("prove", 0, _PROOF_PARTS)
        plan = answer.plan(ProofStatus.PROVEN, rounds)
        checked = put_to_proof(solver, answer.traced, plan, answer.assignment)
        if isinstance(checked, Plan):
            return _completed(solvers, points, answer, checked)
        if (culprit := culprit_of(checked)) is not None:
            solver.run_whole(culprit, checked.message)
            points, known = _applicable(solvers, points, point.ep), Progress(cutoff_s=known.cutoff_s)
        else:
            forbid(solver, checked, answer.assignment, answer.best.formulation, answer.traced, plan)
            _forget_cut(solver, known, point.ep)
        last = solver.cuts.messages[-1]
    raise SolverError(
        f"no plan could be proven in {MAX_ROUNDS} rounds; the last: {last}. Pin the modules that such lines name "
        "(--pin PATTERN=replicated), or plan with --tp 1"
    )


def _answered(
    solvers: Solvers, points: list[Point], known: Progress, unsearched: tuple[str, ...]
) -> tuple[Progress, _Answer]:
    """The fastest plan that the ILPs know of, and the progress with which it was found: that given, or a new one where
    it rested on runs of ops that were grown wrong."""
    while True:
        best = explore(solvers, points, known)
        solver = solvers.of(best.point)
        best = known.solved[best.point] = _settled(solver, best)
        is_checked, size = solver.request.is_checked, best.point.micro_batch
        traced = solver.traces.really_traced(size) if is_checked else solver.traces.traced(size)
        if is_checked and not solver.has_grown_right(best):
            solver.distrust_grown()
            known = Progress(cutoff_s=known.cutoff_s)
            continue
        assignment = _assignment(best, traced)
        priced = _priced(solver, assignment, best)
        excess = priced.predicted.peak_memory_bytes + priced.predicted.slack_bytes - solver.request.limit
        if excess > SAME * solver.request.limit:
            _lower_limit(solver, known, best, excess)
            continue
        certificate = _certificate(best, known, points, (*unsearched, *_unsearched(solvers, points, known)))
        return known, _Answer(
            solver=solver, best=best, traced=traced, assignment=assignment, priced=priced, certificate=certificate
        )


def _assignment(best: Candidate, traced: Traced) -> Assignment:
    """The answer of a candidate's ILP, on the graph that was really traced."""
    choice = best.solution.choice
    assert choice is not None
    num_averages = traced.opaques.num_averages(best.formulation.setting.accumulation_steps)
    return replace(best.formulation.assignment(choice, num_averages=num_averages), graph=traced.graph)


def _completed(solvers: Solvers, points: list[Point], answer: _Answer, proven: Plan) -> Plan:
    """A plan that is proven at the planned shapes, with a bound without guesses, reasons, and other shapes."""
    report = answer.solver.request.report
    report("prove", 1, _PROOF_PARTS)
    explained = answer.explained(replace(proven, solver=_without_guesses(solvers, points, answer.certificate)))
    report("prove", 2, _PROOF_PARTS)
    found = as_proven(with_other_shapes(answer.solver.traces, explained, answer.traced, answer.assignment))
    report("prove", _PROOF_PARTS, _PROOF_PARTS)
    return found


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
    may_defer = request.stage is not None and request.stage.index > 0
    priced = price(
        assignment, request.profile, per_node, executor, memory_limit_bytes=request.limit, may_defer=may_defer
    )
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
    assert solution.choice is not None
    problem = formulation.tie_break(solution.choice)
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
        bound = _certificate(explore(sound, points, known), known, points, ()).bound_s
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
    """Forgets the optima with this ep that chose what is now forbidden, but as bounds: nothing that is left is faster.
    Other optima, and all bounds, still hold."""
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
            if candidate.solution.bound is not None:
                known.refuted[point] = candidate.solution.bound
            del known.solved[point]

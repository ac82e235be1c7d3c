"""The search over the number of ranks that divide experts: each degree is a search of its own.

A model whose experts are divided among ep ranks is traced as one of them runs it (tpplan.experts), so that each degree
has its own graphs. The fastest plan of each is found without its proof; the fastest of all is proven. Where its proof
makes it slower than what is known of another degree, that one is looked at again.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpplan.core.errors import IndivisibleError, InfeasibleError, UsageError
from tpplan.core.mesh import divisors
from tpplan.experts.expert_share import Division
from tpplan.experts.find_experts import find_experts
from tpplan.experts.row_wise import why_not_divided
from tpplan.plan.plan import ExpertCall, Plan
from tpplan.search.branch_and_bound import BOUNDED, Progress, explored, search
from tpplan.search.points.mesh_points import Point, applicable, points_of
from tpplan.search.points.options import Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.trace_cache import Traced

logger = logging.getLogger(__name__)

#: what a plan says of degrees that are not looked at unless asked for
ACROSS = "experts over more ranks than a node has"


@dataclass
class _Degree:
    """A degree with its points, what is known of them, and the least seconds that any of its plans may take."""

    solver: PointSolver
    points: list[Point]
    unsearched: tuple[str, ...]
    known: Progress = field(default_factory=Progress)
    least: float = 0.0


def search_degrees(
    solver: PointSolver, points: list[Point], unsearched: tuple[str, ...], options: Options, *, prove: bool
) -> Plan:
    """The fastest plan over all points and degrees. `solver` and `points` are those of models whose ranks have all
    experts. Raises UsageError for an asked degree that no module of experts allows, and what `search` raises."""
    degrees = _divided(solver, points, options) if options.ep != 1 else []
    if options.ep is None and degrees:
        unsearched = (*unsearched, ACROSS)
    if options.ep in (None, 1):
        degrees.append(_Degree(solver, points, unsearched))
    if len(degrees) == 1:
        return search(degrees[0].solver, degrees[0].points, degrees[0].unsearched, prove=prove)
    failures: list[InfeasibleError] = []
    for degree in degrees:
        degree.known.limit = min((other.known.ceiling for other in degrees), default=math.inf)
        try:
            best = explored(degree.solver, degree.points, degree.known)
        except InfeasibleError as error:
            failures.append(error)
            degree.least = math.inf
            continue
        degree.least = degree.known.limit if best is None else degree.known.ceiling
    if all(degree.least == math.inf for degree in degrees):
        raise failures[0]
    left = sorted(degrees, key=lambda degree: (degree.least, degree.points[0].ep if degree.points else 1))
    found: list[Plan] = []
    while left and not any(plan.solver.objective_s <= left[0].least for plan in found):
        degree = left.pop(0)
        if degree.least == math.inf:
            break
        degree.known.limit = math.inf
        found.append(search(degree.solver, degree.points, degree.unsearched, prove=prove, known=degree.known))
    best_plan = min(found, key=lambda plan: plan.solver.objective_s)
    return _certified(best_plan, degrees, left)


def _certified(plan: Plan, degrees: Sequence[_Degree], left: Sequence[_Degree]) -> Plan:
    """The plan whose certificate counts the points of all degrees."""
    own = plan.experts.ep if plan.experts is not None else 1
    others = sum(len(degree.points) for degree in degrees if degree.points[0].ep != own)
    report = plan.solver
    bound = min([report.bound_s, *(degree.least for degree in left)])
    skipped = dict(report.skipped) | {BOUNDED: report.skipped.get(BOUNDED, 0) + others}
    gap = (report.objective_s - bound) / report.objective_s if report.objective_s else 0.0
    return replace(plan, solver=replace(report, bound_s=bound, gap=max(0.0, gap), skipped=skipped))


def _divided(solver: PointSolver, points: list[Point], options: Options) -> list[_Degree]:
    """A search for each degree inside a node that the model's experts allow, the largest first. Raises UsageError where
    `options` asks for one that they do not."""
    traced = solver.traces.traced(min(point.micro_batch for point in points))
    calls = find_experts(traced.graph)
    most = max(point.shard for point in points)
    per_node = solver.request.cluster.gpus_per_node
    shared = math.gcd(per_node, *(call.experts for call in calls.values())) if calls else 1
    asked = (options.ep,) if options.ep is not None else tuple(reversed(divisors(shared)))
    if options.ep is not None and not calls:
        raise UsageError(
            f"--ep {options.ep}: no module is called as experts are (rows [T, D], an index [T, K] of integers and "
            "a weight [T, K], with weights of its own of as many slices): leave --ep out"
        )
    found = []
    for ep in asked:
        if ep == 1 or ep > most:
            continue
        if why := _why_not(traced, calls, ep):
            if options.ep is not None:
                raise UsageError(f"--ep {ep}: {why}")
            logger.info("experts are not divided among %d ranks: %s", ep, why)
            continue
        division = Division(ep, options.expert_imbalance, tuple(calls.items()))
        request = replace(solver.request, subject=replace(solver.request.subject, experts=division))
        traces = replace(solver.traces, subject=request.subject)
        own = replace(solver, request=request, traces=traces, cuts=type(solver.cuts)()).changed(request)
        try:
            of_degree, unsearched = points_of(request, tp=options.tp, fsdp=options.fsdp)
        except IndivisibleError:
            if options.ep is not None:
                raise
            continue
        found.append(_Degree(own, applicable(of_degree, request, traces), unsearched))
    if options.ep is not None and not found and options.ep != 1:
        raise UsageError(
            f"--ep {options.ep}: at most {most} ranks shard the model here; experts are divided among them"
        )
    return found


def _why_not(traced: Traced, calls: Mapping[str, ExpertCall], ep: int) -> str:
    """Why the modules of experts cannot be divided among ep ranks, "" where they can."""
    for name in calls:
        if name in traced.opaques.reasons:
            return f"module {name} runs whole, by its own code: {traced.opaques.reasons[name]}"
    return why_not_divided(traced.model, traced.graph, calls, ep)

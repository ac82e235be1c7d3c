"""The numbers of ranks that experts may be divided among, each with a solver and points of its own.

A model whose experts are divided among ep ranks is traced as one of them runs it (tpplan.experts), so that each number
has its own graphs. Their points are searched together (tpplan.search.branch_and_bound).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from tpplan.core.errors import UsageError
from tpplan.core.mesh import divisors
from tpplan.experts.closed_module import why_not_closed
from tpplan.experts.expert_share import Division
from tpplan.experts.find_experts import called_as_experts, find_experts, not_called_as_experts
from tpplan.experts.row_wise import why_not_divided
from tpplan.plan.plan import ExpertCall
from tpplan.search.models.trace_cache import Traced
from tpplan.search.points.mesh_points import Point, applicable, points_of
from tpplan.search.points.options import Options
from tpplan.search.points.point_solver import PointSolver, Solvers

logger = logging.getLogger(__name__)

#: what a plan says of degrees that are not looked at unless asked for
ACROSS = "experts over more ranks than a node has"


def every_degree(
    solver: PointSolver, points: list[Point], unsearched: tuple[str, ...], options: Options
) -> tuple[Solvers, list[Point], tuple[str, ...]]:
    """The solvers and points of every number of ranks that may divide experts, or of the asked one, and lines on what
    is left out. `solver` and `points` are those of models whose ranks have all experts. Raises UsageError for an asked
    number that no module of experts allows."""
    if options.ep == 1:
        return Solvers({1: solver}), points, unsearched
    degrees = _divided(solver, points, options)
    if options.ep is None:
        degrees[1] = solver, points
        if len(degrees) > 1:
            unsearched = (*unsearched, ACROSS)
    every = [point for _, own in degrees.values() for point in own]
    return Solvers({ep: own for ep, (own, _) in degrees.items()}), every, unsearched


def _divided(solver: PointSolver, points: list[Point], options: Options) -> dict[int, tuple[PointSolver, list[Point]]]:
    """The solver and points of each number of ranks inside a node that the model's experts allow. Raises UsageError
    where `options` asks for one that they do not."""
    traced = solver.traces.traced(min(point.micro_batch for point in points))
    most = max(point.shard for point in points)
    found: dict[int, tuple[PointSolver, list[Point]]] = {}
    for ep, division in divisions_of(traced, options, solver.request.cluster.gpus_per_node, most).items():
        request = replace(solver.request, subject=replace(solver.request.subject, experts=division))
        relatives = tuple(known.traces for known, _ in found.values())[:2]
        traces = replace(solver.traces, subject=request.subject, relatives=relatives)
        own = replace(solver, request=request, traces=traces, cuts=type(solver.cuts)()).changed(request)
        try:
            of_degree, _ = points_of(request, tp=options.tp, fsdp=options.fsdp)
            found[ep] = own, applicable(of_degree, request, traces)
        except UsageError as error:
            if options.ep is not None:
                raise
            logger.info("experts are not divided among %d ranks: %s", ep, error)
    if options.ep is not None and not found:
        raise UsageError(
            f"--ep {options.ep}: at most {most} ranks shard the model here; experts are divided among them"
        )
    return found


def divisions_of(traced: Traced, options: Options, gpus_per_node: int, most: int) -> dict[int, Division]:
    """How a model's experts may be divided among each number of ranks inside a node, above 1 and up to `most`, or among
    the asked number; the largest first, at which the search looks first. Raises UsageError where `options` asks for
    one that the model does not allow."""
    calls = find_experts(traced.graph)
    shared = math.gcd(gpus_per_node, *(call.experts for call in calls.values())) if calls else 1
    asked = (options.ep,) if options.ep is not None else tuple(divisors(shared))
    if options.ep is not None and not calls:
        for name in called_as_experts(traced.graph):
            raise UsageError(f"--ep {options.ep}: module {name}: {why_not_closed(traced.graph, name)}")
        nearest = not_called_as_experts(traced.graph)
        raise UsageError(
            f"--ep {options.ep}: no module is called as experts are (once a forward, with rows [T, D], an index [T, K] "
            "of integers and a weight [T, K]; its weights have at least two dims, with a slice for each expert, and "
            f"are no other module's){'; ' + nearest if nearest else ''}: leave --ep out"
        )
    found: dict[int, Division] = {}
    for ep in reversed(asked):
        if ep == 1 or ep > most:
            continue
        if why := _why_not(traced, calls, ep):
            if options.ep is not None:
                raise UsageError(f"--ep {ep}: {why}")
            logger.info("experts are not divided among %d ranks: %s", ep, why)
            continue
        found[ep] = Division(ep, options.expert_imbalance, tuple(calls.items()))
    return found


def _why_not(traced: Traced, calls: Mapping[str, ExpertCall], ep: int) -> str:
    """Why the modules of experts cannot be divided among ep ranks, "" where they can."""
    for name in calls:
        if name in traced.opaques.reasons:
            return f"module {name} runs whole, by its own code: {traced.opaques.reasons[name]}"
    return why_not_divided(traced.model, traced.graph, calls, ep)

"""The fastest plan of a model in one stage or in several: how many parts hold its stages, and how many stages each.

The model in one stage is solved first. A shape is left out where the floor of the cuts that balance its ranks is not
below the best plan: the least that the operators of its fullest rank take at any tp degree and micro-batch, and what it
waits for while the pipeline fills and drains (tpplan.search.pipelines.stage_loads). The others are tried, those of one
stage a GPU first, which are solved soonest, and of both kinds the least floor first. Then zero-bubble schedules are
tried at the best degrees of either kind, and at those that promise most, which other schedules may make slow.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

from tpplan.core.errors import IndivisibleError, InfeasibleError, UsageError, first_line
from tpplan.core.mesh import divisors
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.shape_search import TOO_SLOW, Search
from tpplan.search.pipelines.solve_stages import UNDEFERRED, bounded, fastest_deferring, saying, why_no_parts
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.planner import solve_request
from tpplan.search.points.options import Batch, Cluster, Options, Progress
from tpplan.search.points.request import Request

logger = logging.getLogger(__name__)

#: stages a part that are tried
VIRTUAL_STAGES = (1, 2, 4, 8)
#: shapes of several stages on a GPU that are solved, those of the least floors
MOST_SHAPES = 8


def solve_any(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    micro_batch: int | None = None,
    options: Options,
    prove: bool = True,
    progress: Progress | None = None,
) -> Plan | PipelinePlan:
    """The fastest plan, as predicted, in one stage or in several. Its `unsearched` says which numbers of stages were
    left out without a bound. Raises what `solve` raises where no plan fits, in however many stages."""
    cluster = replace(cluster, profile=cluster.load_profile())
    batch, reuse = Batch(global_batch, micro_batch, seq_len), Reuse()
    request = Request.of(build_model, example_inputs, cluster, batch, options, progress)
    whole: Plan | None = None
    with suppress(InfeasibleError):
        whole = solve_request(replace(request, is_explained=False), options, reuse, prove=prove)
    solver = StageSolver(
        build_model=build_model,
        example_inputs=example_inputs,
        cluster=cluster,
        batch=batch,
        options=replace(options, all_gpus=True),
        reuse=reuse,
    )
    best, left, bound_s = _fastest(solver, whole, progress)
    if best is None:
        return saying(whole or solve_request(request, options, reuse, prove=prove), (TOO_SLOW, *left))
    search, degrees = best
    found = replace(search, progress=progress).found(prove=prove, degrees=degrees)
    if whole is not None and whole.predicted.step_time_s <= found.predicted.step_time_s:
        return saying(whole, (TOO_SLOW, *left))
    unsearched = whole.solver.unsearched or () if whole is not None else ()
    left = (*left, *(f"without stages: {line}" for line in unsearched))
    return saying(bounded(found, bound_s), left if found.virtual_stages > 1 else (TOO_SLOW, *left))


def _fastest(
    solver: StageSolver, whole: Plan | None, progress: Progress | None
) -> tuple[tuple[Search, Degrees] | None, tuple[str, ...], float]:
    """The search of the fastest step and its degrees, None where the whole model is faster; lines on shapes that
    were left out or that cannot be, one for each kind of reason; and seconds that no step of any shape is below."""
    least = whole.predicted.step_time_s if whole is not None else math.inf
    bounds = [math.inf if whole is None else whole.solver.bound_s]
    why_not: dict[type[Exception], str] = {}
    searches: list[tuple[float, PipelineShape, Search]] = []
    for shape in _shapes(solver.cluster):
        search = Search(solver=solver, shape=shape, progress=None)
        try:
            searches.append((search.floor(least), shape, search))
        except (IndivisibleError, InfeasibleError, UsageError) as error:
            why_not.setdefault(type(error), first_line(error))
    best, left = _of_own_schedules(searches, least, why_not, progress)
    fastest: tuple[Search, Degrees] | None = None
    if best:
        least, *_ = best[0]
        fastest = best[0][1:]
    alone = [search for _, shape, search in searches if shape.virtual_stages == 1]
    if (deferred := fastest_deferring([own[1:] for own in best], alone, least)) is not None:
        least, fastest = deferred[0], deferred[1:]
    said = tuple(f"{shape.option}, whose floor is higher than those of {MOST_SHAPES} others" for shape in left)
    said += tuple(f"stages that cannot be had, such as {why}" for why in why_not.values())
    said += (UNDEFERRED, f"other than {', '.join(map(str, VIRTUAL_STAGES))} stages on a GPU")
    bounds += [search.bound_of_schedules(least) for _, _, search in searches]
    return fastest, said, min(bounds)


def _of_own_schedules(
    searches: list[tuple[float, PipelineShape, Search]],
    least: float,
    why_not: dict[type[Exception], str],
    progress: Progress | None,
) -> tuple[list[tuple[float, Search, Degrees]], list[PipelineShape]]:
    """The fastest step by 1F1B and the fastest of interleaved schedules, each with its seconds, search and degrees,
    where it takes less than `least`, the faster one first; and the shapes that were not tried. `searches` have floors;
    to `why_not` is added why a shape has no plan."""
    best: dict[bool, tuple[float, Search, Degrees]] = {}
    tried, left = 0, list[PipelineShape]()
    searches.sort(key=lambda one: (one[1].virtual_stages > 1, *one[:2]))
    for done, (floor_s, shape, search) in enumerate(searches):
        if progress is not None:
            progress("solve", done, len(searches))
        if floor_s >= least:
            continue
        if tried == MOST_SHAPES:
            left.append(shape)
            continue
        try:
            found = search.best(least)
            tried += shape.virtual_stages > 1
        except InfeasibleError as error:
            logger.info("%s: %s", shape.option, error)
            why_not.setdefault(type(error), first_line(error))
            continue
        if found is not None:
            least, best[shape.virtual_stages > 1] = found[0], (found[0], search, found[1])
    return sorted(best.values(), key=itemgetter(0)), left


def _shapes(cluster: Cluster) -> Iterator[PipelineShape]:
    """All shapes of which the parts divide the GPUs."""
    for parts in divisors(cluster.gpus)[1:]:
        if not why_no_parts(parts, cluster):
            for virtual in VIRTUAL_STAGES:
                yield PipelineShape(parts=parts, virtual_stages=virtual)

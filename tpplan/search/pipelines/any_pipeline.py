"""The fastest plan of a model in one stage or in several: how many parts hold its stages, and how many stages each.

The model in one stage is solved first. A shape is left out where the floor of the cuts that balance its ranks is not
below the best plan: the least that the operators of its fullest rank take at any tp degree and micro-batch, and what it
waits for while the pipeline fills and drains (tpplan.search.pipelines.stage_loads). The others are tried, those of one
stage a GPU first, which are solved soonest, and of both kinds the least floor first. Of the best of either kind it is
then tried whether a zero-bubble schedule is faster.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tpplan.core.errors import IndivisibleError, InfeasibleError, UsageError, first_line
from tpplan.core.mesh import divisors
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.solve_stages import TOO_SLOW, UNDEFERRED, Search, saying, why_no_parts
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
    best, left = _fastest(solver, whole, progress)
    if best is None:
        return saying(whole or solve_request(request, options, reuse, prove=prove), (TOO_SLOW, *left))
    shape, degrees = best
    found = Search(solver=solver, shape=shape, progress=progress).found(prove=prove, degrees=degrees)
    if whole is not None and whole.predicted.step_time_s <= found.predicted.step_time_s:
        return saying(whole, (TOO_SLOW, *left))
    return saying(found, left)


def _fastest(
    solver: StageSolver, whole: Plan | None, progress: Progress | None
) -> tuple[tuple[PipelineShape, Degrees] | None, tuple[str, ...]]:
    """The shape with the fastest step and its degrees, None where the whole model is faster; and lines on shapes that
    were left out or that cannot be, one for each kind of reason."""
    least = whole.predicted.step_time_s if whole is not None else float("inf")
    best: dict[bool, tuple[Search, float, Degrees]] = {}
    why_not: dict[type[Exception], str] = {}
    searches: list[tuple[float, PipelineShape, Search]] = []
    for shape in _shapes(solver.cluster):
        search = Search(solver=solver, shape=shape, progress=None)
        try:
            searches.append((search.floor(least), shape, search))
        except (IndivisibleError, InfeasibleError, UsageError) as error:
            why_not.setdefault(type(error), first_line(error))
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
            least, best[shape.virtual_stages > 1] = found[0], (search, *found)
    said = tuple(f"{shape.option}, whose floor is higher than those of {MOST_SHAPES} others" for shape in left)
    said += tuple(f"stages that cannot be had, such as {why}" for why in why_not.values())
    said += (UNDEFERRED, f"other than {', '.join(map(str, VIRTUAL_STAGES))} stages on a GPU")
    return _with_schedule([best[key] for key in sorted(best, key=lambda key: best[key][1])], least), said


def _with_schedule(
    found: Sequence[tuple[Search, float, Degrees]], least: float
) -> tuple[PipelineShape, Degrees] | None:
    """The shape, with its schedule, and the degrees of the fastest step of those found, the fastest first, or of their
    like with a zero-bubble schedule."""
    best: tuple[PipelineShape, Degrees] | None = None
    for search, _, degrees in found:
        best = best or (search.shape, degrees)
        deferred = search.deferred(degrees, least)
        if deferred is not None:
            least, best = deferred[0], deferred[1:]
    return best


def _shapes(cluster: Cluster) -> Iterator[PipelineShape]:
    """All shapes of which the parts divide the GPUs."""
    for parts in divisors(cluster.gpus)[1:]:
        if not why_no_parts(parts, cluster):
            for virtual in VIRTUAL_STAGES:
                yield PipelineShape(parts=parts, virtual_stages=virtual)

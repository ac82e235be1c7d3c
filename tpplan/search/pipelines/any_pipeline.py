"""The fastest plan of a model in one stage or in several: how many parts hold its stages, and how many stages each.

The model in one stage is solved first. Then the degrees of all shapes and schedules that may be faster are looked at
best first (tpplan.search.pipelines.most_promising).
"""

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from tpplan.core.errors import IndivisibleError, InfeasibleError, UsageError, first_line
from tpplan.core.mesh import divisors
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.pipelines.most_promising import Best, fastest, plan_of
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.shape_search import TOO_SLOW, Search
from tpplan.search.pipelines.solve_stages import UNDEFERRED, bounded, deferring, saying, why_no_parts
from tpplan.search.pipelines.stage_solver import StageSolver
from tpplan.search.planner import solve_request
from tpplan.search.points.options import Batch, Cluster, Options, Progress
from tpplan.search.points.request import Request

logger = logging.getLogger(__name__)

#: stages a part that are tried
VIRTUAL_STAGES = (1, 2, 4, 8)


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
    found = plan_of(best, prove=prove, progress=progress)
    if whole is not None and whole.predicted.step_time_s <= found.predicted.step_time_s:
        return saying(whole, (TOO_SLOW, *left))
    unsearched = whole.solver.unsearched or () if whole is not None else ()
    left = (*left, *(f"without stages: {line}" for line in unsearched))
    return saying(bounded(found, bound_s), left if found.virtual_stages > 1 else (TOO_SLOW, *left))


def _fastest(
    solver: StageSolver, whole: Plan | None, progress: Progress | None
) -> tuple[Best | None, tuple[str, ...], float]:
    """The fastest step, None where the whole model is faster; lines on shapes that cannot be, one for each kind of
    reason; and seconds that no step of any shape is below."""
    least = whole.predicted.step_time_s if whole is not None else math.inf
    bounds = [math.inf if whole is None else whole.solver.bound_s]
    why_not: dict[type[Exception], str] = {}
    searches: list[Search] = []
    for shape in _shapes(solver.cluster):
        search = Search(solver=solver, shape=shape, progress=None)
        try:
            search.floors(least)
        except (IndivisibleError, InfeasibleError, UsageError) as error:
            why_not.setdefault(type(error), first_line(error))
            continue
        searches.append(search)
    searches += [own for search in searches for own in deferring(search)]
    best: Best | None = None
    try:
        best = fastest(searches, least, progress=progress)
    except InfeasibleError as error:
        why_not.setdefault(type(error), first_line(error))
    least = best.seconds if best is not None else least
    said = tuple(f"stages that cannot be had, such as {why}" for why in why_not.values())
    said += (f"other than {', '.join(map(str, VIRTUAL_STAGES))} stages on a GPU",)
    said += (UNDEFERRED,) if solver.options.compile else ()
    bounds += [search.bound(least) for search in searches]
    return best, said, min(bounds)


def _shapes(cluster: Cluster) -> Iterator[PipelineShape]:
    """All shapes of which the parts divide the GPUs."""
    for parts in divisors(cluster.gpus)[1:]:
        if not why_no_parts(parts, cluster):
            for virtual in VIRTUAL_STAGES:
                yield PipelineShape(parts=parts, virtual_stages=virtual)

"""The plan of a model in stages: where it is cut, the mesh of a stage, the micro-batch, and the plan of each stage.

Each stage is a model of its own (tpplan.stages), which `solve_request` solves and proves. The best plan of the asked
shape is found (tpplan.search.pipelines.most_promising), unless a schedule is asked for with a zero-bubble schedule too.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tpplan.core.errors import IndivisibleError, UsageError
from tpplan.core.mesh import divisors
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.pipelines.most_promising import fastest, plan_of
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.shape_search import MISLED, Search, why_not_scheduled
from tpplan.search.pipelines.stage_solver import StageSolver
from tpplan.search.points.options import Batch, Cluster, Options, Progress

logger = logging.getLogger(__name__)

#: what a plan says of a schedule that was not asked for
UNDEFERRED = "zero-bubble schedules, which do not run with --compile"


def solve_stages(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    stages: int,
    virtual_stages: int = 1,
    schedule: Schedule | None = None,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    micro_batch: int | None = None,
    options: Options,
    prove: bool = True,
    progress: Progress | None = None,
) -> PipelinePlan:
    """The fastest plan, as predicted, of a model in stages on equal parts of all GPUs: `stages` parts, each of which
    has `virtual_stages` stages. One a part is scheduled by 1F1B, more are interleaved; by default a zero-bubble
    schedule takes the place of either where a step is then shorter.

    Raises UsageError for a number of parts that does not divide the GPUs, for which the model has too few places to be
    cut (with the reasons), or that the schedule cannot run, ModelError, ProfileError, SolverError, IndivisibleError
    where no mesh has as many micro-batches as the schedule needs, and InfeasibleError where no plan fits.
    """
    shape = PipelineShape(parts=stages, virtual_stages=virtual_stages, is_zero_bubble=schedule is Schedule.ZERO_BUBBLE)
    if problem := why_no_parts(stages, cluster) or why_not_scheduled(schedule, shape, options):
        raise UsageError(problem)
    cluster = replace(cluster, profile=cluster.load_profile())
    solver = StageSolver(
        build_model=build_model,
        example_inputs=example_inputs,
        cluster=cluster,
        batch=Batch(global_batch, micro_batch, seq_len),
        options=replace(options, all_gpus=True),
    )
    search = Search(solver=solver, shape=shape, progress=progress)
    searches = [search] if schedule is not None else [search, *deferring(search)]
    best = fastest(searches, progress=progress)
    assert best is not None, "no step is slower than infinitely many seconds"
    bound_s = min(own.bound(best.seconds) for own in searches)
    plan = bounded(plan_of(best, prove=prove), bound_s)
    return saying(plan, (UNDEFERRED,)) if schedule is None and options.compile else plan


def deferring(search: Search) -> Iterator[Search]:
    """Yields the search for a plan with a zero-bubble schedule in the place of another's, where such can run."""
    found = search.deferring
    with suppress(IndivisibleError):
        if found is not None and found.degrees():
            yield found


P = TypeVar("P", Plan, PipelinePlan)
#: relative difference up to which a bound and a step are equal: loads of balanced stages are known to 1e-6
_ROUNDING = 1e-5


def bounded(plan: PipelinePlan, bound_s: float) -> PipelinePlan:
    """The plan with seconds that no step is below; without any, a bound of 0, where the bound is of graphs that the
    code turned out not to have, or contradicts the plan, which is logged."""
    step_s = plan.predicted.step_time_s
    if bound_s > step_s * (1 + _ROUNDING):
        logger.warning("a step of %g s is below the bound of %g s: the plan gets no bound", step_s, bound_s)
        return plan
    if MISLED in (plan.solver.unsearched or ()):
        return plan
    bound_s = min(bound_s, step_s)
    return replace(plan, solver=replace(plan.solver, bound_s=bound_s, gap=1 - bound_s / step_s))


def saying(plan: P, left: tuple[str, ...]) -> P:
    """The plan with more of what was not searched."""
    return replace(plan, solver=replace(plan.solver, unsearched=(*(plan.solver.unsearched or ()), *left)))


def why_no_parts(parts: int, cluster: Cluster) -> str:
    """Why the GPUs cannot be divided into parts for stages, with what to do; "" where they can."""
    if cluster.gpus == 1:
        return f"--pp {parts}: a model in stages needs several GPUs, and there is 1: leave --pp out"
    if parts < 2 or cluster.gpus % parts:
        others = ", ".join(map(str, divisors(cluster.gpus)[1:]))
        return f"--pp {parts} does not divide {cluster.gpus} GPUs: take one of {others}"
    own, per_node = cluster.gpus // parts, cluster.gpus_per_node
    if own % per_node and per_node % own:
        return (
            f"--pp {parts}: {own} GPUs a stage are neither a part of a node of {per_node} nor whole nodes: take "
            "another number of stages"
        )
    return ""

"""The plan of the best mesh, with its certificate."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tpplan.core.graph import LEFT_AT, ModelGraph
from tpplan.core.layout import R
from tpplan.core.name_patterns import ROOT
from tpplan.costs.step.price_plan import with_repeats
from tpplan.costs.step.recompute_cost import rerun
from tpplan.costs.step.solved_step import Expanded
from tpplan.layouts.rules import OPAQUE
from tpplan.plan.compress_names import blocks_table, by_pattern, names_written, rename_parameter
from tpplan.plan.model_fingerprint import parameters_fingerprint
from tpplan.plan.plan import (
    SCHEMA_VERSION,
    BatchPlan,
    BoundaryPlan,
    ClusterPlan,
    Compile,
    Fingerprints,
    MeshPlan,
    OpaquePlan,
    Plan,
    ProofReport,
    ProofStatus,
    Recompute,
    SolverReport,
)
from tpplan.search.job import Candidate, Job
from tpplan.search.trace_cache import Traced
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import path_of

#: places that a note names
_SHOWN = 3


def plan_of(
    job: Job,
    expanded: Expanded,
    best: Candidate,
    certificate: SolverReport,
    status: ProofStatus,
    rounds: int,
) -> Plan:
    """The plan of the best mesh, certified over all of them."""
    mesh, traced = best.formulation.mesh, job.traced(best.point.micro_batch)
    graph = traced.graph
    empty = BoundaryPlan(inputs={}, outputs={})
    parameters = expanded.parameter_plans()
    rows = {name: (plan.shape, plan.trainable) for label, plan in parameters.items() for name in (label, *plan.aliases)}
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        tpplan_version=_version(),
        torch_version=torch.__version__.partition("+")[0],
        cluster=ClusterPlan(
            gpus=job.cluster.gpus,
            gpus_per_node=job.cluster.gpus_per_node,
            profile=job.profile.name,
            profile_fingerprint=job.profile.fingerprint,
        ),
        mesh_degrees=MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp),
        batch=BatchPlan(
            global_batch=job.batch.global_batch,
            micro_batch=best.point.micro_batch,
            accumulation_steps=best.formulation.setting.accumulation_steps,
            seq_len=job.batch.seq_len,
        ),
        precision=job.precision,
        optimizer=job.optimizer,
        blocks=blocks_table(graph),
        parameters=by_pattern(graph, parameters, rename_parameter),
        boundaries=by_pattern(graph, expanded.boundary_plans(), lambda plan, rename: plan, empty),
        outputs=expanded.outputs(),
        sizes={},
        losses=by_pattern(graph, expanded.sharded_losses(), lambda count, rename: count),
        draws=tuple(by_pattern(graph, dict.fromkeys(expanded.drawing_modules(), ""), lambda own, rename: own)),
        recompute=by_pattern(graph, expanded.recomputed(), lambda own, rename: own, Recompute.NONE),
        compile=Compile.BLOCKS if job.is_compiled else Compile.NONE,
        fsdp=replace(expanded.fsdp_plan(), units=()) if traced.opaques.untouched else expanded.fsdp_plan(),
        collectives=expanded.collectives(),
        predicted=expanded.prediction(),
        solver=certificate,
        fingerprints=Fingerprints(
            parameters=parameters_fingerprint(rows), graph=graph.fingerprint, inputs=input_shapes(traced.inputs)
        ),
        proof=ProofReport(
            status=status,
            rounds=rounds,
            cuts=tuple(job.cut_messages),
            assumptions=traced.assumptions,
            device=str(job.device),
            calls=_calls(graph) if status is ProofStatus.PROVEN else None,
        ),
        unruled_ops=expanded.unruled_ops(),
        opaque=_opaque_plans(traced, expanded) or None,
        untouched=traced.opaques.untouched or None,
        notes=(*traced.notes, *_left_whole(expanded), *expanded.guesses()) or None,
    )
    if not plan.recompute:
        return plan
    again = rerun(expanded.formulation, plan.recomputed_modules())
    return replace(plan, collectives=with_repeats(plan.collectives, again, plan))


def _left_whole(expanded: Expanded) -> Iterator[str]:
    """What is said of tensors that the forward leaves behind and that are kept whole."""
    left = [path for path, value in expanded.graph.outputs if path.startswith(LEFT_AT) and expanded.layout(value) == R]
    if left:
        shown = ", ".join(path.removeprefix(LEFT_AT) for path in left[:_SHOWN])
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        yield (
            f"whole, as outputs are, is what the forward leaves at {shown}{more}; what nobody reads with its gradient "
            "may be sharded where unused_outputs names it, or its code detaches it"
        )


def laid_out_as(plan: Plan, expanded: Expanded) -> Plan:
    """A plan with the layouts of another assignment of its graph; what it costs, and sizes, are not made anew."""
    graph, empty = expanded.graph, BoundaryPlan(inputs={}, outputs={})
    return replace(
        plan,
        parameters=by_pattern(graph, expanded.parameter_plans(), rename_parameter),
        boundaries=by_pattern(graph, expanded.boundary_plans(), lambda own, rename: own, empty),
        outputs=expanded.outputs(),
        sizes={},
        losses=by_pattern(graph, expanded.sharded_losses(), lambda count, rename: count),
        draws=tuple(by_pattern(graph, dict.fromkeys(expanded.drawing_modules(), ""), lambda own, rename: own)),
    )


def _calls(graph: ModelGraph) -> dict[str, tuple[str, ...]] | None:
    """Digests by pattern: layers of a block share those of all; one that stood for others says theirs."""
    found: dict[str, set[str]] = {}
    for name, digests in graph.calls.items():
        for own in names_written(graph, name):
            found.setdefault(own or ROOT, set()).update(digests)
    return {name: tuple(sorted(digests)) for name, digests in sorted(found.items())} or None


def _opaque_plans(traced: Traced, expanded: Expanded) -> dict[str, OpaquePlan]:
    """Modules that run whole, by pattern, under all their names."""
    observed, seconds = traced.opaques.by_key(), expanded.opaque_seconds()
    bodies = {op.module: observed[str(op.args[2])].bodies for op in traced.graph.ops if op.target == OPAQUE}
    plans = {
        name or ROOT: OpaquePlan(reason=reason, seconds=seconds.get(name, 0.0), bodies=bodies.get(name, ()))
        for name, reason in traced.opaques.reasons.items()
    }
    return by_pattern(traced.graph, plans, lambda plan, rename: plan)


def input_shapes(inputs: Any) -> dict[str, str]:
    """Shapes of the traced inputs: {"tokens": "int64[1, 4096]"}."""
    leaves = pytree.tree_flatten_with_path(inputs)[0]
    return {
        path_of(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _version() -> str:
    try:
        return version("tpplan")
    except PackageNotFoundError:
        return "0+checkout"

"""Builds the Plan of an assignment, with its price and the search's certificate."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch

from tpplan.core.files import tpplan_version
from tpplan.core.graph import LEFT_AT, ModelGraph, enclosing
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.core.layout import Layout, R
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import format_bytes
from tpplan.costs.prediction.memory_replay import bytes_between
from tpplan.costs.prediction.step_time import Priced
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.kernels import dtype_name
from tpplan.experts.expert_share import Division
from tpplan.experts.row_wise import ROW_WISE
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.plan_sections import (
    boundary_plans,
    buffer_plans,
    drawing_modules,
    fsdp_plan,
    outputs,
    parameter_plans,
    row_bags,
    sharded_losses,
)
from tpplan.layouts.rules import OPAQUE
from tpplan.layouts.rules.indexing import SENT
from tpplan.plan.compress_names import blocks_table, by_pattern, names_written, rename_buffer, rename_parameter
from tpplan.plan.model_fingerprint import parameters_fingerprint
from tpplan.plan.parts import EXPERT_PARALLEL
from tpplan.plan.plan import (
    SCHEMA_VERSION,
    BatchPlan,
    BoundaryPlan,
    BufferPlan,
    ClusterPlan,
    Compile,
    ExpertsPlan,
    Fingerprints,
    MeshPlan,
    OpaquePlan,
    ParameterPlan,
    Plan,
    ProofReport,
    ProofStatus,
    Recompute,
    RequestPlan,
    SizePlan,
    SolverReport,
    StagePlan,
)
from tpplan.search.models.trace_cache import Traced
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.rank_notes import Parts, listed, notes_on_rows
from tpplan.search.tp_shares import tp_shares
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import path_of


def plan_of(
    solver: PointSolver,
    assignment: Assignment,
    priced: Priced,
    micro_batch: int,
    certificate: SolverReport,
    status: ProofStatus,
    rounds: int,
) -> Plan:
    """The plan of an assignment with its price and the search's certificate."""
    mesh, traced, request = assignment.mesh, solver.traces.traced(micro_batch), solver.request
    graph = traced.graph
    parameters = parameter_plans(assignment)
    rows = {name: (plan.shape, plan.trainable) for label, plan in parameters.items() for name in (label, *plan.aliases)}
    return Plan(
        schema_version=SCHEMA_VERSION,
        tpplan_version=tpplan_version(),
        torch_version=torch.__version__.partition("+")[0],
        cluster=ClusterPlan(
            gpus=request.cluster.gpus,
            gpus_per_node=request.cluster.gpus_per_node,
            profile=request.profile.name,
            profile_fingerprint=request.profile.fingerprint,
        ),
        mesh_degrees=MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp),
        batch=BatchPlan(
            global_batch=request.batch.global_batch,
            micro_batch=micro_batch,
            accumulation_steps=assignment.accumulation_steps,
            seq_len=request.batch.seq_len,
        ),
        precision=assignment.precision,
        optimizer=assignment.optimizer,
        blocks=blocks_table(graph),
        **_layouts(assignment),
        recompute=by_pattern(graph, assignment.recomputed, lambda own, rename: own, Recompute.NONE),
        compile=Compile.BLOCKS if assignment.is_compiled else Compile.NONE,
        fsdp=fsdp_plan(assignment),
        collectives=priced.collectives,
        predicted=priced.predicted,
        solver=certificate,
        fingerprints=Fingerprints(
            parameters=parameters_fingerprint(rows), graph=graph_fingerprint(graph), inputs=input_shapes(traced.inputs)
        ),
        proof=ProofReport(
            status=status,
            rounds=rounds,
            cuts=tuple(solver.cuts.messages),
            assumptions=traced.assumptions,
            device=str(request.subject.device),
            calls=_calls(graph) if status is ProofStatus.PROVEN else None,
        ),
        unruled_ops=priced.unruled_ops,
        opaque=_opaque_plans(traced, priced.opaque_seconds) or None,
        untouched=traced.opaques.untouched or None,
        tp_shares=tp_shares(assignment, solver.traces.reuse.executor, priced.op_seconds),
        notes=_notes(traced, assignment, request.unused_outputs, priced) or None,
        request=RequestPlan(pins={pin.pattern: pin.style_text for pin in request.pins}),
        experts=_experts(assignment, priced, request.subject.experts),
        stage=_measured(request.stage, assignment, priced, solver.traces.reuse.executor),
    )


def _notes(traced: Traced, assignment: Assignment, unused: Collection[str], priced: Priced) -> tuple[str, ...]:
    on_outputs = _notes_on_outputs(assignment, unused)
    return *traced.notes, *on_outputs, *notes_on_rows(traced, Parts.of(assignment)), *priced.notes


def _measured(stage: StagePlan | None, assignment: Assignment, priced: Priced, executor: Executor) -> StagePlan | None:
    """The stage with the bytes that it holds while others run, and with what a zero-bubble schedule would defer."""
    if stage is None:
        return None
    kept, resting = bytes_between(assignment, executor)
    return replace(
        stage,
        beside_bytes=assignment.beside_bytes,
        kept_bytes=kept,
        resting_bytes=resting,
        deferred=priced.deferred,
    )


def _experts(assignment: Assignment, priced: Priced, division: Division | None) -> ExpertsPlan | None:
    """The section on modules whose experts are divided."""
    if division is None:
        return None
    graph, modules = assignment.graph, dict(division.calls)
    own = [op for op in graph.ops if any(module in modules for module in enclosing(op.module))]
    growing = [op for op in own if any(graph.values[name].varying for name in (*op.operands, *op.results))]
    kernels = sum(priced.op_seconds[op.name] for op in growing)
    return ExpertsPlan(
        ep=division.ep,
        imbalance=division.imbalance,
        modules=by_pattern(graph, modules, lambda call, rename: call),
        check=ROW_WISE,
        rows=max(graph.values[op.results[0]].shape[0] for op in own if op.target == SENT),
        seconds_of_rows=kernels + priced.predicted.time_s.get(EXPERT_PARALLEL, 0.0),
    )


def _notes_on_outputs(assignment: Assignment, unused: Collection[str]) -> Iterator[str]:
    yield from _left_whole(assignment)
    yield from _left_divided(assignment, unused)
    yield from _returned_whole(assignment, unused)


def _left_whole(assignment: Assignment) -> Iterator[str]:
    """Yields a note on tensors that the forward leaves on modules and that stay whole."""
    left = [
        path.removeprefix(LEFT_AT)
        for path, value in assignment.graph.outputs
        if path.startswith(LEFT_AT) and assignment.layout(value) == R
        if assignment.graph.values[value].carries_gradient
    ]
    if left:
        yield (
            f"tensors that the forward leaves at {listed(left)} stay whole, as outputs do; where nobody reads one "
            "with its gradient, name it in unused_outputs or detach it, so that it may be sharded"
        )


def _returned_whole(assignment: Assignment, unused: Collection[str]) -> Iterator[str]:
    """Yields a note on tensors that the model returns beside its loss, and that every tp rank therefore has whole."""
    graph = assignment.graph
    found = {path or "the output": value for path, value in graph.returned.items() if path not in unused}
    values = {path: graph.values[value] for path, value in found.items() if assignment.layout(value) == R}
    whole = {path: value for path, value in values.items() if value.num_elements > 1}
    if assignment.tp == 1 or not whole:
        return
    size = format_bytes(sum(value.num_bytes for value in whole.values()))
    yield (
        f"the model returns {listed(list(whole))}: {size} for a micro-batch, whole on every rank, so that what makes "
        "them is gathered or not divided at all; where training reads none of them, name them in unused_outputs, or "
        "return them no longer (a cache: use_cache=False)"
    )


def _left_divided(assignment: Assignment, unused: Collection[str]) -> Iterator[str]:
    """Yields a note on outputs in passing that stay divided, unless they were declared unused."""
    found = assignment.graph.returned_in_passing.items()
    divided = [path for path, value in found if path not in unused and assignment.layout(value) != R]
    if divided:
        yield (
            f"the outputs {listed(divided)}, which the loss does not read, stay divided: forward returns them as "
            "DTensors, whose full_tensor() is the whole"
        )


def laid_out_as(plan: Plan, assignment: Assignment) -> Plan:
    """The plan with the layouts of another assignment of its graph; its prices stay, its sizes are dropped."""
    return replace(plan, **_layouts(assignment))


class _Layouts(TypedDict):
    """The sections of a plan that layouts decide, like layers under one pattern."""

    parameters: Mapping[str, ParameterPlan]
    boundaries: Mapping[str, BoundaryPlan]
    outputs: Mapping[str, Layout]
    sizes: Mapping[str, tuple[SizePlan, ...]]
    losses: Mapping[str, int]
    draws: tuple[str, ...]
    buffers: Mapping[str, BufferPlan] | None
    bags: Mapping[str, tuple[int, ...]] | None


def _layouts(assignment: Assignment) -> _Layouts:
    graph, empty = assignment.graph, BoundaryPlan(inputs={}, outputs={})
    return {
        "parameters": by_pattern(graph, parameter_plans(assignment), rename_parameter),
        "boundaries": by_pattern(graph, boundary_plans(assignment), lambda own, rename: own, empty),
        "outputs": outputs(assignment),
        "sizes": {},  # the proof finds them
        "losses": by_pattern(graph, sharded_losses(assignment), lambda count, rename: count),
        "draws": tuple(by_pattern(graph, dict.fromkeys(drawing_modules(assignment), ""), lambda own, rename: own)),
        "buffers": by_pattern(graph, buffer_plans(assignment), rename_buffer) or None,
        "bags": by_pattern(graph, row_bags(assignment), lambda counts, rename: counts) or None,
    }


def _calls(graph: ModelGraph) -> dict[str, tuple[str, ...]] | None:
    """Digests of calls by pattern: the layers of a block share all digests of the block's layers."""
    found: dict[str, set[str]] = {}
    for name, digests in graph.calls.items():
        for own in names_written(graph, name):
            found.setdefault(own or ROOT, set()).update(digests)
    return {name: tuple(sorted(digests)) for name, digests in sorted(found.items())} or None


def _opaque_plans(traced: Traced, seconds: Mapping[str, float]) -> dict[str, OpaquePlan]:
    """Modules that run whole, by pattern; `seconds` are by module."""
    observed = traced.opaques.by_key()
    bodies = {op.module: observed[str(op.args[2])].bodies for op in traced.graph.ops if op.target == OPAQUE}
    plans = {
        name or ROOT: OpaquePlan(reason=reason, seconds=seconds.get(name, 0.0), bodies=bodies.get(name, ()))
        for name, reason in traced.opaques.reasons.items()
    }
    return by_pattern(traced.graph, plans, lambda plan, rename: plan)


def input_shapes(inputs: Any) -> dict[str, str]:
    """Dtypes and shapes of the traced inputs: {"tokens": "int64[1, 4096]"}."""
    leaves = pytree.tree_flatten_with_path(inputs)[0]
    return {
        path_of(path): f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }

"""Plans written by hand: what a test is about, with the rest filled in."""

from collections.abc import Mapping

import torch
from torch import nn

from tpplan.core.layout import ROWS, R, parse_conversion, parse_layout
from tpplan.core.mesh import Mesh
from tpplan.plan.model_fingerprint import parameters_fingerprint
from tpplan.plan.plan import (
    BatchPlan,
    BoundaryPlan,
    ClusterPlan,
    Compile,
    CrossingPlan,
    Fingerprints,
    FsdpPlan,
    MeshPlan,
    ParameterPlan,
    Pass,
    Plan,
    Precision,
    Prediction,
    ProofReport,
    ProofStatus,
    Recompute,
    SolverReport,
)
from tpplan.solvers.problem import Status

#: a parameter's placement and how its owner reads it; with a mapping, how each module reads it
Parameters = Mapping[str, tuple[str, str | Mapping[str, str]]]
#: conversions of a module's inputs and of its outputs
Boundaries = Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]


def handmade_plan(
    model: nn.Module,
    mesh: Mesh,
    *,
    parameters: Parameters | None = None,
    boundaries: Boundaries | None = None,
    outputs: Mapping[str, str] | None = None,
    units: tuple[str, ...] = (),
    reshard_after_forward: bool = True,
    exceptions: tuple[str, ...] = (),
    precision: Precision = Precision.FP32,
    recompute: Mapping[str, Recompute] | None = None,
) -> Plan:
    """A plan for the model; parameters that are not mentioned are replicated and read by their owners as R.

    Ids cross as int64, all else in the precision's compute dtype.
    """
    named = parameters or {}
    compute = "float32" if precision is Precision.FP32 else "bfloat16"

    def crossing(text: str) -> CrossingPlan:
        conversion = parse_conversion(text)
        return CrossingPlan(conversion, "int64" if conversion.target == ROWS else compute)

    return Plan(
        schema_version=1,
        tpplan_version="0.1.0",
        torch_version=torch.__version__,
        cluster=ClusterPlan(
            gpus=mesh.num_gpus, gpus_per_node=mesh.num_gpus, profile="none", profile_fingerprint="none"
        ),
        mesh_degrees=MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp),
        batch=BatchPlan(global_batch=mesh.data_parallel, micro_batch=1, accumulation_steps=1, seq_len=1),
        precision=precision,
        optimizer="adamw",
        blocks={},
        parameters=parameter_plans(model, named),
        boundaries={
            module: BoundaryPlan(
                inputs={path: crossing(text) for path, text in inputs.items()},
                outputs={path: crossing(text) for path, text in out.items()},
            )
            for module, (inputs, out) in (boundaries or {}).items()
        },
        outputs={path: parse_layout(text) for path, text in (outputs or {}).items()},
        sizes={},
        losses={},
        draws=(),
        recompute=recompute or {},
        compile=Compile.NONE,
        fsdp=FsdpPlan(units=(*units, "<root>"), reshard_after_forward=reshard_after_forward, exceptions=exceptions),
        collectives=(),
        predicted=Prediction(
            step_time_s=0.0,
            step_time_error_s=0.0,
            is_extrapolated=False,
            time_s={},
            peak_memory_bytes=0.0,
            slack_bytes=0.0,
            memory_limit_bytes=0.0,
            memory_bytes={},
            peak_during=Pass.BACKWARD,
            peak_module="<root>",
        ),
        solver=SolverReport(
            name="hand", status=Status.FEASIBLE, objective_s=0.0, bound_s=0.0, gap=0.0, meshes_tried=1, skipped={}
        ),
        fingerprints=Fingerprints(
            parameters=parameters_fingerprint(
                {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
            ),
            graph="none",
            inputs={},
        ),
        proof=ProofReport(status=ProofStatus.UNPROVEN, rounds=0, cuts=(), assumptions=()),
        unruled_ops={},
    )


def parameter_plans(model: nn.Module, named: Parameters) -> dict[str, ParameterPlan]:
    """Every parameter's plan; tied names come under the first, and all their owners read it."""
    labels: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        labels.setdefault(id(parameter), []).append(name)
    plans = {}
    for name, parameter in model.named_parameters():
        names = labels[id(parameter)]
        placement, reads = named.get(name, ("R", "R"))
        if isinstance(reads, str):
            reads = {label.rpartition(".")[0]: reads for label in names}
        plans[name] = ParameterPlan(
            placement=parse_layout(placement) if placement != "R" else R,
            reads={reader: parse_layout(layout) for reader, layout in reads.items()},
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
            aliases=tuple(names[1:]),
        )
    return plans

"""Applies a plan: first tensor parallelism (tpplan.apply.parallel_style), then recomputation, then data parallelism by
FSDP2 (tpplan.apply.data_parallel).

    model = tpplan.apply_plan(build_model(), "plan.json")        # under torchrun, process group initialised
    for micro_batch in micro_batches: loss(model(**micro_batch)).backward()
    tpplan.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()

The model stays eager and keeps its parameter names. Its parameters become DTensors on (replicate, shard, tp): make the
optimizer afterwards. Divided experts, and layers that FSDP shards over shard and tp together, are on meshes of their
own (tpplan.apply.expert_parallel, tpplan.apply.fsdp_over_tp). Every rank of a tp group must read the same batch:
Plan.batch_for says which one, and the first training forward checks that the ranks do
(tpplan.apply.modules.first_step_check).
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tpplan.apply.collectives.cross_entropy import ShardedClasses
from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.row_bags import RowBags
from tpplan.apply.data_parallel import (
    AVERAGER,
    broadcast_experts,
    broadcast_replicas,
    leave_untouched,
    reduce_gradients,
    reduced_slots,
    shard_data,
)
from tpplan.apply.expert_parallel import divide_experts, experts_mesh
from tpplan.apply.first_forward_check import check_calls, warn_of_hooks
from tpplan.apply.fsdp_over_tp import mesh_for
from tpplan.apply.model_match import check_filled, check_model, module_called, modules_by_name, outermost_by_name
from tpplan.apply.modules.applied_mesh import keep_mesh
from tpplan.apply.modules.devices import cast_parameters, move
from tpplan.apply.modules.dropout_rng import DrawByRank
from tpplan.apply.modules.first_step_check import check_first_step
from tpplan.apply.modules.input_shapes import OnMismatch, check_shapes
from tpplan.apply.modules.local_sizes import LocalSizes, check_attributes, why_not_compiled
from tpplan.apply.modules.stale_references import Originals
from tpplan.apply.modules.weights_at_rest import keep_at_rest
from tpplan.apply.parallel_style import module_styles
from tpplan.apply.pipeline import check_stages, mesh_of_stages, run_in_stages
from tpplan.apply.rank_agreement import check_ranks_agree, raise_on_all_ranks
from tpplan.apply.recompute import recompute
from tpplan.core.errors import PlanError, PlanMismatchError, TpplanError, UsageError
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan, Precision, uses_fsdp
from tpplan.plan.proof_hash import MEND, why_unproven
from tpplan.stages.rank_stages import joined, stage_copies
from tpplan.stages.stage_model import keep_whole_shape
from tpplan.torch_internals.groups import group_of_all_axes
from tpplan.torch_internals.tensors import gradient_hooks
from tpplan.trace.hooks.call_rewriting import Rewriter, rewrite_calls
from tpplan.trace.hooks.encoder_fast_path import leave_fast_path
from tpplan.trace.hooks.generated_class import fold_forwards, is_generated
from tpplan.trace.record_fx import given_on_meta
from tpplan.trace.trace import repeated_children
from tpplan.trace.whole.opaque import HOOKS, opaque_class

_AXES = tuple(str(axis) for axis in (Axis.REPLICATE, Axis.SHARD, Axis.TP))


def apply_plan(
    model: nn.Module,
    plan: Plan | PipelinePlan | str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    compile: bool = False,
    check: bool | Literal["warn"] = True,
) -> nn.Module:
    """Lays the model out as the plan says, in place, and returns it.

    compile=True compiles each repeated layer, with its recomputation, before FSDP shards it; a model without repeated
    layers is compiled whole. A forward raises PlanMismatchError for input shapes that the plan is not proven for, and
    the first training forward also for other calls; check="warn" warns instead, check=False skips both checks.

    Parameters get rank 0's values on every rank; parameters on the meta device stay there, in their local shape. A
    given `mesh` must have the axes replicate, shard and tp. Under FSDP, and where experts are divided, every rank must
    run as many forwards, in evaluation too: one that is out of batches runs one again and leaves its result out. Under
    a plan of stages the model becomes this rank's stage, and trains by `model.step` (tpplan.apply.pipeline).

    Raises UsageError without a process group, for a model that a plan was applied to before and for another `check`,
    PlanError for a plan that cannot be read, and PlanMismatchError for a model, a number of ranks or ranks that the
    plan does not fit. An error on one rank is raised on all ranks.
    """
    _check_ready(model)
    reaction = OnMismatch.of(check)
    loaded = _agreed_plan(model, plan)
    originals = Originals(model)
    plans = (loaded,) if isinstance(loaded, Plan) else loaded.stages
    if (why := next(filter(None, map(why_unproven, plans)), "")) and dist.get_rank() == 0:
        warnings.warn(
            f"the plan is unproven: {why}, so the applied model may compute something else than the model; {MEND}",
            stacklevel=2,
        )
    device_type = mesh.device_type if mesh is not None else _device_type(model)
    if isinstance(loaded, Plan):
        mesh = _checked(mesh, loaded) if mesh is not None else _new_mesh(loaded, device_type)
        over_tp = mesh_for(loaded, mesh)
        experts = experts_mesh([loaded], device_type)
        return _applied(model, loaded, mesh, originals, experts, compile=compile, check=reaction, over_tp=over_tp)
    if mesh is not None:
        raise UsageError("a plan of stages makes its own mesh: leave `mesh` out")
    everywhere = mesh_of_stages(loaded, device_type)
    return _in_stages(model, loaded, everywhere, originals, compile=compile, check=reaction)


def _in_stages(
    model: nn.Module,
    loaded: PipelinePlan,
    everywhere: DeviceMesh,
    originals: Originals,
    *,
    compile: bool,
    check: OnMismatch,
) -> nn.Module:
    """The model as this rank's stages, in place; each is laid out on its own."""
    mesh = everywhere[_AXES]
    over_tp = next(filter(None, (mesh_for(plan, mesh) for plan in loaded.stages)), None)
    experts = experts_mesh(loaded.stages, everywhere.device_type, loaded.parts)
    plans = loaded.stages_of(dist.get_rank())
    parts = lay_out_stages(model, plans, mesh, originals, experts, compile=compile, check=check, over_tp=over_tp)
    if len(parts) > 1:
        joined(model, parts)
        keep_mesh(model, mesh, experts, over_tp)
    run_in_stages(model, parts, loaded, everywhere)
    return model


def lay_out_stages(
    model: nn.Module,
    plans: Sequence[Plan],
    mesh: DeviceMesh,
    originals: Originals,
    experts: DeviceMesh | None,
    *,
    compile: bool,
    check: OnMismatch,
    over_tp: DeviceMesh | None,
) -> list[nn.Module]:
    """The stages of a rank, each laid out on the mesh of a stage; a single one is the model itself. `experts` and
    `over_tp` are as `apply_plan` makes them of all stages."""
    stages = [plan.stage for plan in plans if plan.stage is not None]
    parts: list[nn.Module] = []
    error: TpplanError | None = None
    try:
        layers = tuple(repeated_children(model))
        parts = stage_copies(model, stages, plans[0].precision, layers, given_on_meta)
        for part, plan in zip(parts, plans, strict=True):
            check_model(part, plan)
            check_filled(part, plan)
    except TpplanError as found:
        error = found
    raise_on_all_ranks(error, PlanMismatchError)
    group = group_of_all_axes(mesh) if plans[0].mesh.num_gpus > 1 else mesh[str(Axis.TP)].get_group()
    for part, plan in zip(parts, plans, strict=True):
        own = originals if part is model else Originals(part)
        _applied(part, plan, mesh, own, experts, compile=compile, check=check, group=group, over_tp=over_tp)
    return parts


def _applied(
    model: nn.Module,
    loaded: Plan,
    mesh: DeviceMesh,
    originals: Originals,
    experts: DeviceMesh | None,
    *,
    compile: bool,
    check: OnMismatch,
    group: dist.ProcessGroup | None = None,
    over_tp: DeviceMesh | None = None,
) -> nn.Module:
    """The model, laid out in place on the mesh, whose ranks are those of `group`: all ranks by default. `experts` is
    the mesh of divided experts, `over_tp` that of FSDP units over shard and tp."""
    device_type = mesh.device_type
    if loaded.precision is Precision.BF16:
        cast_parameters(model, torch.bfloat16)
    is_untouched = loaded.untouched is not None
    move(model, device_type, with_parameters=loaded.mesh.tp == 1 or is_untouched)
    if is_untouched:
        leave_untouched(model, loaded, mesh)
        keep_mesh(model, mesh)
        return model
    fold_forwards(model)
    _keep_hooks(model, loaded)
    of_experts = experts if loaded.experts is not None else None
    if of_experts is not None:
        divide_experts(model, loaded, of_experts)
    lay_out(model, loaded, mesh[str(Axis.TP)], of_experts)
    _recompute_planned(model, loaded)
    broadcast_replicas(model, loaded, mesh)
    if of_experts is not None:
        broadcast_experts(model, loaded, of_experts)
    if compile:
        _compile_layers(model, loaded)
    shard_data(model, loaded, mesh, of_experts, over_tp)
    keep_at_rest(model, ((slot.module, slot.name) for slot in reduced_slots(model)))
    keep_mesh(model, mesh, of_experts, over_tp)
    check_shapes(model, loaded, check)
    check_calls(model, loaded, mesh.device_type, check, group)
    check_first_step(model, mesh, originals, group)
    if check is not OnMismatch.NOTHING:
        warn_of_hooks(model, loaded)
    return model


def lay_out(model: nn.Module, plan: Plan, mesh: DeviceMesh, of_experts: DeviceMesh | None = None) -> None:
    """Applies a plan's tensor parallelism in place: distributes parameters, adds conversions and rewrites calls.

    `mesh` is the one-dimensional mesh of the tp axis. `of_experts` is the mesh on which weights of divided experts are
    cut; without it the model has one rank's already. The plan must fit the model (check_model).
    """
    modules = modules_by_name(model)
    rewrite_calls(_rewriters(plan, modules, TpGroup.of(mesh.get_group())))
    for name, style in module_styles(plan, of_experts=of_experts).items():
        style._apply(module_called(modules, name), mesh)
    if plan.mesh.tp > 1:
        leave_fast_path(model)
    if plan.stage is not None:
        keep_whole_shape(model, plan.stage)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Skips the gradient reductions over the tp axis and over replicas in the backwards that run inside the context.

    The next backward outside reduces everything that was accumulated. Use it for all but the last micro-batch of a
    step: it saves collectives and changes no result. FSDP's reduce-scatters go on, unless the plan says that gradients
    are kept whole between micro-batches (`fsdp.whole_gradients`): then they wait too. Inside, a parameter's `.grad`
    may be one rank's summand, or None.
    """
    reduce_gradients(model, False)
    try:
        yield
    finally:
        reduce_gradients(model, True)


def _rewriters(plan: Plan, modules: dict[str, nn.Module], group: TpGroup) -> dict[nn.Module, list[Rewriter]]:
    """Returns the rewriters of each module's own calls on this rank: local sizes, sharded losses, bags of own
    rows, dropout by rank."""
    named: list[tuple[str, Rewriter]] = [(name, LocalSizes(sizes)) for name, sizes in plan.size_plans().items()]
    named += [(name, ShardedClasses(count, group)) for name, count in plan.sharded_losses().items()]
    named += [(name, RowBags(counts, group)) for name, counts in plan.row_bags().items()]
    named += [(name, DrawByRank(group.rank)) for name in plan.drawing_modules()]
    found: dict[nn.Module, dict[type, Rewriter]] = {}
    for name, sizes in plan.size_plans().items():
        check_attributes(module_called(modules, name), name, sizes)
    for name, rewriter in named:
        known = found.setdefault(module_called(modules, name), {}).setdefault(type(rewriter), rewriter)
        if known != rewriter:
            raise PlanError(
                f"{name or ROOT} is a module that has another name too, and the plan rewrites its calls differently "
                "under each name: give both names the same sizes, losses, bags and draws"
            )
    return {module: list(rewriters.values()) for module, rewriters in found.items()}


# ---- checks before anything changes


def _check_ready(model: nn.Module) -> None:
    """Raises UsageError without a process group, and for a model that is sharded already."""
    if not dist.is_initialized():
        raise UsageError(
            "apply_plan needs a process group: run under torchrun and call torch.distributed.init_process_group"
        )
    if AVERAGER in model.__dict__ or any(
        is_generated(type(module)) or isinstance(module, FSDPModule) for module in model.modules()
    ):
        raise UsageError("the model is sharded already: apply a plan once, to a newly built model")


def _agreed_plan(model: nn.Module, plan: Plan | PipelinePlan | str | os.PathLike[str]) -> Plan | PipelinePlan:
    """Returns the plan after all ranks agreed on it and on the model. Raises any rank's error on every rank."""
    loaded: Plan | PipelinePlan | None = None
    error: TpplanError | None = None
    try:
        loaded = plan if isinstance(plan, Plan | PipelinePlan) else load_plan(plan)
        _check_fits(model, loaded)
    except TpplanError as found:
        error = found
    check_ranks_agree(model, loaded.hash if loaded is not None else "", error)
    assert loaded is not None
    return loaded


def _check_fits(model: nn.Module, plan: Plan | PipelinePlan) -> None:
    ranks = dist.get_world_size()
    expected = plan.mesh.num_gpus if isinstance(plan, Plan) else plan.num_gpus
    mesh = plan.mesh if isinstance(plan, Plan) else f"{len(plan.stages)} stages of {plan.stages[0].mesh}"
    if ranks != expected:
        raise PlanMismatchError(
            f"the plan is for {expected} GPUs ({mesh}), and {ranks} ranks are running: start {expected}, or solve "
            f"again with --gpus {ranks}"
        )
    if isinstance(plan, PipelinePlan):
        check_stages(model, plan)
        return
    if plan.stage is not None:
        raise PlanMismatchError(
            f"the plan is for stage {plan.stage.index} of {plan.stage.count} alone: apply the plan of all stages"
        )
    check_model(model, plan)
    check_filled(model, plan)


# ---- recomputation and compilation


def _recompute_planned(model: nn.Module, plan: Plan) -> None:
    """Makes the modules that the plan recomputes run their forward again in backward."""
    modules = modules_by_name(model)
    modes = {module_called(modules, name): mode for name, mode in plan.recomputed_modules().items()}
    for module, mode in modes.items():
        recompute(module, mode)


def _compile_layers(model: nn.Module, plan: Plan) -> None:
    for name, sizes in plan.size_plans().items():
        if reason := next(filter(None, map(why_not_compiled, sizes)), ""):
            raise UsageError(
                f"module {name or ROOT} {reason}, and torch.compile cannot follow that: apply the plan without "
                "compile=True"
            )
    outermost = outermost_by_name(model)
    for name in plan.layers():
        module_called(outermost, name).compile()


# ---- mesh, devices and data parallelism


def _device_type(model: nn.Module) -> str:
    """Returns the accelerator that holds parameters; without one, "cuda" where the process group has nccl, or "cpu"."""
    found = {parameter.device.type for parameter in model.parameters()} - {"meta", "cpu"}
    if found:
        return found.pop()
    return "cuda" if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available() else "cpu"


def _new_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(plan.mesh.size(Axis(axis)) for axis in _AXES), mesh_dim_names=_AXES)


def _checked(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    expected = {axis: plan.mesh.size(Axis(axis)) for axis in _AXES}
    given = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if given != expected or mesh.mesh_dim_names != _AXES:
        raise PlanMismatchError(
            f"the plan's mesh is {expected}, the given one is {given}: pass a mesh of these axes and sizes, in this "
            "order, or none"
        )
    return mesh


def _keep_hooks(model: nn.Module, plan: Plan) -> None:
    """Stores the gradient hooks of weights in the module that runs whole, which puts them on the weights it reads.

    Without this they would be lost: distributing a weight puts another parameter in its place, without hooks.
    """
    modules = modules_by_name(model)
    for module in (
        {modules[name] for name in plan.opaque_modules()}
        if plan.mesh.tp > 1 or uses_fsdp(plan.mesh, plan.precision)
        else ()
    ):
        named = module.named_parameters()
        hooks = {name: tuple(own.values()) for name, weight in named if (own := gradient_hooks(weight))}
        if hooks:
            module.__dict__[HOOKS] = hooks
            if plan.mesh.tp == 1:
                module.__class__ = opaque_class(type(module))  # type: ignore[arg-type]

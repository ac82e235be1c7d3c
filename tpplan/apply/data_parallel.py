"""Data parallelism of an applied model: FSDP2 over shards, averages over replicas, and when gradients are reduced."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.tp_gradients import Reducer, Slot
from tpplan.apply.collectives.uneven_reads import agree_on_gradients
from tpplan.apply.expert_parallel import axes_of_experts, shard_experts
from tpplan.apply.fsdp_over_tp import take_off_tp
from tpplan.apply.model_match import module_called, modules_by_name, outermost_by_name, plan_name
from tpplan.apply.modules.applied_mesh import REPLICATE, SHARD_TP, is_over_tp
from tpplan.apply.modules.deferred_gradients import Deferral
from tpplan.apply.modules.local_modules import ModuleBinding
from tpplan.core.mesh import Axis
from tpplan.plan.plan import Plan, Precision, uses_fsdp
from tpplan.torch_internals.modules import FSDPParamGroup, end_of_backwards, gathered, group_of, own_parameters
from tpplan.torch_internals.tensors import local_part
from tpplan.trace.hooks.checkpoint_context import leave_reentry
from tpplan.trace.hooks.generated_class import BINDING

#: key in the root module's __dict__ of the Averager, which averages the gradients that FSDP does not hold
AVERAGER = "_tpplan_averager"
#: key in the root module's __dict__, there where FSDP keeps whole gradients between micro-batches
WHOLE_GRADIENTS = "_tpplan_whole_gradients"
#: key in the root module's __dict__, there where ranks may read different parameters
UNEVEN_READS = "_tpplan_uneven_reads"
#: key in the __dict__ of an FSDP unit that stays gathered between micro-batches
GATHERED_ONCE = "_tpplan_gathered_once"


def reduce_gradients(model: nn.Module, enabled: bool) -> None:
    """Says whether the backwards that follow reduce gradients over the tp axis and over replicas, as a step's last
    does; FSDP then frees what stayed gathered between micro-batches."""
    reducers: list[Reducer | Averager] = [*_reducers(model)]
    if AVERAGER in model.__dict__:
        reducers.append(model.__dict__[AVERAGER])
    for reducer in reducers:
        reducer.is_enabled = enabled
    for module in model.modules():
        if isinstance(module, FSDPModule) and WHOLE_GRADIENTS in model.__dict__:
            module.set_requires_gradient_sync(enabled, recurse=False)
        elif isinstance(module, FSDPModule):
            module.set_requires_all_reduce(enabled, recurse=False)
        if isinstance(module, FSDPModule) and GATHERED_ONCE in module.__dict__:
            module.set_reshard_after_backward(enabled, recurse=False)


def accumulate_whole_gradients(model: nn.Module) -> None:
    """Adds gradients that have come apart from a backward to those that FSDP keeps whole, in the dtype that it reduces
    in, as it does at the end of each unit's backward."""
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            if gathered(parameter) is not None:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def last_of_a_step(model: nn.Module, deferral: Deferral, key: Hashable) -> None:
    """Computes the last gradients of a step, which a forward deferred under `key`, and reduces all that has accumulated
    as a step's last backward does. Every rank of the model calls it."""
    reduce_gradients(model, True)
    _LastOfAStep.apply(torch.zeros((), requires_grad=True), model, deferral, key).backward()  # type: ignore[no-untyped-call]


class _LastOfAStep(torch.autograd.Function):
    """A backward that accumulates deferred gradients. FSDP's units end it one by one, as soon as all gradients of a
    unit have come; but at its end, in one order on all ranks, where ranks may read different parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module, deferral: Deferral, key: Hashable) -> Tensor:
        ctx.given = model, deferral, key
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        model, deferral, key = ctx.given
        if isinstance(model, FSDPModule):
            end_of_backwards(model)
        for reducer in _reducers(model):
            reducer.reduce_at_the_end()
        if AVERAGER in model.__dict__:
            model.__dict__[AVERAGER].gradient_comes()
        groups = {} if UNEVEN_READS in model.__dict__ else _groups_of_parameters(model)
        left = Counter(id(groups.get(id(own))) for own in deferral.parameters(key))
        for parameter in deferral.weight_gradients(key):
            group = groups.get(id(parameter))
            left[id(group)] -= 1
            if group is not None and not left[id(group)]:
                group.post_backward()
        return gradient, None, None, None


def _groups_of_parameters(model: nn.Module) -> dict[int, FSDPParamGroup]:
    """The parameter group of FSDP that has gathered each parameter, by its id."""
    found = [group_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return {id(gathered(own)): group for group in found if group is not None for own in group.fsdp_params}


def _reducers(model: nn.Module) -> list[Reducer]:
    return list({id(site.shared): site.shared.reducer for site in _sites(model)}.values())


def reduced_slots(model: nn.Module) -> list[Slot]:
    """The parameters whose gradients are reduced over tp, or without FSDP over data-parallel ranks, as they arrive."""
    averager = model.__dict__.get(AVERAGER)
    slots = [slot for reducer in _reducers(model) for slot in reducer.slots]
    return slots + (list(averager.slots) if averager is not None else [])


def _sites(model: nn.Module) -> list[ModuleBinding]:
    return [module.__dict__[BINDING] for module in model.modules() if BINDING in module.__dict__]


def leave_untouched(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Gives every rank the unchanged model with the same values, and averages its gradients over replicas."""
    broadcast_replicas(model, plan, mesh, (Axis.REPLICATE, Axis.TP))
    averager = Averager(groups=(TpGroup.of(mesh[str(Axis.REPLICATE)].get_group()),))
    averager.watch(model)
    model.__dict__[AVERAGER] = averager


def broadcast_replicas(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, axes: Sequence[Axis] = (Axis.REPLICATE, Axis.SHARD)
) -> None:
    """Broadcasts parameters from the first rank of each axis: by default over replicate, then over shard. Leaves out
    experts that are divided over ranks."""
    divided = {id(weight) for weight in _divided_weights(model, plan)}
    _broadcast([own for own in model.parameters() if id(own) not in divided], mesh, axes)


def broadcast_experts(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Gives ranks with the same experts the values of the first of them. `mesh` is that of the experts."""
    _broadcast(_divided_weights(model, plan), mesh, (Axis.REPLICATE, Axis.EXPERT_SHARD))


def _divided_weights(model: nn.Module, plan: Plan) -> list[nn.Parameter]:
    """The parameters of the modules whose experts the plan divides."""
    modules = modules_by_name(model)
    return [weight for name in plan.expert_calls() for weight in modules[name].parameters()]


@torch.no_grad()
def _broadcast(parameters: Sequence[nn.Parameter], mesh: DeviceMesh, axes: Sequence[Axis]) -> None:
    """Broadcasts local parts with values from the first rank of each axis, one axis after the other."""
    for axis in axes:
        if mesh[str(axis)].size() > 1 and dist.get_backend() != "fake":
            for parameter in parameters:
                local = local_part(parameter) if isinstance(parameter, DTensor) else parameter
                if not local.is_meta:
                    dist.broadcast(local.detach(), group=mesh.get_group(axis), group_src=0)


def shard_data(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    of_experts: DeviceMesh | None,
    over_tp: DeviceMesh | None = None,
) -> None:
    """Applies fully_shard to each planned unit, divided experts first and the root last: over the data-parallel axes,
    or those of the mesh `over_tp`.

    FSDP averages gradients over the ranks that it shards over.
    """
    is_mixed = plan.precision is Precision.BF16_MIXED
    if not uses_fsdp(plan.mesh, plan.precision):
        return
    leave_reentry(model)
    if plan.fsdp.whole_gradients:
        model.__dict__[WHOLE_GRADIENTS] = True
    axes = mesh[str(Axis.SHARD)] if plan.mesh.replicate == 1 else mesh[str(Axis.REPLICATE), str(Axis.SHARD)]
    axes_over_tp, units_over_tp = axes, plan.units_over_tp()
    if over_tp is not None:
        axes_over_tp = over_tp[SHARD_TP] if plan.mesh.replicate == 1 else over_tp[REPLICATE, SHARD_TP]
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if is_mixed else MixedPrecisionPolicy()
    if of_experts is not None:
        shard_experts(model, plan, of_experts, policy)
    if over_tp is not None:
        take_off_tp(model, plan, over_tp, [slot for reducer in _reducers(model) for slot in reducer.slots])
    outermost = outermost_by_name(model)
    scalars = {model.get_parameter(name) for name in _real_names(model, plan.scalars_beside_fsdp())}
    resharded = plan.resharded_units()
    for name in (*(unit for unit in plan.fsdp_units() if unit), ""):
        # The root's parameters are needed again as soon as backward starts.
        reshard = resharded.get(name, False)
        unit = module_called(outermost, name)
        if plan.fsdp.gathered_once and not reshard:
            unit.__dict__[GATHERED_ONCE] = True
        fully_shard(
            unit,
            mesh=axes_over_tp if name in units_over_tp else axes,
            reshard_after_forward=reshard,
            mp_policy=policy,
            ignored_params=scalars,
        )
    if scalars:
        _replicate(model, plan, mesh, axes, policy.param_dtype)
    if plan.fsdp.uneven_reads:
        model.__dict__[UNEVEN_READS] = True
        _agree(model, plan, axes, axes_over_tp, of_experts)
    before = _BeforeForward(tuple(slot for reducer in _reducers(model) for slot in reducer.slots), mesh.device_type)
    before(model, ())
    model.register_forward_pre_hook(before, prepend=True)


def _agree(
    model: nn.Module, plan: Plan, axes: DeviceMesh, axes_over_tp: DeviceMesh, of_experts: DeviceMesh | None
) -> None:
    """Lets the ranks of each FSDP unit agree on which gradients there are."""
    outermost = outermost_by_name(model)
    meshes = {id(module_called(outermost, name)): axes_over_tp for name in plan.units_over_tp()}
    if of_experts is not None:
        own = axes_of_experts(plan, of_experts)
        meshes |= {id(module_called(outermost, name)): own for name in plan.expert_calls()}
    agree_on_gradients(model, lambda unit: meshes.get(id(unit), axes), _reducers(model), model.__dict__.get(AVERAGER))


@final
@dataclass(frozen=True, slots=True)
class _BeforeForward:
    """A forward pre-hook of the root that runs before FSDP gathers parameters.

    It lets each slot note its sharded parameter, and clears autocast's cache of cast weights: the gradient of a weight
    cast in an earlier forward would arrive after FSDP's reduce-scatter.
    """

    slots: tuple[Slot, ...]
    device_type: str

    def __call__(self, _model: nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        for slot in self.slots:
            slot.parameter()
        if torch.is_autocast_enabled(self.device_type):
            torch.clear_autocast_cache()


def _real_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Translates a plan's parameter names to the model's, which contain the names of wrappers."""
    real = {plan_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [real[name] for name in names]


def _replicate(model: nn.Module, plan: Plan, mesh: DeviceMesh, axes: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Replaces scalar parameters, which FSDP2 cannot shard, by replicated DTensors on the mesh of all other parameters.

    Gradient clipping and optimizers need one mesh for all. Reads of a replica tell the Averager that its gradient
    comes, which is then averaged over data-parallel ranks.
    """
    names = plan.scalars_beside_fsdp()
    scalars = {model.get_parameter(name) for name in _real_names(model, names)}
    sharded = (p for p in model.parameters() if isinstance(p, DTensor) and p not in scalars and not is_over_tp(p))
    on = next((parameter.device_mesh for parameter in sharded), axes)
    groups = tuple(TpGroup.of(mesh[str(axis)].get_group()) for axis in (Axis.REPLICATE, Axis.SHARD))
    averager = model.__dict__[AVERAGER] = Averager(groups=groups)
    replicas: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters = own_parameters(module)
        for name, parameter in parameters.items():
            if parameter is None or parameter not in scalars:
                continue
            if id(parameter) not in replicas:
                assert isinstance(parameter, DTensor)
                local = DTensor.from_local(local_part(parameter).detach(), on, [Replicate()] * on.ndim, run_check=False)
                replicas[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    averager.slots.append(Slot(module=module, name=name))
            parameters[name] = replicas[id(parameter)]
    for site in _sites(model):
        for reads in (*site.reads.values(), *(site.whole or {}).values()):
            if reads.name in names:
                reads.averager, reads.dtype = averager, dtype

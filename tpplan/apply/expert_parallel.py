"""Divides experts over ranks: each rank of a group keeps its experts, and FSDP shards these over the other groups.

The shard axis of the mesh is taken apart in two: `ep`, ranks with different experts, next to the tp axis, and
`expert_shard`, ranks with the same ones. A weight of experts is a DTensor on (replicate, expert_shard, ep, tp), all
other weights are on (replicate, shard, tp): torch's clip_grad_norm_ takes one mesh, tpplan.clip_grad_norm_ both.
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tpplan.apply.model_match import module_called, modules_by_name, outermost_by_name
from tpplan.core.graph import within
from tpplan.core.mesh import Axis
from tpplan.experts.exchange import EpGroup
from tpplan.experts.expert_share import ExpertShare, take_share
from tpplan.plan.plan import Plan

#: the name of the mesh axis of parts of the ranks that hold different stages
_PARTS = "part"
_AXES = (Axis.REPLICATE, Axis.EXPERT_SHARD, Axis.EP, Axis.TP)


def experts_mesh(plans: Sequence[Plan], device_type: str, parts: int = 1) -> DeviceMesh | None:
    """The mesh of experts' weights, of all ranks, or of this rank's of `parts` equal parts; None where none of the
    plans of stages divides experts."""
    plan = next((plan for plan in plans if plan.experts is not None), None)
    if plan is None:
        return None
    sizes, names = [plan.mesh.size(axis) for axis in _AXES], tuple(map(str, _AXES))
    if parts == 1:
        return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=names)
    return init_device_mesh(device_type, (parts, *sizes), mesh_dim_names=(_PARTS, *names))[names]


def divide_experts(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Makes each module that the plan divides exchange rows over this rank's ep group of the experts' mesh."""
    modules = modules_by_name(model)
    group = mesh.get_group(str(Axis.EP))
    assert plan.experts is not None
    for name, call in plan.expert_calls().items():
        own = EpGroup(group.group_name, group.size())
        take_share(module_called(modules, name), ExpertShare(call, plan.experts.ep, plan.experts.imbalance, own))


def axes_of_experts(plan: Plan, mesh: DeviceMesh) -> DeviceMesh:
    """The axes of the experts' mesh over which FSDP shards and replicates divided experts."""
    if plan.mesh.replicate > 1:
        return mesh[str(Axis.REPLICATE), str(Axis.EXPERT_SHARD)]
    return mesh[str(Axis.EXPERT_SHARD)]


def shard_experts(model: nn.Module, plan: Plan, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Applies fully_shard to each divided module, over the ranks that have its experts."""
    axes = axes_of_experts(plan, mesh)
    # Rows come in the dtype of the layer, the router's weights may come in another on purpose.
    own = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    outermost, resharded = outermost_by_name(model), plan.resharded_units()
    for name in plan.expert_calls():
        reshard = next((does for unit, does in resharded.items() if within(name, unit)), False)
        fully_shard(module_called(outermost, name), mesh=axes, reshard_after_forward=reshard, mp_policy=own)

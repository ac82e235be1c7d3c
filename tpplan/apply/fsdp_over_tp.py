"""Takes weights off the tp axis, so that FSDP can shard them over the shard and tp axes together.

A weight of such a unit is whole on every tp rank. FSDP2 shards over the axes before those of a DTensor: the weight is
put on a mesh whose last axis, in place of tp, has one rank, and FSDP shards it over all ranks of shard and tp. Gathered
it is a DTensor still, and modules read it as any other; at rest it is a DTensor on (replicate, shard_tp, alone), where
other weights are on (replicate, shard, tp): torch's clip_grad_norm_ takes one mesh, tpplan.clip_grad_norm_ both.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpplan.apply.collectives.tp_gradients import Slot
from tpplan.apply.model_match import module_called, outermost_by_name
from tpplan.apply.modules.applied_mesh import REPLICATE, SHARD_TP
from tpplan.core.mesh import Axis
from tpplan.plan.plan import Plan
from tpplan.torch_internals.groups import regrouped
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.tensors import local_part

#: the mesh's last axis, which has one rank
ALONE = "alone"


def mesh_for(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of units over shard and tp, of the ranks of a mesh of axes replicate, shard and tp; None for a plan
    without such units."""
    if not plan.units_over_tp():
        return None
    return regrouped(mesh, (plan.mesh.replicate, plan.mesh.size(Axis.SHARD_TP), 1), (REPLICATE, SHARD_TP, ALONE))


def take_off_tp(model: nn.Module, plan: Plan, mesh: DeviceMesh, slots: Iterable[Slot]) -> None:
    """Puts the weights of units over shard and tp, but scalars, on the axis of this rank alone, before FSDP shards
    them. Their slots, of which some may be among `slots`, say from now on that FSDP averages their gradients."""
    outermost, others = outermost_by_name(model), set(plan.fsdp_units()) - plan.units_over_tp()
    inner = {id(own) for name in others if name for own in module_called(outermost, name).parameters()}
    units = [module_called(outermost, name) for name in sorted(plan.units_over_tp())]
    moved: dict[int, nn.Parameter] = {}
    for parameter in (own for unit in units for own in unit.parameters()):
        if id(parameter) in moved or id(parameter) in inner or not parameter.ndim:
            continue
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(),), "a weight that is not whole on tp"
        local = DTensor.from_local(local_part(parameter).detach(), mesh[ALONE], [Replicate()], run_check=False)
        moved[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        moved[id(parameter)].__dict__.update(parameter.__dict__)
    for slot in slots:
        own = own_parameters(slot.module)[slot.name]
        slot.is_averaged_over_tp = id(own) in moved
    for module in model.modules():
        parameters = own_parameters(module)
        for name, own in parameters.items():
            if id(own) in moved:
                parameters[name] = moved[id(own)]


def is_over_tp(parameter: DTensor) -> bool:
    """True for a weight that FSDP shards over shard and tp."""
    return SHARD_TP in (parameter.device_mesh.mesh_dim_names or ())

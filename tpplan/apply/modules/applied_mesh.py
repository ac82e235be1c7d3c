"""Stores the device mesh of an applied plan on the model, and finds it again."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.core.mesh import Axis

#: key of the root module's __dict__, so that the entry is neither a submodule nor in state_dict
_APPLIED = "_tpplan_applied"
#: axes of the mesh of units over shard and tp, in which no axis has the name of another mesh's
REPLICATE, SHARD_TP = "replicate_of_shard_tp", str(Axis.SHARD_TP)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The mesh of axes replicate, shard and tp, that of divided experts (None where none are), and that of units over
    shard and tp (None where there are none). A deep copy of a model shares them."""

    mesh: DeviceMesh
    of_experts: DeviceMesh | None = None
    over_tp: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Applied":
        return self


def keep_mesh(
    model: nn.Module, mesh: DeviceMesh, of_experts: DeviceMesh | None = None, over_tp: DeviceMesh | None = None
) -> None:
    """Stores the mesh on the model, that of divided experts, and that of units over shard and tp."""
    model.__dict__[_APPLIED] = Applied(mesh, of_experts, over_tp)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of an applied model, or of the applied model that `model` wraps; None for a plain model."""
    applied = _applied(model)
    return applied.mesh if applied is not None else None


def mesh_of_experts(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of a model's divided experts; None for a model without."""
    applied = _applied(model)
    return applied.of_experts if applied is not None else None


def is_over_tp(parameter: DTensor) -> bool:
    """True for a weight that FSDP shards over shard and tp."""
    return SHARD_TP in (parameter.device_mesh.mesh_dim_names or ())


def mesh_over_tp(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of a model's FSDP units over shard and tp; None for a model without."""
    applied = _applied(model)
    return applied.over_tp if applied is not None else None


def _applied(model: nn.Module) -> Applied | None:
    return next((module.__dict__[_APPLIED] for module in model.modules() if _APPLIED in module.__dict__), None)

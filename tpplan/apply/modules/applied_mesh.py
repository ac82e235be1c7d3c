"""Stores the device mesh of an applied plan on the model, and finds it again."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

#: key of the root module's __dict__, so that the entry is neither a submodule nor in state_dict
_APPLIED = "_tpplan_applied"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The mesh of axes replicate, shard and tp, and that of divided experts (None where none are). A deep copy of a
    model shares them."""

    mesh: DeviceMesh
    of_experts: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Applied":
        return self


def keep_mesh(model: nn.Module, mesh: DeviceMesh, of_experts: DeviceMesh | None = None) -> None:
    """Stores the mesh on the model, and that of divided experts."""
    model.__dict__[_APPLIED] = Applied(mesh, of_experts)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of an applied model, or of the applied model that `model` wraps; None for a plain model."""
    applied = _applied(model)
    return applied.mesh if applied is not None else None


def mesh_of_experts(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of a model's divided experts; None for a model without."""
    applied = _applied(model)
    return applied.of_experts if applied is not None else None


def _applied(model: nn.Module) -> Applied | None:
    return next((module.__dict__[_APPLIED] for module in model.modules() if _APPLIED in module.__dict__), None)

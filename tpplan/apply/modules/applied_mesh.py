"""What a model keeps of the plan that was applied to it: the mesh it lies on."""

from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

#: where the module that a plan was applied to keeps it; in __dict__, so neither a submodule nor in state_dict
_APPLIED = "_tpplan_applied"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The mesh of replicate x shard x tp. A copied model lies on the same."""

    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "Applied":
        return self


def keep_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Notes the mesh."""
    model.__dict__[_APPLIED] = Applied(mesh)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of an applied model, or of one that wraps it; None for a plain model."""
    found = (module.__dict__[_APPLIED] for module in model.modules() if _APPLIED in module.__dict__)
    applied: Applied | None = next(found, None)
    return applied.mesh if applied is not None else None

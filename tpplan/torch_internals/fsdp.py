"""FSDP2's parameter groups, and torch's memory tracker for them."""

from typing import Any

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType, _FSDPState
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.probes import Probe

__all__ = ["PROBES", "FSDPMemTracker", "FSDPParamGroup", "MemTracker", "Tracker", "group_of", "unit_name"]


def group_of(module: FSDPModule) -> FSDPParamGroup | None:
    """The parameter group that FSDP2 gathers for the module; None where the module has none of its own."""
    found: FSDPParamGroup | None = module._get_fsdp_state()._fsdp_param_group
    return found


def unit_name(group: FSDPParamGroup) -> str:
    """Name of the module that the group is gathered for; "" for the root."""
    return group._module_fqn or ""


class Tracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
    """FSDPMemTracker with a correction: torch's wrapper of post-backward keeps the last unsharded gradient alive while
    gradients are reduced, so that the peak reads too high; this one holds none."""

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, orig_fsdp_param_group_post_backward: Any) -> Any:
        def post_backward(*args: Any, **kwargs: Any) -> None:
            self._label(fsdp_mod, "_unsharded_param", _FSDPRefType.UNSHARDED_GRAD)
            self._fsdp_state = _FSDPState.POST_BW
            orig_fsdp_param_group_post_backward(*args, **kwargs)
            self._label(fsdp_mod, "sharded_param", _FSDPRefType.SHARDED_GRAD)

        return post_backward

    def _label(self, fsdp_mod: Any, attribute: str, part: _FSDPRefType) -> None:
        group = group_of(fsdp_mod)
        for parameter in group.fsdp_params if group is not None else ():
            gradient = getattr(getattr(parameter, attribute, None), "grad", None)
            if gradient is not None:
                self._update_and_maybe_create_winfos(gradient, part)


# ---- probes


def _groups() -> bool:
    if torch.distributed.is_initialized():  # a rank of a real job, which cannot have a fake group
        return issubclass(Tracker, MemTracker)
    with fake_group(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        unit: Any = model[0]
        group = group_of(unit)
        return (
            isinstance(group, FSDPParamGroup)
            and len(group.fsdp_params) == 2
            and all(hasattr(parameter, "sharded_param") for parameter in group.fsdp_params)
            and isinstance(unit_name(group), str)
        )


def _tracker() -> bool:
    names = ("_fsdp_param_group_post_backward", "_update_and_maybe_create_winfos", "track_inputs", "reset_mod_stats")
    return all(callable(getattr(FSDPMemTracker, name, None)) for name in names)


PROBES = (
    Probe(
        name="FSDP2's groups of parameters",
        uses="FSDPModule._get_fsdp_state, FSDPState._fsdp_param_group, FSDPParamGroup._module_fqn",
        needed_for="`tpplan verify`, which says whose collective is which",
        works=_groups,
    ),
    Probe(
        name="FSDP2's memory tracker",
        uses="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker and its parts",
        needed_for="the memory check of `tpplan verify`",
        works=_tracker,
    ),
)

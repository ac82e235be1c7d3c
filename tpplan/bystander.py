"""A rank that is not there: a plan applied in one process, without a process group, as that rank would apply it.

What it makes runs on meta tensors, where collectives give shapes and reach nobody.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.apply import lay_out
from tpplan.plan import Plan


@dataclass(frozen=True, slots=True)
class _Group:
    """What tpplan asks a process group."""

    num_ranks: int
    own_rank: int
    group_name: str = "nobody"

    def size(self) -> int:
        """Ranks."""
        return self.num_ranks

    def rank(self) -> int:
        """Its own."""
        return self.own_rank


class _Mesh(DeviceMesh):
    """A one-dimensional mesh seen from one rank."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__("cpu", torch.arange(num_ranks, device="cpu"), _init_backend=False, _rank=rank)
        self._group = _Group(num_ranks, rank)

    def get_group(self, mesh_dim: int | str | None = None) -> _Group:  # type: ignore[override]
        """Always the one."""
        return self._group


def applied_as(model: nn.Module, plan: Plan, rank: int) -> nn.Module:
    """A copy of a model on the meta device with the tensor parallelism that the plan gives a rank."""
    local = copy.deepcopy(model)
    lay_out(local, plan, _Mesh(plan.mesh.tp, rank))
    return local

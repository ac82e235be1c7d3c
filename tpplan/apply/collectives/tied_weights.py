"""Parameters that several stages have: equal values, and the sum of all stages' gradients in each.

Each stage has a copy of its own, on the ranks of its own mesh, in the same layout: a rank's shard is that of the ranks
at its place in the other stages. Once a step they exchange the gradients of their shards and add them up in the same
order, so that copies, and what an optimizer makes of them, stay equal to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.core.errors import PlanMismatchError
from tpplan.plan.sections.ranks import StagePlan
from tpplan.torch_internals.tensors import local_part

#: key of the __dict__ of a parameter that an earlier stage has too
COPY = "_tpplan_copy_of_a_stage"


@final
@dataclass(frozen=True, slots=True, eq=False)
class TiedWeight:
    """A parameter of a stage of this rank, and the parts of the pipeline whose stages have it, ascending by stage, as
    ranks of the group of stages."""

    name: str
    module: nn.Module
    parts: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now: FSDP puts others in its place."""
        return self.module.get_parameter(self.name)

    @property
    def has_values(self) -> bool:
        """False where the parameter is on the meta device."""
        return not _local(self.parameter).is_meta

    def share(self) -> None:
        """Gives the parameter the values that the first stage has, and marks the others' as copies. All its stages have
        values, or none has."""
        parameter = self.parameter
        if self.group.rank() != self.parts[0]:
            parameter.__dict__[COPY] = True
        local = _local(parameter).detach()
        if not self.has_values or not local.numel():
            return
        if self.group.rank() == self.parts[0]:
            for other in self.parts[1:]:
                dist.send(local.contiguous(), group=self.group, group_dst=other)
            return
        given = torch.empty_like(local, memory_format=torch.contiguous_format)
        dist.recv(given, group=self.group, group_src=self.parts[0])
        with torch.no_grad():
            local.copy_(given)

    def set_aside(self) -> Tensor | None:
        """Takes the gradient of earlier steps away, and returns it."""
        parameter = self.parameter
        found, parameter.grad = parameter.grad, None
        return found

    @torch.no_grad()
    def add_up(self, earlier: Tensor | None) -> None:
        """Makes the gradient the sum of all stages', and of what earlier steps have left."""
        parameter = self.parameter
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:  # of a lookup with sparse=True, where a head's is dense
            parameter.grad = parameter.grad.to_dense()
        own = _local(parameter.grad)
        if not own.numel():  # nor have the ranks at its place in other stages any of it
            return
        mine = own.contiguous()
        given = {self.group.rank(): mine}
        every: list[dist.P2POp] = []
        for other in (part for part in self.parts if part != self.group.rank()):
            given[other] = torch.empty_like(mine)
            every.append(dist.P2POp(dist.isend, mine, group=self.group, group_peer=other))
            every.append(dist.P2POp(dist.irecv, given[other], group=self.group, group_peer=other))
        for work in dist.batch_isend_irecv(every):
            work.wait()
        total = given[self.parts[0]].clone()
        for other in self.parts[1:]:
            total += given[other]
        own.copy_(total)
        if earlier is not None:
            own += _local(earlier.to_dense() if earlier.is_sparse else earlier)


def tied_weights(
    parts: Sequence[nn.Module], stages: Sequence[StagePlan], number: int, group: dist.ProcessGroup
) -> list[TiedWeight]:
    """The parameters of this rank's stages that other stages have too, by name. `parts` are the applied stages,
    `number` is that of the parts of the pipeline. Raises PlanMismatchError for a parameter that a stage's module does
    not have."""
    found = {}
    for module, stage in zip(parts, stages, strict=True):
        for one in stage.ties:
            if one.name not in dict(module.named_parameters(remove_duplicate=False)):
                raise PlanMismatchError(f"stage {stage.index} has no parameter {one.name}: solve again")
            places = tuple(index % number for index in one.stages)
            found[one.name] = TiedWeight(one.name, module, places, group)
    return [found[name] for name in sorted(found)]


def _local(tensor: Tensor) -> Tensor:
    """A rank's part of a tensor."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor

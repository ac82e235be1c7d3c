"""Gradients of parameters that a forward reads on some data-parallel ranks alone, because data decides what runs.

Code that skips an expert which no row has chosen gives the expert's weights no gradient, on one rank and not on the
next. FSDP reduces the gradients that a rank has: ranks would reduce different ones, and wait for each other. So what
has not come when FSDP reduces is zeros. At the end of the backward ranks exchange which gradients came: one that came
on no rank is None again, as in one process, whose optimizer leaves such a parameter alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.collectives.redistribute import TpGroup, all_reduce_in_place
from tpplan.apply.collectives.tp_gradients import Reducer, Slot
from tpplan.torch_internals.autograd import NO_BACKWARD, at_end_of_backward, running_backward
from tpplan.torch_internals.modules import FSDPParamGroup, gathered, group_of


@final
@dataclass(slots=True, eq=False)
class _Gradient:
    """The gradient of one of FSDP's parameters, in a step so far.

    slot: that of its summands over tp, and their reducer; None where a rank's gradient is none. came: whether this rank
    read the parameter. was_there: whether there was a gradient before; None where FSDP has not reduced yet.
    """

    parameter: Any
    slot: tuple[Reducer, Slot] | None
    came: bool = False
    was_there: bool | None = None

    @property
    def is_accumulated(self) -> bool:
        """True where FSDP keeps the gradient of earlier micro-batches, whole and in the dtype that it reduces in."""
        return self.parameter.unsharded_accumulated_grad is not None

    def accumulate(self) -> None:
        """Keeps a gradient as FSDP keeps those of earlier micro-batches, for it reduces gradients of one dtype."""
        if gathered(self.parameter) is not None and not self.is_accumulated:
            self.parameter.to_accumulated_grad_if_needed()

    def prepare(self, *, is_reduced: bool) -> None:
        """Notes whether the gradient came in the backward that ends; makes it zeros where not, and FSDP reduces it."""
        own = gathered(self.parameter)
        if own is None or not own.requires_grad:
            return
        is_here = own.grad is not None or self.is_accumulated
        self.came |= is_here
        if not is_reduced:
            return
        if self.was_there is None:
            self.was_there = self.parameter.sharded_param.grad is not None
        if not is_here:
            own.grad = torch.zeros_like(own)
            if self.slot is not None:
                reducer, slot = self.slot
                reducer.nothing_came(slot)


@final
@dataclass(slots=True, eq=False)
class _Unit:
    """A parameter group of FSDP, the ranks that reduce it, and its gradients."""

    group: FSDPParamGroup
    ranks: tuple[TpGroup, ...]
    gradients: list[_Gradient]


@final
@dataclass(slots=True, eq=False)
class UnevenReads:
    """Agrees with other ranks on the gradients of all units, at the end of each backward in which FSDP reduces them."""

    units: Sequence[_Unit]
    averager: Averager | None
    #: the backward (autograd's graph task) at whose end ranks agree
    backward: int = NO_BACKWARD

    def before_reduction(self, unit: _Unit) -> None:
        """Prepares a unit's gradients, as FSDP is about to reduce them."""
        for gradient in unit.gradients:
            gradient.prepare(is_reduced=unit.group.reduce_grads)
        if unit.group.reduce_grads and any(own.is_accumulated for own in unit.gradients):
            for gradient in unit.gradients:
                gradient.accumulate()
        if self.averager is not None:
            self.averager.gradient_comes()
        if unit.group.reduce_grads and unit.group.all_reduce_grads and self.backward != running_backward():
            self.backward = running_backward()
            at_end_of_backward(self._after_other_callbacks)

    def _after_other_callbacks(self) -> None:
        """Queues the exchange behind FSDP's own callback, which reduces what is left."""
        at_end_of_backward(self._agree)

    @torch.no_grad()
    def _agree(self) -> None:
        by_ranks: dict[tuple[TpGroup, ...], list[_Gradient]] = {}
        for unit in self.units:
            by_ranks.setdefault(unit.ranks, []).extend(unit.gradients)
        for ranks, gradients in by_ranks.items():
            came = torch.tensor([own.came for own in gradients], dtype=torch.int32).to(
                gradients[0].parameter.sharded_param.device, non_blocking=True
            )
            for group in ranks:
                if group.size > 1:
                    all_reduce_in_place(came, group)
            if any(own.was_there is False and not own.came for own in gradients):  # else none of them is to go
                for own, count in zip(gradients, came.tolist(), strict=True):
                    if count == 0 and own.was_there is False:
                        own.parameter.sharded_param.grad = None
            for own in gradients:
                own.came, own.was_there = False, None


def agree_on_gradients(
    model: nn.Module,
    mesh_of: Callable[[nn.Module], DeviceMesh],
    reducers: Sequence[Reducer],
    averager: Averager | None,
) -> None:
    """Lets ranks agree on the gradients of each FSDP unit of the model, which mesh_of(unit) shards and replicates."""
    slots = {id(slot.parameter()): (reducer, slot) for reducer in reducers for slot in reducer.slots}
    units = []
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := group_of(module)) is not None:
            units.append(_Unit(group, _ranks(mesh_of(module)), _gradients(group, slots)))
    reads = UnevenReads(units, averager)
    for unit in units:
        _call_first(reads, unit)


def _ranks(mesh: DeviceMesh) -> tuple[TpGroup, ...]:
    return tuple(TpGroup.of(mesh.get_group(axis)) for axis in range(mesh.ndim))


def _gradients(group: FSDPParamGroup, slots: Mapping[int, tuple[Reducer, Slot]]) -> list[_Gradient]:
    return [_Gradient(parameter, slots.get(id(parameter.sharded_param))) for parameter in group.fsdp_params]


def _call_first(reads: UnevenReads, unit: _Unit) -> None:
    """Calls before_reduction before the unit's group ends a backward, which it does once in each."""
    own = unit.group.post_backward

    def post_backward(*unused: Any) -> None:
        reads.before_reduction(unit)
        own(*unused)

    unit.group.post_backward = post_backward  # type: ignore[method-assign]

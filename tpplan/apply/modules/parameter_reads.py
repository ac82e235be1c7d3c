"""Reading a parameter in a forward: the DTensor's local tensor, in the layout that the reader planned.

A parameter at rest has base layout S(d), or R, or R* when any module reads it as R* or a slice of it: then its gradient
is made of summands, and a read as R must give a summand too (R* -> R divides its gradient by t). A read converts
base -> read; a fused weight rests in its own order, and is read part by part: S(0) -> S(0; q, k, v). A weight whose
slices are fewer than ranks rests whole: R* -> S(0)/m.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.collectives.redistribute import Converter, TpGroup
from tpplan.apply.collectives.tp_gradients import Reducer, Slot
from tpplan.core.errors import PlanError, PlanMismatchError, UsageError
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, LayoutKind, R, can_convert
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import ParameterPlan
from tpplan.torch_internals.tensors import labelled, local_part, spec_of
from tpplan.trace.hooks.call_rewriting import own_code


def placement_of(layout: Layout, *, where: str) -> Placement:
    """The DTensor placement of a layout at rest. Raises PlanError for what a parameter cannot rest in."""
    match layout.kind:
        case LayoutKind.REPLICATE:
            return Replicate()
        case LayoutKind.SHARD if layout.is_plain:
            assert layout.dim is not None
            return Shard(layout.dim)
        case _:
            raise PlanError(f"{where}: expected R or S(dim), got {layout}")


@final
@dataclass(slots=True, kw_only=True, eq=False)
class ParameterReads:
    """How each module reads one parameter. `default` is for modules the plan does not list, if those listed agree."""

    name: str
    layouts: Mapping[str, Layout]
    converters: Mapping[str, Converter | None]
    reducer: Reducer
    slot: Slot | None
    #: as planned: where it was not to train, nothing reduces its gradient
    trainable: bool = True
    #: of a parameter that FSDP does not hold: what averages its gradient, and the dtype in which FSDP has others read
    averager: Averager | None = None
    dtype: torch.dtype | None = None
    default: str | None = field(init=False)

    def __post_init__(self) -> None:
        agree = len(set(self.layouts.values())) == 1
        self.default = next(iter(self.layouts)) if agree else None

    def _listed(self, readers: tuple[str, ...]) -> str | None:
        """The name under which the plan lists a module of several names."""
        return next((reader for reader in readers if reader in self.converters), self.default)

    @own_code
    def local(self, parameter: nn.Parameter, readers: tuple[str, ...]) -> Tensor:
        """The local tensor for a module. Raises PlanMismatchError where the plan leaves open how that one reads."""
        if not self.layouts:  # computed with nowhere; its dtype or device may be asked for
            return parameter
        listed = readers[0] if readers[0] in self.converters else self._listed(readers)
        if listed is None:
            planned = ", ".join(f"{name or ROOT} as {layout}" for name, layout in sorted(self.layouts.items()))
            raise PlanMismatchError(
                f"parameter {self.name} is read by module {readers[0] or ROOT}, which the plan does not list "
                f"({planned}); plan again for this model"
            )
        if parameter.requires_grad and torch.is_grad_enabled():
            if not self.trainable:
                raise UsageError(
                    f"parameter {self.name} trains, and was frozen when the plan was made, which reduces no gradient "
                    "for it: solve for the model as it is to be trained, then freeze what is to wait"
                )
            local: Tensor = _Read.apply(parameter, self)  # type: ignore[no-untyped-call]
        else:
            assert isinstance(parameter, DTensor)
            local = local_part(parameter)
        if self.dtype is not None:
            local = local.to(self.dtype)
        converter = self.converters[listed]
        return local if converter is None else converter(local)


def check_reads(name: str, placement: Layout, layouts: Mapping[str, Layout]) -> None:
    """Raises PlanError for a placement that no parameter can have, and for a read that it does not allow."""
    placement_of(placement, where=f"parameters.{name}.placement")
    for reader, layout in layouts.items():
        where = f"parameters.{name}.reads.{reader or ROOT}"
        if layout == ROWS:
            raise PlanError(f"{where}: a parameter is never read as rows")
        if layout == R_STAR and placement != R:
            raise PlanError(f"{where}: what rests as {placement} cannot be read as R*")
        if not can_convert(R_STAR if placement == R else placement, layout):
            raise PlanError(f"{where}: what rests as {placement} cannot be read as {layout}")


def plan_reads(name: str, plan: ParameterPlan, group: TpGroup, reducer: Reducer, slot: Slot) -> ParameterReads:
    """The conversions of a parameter's reads; its slot enters the reducer where one of them is R*."""
    placement, layouts = plan.placement, plan.reads
    summand = any(layout == R_STAR or (placement == R and layout.dim is not None) for layout in layouts.values())
    base = R_STAR if summand else placement
    converters: dict[str, Converter | None] = {}
    for reader, layout in layouts.items():
        where = f"parameter {name} read by {reader or ROOT}"
        converters[reader] = (
            None if layout == base else Converter(Conversion(base, layout), group, where=where, is_read=True)
        )
    if summand:
        reducer.slots.append(slot)
    return ParameterReads(
        name=name,
        layouts=layouts,
        converters=converters,
        reducer=reducer,
        slot=slot if summand else None,
        trainable=plan.trainable,
    )


class _Read(torch.autograd.Function):
    """to_local, with a gradient labelled as the parameter is, and the reducer told that it comes."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, reads: ParameterReads) -> Tensor:
        ctx.reads = reads
        ctx.spec = spec_of(parameter)
        ctx.set_materialize_grads(False)
        # No view: what code writes to a weight, it may write to this one as well.
        return local_part(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.requires_grad:
            raise UsageError(
                f"parameter {ctx.reads.name}: its gradient is to be differentiated again (create_graph=True), which "
                "the reading of a distributed parameter cannot do: plan with --tp 1"
            )
        if gradient.is_sparse:
            gradient = gradient.to_dense()  # a DTensor is none
        gradient = ctx.reads.reducer.reading_backward(ctx.reads.slot, gradient.contiguous(), ctx)
        if ctx.reads.averager is not None:
            ctx.reads.averager.gradient_comes()
        # A summand's label is wrong until the reducer has summed it. DTensor.from_local costs 20 times as much as this,
        # and DTensor's own __init__, which adds nothing, twice.
        return labelled(gradient, ctx.spec), None

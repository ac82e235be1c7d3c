"""Reads a parameter in a forward: returns the DTensor's local tensor in the layout planned for the reading module.

The base layout of a parameter at rest is S(d), R or R*. It is R* where any module reads the parameter as R*, or reads a
slice of a parameter that rests whole: its gradient on a rank is then a summand, and a read as R gives a summand too
(R* -> R divides its gradient by t). A read converts base -> read. A fused weight rests in its own order and is read
part by part: S(0) -> S(0; q, k, v). A weight that is read in fewer slices than ranks rests whole: R* -> S(0)/m.
"""

import itertools
import weakref
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


def placement_of(layout: Layout, *, path: str) -> Placement:
    """Returns the DTensor placement of a parameter's layout at rest. Raises PlanError unless it is R or S(dim)."""
    match layout.kind:
        case LayoutKind.REPLICATE:
            return Replicate()
        case LayoutKind.SHARD if layout.is_plain:
            assert layout.dim is not None
            return Shard(layout.dim)
        case _:
            raise PlanError(f"expected R or S(dim), got {layout}", plan_path=path)


@final
@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ParameterReads:
    """How modules read one parameter: layout and converter by the reading module's name.

    `default` is the entry for modules that the plan does not list; None where the listed ones read it differently.
    `number` [] is unique in this process: a compiled backward names the reads by it. A tensor is an input of compiled
    code, which so serves like layers, where a number would be a constant in it.
    """

    name: str
    layouts: Mapping[str, Layout]
    converters: Mapping[str, Converter | None]
    reducer: Reducer
    slot: Slot | None
    #: whether the parameter trained when the plan was made; if not, nothing reduces its gradient
    trainable: bool = True
    #: for a parameter that FSDP does not hold: its gradient's averager, and the dtype that FSDP casts others to
    averager: Averager | None = None
    dtype: torch.dtype | None = None
    default: str | None = field(init=False)
    number: Tensor = field(init=False)

    def __post_init__(self) -> None:
        agree = len(set(self.layouts.values())) == 1
        self.default = next(iter(self.layouts)) if agree else None
        self._register()

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restores a copy, under a number of its own."""
        for name, value in state[1].items():
            setattr(self, name, value)
        self._register()

    def _register(self) -> None:
        number = next(_NUMBERS)
        self.number = torch.tensor(number, device="cpu")
        _BY_NUMBER[number] = self

    def _listed(self, readers: tuple[str, ...]) -> str | None:
        """Returns the name under which the plan lists the reading module, which may have several; else the default."""
        return next((reader for reader in readers if reader in self.converters), self.default)

    @own_code
    def local(self, parameter: nn.Parameter, readers: tuple[str, ...]) -> Tensor:
        """Returns the local tensor for the module with the names `readers`.

        Raises PlanMismatchError where the plan does not say how that module reads the parameter, and what `converted`
        raises.
        """
        if not self.layouts:  # no planned module computes with it; code may still ask for its dtype or device
            return parameter
        if not isinstance(parameter, DTensor) and self._is_read_as_it_is(readers):
            return parameter
        listed = readers[0] if readers[0] in self.converters else self._listed(readers)
        if listed is None:
            planned = ", ".join(f"{name or ROOT} as {layout}" for name, layout in sorted(self.layouts.items()))
            raise PlanMismatchError(
                f"parameter {self.name} is read by module {readers[0] or ROOT}, which the plan does not list "
                f"({planned}); solve again for this model"
            )
        return self.converted(parameter, self.converters[listed])

    def _is_read_as_it_is(self, readers: tuple[str, ...]) -> bool:
        """True where a tensor that torch.func.functional_call puts in the parameter's place needs no conversion: as
        the plan knows of no reading there, so that it is in the layout it was computed in; or as all read the whole."""
        return self.converters.keys().isdisjoint(readers) or set(self.layouts.values()) == {R}

    @own_code
    def converted(self, parameter: nn.Parameter, converter: Converter | None) -> Tensor:
        """Returns the local tensor, converted by one of the converters.

        Raises PlanMismatchError for a plain tensor in the parameter's place, and UsageError for a parameter that trains
        and was frozen when the plan was made.
        """
        if not isinstance(parameter, DTensor):
            raise PlanMismatchError(
                f"{self.name} is a plain tensor in place of the parameter, as torch.func.functional_call puts it "
                "there, and whether it is a rank's slice cannot be told: give a DTensor, or compute with it by "
                "torch.nn.functional"
            )
        if parameter.requires_grad and torch.is_grad_enabled():
            if not self.trainable:
                raise UsageError(
                    f"parameter {self.name} trains, and was frozen when the plan was made, so that its gradient would "
                    "not be reduced: solve with the parameter trainable; it may be frozen after apply_plan"
                )
            local: Tensor
            if torch.compiler.is_compiling():
                local = parameter.to_local(grad_placements=parameter.placements)
                if self.reducer.slots or self.averager is not None:
                    local = _CompiledRead.apply(local, self.number)  # type: ignore[no-untyped-call]
            else:
                local = _Read.apply(parameter, self)  # type: ignore[no-untyped-call]
        else:
            local = local_part(parameter)
        if self.dtype is not None:
            local = local.to(self.dtype)
        return local if converter is None else converter(local)

    def backward(self, gradient: Tensor, read: Any) -> Tensor:
        """Returns the gradient to accumulate for one read; `read` is its autograd node, None in a compiled backward."""
        gradient = self.reducer.reading_backward(self.slot, gradient, read)
        if self.averager is not None:
            self.averager.gradient_comes()
        return gradient


_NUMBERS = itertools.count()
#: the reads that exist, by their number
_BY_NUMBER: "weakref.WeakValueDictionary[int, ParameterReads]" = weakref.WeakValueDictionary()


def _read_backward(gradient: Tensor, number: Tensor) -> Tensor:
    """ParameterReads.backward as an operator, for compiled backwards: what it does beside its result happens when the
    compiled code runs. The gradient is copied, because compiled code uses an operand's memory again, and no operator
    may return its operand."""
    return _BY_NUMBER[int(number)].backward(gradient.clone(), None)


_LIBRARY: Any = torch.library.Library("tpplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("read_backward(Tensor gradient, Tensor number) -> Tensor")
_LIBRARY.impl("read_backward", _read_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tpplan::read_backward", lambda gradient, number: torch.empty_like(gradient))


def check_reads(name: str, placement: Layout, layouts: Mapping[str, Layout]) -> None:
    """Raises PlanError for a placement that no parameter can have, and for a read that the placement does not allow."""
    placement_of(placement, path=f"parameters.{name}.placement")
    for reader, layout in layouts.items():
        path = f"parameters.{name}.reads.{reader or ROOT}"
        if layout == ROWS:
            raise PlanError("a parameter is never read as rows, only ids are: read the table as S(0)", plan_path=path)
        if layout == R_STAR and placement != R:
            raise PlanError(f"what rests as {placement} cannot be read as R*: place it as R", plan_path=path)
        if not can_convert(R_STAR if placement == R else placement, layout):
            raise PlanError(
                f"what rests as {placement} cannot be read as {layout}: change placement or read", plan_path=path
            )


def plan_reads(name: str, plan: ParameterPlan, group: TpGroup, reducer: Reducer, slot: Slot) -> ParameterReads:
    """Returns how modules read a parameter; adds its slot to the reducer where its gradient on a rank is a summand."""
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
    """DTensor.to_local as an autograd node; its backward tells the reducer and returns a DTensor like the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, reads: ParameterReads) -> Tensor:
        ctx.reads = reads
        ctx.spec = spec_of(parameter)
        ctx.set_materialize_grads(False)
        # Not a view: code may write in place to a weight, which autograd forbids for a view made here.
        return local_part(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.requires_grad:
            raise UsageError(
                f"parameter {ctx.reads.name}: its gradient is to be differentiated again (create_graph=True), which "
                "tensor parallelism does not support: plan with --tp 1"
            )
        if gradient.is_sparse:
            gradient = gradient.to_dense()  # DTensors cannot be sparse
        gradient = ctx.reads.backward(gradient.contiguous(), ctx)
        # A summand's placement label is wrong until the reducer has summed it. `labelled` skips DTensor.from_local,
        # which takes 20 times as long, and DTensor.__init__, which takes twice as long and checks nothing more.
        return labelled(gradient, ctx.spec), None


class _CompiledRead(torch.autograd.Function):
    """The local tensor of a DTensor, whose backward tells the reducer, in code that torch.compile can trace."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(number)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (number,) = ctx.saved_tensors
        return torch.ops.tpplan.read_backward(gradient.contiguous(), number), None

"""Reads a buffer in a forward: returns this rank's slice of it in the layout planned for the reading module.

A buffer is whole on every rank, in the module's own table and in state_dict. It carries no gradient, so a read sends
nothing. Nothing writes to a buffer that is read as a slice: the plan names no other (tpplan.layouts.readings).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from tpplan.apply.collectives.redistribute import Converter, TpGroup
from tpplan.core.errors import PlanError, PlanMismatchError
from tpplan.core.layout import R_STAR, ROWS, Conversion, R, can_convert, fits
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import BufferPlan
from tpplan.trace.hooks.call_rewriting import own_code


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferReads:
    """How modules read one buffer: the converter by the reading module's name, None where it reads the buffer whole.

    A module that is not named reads it whole.
    """

    converted: Mapping[str, Converter | None]

    @own_code
    def local(self, buffer: Tensor, readers: tuple[str, ...]) -> Tensor:
        """Returns the buffer, or the rank's slice of it, for the module with the names `readers`."""
        reader = next((name for name in readers if name in self.converted), None)
        converter = self.converted[reader] if reader is not None else None
        return buffer if converter is None else converter(buffer)

    def converters(self) -> Iterator[Converter]:
        """Yields the converters of all reads."""
        yield from (converter for converter in self.converted.values() if converter is not None)


def check_buffer(name: str, plan: BufferPlan, buffer: Tensor | None, tp: int) -> None:
    """Raises PlanMismatchError for a buffer that the model lacks or has in another shape, and PlanError for a layout
    in which no buffer can be read on tp ranks."""
    found = None if buffer is None else tuple(buffer.shape)
    if found != plan.shape:
        shown = "has no such buffer" if found is None else f"has shape {list(found)} there"
        raise PlanMismatchError(f"buffer {name}: the plan is for shape {list(plan.shape)}, and the model {shown}")
    for reader, layout in plan.reads.items():
        is_slice = layout.dim is not None and layout != ROWS and can_convert(R_STAR, layout)
        if layout != R and not (is_slice and fits(plan.shape, layout, tp)):
            raise PlanError(
                f"a buffer of shape {list(plan.shape)} cannot be read as {layout} on tp = {tp}: read it as R, or name "
                "a dim that divides by tp",
                plan_path=f"buffers.{name}.reads.{reader or ROOT}",
            )


def buffer_reads(name: str, plan: BufferPlan, group: TpGroup) -> BufferReads:
    """Returns how modules read a buffer."""
    return BufferReads(
        converted={
            reader: Converter(
                Conversion(R_STAR, layout), group, where=f"buffer {name} read by {reader or ROOT}", is_read=True
            )
            if layout != R
            else None
            for reader, layout in plan.reads.items()
        }
    )

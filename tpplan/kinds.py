"""Layers that decide alike and cost alike, and how many of them get which treatment."""

from dataclasses import dataclass

from tpplan.graph import Source
from tpplan.plan import Recompute
from tpplan.treatments import Count, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An FSDP unit: parameters gathered together. `hides` are the decisions of its module."""

    name: str
    parameters: tuple[Source, ...]
    hides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers that decide alike and cost alike, in the order they run in, and how many get each treatment."""

    units: tuple[Unit, ...]
    numbers: Numbers

    @property
    def unit(self) -> Unit:
        """One that stands for all."""
        return self.units[0]

    def count(self, *, recompute: Recompute | None = None, reshard: bool | None = None) -> Count:
        """How many layers have a treatment of this kind."""
        return self.numbers.count(
            [
                treatment
                for treatment in self.numbers.counts
                if recompute in (None, treatment.recompute) and reshard in (None, treatment.reshard)
            ]
        )

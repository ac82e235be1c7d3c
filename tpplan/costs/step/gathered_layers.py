"""Parameters that FSDP holds gathered, as terms of the memory constraint (tpplan.costs.step.memory_rows)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tpplan.core.mesh import Mesh
from tpplan.costs.step.layer_groups import Families
from tpplan.costs.step.parameter_bytes import RowBytes
from tpplan.layouts.layer_treatments import FsdpUnit, LayerGroup
from tpplan.plan.parts import UNSHARDED_PARAMETERS
from tpplan.plan.plan import Precision, Recompute
from tpplan.solvers.problem import Expression, Term, scaled


@dataclass(frozen=True, kw_only=True)
class GatheredLayers:
    """Gathered parameters of FSDP's root unit and of the layers, which are in groups, `kinds`."""

    kinds: tuple[LayerGroup, ...]
    families: Families
    root: tuple[FsdpUnit, ...]
    sizes: RowBytes
    mesh: Mesh
    precision: Precision
    uses_fsdp: bool

    @property
    def cast(self) -> float:
        """The cast copy of a rank's shard, as a part of the gathered unit."""
        return 1 / self.mesh.shard if self.precision is Precision.BF16_MIXED else 0.0

    @property
    def at_once(self) -> float:
        """Gathered layers at once: a layer and the next one's buffer, on one shard a layer and its cast copy."""
        if self.mesh.shard > 1:
            return 2 + self.cast
        return 1 + float(self.precision is Precision.BF16_MIXED)

    def throughout(self) -> Iterator[Term]:
        """Parameters of the root and of the layers that are not resharded."""
        if not self.uses_fsdp:
            return
        for unit in self.root:
            yield Term(name=UNSHARDED_PARAMETERS, expressions=(self.sizes.gathered(unit.parameters),))
        yield from self.kept()

    def kept(self) -> Iterator[Term]:
        """Parameters of the layers that are not resharded."""
        for kind, gathered in zip(self.kinds, self.each, strict=True):
            yield from kind.count(reshard=False).times(Term(name=UNSHARDED_PARAMETERS, expressions=(gathered,)))

    def before_the_first(self) -> Iterator[Term]:
        """Parameters of layers that are not resharded, in families before the largest and, if recomputed, in it.

        Without these, from the last layer to the first each frees no more than the one after it, so what is held is
        convex and largest at an end. Counting them at the first layer covers every layer in between.
        """
        earlier = {family.first for family in self.families.earlier[:-1]}
        for kind, gathered in zip(self.kinds, self.each, strict=True):
            first = self.families.first(kind)
            for mode in Recompute:
                if first in earlier or (first == self.families.largest.first and mode is not Recompute.NONE):
                    count = kind.count(recompute=mode, reshard=False)
                    yield from count.times(Term(name=UNSHARDED_PARAMETERS, expressions=(gathered,)))

    def for_a_while(self) -> Term:
        """Parameters of the largest resharded layer with the next one's buffer; in forward any layer has a buffer."""
        found = [Expression()]
        for kind, gathered in zip(self.kinds, self.each, strict=True):
            if self.mesh.shard > 1:
                found.append(scaled(gathered, 1 + self.cast))
            found += kind.count(reshard=True).where_any(scaled(gathered, self.at_once))
        return Term(name=UNSHARDED_PARAMETERS, expressions=tuple(found))

    @cached_property
    def each(self) -> list[Expression]:
        """Bytes of one gathered layer of each group."""
        return [self.sizes.gathered(kind.unit.parameters) for kind in self.kinds]

"""What is done to each layer: what of it is recomputed, and whether FSDP reshards it after forward.

Layers that decide alike share their layouts, and a treatment is given to a number of them: n_t of N, all of them N
together. A layer under a treatment costs what its layouts make it cost; the problem multiplies that by the number
(tpplan.solvers.problem.Split).

The order in which layers get their treatments is part of the plan: from the first layer to the last those of TREATMENTS
in its order. Backward goes from the last layer to the first, so what the last layers keep is gone by the time the first
ones are made again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.core.graph import Source
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Choice, Expression, Split, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What of a layer runs again in backward, and whether it is resharded after forward (ZeRO-3) or kept (ZeRO-2)."""

    recompute: Recompute
    reshard: bool

    def __str__(self) -> str:
        return f"{self.recompute}, {'resharded' if self.reshard else 'kept gathered'}"


#: in the order in which the layers of a kind get them
TREATMENTS = tuple(
    Treatment(recompute=mode, reshard=reshard)
    for mode in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE)
    for reshard in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of layers: a constant and the numbers of some parts."""

    constant: int = 0
    parts: tuple[str, ...] = ()

    def value(self, choice: Choice) -> int:
        """The number under a choice."""
        return self.constant + sum(choice[part] for part in self.parts)

    def times(self, term: Term) -> Iterator[Term]:
        """Terms whose sum is the number times a term."""
        if self.constant:
            yield Term(name=term.name, expressions=term.expressions, weight=term.weight * self.constant)
        for part in self.parts:
            yield Term(name=term.name, expressions=term.expressions, weight=term.weight, each=part)

    def where_any(self, expression: Expression, others: Sequence["Count"] = ()) -> Iterator[Expression]:
        """Expressions of which the largest is `expression` if there is such a layer and none of the others; none else.
        It is at least as large as a maximum it stands in, or leaves that as it is."""
        if any(other.constant for other in others):
            return
        unless = tuple(part for other in others for part in other.parts)
        if self.constant:
            yield replace(expression, unless=unless)
        yield from (replace(expression, where=part, unless=unless) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How many of N like layers get each treatment; one of several is decided by a split."""

    counts: Mapping[Treatment, Count]
    splits: tuple[Split, ...] = ()

    def count(self, treatments: Sequence[Treatment]) -> Count:
        """How many layers get any of these. All of them get one."""
        found = [count for treatment, count in self.counts.items() if treatment in treatments]
        if self.splits and len(found) == len(self.counts):
            return Count(constant=self.splits[0].total)
        return Count(
            constant=sum(count.constant for count in found),
            parts=tuple(part for count in found for part in count.parts),
        )


def numbers_of(name: str, size: int, treatments: Sequence[Treatment]) -> Numbers:
    """Numbers of `size` layers, called `name`, over some treatments."""
    if len(treatments) == 1:
        return Numbers(counts={treatments[0]: Count(constant=size)})
    parts = {treatment: f"{name} and like: {treatment}" for treatment in treatments}
    return Numbers(
        counts={treatment: Count(parts=(part,)) for treatment, part in parts.items()},
        splits=(Split(parts=tuple(parts.values()), total=size),),
    )


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

"""Treatments of layers: what is recomputed in backward, and whether FSDP reshards after forward.

Layers with the same decisions share their layouts. The solver decides how many of the N layers get each treatment: n_t
of N, with sum_t n_t = N. The cost of a layer under a treatment follows from the shared layouts; the problem multiplies
it by n_t (tpplan.solvers.problem.Split).

Treatments are given to layers from the first to the last, in the order of TREATMENTS. Backward runs from the last layer
to the first, so activations that the last layers keep are freed before the first layers are recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.core.graph import Source
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Choice, Expression, Split, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How a layer is recomputed, and whether FSDP reshards it after forward (ZeRO-3) or keeps it gathered (ZeRO-2)."""

    recompute: Recompute
    reshard: bool

    def __str__(self) -> str:
        return f"{self.recompute}, {'resharded' if self.reshard else 'kept gathered'}"


#: all treatments, in the order in which they are given to layers from the first to the last
TREATMENTS = tuple(
    Treatment(recompute=mode, reshard=reshard)
    for mode in sorted(Recompute, key=lambda mode: len(mode.lighter), reverse=True)
    for reshard in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of layers: a constant plus the numbers of some parts of a split."""

    constant: int = 0
    parts: tuple[str, ...] = ()

    def value(self, choice: Choice) -> int:
        """The number of layers under a choice."""
        return self.constant + sum(choice[part] for part in self.parts)

    def times(self, term: Term) -> Iterator[Term]:
        """Yields terms whose sum is the number of layers times `term`."""
        if self.constant:
            yield Term(name=term.name, expressions=term.expressions, weight=term.weight * self.constant)
        for part in self.parts:
            yield Term(name=term.name, expressions=term.expressions, weight=term.weight, each=part)

    def where_any(self, expression: Expression, others: Sequence["Count"] = ()) -> Iterator[Expression]:
        """Yields guarded copies of `expression`, one of which counts where this number is above 0 and all others are 0.

        In a maximum, the copies stand for `expression` under that condition and change nothing otherwise.
        """
        if any(other.constant for other in others):
            return
        unless = tuple(part for other in others for part in other.parts)
        if self.constant:
            yield replace(expression, unless=unless)
        yield from (replace(expression, where=part, unless=unless) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How many of N like layers get each treatment; a split decides where there are several treatments."""

    counts: Mapping[Treatment, Count]
    splits: tuple[Split, ...] = ()

    def count(self, treatments: Sequence[Treatment]) -> Count:
        """How many layers get any of the given treatments; the constant N where these are all treatments."""
        found = [count for treatment, count in self.counts.items() if treatment in treatments]
        if self.splits and len(found) == len(self.counts):
            return Count(constant=self.splits[0].total)
        return Count(
            constant=sum(count.constant for count in found),
            parts=tuple(part for count in found for part in count.parts),
        )


def numbers_of(name: str, size: int, treatments: Sequence[Treatment]) -> Numbers:
    """The numbers of `size` layers over some treatments; `name`, the first layer's, labels the parts of the split."""
    if len(treatments) == 1:
        return Numbers(counts={treatments[0]: Count(constant=size)})
    parts = {treatment: f"{name} and like: {treatment}" for treatment in treatments}
    return Numbers(
        counts={treatment: Count(parts=(part,)) for treatment, part in parts.items()},
        splits=(Split(parts=tuple(parts.values()), total=size),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnit:
    """An FSDP unit: parameters that are gathered together. `hides` are the decisions of the unit's module, whose
    compute overlaps with the gather. `calls` is the number of times that a forward calls the module: each call of one
    that is resharded gathers it, and so does each backward of a call but the first one, before which it was kept."""

    name: str
    parameters: tuple[Source, ...]
    hides: tuple[str, ...]
    calls: int = 1

    def gathers_in_backward(self, *, reshards: bool, is_kept: bool) -> int:
        """How often a backward gathers the unit. reshards: after forward; is_kept: after backward."""
        return self.calls if reshards else 0 if is_kept else self.calls - 1

    @property
    def divisions(self) -> tuple[int, ...]:
        """The numbers of ranks that divide the unit's parameters by experts: 1 for ordinary parameters, ep for experts.
        FSDP gathers the parameters of each number separately, over different ranks."""
        return tuple(dict.fromkeys(source.ep for source in self.parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers with the same decisions and costs, in execution order, and how many of them get each treatment."""

    units: tuple[FsdpUnit, ...]
    numbers: Numbers

    @property
    def unit(self) -> FsdpUnit:
        """The first unit, which represents all units of the group."""
        return self.units[0]

    def count(self, *, recompute: Recompute | None = None, reshard: bool | None = None) -> Count:
        """How many layers have a treatment with this recomputation and resharding; None matches any."""
        return self.numbers.count(
            [
                treatment
                for treatment in self.numbers.counts
                if recompute in (None, treatment.recompute) and reshard in (None, treatment.reshard)
            ]
        )

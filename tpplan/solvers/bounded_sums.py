"""Sums over columns with bounds: presolve works on them, and the ILP is built from them.

A sum is at least its lower bound, plus an extra >= 0 for each chosen column. A part is one of the whole numbers into
which a split divides its total (tpplan.solvers.problem.Split).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpplan.solvers.matrix import Floats
from tpplan.solvers.problem import LIMIT_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a split: its name, the index and total of its split, and the largest number it may have."""

    name: str
    split: int
    total: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Part numbers that condition an expression: it counts where `where` is not empty and all of `unless` are."""

    where: int | None = None
    unless: tuple[int, ...] = ()


#: the guard of an expression that always counts
ALWAYS = Guard()


@dataclass(frozen=True, kw_only=True)
class BoundedMaximum:
    """weight * (the number of part `each`) * max over expressions `lows[a] + extras[a, column]` whose guard holds.

    Extras are >= 0. At least one expression always counts.
    """

    weight: float
    each: int | None
    lows: Floats
    extras: Floats
    guards: tuple[Guard, ...]
    #: upper bound of each expression
    highs: Floats

    @cached_property
    def low(self) -> float:
        """A lower bound on the unweighted maximum."""
        return max(float(low) for low, guard in zip(self.lows, self.guards, strict=True) if guard == ALWAYS)

    @property
    def high(self) -> float:
        """An upper bound on the unweighted maximum."""
        return float(self.highs.max())

    def raised(self) -> Floats:
        """The amount by which each column alone raises the lower bound."""
        always = [a for a, guard in enumerate(self.guards) if guard == ALWAYS]
        above = self.extras[always] - (self.low - self.lows[always])[:, None]
        raised: Floats = np.maximum(above.max(axis=0), 0.0)
        return raised


@dataclass(frozen=True, kw_only=True)
class BoundedSum:
    """A sum of linear rows `lows[q] + extras[q, column]`, row 0 once and row q + 1 as often as part q, and of maxima.

    `limit` is infinite for an objective without a ceiling.
    """

    lows: Floats
    extras: Floats
    highs: Floats
    maxima: tuple[BoundedMaximum, ...]
    limit: float
    parts: tuple[Part, ...]

    def _by_part(self, lows: Floats, of_maximum: Mapping[int, float]) -> Floats:
        found = lows.copy()
        for i, maximum in enumerate(self.maxima):
            found[0 if maximum.each is None else maximum.each + 1] += maximum.weight * of_maximum[i]
        return found

    def _combined(self, by_part: Floats, choose: str) -> float:
        value = float(by_part[0])
        for split in dict.fromkeys(part.split for part in self.parts):
            own = [i for i, part in enumerate(self.parts) if part.split == split and part.most]
            value += self.parts[own[0]].total * float(getattr(by_part[[i + 1 for i in own]], choose)())
        return value

    @cached_property
    def low(self) -> float:
        """A lower bound on the value."""
        return self._combined(self.lows_by_part, "min")

    @property
    def high(self) -> float:
        """An upper bound on the value."""
        return self._combined(self._by_part(self.highs, {i: p.high for i, p in enumerate(self.maxima)}), "max")

    @cached_property
    def lows_by_part(self) -> Floats:
        """Lower bounds on the terms that count once, and on the terms of one member of each part."""
        return self._by_part(self.lows, {i: p.low for i, p in enumerate(self.maxima)})

    @property
    def allowance(self) -> float:
        """The excess over the limit that counts as rounding of the sum."""
        return LIMIT_TOLERANCE * max(abs(self.limit), abs(self.low))

    def raised(self) -> Floats:
        """The amount by which each column alone raises the lower bound."""
        lows, rows = self.lows_by_part, self.extras.copy()
        for maximum in self.maxima:
            rows[0 if maximum.each is None else maximum.each + 1] += maximum.weight * maximum.raised()
        found: Floats = rows[0]
        for split in dict.fromkeys(part.split for part in self.parts):
            own = [i for i, part in enumerate(self.parts) if part.split == split and part.most]
            values = lows[[i + 1 for i in own], None] + rows[[i + 1 for i in own]]
            found = found + self.parts[own[0]].total * (values.min(axis=0) - lows[[i + 1 for i in own]].min())
        return found

    def affordable(self) -> list[int]:
        """The largest number of each part for which the limit may leave room."""
        lows, slack = self.lows_by_part, self.limit + self.allowance - self.low
        least: dict[int, float] = {}
        for part, low in zip(self.parts, lows[1:].tolist(), strict=True):
            if part.most:
                least[part.split] = min(low, least.get(part.split, math.inf))
        return [
            _within(slack, float(low - least[part.split]), part.most)
            for part, low in zip(self.parts, lows[1:].tolist(), strict=True)
        ]


def _within(slack: float, extra: float, most: int) -> int:
    """How many times `extra` fits into `slack`, at most `most`."""
    if extra <= 0 or slack == math.inf:
        return most
    return min(most, max(0, math.floor(slack / extra * (1 + LIMIT_TOLERANCE))))

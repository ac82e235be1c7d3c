"""What is certain before a solver runs: dead columns, idle constraints, numbers around their minimum.

Columns are those of the skeleton (tpplan.solvers.groups): each chooses for a group of nodes.

- A column dies when a link finds no partner for it, or when alone it costs more than a limit leaves: a forbidden choice
  is an absent column. So does a part of a split of which a limit does not allow one.
- Of two columns with the same layouts, one that is nowhere better than the other dies.
- Per expression and group, the cheapest column's entry moves into the constant. One-hot groups make this exact, and
  afterwards constant <= value <= constant + sum of the largest extras.
- Of a term's expressions those that can never be the largest are dropped. With one left, or with all over one group,
  the term is linear.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from tpplan.solvers.groups import Ints, Mask, Skeleton, skeleton_of
from tpplan.solvers.problem import Choice, Expression, Problem, Term

Floats = npt.NDArray[np.float64]

#: rounding in sums must not decide whether a limit is kept: this share of it is granted
LIMIT_TOLERANCE = 1e-9

#: columns of a kind up to which all pairs are compared at once
MOST_AT_ONCE = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a split: its name, the split's number and total, and how many of it may be chosen."""

    name: str
    split: int
    total: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Parts, by number, of which there must be any, or none, for an expression to count."""

    where: int | None = None
    unless: tuple[int, ...] = ()


ALWAYS = Guard()


@dataclass(frozen=True, kw_only=True)
class Peak:
    """weight * max over expressions `lows[a] + extras[a, column]` whose guard holds, as often as the part `each` says.

    Extras are >= 0; one of the expressions counts always.
    """

    weight: float
    each: int | None
    lows: Floats
    extras: Floats
    guards: tuple[Guard, ...]
    #: the most that each expression can be
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
        """What each column alone adds to the lower bound."""
        always = [a for a, guard in enumerate(self.guards) if guard == ALWAYS]
        above = self.extras[always] - (self.low - self.lows[always])[:, None]
        raised: Floats = np.maximum(above.max(axis=0), 0.0)
        return raised


@dataclass(frozen=True, kw_only=True)
class Total:
    """A sum: linear rows `lows[q] + extras[q, column]`, the first once and the others as often as their part says, and
    peaks. `limit` is infinite for an objective."""

    lows: Floats
    extras: Floats
    highs: Floats
    peaks: tuple[Peak, ...]
    limit: float
    parts: tuple[Part, ...]

    def _by_part(self, lows: Floats, of_peak: Mapping[int, float]) -> Floats:
        found = lows.copy()
        for i, peak in enumerate(self.peaks):
            found[0 if peak.each is None else peak.each + 1] += peak.weight * of_peak[i]
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
        return self._combined(self._by_part(self.highs, {i: p.high for i, p in enumerate(self.peaks)}), "max")

    @cached_property
    def lows_by_part(self) -> Floats:
        """Lower bounds on what is there once, and for one of each part."""
        return self._by_part(self.lows, {i: p.low for i, p in enumerate(self.peaks)})

    @property
    def allowance(self) -> float:
        """What is granted above the limit: rounding of the sum."""
        return LIMIT_TOLERANCE * max(abs(self.limit), abs(self.low))

    def raised(self) -> Floats:
        """What each column alone adds to the lower bound."""
        lows, rows = self.lows_by_part, self.extras.copy()
        for peak in self.peaks:
            rows[0 if peak.each is None else peak.each + 1] += peak.weight * peak.raised()
        found: Floats = rows[0]
        for split in dict.fromkeys(part.split for part in self.parts):
            own = [i for i, part in enumerate(self.parts) if part.split == split and part.most]
            values = lows[[i + 1 for i in own], None] + rows[[i + 1 for i in own]]
            found = found + self.parts[own[0]].total * (values.min(axis=0) - lows[[i + 1 for i in own]].min())
        return found

    def affordable(self) -> list[int]:
        """How many of each part the limit may leave room for."""
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
    """How often an amount goes into what is left, as far as that counts."""
    if extra <= 0 or slack == math.inf:
        return most
    return min(most, max(0, math.floor(slack / extra * (1 + LIMIT_TOLERANCE))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """An equivalent, smaller problem: columns that are left, by their numbers in the skeleton, where each group's begin
    among them, and what they cost. Resources that no choice can exceed are gone."""

    skeleton: Skeleton
    columns: Ints
    starts: Ints
    parts: tuple[Part, ...]
    objective: Total
    resources: tuple[Total, ...]

    def choice(self, chosen: Ints, numbers: Mapping[str, int]) -> dict[str, int]:
        """Strategies by node, from one column (a number in the skeleton) of each group, beside the numbers of parts."""
        found = {}
        groups = np.searchsorted(self.skeleton.starts, chosen, side="right") - 1
        column_of = dict(zip(self.skeleton.starts[groups].tolist(), chosen.tolist(), strict=True))
        for name, place in self.skeleton.places.items():
            found[name] = int(place.strategies[column_of[place.start] - place.start])
        return found | dict(numbers)


def reduce(problem: Problem, *, ceiling: float = math.inf) -> Reduced | None:
    """The problem without what cannot be part of a solution; None when it is infeasible.

    `ceiling`: an objective that is known to be reachable; what costs more dies.
    """
    skeleton = shared_skeleton(problem)
    if skeleton is None:
        return None
    state = _State(problem, skeleton, ceiling)
    while True:
        objective, *resources = state.totals()
        if any(total.low > total.limit + total.allowance for total in (objective, *resources)):
            return None
        binding = tuple(resource for resource in resources if resource.high > resource.limit)
        dead = state.unaffordable((objective, *resources))
        if dead is None:
            return None
        if not dead.any() and not state.has_fewer_parts:
            dead = state.dominated((objective, *binding))
            if not dead.any():
                return Reduced(
                    skeleton=skeleton,
                    columns=state.columns,
                    starts=state.starts,
                    parts=state.parts,
                    objective=objective,
                    resources=binding,
                )
        if not state.keep(~dead):
            return None


def shared_skeleton(problem: Problem) -> Skeleton | None:
    """The skeleton of nodes and edges, found once for problems that share them."""
    shared = problem.shared
    if shared.edges is not problem.edges:
        shared.edges, shared.found = problem.edges, {}
    if problem.nodes not in shared.found:
        shared.found[problem.nodes] = skeleton_of(problem.nodes, problem.edges)
    found = shared.found[problem.nodes]
    assert found is None or isinstance(found, Skeleton)
    return found


@dataclass(slots=True)
class _Row:
    """A sum as it is collected: rows of constants and of entries by part, the first without one, and terms of several
    expressions with their rows."""

    constants: Floats
    entries: Floats
    limit: float
    peaks: list[Peak] = field(default_factory=list)


class _State:
    """What is left of a problem while it is reduced."""

    def __init__(self, problem: Problem, skeleton: Skeleton, ceiling: float) -> None:
        self.skeleton = skeleton
        self.alive: Mask = np.ones(skeleton.num_columns, bool)
        self.columns: Ints = np.arange(skeleton.num_columns)
        self.starts: Ints = skeleton.starts[:-1]
        self.parts = tuple(
            Part(name=name, split=i, total=split.total, most=split.total)
            for i, split in enumerate(problem.splits)
            for name in split.parts
        )
        self.has_fewer_parts = False
        numbers = {part.name: i for i, part in enumerate(self.parts)}
        sums = [(problem.objective, ceiling), *((resource.terms, resource.limit) for resource in problem.limits)]
        self.rows = [self._row(terms, limit, numbers) for terms, limit in sums]

    def _row(self, terms: tuple[Term, ...], limit: float, numbers: Mapping[str, int]) -> _Row:
        size = 1 + len(self.parts)
        row = _Row(constants=np.zeros(size), entries=np.zeros((size, self.skeleton.num_columns)), limit=limit)
        linear: list[tuple[int, float, Expression]] = []
        for term in terms:
            if term.weight == 0:
                continue
            each = None if term.each is None else numbers[term.each]
            if len(term.expressions) == 1:
                place = 0 if each is None else each + 1
                row.constants[place] += term.weight * term.expressions[0].constant
                linear.append((place, term.weight, term.expressions[0]))
                continue
            extras = np.zeros((len(term.expressions), self.skeleton.num_columns))
            self._add(extras, [(i, 1.0, expression) for i, expression in enumerate(term.expressions)])
            lows = np.array([expression.constant for expression in term.expressions])
            guards = tuple(
                Guard(
                    where=None if expression.where is None else numbers[expression.where],
                    unless=tuple(numbers[part] for part in expression.unless),
                )
                for expression in term.expressions
            )
            row.peaks.append(Peak(weight=term.weight, each=each, lows=lows, extras=extras, guards=guards, highs=lows))
        self._add(row.entries, linear)
        return row

    def _add(self, rows: Floats, weighted: Sequence[tuple[int, float, Expression]]) -> None:
        """Adds so many times an expression's entries to a row, by its number, one after the other."""
        places = [self.skeleton.places[name] for _, _, expression in weighted for name, _ in expression.terms]
        if not places:
            return
        vectors = [vector for _, _, expression in weighted for _, vector in expression.terms]
        lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
        sizes = np.fromiter((place.stop - place.start for place in places), np.int64, len(places))
        numbers = [len(expression.terms) for _, _, expression in weighted]
        begins = np.repeat([number for number, _, _ in weighted], numbers) * rows.shape[1]
        begins += [place.start for place in places]
        entries = np.fromiter(chain.from_iterable(vectors), np.float64, int(lengths.sum()))
        picked = np.concatenate([place.strategies for place in places]) + np.repeat(np.cumsum(lengths) - lengths, sizes)
        # Within a group a column's number grows by one with its place.
        columns = np.arange(len(picked)) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        weights = np.repeat(np.repeat([weight for _, weight, _ in weighted], numbers), sizes)
        np.add.at(rows.reshape(-1), columns, weights * entries[picked])

    def _around(self, lows: Floats, entries: Floats) -> tuple[Floats, Floats, Floats]:
        """Rows with each group's minimum moved into the constant, and the most that they can be."""
        if not entries.size:
            return lows, entries, lows
        least = np.minimum.reduceat(entries, self.starts, axis=1)
        extras = entries - np.repeat(least, self.sizes, axis=1)
        lows = lows + least.sum(axis=1)
        return lows, extras, lows + np.maximum.reduceat(extras, self.starts, axis=1).sum(axis=1)

    @property
    def sizes(self) -> Ints:
        """Columns of each group."""
        sizes: Ints = np.diff(np.append(self.starts, len(self.columns)))
        return sizes

    def totals(self) -> list[Total]:
        """Every sum, the objective first, with terms that turn out to be linear among the linear ones."""
        return [self._total(row) for row in self.rows]

    def _total(self, row: _Row) -> Total:
        peaks = []
        for peak in row.peaks:
            if peak.each is not None and not self.parts[peak.each].most:
                continue
            left = self._flattened(self._undominated(peak), row)
            if left is not None:
                peaks.append(left)
        row.peaks = peaks
        row.constants, row.entries, highs = self._around(row.constants, row.entries)
        return Total(
            lows=row.constants,
            extras=row.entries,
            highs=highs,
            peaks=tuple(peaks),
            limit=row.limit,
            parts=self.parts,
        )

    def _undominated(self, peak: Peak) -> Peak:
        """The peak with the expressions that can be the largest: one below another's minimum, whatever is chosen, is
        not, nor one whose guard cannot hold."""
        lows, extras, highs = self._around(peak.lows, peak.extras)
        always = [a for a, guard in enumerate(peak.guards) if guard == ALWAYS]
        surest = max(always, key=lambda a: lows[a])
        kept = [
            a
            for a, guard in enumerate(peak.guards)
            if a == surest or (highs[a] > lows[surest] and (guard.where is None or self.parts[guard.where].most > 0))
        ]
        guards = tuple(peak.guards[a] for a in kept)
        return replace(peak, lows=lows[kept], extras=extras[kept], highs=highs[kept], guards=guards)

    def _flattened(self, peak: Peak, row: _Row) -> Peak | None:
        """None for a peak that is linear, a single expression, or all over one group at most: then the row has it."""
        if any(guard != ALWAYS for guard in peak.guards):
            return peak
        used = np.count_nonzero(np.maximum.reduceat(peak.extras.max(axis=0), self.starts)) if peak.extras.size else 0
        if len(peak.lows) > 1 and used > 1:
            return peak
        place = 0 if peak.each is None else peak.each + 1
        least = float(peak.lows.max())
        row.constants[place] += peak.weight * least
        if len(peak.lows) == 1:
            row.entries[place] += peak.weight * peak.extras[0]
        else:
            row.entries[place] += peak.weight * ((peak.extras + peak.lows[:, None]).max(axis=0) - least)
        return None

    def unaffordable(self, totals: tuple[Total, ...]) -> Mask | None:
        """Columns that alone exceed what a sum's lower bound leaves of its limit. Parts of which there can be fewer are
        told so; None where there cannot be as many as there must."""
        dead: Mask = np.zeros(len(self.columns), bool)
        most = [part.most for part in self.parts]
        for total in totals:
            if total.limit == math.inf:
                continue
            dead |= total.raised() > total.limit + total.allowance - total.low
            most = list(map(min, most, total.affordable()))
        self.has_fewer_parts = most != [part.most for part in self.parts]
        self.parts = tuple(replace(part, most=number) for part, number in zip(self.parts, most, strict=True))
        for split in {part.split: part.total for part in self.parts}.items():
            if sum(part.most for part in self.parts if part.split == split[0]) < split[1]:
                return None
        return dead

    def dominated(self, totals: tuple[Total, ...]) -> Mask:
        """Of columns with equal labels, those at least as expensive everywhere; the first of equals stays."""
        rows = [total.extras for total in totals]
        rows += [peak.extras for total in totals for peak in total.peaks]
        prices = np.concatenate(rows)
        prices = prices[prices.any(axis=1)]
        dead: Mask = np.zeros(len(self.columns), bool)
        for own in self._alike():
            dead[own] = _dominated(prices[:, own])
        return dead

    def _alike(self) -> Iterator[Ints]:
        """Two or more columns of a group that have the same labels."""
        groups = np.repeat(np.arange(len(self.starts)), self.sizes)
        kinds = self.skeleton.kinds[self.columns]
        order = np.lexsort((kinds, groups))
        ends = np.flatnonzero(np.diff(groups[order]) | np.diff(kinds[order])) + 1
        yield from (own for own in np.split(order, ends) if len(own) > 1)

    def keep(self, kept: Mask) -> bool:
        """Drops the other columns, and those that then have no partner; False where a group has none left."""
        before = self.columns
        self.alive[before[~kept]] = False
        if not self.skeleton.prune(self.alive):
            return False
        left = self.alive[before]
        self.columns = before[left]
        self.starts = np.searchsorted(self.columns, self.skeleton.starts[:-1])
        for row in self.rows:
            row.entries = row.entries[:, left]
            row.peaks = [replace(peak, extras=peak.extras[:, left]) for peak in row.peaks]
        return True


def _dominated(prices: Floats) -> Mask:
    """Columns of a matrix that another one is nowhere above; of equal ones all but the first."""
    size = prices.shape[1]
    if size <= MOST_AT_ONCE:
        below = np.all(prices[:, :, None] <= prices[:, None, :], axis=0)
    else:
        below = np.stack([np.all(prices[:, [i]] <= prices, axis=0) for i in range(size)])
    first = np.arange(size)
    wins = below & (~below.T | (first[:, None] < first[None, :]))
    dominated: Mask = wins.any(axis=0)
    return dominated


def parts_of(choice: Choice, problem: Problem) -> dict[str, int]:
    """The numbers of parts in a choice."""
    return {part: choice[part] for part in problem.parts}

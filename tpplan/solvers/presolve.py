"""Presolve: drops columns and constraints that cannot matter, and moves minima into constants, before a solver runs.

Columns are those of the skeleton (tpplan.solvers.groups): each chooses the strategies of a group of nodes.

- A column is dropped when it agrees with none along a link, or when it alone exceeds what a limit leaves. The number of
  a part is reduced to what the limits allow.
- Of two columns with the same layouts, one that is nowhere cheaper than the other is dropped.
- Of each expression and group, the cheapest column's entry moves into the constant. As one column of a group is chosen,
  this is exact, and constant <= value <= constant + sum of the groups' largest extras.
- Of a term's expressions, those that can never be the largest are dropped. A term with one expression left, or with all
  expressions over one group, is linear.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np

from tpplan.solvers.bounded_sums import ALWAYS, BoundedMaximum, BoundedSum, Guard, Part
from tpplan.solvers.groups import Skeleton, skeleton_of
from tpplan.solvers.matrix import Floats, Ints, Mask
from tpplan.solvers.problem import Expression, Problem, Term

#: most columns of a kind whose pairs are compared in one array operation
MOST_AT_ONCE = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """An equivalent, smaller problem. `columns` are the kept columns, by their numbers in the skeleton; `starts` is the
    position of each group's first. Resources that no choice can exceed are left out."""

    skeleton: Skeleton
    columns: Ints
    starts: Ints
    parts: tuple[Part, ...]
    objective: BoundedSum
    resources: tuple[BoundedSum, ...]

    def choice(self, chosen: Ints, numbers: Mapping[str, int]) -> dict[str, int]:
        """Node -> strategy, from one column (number in the skeleton) of each group; and the numbers of parts."""
        found = {}
        groups = np.searchsorted(self.skeleton.starts, chosen, side="right") - 1
        column_of = dict(zip(self.skeleton.starts[groups].tolist(), chosen.tolist(), strict=True))
        for name, place in self.skeleton.places.items():
            found[name] = int(place.strategies[column_of[place.start] - place.start])
        return found | dict(numbers)


def reduce(problem: Problem, *, ceiling: float = math.inf) -> Reduced | None:
    """The reduced problem; None where it is infeasible.

    `ceiling`: an objective known to be reachable; choices that cost more are dropped.
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


def is_solvable(problem: Problem) -> bool:
    """False where presolve without the objective shows that no choice agrees on the edges and keeps all limits."""
    if problem.resources or problem.conflicts:
        return reduce(replace(problem, objective=())) is not None
    return shared_skeleton(problem) is not None


def shared_skeleton(problem: Problem) -> Skeleton | None:
    """The skeleton of the problem's nodes and edges, cached for problems that share them."""
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
    """A sum while it is collected: constants and entries (row 0 once, row q + 1 for part q), and the maxima."""

    constants: Floats
    entries: Floats
    limit: float
    maxima: list[BoundedMaximum] = field(default_factory=list)


class _State:
    """The remaining columns, parts and sums while a problem is reduced."""

    def __init__(self, problem: Problem, skeleton: Skeleton, ceiling: float) -> None:
        self.skeleton = skeleton
        self.alive: Mask = np.ones(skeleton.num_columns, bool)
        self.columns: Ints = np.arange(skeleton.num_columns)
        self.starts: Ints = skeleton.starts[:-1]
        #: the group of each column
        self.groups = _groups(self.starts, len(self.columns))
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
        counted = [(term, 0 if term.each is None else numbers[term.each] + 1) for term in terms if term.weight]
        linear = [(place, term.weight, term.expressions[0]) for term, place in counted if len(term.expressions) == 1]
        maxima = [(term, place - 1 if place else None) for term, place in counted if len(term.expressions) > 1]
        several = [expression for term, _ in maxima for expression in term.expressions]
        numbered = [(size + i, 1.0, expression) for i, expression in enumerate(several)]
        entries = self._entries(size + len(several), [*linear, *numbered])
        row = _Row(constants=np.zeros(size), entries=entries[:size], limit=limit)
        for place, weight, expression in linear:
            row.constants[place] += weight * expression.constant
        start = size
        for term, each in maxima:
            extras = entries[start : start + len(term.expressions)]
            start += len(term.expressions)
            lows = np.array([expression.constant for expression in term.expressions])
            guards = tuple(_guard(expression, numbers) for expression in term.expressions)
            row.maxima.append(
                BoundedMaximum(weight=term.weight, each=each, lows=lows, extras=extras, guards=guards, highs=lows)
            )
        return row

    def _entries(self, number: int, weighted: Sequence[tuple[int, float, Expression]]) -> Floats:
        """`number` rows over the columns: of each (row, weight, expression), weight times the expression's entries."""
        shape = number, self.skeleton.num_columns
        places = [self.skeleton.places[name] for _, _, expression in weighted for name, _ in expression.terms]
        if not places:
            return np.zeros(shape)
        vectors = [vector for _, _, expression in weighted for _, vector in expression.terms]
        lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
        sizes = np.fromiter((place.stop - place.start for place in places), np.int64, len(places))
        numbers = [len(expression.terms) for _, _, expression in weighted]
        begins = np.repeat([row * shape[1] for row, _, _ in weighted], numbers)
        begins += np.fromiter((place.start for place in places), np.int64, len(places))
        entries = np.fromiter(chain.from_iterable(vectors), np.float64, int(lengths.sum()))
        # Columns of a group are numbered consecutively.
        ends, firsts = np.cumsum(sizes), np.cumsum(lengths) - lengths
        term = np.repeat(np.arange(len(places)), sizes)
        picked = np.concatenate([place.strategies for place in places]) + firsts[term]
        columns = np.arange(len(term)) + (begins - (ends - sizes))[term]
        weights = np.repeat([weight for _, weight, _ in weighted], numbers)[term]
        summed = np.bincount(columns, weights * entries[picked], shape[0] * shape[1])
        return summed.astype(np.float64, copy=False).reshape(shape)

    def _with_minima_moved(self, lows: Floats, entries: Floats) -> tuple[Floats, Floats, Floats]:
        """(lows, extras, highs) of rows: each group's minimum moves into lows; highs are upper bounds."""
        if not entries.size:
            return lows, entries, lows
        least = np.minimum.reduceat(entries, self.starts, axis=1)
        extras = entries - least[:, self.groups]
        lows = lows + least.sum(axis=1)
        return lows, extras, lows + np.maximum.reduceat(extras, self.starts, axis=1).sum(axis=1)

    def totals(self) -> list[BoundedSum]:
        """Every sum, the objective first; terms that turn out to be linear move into the linear rows."""
        return [self._total(row) for row in self.rows]

    def _total(self, row: _Row) -> BoundedSum:
        counted = (m for m in row.maxima if m.each is None or self.parts[m.each].most)
        left = (self._unless_linear(maximum, row) for maximum in self._undominated(list(counted)))
        row.maxima = [maximum for maximum in left if maximum is not None]
        row.constants, row.entries, highs = self._with_minima_moved(row.constants, row.entries)
        return BoundedSum(
            lows=row.constants,
            extras=row.entries,
            highs=highs,
            maxima=tuple(row.maxima),
            limit=row.limit,
            parts=self.parts,
        )

    def _undominated(self, maxima: Sequence[BoundedMaximum]) -> Iterator[BoundedMaximum]:
        """Yields the maxima without expressions that are never the largest: below another's minimum, or never
        counted."""
        if not maxima:
            return
        every = self._with_minima_moved(
            np.concatenate([maximum.lows for maximum in maxima]), np.concatenate([m.extras for m in maxima])
        )
        stop = 0
        for maximum in maxima:
            own = slice(stop, stop := stop + len(maximum.lows))
            lows, extras, highs = (rows[own] for rows in every)
            surest = max((a for a, guard in enumerate(maximum.guards) if guard == ALWAYS), key=lows.__getitem__)
            kept = [
                a
                for a, guard in enumerate(maximum.guards)
                if a == surest
                or (highs[a] > lows[surest] and (guard.where is None or self.parts[guard.where].most > 0))
            ]
            guards = tuple(maximum.guards[a] for a in kept)
            if len(kept) < len(lows):
                lows, extras, highs = lows[kept], extras[kept], highs[kept]
            yield replace(maximum, lows=lows, extras=extras, highs=highs, guards=guards)

    def _unless_linear(self, maximum: BoundedMaximum, row: _Row) -> BoundedMaximum | None:
        """The maximum; None where it is linear (one expression, or all over one group) and was added to the row."""
        if any(guard != ALWAYS for guard in maximum.guards):
            return maximum
        if len(maximum.lows) > 1 and maximum.extras.size:
            used = np.count_nonzero(np.maximum.reduceat(maximum.extras.max(axis=0), self.starts))
            if used > 1:
                return maximum
        place = 0 if maximum.each is None else maximum.each + 1
        least = float(maximum.lows.max())
        row.constants[place] += maximum.weight * least
        if len(maximum.lows) == 1:
            row.entries[place] += maximum.weight * maximum.extras[0]
        else:
            row.entries[place] += maximum.weight * ((maximum.extras + maximum.lows[:, None]).max(axis=0) - least)
        return None

    def unaffordable(self, totals: tuple[BoundedSum, ...]) -> Mask | None:
        """The columns that alone exceed what a sum's lower bound leaves of its limit; None where infeasible.

        Also lowers the largest numbers of parts to what the limits allow.
        """
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

    def dominated(self, totals: tuple[BoundedSum, ...]) -> Mask:
        """Columns with an equally labelled column that is nowhere more expensive; the first of equals stays."""
        rows = [total.extras for total in totals]
        rows += [maximum.extras for total in totals for maximum in total.maxima]
        prices = np.concatenate(rows)
        prices = prices[prices.any(axis=1)]
        dead: Mask = np.zeros(len(self.columns), bool)
        for own in self._alike():
            dead[own] = _dominated(prices[:, own])
        return dead

    def _alike(self) -> Iterator[Ints]:
        """Yields the positions of two or more columns of a group with the same labels."""
        groups, kinds = self.groups, self.skeleton.kinds[self.columns]
        order = np.lexsort((kinds, groups))
        ends = np.flatnonzero(np.diff(groups[order]) | np.diff(kinds[order])) + 1
        for start, stop in pairwise([0, *ends.tolist(), len(order)]):
            if stop - start > 1:
                yield order[start:stop]

    def keep(self, kept: Mask) -> bool:
        """Drops columns where `kept` is false and those that then agree with none; False where a group is empty."""
        before = self.columns
        self.alive[before[~kept]] = False
        if not self.skeleton.prune(self.alive, np.unique(self.groups[~kept])):
            return False
        left = self.alive[before]
        self.columns = before[left]
        self.starts = np.searchsorted(self.columns, self.skeleton.starts[:-1])
        self.groups = self.groups[left]
        for row in self.rows:
            row.entries = row.entries[:, left]
            row.maxima = [replace(maximum, extras=maximum.extras[:, left]) for maximum in row.maxima]
        return True


def _guard(expression: Expression, numbers: Mapping[str, int]) -> Guard:
    """The guard of an expression, by the numbers of parts."""
    if not expression.is_guarded:
        return ALWAYS
    where = None if expression.where is None else numbers[expression.where]
    return Guard(where=where, unless=tuple(numbers[part] for part in expression.unless))


def _groups(starts: Ints, number: int) -> Ints:
    """The group of each of `number` columns; `starts` is the position of each group's first."""
    return np.repeat(np.arange(len(starts)), np.diff(np.append(starts, number)))


def _dominated(prices: Floats) -> Mask:
    """True for each matrix column that is nowhere below another column; of equal columns all but the first."""
    size = prices.shape[1]
    if size <= MOST_AT_ONCE:
        below = np.all(prices[:, :, None] <= prices[:, None, :], axis=0)
    else:
        below = np.stack([np.all(prices[:, [i]] <= prices, axis=0) for i in range(size)])
    first = np.arange(size)
    wins = below & (~below.T | (first[:, None] < first[None, :]))
    dominated: Mask = wins.any(axis=0)
    return dominated

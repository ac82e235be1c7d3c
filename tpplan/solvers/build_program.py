"""The problem as an integer linear program, with one binary x_gs for each group g (tpplan.solvers.groups) and each of
its columns s that presolve kept.

    minimize    sum_g,s c_gs x_gs  +  sum_q k_q n_q  +  sum_k,g,c d_kgc z_kgc  +  sum_j w_j t_j
    subject to  (1)  sum_s x_gs = 1                                     for each group g
                (2)  sum_{s: l(s) = l} x_us = sum_{s: l(s) = l} x_vs    for each link (u, v) and label l but the last
                (3)  t_j >= e_ja(x)                                     for each maximum j and expression a
                (4)  sum_q n_q = N                                      for each split
                (5)  sum_c z_kgc = sum_{q in k} n_q                     for each group g that parts price, and each set
                                                                        k but one of parts that price g alike
                     sum_k z_kgc <= N sum_{s in c} x_gs                 for each class c of columns priced alike
                (6)  b_q <= n_q <= N b_q                                for each part q that a guard names
                (7)  the objective's form <= limit                      for each resource and conflict

c >= 0 is the extra cost of a column over its group's cheapest (see presolve), t_j >= 0 the excess of a maximum over
its lower bound. The last label of (2) follows from (1). A group with one column left is a constant without a variable.

A cost that counts once for each of n_q like layers is a product n_q f(x). z_kgc is the number of layers of the parts in
k whose group g has a column of the class c. As x is binary, (5) leaves z_kgc = sum_{q in k} n_q sum_{s in c} x_gs, and
the product is linear, and likewise a maximum times n_q. Columns and parts that are priced alike everywhere share a
z, and the last set of parts has what the others leave of N x; a z for each part and column gives no tighter relaxation,
for it may be divided among them in proportion to n and x. A guard adds -M (1 - b_q) to an expression that counts only
where part q is not empty, and -M b_q to one that counts only where it is.

Units. Seconds and bytes differ by orders of magnitude, and solvers have absolute tolerances: the objective is divided
by a cost near its optimum, each maximum by its own size, each resource by its limit, each part's number by its total.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpplan.solvers.bounded_sums import ALWAYS, BoundedMaximum, BoundedSum
from tpplan.solvers.matrix import Builder, Floats, Ints, Program
from tpplan.solvers.presolve import Reduced
from tpplan.solvers.problem import LIMIT_TOLERANCE
from tpplan.solvers.products import Products

#: error of a solver's bound, in the program's units: a sum of as many tolerances as there are rows
BOUND_MARGIN = 1e-7

#: largest ratio of the objective's coefficients to its unit
MAX_OBJECTIVE_RANGE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The program. The problem's objective = offset + unit * the program's objective, and is at least `low`.

    `binaries` are the variables of columns, -1 in groups of one column; `numbers` are the variables of parts, in units
    of their totals.
    """

    program: Program
    binaries: Ints
    numbers: Mapping[int, int]
    offset: float
    low: float
    unit: float

    def bound(self, of_program: float) -> float:
        """The lower bound on the problem's objective that follows from one on the program's objective, less a margin
        for the solver's tolerances."""
        return max(self.low, self.offset + self.unit * (of_program - BOUND_MARGIN))


def build(reduced: Reduced) -> Model:
    """The program of a reduced problem: variables, objective and constraints (1) to (7)."""
    return _Build(reduced).model()


class _Build:
    """Builds the program of a reduced problem."""

    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced
        self.builder = Builder()
        self.sizes = np.diff(np.append(reduced.starts, len(reduced.columns)))
        #: the group of each column, and whether it has others
        self.groups = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.is_free = (self.sizes > 1)[self.groups]
        self.binaries: Ints = np.full(len(reduced.columns), -1)
        self.binaries[self.is_free] = self.builder.columns(int(np.count_nonzero(self.is_free)), is_integer=True)
        #: split -> its products
        self.products: dict[int, Products] = {}
        #: part -> the variables n of its number and b, whether it is not empty
        self.numbers: dict[int, int] = {}
        self.indicators: dict[int, int] = {}

    def model(self) -> Model:
        """The finished program with its scaling."""
        self._one_hot()
        self._agreement()
        self._splits()
        objective = self.reduced.objective
        unit = _objective_unit(objective)
        indices, values, constant = self._sum(objective, unit)
        for index, value in zip(indices.tolist(), values.tolist(), strict=True):
            self.builder.cost[index] += value
        for resource in self.reduced.resources:
            self._limit(resource)
        return Model(
            program=self.builder.program(),
            binaries=self.binaries,
            numbers=self.numbers,
            offset=constant,
            low=objective.low,
            unit=unit,
        )

    def _one_hot(self) -> None:
        """(1): each group has exactly one column."""
        first = self.builder.rows(1.0, 1.0, int(np.count_nonzero(self.sizes > 1)))
        rows = (np.cumsum(self.sizes > 1) - 1)[self.groups[self.is_free]]
        self.builder.put(first + rows, self.binaries[self.is_free], 1.0)

    def _agreement(self) -> None:
        """(2): both sides of a link choose the same label. Where one side has a single column, presolve has left both
        a single label."""
        ends = self.reduced.skeleton.ends
        variables = np.full(self.reduced.skeleton.num_columns, -1)
        variables[self.reduced.columns] = self.binaries
        is_open = np.logical_and(*(self.sizes[ends.groups] > 1).T)
        left = np.flatnonzero((variables[ends.columns] >= 0) & is_open[ends.links])
        links, labels = ends.links[left], ends.labels[left]
        is_used = np.zeros(ends.num_labels, bool)
        is_used[labels] = True
        before = np.concatenate(([0], np.cumsum(is_used)))
        numbers = np.maximum(before[ends.label_ends] - before[ends.label_starts] - 1, 0)
        row = self.builder.rows(0.0, 0.0, int(numbers.sum())) + np.cumsum(numbers) - numbers
        places = before[labels] - before[ends.label_starts[links]]
        kept = places < numbers[links]
        rows = row[links[kept]] + places[kept]
        self.builder.put(rows, variables[ends.columns[left[kept]]], ends.signs[left[kept]])

    def _splits(self) -> None:
        """(4) and (6), with the numbers of parts in units of their totals."""
        guards = [guard for total in self._totals() for maximum in total.maxima for guard in maximum.guards]
        named = {part for guard in guards for part in (guard.where, *guard.unless) if part is not None}
        parts = self.reduced.parts
        for split in dict.fromkeys(part.split for part in parts):
            own = [i for i, part in enumerate(parts) if part.split == split and part.most]
            if len(own) == 1:
                continue
            for i in own:
                (self.numbers[i],) = self.builder.columns(1, upper=parts[i].most / parts[i].total).tolist()
            self.builder.row(np.array([self.numbers[i] for i in own]), 1.0, 1.0, 1.0)
            for i in own:
                self._whole(i, i in named)

    def _whole(self, part: int, is_named: bool) -> None:
        """Makes n_q a whole number; with a total of 1 it is binary and its own indicator."""
        builder, total = self.builder, self.reduced.parts[part].total
        if total == 1:
            builder.is_integer[self.numbers[part]] = True
            self.indicators[part] = self.numbers[part]
            return
        (count,) = builder.columns(1, upper=float(self.reduced.parts[part].most), is_integer=True).tolist()
        builder.row(np.array([count, self.numbers[part]]), np.array([1.0, -float(total)]), 0.0, 0.0)
        if is_named:
            (self.indicators[part],) = builder.columns(1, is_integer=True).tolist()
            pair = np.array([self.indicators[part], self.numbers[part]])
            builder.row(pair, np.array([1.0, -1.0]), 0.0, math.inf)
            builder.row(pair, np.array([1.0, -float(total)]), -math.inf, 0.0)

    def _totals(self) -> Sequence[BoundedSum]:
        return (self.reduced.objective, *self.reduced.resources)

    def _products(self, split: int) -> Products:
        """(5): the products of a split's numbers."""
        if split not in self.products:
            totals = self._totals()
            self.products[split] = Products(
                self.builder,
                {part: own for part, own in self.numbers.items() if self.reduced.parts[part].split == split},
                totals,
                [maximum for total in totals for maximum in total.maxima],
                self.reduced.starts,
                self.groups,
                self.binaries,
            )
        return self.products[split]

    def _linear(self, extras: Floats, each: int | None) -> tuple[Ints, Floats]:
        """Variables and coefficients of a row, multiplied by the number of the part `each` where one is given."""
        if each is None or each not in self.numbers:
            used = np.flatnonzero(extras)
            return self.binaries[used], extras[used]
        return self._products(self.reduced.parts[each].split).times(each, extras)

    def _times(self, each: int | None) -> float:
        """The factor of a part's variable, which is in units of the part's total; 1 without a part."""
        return 1.0 if each is None else float(self.reduced.parts[each].total)

    def _sum(self, total: BoundedSum, unit: float) -> tuple[Ints, Floats, float]:
        """Variables, coefficients and constant of a sum, divided by `unit`."""
        indices, values, constant = [np.zeros(0, np.int64)], [np.zeros(0)], 0.0
        unit = unit or 1.0  # 0 only where all coefficients are 0
        lows = total.lows_by_part
        for place in range(len(lows)):
            each = place - 1 if place else None
            if each is not None and not self.reduced.parts[each].most:
                continue
            times = self._times(each)
            columns, coefficients = self._linear(total.extras[place], each)
            indices.append(columns)
            values.append(coefficients * (times / unit))
            if each in self.numbers:
                indices.append(np.array([self.numbers[each]]))
                values.append(np.array([float(lows[place]) * times / unit]))
            else:
                constant += float(lows[place]) * times
        for maximum in total.maxima:
            column, size = self._maximum(maximum)
            indices.append(np.array([column]))
            values.append(np.array([maximum.weight * size * self._times(maximum.each) / unit]))
        return np.concatenate(indices), np.concatenate(values), constant

    def _maximum(self, maximum: BoundedMaximum) -> tuple[int, float]:
        """(3): adds a variable t, at least each expression less the maximum's lower bound; returns (t, unit of t)."""
        unit, low = maximum.high - maximum.low, maximum.low
        (variable,) = self.builder.columns(1).tolist()
        for expression_low, extras, high, guard in zip(
            maximum.lows, maximum.extras, maximum.highs, maximum.guards, strict=True
        ):
            if high <= low:
                continue  # implied by t >= 0
            row = self.builder.rows(-math.inf, 0.0)
            columns, values = self._linear(extras / unit, maximum.each)
            self.builder.put(row, columns, values)
            self.builder.put(row, np.array([variable]), -1.0)
            right = (low - float(expression_low)) / unit
            if maximum.each in self.numbers:
                self.builder.put(row, np.array([self.numbers[maximum.each]]), -right)
                right = 0.0
            if guard != ALWAYS:
                right += self._guarded(row, guard.where, guard.unless, (float(high) - low) / unit)
            self.builder.row_upper[row] = right
        return variable, unit

    def _guarded(self, row: int, where: int | None, unless: Sequence[int], most: float) -> float:
        """Adds the guard's indicators to a row, so that it is loose where its expression does not count; returns the
        amount that is added to its right side."""
        added = 0.0
        if where in self.indicators:
            self.builder.put(row, np.array([self.indicators[where]]), most)
            added += most
        for part in unless:
            if part in self.indicators:
                self.builder.put(row, np.array([self.indicators[part]]), -most)
            elif self.reduced.parts[part].most:
                added += most
        return added

    def _limit(self, resource: BoundedSum) -> None:
        """(7): the resource stays within its limit."""
        unit = abs(resource.limit) or resource.high - resource.low
        indices, values, constant = self._sum(resource, unit)
        right = (resource.limit + LIMIT_TOLERANCE * abs(resource.limit) - constant) / unit
        self.builder.row(indices, values, -math.inf, right)


def _objective_unit(objective: BoundedSum) -> float:
    """The unit of the objective: its lower bound, raised where coefficients would exceed MAX_OBJECTIVE_RANGE."""
    times = [1.0, *(float(part.total) for part in objective.parts)]
    sizes = [time * float(row.max(initial=0.0)) for time, row in zip(times, objective.extras, strict=True)]
    sizes += [
        maximum.weight * (maximum.high - maximum.low) * times[0 if maximum.each is None else maximum.each + 1]
        for maximum in objective.maxima
    ]
    lows = objective.lows_by_part
    sizes += [time * float(abs(low)) for time, low in zip(times[1:], lows[1:], strict=True)]
    largest = max(sizes, default=0.0)
    if largest == 0:
        return abs(objective.low)  # all choices cost the same
    return min(largest, max(objective.low, largest / MAX_OBJECTIVE_RANGE))

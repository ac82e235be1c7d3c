"""The problem as an integer linear program. One binary x_gs per group g (tpplan.solvers.groups) and column s that is
still alive.

    minimize    sum_g,s c_gs x_gs  +  sum_q k_q n_q  +  sum_q,g,s d_qgs z_qgs  +  sum_j w_j t_j
    subject to  (1)  sum_s x_gs = 1                                     for each group g
                (2)  sum_{s: l(s) = l} x_us = sum_{s: l(s) = l} x_vs    for each link (u, v) and label l but the last
                (3)  t_j >= e_ja(x)                                     for each peak j and expression a
                (4)  sum_q n_q = N                                      for each split
                (5)  sum_s z_qgs = n_q,  sum_q z_qgs = N x_gs           for each part q, and each group it prices
                (6)  b_q <= n_q <= N b_q                                for each part q that a guard names
                (7)  the objective's form <= limit                      for each resource and conflict

c >= 0 is what a column adds to its group's cheapest (see `reduction`), t_j >= 0 what a peak adds to its lower bound.
The last label of (2) follows from (1). Groups with one column left are constants and have no variable.

What there is as often as a part's number is a product n_q f(x). z_qgs is the number of things of part q whose group g
has column s; as x is binary, (5) leaves z_qgs = n_q x_gs, in which the product is linear, as is a maximum times n_q. A
guard adds -M (1 - b_q) to an expression for the part there must be any of, -M b_q for each there must be none of.

Units. A solver's tolerances are absolute, seconds and bytes are not: the objective is divided by a cost near its
optimum, each peak by its own size, each resource by its limit, each number of parts by its total. Where the first
optimum turns out to be far below the unit it was solved in, what costs more than that optimum is removed and the rest
is solved again in a fitting unit.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from tpplan.core.errors import SolverError
from tpplan.solvers.groups import Ints
from tpplan.solvers.matrix import Builder, Program
from tpplan.solvers.presolve import ALWAYS, LIMIT_TOLERANCE, Floats, Peak, Reduced, Total, reduce
from tpplan.solvers.problem import Problem, Solution, Status

#: asked of the solvers, in the units above; HiGHS allows down to 1e-10
SOLVER_TOLERANCE = 1e-9

#: how far the solver's objective may be from the choice's price, relative
PRICE_TOLERANCE = 1e-6

#: what a bound that solvers give may be off by, in the units above: a sum of as many tolerances as there are rows
BOUND_MARGIN = 1e-7

#: largest over smallest magnitude that objective coefficients and optimum should span
MAX_OBJECTIVE_RANGE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a solver says of a program, in the Model's unit; `values` is the incumbent.

    status None: stopped without an incumbent. BOUNDED: nothing costs less than `bound`, which was enough to know.
    objective and bound do not contain the Model's offset.
    """

    status: Status | None
    objective: float = math.nan
    bound: float = -math.inf
    values: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The program; objective of the problem = offset + unit * objective of the program, and at least `low`. `binaries`
    are the variables of each column, -1 where a group has but one; `numbers` those of parts, in units of their totals.
    """

    program: Program
    binaries: Ints
    numbers: Mapping[int, int]
    offset: float
    low: float
    unit: float

    def bound(self, outcome: Outcome) -> float:
        """A lower bound on the problem's objective, with a margin for the solver's tolerances."""
        return max(self.low, self.offset + self.unit * (outcome.bound - BOUND_MARGIN))


class Run(Protocol):
    """Runs a program for at most so many seconds. What costs more than `cutoff` need not be found; where is_relaxed,
    the linear relaxation is enough."""

    def __call__(
        self, program: Program, time_limit_s: float | None, *, cutoff: float = math.inf, is_relaxed: bool = False
    ) -> Outcome: ...


def solve(
    problem: Problem,
    *,
    solver: str,
    run: Run,
    time_limit_s: float | None,
    cutoff: float = math.inf,
    is_relaxed: bool = False,
) -> Solution:
    """Reduce, build, run, check. `solver` is the name for the report.

    Raises SolverError when time_limit_s was too short to find any feasible choice.
    """
    started = time.monotonic()
    task = _Task(problem=problem, solver=solver, run=run, cutoff=cutoff, is_relaxed=is_relaxed)
    first, unit = task.attempt(time_limit_s, ceiling=math.inf)
    if first is None:
        raise SolverError(
            f"{solver}: found no feasible choice in {time_limit_s} s, and no proof that there is none; "
            "allow more time, or try another solver"
        )
    if first.status is not Status.OPTIMAL or first.objective is None or unit <= abs(first.objective):
        return first
    seconds_left = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - started))
    finer, _ = task.attempt(seconds_left, ceiling=first.objective)
    if finer is None or finer.objective is None or finer.bound is None:
        # Out of time, or rounding at the ceiling: what is known is what the coarse unit could tell.
        return replace(first, status=Status.FEASIBLE, bound=first.objective - unit * SOLVER_TOLERANCE)
    if finer.objective > first.objective:
        return replace(first, status=finer.status, bound=min(finer.bound, first.objective))
    return finer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is solved, by which solver, and how far."""

    problem: Problem
    solver: str
    run: Run
    cutoff: float
    is_relaxed: bool

    def attempt(self, time_limit_s: float | None, *, ceiling: float) -> tuple[Solution | None, float]:
        """(solution, unit of the objective): one run among choices that cost at most `ceiling`; None: out of time."""
        solver = self.solver
        reduced = reduce(self.problem, ceiling=ceiling)
        if reduced is None:
            return Solution(status=Status.INFEASIBLE, solver=solver), 0.0
        if reduced.objective.low > self.cutoff:
            return Solution(status=Status.BOUNDED, solver=solver, bound=reduced.objective.low), 0.0
        model = build(reduced)
        outcome = Outcome(status=Status.OPTIMAL, objective=0.0, values=np.zeros(0))
        if model.program.num_columns:
            scaled = (self.cutoff - model.offset) / model.unit if model.unit else math.inf
            outcome = self.run(model.program, time_limit_s, cutoff=scaled, is_relaxed=self.is_relaxed)
        match outcome.status:
            case None:
                return None, model.unit
            case Status.INFEASIBLE:
                return Solution(status=Status.INFEASIBLE, solver=solver), model.unit
            case Status.BOUNDED:
                return Solution(status=Status.BOUNDED, solver=solver, bound=model.bound(outcome)), model.unit
            case Status.OPTIMAL | Status.FEASIBLE as status:
                choice, price, bound = self.checked(reduced, model, outcome)
                solution = Solution(status=status, solver=solver, choice=choice, objective=price, bound=bound)
                return solution, model.unit

    def checked(self, reduced: Reduced, model: Model, outcome: Outcome) -> tuple[dict[str, int], float, float]:
        """(choice, objective, bound), priced from scratch. Asserts that it is feasible and costs what the solver
        says."""
        solver = self.solver
        choice = _chosen(reduced, model, outcome)
        assert self.problem.is_feasible(choice), f"{solver}: its choice breaks an edge or a limit: {choice}"
        price = self.problem.price(choice)
        claimed = model.offset + model.unit * outcome.objective
        slack = PRICE_TOLERANCE * max(abs(price), model.unit)
        assert price <= claimed + slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
        if outcome.status is Status.OPTIMAL:
            assert price >= claimed - slack, f"{solver}: claims {claimed!r}, its choice costs {price!r}"
            bound = price
        else:
            bound = model.bound(outcome)
        assert bound <= price + slack, f"{solver}: bound {bound!r} above the objective {price!r}"
        return choice, price, min(bound, price)


def _chosen(reduced: Reduced, model: Model, outcome: Outcome) -> dict[str, int]:
    """The choice that the values say."""
    assert outcome.values is not None
    is_free = model.binaries >= 0
    is_chosen = np.ones(len(reduced.columns), bool)
    is_chosen[is_free] = outcome.values[model.binaries[is_free]] > 0.5
    chosen = reduced.columns[is_chosen]
    groups = np.searchsorted(reduced.skeleton.starts, chosen, side="right") - 1
    assert np.array_equal(groups, np.arange(len(reduced.starts))), f"{outcome.values} is not one-hot"
    numbers = {
        part.name: round(outcome.values[model.numbers[i]] * part.total) if i in model.numbers else part.most
        for i, part in enumerate(reduced.parts)
    }
    return reduced.choice(chosen, numbers)


def build(reduced: Reduced) -> Model:
    """Variables, objective and constraints (1) to (7)."""
    return _Build(reduced).model()


class _Build:
    """The program of a reduced problem as it grows."""

    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced
        self.builder = Builder()
        self.groups = list(pairwise([*reduced.starts.tolist(), len(reduced.columns)]))
        self.binaries: Ints = np.full(len(reduced.columns), -1)
        for start, stop in self.groups:
            if stop - start > 1:
                self.binaries[start:stop] = self.builder.columns(stop - start, is_integer=True)
        #: (5) by part and group
        self.copies: dict[tuple[int, int], Ints] = {}
        self.numbers: dict[int, int] = {}
        self.indicators: dict[int, int] = {}

    def model(self) -> Model:
        """Everything."""
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
        for start, stop in self.groups:
            if stop - start > 1:
                self.builder.row(self.binaries[start:stop], 1.0, 1.0, 1.0)

    def _agreement(self) -> None:
        """(2): a label is chosen on one side when it is chosen on the other."""
        starts, columns = self.reduced.skeleton.starts, self.reduced.columns
        for link in self.reduced.skeleton.links:
            (first, last), (begin, end) = self.groups[link.source], self.groups[link.target]
            if last - first < 2 or end - begin < 2:
                continue  # the fixed one has left the other a single label
            source = link.source_labels[columns[first:last] - starts[link.source]]
            target = link.target_labels[columns[begin:end] - starts[link.target]]
            labels, places = np.unique(np.concatenate((source, target)), return_inverse=True)
            if len(labels) < 2:
                continue
            row = self.builder.rows(0.0, 0.0, len(labels) - 1)
            indices = np.concatenate((self.binaries[first:last], self.binaries[begin:end]))
            values = np.repeat([1.0, -1.0], [len(source), len(target)])
            kept = places.reshape(-1) < len(labels) - 1
            self.builder.put(row + places.reshape(-1)[kept], indices[kept], values[kept])

    def _splits(self) -> None:
        """(4) and (6), numbers in units of their totals."""
        guards = [guard for total in self._totals() for peak in total.peaks for guard in peak.guards]
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
        """n_q is a whole number; for one of a single thing it is a binary, and its own indicator."""
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

    def _totals(self) -> Sequence[Total]:
        return (self.reduced.objective, *self.reduced.resources)

    def _copies(self, part: int, group: int) -> Ints:
        """(5): z of a part and a group; all parts of the split get theirs."""
        if (part, group) not in self.copies:
            start, stop = self.groups[group]
            split = self.reduced.parts[part].split
            own = [i for i in self.numbers if self.reduced.parts[i].split == split]
            for i in own:
                columns = self.builder.columns(stop - start)
                self.copies[i, group] = columns
                indices = np.append(columns, self.numbers[i])
                self.builder.row(indices, np.append(np.ones(stop - start), -1.0), 0.0, 0.0)
            row = self.builder.rows(0.0, 0.0, stop - start) + np.arange(stop - start)
            for i in own:
                self.builder.put(row, self.copies[i, group], 1.0)
            self.builder.put(row, self.binaries[start:stop], -1.0)
        return self.copies[part, group]

    def _linear(self, extras: Floats, each: int | None) -> tuple[Ints, Floats]:
        """Variables and coefficients of a row, of one thing of a part if it is named, times its number."""
        used = np.flatnonzero(extras)
        if each is None or each not in self.numbers:
            return self.binaries[used], extras[used]
        indices, values = [], []
        for group in np.unique(np.searchsorted(self.reduced.starts, used, side="right") - 1).tolist():
            start, stop = self.groups[group]
            own = np.flatnonzero(extras[start:stop])
            indices.append(self._copies(each, group)[own])
            values.append(extras[start:stop][own])
        return np.concatenate([np.zeros(0, np.int64), *indices]), np.concatenate([np.zeros(0), *values])

    def _times(self, each: int | None) -> float:
        """What a thing of a part counts, where its number is not decided or is counted in units of its total."""
        return 1.0 if each is None else float(self.reduced.parts[each].total)

    def _sum(self, total: Total, unit: float) -> tuple[Ints, Floats, float]:
        """Variables, coefficients in a unit, and constant of a sum."""
        indices, values, constant = [np.zeros(0, np.int64)], [np.zeros(0)], 0.0
        unit = unit or 1.0  # then there is nothing to divide
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
        for peak in total.peaks:
            column, size = self._peak(peak)
            indices.append(np.array([column]))
            values.append(np.array([peak.weight * size * self._times(peak.each) / unit]))
        return np.concatenate(indices), np.concatenate(values), constant

    def _peak(self, peak: Peak) -> tuple[int, float]:
        """(3): a variable t that is at least each expression, above the peak's lower bound. (t, its unit)."""
        unit, low = peak.high - peak.low, peak.low
        (variable,) = self.builder.columns(1).tolist()
        for expression_low, extras, high, guard in zip(peak.lows, peak.extras, peak.highs, peak.guards, strict=True):
            if high <= low:
                continue  # t >= 0 says it
            row = self.builder.rows(-math.inf, 0.0)
            columns, values = self._linear(extras / unit, peak.each)
            self.builder.put(row, columns, values)
            self.builder.put(row, np.array([variable]), -1.0)
            right = (low - float(expression_low)) / unit
            if peak.each in self.numbers:
                self.builder.put(row, np.array([self.numbers[peak.each]]), -right)
                right = 0.0
            if guard != ALWAYS:
                right += self._guarded(row, guard.where, guard.unless, (float(high) - low) / unit)
            self.builder.row_upper[row] = right
        return variable, unit

    def _guarded(self, row: int, where: int | None, unless: Sequence[int], most: float) -> float:
        """Loosens a row where its expression does not count; what that adds to its right side."""
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

    def _limit(self, resource: Total) -> None:
        """(7): the resource is within its limit."""
        unit = abs(resource.limit) or resource.high - resource.low
        indices, values, constant = self._sum(resource, unit)
        right = (resource.limit + LIMIT_TOLERANCE * abs(resource.limit) - constant) / unit
        self.builder.row(indices, values, -math.inf, right)


def _objective_unit(objective: Total) -> float:
    """What the objective is divided by: its lower bound, if coefficients then stay within MAX_OBJECTIVE_RANGE."""
    times = [1.0, *(float(part.total) for part in objective.parts)]
    sizes = [time * float(row.max(initial=0.0)) for time, row in zip(times, objective.extras, strict=True)]
    sizes += [
        peak.weight * (peak.high - peak.low) * times[0 if peak.each is None else peak.each + 1]
        for peak in objective.peaks
    ]
    lows = objective.lows_by_part
    sizes += [time * float(abs(low)) for time, low in zip(times[1:], lows[1:], strict=True)]
    largest = max(sizes, default=0.0)
    if largest == 0:
        return abs(objective.low)  # nothing is divided, all choices cost the same
    return min(largest, max(objective.low, largest / MAX_OBJECTIVE_RANGE))

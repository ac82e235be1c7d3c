"""The products of numbers of parts and choices of columns: constraint (5) of tpplan.solvers.build_program."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from tpplan.solvers.bounded_sums import BoundedMaximum, BoundedSum
from tpplan.solvers.matrix import Builder, Floats, Ints


@final
class Products:
    """The variables z of one split, in units of its total, made for a group when its products are first needed.

    `numbers` are the variables of the split's parts. `starts` is the position of each group's first column, `groups`
    the group of each column, and `binaries` its variable.
    """

    def __init__(
        self,
        builder: Builder,
        numbers: Mapping[int, int],
        totals: Sequence[BoundedSum],
        maxima: Sequence[BoundedMaximum],
        starts: Ints,
        groups: Ints,
        binaries: Ints,
    ) -> None:
        self.builder, self.numbers = builder, numbers
        self.starts, self.groups, self.binaries = starts, groups, binaries
        #: part -> its row of prices of columns in each sum; and part -> prices of columns in each maximum that counts
        #: once per member of the part
        self.linear = {part: np.stack([total.extras[part + 1] for total in totals]) for part in numbers}
        self.maxima = {part: [maximum.extras for maximum in maxima if maximum.each == part] for part in numbers}
        every = np.concatenate([*self.linear.values(), *(rows for own in self.maxima.values() for rows in own)])
        #: column -> its prices in all of these rows, as bytes: columns with equal bytes are one class
        self.prices = [column.tobytes() for column in np.ascontiguousarray(every.T)]
        self.is_made = np.zeros(len(starts), bool)
        #: part -> variables whose sum, each times its sign and the price of its column, is the part's number times a
        #: row of prices
        self.variables: dict[int, list[Ints]] = {part: [] for part in numbers}
        self.columns: dict[int, list[Ints]] = {part: [] for part in numbers}
        self.signs: dict[int, list[Floats]] = {part: [] for part in numbers}

    def times(self, part: int, extras: Floats) -> tuple[Ints, Floats]:
        """Variables and coefficients of the part's number times a row that the part prices."""
        needed = np.zeros(len(self.starts), bool)
        needed[self.groups[np.flatnonzero(extras)]] = True
        for group in np.flatnonzero(needed & ~self.is_made).tolist():
            self._make(group)
        if not self.variables[part]:
            return np.zeros(0, np.int64), np.zeros(0)
        for known in (self.variables, self.columns, self.signs):
            if len(known[part]) > 1:
                known[part][:] = [np.concatenate(known[part])]
        (variables,), (columns,), (signs,) = self.variables[part], self.columns[part], self.signs[part]
        values = signs * extras[columns]
        used = np.flatnonzero(values)
        return variables[used], values[used]

    def _make(self, group: int) -> None:
        """Makes the variables z of a group: one for each class of columns and each set of parts that price the group
        alike, except the largest set, whose products are the total times the binaries less the other variables."""
        self.is_made[group] = True
        start = int(self.starts[group])
        stop = int(self.starts[group + 1]) if group + 1 < len(self.starts) else len(self.groups)
        classes, firsts = _numbered(self.prices[start:stop])
        sets, rest = self._sets(start, stop)
        made = [(parts, self._variables(parts, len(firsts))) for parts in sets if parts is not rest]
        if made:
            row = self.builder.rows(-math.inf, 0.0, len(firsts))
            for _, variables in made:
                self.builder.put(row + np.arange(len(firsts)), variables, 1.0)
            self.builder.put(row + classes, self.binaries[start:stop], -1.0)
        self._count(rest[0], self.binaries[start:stop], np.arange(start, stop), 1.0)
        for parts, variables in made:
            self._count(parts[0], variables, start + firsts, 1.0)
            self._count(rest[0], variables, start + firsts, -1.0)

    def _sets(self, start: int, stop: int) -> tuple[list[list[int]], list[int]]:
        """(sets of parts that price the columns start:stop alike, the largest of them). A part with a maximum that
        counts once per member and prices these columns is a set of its own, taken for the largest only where there is
        no other kind of set."""
        sets: dict[tuple[int | None, bytes], list[int]] = {}
        for part, linear in self.linear.items():
            is_alone = any(rows[:, start:stop].any() for rows in self.maxima[part])
            sets.setdefault((part if is_alone else None, linear[:, start:stop].tobytes()), []).append(part)
        largest = max(sets, key=lambda key: (key[0] is None, len(sets[key])))
        return list(sets.values()), sets[largest]

    def _variables(self, parts: Sequence[int], number: int) -> Ints:
        """Adds `number` variables whose sum is the sum of the numbers of `parts`: constraint (5), first line."""
        variables = self.builder.columns(number)
        indices = np.concatenate((variables, [self.numbers[part] for part in parts]))
        self.builder.row(indices, np.repeat([1.0, -1.0], [number, len(parts)]), 0.0, 0.0)
        return variables

    def _count(self, part: int, variables: Ints, columns: Ints, sign: float) -> None:
        """Adds variables, each times `sign` and the price of its column, to the products of a part. The part stands for
        its whole set, whose members have equal prices."""
        self.variables[part].append(variables)
        self.columns[part].append(columns)
        self.signs[part].append(np.full(len(columns), sign))


def _numbered(keys: Sequence[bytes]) -> tuple[Ints, Ints]:
    """(number of each key, equal keys numbered alike in order of appearance; position of the first key of each)."""
    numbers: dict[bytes, int] = {}
    firsts: list[int] = []
    found = np.zeros(len(keys), np.int64)
    for i, key in enumerate(keys):
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(i)
        found[i] = numbers[key]
    return found, np.array(firsts)

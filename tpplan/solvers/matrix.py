"""An integer linear program as arrays, for any solver.

minimize    cost @ x
subject to  row_lower <= A x <= row_upper,  lower <= x <= upper,  x_i whole where is_integer
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program's arrays. Row i of A has columns and values starts[i]:starts[i + 1] of `indices` and `values`."""

    cost: Floats
    lower: Floats
    upper: Floats
    is_integer: Mask
    row_lower: Floats
    row_upper: Floats
    starts: Ints
    indices: Ints
    values: Floats

    @property
    def num_columns(self) -> int:
        """Number of variables."""
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        """Number of constraints."""
        return len(self.row_lower)


@dataclass(slots=True)
class Builder:
    """Collects columns, rows and matrix entries of a program."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    _rows: list[Ints] = field(default_factory=list)
    _indices: list[Ints] = field(default_factory=list)
    _values: list[Floats] = field(default_factory=list)

    def columns(self, number: int, *, upper: float = 1.0, is_integer: bool = False) -> Ints:
        """Adds `number` variables between 0 and `upper`; returns their indices."""
        first = len(self.cost)
        self.cost += [0.0] * number
        self.upper += [upper] * number
        self.is_integer += [is_integer] * number
        return np.arange(first, first + number)

    def rows(self, lower: float, upper: float, number: int = 1) -> int:
        """Adds `number` constraints without entries; returns the index of the first."""
        first = len(self.row_lower)
        self.row_lower += [lower] * number
        self.row_upper += [upper] * number
        return first

    def put(self, rows: Ints | int, indices: Ints, values: Floats | float) -> None:
        """Adds entries, all in one row, or in one row for each index."""
        size = len(indices)
        self._rows.append(rows if isinstance(rows, np.ndarray) else np.full(size, rows))
        self._indices.append(indices)
        self._values.append(values if isinstance(values, np.ndarray) else np.full(size, float(values)))

    def row(self, indices: Ints, values: Floats | float, lower: float, upper: float) -> None:
        """Adds a constraint with its entries."""
        self.put(self.rows(lower, upper), indices, values)

    def program(self) -> Program:
        """The program; entries that were added several times are summed."""
        empty: list[Ints] = [np.zeros(0, np.int64)]
        rows, indices = np.concatenate(empty + self._rows), np.concatenate(empty + self._indices)
        values = np.concatenate([np.zeros(0), *self._values])
        width = max(1, len(self.cost))
        places = rows * width + indices
        order = np.argsort(places, kind="stable")
        places = places[order]
        first = np.flatnonzero(np.diff(places, prepend=-1))
        summed = np.add.reduceat(values[order], first) if len(first) else values
        kept = summed != 0
        places, summed = places[first][kept], summed[kept]
        return Program(
            cost=np.array(self.cost),
            lower=np.zeros(len(self.cost)),
            upper=np.array(self.upper),
            is_integer=np.array(self.is_integer, bool),
            row_lower=np.array(self.row_lower),
            row_upper=np.array(self.row_upper),
            starts=np.searchsorted(places // width, np.arange(len(self.row_lower) + 1)),
            indices=places % width,
            values=summed,
        )

"""Extrapolates the execution of a call from executions of the same op at other sizes.

An op's kernels, and the bytes that it makes and saves, are sums of products of its sizes, and no product has a size
twice. So they are on a line where a single size changes: the micro-batch, or what a rank has of a dim. Two executions
with the same kernels, at sizes u and w, give that at any third sizes v on the line through u and w:

    v = u + t (w - u)        quantity(v) = quantity(u) + t (quantity(w) - quantity(u))

A single size changes where at most one dim of each tensor does, and one size of each kernel. Nothing is grown where the
two executions differ in more than sizes, where a number on the line is no whole number, and from or to a size of 1,
which ops may treat in a way of its own.

That the op runs the same kernels at v is assumed. So only the search takes grown executions: it runs the ops of its
answer and compares (tpplan.search.points.point_solver.PointSolver.has_grown_right).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations

from tpplan.costs.runs.execution import Execution, Gradient
from tpplan.costs.runs.kernels import Attention, Kernel, Matmul, MemoryBound

#: sizes of a call on one rank: the shapes of its operands and of its results, and last the literals that are sizes
Sizes = tuple[tuple[int, ...], ...]
#: floats are exact for whole numbers below
_LEAST_INEXACT = 2**53


class _UnlikeError(Exception):
    """Two executions differ in more than sizes, or a number on their line is none that an execution can have."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The line through the numbers of two executions, read at t = `number` / `of`."""

    number: int
    of: int

    def at(self, low: int, high: int) -> int:
        """The number on the line through `low` and `high`."""
        if low == high:
            return low
        grown, rest = divmod((high - low) * self.number, self.of)
        if rest or low + grown < 0:
            raise _UnlikeError
        return low + grown

    def whole(self, low: float, high: float) -> float:
        """A number on the line that is whole, and kept as a float."""
        if low == high:
            return low
        grown = self.at(int(low), int(high))
        if not (low.is_integer() and high.is_integer()) or max(low, high, grown) >= _LEAST_INEXACT:
            raise _UnlikeError
        return float(grown)

    def kernel(self, low: Kernel, high: Kernel) -> Kernel:
        """A kernel of which at most one size changes."""
        if low == high:
            return low
        match low, high:
            case MemoryBound(), MemoryBound():
                return MemoryBound(num_bytes=self.at(low.num_bytes, high.num_bytes))
            case Matmul(), Matmul():
                _require((low.dtype, len(low.leading)) == (high.dtype, len(high.leading)))
                m, n, k, batch = self._one((low.m, low.n, low.k, low.batch), (high.m, high.n, high.k, high.batch))
                leading = self._all(low.leading, high.leading)
                further_bytes = self.at(low.further_bytes, high.further_bytes)
                return Matmul(m=m, n=n, k=k, batch=batch, dtype=low.dtype, leading=leading, further_bytes=further_bytes)
            case Attention(), Attention():
                own, other = low.sizes, high.sizes
                _require(replace(high, flop=low.flop, sizes=own) == low)
                _require((own.head_dim, own.causal) == (other.head_dim, other.causal))
                heads, queries, keys = self._one(
                    (own.batch_heads, own.queries, own.keys), (other.batch_heads, other.queries, other.keys)
                )
                sizes = replace(own, batch_heads=heads, queries=queries, keys=keys)
                return replace(low, flop=self.whole(low.flop, high.flop), sizes=sizes)
            case _:
                raise _UnlikeError

    def execution(self, low: Execution, high: Execution) -> Execution:
        """An execution with its numbers on the line, the most bytes held at once among those at each moment."""
        _require((low.saves, low.saves_results) == (high.saves, high.saves_results))
        held = tuple(self._all(own, other) for own, other in zip(low.held, high.held, strict=True))
        return Execution(
            forward=self._kernels(low.forward, high.forward),
            backward=self._kernels(low.backward, high.backward),
            saves=low.saves,
            saves_results=low.saves_results,
            saved_bytes=self.at(low.saved_bytes, high.saved_bytes),
            held=(held[0], held[1]),
            gradients=self._gradients(low.gradients, high.gradients),
        )

    def _kernels(self, low: tuple[Kernel, ...], high: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        _require(len(low) == len(high))
        return tuple(map(self.kernel, low, high))

    def _gradients(
        self, low: tuple[Gradient | None, ...], high: tuple[Gradient | None, ...]
    ) -> tuple[Gradient | None, ...]:
        _require(len(low) == len(high))
        return tuple(map(self._gradient, low, high))

    def _gradient(self, low: Gradient | None, high: Gradient | None) -> Gradient | None:
        if low is None or high is None:
            _require(low is high)
            return None
        _require(low.is_view == high.is_view)
        return Gradient(self.at(low.num_bytes, high.num_bytes), low.is_view)

    def _all(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        _require(len(low) == len(high))
        return tuple(map(self.at, low, high))

    def _one(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        """Sizes of which at most one changes."""
        _require(sum(map(int.__ne__, low, high)) <= 1)
        return self._all(low, high)


def _require(condition: bool) -> None:
    if not condition:
        raise _UnlikeError


@dataclass(slots=True)
class GrownExecutions:
    """Executions of calls that were run, by all that is no size of them, and those that were grown."""

    _run: dict[Hashable, "_Runs"] = field(default_factory=dict)
    _grown: dict[tuple[Hashable, Sizes], Execution] = field(default_factory=dict)

    def add(self, about: Hashable, sizes: Sizes, execution: Execution) -> None:
        """Adds an execution that was run, unless its kernels are guessed."""
        if not execution.guesses:
            self._run.setdefault(about, _Runs()).add(sizes, execution)

    def at(self, about: Hashable, sizes: Sizes) -> Execution | None:
        """The execution grown at these sizes; None where those that were run do not give it."""
        key = about, sizes
        if key not in self._grown:
            found = self._run[about].at(sizes) if about in self._run else None
            if found is None:
                return None
            self._grown[key] = found
        return self._grown[key]


#: as many executions show which sizes change alone: the first op under each of its strategies
_MOST_COMPARED = 12
#: sizes in one row
_Row = tuple[int, ...]


@dataclass(slots=True)
class _Runs:
    """Executions by their sizes, of calls that differ in nothing else."""

    executions: dict[_Row, Execution] = field(default_factory=dict)
    compared: list[Sizes] = field(default_factory=list)
    #: for the places in a row at which a single size changes: the rows by what they have at all other places
    lines: dict[tuple[int, ...], dict[_Row, list[_Row]]] = field(default_factory=dict)

    def add(self, sizes: Sizes, execution: Execution) -> None:
        """Adds an execution."""
        row = tuple(chain(*sizes))
        for places in {_single_size(sizes, other) for other in self.compared} - {(), *self.lines}:
            self.lines[places] = {}
            for other in self.executions:
                self.lines[places].setdefault(_without(other, places), []).append(other)
        if len(self.compared) < _MOST_COMPARED:
            self.compared.append(sizes)
        self.executions[row] = execution
        for places, rows in self.lines.items():
            rows.setdefault(_without(row, places), []).append(row)

    def at(self, sizes: Sizes) -> Execution | None:
        """The execution at these sizes, from the first two that give it."""
        row = tuple(chain(*sizes))
        for places, rows in self.lines.items():
            for low, high in combinations(rows.get(_without(row, places), ()), 2):
                if (line := _line(low, high, row)) is not None:
                    try:
                        return line.execution(self.executions[low], self.executions[high])
                    except _UnlikeError:
                        continue
        return None


def _single_size(sizes: Sizes, others: Sizes) -> tuple[int, ...]:
    """The places that differ in a row of the sizes; () where a shape differs in several dims."""
    *shapes, _ = zip(sizes, others, strict=True)
    if any(sum(map(int.__ne__, own, other)) > 1 for own, other in shapes):
        return ()
    return tuple(i for i, (a, b) in enumerate(zip(chain(*sizes), chain(*others), strict=True)) if a != b)


def _without(row: _Row, places: tuple[int, ...]) -> _Row:
    return tuple(size for place, size in enumerate(row) if place not in places)


def _line(low: _Row, high: _Row, target: _Row) -> _Line | None:
    """The line through two points that leads to a third one, without a size of 1 or 0; None where there is none."""
    line = None
    for a, b, c in zip(low, high, target, strict=True):
        if a == b == c:
            continue
        if a == b or min(a, b, c) < 2:
            return None
        if line is None:
            line = _Line(c - a, b - a)
        elif (c - a) * line.of != line.number * (b - a):
            return None
    return line

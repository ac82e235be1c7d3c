"""Leaves out expressions that another one exceeds in every assignment: a maximum does not need them. Bounds of sums of
terms, whose maxima are taken for sums, or for one of their parts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from tpplan.solvers.problem import Expression, Term, added, merged, scaled

Floats = npt.NDArray[np.float64]

#: number of large expressions against which every other one is compared
MAX_DOMINATORS = 12


def undominated(expressions: Iterable[Expression]) -> tuple[Expression, ...]:
    """The expressions without those that a larger one exceeds in every assignment, largest first."""
    ordered = sorted(dict.fromkeys(expressions), key=_most, reverse=True)
    if len(ordered) < 2:
        return tuple(ordered)
    table, is_alive = _Table(ordered), np.ones(len(ordered), bool)
    found: list[Expression] = []
    for number, expression in enumerate(ordered):
        if is_alive[number]:
            if len(found) < MAX_DOMINATORS:
                is_alive[number + 1 :] &= ~table.exceeded_by(number)[number + 1 :]
            found.append(expression)
    return tuple(found)


def _most(expression: Expression) -> tuple[float, float]:
    """The largest value of an expression, and the sum of its vectors' means, to sort by."""
    middle = sum(sum(vector) / len(vector) for _, vector in expression.terms)
    return expression.constant + sum(max(vector) for _, vector in expression.terms), middle


class _Table:
    """The vectors of expressions, one behind the other: of all terms of the first expression, then of the second."""

    def __init__(self, expressions: Sequence[Expression]) -> None:
        rows = [merged(e) if len(dict(e.terms)) < len(e.terms) else e for e in expressions]
        vectors = [vector for row in rows for _, vector in row.terms]
        sizes = np.fromiter(map(len, vectors), np.int64, len(vectors))
        numbers: dict[str, int] = {}
        self.constants = np.array([row.constant for row in rows])
        self.ends = np.cumsum([0, *(len(row.terms) for row in rows)])
        #: by term: its expression, the number of its node, and where its vector begins
        self.rows = np.repeat(np.arange(len(rows)), np.diff(self.ends))
        self.nodes = np.array([numbers.setdefault(name, len(numbers)) for row in rows for name, _ in row.terms], int)
        self.starts = np.cumsum(sizes) - sizes
        self.entries = np.fromiter(chain.from_iterable(vectors), np.float64, int(sizes.sum()))
        widths = np.zeros(len(numbers), np.int64)
        widths[self.nodes] = sizes
        self.node_starts = np.cumsum(widths) - widths
        #: by entry: its place in a vector over the strategies of all nodes
        within = np.arange(len(self.entries)) - np.repeat(self.starts, sizes)
        self.places = np.repeat(self.node_starts[self.nodes], sizes) + within
        self.num_strategies = int(widths.sum())

    def exceeded_by(self, number: int) -> npt.NDArray[np.bool_]:
        """True for each expression e that the numbered one, d, exceeds in every assignment, by the worst case of each
        node n with strategies s: constants, and sum over n of max_s (e_ns - d_ns), are together at most 0."""
        if not len(self.nodes):
            return np.asarray(self.constants <= self.constants[number])
        own = slice(self.ends[number], self.ends[number + 1])
        first = int(self.starts[own.start]) if own.start < len(self.starts) else len(self.entries)
        last = int(self.starts[own.stop]) if own.stop < len(self.starts) else len(self.entries)
        dense: Floats = np.zeros(self.num_strategies)
        dense[self.places[first:last]] = self.entries[first:last]
        least = np.minimum.reduceat(dense, self.node_starts)
        # Nodes that an expression does not name count with the least of d's vector; those that d does not name, with 0.
        above = np.maximum.reduceat(self.entries - dense[self.places], self.starts) + least[self.nodes]
        lead = np.bincount(self.rows, weights=above, minlength=len(self.constants)) - least.sum()
        exceeded: npt.NDArray[np.bool_] = lead + (self.constants - self.constants[number]) <= 0
        return exceeded


def upper(terms: Iterable[Term]) -> Expression:
    """An upper bound of the terms' sum: a maximum counts as the sum of its undominated parts, none negative."""
    found = ((expression, term.weight) for term in terms for expression in undominated(term.expressions))
    return merged(added(*(scaled(expression, weight) for expression, weight in found)))


def lower(terms: Iterable[Term]) -> Expression:
    """A lower bound of the terms' sum: a maximum counts as the first of its parts."""
    return merged(added(*(scaled(term.expressions[0], term.weight) for term in terms)))


def combined(terms: Iterable[Term]) -> Iterator[Term]:
    """The terms, all linear ones added up to one."""
    found = list(terms)
    linear = [scaled(term.expressions[0], term.weight) for term in found if len(term.expressions) == 1]
    yield from (term for term in found if len(term.expressions) > 1)
    if linear:
        yield Term(name=found[0].name, expressions=(merged(added(*linear)),))

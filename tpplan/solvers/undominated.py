"""Simplifies sums of terms: drops expressions of a maximum that another expression exceeds in every assignment, bounds
a sum from above and below by a linear expression, and adds up its linear terms."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from tpplan.solvers.matrix import Floats, Mask
from tpplan.solvers.problem import Expression, Term, added, merged, scaled

#: number of large expressions against which every other one is compared
MAX_DOMINATORS = 12


def undominated(expressions: Iterable[Expression]) -> tuple[Expression, ...]:
    """The expressions without those that another expression exceeds in every assignment, the one with the largest
    possible value first. Only the first MAX_DOMINATORS that are kept are compared with the others."""
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
    """Sort key: the largest value of an expression, then the sum of its vectors' means."""
    middle = sum(sum(vector) / len(vector) for _, vector in expression.terms)
    return expression.constant + sum(max(vector) for _, vector in expression.terms), middle


class _Table:
    """The vectors of several expressions in one array: those of the first expression's terms, then of the second's."""

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

    def exceeded_by(self, number: int) -> Mask:
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
        exceeded: Mask = lead + (self.constants - self.constants[number]) <= 0
        return exceeded


def upper(terms: Iterable[Term]) -> Expression:
    """An upper bound of the sum of terms, none of which has a negative expression: a maximum is at most the sum of its
    undominated expressions."""
    found = ((expression, term.weight) for term in terms for expression in undominated(term.expressions))
    return merged(added(*(scaled(expression, weight) for expression, weight in found)))


def lower(terms: Iterable[Term]) -> Expression:
    """A lower bound of the sum of terms: a maximum is at least its first expression."""
    return merged(added(*(scaled(term.expressions[0], term.weight) for term in terms)))


def combined(terms: Iterable[Term]) -> Iterator[Term]:
    """Yields the terms with several expressions, then the sum of all linear terms as one term, named as the first."""
    found = list(terms)
    linear = [scaled(term.expressions[0], term.weight) for term in found if len(term.expressions) == 1]
    yield from (term for term in found if len(term.expressions) > 1)
    if linear:
        yield Term(name=found[0].name, expressions=(merged(added(*linear)),))

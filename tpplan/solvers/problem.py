"""The optimization problem in the abstract: choose one strategy per node, agree along edges, stay within limits.

    minimize    sum_j w_j * c_j * max_a e_ja(x)                   (the objective's terms)
    subject to  sum_s x_ns = 1                    for each node n
                u_s(x_u) = v_s(x_v)               for each edge: the chosen strategies name the same layout
                sum_q n_q = N                     for each split: whole numbers n_q >= 0 of its parts
                sum_j w_j * c_j * max_a e_ja(x) <= limit          for each resource
                sum_(n, s) x_ns <= number of its nodes - 1        for each conflict, s over those it names of node n

Each e is an expression `constant + sum over nodes of a vector entry picked by the node's strategy`. A term with one
expression is linear. A term with several is their maximum, which expresses exposed communication (max(0, gather -
compute)) and peaks (the largest transient). Weights w are not negative, so the maximum is convex and an ILP represents
it exactly. c is 1, or the number n_q of a part, for costs that count once per member. A guard leaves an expression out
of its maximum depending on which parts are empty.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

#: node name -> index of its strategy, and part name -> its number
Choice = Mapping[str, int]
#: relative excess over a limit that counts as rounding
LIMIT_TOLERANCE = 1e-9
#: relative excess over a cutoff of choices that are still looked at: equal optima of two problems differ by less
CUTOFF_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A decision: exactly one of `strategies` (labels for reports) is chosen; infeasible without any."""

    name: str
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Agreement: source_layouts[strategy of source] == target_layouts[strategy of target]. One layout per strategy."""

    source: str
    target: str
    source_layouts: tuple[str, ...]
    target_layouts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`total` members that are divided among `parts`. Names of parts and nodes are unique in a problem."""

    parts: tuple[str, ...]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """constant + sum over (node, vector) of vector[strategy of node].

    The expression counts only where the part `where`, if given, is not empty and all parts in `unless` are empty.
    """

    constant: float = 0.0
    terms: tuple[tuple[str, tuple[float, ...]], ...] = ()
    where: str | None = None
    unless: tuple[str, ...] = ()

    @property
    def is_guarded(self) -> bool:
        """True where the expression does not always count."""
        return self.where is not None or bool(self.unless)

    def counts(self, choice: Choice) -> bool:
        """True where the expression counts under a choice."""
        return (self.where is None or choice[self.where] > 0) and not any(choice[part] for part in self.unless)

    @property
    def least(self) -> float:
        """A lower bound on the expression's value under any choice: of each vector its least entry."""
        return self.constant + sum(min(vector) for _, vector in self.terms)

    def value(self, choice: Choice) -> float:
        """The expression's value under a choice."""
        return self.constant + sum(vector[choice[node]] for node, vector in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """weight * max over expressions, times the number of the part `each` where one is given.

    `name` is the row of the report. weight >= 0, and at least one expression always counts.
    """

    name: str
    expressions: tuple[Expression, ...]
    weight: float = 1.0
    each: str | None = None

    @property
    def least(self) -> float:
        """A lower bound on the term's value under any choice, agreeing or not."""
        low = self.weight * max(e.least for e in self.expressions if not e.is_guarded)
        if self.each is None:
            return low
        return 0.0 if low >= 0 else -math.inf

    def value(self, choice: Choice) -> float:
        """The term's value under a choice."""
        number = 1 if self.each is None else choice[self.each]
        return self.weight * number * max(e.value(choice) for e in self.expressions if e.counts(choice))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A limit on a sum of terms, such as peak memory in bytes."""

    name: str
    terms: tuple[Term, ...]
    limit: float

    def is_kept(self, choice: Choice, tolerance: float) -> bool:
        """True where a choice is within the limit, up to a relative tolerance."""
        return total(self.terms, choice) <= self.limit + tolerance * abs(self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Strategies, by node, of which a choice must not have one at every node. Each node is listed once."""

    choices: tuple[tuple[str, frozenset[int]], ...]

    def is_avoided(self, choice: Choice) -> bool:
        """True where some node has a strategy outside the conflict."""
        return any(choice[name] not in strategies for name, strategies in self.choices)

    def resource(self, sizes: Mapping[str, int]) -> Resource:
        """The conflict as a sum with a limit; `sizes` are the nodes' numbers of strategies."""
        terms = ((name, tuple(float(i in strategies) for i in range(sizes[name]))) for name, strategies in self.choices)
        expression = Expression(terms=tuple(terms))
        limit = float(len(self.choices) - 1)
        return Resource(name="conflict", terms=(Term(name="conflict", expressions=(expression,)),), limit=limit)


@dataclass(slots=True)
class Shared:
    """A cache for problems with the same nodes and edges: `found` has the skeleton by nodes, `relaxed` the bases of
    relaxations that a solver keeps, `valid` the nodes, edges, objective and splits that were last validated."""

    edges: tuple[Edge, ...] = ()
    found: dict[tuple[Node, ...], object] = field(default_factory=dict)
    relaxed: dict[Hashable, object] = field(default_factory=dict)
    valid: tuple[tuple[Node, ...], tuple[Edge, ...], tuple[Term, ...], tuple[Split, ...]] = ((), (), (), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Nodes, edges, splits, objective, resources and conflicts; the module docstring has the mathematics.

    Valid on construction: raises ValueError where an edge, an expression or a term names an unknown node or part, a
    vector has not one entry per strategy, or a weight is negative.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    objective: tuple[Term, ...]
    resources: tuple[Resource, ...] = ()
    splits: tuple[Split, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    shared: Shared = field(default_factory=Shared, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = {node.name: len(node.strategies) for node in self.nodes}
        parts = {part for split in self.splits for part in split.parts}
        if len(sizes) + len(parts) != len(self.nodes) + sum(len(split.parts) for split in self.splits):
            raise ValueError("two nodes or parts share a name")
        if not parts.isdisjoint(sizes):
            raise ValueError("a node and a part share a name")
        nodes, edges, objective, splits = self.shared.valid
        if not (nodes is self.nodes and edges is self.edges):
            self._check_edges(sizes)
        if not (nodes is self.nodes and objective is self.objective and splits == self.splits):
            self._check_terms(self.objective, sizes, parts)
        for resource in self.resources:
            self._check_terms(resource.terms, sizes, parts)
        for conflict in self.conflicts:
            unknown = [name for name, _ in conflict.choices if name not in sizes]
            if unknown or len({name for name, _ in conflict.choices}) < len(conflict.choices):
                what = f"the unknown node {unknown[0]}" if unknown else "a node twice"
                raise ValueError(f"a conflict names {what}")
        self.shared.valid = self.nodes, self.edges, self.objective, self.splits

    @property
    def limits(self) -> Iterator[Resource]:
        """The resources, followed by the conflicts as resources."""
        sizes = {node.name: len(node.strategies) for node in self.nodes}
        return iter((*self.resources, *(conflict.resource(sizes) for conflict in self.conflicts)))

    def _check_edges(self, sizes: Mapping[str, int]) -> None:
        for edge in self.edges:
            for name, layouts in ((edge.source, edge.source_layouts), (edge.target, edge.target_layouts)):
                if sizes.get(name) != len(layouts):
                    raise ValueError(
                        f"edge {edge.source} -> {edge.target}: {name} has {sizes.get(name)} strategies, "
                        f"the edge {len(layouts)}"
                    )

    def _check_terms(self, terms: Sequence[Term], sizes: Mapping[str, int], parts: set[str]) -> None:
        for term in terms:
            self._check(term, sizes, parts)

    def _check(self, term: Term, sizes: Mapping[str, int], parts: set[str]) -> None:
        if term.weight < 0 or all(expression.is_guarded for expression in term.expressions):
            raise ValueError(f"term {term.name}: weight {term.weight}, {len(term.expressions)} expressions")
        named = [part for e in term.expressions for part in (e.where, *e.unless) if part is not None]
        unknown = [part for part in (*named, term.each) if part is not None and part not in parts]
        if unknown:
            raise ValueError(f"term {term.name}: no split has the part {unknown[0]}")
        for expression in term.expressions:
            for name, vector in expression.terms:
                if sizes.get(name) != len(vector):
                    raise ValueError(
                        f"term {term.name}: {name} has {sizes.get(name)} strategies, its vector {len(vector)}"
                    )

    @property
    def parts(self) -> Iterator[str]:
        """Names of the parts of all splits."""
        return (part for split in self.splits for part in split.parts)

    def is_consistent(self, choice: Choice) -> bool:
        """True where all edges agree and all splits add up."""
        return all(
            edge.source_layouts[choice[edge.source]] == edge.target_layouts[choice[edge.target]] for edge in self.edges
        ) and all(
            min(numbers) >= 0 and sum(numbers) == split.total
            for split in self.splits
            if (numbers := [choice[part] for part in split.parts])
        )

    def price(self, choice: Choice) -> float:
        """The objective of a choice, computed from scratch."""
        return total(self.objective, choice)

    def is_feasible(self, choice: Choice, *, tolerance: float = 1e-6) -> bool:
        """True where edges agree, splits add up, resources are kept up to a tolerance, and conflicts are avoided."""
        return (
            self.is_consistent(choice)
            and all(resource.is_kept(choice, tolerance) for resource in self.resources)
            and all(conflict.is_avoided(choice) for conflict in self.conflicts)
        )


def total(terms: Sequence[Term], choice: Choice) -> float:
    """Sum of the terms under a choice."""
    return sum(term.value(choice) for term in terms)


class Status(StrEnum):
    """The solver's knowledge. FEASIBLE: stopped early with an incumbent, whose gap says how far off it may be. BOUNDED:
    only a lower bound."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    BOUNDED = "bounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer. `bound` <= the optimum <= `objective`; gap = (objective - bound) / objective.

    For INFEASIBLE, choice, objective and bound are None; for BOUNDED, choice and objective are.
    """

    status: Status
    solver: str
    choice: dict[str, int] | None = None
    objective: float | None = None
    bound: float | None = None

    @property
    def gap(self) -> float | None:
        """Relative gap, 0 for a proven optimum; None without an objective or bound."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, self.objective - self.bound) / abs(self.objective) if self.objective else 0.0


def constant_term(part: str, amount: float) -> Term:
    """A term of a constant amount."""
    return Term(name=part, expressions=(Expression(constant=amount),))


def linear_term(part: str, name: str, vector: Sequence[float], weight: float) -> Term:
    """weight times the vector's entry for the strategy of the node `name`."""
    return Term(name=part, expressions=(Expression(terms=((name, tuple(vector)),)),), weight=weight)


def scaled(expression: Expression, weight: float) -> Expression:
    """weight times an unguarded expression."""
    if weight == 1.0:
        return expression
    terms = tuple((name, tuple(weight * entry for entry in vector)) for name, vector in expression.terms)
    return Expression(constant=weight * expression.constant, terms=terms)


def added(*expressions: Expression) -> Expression:
    """The sum of unguarded expressions, in which a node may have several vectors."""
    return Expression(
        constant=sum(e.constant for e in expressions), terms=tuple(term for e in expressions for term in e.terms)
    )


def negative(expression: Expression) -> Expression:
    """The expression, unguarded, with the other sign."""
    terms = tuple((name, tuple(-entry for entry in vector)) for name, vector in expression.terms)
    return Expression(constant=-expression.constant, terms=terms)


def minus(left: Expression, right: Expression) -> Expression:
    """left - right, both unguarded, in which a node may have several vectors."""
    return added(left, negative(right))


def merged(expression: Expression) -> Expression:
    """The expression with one vector for each node."""
    vectors: dict[str, tuple[float, ...]] = {}
    for name, vector in expression.terms:
        known = vectors.get(name)
        vectors[name] = vector if known is None else tuple(a + b for a, b in zip(known, vector, strict=True))
    return replace(expression, terms=tuple(vectors.items()))

"""The optimization problem in the abstract: choose one strategy per node, agree along edges, stay under the limits.

    minimize    sum_j w_j * max_a e_ja(x)                         (the objective's terms)
    subject to  sum_s x_ns = 1                    for each node n
                u_s(x_u) = v_s(x_v)               for each edge: the chosen strategies name the same layout
                sum_j w_j * max_a e_ja(x) <= limit                for each resource

Each e is an expression `constant + sum over nodes of a vector entry picked by the node's strategy`. A term with one
expression is linear; with several it is the largest of them, which is how exposed communication (max(0, gather -
compute)) and peaks (the largest transient) are written. Weights are not negative, so the maximum is convex and an ILP
represents it exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

#: strategy index by node name
Choice = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A decision: exactly one of `strategies` (labels, for reports) is chosen. A node without one is infeasible."""

    name: str
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Agreement: source_layouts[chosen of source] == target_layouts[chosen of target]. One entry per strategy."""

    source: str
    target: str
    source_layouts: tuple[str, ...]
    target_layouts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """constant + sum over (node, vector) of vector[chosen strategy of node]."""

    constant: float = 0.0
    terms: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def value(self, choice: Choice) -> float:
        """The expression under a choice."""
        return self.constant + sum(vector[choice[node]] for node, vector in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """weight * max over expressions; `name` is the row of the report it belongs to. weight >= 0."""

    name: str
    expressions: tuple[Expression, ...]
    weight: float = 1.0

    def value(self, choice: Choice) -> float:
        """The term under a choice."""
        return self.weight * max(expression.value(choice) for expression in self.expressions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A limit on a sum of terms, e.g. peak memory in bytes."""

    name: str
    terms: tuple[Term, ...]
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Nodes, edges, objective and resources; see the module docstring for the mathematics.

    Valid on construction: raises ValueError when an edge or expression names an unknown node or its length is not
    the node's number of strategies, and for a negative weight.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    objective: tuple[Term, ...]
    resources: tuple[Resource, ...] = ()

    def __post_init__(self) -> None:
        sizes = {node.name: len(node.strategies) for node in self.nodes}
        if len(sizes) != len(self.nodes):
            raise ValueError("two nodes share a name")
        for edge in self.edges:
            for name, layouts in ((edge.source, edge.source_layouts), (edge.target, edge.target_layouts)):
                if sizes.get(name) != len(layouts):
                    raise ValueError(
                        f"edge {edge.source} -> {edge.target}: {name} has {sizes.get(name)} strategies, "
                        f"the edge {len(layouts)}"
                    )
        for term in (*self.objective, *(t for resource in self.resources for t in resource.terms)):
            if term.weight < 0 or not term.expressions:
                raise ValueError(f"term {term.name}: weight {term.weight}, {len(term.expressions)} expressions")
            for expression in term.expressions:
                for name, vector in expression.terms:
                    if sizes.get(name) != len(vector):
                        raise ValueError(
                            f"term {term.name}: {name} has {sizes.get(name)} strategies, its vector {len(vector)}"
                        )

    def is_consistent(self, choice: Choice) -> bool:
        """True when every edge agrees."""
        return all(
            edge.source_layouts[choice[edge.source]] == edge.target_layouts[choice[edge.target]] for edge in self.edges
        )

    def price(self, choice: Choice) -> float:
        """The objective of a choice, from scratch."""
        return total(self.objective, choice)

    def is_feasible(self, choice: Choice, *, tolerance: float = 1e-6) -> bool:
        """True when edges agree and every resource is within its limit, up to a relative tolerance."""
        return self.is_consistent(choice) and all(
            total(resource.terms, choice) <= resource.limit + tolerance * abs(resource.limit)
            for resource in self.resources
        )


def total(terms: Sequence[Term], choice: Choice) -> float:
    """Sum of the terms under a choice."""
    return sum(term.value(choice) for term in terms)


class Status(StrEnum):
    """What the solver knows. FEASIBLE: stopped early with an incumbent; its gap says how far it may be off."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer. `bound` <= the true optimum <= `objective`; gap = (objective - bound) / objective.

    choice, objective and bound are None when status is INFEASIBLE.
    """

    status: Status
    solver: str
    choice: dict[str, int] | None = None
    objective: float | None = None
    bound: float | None = None

    @property
    def gap(self) -> float | None:
        """Relative gap, 0 for a proven optimum; None when infeasible."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, self.objective - self.bound) / abs(self.objective) if self.objective else 0.0

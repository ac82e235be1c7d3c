"""What is certain before a solver runs: dead strategies, idle constraints, numbers around their minimum.

- A strategy dies when an edge finds no partner for it, or when alone it costs more than a limit leaves: a forbidden
  choice is an absent column.
- Of two strategies with the same layouts, one that is nowhere better than the other dies.
- Edges between the same two nodes become one link, whose labels are tuples of layouts.
- Per expression and node, the cheapest strategy's entry moves into the constant. One-hot nodes make this exact, and
  afterwards constant <= value <= constant + sum of the largest extras.
- Of a term's expressions those that can never be the largest are dropped. With one left, or with all over one node,
  the term is linear.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.problem import Expression, Problem, Term

#: rounding in sums must not decide whether a limit is kept: this share of it is granted
LIMIT_TOLERANCE = 1e-9

#: strategies that may still be chosen, by node, ascending
Alive = dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """low + sum over nodes of extras[node][position of the chosen strategy among the alive]. Extras are >= 0."""

    low: float
    extras: Mapping[str, Sequence[float]]

    @property
    def high(self) -> float:
        """An upper bound on the value."""
        return self.low + sum(max(vector) for vector in self.extras.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """weight * max over `expressions` (at least two, over at least two nodes)."""

    weight: float
    expressions: tuple[Affine, ...]

    @property
    def low(self) -> float:
        """A lower bound on the unweighted maximum."""
        return max(expression.low for expression in self.expressions)

    @property
    def high(self) -> float:
        """An upper bound on the unweighted maximum."""
        return max(expression.high for expression in self.expressions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A sum of terms: what is linear, and the peaks. `limit` is infinite for an objective."""

    linear: Affine
    peaks: tuple[Peak, ...]
    limit: float

    @property
    def low(self) -> float:
        """A lower bound on the value."""
        return self.linear.low + sum(peak.weight * peak.low for peak in self.peaks)

    @property
    def high(self) -> float:
        """An upper bound on the value."""
        return self.linear.high + sum(peak.weight * peak.high for peak in self.peaks)

    @property
    def allowance(self) -> float:
        """What is granted above the limit: rounding of the sum."""
        return LIMIT_TOLERANCE * max(abs(self.limit), abs(self.low))

    def weighted_extras(self) -> Iterator[tuple[str, Sequence[float], float]]:
        """(node, vector, factor): a choice raises the lower bound by factor * vector[position] where that is positive.

        In a peak, the first part of what an expression's node adds only lifts it to the peak's lower bound.
        """
        for node, vector in self.linear.extras.items():
            yield node, vector, 1.0
        for peak in self.peaks:
            for expression in peak.expressions:
                below = peak.low - expression.low
                for node, vector in expression.extras.items():
                    yield node, [extra - below for extra in vector], peak.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Agreement of two nodes: labels are equal. One label per strategy of the problem, dead ones included."""

    source: str
    target: str
    source_labels: Sequence[tuple[str, ...]]
    target_labels: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """An equivalent, smaller problem. Resources that no choice can exceed are gone."""

    alive: Alive
    links: tuple[Link, ...]
    objective: Total
    resources: tuple[Total, ...]


def reduce(problem: Problem, *, ceiling: float = math.inf) -> Reduced | None:
    """The problem without what cannot be part of a solution; None when it is infeasible.

    `ceiling`: an objective that is known to be reachable; what costs more dies.
    """
    links = _merged_links(problem)
    alive: Alive = {node.name: list(range(len(node.strategies))) for node in problem.nodes}
    while True:
        if not _make_arc_consistent(alive, links):
            return None
        objective = _total(problem.objective, alive, ceiling)
        resources = [_total(resource.terms, alive, resource.limit) for resource in problem.resources]
        if any(resource.low > resource.limit + resource.allowance for resource in resources):
            return None
        binding = tuple(resource for resource in resources if resource.high > resource.limit)
        if not (
            _remove_unaffordable(alive, (objective, *resources))
            or _remove_dominated(alive, links, (objective, *binding))
        ):
            return Reduced(alive=alive, links=links, objective=objective, resources=binding)


def _merged_links(problem: Problem) -> tuple[Link, ...]:
    """One link per pair of nodes that share edges, in either direction; a node's edge to itself is a link too."""
    columns: dict[tuple[str, str], tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {}
    for edge in problem.edges:
        source, target = (edge.source, edge.source_layouts), (edge.target, edge.target_layouts)
        if (edge.target, edge.source) in columns:
            source, target = target, source
        sides = columns.setdefault((source[0], target[0]), ([], []))
        sides[0].append(source[1])
        sides[1].append(target[1])
    return tuple(
        Link(
            source=source,
            target=target,
            source_labels=list(zip(*sides[0], strict=True)),
            target_labels=list(zip(*sides[1], strict=True)),
        )
        for (source, target), sides in columns.items()
    )


def _make_arc_consistent(alive: Alive, links: Sequence[Link]) -> bool:
    """Remove strategies without a partner along some link, until none is left; False when a node has none."""
    by_node: dict[str, list[Link]] = {name: [] for name in alive}
    for link in links:
        by_node[link.source].append(link)
        by_node[link.target].append(link)
    waiting = deque(links)
    queued = set(map(id, links))
    while waiting:
        link = waiting.popleft()
        queued.discard(id(link))
        for name in _prune_link(alive, link):
            for affected in by_node[name]:
                if id(affected) not in queued:
                    queued.add(id(affected))
                    waiting.append(affected)
    return all(alive.values())


def _prune_link(alive: Alive, link: Link) -> list[str]:
    """Keep what agrees along one link; the nodes that lost strategies."""
    if link.source == link.target:
        kept = [s for s in alive[link.source] if link.source_labels[s] == link.target_labels[s]]
        return _shrink(alive, link.source, kept)
    offered = {link.source_labels[s] for s in alive[link.source]}
    common = offered.intersection(link.target_labels[s] for s in alive[link.target])
    return [
        *_shrink(alive, link.source, [s for s in alive[link.source] if link.source_labels[s] in common]),
        *_shrink(alive, link.target, [s for s in alive[link.target] if link.target_labels[s] in common]),
    ]


def _shrink(alive: Alive, name: str, kept: list[int]) -> list[str]:
    """Set a node's strategies; [name] when there are fewer now."""
    changed = len(kept) < len(alive[name])
    alive[name] = kept
    return [name] if changed else []


def _remove_unaffordable(alive: Alive, totals: Iterable[Total]) -> bool:
    """Remove strategies that alone exceed what a total's lower bound leaves of its limit; True when there were any."""
    dead: dict[str, set[int]] = {}
    for total in totals:
        slack = total.limit + total.allowance - total.low
        if slack == math.inf:
            continue
        for name, vector, factor in total.weighted_extras():
            if factor * max(vector) > slack:
                unaffordable = (s for s, extra in zip(alive[name], vector, strict=True) if factor * extra > slack)
                dead.setdefault(name, set()).update(unaffordable)
    for name, strategies in dead.items():
        alive[name] = [s for s in alive[name] if s not in strategies]
    return bool(dead)


def _remove_dominated(alive: Alive, links: Sequence[Link], totals: Sequence[Total]) -> bool:
    """Of strategies with equal labels, remove those at least as expensive everywhere; the first of equals stays."""
    labels: dict[str, list[Sequence[tuple[str, ...]]]] = {name: [] for name in alive}
    for link in links:
        labels[link.source].append(link.source_labels)
        labels[link.target].append(link.target_labels)
    vectors: dict[str, list[Sequence[float]]] = {name: [] for name in alive}
    for total in totals:
        for name, vector, _ in total.weighted_extras():
            vectors[name].append(vector)
    removed = False
    for name, strategies in alive.items():
        groups: dict[tuple[tuple[str, ...], ...], list[tuple[tuple[float, ...], int]]] = {}
        for i, strategy in enumerate(strategies):
            prices = tuple(vector[i] for vector in vectors[name])
            groups.setdefault(tuple(column[strategy] for column in labels[name]), []).append((prices, strategy))
        kept = sorted(strategy for group in groups.values() for strategy in _cheapest(group))
        removed = removed or len(kept) < len(strategies)
        alive[name] = kept
    return removed


def _cheapest(group: list[tuple[tuple[float, ...], int]]) -> list[int]:
    """The strategies of a group of (prices, strategy) that no other one is as good as everywhere."""
    kept: list[tuple[tuple[float, ...], int]] = []
    for prices, strategy in sorted(group):  # only an earlier one, in lexicographic order, can dominate
        if not any(all(a <= b for a, b in zip(other, prices, strict=True)) for other, _ in kept):
            kept.append((prices, strategy))
    return [strategy for _, strategy in kept]


def _total(terms: Sequence[Term], alive: Alive, limit: float) -> Total:
    """Collect terms: linear parts in one expression, the rest as peaks."""
    parts: list[Affine] = []
    peaks: list[Peak] = []
    for term in terms:
        if term.weight == 0:
            continue
        peak = Peak(weight=term.weight, expressions=_undominated([_affine(e, alive) for e in term.expressions]))
        flat = _flattened(peak)
        if flat is None:
            peaks.append(peak)
        else:
            parts.append(flat)
    return Total(linear=_sum(parts), peaks=tuple(peaks), limit=limit)


def _affine(expression: Expression, alive: Alive) -> Affine:
    """The expression over the strategies alive."""
    vectors: dict[str, list[float]] = {}
    for name, vector in expression.terms:
        _accumulate(vectors, name, [vector[s] for s in alive[name]])
    return _around_minimum(expression.constant, vectors)


def _sum(parts: Iterable[Affine]) -> Affine:
    """The sum of expressions."""
    low = 0.0
    vectors: dict[str, list[float]] = {}
    for part in parts:
        low += part.low
        for name, vector in part.extras.items():
            _accumulate(vectors, name, vector)
    return _around_minimum(low, vectors)


def _accumulate(vectors: dict[str, list[float]], name: str, vector: Sequence[float]) -> None:
    """Add a vector to a node's."""
    known = vectors.get(name)
    vectors[name] = list(vector) if known is None else [a + b for a, b in zip(known, vector, strict=True)]


def _around_minimum(constant: float, vectors: Mapping[str, Sequence[float]]) -> Affine:
    """Move each node's minimum into the constant; nodes whose strategies are equal vanish."""
    extras: dict[str, Sequence[float]] = {}
    for name, vector in vectors.items():
        least = min(vector)
        constant += least
        if max(vector) > least:
            extras[name] = [value - least for value in vector]
    return Affine(low=constant, extras=extras)


def _undominated(expressions: Sequence[Affine]) -> tuple[Affine, ...]:
    """The expressions that can be the largest: one below another's minimum, whatever is chosen, is not."""
    surest = max(range(len(expressions)), key=lambda i: expressions[i].low)
    return tuple(e for i, e in enumerate(expressions) if i == surest or e.high > expressions[surest].low)


def _flattened(peak: Peak) -> Affine | None:
    """The peak as a linear expression, where it is one: a single expression, or all over one node at most."""
    if len(peak.expressions) == 1:
        (only,) = peak.expressions
        vectors = {name: [peak.weight * extra for extra in vector] for name, vector in only.extras.items()}
        return _around_minimum(peak.weight * only.low, vectors)
    names = {name for expression in peak.expressions for name in expression.extras}
    if len(names) > 1:
        return None
    # An expression without extras is a constant: of those at most the surest is left, so one name there is.
    (name,) = names
    num_strategies = max(len(expression.extras.get(name, ())) for expression in peak.expressions)
    values = [
        [expression.low + extra for extra in expression.extras.get(name, [0.0] * num_strategies)]
        for expression in peak.expressions
    ]
    return _around_minimum(0.0, {name: [peak.weight * max(column) for column in zip(*values, strict=True)]})

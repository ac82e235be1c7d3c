"""FSDP units over shard x tp: which layers FSDP shards over the shard and tp axes together.

Layers with the same decisions are over both axes together or not at all: a node of the ILP decides, where nothing else
does. Such a layer's parameters are all whole on tp, by a conflict between its node and every other placement. So what
the layer costs in place of its cost over the shard axis is a number, whatever the layouts: w * (cost over both - cost
over shard), w 1 where it is chosen and 0 elsewhere, is exact and linear.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tpplan.core.graph import enclosing
from tpplan.core.layout import R
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import FsdpUnit
from tpplan.solvers.problem import Conflict, Expression, Node, Term

#: what a node decides between
LABELS = {False: "FSDP over shard", True: "FSDP over shard x tp"}


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitsOverTp:
    """Units over shard x tp: `given` are decided, `nodes` has the node's name of each that is open. A node's strategies
    are `options`, True for over shard x tp."""

    given: frozenset[str] = frozenset()
    nodes: Mapping[str, str] = field(default_factory=dict)
    options: tuple[bool, ...] = (False, True)

    @property
    def is_possible(self) -> bool:
        """True where some unit is, or may be, over shard x tp."""
        return bool(self.given or self.nodes)

    def may_be(self, unit: str) -> bool:
        """True for a unit that is, or may be, over shard x tp."""
        return unit in self.given or unit in self.nodes

    def times(self, unit: str, amount: float) -> Expression:
        """The amount where the unit is over shard x tp, else 0."""
        if unit in self.given:
            return Expression(constant=amount)
        if unit not in self.nodes:
            return Expression()
        return Expression(terms=((self.nodes[unit], tuple(amount * option for option in self.options)),))

    def as_nodes(self) -> tuple[Node, ...]:
        """The nodes of the ILP."""
        labels = tuple(LABELS[option] for option in self.options)
        return tuple(Node(name=name, strategies=labels) for name in dict.fromkeys(self.nodes.values()))

    def chosen(self, choice: Mapping[str, int]) -> frozenset[str]:
        """The units over shard x tp under a choice; none of those whose node the choice leaves out."""
        found = (unit for unit, node in self.nodes.items() if node in choice and self.options[choice[node]])
        return self.given | frozenset(found)

    def conflicts(self, space: Space, units: Iterable[FsdpUnit]) -> Iterator[Conflict]:
        """Yields, for each node, its conflict with every placement of the units' parameters but R."""
        chosen = frozenset(i for i, option in enumerate(self.options) if option)
        known: set[tuple[str, str]] = set()
        for unit in units:
            for decision in placing(space, unit) if unit.name in self.nodes else ():
                node, others = self.nodes[unit.name], _not_whole(space, decision)
                if others and (node, decision) not in known:
                    known.add((node, decision))
                    yield Conflict(choices=((node, chosen), (decision, others)))

    def least(self, terms: Iterable[Term], conflicts: Iterable[Conflict]) -> float:
        """A lower bound on the sum of some terms, that of each at the node's better strategy: where the unit is over
        shard x tp, no strategy counts that is in conflict with this."""
        excluded: dict[str, dict[str, frozenset[int]]] = {}
        for conflict in conflicts:
            (node, _), (decision, others) = conflict.choices
            excluded.setdefault(node, {})[decision] = others
        return sum(self._least(term, excluded) for term in terms)

    def _least(self, term: Term, excluded: Mapping[str, Mapping[str, frozenset[int]]]) -> float:
        names = {name for expression in term.expressions for name, _ in expression.terms}
        node = next(iter(names & excluded.keys()), None)
        if node is None:
            return term.least
        return min(
            replace(
                term,
                expressions=tuple(_where(own, node, i, excluded[node] if chosen else {}) for own in term.expressions),
            ).least
            for i, chosen in enumerate(self.options)
        )


def _where(expression: Expression, node: str, strategy: int, excluded: Mapping[str, frozenset[int]]) -> Expression:
    """The expression where a node has a strategy and others have none that is excluded, for bounds alone: its vectors
    are shorter."""

    def left(name: str, vector: tuple[float, ...]) -> tuple[float, ...]:
        if name == node:
            return (vector[strategy],)
        return tuple(amount for i, amount in enumerate(vector) if i not in excluded.get(name, ()))

    return replace(expression, terms=tuple((name, left(name, vector)) for name, vector in expression.terms))


def placing(space: Space, unit: FsdpUnit) -> tuple[str, ...]:
    """The decisions that place a unit's parameters, each once."""
    readings = (space.readings[source.label] for source in unit.parameters)
    return tuple(dict.fromkeys(space.classes[own[0].name] for own in readings if own))


def can_be_over_tp(space: Space, units: Iterable[FsdpUnit]) -> frozenset[str]:
    """Names of the units, but the root, of which each parameter may be whole on tp, none is divided by expert, and none
    is tied to another unit's."""
    every = tuple(units)
    key = "placing", tuple(unit.name for unit in every)
    placed = space.once_for_all_sizes(key, lambda: {own.name: placing(space, own) for own in _on_their_own(every)})
    partly = {own for found in placed.values() for own in found if not _may_be_whole(space, own)}
    return frozenset(name for name, found in placed.items() if partly.isdisjoint(found))


def _on_their_own(units: tuple[FsdpUnit, ...]) -> Iterator[FsdpUnit]:
    """Yields the units, but the root, without divided experts and without another unit's parameters inside."""
    names = {unit.name for unit in units}
    mixed = set[str]()
    for unit in units:
        labels = (name for source in unit.parameters for name in (source.label, *source.aliases))
        around = {next((own for own in enclosing(label) if own in names), "") for label in labels}
        mixed |= around | {unit.name} if around - {unit.name} else frozenset()
    for unit in units:
        if unit.name and unit.name not in mixed and all(source.ep == 1 for source in unit.parameters):
            yield unit


def _may_be_whole(space: Space, decision: str) -> bool:
    return any(own.operands[0] == R for own in space.strategies[decision])


def _not_whole(space: Space, decision: str) -> frozenset[int]:
    """The strategies of a decision that place the parameter other than R."""
    return frozenset(i for i, own in enumerate(space.strategies[decision]) if own.operands[0] != R)

"""Finds what stands against a wish for some decisions: pins, counterexamples, or another decision's rule or sizes.

A wish keeps some strategies of some decisions. Pins and counterexamples are taken out one after the other, as long as
the wish still cannot come true without them; those that remain stand against it together. Where none remain, it is a
decision that values flow to or from.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.core.errors import SolverError
from tpplan.core.graph import Op
from tpplan.costs.step.cost_table import edges_of
from tpplan.layouts.build_space import build_space
from tpplan.layouts.decision_space import Space
from tpplan.layouts.in_words import placed
from tpplan.layouts.pins import Pin
from tpplan.layouts.plan_entries import crossing_layouts
from tpplan.layouts.rules import Strategy, has_rule
from tpplan.search.points.cuts import Choices, Cuts
from tpplan.search.points.point_solver import PointSolver
from tpplan.solvers.problem import Node, Problem

#: most obstacles that a message names
MOST_NAMED = 2
#: by deciding decision, the strategies that are wished for
Wish = Mapping[str, frozenset[Strategy]]


@dataclass(frozen=True, slots=True)
class Restriction:
    """A pin or a counterexample in words, and what it forbids: strategies of a decision, or choices together."""

    words: str
    forbids: Callable[[str, Strategy], bool]
    together: tuple[Choices, ...] = ()


@dataclass(frozen=True, slots=True)
class Obstacles:
    """The decisions of one micro-batch and tp degree under rules alone, and all that restricts them besides."""

    space: Space
    restrictions: tuple[Restriction, ...]
    solver: PointSolver

    @classmethod
    def of(cls, solver: PointSolver, micro_batch: int, tp: int, *, without: Iterable[Pin] = ()) -> "Obstacles":
        """The obstacles that a search has found so far, but for pins in `without`. Raises NoLayoutError."""
        space = build_space(
            solver.traces.traced(micro_batch).graph,
            tp,
            unused_outputs=solver.request.unused_outputs,
            apart=solver.pinned(micro_batch).pins_within,
            crossing=crossing_layouts(solver.traces.traced(micro_batch).graph, solver.request.stage),
        )
        pins = [pin for pin in solver.request.pins if pin not in without]
        return cls(space, (*_of_pins(solver, micro_batch, pins), *_of_counterexamples(solver, space)), solver)

    def against(self, wish: Wish) -> str:
        """The obstacles to a wish in words, MOST_NAMED at most; "" where it can come true."""
        try:
            if self._is_possible(wish, self.restrictions):
                return ""
            if not self._is_possible(wish, ()):
                return self._blocked(wish)
            found = self._needed(wish)
        except SolverError:
            return "not known: the time limit ended the search for what stands against it"
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return "; ".join(restriction.words for restriction in found[:MOST_NAMED]) + more

    def _needed(self, wish: Wish) -> tuple[Restriction, ...]:
        """Restrictions of which none can be spared: without any of them the wish could come true."""
        found = self.restrictions
        size = len(found)
        while size:
            for start in range(0, len(found), size):
                rest = found[:start] + found[start + size :]
                if not self._is_possible(wish, rest):
                    found = rest
                    break
            else:
                size //= 2
            size = min(size, len(found))
        return found

    def _is_possible(self, wish: Wish, restrictions: Sequence[Restriction]) -> bool:
        """True where some layouts fulfil the wish under rules and these restrictions."""
        space = self._restricted(wish, restrictions)
        if not all(space.strategies[name] for name in space.members):
            return False
        cuts = Cuts(conflicts={space.tp: [choices for own in restrictions for choices in own.together]})
        problem = Problem(
            nodes=tuple(Node(name=name, strategies=tuple(map(str, space.strategies[name]))) for name in space.members),
            edges=tuple(dict.fromkeys(edges_of(space))),
            objective=(),
            conflicts=cuts.conflicts_in(space),
        )
        return self.solver.solver_of(problem).choice is not None

    def _restricted(self, wish: Wish, restrictions: Sequence[Restriction]) -> Space:
        """The decisions with the strategies that are wished for and not forbidden, which may be none."""
        left = {
            name: tuple(
                strategy
                for strategy in self.space.strategies[name]
                if (name not in wish or strategy in wish[name])
                and not any(restriction.forbids(name, strategy) for restriction in restrictions)
            )
            for name in self.space.members
        }
        return replace(self.space, strategies={name: left[self.space.classes[name]] for name in self.space.deciders})

    def _blocked(self, wish: Wish) -> str:
        """Names the nearest decision that is left without a strategy."""
        space = self._restricted(wish, ())
        blocked = next((name for name in space.members if not space.strategies[name]), None)
        blocked = blocked or _first_empty(space, wish)
        if blocked is None:
            return "no layouts of the ops around it go with it"
        graph, decider = space.graph, space.deciders[blocked]
        if isinstance(decider, Op) and not has_rule(decider.target):
            return f"no rule for {placed(graph, decider)}"
        return f"its values meet what has no layout that goes with it: {placed(graph, decider)}"


def _of_pins(solver: PointSolver, micro_batch: int, pins: Iterable[Pin]) -> Iterable[Restriction]:
    """A restriction for each pin, and for the caller's `allows`."""
    held = solver.pinned(micro_batch).held

    def of_pin(pin: Pin) -> Callable[[str, Strategy], bool]:
        return lambda name, strategy: any(own == pin and not keeps(strategy) for own, keeps in held.get(name, ()))

    for pin in pins:
        yield Restriction(f"the pin '{pin}' stands against it", of_pin(pin))
    if solver.request.wishes is not None:
        allows = solver.request.wishes(solver.traces.traced(micro_batch).graph)
        yield Restriction("the caller's `allows` stands against it", lambda name, strategy: not allows(name, strategy))


def _of_counterexamples(solver: PointSolver, space: Space) -> Iterable[Restriction]:
    """A restriction for each counterexample on this number of ranks."""

    def of_single(alone: Mapping[str, set[Strategy]]) -> Callable[[str, Strategy], bool]:
        return lambda name, strategy: strategy in alone.get(name, ())

    for refuted in solver.cuts.refuted:
        if refuted.tp != space.tp:
            continue
        alone: dict[str, set[Strategy]] = defaultdict(set)
        for choices in refuted.forbidden:
            for name, group in choices.items() if len(choices) == 1 else ():
                alone[space.classes.get(name, name)] |= group
        together = tuple(choices for choices in refuted.forbidden if len(choices) > 1)
        words = f"{refuted.layouts} cannot be proven: {refuted.message}"
        yield Restriction(words, of_single(alone), together)


def _first_empty(space: Space, starts: Iterable[str]) -> str | None:
    """The first decision, outwards from `starts`, of which no strategy agrees with those left of its neighbours; None
    where each has one."""
    edges = defaultdict(list)
    for edge in dict.fromkeys(edges_of(space)):
        edges[edge.source].append((edge.target, edge.source_layouts, edge.target_layouts))
        edges[edge.target].append((edge.source, edge.target_layouts, edge.source_layouts))
    left = {name: set(range(len(space.strategies[name]))) for name in space.members}
    waiting = deque(starts)
    while waiting:
        name = waiting.popleft()
        for other, own_layouts, other_layouts in edges[name]:
            offered = {own_layouts[i] for i in left[name]}
            kept = {i for i in left[other] if other_layouts[i] in offered}
            if not kept:
                return other
            if kept != left[other]:
                left[other] = kept
                waiting.append(other)
    return None

"""Finds the choices that together make a counterexample, as few as possible; they are then forbidden together.

To try a set of choices the solver fixes them and shards as little else as their edges allow, and the result is checked
as a plan is. Where the same op differs again, the choices suffice for the counterexample, and they are forbidden
together: each of them alone may be right. A choice is dropped from a set only where the op differs both with it and
with every other that is possible in its place: one that the solver makes again by itself, as that of the op is where it
shards nothing, may be the one that matters. As many choices as possible are made otherwise in one trial. Of the first
set that suffices, decisions outside of it are not made otherwise: where one that is not blamed could make the op right,
what is right is forbidden. So trials are evidence, no proof (scripts/evidence/optimality.py looks for what they hide).

A choice is a decision and all its strategies that look the same to the code that differs: that code sees shapes on a
rank, which do not show how a value came to be whole or a slice.
"""

from collections.abc import Hashable, Iterable, Iterator

from tpplan.core.errors import SolverError, TpplanError
from tpplan.core.graph import Boundary, Direction, Op, enclosing
from tpplan.core.layout import local_shape
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Decider
from tpplan.layouts.readings import Reading
from tpplan.layouts.rules import Call, Strategy, localized_arguments, takes_sizes
from tpplan.layouts.typecheck import Mistyped
from tpplan.prove.counterexample import Counterexample, local_sizes
from tpplan.prove.module_scope import given_nodes, parent
from tpplan.search.conflicts.trials import (
    MOST_TRIALS,
    Check,
    counterexample_of,
    end_of,
    otherwise,
    with_little_else,
)
from tpplan.search.points.cuts import Choices


def conflict_of(
    found: Counterexample | Mistyped, assignment: Assignment, formulation: Formulation, check: Check
) -> tuple[Choices, bool]:
    """The choices, by decision, that suffice for a counterexample; all choices of the assignment where no smaller set
    was found. And whether trials for it may end with the module that has it."""
    finder = _Finder(found, assignment, formulation, check)
    tried: list[Choices] = []
    for candidates in finder.candidates():
        chosen = finder.choices(candidates)
        if chosen and chosen not in tried and finder.is_enough(chosen):
            return finder.smallest(chosen), finder.until is not None
        tried.append(chosen)
    return finder.choices(assignment.deciders), finder.until is not None


class _Finder:
    """Tries sets of choices for one counterexample."""

    def __init__(
        self, found: Counterexample | Mistyped, assignment: Assignment, formulation: Formulation, check: Check
    ) -> None:
        self.found = found
        self.node = found.node if isinstance(found, Counterexample) else None
        self.assignment = assignment
        self.formulation = formulation
        self.check = check
        self.trials = 0
        graph = assignment.graph
        self.until = None if self.node is None else end_of(graph, self.node)
        if self.until is not None and self.node is not None:
            again = counterexample_of(assignment, check, self.until)
            if again is None or again.node is None or again.node.name != self.node.name:
                self.until = None
        self.order = {node.name: place for place, node in enumerate(graph.nodes)}
        self.end = len(graph.nodes) if self.node is None else self.order[self.node.name]

    def candidates(self) -> Iterator[list[str]]:
        """Yields sets of decisions to try: those blamed, those that the code that differs sees, those of any module,
        which may hand on a size as a number, that give a strange size, and those that the modules around it see.
        Decisions after the op matter only through sizes replaced for them."""
        own = [self.node.name] if self.node is not None else []
        blamed = [*self.found.blamed, *own]
        yield [name for name in blamed if self._comes_before(name)]
        yield blamed
        if self.node is None:
            return
        graph, modules = self.assignment.graph, [self.node.module]
        if isinstance(self.node, Boundary):
            modules.append(parent(graph, self.node.module))
        seen = [*own, *self._seen_in(modules)]
        yield [name for name in seen if self._comes_before(name)]
        yield seen
        if isinstance(self.found, Counterexample) and self.found.strange:
            computed = [node.name for node in graph.nodes if self._comes_before(node.name)]
            yield [name for name in computed if local_sizes(self.assignment, name) & self.found.strange]
        yield [*seen, *self._seen_in([name for name in enclosing(self.node.module) if name not in modules])]

    def _seen_in(self, modules: list[str]) -> list[str]:
        """Decisions on values that modules' own code is given, parameters included."""
        space = self.formulation.space
        given = (node.name for module in modules for node in given_nodes(self.assignment.graph, module))
        reads = (d.name for d in space.deciders.values() if isinstance(d, Reading) and d.op.module in modules)
        return [*dict.fromkeys((*given, *reads))]

    def _comes_before(self, name: str) -> bool:
        decider = self.formulation.space.deciders[name]
        return self.order[decider.op.name if isinstance(decider, Reading) else name] <= self.end

    def choices(self, names: Iterable[str]) -> Choices:
        """The assignment's choices of some decisions, without decisions whose strategies all look the same."""
        found: dict[str, frozenset[Strategy]] = {}
        space = self.formulation.space
        for name in names:
            representative = space.classes[name]
            group = self._alike(name, self.assignment)
            if len(group) < len(space.strategies[representative]):
                known = next((other for other in found if space.classes[other] == representative), name)
                found[known] = found.get(known, group) & group
        return found

    def _picture(self, decider: Decider, strategy: Strategy) -> Hashable:
        """The shapes on a rank that the differing code gets from a decision, and for the op itself also its literals:
        strategies with equal pictures cannot be told apart by that code."""
        if isinstance(self.found, Mistyped):
            return strategy
        graph, tp = self.assignment.graph, self.formulation.mesh.tp
        if isinstance(decider, Reading):
            value = graph.values[decider.source.result]
            return local_shape(value.shape, strategy.results[0], tp)
        is_itself = self.node is not None and decider.name == self.node.name
        is_entry = isinstance(decider, Boundary) and decider.direction is Direction.INPUT
        layouts = strategy.operands if is_itself and is_entry else strategy.results
        pairs = zip(decider.results, layouts, strict=True)
        shapes = tuple(local_shape(graph.values[name].shape, layout, tp) for name, layout in pairs)
        if is_itself and isinstance(decider, Op) and not takes_sizes(decider.target):
            return shapes, localized_arguments(Call.of(graph, decider), strategy, tp)
        return shapes

    def is_enough(self, choices: Choices, dropped: Choices | None = None) -> bool:
        """True where an assignment with these choices and little else sharded has the same counterexample, and so have
        others, which between them make all that is possible in the place of `dropped` choices."""
        tried = dict(dropped or {})
        trial, is_first = with_little_else(self.formulation, choices), True
        while trial is not None:
            if not self._is_again_in(trial):
                return False
            tried = {name: group | self._alike(name, trial) for name, group in tried.items()}
            try:
                trial, is_first = otherwise(self.formulation, choices, tried), False
            except SolverError:
                return False  # whether there is one is not known
        return not is_first

    def _alike(self, name: str, trial: Assignment) -> frozenset[Strategy]:
        """The strategies of a decision that look to the differing code as that of a trial does."""
        space = self.formulation.space
        decider, own = space.deciders[name], self._picture(space.deciders[name], trial.strategy(name))
        return frozenset(s for s in space.strategies[space.classes[name]] if self._picture(decider, s) == own)

    def _is_again_in(self, trial: Assignment) -> bool:
        """True where an assignment has the same counterexample, and trials are left to see that."""
        if self.trials >= MOST_TRIALS:
            return False
        self.trials += 1
        try:
            again = self.check(trial, self.until)
        except TpplanError:
            return False  # the assignment cannot be written as a plan
        if isinstance(self.found, Mistyped):
            return isinstance(again, Mistyped) and again.blamed == self.found.blamed
        if not isinstance(again, Counterexample):
            return False
        if self.node is None:
            return again.message == self.found.message
        return again.node == self.node

    def smallest(self, choices: Choices) -> Choices:
        """The choices without those that the counterexample does not need."""
        found = dict(choices)
        if self.node is not None and self.node.name in found and len(found) > 1:
            found[self.node.name] = found.pop(self.node.name)  # drop the op itself last
        size = len(found)
        while size := size // 2:
            for start in range(0, len(names := list(found)), size):
                dropped = {name: found[name] for name in names[start : start + size] if name in found}
                rest = {name: group for name, group in found.items() if name not in dropped}
                if rest and self.is_enough(rest, dropped):
                    found = rest
        return found

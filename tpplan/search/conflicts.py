"""Finds the choices that together make a counterexample, as few as possible; they are then forbidden together.

To try a set of choices the solver fixes them and shards as little else as their edges allow, and the result is checked
as a plan is. Where the same op differs again, the choices suffice for the counterexample, and they are forbidden
together: each of them alone may be right. A choice is dropped from a set only where the op differs both with it and
with every other that is possible in its place: one that the solver makes again by itself, as that of the op is where it
shards nothing, may be the one that matters. As many choices as possible are made otherwise in one trial: trials are
evidence, no proof, and a conflict may forbid an assignment that none has tried (scripts/evidence/optimality.py looks
for such).

A choice is a decision and all its strategies that look the same to the code that differs: that code sees shapes on a
rank, which do not show how a value came to be whole or a slice.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import nn

from tpplan import solvers
from tpplan.core.errors import SolverError, TpplanError
from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, enclosing, within
from tpplan.core.layout import local_shape
from tpplan.core.repeated_blocks import like_modules, members
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Decider
from tpplan.layouts.readings import Reading, reading_name
from tpplan.layouts.rules import Call, Strategy, localized_arguments, takes_sizes
from tpplan.layouts.typecheck import Mistyped
from tpplan.prove.counterexample import Counterexample, local_sizes
from tpplan.prove.module_scope import given_nodes, parent
from tpplan.search.points.cuts import Choices
from tpplan.solvers.problem import Conflict, Problem, Resource, linear_term
from tpplan.stages.like_modules import are_alike

#: most sets of choices that are tried for a counterexample; a set larger than necessary is sound and forbids less
MOST_TRIALS = 24
#: cost of a layout with a summand or summed gradient where a sharded layout costs 1, in finding the least sharded plan
UNSHARDED = 0.01


class Check(Protocol):
    """Finds the counterexample of an assignment."""

    def __call__(self, trial: Assignment, until: str | None = None) -> Counterexample | Mistyped | None:
        """The counterexample; None where it is proven, or, with `until`, where the model runs as it must as far as the
        end of that module's first call."""


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


def in_like_modules(graph: ModelGraph, choices: Choices, model: nn.Module) -> Iterator[Choices]:
    """Yields the choices, and the corresponding choices in each module that runs the same code: like the one that all
    choices are in, or else like the one repeated block that some of them are in, where the others stay as they are. A
    like module outside of the block's siblings has equal attributes too."""
    yield choices
    module, others = _module_around(graph, choices)
    own, siblings = _places(graph, module), _in_siblings(graph, module)
    for other in others:
        if other not in siblings and not are_alike(model.get_submodule(module), model.get_submodule(other)):
            continue
        names = {place: name for name, place in _places(graph, other).items()}
        images = {name: names.get(own[name], "") if name in own else name for name in choices}
        if all(images.values()):
            yield {images[name]: group for name, group in choices.items()}


def in_modules_of_other_sizes(
    choices: Choices,
    node: Op | Boundary | None,
    formulation: Formulation,
    model: nn.Module,
    check: Check,
    *,
    ends_early: bool,
) -> Iterator[Choices]:
    """Yields the corresponding choices in modules that run the same code on other sizes, where a trial has the
    counterexample at the corresponding node: each would else cost the search a round, once the one before is
    forbidden."""
    space, graph = formulation.space, formulation.space.graph
    if node is None:
        return
    module, alike = _module_around(graph, {node.name: frozenset[Strategy](), **choices})
    own = _places(graph, module)
    if not module or not choices.keys() | {node.name} <= own.keys():
        return
    covered, trials = {module, *alike}, 0
    for name, other in model.named_modules():
        nodes = members(graph, name)
        is_same_code = type(other) is type(model.get_submodule(module)) and _outline(nodes) == _outline(
            members(graph, module)
        )
        if name in covered or not is_same_code or trials >= MOST_TRIALS:
            continue
        covered |= {name, *like_modules(graph, name)}
        names = {place: image for image, place in _places(graph, name).items()}
        images = {names[own[decision]]: group for decision, group in choices.items()}
        options = {image: space.strategies[space.classes[image]] for image in images}
        possible = {image: group.intersection(options[image]) for image, group in images.items()}
        if not all(possible.values()) or all(len(possible[image]) == len(options[image]) for image in images):
            continue
        trials += 1
        trial = _with_little_else(formulation, possible)
        image = names[own[node.name]]
        until = _end_of(graph, next(own for own in nodes if own.name == image)) if ends_early else None
        if trial is not None and _is_counterexample_at(image, trial, check, until):
            yield from in_like_modules(graph, possible, model)


def _is_counterexample_at(node: str, trial: Assignment, check: Check, until: str | None) -> bool:
    try:
        found = check(trial, until)
    except TpplanError:
        return False  # the assignment cannot be written as a plan
    return isinstance(found, Counterexample) and found.node is not None and found.node.name == node


def _end_of(graph: ModelGraph, node: Op | Boundary) -> str | None:
    """The module whose code has a node, if it is called once; else None."""
    if node.module in ("", LOSS_SCOPE):
        return None
    paths = [own.path for own in graph.boundaries if own.module == node.module and own.direction is Direction.OUTPUT]
    return node.module if len(paths) == len(set(paths)) else None


def _outline(nodes: tuple[Op | Boundary, ...]) -> list[tuple[str, int, int]]:
    """The targets of nodes, and how many values they read and give."""
    return [
        (own.target if isinstance(own, Op) else own.direction, len(own.operands), len(own.results)) for own in nodes
    ]


def _module_around(graph: ModelGraph, choices: Choices) -> tuple[str, tuple[str, ...]]:
    """The innermost module that has all of the choices, or the one repeated block that has some, and modules like it;
    the root and none where there is neither."""
    within_all = [
        module
        for module in graph.nodes_by_module
        if module not in ("", LOSS_SCOPE) and choices.keys() <= _places(graph, module).keys()
    ]
    if within_all:
        module = max(within_all, key=len)
        return module, like_modules(graph, module)
    found = {
        name: block.names
        for block in graph.blocks
        for name in block.names
        if choices.keys() & _places(graph, name).keys()
    }
    if len(found) != 1:
        return "", ()
    ((module, names),) = found.items()
    return module, tuple(name for name in names if name != module)


def _in_siblings(graph: ModelGraph, module: str) -> frozenset[str]:
    """The modules at the place of a module in the siblings of the repeated block that it is in."""
    blocks = ((block, name) for block in graph.blocks for name in block.names if within(module, name))
    return frozenset(other + module.removeprefix(name) for block, name in blocks for other in block.names)


def _places(graph: ModelGraph, module: str) -> Mapping[str, Hashable]:
    """The places of a module's decisions among its nodes, by name."""

    def found() -> dict[str, Hashable]:
        places: dict[str, Hashable] = {}
        for i, node in enumerate(members(graph, module)):
            places[node.name] = i
            if isinstance(node, Op):
                places |= {reading_name(node, position): (i, position) for position in range(len(node.operands))}
        return places

    made: dict[str, Hashable] = graph.once((_places, module), found)
    return made


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
        self.until = None if self.node is None else _end_of(graph, self.node)
        if self.until is not None and not (
            self.node is not None and _is_counterexample_at(self.node.name, assignment, check, self.until)
        ):
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
        trial, is_first = _with_little_else(self.formulation, choices), True
        while trial is not None:
            if not self._is_again_in(trial):
                return False
            tried = {name: group | self._alike(name, trial) for name, group in tried.items()}
            try:
                trial, is_first = self._otherwise(choices, tried), False
            except SolverError:
                return False  # whether there is one is not known
        return not is_first

    def _alike(self, name: str, trial: Assignment) -> frozenset[Strategy]:
        """The strategies of a decision that look to the differing code as that of a trial does."""
        space = self.formulation.space
        decider, own = space.deciders[name], self._picture(space.deciders[name], trial.strategy(name))
        return frozenset(s for s in space.strategies[space.classes[name]] if self._picture(decider, s) == own)

    def _otherwise(self, choices: Choices, tried: Choices) -> Assignment | None:
        """The assignment with these choices that makes, of decisions of which some strategies were `tried`, as many as
        possible in another way, and shards little; None where none can be. Raises SolverError where the solver does not
        tell."""
        space = self.formulation.space
        known = {space.classes[name]: group for name, group in tried.items()}
        most = sum(max(map(_sharded, space.strategies[name])) for name in space.members)

        def cost(name: str, strategy: Strategy) -> float:
            return _sharded(strategy) + (most + 1.0) * (strategy in known.get(name, ()))

        found = _of_choices(self.formulation, choices, cost) if tried else None
        is_other = found is not None and any(found.strategy(name) not in group for name, group in tried.items())
        return found if is_other else None

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


def nearest(
    assignment: Assignment,
    formulation: Formulation,
    conflicts: tuple[Conflict, ...],
    is_cut: Callable[[str, Strategy], bool],
) -> Assignment | None:
    """The assignment that avoids some conflicts and strategies of decisions that are cut, and otherwise differs in the
    fewest decisions from another one of the formulation, and shards little where it does; None where there is none, or
    the solver finds none."""
    space = formulation.space
    allowed = {
        name: {i for i, strategy in enumerate(space.strategies[name]) if not is_cut(name, strategy)}
        for name in space.members
    }

    def differs(name: str, strategy: Strategy) -> float:
        return 0.0 if strategy == assignment.strategy(name) else 1.0 + _sharded(strategy)

    try:
        return _cheapest(formulation, allowed, differs, conflicts)
    except SolverError:
        return None


def _with_little_else(formulation: Formulation, choices: Choices) -> Assignment | None:
    """The assignment with these choices and as little else sharded as edges and conflicts allow; None where there is
    none, or the solver finds none."""
    try:
        return _of_choices(formulation, choices, lambda name, strategy: _sharded(strategy))
    except SolverError:
        return None


def _of_choices(
    formulation: Formulation, choices: Choices, cost: Callable[[str, Strategy], float]
) -> Assignment | None:
    """The assignment of least cost with these choices that edges and conflicts allow; None where there is none. Raises
    SolverError where the solver does not tell."""
    space = formulation.space
    allowed: dict[str, set[int]] = {}
    for name, group in choices.items():
        options = space.strategies[space.classes[name]]
        own = {i for i, strategy in enumerate(options) if strategy in group}
        allowed[space.classes[name]] = allowed.get(space.classes[name], own) & own
    return _cheapest(formulation, allowed, cost, formulation.conflicts)


def _cheapest(
    formulation: Formulation,
    allowed: Mapping[str, set[int]],
    cost: Callable[[str, Strategy], float],
    conflicts: tuple[Conflict, ...],
) -> Assignment | None:
    """The assignment of least cost, the sum over deciding decisions, of `allowed` strategies where a decision has such,
    that avoids conflicts; None where there is none. Raises SolverError where the solver does not tell."""
    space, nodes = formulation.space, formulation.priced.nodes()
    fixed = tuple(
        linear_term("fixed", name, [float(i not in own) for i in range(len(space.strategies[name]))], 1.0)
        for name, own in allowed.items()
        if len(own) < len(space.strategies[name])
    )
    problem = Problem(
        nodes=nodes,
        edges=formulation.priced.edges(),
        objective=tuple(
            linear_term("cost", node.name, [cost(node.name, own) for own in space.strategies[node.name]], 1.0)
            for node in nodes
        ),
        resources=(Resource(name="fixed", terms=fixed, limit=0.0),) if fixed else (),
        conflicts=conflicts,
        shared=formulation.priced.shared,
    )
    choice = solvers.solve(problem).choice
    if choice is None:
        return None
    # Treatments do not matter here: all layers of a group get the first one that is possible.
    splits = (split for kind in formulation.kinds for split in kind.numbers.splits)
    numbers = {part: split.total * (part == split.parts[0]) for split in splits for part in split.parts}
    return formulation.assignment({**numbers, **choice})


def _sharded(strategy: Strategy) -> float:
    layouts = (*strategy.operands, *strategy.results)
    return sum(1.0 if layout.dim is not None else UNSHARDED * (not layout.is_plain) for layout in layouts)

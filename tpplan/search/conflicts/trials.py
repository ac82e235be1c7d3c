"""Trials for a counterexample: an assignment with some choices, and whether it has one.

The solver fixes the choices and shards as little else as their edges allow.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from tpplan import solvers
from tpplan.core.errors import SolverError, TpplanError
from tpplan.core.graph import LOSS_SCOPE, Boundary, ModelGraph, Op
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.module_alone import is_called_once
from tpplan.prove.module_scope import code_of
from tpplan.search.points.cuts import Choices
from tpplan.solvers.problem import Conflict, Problem, Resource, linear_term

#: most trials for one purpose
MOST_TRIALS = 24
#: cost of a layout with a summand or summed gradient where a sharded layout costs 1, in finding the least sharded plan
UNSHARDED = 0.01


class Check(Protocol):
    """Finds the counterexample of an assignment."""

    def __call__(self, trial: Assignment, until: str | None = None) -> Counterexample | Mistyped | None:
        """The counterexample; None where it is proven, or, with `until`, where the model runs as it must as far as the
        end of that module's first call."""


def counterexample_of(trial: Assignment, check: Check, until: str | None) -> Counterexample | None:
    """The counterexample of an assignment, as far as the end of the module `until`; None where it has none, or cannot
    be written as a plan."""
    try:
        found = check(trial, until)
    except TpplanError:
        return None
    return found if isinstance(found, Counterexample) else None


def end_of(graph: ModelGraph, node: Op | Boundary) -> str | None:
    """The module whose code runs a node, or calls the module that an input enters, else the module that has the node,
    if one of them is called once; None where none is, or that is the root or the loss."""
    names = (name for name in (code_of(graph, node), node.module) if name not in ("", LOSS_SCOPE))
    return next((name for name in names if is_called_once(graph, name)), None)


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
        return 0.0 if strategy == assignment.strategy(name) else 1.0 + sharded(strategy)

    try:
        return _cheapest(formulation, allowed, differs, conflicts)
    except SolverError:
        return None


def with_little_else(formulation: Formulation, choices: Choices) -> Assignment | None:
    """The assignment with these choices and as little else sharded as edges and conflicts allow; None where there is
    none, or the solver finds none."""
    try:
        return _of_choices(formulation, choices, lambda name, strategy: sharded(strategy))
    except SolverError:
        return None


def otherwise(formulation: Formulation, choices: Choices, tried: Choices) -> Assignment | None:
    """The assignment with these choices that makes, of decisions of which some strategies were `tried`, as many as
    possible in another way, and shards little; None where none can be. Raises SolverError where the solver does not
    tell."""
    space = formulation.space
    known = {space.classes[name]: group for name, group in tried.items()}
    most = sum(max(map(sharded, space.strategies[name])) for name in space.members)

    def cost(name: str, strategy: Strategy) -> float:
        return sharded(strategy) + (most + 1.0) * (strategy in known.get(name, ()))

    found = _of_choices(formulation, choices, cost) if tried else None
    is_other = found is not None and any(found.strategy(name) not in group for name, group in tried.items())
    return found if is_other else None


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


def sharded(strategy: Strategy) -> float:
    """How much a strategy shards: its layouts that are slices, and a little for those that are summands."""
    layouts = (*strategy.operands, *strategy.results)
    return sum(1.0 if layout.dim is not None else UNSHARDED * (not layout.is_plain) for layout in layouts)

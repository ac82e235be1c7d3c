"""Choices like those that make a counterexample, where the same code sees them: they are forbidden with these.

What differs is the own code of one module. Modules that run the same code are like it with all the choices, without a
trial. Of like modules that this code calls, it may tell one from another: their choices are tried.
"""

from collections.abc import Hashable, Iterator, Mapping

from torch import nn

from tpplan.core.errors import SolverError
from tpplan.core.graph import LOSS_SCOPE, Boundary, ModelGraph, Op, within
from tpplan.core.repeated_blocks import like_modules, members
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.readings import reading_name
from tpplan.layouts.rules import Strategy
from tpplan.prove.module_scope import code_of
from tpplan.search.conflicts.trials import MOST_TRIALS, Check, counterexample_of, end_of, otherwise, with_little_else
from tpplan.search.points.cuts import Choices
from tpplan.stages.like_modules import are_alike


def in_like_calls(
    choices: Choices, node: Op | Boundary | None, formulation: Formulation, check: Check, *, ends_early: bool
) -> Iterator[Choices]:
    """Yields the choices; and those of modules like the one that has them all, which the differing code calls too,
    where a trial of these has a counterexample in that code."""
    yield choices
    graph, classes = formulation.space.graph, formulation.space.classes
    module, others = _module_around(graph, choices, None)
    if node is None or not module or within(code := code_of(graph, node), module):
        return
    until = end_of(graph, node) if ends_early else None
    # Decisions of one class choose alike: what is forbidden to one is forbidden to all.
    known = {frozenset(classes[name] for name in choices)}
    for other in (name for name in others if within(name, code)):
        images = _images(graph, choices, module, other)
        own = frozenset(classes[name] for name in images)
        if not images or own in known or len(known) > MOST_TRIALS:
            continue
        known.add(own)
        try:
            trial = otherwise(formulation, images, choices)  # with the choices themselves it would show nothing
        except SolverError:
            continue
        found = counterexample_of(trial, check, until) if trial is not None else None
        if found is not None and found.node is not None and code_of(graph, found.node) == code:
            yield images


def in_like_modules(
    graph: ModelGraph, choices: Choices, node: Op | Boundary | None, model: nn.Module
) -> Iterator[Choices]:
    """Yields the choices, and the corresponding choices in each module that runs the same code: like the one that has
    all choices and the code that differs, at `node`, or else like the one repeated block that has that code and some of
    the choices, where the others stay as they are. A like module outside of the block's siblings has equal attributes
    too."""
    yield choices
    module, others = _module_around(graph, choices, node)
    siblings = _in_siblings(graph, module)
    for other in others:
        if other not in siblings and not are_alike(model.get_submodule(module), model.get_submodule(other)):
            continue
        if images := _images(graph, choices, module, other):
            yield images


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
    module, alike = _module_around(graph, {node.name: frozenset[Strategy](), **choices}, node)
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
        images = _images(graph, choices, module, name)
        image = next(iter(_images(graph, {node.name: frozenset[Strategy]()}, module, name)))
        options = {decision: space.strategies[space.classes[decision]] for decision in images}
        possible = {decision: group.intersection(options[decision]) for decision, group in images.items()}
        if not all(possible.values()) or all(len(possible[one]) == len(options[one]) for one in images):
            continue
        trials += 1
        trial = with_little_else(formulation, possible)
        differing = next(own for own in nodes if own.name == image)
        until = end_of(graph, differing) if ends_early else None
        found = counterexample_of(trial, check, until) if trial is not None else None
        if found is not None and found.node is not None and found.node.name == image:
            yield from in_like_modules(graph, possible, differing, model)


def _images(graph: ModelGraph, choices: Choices, module: str, other: str) -> Choices:
    """The choices with those in a module replaced by those at the same places in another one; none where that lacks a
    place."""
    own, names = _places(graph, module), {place: name for name, place in _places(graph, other).items()}
    if not all(own[name] in names for name in choices.keys() & own.keys()):
        return {}
    return {names[own[name]] if name in own else name: group for name, group in choices.items()}


def _outline(nodes: tuple[Op | Boundary, ...]) -> list[tuple[str, int, int]]:
    """The targets of nodes, and how many values they read and give."""
    return [
        (own.target if isinstance(own, Op) else own.direction, len(own.operands), len(own.results)) for own in nodes
    ]


def _module_around(graph: ModelGraph, choices: Choices, node: Op | Boundary | None) -> tuple[str, tuple[str, ...]]:
    """The innermost module that has all of the choices, or the one repeated block that has some, with the code of a
    node if one is given; and modules like it. The root and none where there is neither."""
    code = None if node is None else code_of(graph, node)
    within_all = [
        module
        for module in graph.nodes_by_module
        if module not in ("", LOSS_SCOPE) and choices.keys() <= _places(graph, module).keys()
        if code is None or within(code, module)
    ]
    if within_all:
        module = max(within_all, key=len)
        return module, like_modules(graph, module)
    found = {
        name: block.names
        for block in graph.blocks
        for name in block.names
        if choices.keys() & _places(graph, name).keys()
        if code is None or within(code, name)
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

"""Puts plans to the proof, and forbids the choices that make a counterexample."""

import logging
from collections.abc import Iterator

from torch import nn

from tpplan.core.errors import ModelError, TpplanError, first_line
from tpplan.core.graph import LOSS_SCOPE, ModelGraph, Op
from tpplan.core.name_patterns import ROOT
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Space
from tpplan.layouts.in_words import in_words
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.plan import Plan
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.module_scope import code_of, given_nodes, shards_in
from tpplan.prove.structure import check_structure
from tpplan.search.build_plan import laid_out_as
from tpplan.search.conflicts.like_choices import in_like_calls, in_like_modules, in_modules_of_other_sizes
from tpplan.search.conflicts.smallest_conflict import conflict_of
from tpplan.search.conflicts.trials import Check, nearest
from tpplan.search.models.growing_dims import GrowingDims
from tpplan.search.models.trace_cache import Traced
from tpplan.search.points.cuts import Choices, Refuted
from tpplan.search.points.point_solver import PointSolver

logger = logging.getLogger(__name__)

#: counterexamples in the code of one class before a guess forbids sharding all that its code sees: code that compares
#: sizes, for example, differs in another line for each way to shard it
PATIENCE = 4
#: most choices that a message names
MOST_SHOWN = 3


def put_to_proof(
    solver: PointSolver,
    traced: Traced,
    plan: Plan,
    assignment: Assignment,
    *,
    trial_on: int | None = None,
    until: str | None = None,
) -> Plan | Counterexample | Mistyped:
    """The plan with the sizes that it replaces, where both halves of the proof hold; else the counterexample. A trial
    of choices is on one tp rank, and need not compare all layers, nor what comes after the module `until`."""
    subject = solver.request.subject
    original = traced.original(assignment, subject, GrowingDims(solver.traces, traced))
    with subject.planning():
        checked = check_structure(original, plan, trial_on=trial_on, until=until)
    if isinstance(checked, Counterexample) or until is not None:
        return checked
    return _mistyped(traced.graph, checked, assignment) or checked


def _mistyped(graph: ModelGraph, plan: Plan, assignment: Assignment) -> Mistyped | None:
    """The first value without a layout, derived from the plan as its file has it; None where all have one."""
    return typecheck(graph, Plan.from_dict(plan.to_dict()), local_shapes=assignment.local_shapes())


def culprit_of(problem: Counterexample | Mistyped) -> str | None:
    """The module to run whole, for no sharding is to blame for what its code does; None where one is."""
    if isinstance(problem, Mistyped):
        return None
    if problem.culprit is None and not problem.blamed and isinstance(problem.node, Op):
        return None if problem.node.module == LOSS_SCOPE else problem.node.module
    return problem.culprit


def forbid(
    solver: PointSolver,
    found: Counterexample | Mistyped,
    assignment: Assignment,
    formulation: Formulation,
    traced: Traced,
    plan: Plan,
) -> None:
    """Forbids the choices that together make a counterexample, in all like modules; after PATIENCE in the code of one
    class, as a guess, every strategy that shows that code slices. Raises ModelError where no sharding is to blame.

    The assignment nearest to the refuted one is put to the proof too: a counterexample that it has in the code of a
    class that had none would cost the search another round.
    """
    if not found.blamed:
        raise ModelError(f"the plan cannot be proven, and no sharding explains it: {found.message}; plan with --tp 1")

    rank = found.rank if isinstance(found, Counterexample) else 0

    def check(trial: Assignment, until: str | None = None) -> Counterexample | Mistyped | None:
        checked = put_to_proof(solver, traced, laid_out_as(plan, trial), trial, trial_on=rank, until=until)
        return None if isinstance(checked, Plan) else checked

    _forbid_one(solver, found, assignment, formulation, traced, check)
    if (other := _nearby(solver, assignment, formulation, traced, check)) is not None:
        _forbid_one(solver, *other, formulation, traced, check)


def _forbid_one(
    solver: PointSolver,
    found: Counterexample | Mistyped,
    assignment: Assignment,
    formulation: Formulation,
    traced: Traced,
    check: Check,
) -> None:
    """Forbids the choices of an assignment that make its counterexample, or guesses, as `forbid`."""
    tp, cuts = formulation.mesh.tp, solver.cuts
    logger.info("counterexample on tp %d: %s", tp, found.message)
    conflict, ends_early = conflict_of(found, assignment, formulation, check)
    node = found.node if isinstance(found, Counterexample) else None
    called = in_like_calls(conflict, node, formulation, check, ends_early=ends_early)
    together = (
        *(images for own in called for images in in_like_modules(traced.graph, own, node, traced.model)),
        *in_modules_of_other_sizes(conflict, node, formulation, traced.model, check, ends_early=ends_early),
    )
    cuts.note(_refuted(formulation, found.message, together))
    for choices in together:
        if len(choices) > 1:
            cuts.conflicts.setdefault(tp, []).append(choices)
        for name, group in choices.items() if len(choices) == 1 else ():
            cuts.cut(formulation.space, name, group)
    module, code = _whose_code(traced, found)
    cuts.counterexamples[tp, code] += 1
    if cuts.counterexamples[tp, code] >= PATIENCE:
        _forbid_guess(solver, found, assignment, formulation, module, code)


def _nearby(
    solver: PointSolver, assignment: Assignment, formulation: Formulation, traced: Traced, check: Check
) -> tuple[Counterexample | Mistyped, Assignment] | None:
    """The assignment nearest to a refuted one with its counterexample; None where it has none that sharding is to blame
    for, or one in the code of a class that had another."""
    tp, cuts = formulation.mesh.tp, solver.cuts
    conflicts, is_cut = cuts.conflicts_in(formulation.space), solver.is_cut(traced.micro_batch, tp)
    near = nearest(assignment, formulation, conflicts, is_cut)
    try:
        found = check(near) if near is not None else None
    except TpplanError as error:  # it cannot be written as a plan
        logger.info("the nearest assignment is not checked: %s", first_line(error))
        return None
    if near is None or found is None or not found.blamed or culprit_of(found) is not None:
        return None
    return None if cuts.counterexamples[tp, _whose_code(traced, found)[1]] else (found, near)


def _forbid_guess(
    solver: PointSolver,
    found: Counterexample | Mistyped,
    assignment: Assignment,
    formulation: Formulation,
    module: str,
    code: type | None,
) -> None:
    """Forbids, as a guess, every strategy that shows slices to the code of a module of the class `code`; where that is
    None, the strategies that are blamed."""
    tp, cuts, graph = formulation.mesh.tp, solver.cuts, assignment.graph
    if code is None:
        guessed = [(name, assignment.strategy(name)) for name in found.blamed]
    else:
        guessed = list(_sharding_in(module, formulation))
    guess = Refuted(
        tp=tp,
        message=f"{PATIENCE} counterexamples in code of {code.__name__ if code else 'the loss'}, the last: "
        f"{found.message}",
        layouts=f"slices that the code of {pattern_of(graph, module) or ROOT} sees",
        forbidden=tuple({name: frozenset({strategy})} for name, strategy in guessed),
    )
    logger.info("%s", guess)
    cuts.note(guess)
    for name, strategy in guessed:
        cuts.cut(formulation.space, name, (strategy,), is_guess=True)


def _refuted(formulation: Formulation, message: str, together: tuple[Choices, ...]) -> Refuted:
    """The counterexample with its first set of choices in words."""
    first = together[0] if together else {}
    shown = [_described(formulation.space, name, group) for name, group in list(first.items())[:MOST_SHOWN]]
    more = f" and {len(first) - MOST_SHOWN} more" if len(first) > MOST_SHOWN else ""
    return Refuted(tp=formulation.mesh.tp, message=message, layouts=" with ".join(shown) + more, forbidden=together)


def _described(space: Space, name: str, group: frozenset[Strategy]) -> str:
    """A choice in words: `output of layers.*.attention.q as S(2)`."""
    layouts = sorted({", ".join(map(str, strategy.results)) for strategy in group})
    return f"{in_words(space.graph, space.deciders[name])} as {' or '.join(layouts)}"


def _whose_code(traced: Traced, found: Counterexample | Mistyped) -> tuple[str, type[nn.Module] | None]:
    """The module whose code ran the op that differs, or called the module that an input enters, and its class; the loss
    and None where that is no module's."""
    node = found.node if isinstance(found, Counterexample) else None
    module = LOSS_SCOPE if node is None else code_of(traced.graph, node)
    return module, None if module == LOSS_SCOPE else type(traced.model.get_submodule(module))


def _sharding_in(module: str, formulation: Formulation) -> Iterator[tuple[str, Strategy]]:
    """Pairs of a decision and a strategy of it that shows a module's own code a slice."""
    space = formulation.space
    return (
        (node.name, strategy)
        for node in given_nodes(space.graph, module)
        for strategy in space.strategies[space.classes[node.name]]
        if shards_in(module, node, strategy)
    )

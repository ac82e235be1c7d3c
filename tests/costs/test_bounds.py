"""Bounds of an ILP that are found without solving it: never above the optimum, nor above the price of any choice."""

import random
from dataclasses import replace

import pytest
from test_peaks import MESHES, chosen, formulated, llama

from tpplan import solvers
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Precision
from tpplan.solvers.problem import Expression, Problem, Status, Term

#: relative difference between sums of the same numbers in other orders
ROUNDING = 1e-9


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.num_gpus > 1], ids=str)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_takes_no_less_than_its_bound_term_by_term(mesh: Mesh, steps: int) -> None:
    own = formulated(llama(8), mesh, precision=Precision.BF16_MIXED, accumulation_steps=steps)
    alone = solvers.solve(own.alone).bound
    assert alone is not None
    bound = steps * alone + own.beside_s
    assert own.beside_s > 0
    fastest = solvers.solve(own.unlimited).objective
    assert fastest is not None
    assert bound <= fastest * (1 + ROUNDING)
    rng = random.Random(0)
    for _ in range(3):
        choice = chosen(own, rng)
        runs = sum(term.value(choice) for term in own.alone.objective)
        assert steps * runs + own.beside_s <= own.problem.price(choice) * (1 + ROUNDING)


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_one_memory_row_bounds_what_all_of_them_leave(share: float) -> None:
    free = formulated(llama(8), MESHES[3], precision=Precision.BF16_MIXED)
    fastest = solvers.solve(free.unlimited)
    assert fastest.choice is not None
    needed = max(sum(term.value(fastest.choice) for term in row.terms) for row in free.problem.resources)
    own = replace(free, setting=replace(free.setting, memory_limit_bytes=share * needed))
    assert own.limited_at_the_loss.resources == own.problem.resources[:1]
    bound = solvers.solve(own.limited_at_the_loss, is_relaxed=True).bound
    best, unlimited = solvers.solve(own.problem).objective, fastest.objective
    assert bound is not None
    assert best is not None
    assert unlimited is not None
    assert unlimited < bound <= best * (1 + ROUNDING), "memory binds, and the bound says so"


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.num_gpus > 1], ids=str)
def test_what_is_too_large_by_its_parameters_has_no_plan(mesh: Mesh) -> None:
    """The limits end a little below and above the least bytes of parameters, states and gradients."""
    free = formulated(llama(8), mesh, precision=Precision.BF16_MIXED)
    every, held = free.space.graph.parameters, (free.sizes.parameters, free.sizes.states, free.sizes.gradients)
    resting = free.setting.slack_bytes + sum(of(every).least for of in held)
    for share, is_too_large in ((0.5, True), (0.99, True), (1.01, False)):
        own = replace(free, setting=replace(free.setting, memory_limit_bytes=share * resting))
        assert own.is_too_large == is_too_large
        if is_too_large:
            assert solvers.solve(own.problem).status is Status.INFEASIBLE
    fastest = solvers.solve(free.unlimited)
    assert fastest.choice is not None
    assert resting < max(sum(term.value(fastest.choice) for term in row.terms) for row in free.problem.resources)


def test_the_least_of_a_term_is_below_its_value_under_every_choice() -> None:
    """A maximum of two sums, one of which a guard may leave out, and a term that counts for each of some members."""
    sums = [
        Expression(terms=(("a", (1.0, 3.0)), ("b", (2.0, 0.5))), constant=1.0),
        Expression(terms=(("a", (4.0, 0.0)),)),
    ]
    guarded = replace(sums[1], constant=9.0, where="some")
    plain = Term(name="sums", expressions=tuple(sums), weight=2.0)
    for term, least in (
        (plain, 2.0 * (1.0 + 1.0 + 0.5)),
        (replace(plain, expressions=(sums[0], guarded)), 2.0 * (1.0 + 1.0 + 0.5)),
        (replace(plain, each="some"), 0.0),
        (replace(plain, each="some", expressions=(Expression(constant=-1.0),)), -float("inf")),
    ):
        assert term.least == least
        assert all(
            least <= term.value({"a": a, "b": b, "some": some}) for a in (0, 1) for b in (0, 1) for some in (0, 5)
        )


def test_a_bound_counts_the_terms_of_the_problem() -> None:
    """What the bound leaves to the kernels and collectives, and what it adds, is the whole objective."""
    own = formulated(llama(8), MESHES[3], accumulation_steps=2)
    problem: Problem = own.unlimited
    choice = chosen(own, random.Random(1))
    runs = sum(term.value(choice) for term in own.alone.objective)
    beside = problem.objective[len(own.alone.objective) :]
    assert problem.price(choice) == pytest.approx(2 * runs + sum(term.value(choice) for term in beside))
    assert own.beside_s == pytest.approx(sum(term.least for term in beside))

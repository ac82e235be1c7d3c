"""A problem below several ones, against enumeration of each."""

import random
from dataclasses import replace

from test_solvers import linear, node, random_problem

from tpplan import solvers
from tpplan.search.points.common_bound import common_problem, shape_of
from tpplan.solvers.problem import Expression, Problem, Term

NUM_RANDOM_PROBLEMS = 150
#: relative difference between sums of the same numbers in other orders
ROUNDING = 1e-9


def changed(problem: Problem, rng: random.Random) -> Problem:
    """The problem with other amounts, weights and limits."""

    def amounts(expression: Expression) -> Expression:
        terms = tuple((name, tuple(rng.uniform(0.5, 1.5) * x for x in vector)) for name, vector in expression.terms)
        return replace(expression, constant=rng.uniform(0.5, 1.5) * expression.constant, terms=terms)

    def own(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(
            replace(
                term, expressions=tuple(map(amounts, term.expressions)), weight=term.weight * rng.choice((1.0, 1.5))
            )
            for term in terms
        )

    resources = tuple(
        replace(row, terms=own(row.terms), limit=row.limit * rng.choice((1.0, 1.4))) for row in problem.resources
    )
    return replace(problem, objective=own(problem.objective), resources=resources)


def test_a_common_problem_costs_no_more_than_any_and_allows_what_any_allows() -> None:
    rng = random.Random(0)
    num_feasible = 0
    for seed in range(NUM_RANDOM_PROBLEMS):
        first = random_problem(seed)
        own = [first, *(changed(first, rng) for _ in range(2))]
        assert len({shape_of(problem) for problem in own}) == 1
        common = common_problem(own)
        bound = solvers.solve(common, solver="brute-force").objective
        relaxed = solvers.solve(common, solver="highs", is_relaxed=True).bound
        for problem in own:
            optimum = solvers.solve(problem, solver="brute-force").objective
            if optimum is not None:
                num_feasible += 1
                assert bound is not None, f"seed {seed}: a choice that one allows is allowed"
                assert bound <= optimum + ROUNDING * abs(optimum), f"seed {seed}"
                assert relaxed is not None, f"seed {seed}"
                assert relaxed <= optimum + 1e-6 * abs(optimum), f"seed {seed}"
    assert num_feasible > NUM_RANDOM_PROBLEMS


def test_problems_of_other_terms_have_another_shape() -> None:
    one = Problem(nodes=(node("a", 2), node("b", 2)), edges=(), objective=(linear("time", ("a", (1.0, 2.0))),))
    other = replace(one, objective=(linear("time", ("a", (3.0, 2.0)), weight=2.0),))
    assert shape_of(one) == shape_of(other)
    assert common_problem([one, other]).objective == (linear("time", ("a", (1.0, 2.0))),)
    assert shape_of(one) != shape_of(replace(one, objective=(linear("time", ("b", (1.0, 2.0))),)))
    assert shape_of(one) != shape_of(replace(one, objective=(*one.objective, *one.objective)))

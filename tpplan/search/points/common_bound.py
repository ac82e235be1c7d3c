"""A problem that is below several at once: problems of the same nodes, edges and splits, whose terms differ in their
amounts alone.

Its vectors have the least entries of the problems' vectors, times the weights of their terms, and its limits are the
largest. Whatever the choice, each term is then at most each problem's: a choice that one of them allows is allowed in
the common problem, and costs no more there.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from tpplan.solvers.problem import Expression, Problem, Resource, Term, scaled


def common_problem(problems: Sequence[Problem]) -> Problem:
    """A problem that allows every choice that one of the problems allows, and prices it no higher. All problems must
    have the same nodes and edges, and equal `shape_of`."""
    resources = tuple(
        Resource(name=rows[0].name, terms=_least_terms([r.terms for r in rows]), limit=max(r.limit for r in rows))
        for rows in zip(*(problem.resources for problem in problems), strict=True)
    )
    objective = _least_terms([problem.objective for problem in problems])
    return replace(problems[0], objective=objective, resources=resources)


def shape_of(problem: Problem) -> Hashable:
    """A key that is equal for problems which `common_problem` can join, if they have the same nodes and edges: their
    splits, conflicts, and the nodes, parts and guards of all terms."""
    sums = problem.objective, *(resource.terms for resource in problem.resources)
    return problem.splits, problem.conflicts, tuple(map(_shape, sums))


def _shape(terms: Sequence[Term]) -> Hashable:
    return tuple(
        (term.each, tuple((e.where, e.unless, tuple(name for name, _ in e.terms)) for e in term.expressions))
        for term in terms
    )


def _least_terms(sums: Sequence[Sequence[Term]]) -> tuple[Term, ...]:
    return tuple(map(_least_term, zip(*sums, strict=True)))


def _least_term(terms: tuple[Term, ...]) -> Term:
    """A term of weight 1 (or of all terms' weight, where the terms are equal) that is at most each term under any
    choice."""
    first = terms[0]
    if all(term.expressions is first.expressions and term.weight == first.weight for term in terms):
        return first
    rows = [[_times(expression, term.weight) for expression in term.expressions] for term in terms]
    return replace(first, expressions=tuple(map(_least_expression, zip(*rows, strict=True))), weight=1.0)


def _times(expression: Expression, weight: float) -> Expression:
    return replace(scaled(expression, weight), where=expression.where, unless=expression.unless)


def _least_expression(expressions: tuple[Expression, ...]) -> Expression:
    alike = zip(*(expression.terms for expression in expressions), strict=True)
    terms = tuple((own[0][0], tuple(map(min, zip(*(vector for _, vector in own), strict=True)))) for own in alike)
    return replace(expressions[0], constant=min(e.constant for e in expressions), terms=terms)

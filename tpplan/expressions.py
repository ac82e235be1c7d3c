"""Arithmetic on the expressions of a problem (tpplan.problem.Expression)."""

from collections.abc import Sequence
from dataclasses import replace

from tpplan.problem import Expression, Term


def constant_term(part: str, amount: float) -> Term:
    """The same whatever is chosen."""
    return Term(name=part, expressions=(Expression(constant=amount),))


def linear_term(part: str, name: str, vector: Sequence[float], weight: float) -> Term:
    """weight times the entry of the vector that the strategy of the node `name` picks."""
    return Term(name=part, expressions=(Expression(terms=((name, tuple(vector)),)),), weight=weight)


def scaled(expression: Expression, weight: float) -> Expression:
    """weight times an expression."""
    if weight == 1.0:
        return expression
    terms = tuple((name, tuple(weight * entry for entry in vector)) for name, vector in expression.terms)
    return Expression(constant=weight * expression.constant, terms=terms)


def added(*expressions: Expression) -> Expression:
    """Their sum; a node may have several vectors in it."""
    return Expression(
        constant=sum(e.constant for e in expressions), terms=tuple(term for e in expressions for term in e.terms)
    )


def minus(left: Expression, right: Expression) -> Expression:
    """The difference; a node may have several vectors in it."""
    negative = tuple((name, tuple(-entry for entry in vector)) for name, vector in right.terms)
    return Expression(constant=left.constant - right.constant, terms=(*left.terms, *negative))


def merged(expression: Expression) -> Expression:
    """The same with one vector for each node."""
    vectors: dict[str, tuple[float, ...]] = {}
    for name, vector in expression.terms:
        known = vectors.get(name)
        vectors[name] = vector if known is None else tuple(a + b for a, b in zip(known, vector, strict=True))
    return replace(expression, terms=tuple(vectors.items()))

"""What is done to each layer: what of it is recomputed, and whether FSDP reshards it after forward.

Layers that decide alike share their layouts, and of a treatment there is a number of layers: n_t of N, all of them N
together. A number is a sum of binary digits, each a node of the problem with two strategies; of a single layer it is
one node that chooses among the treatments. What a layer costs under a treatment times n_t is then a sum over digits b
of products b * e(x), which a maximum writes without a product. With low <= e <= high:

    b * e(x) = max(0, low * b, e(x) - high * (1 - b))

The order in which layers get their treatments is part of the plan: from the first layer to the last those of TREATMENTS
in its order. Backward goes from the last layer to the first, so what the last layers keep is gone by the time the first
ones are made again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.plan import Recompute
from tpplan.problem import Choice, Expression, Node, Resource, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What of a layer runs again in backward, and whether it is resharded after forward (ZeRO-3) or kept (ZeRO-2)."""

    recompute: Recompute
    reshard: bool

    def __str__(self) -> str:
        return f"{self.recompute}, {'resharded' if self.reshard else 'kept gathered'}"


#: in the order in which the layers of a kind get them
TREATMENTS = tuple(
    Treatment(recompute=mode, reshard=reshard)
    for mode in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE)
    for reshard in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """`value` layers if a node chooses one of `chosen`, of `size` strategies."""

    node: str
    chosen: int
    size: int
    value: int

    def vector(self, yes: float, no: float) -> tuple[float, ...]:
        """An expression's entries: `yes` where the digit is set."""
        return tuple(yes if i == self.chosen else no for i in range(self.size))

    def is_set(self, choice: Choice) -> bool:
        """Whether a choice sets it."""
        return choice[self.node] == self.chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of layers: a constant, or the sum of its digits."""

    constant: int = 0
    digits: tuple[Digit, ...] = ()

    def value(self, choice: Choice) -> int:
        """The number under a choice."""
        return self.constant + sum(digit.value for digit in self.digits if digit.is_set(choice))

    def times(self, term: Term) -> Iterator[Term]:
        """Terms whose sum is the number times a term that is never negative."""
        if self.constant:
            yield replace(term, weight=term.weight * self.constant)
        if not self.digits:
            return
        expressions = tuple(map(merged, term.expressions))
        high = max(0.0, *map(highest, expressions))
        low = max(0.0, *map(lowest, expressions))
        if high == 0.0:
            return
        for digit in self.digits:
            least = Expression(terms=((digit.node, digit.vector(low, 0.0)),))
            guarded = tuple(guard(expression, (digit,), (), high) for expression in expressions)
            yield Term(name=term.name, expressions=(least, *guarded), weight=term.weight * digit.value)

    def where_any(self, expression: Expression, others: Sequence["Count"] = ()) -> Iterator[Expression]:
        """Expressions of which the largest is `expression` if there is such a layer and none of the others, and is not
        positive else. The expression is never negative."""
        if any(other.constant for other in others):
            return
        high = highest(merged(expression))
        unset = [digit for other in others for digit in other.digits]
        if self.constant:
            yield guard(expression, (), unset, high)
        for digit in self.digits:
            yield guard(expression, (digit,), unset, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How many of N like layers get each treatment: the nodes that decide it, and the rule that they sum to N."""

    counts: Mapping[Treatment, Count]
    nodes: tuple[Node, ...] = ()
    resources: tuple[Resource, ...] = ()


def numbers_of(name: str, size: int, treatments: Sequence[Treatment]) -> Numbers:
    """Numbers of `size` layers, called `name`, over some treatments."""
    if len(treatments) == 1:
        return Numbers(counts={treatments[0]: Count(constant=size)})
    if size == 1:
        node = Node(name=f"treatment of {name}", strategies=tuple(map(str, treatments)))
        ways = len(treatments)
        counts = {
            t: Count(digits=(Digit(node=node.name, chosen=i, size=ways, value=1),)) for i, t in enumerate(treatments)
        }
        return Numbers(counts=counts, nodes=(node,))
    found = {
        treatment: tuple(
            Digit(node=f"{name} x{2**power}: {treatment}", chosen=1, size=2, value=2**power)
            for power in range(size.bit_length())
        )
        for treatment in treatments
    }
    digits = [digit for row in found.values() for digit in row]
    terms = tuple((digit.node, digit.vector(float(digit.value), 0.0)) for digit in digits)
    most = Term(name="layers", expressions=(Expression(terms=terms),))
    least = Term(name="layers", expressions=(Expression(terms=tuple((n, tuple(-v for v in row)) for n, row in terms)),))
    return Numbers(
        counts={treatment: Count(digits=row) for treatment, row in found.items()},
        nodes=tuple(Node(name=d.node, strategies=("0", str(d.value))) for d in digits),
        resources=(
            Resource(name=f"at most all of {name}", terms=(most,), limit=float(size)),
            Resource(name=f"at least all of {name}", terms=(least,), limit=-float(size)),
        ),
    )


def guard(expression: Expression, wanted: Sequence[Digit], unwanted: Sequence[Digit], high: float) -> Expression:
    """The expression where all wanted digits are set and no unwanted one is, and at most 0 elsewhere."""
    terms = [(digit.node, digit.vector(0.0, -high)) for digit in wanted]
    terms += [(digit.node, digit.vector(-high, 0.0)) for digit in unwanted]
    return merged(replace(expression, terms=(*expression.terms, *terms)))


def merged(expression: Expression) -> Expression:
    """The same with one vector for each node."""
    vectors: dict[str, tuple[float, ...]] = {}
    for name, vector in expression.terms:
        known = vectors.get(name)
        vectors[name] = vector if known is None else tuple(a + b for a, b in zip(known, vector, strict=True))
    return replace(expression, terms=tuple(vectors.items()))


def highest(expression: Expression) -> float:
    """The most a merged expression can be, edges aside."""
    return expression.constant + sum(max(vector) for _, vector in expression.terms)


def lowest(expression: Expression) -> float:
    """The least a merged expression can be, edges aside."""
    return expression.constant + sum(min(vector) for _, vector in expression.terms)

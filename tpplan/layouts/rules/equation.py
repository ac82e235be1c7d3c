"""Rules as equations: `b k, n k -> b n` gives every strategy of a linear layer.

A letter names a dim. Sharding letter l shards every operand that has it. An operand without l meets only a slice of the
result on each rank, so its gradient is a summand: R*. A result without l is a sum over slices: P, if the op is linear
in them. `1` is a dim that is never sharded (size one, broadcast).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpplan.core.layout import R_STAR, Layout, P, R, S
from tpplan.layouts.rules.call import Call, Strategy

#: letters of one tensor, one for each dim
Letters = tuple[str, ...]
#: the letter of a dim that is never sharded
NEVER = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """operands -> results, in letters.

    whole: letters that are never sharded (softmax's dim).
    summed: whether a letter that the results lack may be sharded, which gives partial results.
    linear_in: sets of operands that may be partial together, the others whole, giving partial results.
    added: operands that are terms of their own (a bias), partial where the result is.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    whole: frozenset[str] = frozenset()
    summed: bool = False
    linear_in: tuple[frozenset[int], ...] = ()
    added: frozenset[int] = frozenset()

    def strategies(self) -> Iterator[Strategy]:
        """Yields a strategy for each letter that may be sharded, then one for each set of partial operands."""
        letters = dict.fromkeys(letter for term in (*self.operands, *self.results) for letter in term)
        for letter in letters:
            if letter != NEVER and letter not in self.whole:
                yield from self._sharded(letter)
        for partial in self.linear_in:
            yield Strategy(
                tuple(P if i in partial else R_STAR for i in range(len(self.operands))), (P,) * len(self.results)
            )

    def _sharded(self, letter: str) -> Iterator[Strategy]:
        missing = [letter not in result for result in self.results]
        if any(missing) and not (all(missing) and self.summed):
            return
        without = {i: P if any(missing) and i in self.added else R_STAR for i in range(len(self.operands))}
        operands = tuple(
            S(term.index(letter)) if letter in term else without[i] for i, term in enumerate(self.operands)
        )
        results: tuple[Layout, ...] = tuple(
            P if missing[i] else S(term.index(letter)) for i, term in enumerate(self.results)
        )
        yield Strategy(operands, results)


def dim_letters(rank: int) -> list[str]:
    """One letter for each of `rank` dims, named as parse names the dims of `...`."""
    return [f".{i}" for i in range(rank)]


def whole_operands(call: Call) -> tuple[Strategy, ...]:
    """Strategies that every op allows: all R, or all R*.

    All R* holds because backward is linear in the gradient, so summands give summands; a custom backward of the model
    need not be linear and allows all R alone.
    """
    layouts = (R,) if call.target == "tpplan.whole.default" else (R, R_STAR)
    return tuple(Strategy((whole,) * len(call.operands), (whole,) * len(call.results)) for whole in layouts)


def parse(equation: str, ranks: Sequence[int]) -> tuple[tuple[Letters, ...], tuple[Letters, ...]]:
    """Letters of the operands and results of an equation such as `... k, n k -> ... n`, given the operands' ranks.

    `...` stands for leading dims, aligned right. Raises ValueError where an operand's rank does not match its term.
    """
    left, _, right = equation.partition("->")
    terms = [term.split() for term in left.split(",")]
    depth = max((rank - len(term) + 1 for term, rank in zip(terms, ranks, strict=True) if "..." in term), default=0)

    def expand(term: list[str], rank: int | None) -> Letters:
        if "..." not in term:
            if rank is not None and rank != len(term):
                raise ValueError(f"{equation}: rank {rank} for {' '.join(term)}")
            return tuple(term)
        width = depth if rank is None else rank - len(term) + 1
        start = term.index("...")
        return (*term[:start], *(f".{depth - width + i}" for i in range(width)), *term[start + 1 :])

    operands = tuple(expand(term, rank) for term, rank in zip(terms, ranks, strict=True))
    return operands, tuple(expand(term.split(), None) for term in right.split(","))


def without_broadcast(letters: Letters, shape: tuple[int, ...], sizes: dict[str, int]) -> Letters:
    """The letters of an operand, with `1` where the dim is broadcast: size one, and its letter is larger elsewhere."""
    return tuple(
        NEVER if size == 1 and sizes.get(letter, 1) > 1 else letter for letter, size in zip(letters, shape, strict=True)
    )


def einsum(
    call: Call,
    equation: str,
    *,
    multilinear: bool = False,
    summed: bool = False,
    whole: str = "",
    added: frozenset[int] = frozenset(),
    linear_in: tuple[frozenset[int], ...] = (),
) -> Iterator[Strategy]:
    """Yields the strategies of an equation for a call; broadcast dims are recognized by their sizes.

    multilinear: linear in each operand that is not `added`, so any one of them may be partial and sums may be sharded.
    summed: the op sums over the letters that the result lacks, so these may be sharded.
    """
    operands, results = parse(equation, [len(value.shape) for value in call.operands])
    sizes: dict[str, int] = {}
    for term, value in zip((*operands, *results), (*call.operands, *call.results), strict=True):
        for letter, size in zip(term, value.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    factors = [i for i in range(len(operands)) if i not in added]
    if multilinear:
        linear_in = tuple(frozenset({i}) | added for i in factors) or (added,)
    yield from Equation(
        operands=tuple(without_broadcast(t, v.shape, sizes) for t, v in zip(operands, call.operands, strict=True)),
        results=results,
        whole=frozenset(whole.split()),
        summed=multilinear or summed,
        linear_in=linear_in,
        added=added,
    ).strategies()


def elementwise(
    call: Call, *, linear_in: tuple[frozenset[int], ...] = (), whole_dims: frozenset[int] = frozenset()
) -> Iterator[Strategy]:
    """Yields the strategies of a broadcasting pointwise op; `whole_dims` are dims of the result that stay whole."""
    result = call.results[0]
    rank = len(result.shape)
    letters = tuple(dim_letters(rank))
    sizes = dict(zip(letters, result.shape, strict=True))
    yield from Equation(
        operands=tuple(without_broadcast(letters[rank - len(v.shape) :], v.shape, sizes) for v in call.operands),
        results=(letters,) * len(call.results),
        whole=frozenset(letters[dim % rank] for dim in whole_dims) if rank else frozenset(),
        linear_in=linear_in,
    ).strategies()

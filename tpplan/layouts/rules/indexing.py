"""Rules of ops that pick elements by index or order: the dim that they pick from stays whole."""

from collections.abc import Iterable

from tpplan.core.graph import Ref
from tpplan.core.layout import S, copied
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, Letters, dim_letters, einsum, elementwise

_FIRST = (frozenset({0}),)
#: the tensor that is added to and the tensor that is added, which may be partial together
_BOTH = (frozenset({0, 2}),)


@op_rule("aten.topk.default", "aten.sort.default", "aten.argsort.default")
def ordered(call: Call) -> Iterable[Strategy]:
    """Sorting along a dim that stays whole."""
    position = 2 if call.target == "aten.topk.default" else 1
    return elementwise(call, whole_dims=frozenset({call.integer(position, "dim", -1)}))


@op_rule("aten.one_hot.default")
def one_hot(call: Call) -> Iterable[Strategy]:
    """Adds a dim of classes, which stays whole."""
    return einsum(call, "... -> ... n", whole="n")


@op_rule("aten.index_select.default")
def index_select(call: Call) -> Iterable[Strategy]:
    """Picks from one dim by a vector of indices; shards of other dims and of the index pass through."""
    return _picked(call, call.integer(1, "dim"), 1)


@op_rule("aten.index.Tensor")
def index(call: Call) -> Iterable[Strategy]:
    """`x[:, index]` with one index tensor: its dim is replaced by those of integers, or by one dim under a mask."""
    indices = call.argument(1, "indices")
    dims = [i for i, item in enumerate(indices) if isinstance(item, Ref)] if isinstance(indices, tuple) else []
    if len(dims) != 1:
        return ()
    index_rank = len(call.operands[1].shape)
    if call.operands[1].dtype != "bool":
        return _picked(call, dims[0], index_rank)
    letters = dim_letters(len(call.operands[0].shape))
    before, under, behind = letters[: dims[0]], (NEVER,) * index_rank, letters[dims[0] + index_rank :]
    result = (*before, NEVER, *behind)
    return Equation(operands=((*before, *under, *behind), under), results=(result,), linear_in=_FIRST).strategies()


@op_rule("aten.masked_select.default")
def masked_select(call: Call) -> Iterable[Strategy]:
    """Picks elements by a mask into one dim, which stays whole."""
    terms = tuple((NEVER,) * len(value.shape) for value in call.operands)
    return Equation(operands=terms, results=((NEVER,),), linear_in=_FIRST).strategies()


@op_rule("aten.index_add.default")
def index_add(call: Call) -> Iterable[Strategy]:
    """`x[index] += source` along a dim that stays whole; shards of other dims pass through."""
    letters = dim_letters(len(call.operands[0].shape))
    if letters:
        letters[call.integer(1, "dim") % len(letters)] = NEVER
    term, index = tuple(letters), (NEVER,) * len(call.operands[1].shape)
    return Equation(operands=(term, index, term), results=(term,), linear_in=_BOTH).strategies()


@op_rule("aten.scatter_add.default")
def scatter_add(call: Call) -> Iterable[Strategy]:
    """Adds elements along a dim that stays whole; shards of other dims pass where the index covers them completely."""
    target, picks, source = (value.shape for value in call.operands)
    letters = dim_letters(len(target))
    dim = call.integer(1, "dim") % max(1, len(target))
    for i in range(len(letters)):
        if i == dim or not target[i] == picks[i] == source[i]:
            letters[i] = NEVER
    terms = (tuple(letters),) * 3
    return Equation(operands=terms, results=terms[:1], linear_in=_BOTH).strategies()


def _picked(call: Call, dim: int, index_rank: int) -> Iterable[Strategy]:
    letters = dim_letters(len(call.operands[0].shape))
    picks = tuple(f"i{axis}" for axis in range(index_rank)) if call.operands[1].shape else ()
    letters[dim] = NEVER
    at = dim % len(letters)
    result = (*letters[:at], *(picks or ((NEVER,) if index_rank else ())), *letters[at + 1 :])
    return Equation(operands=(tuple(letters), picks), results=(result,), linear_in=_FIRST).strategies()


@op_rule("aten.gather.default")
def gather(call: Call) -> Iterable[Strategy]:
    """Picks elements along a dim that stays whole; shards of other dims pass where the index covers them completely."""
    source, picks = (value.shape for value in call.operands)
    if not source or len(source) != len(picks):
        return ()
    dim = call.integer(1, "dim") % len(source)
    own: list[str] = []
    result: list[str] = []
    for i, letter in enumerate(dim_letters(len(source))):
        covered = source[i] == picks[i]
        own.append(letter if covered and i != dim else NEVER)
        result.append(letter if covered or i == dim else NEVER)
    terms = (tuple(own), tuple(result))
    return Equation(operands=terms, results=(terms[1],), linear_in=_FIRST).strategies()


@op_rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Iterable[Strategy]:
    """Repeats each element n times in a row: slices stay contiguous, also of the repeated dim.

    Shared slices of the repeated dim become slices of the result: ranks that hold the same element each make their own
    part of its repetitions.
    """
    shape = call.operands[0].shape
    letters = dim_letters(len(shape))
    dim = call.argument(2, "dim")
    if not isinstance(dim, int):
        yield from Equation(operands=((NEVER,) * len(letters),), results=((NEVER,),), linear_in=_FIRST).strategies()
        return
    dim %= len(shape)
    own = list(letters)
    if call.argument(3, "output_size") is not None:
        own[dim] = letters[dim] = NEVER
    elif shape[dim] == 1:
        own[dim] = NEVER
    elif shape[dim] > 1:
        yield Strategy((copied(dim, shape[dim]),), (S(dim),))
    yield from Equation(operands=(tuple(own),), results=(tuple(letters),), linear_in=_FIRST).strategies()


@op_rule("aten.repeat.default")
def repeat(call: Call) -> Iterable[Strategy]:
    """Repeats whole tensors: a dim that is repeated stays whole."""
    times = call.integers(1, "repeats") or ()
    result = [letter if n == 1 else NEVER for letter, n in zip(dim_letters(len(times)), times, strict=True)]
    own: Letters = tuple(result[len(result) - len(call.operands[0].shape) :])
    return Equation(operands=(own,), results=(tuple(result),), linear_in=_FIRST).strategies()

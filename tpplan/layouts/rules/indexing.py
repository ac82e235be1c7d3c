"""Rules of ops that pick elements by index or order: the dim that they pick from stays whole."""

from collections.abc import Iterable
from math import prod

from tpplan.core.graph import Ref
from tpplan.core.layout import R_STAR, S, copied
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import (
    NEVER,
    Equation,
    Letters,
    dim_letters,
    einsum,
    elementwise,
    without_broadcast,
)

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
    """`x[:, index]`: the dims of index tensors are replaced by those of integers, or by one dim under a mask.

    A single index may be sharded; the dims that are picked from stay whole.
    """
    places = _index_places(call)
    if len(places) == 1 and call.operands[1].dtype != "bool":
        return _picked(call, places[0], len(call.operands[1].shape))
    if not places:
        return ()
    own, indices, result = _indexed(call, places)
    return Equation(operands=(own, *indices), results=(result,), linear_in=_FIRST).strategies()


@op_rule("aten.index_put.default")
def index_put(call: Call) -> Iterable[Strategy]:
    """`x[:, index] = values`: as for `x[:, index]`, without a sharded index. One value under a mask of all dims is
    written elementwise.

    Without accumulation, which of several values for one element is written is not defined: no summands.
    """
    places = _index_places(call)
    if not places:
        return
    own, indices, result = _indexed(call, places)
    source = call.operands[-1].shape
    values = without_broadcast(result[len(result) - len(source) :], source, _sizes_by_letter(own, call))
    last = len(call.operands) - 1
    linear_in = (frozenset({0, last}),) if call.argument(3, "accumulate", False) else ()
    yield from Equation(operands=(own, *indices, values), results=(own,), linear_in=linear_in).strategies()
    mask = call.operands[1]
    if mask.dtype == "bool" and mask.shape == call.operands[0].shape and prod(source) == 1:
        letters = tuple(dim_letters(len(mask.shape)))
        yield from Equation(operands=(letters, letters, (NEVER,) * len(source)), results=(letters,)).strategies()


def _index_places(call: Call) -> tuple[int, ...]:
    """Positions of the tensors in the list of indices."""
    indices = call.argument(1, "indices")
    return tuple(i for i, item in enumerate(indices) if isinstance(item, Ref)) if isinstance(indices, tuple) else ()


def _indexed(call: Call, places: tuple[int, ...]) -> tuple[Letters, tuple[Letters, ...], Letters]:
    """Letters of `x`, of the index tensors and of `x[indices]`, whose dims that depend on an index are never sharded.

    The dims of index tensors stand where the first one is, or in front where there are others between them.
    """
    tensors = call.operands[1 : 1 + len(places)]
    widths = {place: len(t.shape) if t.dtype == "bool" else 1 for place, t in zip(places, tensors, strict=True)}
    ranks = (1 if tensor.dtype == "bool" else len(tensor.shape) for tensor in tensors)
    picked: Letters = (NEVER,) * max(ranks)
    left = dim_letters(len(call.operands[0].shape))
    own: list[str] = []
    kept: list[str] = []
    at = 0
    for place in range(places[-1] + 1):
        width = widths.get(place, 1)
        if place == places[0]:
            at = len(kept)
        kept += [] if place in widths else left[:1]
        own += [NEVER] * width if place in widths else left[:1]
        left = left[width:]
    at = at if places == tuple(range(places[0], places[-1] + 1)) else 0
    indices = tuple((NEVER,) * len(tensor.shape) for tensor in tensors)
    return (*own, *left), indices, (*kept[:at], *picked, *kept[at:], *left)


def _sizes_by_letter(letters: Letters, call: Call) -> dict[str, int]:
    return dict(zip(letters, call.operands[0].shape, strict=True))


#: the operator in which ranks tell each other how many rows they send
COUNTED = "tpplan.arriving.default"
#: operators in which each rank sends rows to the ranks that have their experts, or gets them back (tpplan.experts)
SENT, RETURNED = "tpplan.send_rows.default", "tpplan.return_rows.default"
EXCHANGES = frozenset({SENT, RETURNED})


@op_rule(*sorted(EXCHANGES))
def exchanged(call: Call) -> Iterable[Strategy]:
    """Whole rows travel. Linear in them: summands may travel, and be added up where they arrive."""
    rows, like = ((NEVER,) * len(value.shape) for value in call.operands)
    return Equation(operands=(rows, like), results=(rows,), linear_in=_FIRST).strategies()


@op_rule("aten.masked_select.default")
def masked_select(call: Call) -> Iterable[Strategy]:
    """Picks elements by a mask into one dim, which stays whole."""
    terms = tuple((NEVER,) * len(value.shape) for value in call.operands)
    return Equation(operands=terms, results=((NEVER,),), linear_in=_FIRST).strategies()


@op_rule("aten.index_add.default", "aten.index_copy.default")
def index_add(call: Call) -> Iterable[Strategy]:
    """`x[index] += source` or `= source` along a dim that stays whole; shards of other dims pass through."""
    letters = dim_letters(len(call.operands[0].shape))
    if letters:
        letters[call.integer(1, "dim") % len(letters)] = NEVER
    term, index = tuple(letters), (NEVER,) * len(call.operands[1].shape)
    linear_in = _BOTH if call.target == "aten.index_add.default" else ()
    return Equation(operands=(term, index, term), results=(term,), linear_in=linear_in).strategies()


@op_rule("aten.index_fill.int_Scalar")
def index_fill(call: Call) -> Iterable[Strategy]:
    """`x[index] = number` along a dim that stays whole; summands of zero are zeros."""
    letters = dim_letters(len(call.operands[0].shape))
    if letters:
        letters[call.integer(1, "dim") % len(letters)] = NEVER
    linear_in = _FIRST if call.argument(3, "value") == 0 else ()
    terms = (tuple(letters), (NEVER,) * len(call.operands[1].shape))
    return Equation(operands=terms, results=terms[:1], linear_in=linear_in).strategies()


@op_rule("aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value", "aten.scatter_reduce.two")
def scatter(call: Call) -> Iterable[Strategy]:
    """Writes or adds elements along a dim that stays whole; shards of other dims pass where the index covers them
    completely.

    Which of several elements for one place is written is not defined: only what is added up, or zero, is a summand.
    """
    target, *others = (value.shape for value in call.operands)
    letters = dim_letters(len(target))
    dim = call.integer(1, "dim") % max(1, len(target))
    for i in range(len(letters)):
        if i == dim or any(shape[i] != target[i] for shape in others):
            letters[i] = NEVER
    terms = (tuple(letters),) * len(call.operands)
    linear_in = _BOTH if call.target == "aten.scatter_add.default" else ()
    if call.target == "aten.scatter.value" and call.argument(3, "value") == 0:
        linear_in = _FIRST
    return Equation(operands=terms, results=terms[:1], linear_in=linear_in).strategies()


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
    part of its repetitions. So do ranks that hold all elements, for a slice of each element's repetitions.
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
    if call.argument(3, "output_size") is None and shape[dim] > 1:
        times = call.integer(1, "repeats")
        if (times,) * shape[dim] in call.parts:
            yield Strategy((R_STAR,), (S(dim, *(times,) * shape[dim]),))
    yield from Equation(operands=(tuple(own),), results=(tuple(letters),), linear_in=_FIRST).strategies()


@op_rule("aten.repeat.default")
def repeat(call: Call) -> Iterable[Strategy]:
    """Repeats whole tensors: a dim that is repeated stays whole."""
    times = call.integers(1, "repeats") or ()
    result = [letter if n == 1 else NEVER for letter, n in zip(dim_letters(len(times)), times, strict=True)]
    own: Letters = tuple(result[len(result) - len(call.operands[0].shape) :])
    return Equation(operands=(own,), results=(tuple(result),), linear_in=_FIRST).strategies()

"""Rules of ops that move dims without changing elements: all are linear, and slices must stay contiguous."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from tpplan.core.layout import Layout, S, copied, joint
from tpplan.core.part_intervals import Parts
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, Letters, dim_letters
from tpplan.layouts.rules.size_literals import SLICES, SPLITS, slice_bounds

_FIRST = (frozenset({0}),)


def _moved(operand: Letters, result: Letters, *results: Letters) -> Iterator[Strategy]:
    return Equation(
        operands=(operand,),
        results=(result, *results),
        whole=frozenset(operand) - frozenset(result),
        linear_in=_FIRST,
    ).strategies()


RESHAPES = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.ravel.default", "aten.unsqueeze.default",
)  # fmt: skip


@op_rule(*RESHAPES)
def reshape(call: Call) -> Iterable[Strategy]:
    """Dims of both shapes form groups with equal products; a group's outermost dim may be sharded.

    Also: what is not outermost in its group, such as c of `n * c -> n, c`, is sharded part by part in a dim that begins
    further out, here in n parts; and the two outermost dims sharded as one become a shard of their joint dim.
    """
    shapes = (call.operands[0].shape, call.results[0].shape)
    yield from _moved(*reshape_letters(*shapes))
    for own, other in regrouped(*shapes):
        if own.is_among(call.parts) and other.is_among(call.parts):
            yield Strategy((own.layout,), (other.layout,))
    for joined, stack, is_stacked in stacks(*shapes):
        if not is_stacked and stack[1] == stack[0] + 1:
            yield Strategy((joint(stack[0]),), (S(joined),))


@op_rule("aten.view_as.default", "aten.reshape_as.default")
def reshape_as(call: Call) -> Iterable[Strategy]:
    """The second tensor is read for its shape alone, and is sharded like the result."""
    own, result = reshape_letters(call.operands[0].shape, call.results[0].shape)
    return Equation(operands=(own, result), results=(result,), linear_in=_FIRST).strategies()


@op_rule("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(call: Call) -> Iterable[Strategy]:
    """A dim that may be squeezed stays whole: of size one on a rank, it would be squeezed there and not in the
    whole."""
    source = call.operands[0].shape
    named = call.integers(1, "dim")
    squeezed = range(len(source)) if named is None else [dim % len(source) for dim in named if source]
    gone = {i for i in squeezed if source[i] == 1}
    letters = [NEVER if i in squeezed else letter for i, letter in enumerate(dim_letters(len(source)))]
    left = tuple(letter for i, letter in enumerate(letters) if i not in gone)
    return _moved(tuple(letters), left)


def reshape_letters(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Letters, Letters]:
    """Letters of both shapes; outermost dims of groups with equal products share one, all others are never sharded."""
    letters: tuple[list[str], list[str]] = ([NEVER] * len(source), [NEVER] * len(target))
    for i, (own, others) in enumerate(groups(source, target)):
        letters[0][own[0]] = letters[1][others[0]] = f"g{i}"
    return tuple(letters[0]), tuple(letters[1])


def stacks(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[tuple[int, list[int], bool]]:
    """Yields (the one dim, the several, whether these are the result's) where a reshape splits or joins a dim."""
    for own, others in groups(source, target):
        if len(own) == 1 < len(others):
            yield own[0], others, True
        if len(others) == 1 < len(own):
            yield others[0], own, False


@dataclass(frozen=True, slots=True)
class Stride:
    """A shard of a dim in `count` equal parts of this size, which may be as many as a batch has tokens."""

    dim: int
    count: int
    size: int

    def is_among(self, known: Collection[Parts]) -> bool:
        """True for a shard in one part, and for one whose parts are known."""
        return self.count == 1 or any(len(parts) == self.count and {*parts} == {self.size} for parts in known)

    @property
    def layout(self) -> Layout:
        """The layout, with the size of each part."""
        return S(self.dim, *([self.size] * self.count if self.count > 1 else ()))


def regrouped(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[tuple[Stride, Stride]]:
    """Yields both shapes' shards of what begins inside a group: at n elements further in than its dim, it is a shard of
    n parts. Reshaping `t, b, h * c -> t, b * h, c`, h is S(2), and S(1) in b parts of size h."""
    for dims in groups(source, target):
        starts = [
            tuple(accumulate((shape[i] for i in own), mul, initial=1))
            for shape, own in zip((source, target), dims, strict=True)
        ]
        cuts = sorted({*starts[0], *starts[1]})
        for place in cuts[1:-1] if all(after % cut == 0 for cut, after in pairwise(cuts)) else ():
            found = []
            for shape, own, begins in zip((source, target), dims, starts, strict=True):
                number = max(i for i, begin in enumerate(begins) if begin <= place)
                count = place // begins[number]
                found.append(Stride(own[number], count, shape[own[number]] // count))
            yield found[0], found[1]


def groups(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the dims of both shapes in minimal groups with equal products, from the left, without dims of size one."""
    if prod(source) == 0:
        return
    remaining = ([i for i, n in enumerate(source) if n > 1], [i for i, n in enumerate(target) if n > 1])
    while remaining[0]:
        dims = ([remaining[0].pop(0)], [remaining[1].pop(0)])
        sizes = [source[dims[0][0]], target[dims[1][0]]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            dim = remaining[side].pop(0)
            dims[side].append(dim)
            sizes[side] *= (source, target)[side][dim]
        yield dims


@op_rule("aten.permute.default")
def permute(call: Call) -> Iterable[Strategy]:
    """Reorders dims."""
    letters = dim_letters(len(call.operands[0].shape))
    dims = call.integers(1, "dims") or ()
    return _moved(tuple(letters), tuple(letters[dim] for dim in dims))


@op_rule("aten.movedim.int", "aten.movedim.intlist")
def move_dims(call: Call) -> Iterable[Strategy]:
    """Moves some dims to new places; the others keep their order."""
    rank = len(call.operands[0].shape)
    letters = dim_letters(rank)
    sources, destinations = call.integers(1, "source") or (), call.integers(2, "destination") or ()
    moved = {place % rank: letters[dim] for dim, place in zip(sources, destinations, strict=True)}
    others = (letter for letter in letters if letter not in moved.values())
    return _moved(tuple(letters), tuple(moved[i] if i in moved else next(others) for i in range(rank)))


@op_rule("aten.transpose.int", "aten.t.default", "aten.numpy_T.default", "aten.mT.default", "aten.swapaxes.default",
         "aten.swapdims.default")  # fmt: skip
def transpose(call: Call) -> Iterable[Strategy]:
    """Swaps two dims."""
    letters = dim_letters(len(call.operands[0].shape))
    swapped = list(letters)
    match call.target:
        case "aten.mT.default":
            swapped[-2:] = letters[-2:][::-1]
        case "aten.t.default" | "aten.numpy_T.default":
            swapped = letters[::-1]
        case _:
            axis = "axis" if "axes" in call.target else "dim"
            first, second = call.integer(1, f"{axis}0"), call.integer(2, f"{axis}1")
            swapped[first], swapped[second] = letters[second], letters[first]
    return _moved(tuple(letters), tuple(swapped))


@op_rule("aten.view_as_complex.default")
def view_as_complex(call: Call) -> Iterable[Strategy]:
    """Removes the last dim, of size two, which holds real and imaginary parts."""
    letters = tuple(dim_letters(len(call.results[0].shape)))
    return _moved((*letters, NEVER), letters)


@op_rule("aten.view_as_real.default")
def view_as_real(call: Call) -> Iterable[Strategy]:
    """Appends a dim of size two for real and imaginary parts."""
    letters = tuple(dim_letters(len(call.operands[0].shape)))
    return _moved(letters, (*letters, NEVER))


EXPANDS = ("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default")


@op_rule(*EXPANDS)
def expand(call: Call) -> Iterable[Strategy]:
    """A stretched dim may be sharded in the result alone: each rank stretches to its own slice.

    Where the dim before the stretched one has shared slices, each rank repeats its own element for a joint slice of
    both dims. expand_as reads its second operand for its shape, which is the result's.
    """
    operand, result = call.operands[0].shape, call.results[0].shape
    letters = tuple(dim_letters(len(result)))
    first = len(result) - len(operand)
    own = tuple(
        NEVER if size == 1 and target > 1 else letter
        for letter, size, target in zip(letters[first:], operand, result[first:], strict=True)
    )
    operands = (own, letters)[: len(call.operands)]
    yield from Equation(operands=operands, results=(letters,), linear_in=_FIRST).strategies()
    for dim, (size, stretched) in enumerate(pairwise(operand)):
        if size > 1 == stretched < result[first + dim + 1]:
            pair = joint(first + dim)
            yield Strategy((copied(dim, size), pair)[: len(call.operands)], (pair,))


@op_rule(*SLICES)
def sliced(call: Call) -> Iterable[Strategy]:
    """The sliced dim stays whole, unless the slice is all of it (`x[:, :n]` of size n), every n-th element where n
    divides the local size, or a run of separately sharded parts."""
    shape = call.operands[0].shape
    letters = dim_letters(len(shape))
    dim = call.integer(SLICES[call.target], "dim", 0) % len(shape)
    is_all = call.results[0].shape == shape and call.argument(2, "start") in (None, 0)
    if not is_all and not _takes_every_nth(call, shape[dim]):
        letters[dim] = NEVER
    yield from _moved(tuple(letters), tuple(letters))
    bounds = slice_bounds(call)
    if bounds == (0, shape[dim]) or (call.target == "aten.slice.Tensor" and call.argument(4, "step", 1) != 1):
        return
    for parts in sorted(call.parts):
        if sum(parts) == shape[dim] and (taken := _taken(parts, (bounds,))) is not None:
            yield Strategy((S(dim, *parts),), tuple(S(dim, *own) if len(own) > 1 else S(dim) for own in taken))


def _takes_every_nth(call: Call, size: int) -> bool:
    """True for `x[i::n]` where n divides the size: local slices that n divides then take their own elements."""
    if call.target != "aten.slice.Tensor":
        return False
    start, end, step = (call.argument(place, name) for place, name in ((2, "start"), (3, "end"), (4, "step")))
    first, last, every = start or 0, size if end is None else end, 1 if step is None else step
    if not all(isinstance(number, int) for number in (first, last, every)):
        return False
    return every > 1 and size % every == 0 and 0 <= first < every and last >= size  # type: ignore[operator]


def _taken(parts: Parts, intervals: tuple[tuple[int, int], ...]) -> tuple[Parts, ...] | None:
    """The parts that each interval (start, end) covers; None where an interval cuts a part."""
    bounds = (0, *accumulate(parts))
    if not all(bound in bounds for interval in intervals for bound in interval):
        return None
    found = tuple(parts[bounds.index(start) : bounds.index(end)] for start, end in intervals)
    return found if all(found) else None


#: target -> position of the dim, for ops that split a dim into all its parts
TAKES_APART = SPLITS | {"aten.chunk.default": 2, "aten.tensor_split.sections": 2}


@op_rule(*TAKES_APART)
def part(call: Call) -> Iterable[Strategy]:
    """The split dim stays whole or is sharded part by part; shards of other dims pass through.

    Ops that take a number of parts instead of sizes need equal parts, so that a local slice splits alike.
    """
    letters = dim_letters(len(call.operands[0].shape))
    dim = call.integer(TAKES_APART[call.target], "dim", 0) % len(letters)
    letters[dim] = NEVER
    yield from _moved(tuple(letters), *(tuple(letters) for _ in call.results))
    sizes = tuple(value.shape[dim] for value in call.results)
    if len(sizes) < 2 or min(sizes) == 0 or (call.target not in SPLITS and len(set(sizes)) > 1):
        return
    for parts in sorted({sizes, *call.parts}):
        if (taken := _taken(parts, tuple(pairwise((0, *accumulate(sizes)))))) is not None:
            yield Strategy((S(dim, *parts),), tuple(S(dim, *own) if len(own) > 1 else S(dim) for own in taken))


@op_rule("aten.unfold.default")
def windows(call: Call) -> Iterable[Strategy]:
    """Windows of a dim, which stays whole; their elements become the last dim."""
    letters = dim_letters(len(call.operands[0].shape))
    letters[call.integer(1, "dimension")] = NEVER
    return _moved(tuple(letters), (*letters, NEVER))


#: ops that select members of a dim and remove the dim
TAKES_ONE = ("aten.select.int", "aten.unbind.int")


@op_rule(*TAKES_ONE)
def without_dim(call: Call) -> Iterable[Strategy]:
    """The dim that is selected from stays whole and is removed."""
    letters = dim_letters(len(call.operands[0].shape))
    letters[call.integer(1, "dim", 0)] = NEVER
    left = tuple(letter for letter in letters if letter != NEVER)
    return _moved(tuple(letters), *(left for _ in call.results))


@op_rule("aten.cat.default", "aten.concat.default", "aten.concatenate.default", "aten.stack.default")
def join(call: Call) -> Iterable[Strategy]:
    """Tensors are concatenated along a dim that stays whole, or is sharded part by part where each tensor is a part, or
    in one part where there is one tensor; all may be partial together."""
    letters = dim_letters(len(call.results[0].shape))
    dim = call.integer(1, "dim", 0)
    if call.target == "aten.stack.default" or len(call.operands) > 1:
        letters[dim] = NEVER
    terms = tuple(letters)
    if call.target == "aten.stack.default":
        terms = tuple(letter for letter in letters if letter != NEVER)
    elif any(len(value.shape) != len(letters) for value in call.operands):
        return
    everyone = frozenset(range(len(call.operands)))
    yield from Equation(
        operands=(terms,) * len(call.operands), results=(tuple(letters),), linear_in=(everyone,)
    ).strategies()
    place = dim % len(letters)
    sizes = () if call.target == "aten.stack.default" else tuple(value.shape[place] for value in call.operands)
    if len(sizes) > 1 and sizes in call.parts:
        yield Strategy((S(place),) * len(sizes), (S(place, *sizes),))


@op_rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call) -> Iterable[Strategy]:
    """Padded dims stay whole; linear where the fill value is zero."""
    padding = call.integers(1, "pad") or ()
    rank = len(call.operands[0].shape)
    letters = dim_letters(rank)
    for i in range(len(padding) // 2):
        letters[rank - 1 - i] = NEVER
    is_linear = call.argument(3 if call.target == "aten.pad.default" else 2, "value") in (None, 0)
    return Equation(
        operands=(tuple(letters),), results=(tuple(letters),), linear_in=_FIRST if is_linear else ()
    ).strategies()

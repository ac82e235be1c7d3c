"""Ops that move dims without touching elements: each is linear, and a sharded dim goes where its slices stay whole."""

from collections.abc import Iterable, Iterator
from itertools import count
from math import prod

from tpplan.rules.call import Call, Strategy, op_rule
from tpplan.rules.equation import NEVER, Equation, Letters

_FIRST = (frozenset({0}),)


def _moved(operand: Letters, result: Letters, *results: Letters) -> Iterator[Strategy]:
    return Equation(
        operands=(operand,),
        results=(result, *results),
        whole=frozenset(operand) - frozenset(result),
        linear_in=_FIRST,
    ).strategies()


def _letters(rank: int) -> list[str]:
    return [f".{i}" for i in range(rank)]


@op_rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
         "aten.unflatten.int", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", "aten.unsqueeze.default",
         "aten.view_as.default", "aten.reshape_as.default")  # fmt: skip
def reshape(call: Call) -> Iterable[Strategy]:
    """Dims fall into groups with equal products; within a group only the outermost dim's slices stay contiguous."""
    if len(call.operands) != 1:
        return ()
    return _moved(*reshape_letters(call.operands[0].shape, call.results[0].shape))


def reshape_letters(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Letters, Letters]:
    """Letters of both shapes: a letter in common for the outermost dims of groups with equal products."""
    if prod(source) == 0:
        return (NEVER,) * len(source), (NEVER,) * len(target)
    letters: tuple[list[str], list[str]] = ([NEVER] * len(source), [NEVER] * len(target))
    remaining = ([i for i, n in enumerate(source) if n > 1], [i for i, n in enumerate(target) if n > 1])
    names = (f"g{i}" for i in count())
    while remaining[0]:
        name = next(names)
        first = (remaining[0].pop(0), remaining[1].pop(0))
        letters[0][first[0]] = letters[1][first[1]] = name
        sizes = [source[first[0]], target[first[1]]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            dim = remaining[side].pop(0)
            sizes[side] *= (source, target)[side][dim]
    return tuple(letters[0]), tuple(letters[1])


@op_rule("aten.permute.default")
def permute(call: Call) -> Iterable[Strategy]:
    """Dims in another order."""
    letters = _letters(len(call.operands[0].shape))
    dims = call.integers(1, "dims") or ()
    return _moved(tuple(letters), tuple(letters[dim] for dim in dims))


@op_rule("aten.transpose.int", "aten.t.default", "aten.numpy_T.default", "aten.mT.default", "aten.swapaxes.default")
def transpose(call: Call) -> Iterable[Strategy]:
    """Two dims change places."""
    letters = _letters(len(call.operands[0].shape))
    swapped = list(letters)
    if call.target in ("aten.transpose.int", "aten.swapaxes.default"):
        first, second = call.integer(1, "dim0"), call.integer(2, "dim1")
        swapped[first], swapped[second] = letters[second], letters[first]
    elif call.target == "aten.mT.default":
        swapped[-2:] = letters[-2:][::-1]
    else:
        swapped = letters[::-1]
    return _moved(tuple(letters), tuple(swapped))


@op_rule("aten.expand.default")
def expand(call: Call) -> Iterable[Strategy]:
    """A stretched dim may be sharded in the result alone: each rank stretches less far."""
    operand, result = call.operands[0].shape, call.results[0].shape
    letters = tuple(_letters(len(result)))
    aligned = letters[len(result) - len(operand) :]
    own = tuple(
        NEVER if size == 1 and target > 1 else letter
        for letter, size, target in zip(aligned, operand, result[len(result) - len(operand) :], strict=True)
    )
    return Equation(operands=(own,), results=(letters,), linear_in=_FIRST).strategies()


@op_rule("aten.slice.Tensor", "aten.narrow.default", "aten.index_select.default", "aten.split.Tensor",
         "aten.split_with_sizes.default", "aten.chunk.default", "aten.split.sizes")  # fmt: skip
def part(call: Call) -> Iterable[Strategy]:
    """Parts of one dim, which stays whole; the others keep their layout."""
    position = 2 if "split" in call.target or "chunk" in call.target else 1
    letters = _letters(len(call.operands[0].shape))
    letters[call.integer(position, "dim", 0)] = NEVER
    if len(call.operands) != 1:
        return ()
    return _moved(tuple(letters), *(tuple(letters) for _ in call.results))


@op_rule("aten.select.int", "aten.unbind.int")
def without_dim(call: Call) -> Iterable[Strategy]:
    """One index of a dim, or each of them: the dim stays whole and goes."""
    letters = _letters(len(call.operands[0].shape))
    letters[call.integer(1, "dim", 0)] = NEVER
    left = tuple(letter for letter in letters if letter != NEVER)
    return _moved(tuple(letters), *(left for _ in call.results))


@op_rule("aten.cat.default", "aten.stack.default")
def join(call: Call) -> Iterable[Strategy]:
    """Tensors side by side along a dim that stays whole; all may be partial together."""
    letters = _letters(len(call.results[0].shape))
    dim = call.integer(1, "dim", 0)
    letters[dim] = NEVER
    terms = tuple(letters)
    if call.target == "aten.stack.default":
        terms = tuple(letter for letter in letters if letter != NEVER)
    elif any(len(value.shape) != len(letters) for value in call.operands):
        return ()
    everyone = frozenset(range(len(call.operands)))
    return Equation(
        operands=(terms,) * len(call.operands), results=(tuple(letters),), linear_in=(everyone,)
    ).strategies()


@op_rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call) -> Iterable[Strategy]:
    """Dims that are padded stay whole."""
    padding = call.integers(1, "pad") or ()
    rank = len(call.operands[0].shape)
    letters = _letters(rank)
    for i in range(len(padding) // 2):
        letters[rank - 1 - i] = NEVER
    return Equation(operands=(tuple(letters),), results=(tuple(letters),)).strategies()

"""Numbers out of tensors whose values are not known while a model is traced, such as the rows routed to each expert.

Code may take such numbers to split a tensor (`x.split(counts.tolist())`), or to report them (`loss.item()`). Where they
depend on weights or random numbers they are `UnknownNumber`: the code may keep, return and print them, and split a dim
by them, which gives parts of about equal size; nothing else. Another trace makes each part larger or smaller by one row
or more, which shows what depends on the sizes."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

#: functions that split argument 0 along `dim` (argument 2) by a list of sizes: argument 1, or by one of these names
SPLITTING = {
    "split": ("split_size_or_sections", "split_size", "split_sizes"),
    "split_with_sizes": ("split_sizes",),
}


class UnknownValueError(RuntimeError):
    """The code asked a question that only real data can answer."""


class UnknownNumber:
    """A number that is not known. Computing with it, other than splitting a dim by it, calls asked(problem) and raises
    UnknownValueError."""

    __slots__ = ("asked", "problem")

    def __init__(self, problem: str, asked: Callable[[str], None] = lambda _: None) -> None:
        self.problem, self.asked = problem, asked

    def __format__(self, _spec: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"

    def ask(self, *_: object) -> NoReturn:
        """Says that the code computes with the number. Raises UnknownValueError."""
        self.asked(self.problem)
        raise UnknownValueError(self.problem)

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __neg__ = __abs__ = ask
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = ask
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = ask
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = ask


def parts_of(size: int, num_parts: int, extra: int) -> list[int]:
    """Sizes of the parts of a dim of `size`: about equal with extra = 0, and each of them another with extra = 1.

    Raises UnknownValueError where the dim is too short for that.
    """
    least, more = divmod(size, num_parts)
    even = [least + (i < more) for i in range(num_parts)]
    if not extra or num_parts == 1:
        return even
    pairs = [-1, 1] * (num_parts // 2)
    change = pairs if num_parts % 2 == 0 else [*pairs[2:], -1, -1, 2]
    sizes = [part + by for part, by in zip(even, change, strict=True)]
    if min(sizes) < 0:
        raise UnknownValueError(
            f"a dim of size {size} is split into {num_parts} parts of unknown sizes: too short to try two splits"
        )
    return sizes


def with_parts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], extra: int) -> tuple[Any, ...] | None:
    """(tensor, sizes, dim) of a call that splits a tensor by unknown sizes; None for any other call."""
    names = SPLITTING.get(name)
    if names is None:
        return None
    given = [args[1]] if len(args) > 1 else [kwargs[key] for key in names if key in kwargs]
    sizes = given[0] if given else None
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(size, UnknownNumber) for size in sizes):
        return None
    tensor = args[0] if args else kwargs["tensor"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return tensor, parts_of(tensor.shape[dim], len(sizes), extra), dim

"""Numbers that nobody knows while a model is traced: how many rows are routed to each expert.

Code may take them out of a tensor to split another one (`x.split(counts.tolist())`), or to report them (`loss.item()`).
Where they depend on weights or chance they are `Unsaid`: they may be kept, returned and printed, and say how large the
parts are that a dim is split into, which are then made about as large as each other; nothing else. Another run makes
each part larger or smaller by one row or more, and so shows what hangs on them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

#: calls that take a list of sizes at place 1 or by one of these names, and split dim `dim` (place 2) of place 0
SPLITTING = {
    "split": ("split_size_or_sections", "split_size", "split_sizes"),
    "split_with_sizes": ("split_sizes",),
}


class UnknownValueError(RuntimeError):
    """A question was asked that only real data can answer."""


class Unsaid:
    """A number out of a tensor. Whatever is computed with it, other than parts of a split, raises UnknownValueError;
    `asked` is told before."""

    __slots__ = ("asked", "problem")

    def __init__(self, problem: str, asked: Callable[[str], None] = lambda _: None) -> None:
        self.problem, self.asked = problem, asked

    def __format__(self, _spec: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"

    def _ask(self, *_: object) -> NoReturn:
        self.asked(self.problem)
        raise UnknownValueError(self.problem)

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __neg__ = __abs__ = _ask
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _ask
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _ask
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = _ask


def parts_of(size: int, num_parts: int, extra: int) -> list[int]:
    """Sizes of parts of a dim, about equal, and with `extra` 1 each another than with 0.

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
        raise UnknownValueError(f"a dim of {size} is split into {num_parts} parts: too short to try two ways")
    return sizes


def with_parts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], extra: int) -> tuple[Any, ...] | None:
    """The tensor, sizes and dim of a call that splits by unsaid sizes; None for any other call."""
    names = SPLITTING.get(name)
    if names is None:
        return None
    given = [args[1]] if len(args) > 1 else [kwargs[key] for key in names if key in kwargs]
    sizes = given[0] if given else None
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(size, Unsaid) for size in sizes):
        return None
    tensor = args[0] if args else kwargs["tensor"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return tensor, parts_of(tensor.shape[dim], len(sizes), extra), dim

"""Sizes that data decides: how many elements a mask picks, how many values are unique.

On meta tensors there is no data. What is known (tpplan.trace.answers.concrete_values) is counted; where it depends on
weights or chance, a trace goes on with as many elements as there can be, and says so. A second trace with one more then
shows which dims hang on that: they have another size on the day, and cannot be sharded.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpplan.torch_internals.operators import meta_kernels
from tpplan.trace.answers.concrete_values import KnownValues
from tpplan.trace.answers.planned_device import asking_line
from tpplan.trace.answers.unbacked_int import UnknownValueError


@dataclass(frozen=True, slots=True)
class Counting:
    """An op that counts: its results on meta tensors if it finds so many, how many there can be, and along which dim of
    the first result they lie."""

    results: Callable[..., Any]
    most: Callable[..., int]
    dim: Callable[..., int] = lambda *_, **__: 0


#: says how many elements a call finds: given the op, what is known of it, and its arguments
Counter = Callable[[Any, Counting, tuple[Any, ...], dict[str, Any]], int]


@dataclass(slots=True)
class Counts:
    """How a trace counts: one more than there are, or can be, if `extra` is 1.

    `guessed` holds lines of code and what they were told. `varies`: some count depends on the inputs.
    """

    known: KnownValues
    extra: int = 0
    guessed: dict[str, int] = field(default_factory=dict)
    varies: bool = False

    def __call__(self, op: Any, counting: Counting, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        try:
            count, varies = self.known.count(op, args, kwargs, counting.dim(*args, **kwargs))
        except UnknownValueError:
            line, count, varies = asking_line(), counting.most(*args, **kwargs), True
            self.guessed[line] = max(count, self.guessed.get(line, 0))
        self.varies |= varies
        return count + self.extra * varies


@contextlib.contextmanager
def counting_by(counter: Counter) -> Iterator[None]:
    """While it lasts, ops whose results have sizes that data decides run on meta tensors."""

    def kernel(op: Any, counting: Counting) -> Callable[..., Any]:
        return lambda *args, **kwargs: counting.results(counter(op, counting, args, kwargs), *args, **kwargs)

    with meta_kernels({name: kernel(_op(name), counting) for name, counting in _OPS.items()}):
        yield


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _elements(x: Tensor, *_: Any, **__: Any) -> int:
    return x.numel()


def _along(x: Tensor, dim: int | None) -> int:
    return x.numel() if dim is None else x.shape[dim]


def _nonzero(count: int, x: Tensor) -> Tensor:
    return x.new_empty((count, x.dim()), dtype=torch.int64)


def _selected(count: int, x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty((count,))


def _unique(
    count: int, x: Tensor, _sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    inverse = x.new_empty(x.shape if return_inverse else (0,), dtype=torch.int64)
    return x.new_empty((count,)), inverse, x.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _unique_along(
    count: int, x: Tensor, dim: int, _sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shape = [count if i == dim % x.dim() else size for i, size in enumerate(x.shape)]
    inverse = x.new_empty((x.shape[dim] if return_inverse else 0,), dtype=torch.int64)
    return x.new_empty(shape), inverse, x.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _runs(
    count: int, x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is None:
        return _unique(count, x, True, return_inverse, return_counts)
    return _unique_along(count, x, dim, True, return_inverse, return_counts)


def _occurrences(count: int, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return x.new_empty((count,), dtype=dtype)


def _repeated(count: int, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty((count if output_size is None else output_size,), dtype=torch.int64)


_OPS = {
    "nonzero": Counting(_nonzero, _elements),
    "masked_select": Counting(_selected, lambda x, mask: (x + mask).numel()),
    "_unique2": Counting(_unique, _elements),
    "unique_consecutive": Counting(
        _runs,
        lambda x, _inverse=False, _counts=False, dim=None: _along(x, dim),
        lambda x, _inverse=False, _counts=False, dim=None: dim or 0,
    ),
    "unique_dim": Counting(_unique_along, lambda x, dim, *_: _along(x, dim), lambda x, dim, *_: dim),
    # As many as are asked for: there are more where a number is larger, which is not meant then.
    "bincount": Counting(_occurrences, lambda x, weights=None, minlength=0: minlength or x.numel()),
    # How often is anyone's guess.
    "repeat_interleave.Tensor": Counting(_repeated, _elements),
}

#: ops with a result whose size data decides; none shares its memory with what it is given
COUNTING = frozenset(
    {
        *(_op(name) for name in _OPS),
        torch.ops.aten.where.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.nonzero_numpy.default,
        torch.ops.aten.argwhere.default,
        torch.ops.aten.repeat_interleave.self_Tensor,
    }
)

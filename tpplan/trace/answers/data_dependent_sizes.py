"""Sizes that data decides: how many elements a mask picks, how many values are unique.

Meta tensors have no data. Where the values are known (tpplan.trace.answers.concrete_values) elements are counted; where
they depend on weights or random numbers, a trace goes on with as many elements as there can be, and notes so; of
elements that are equal to one of several values, as the tokens of one of several experts, with an even share, so that
the values together get no more than there are. A second trace with one element more shows which dims depend on the
count: their size varies in training, so they cannot be sharded.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpplan.torch_internals.operators import meta_kernels
from tpplan.trace.answers.concrete_values import ConcreteValues
from tpplan.trace.answers.planned_device import asking_line
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.hooks import custom_ops  # noqa: F401  # registers tpplan's operators


@dataclass(frozen=True, slots=True)
class CountingOp:
    """An op whose results have as many elements as it finds.

    results(count, *args): the results as meta tensors. most(*args): the most that the op can find. dim(*args): the dim
    of the first result whose size is the count. is_stated: `most` is what the user has said to plan for.
    """

    results: Callable[..., Any]
    most: Callable[..., int]
    dim: Callable[..., int] = lambda *_, **__: 0
    is_stated: bool = False


#: how many elements a call finds, by (op, its CountingOp, args, kwargs)
Counter = Callable[[Any, CountingOp, tuple[Any, ...], dict[str, Any]], int]


@dataclass(slots=True)
class Counts:
    """The Counter of a trace: the number of elements where it is known, else the most there can be; plus `extra` where
    data decides.

    `guessed` are lines of code and the counts they got that are not known, and `shared` those that got an even share.
    `varies`: whether data decides some count.
    """

    known: ConcreteValues
    extra: int = 0
    guessed: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    varies: bool = False

    def __call__(self, op: Any, counting: CountingOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if counting.is_stated:
            self.varies = True
            return counting.most(*args, **kwargs) + self.extra
        dim = counting.dim(*args, **kwargs)
        try:
            count, varies = self.known.count(op, args, kwargs, dim)
        except UnknownValueError:
            line, varies, most = asking_line(), True, counting.most(*args, **kwargs)
            even = self.known.count_evenly(op, args, kwargs, dim)
            count, noted = (most, self.guessed) if even is None or even >= most else (even, self.shared)
            noted[line] = max(count, noted.get(line, 0))
        self.varies |= varies
        return count + self.extra * varies


def as_many_as_can_be(_op: Any, counting: CountingOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The Counter of code whose values nobody knows."""
    return counting.most(*args, **kwargs)


@contextlib.contextmanager
def counting_by(counter: Counter) -> Iterator[None]:
    """Makes ops whose results have sizes that data decides run on meta tensors, with the counter's sizes."""

    def kernel(op: Any, counting: CountingOp) -> Callable[..., Any]:
        return lambda *args, **kwargs: counting.results(counter(op, counting, args, kwargs), *args, **kwargs)

    with meta_kernels({name: kernel(_op(name), counting) for name, counting in _OPS.items()}):
        yield


def _op(name: str) -> Any:
    namespace, _, own = name.rpartition("::")
    packet, _, overload = own.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")


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
    "nonzero": CountingOp(_nonzero, _elements),
    "masked_select": CountingOp(_selected, lambda x, mask: (x + mask).numel()),
    "_unique2": CountingOp(_unique, _elements),
    "unique_consecutive": CountingOp(
        _runs,
        lambda x, _inverse=False, _counts=False, dim=None: _along(x, dim),
        lambda x, _inverse=False, _counts=False, dim=None: dim or 0,
    ),
    "unique_dim": CountingOp(_unique_along, lambda x, dim, *_: _along(x, dim), lambda x, dim, *_: dim),
    # minlength where it is given: code that gives it expects no larger number.
    "bincount": CountingOp(_occurrences, lambda x, weights=None, minlength=0: minlength or x.numel()),
    "tpplan::arriving": CountingOp(
        lambda count, chosen, *_: chosen.new_empty((count,)),
        lambda chosen, _experts, _ep, imbalance: math.ceil(chosen.numel() * imbalance),
        is_stated=True,
    ),
    # How often each element is repeated is not known; once is taken.
    "repeat_interleave.Tensor": CountingOp(_repeated, _elements),
}

#: ops with a result whose size data decides; no result shares memory with an operand
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

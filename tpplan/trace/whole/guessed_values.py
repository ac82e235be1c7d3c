"""Integers of a module that runs whole, guessed where weights or activations decide them: experts that rows choose.

Fake tensors have no values, so code that asks for some (`if mask.any()`, `for expert in hit`) cannot run on them.
`GuessedValues` gives integers and masks values: what is computed from integers alone is computed, in memory of its own;
what comes of floats is guessed. Indices along a dim, which topk, argmax or a sort give, meet each place as often, or
all the first places; comparisons are all true, or none. So the code runs as it would in one possible step, by which the
module is priced. What it returns must not depend on the guess.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tpplan.core.errors import first_line
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensor, is_of_values, unset_fake_temporarily
from tpplan.torch_internals.operators import ASKING, TAKING_MASKS, one_thread, schema_of, written_by
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.trace.answers.planned_device import asking_line
from tpplan.trace.whole.opaque_fakes import UnobservableError

aten = torch.ops.aten

#: largest number of elements of a tensor whose values are computed: of integers and masks, and of floats
MOST_ELEMENTS = 2**26
MOST_FLOATS = 2**20
#: ops that give indices along a dim, and the number of the result that has them
_INDEXING = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.argsort.default: 0,
    aten.argsort.stable: 0,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.multinomial.default: 0,
}
#: comparisons of floats, and those that are false for almost all of them
_COMPARING = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("gt", "ge", "lt", "le", "ne")
    for overload in ("Tensor", "Scalar")
)
_SELDOM = frozenset({aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.eq.Scalar})
#: how often a line of code may ask yes or no, whatever weights it has: a loop that waits for an answer would not end
LEAST_ASKED = 256


def most_asked(weights: Iterable[Tensor]) -> int:
    """How often a line of a module's code may ask yes or no: in forward and when it is recomputed, about each weight,
    and each expert of stacked ones."""
    return max(LEAST_ASKED, 4 * sum(weight.shape[0] if weight.dim() > 2 else 1 for weight in weights))


def is_question(error: BaseException) -> bool:
    """True for an error of code that asks a fake tensor for its values, or for a size that they decide."""
    return is_of_values(error) or "numpy()" in first_line(error)


class GuessedValues(TorchDispatchMode):
    """A mode, above a FakeTensorMode, in which fake integers and masks have values.

    most_asked: how often a line may ask yes or no about guesses, after which UnobservableError is raised.
    is_even: indices along a dim meet each of its places as often; else all of them the first ones. are_true: the result
    of comparisons of floats. `asking` are the lines of code that asked for what was guessed, in order, and how often.
    """

    def __init__(self, most_asked: int, *, is_even: bool = True, are_true: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_asked = most_asked
        self.is_even, self.are_true = is_even, are_true
        self.asking: Counter[str] = Counter()
        #: values by tensor
        self._values: Any = WeakIdKeyDictionary()
        #: storages of values that hold guesses, and of those that were written to with what is not known
        self._guessed: Any = WeakIdKeyDictionary()
        self._unknown: Any = WeakIdKeyDictionary()

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.is_meta else tensor
        found: Tensor | None = self._values.get(tensor)
        return None if found is None or found.untyped_storage() in self._unknown else found

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Gives fakes values while it is on, and code that asks for NumPy arrays of them copies."""
        with one_thread(), self, _NumpyOfValues(self):
            yield

    def give(self, tensor: Tensor, places: int) -> None:
        """Gives a fake of integers [..., K] values: indices of so many places, in a row no two that are equal."""
        with unset_fake_temporarily():
            numbers = torch.arange(tensor.numel(), device="cpu")
            each = tensor.shape[-1] if tensor.dim() > 1 else 1
            found = (numbers if self.is_even else numbers % max(each, 1)) % places
            self._keep([tensor], found.reshape(tensor.shape).to(tensor.dtype), is_guessed=True)

    def note(self, value: Tensor) -> None:
        """Notes that the code asks for a value, if that holds guesses."""
        if value.untyped_storage() not in self._guessed:
            return
        line = asking_line()
        self.asking[line] += 1
        if value.dtype == torch.bool and value.dim() == 0 and self.asking[line] > self.most_asked:
            raise UnobservableError(f"it asks {self.asking[line]} times at {line}: a loop that values end")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self.value(tensor) for tensor in given]
        if func in ASKING and all(value is not None for value in values):
            answer = self._computed(func, args, kwargs)
            self.note(values[0])  # type: ignore[arg-type]
            return answer
        if func.namespace != "aten" or any(value is None for value in values):
            results = self._selected(func, args)
            if results is None:
                results = func(*self._by_indices(func, args), **kwargs)
            if func.namespace != "_c10d_functional":  # a collective gives what it is given, as if ranks were alike
                self._forget(written_by(func, args, kwargs))
            self._guess(func, args, kwargs, results)
            return results
        if torch.Tag.dynamic_output_shape in func.tags:
            found = self._computed(func, args, kwargs)
            results = pytree.tree_map(lambda leaf: _fake_like(leaf) if isinstance(leaf, Tensor) else leaf, found)
        else:
            results = func(*args, **kwargs)
            found = self._computed(func, args, kwargs) if self._is_computed(func, results) else None
            if found is None:
                self._forget(written_by(func, args, kwargs))
        self._keep(
            results,
            found,
            is_guessed=any(value.untyped_storage() in self._guessed for value in values if value is not None),
        )
        return results

    def _is_computed(self, func: Any, results: Any) -> bool:
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        return (
            func.namespace == "aten"
            and not is_drawn
            and all(
                math.prod(leaf.shape) <= (MOST_FLOATS if leaf.is_floating_point() else MOST_ELEMENTS) for leaf in made
            )
        )

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of a call on values. What is left undefined is zeros."""
        with unset_fake_temporarily(), torch.no_grad():
            given = pytree.tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            found = func(*given[0], **given[1])
            if "empty" in schema_of(func).name:
                found.zero_()
            return found

    def _keep(self, results: Any, found: Any, *, is_guessed: bool) -> None:
        for result, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(found), strict=False):
            if isinstance(result, FakeTensor) and isinstance(value, Tensor):
                self._values[result] = value
                if is_guessed:
                    self._guessed[value.untyped_storage()] = None

    def _forget(self, written: Iterator[Tensor]) -> None:
        """Values that were written to with what is not known are not known, nor are any of their views'."""
        for tensor in written:
            if (value := self._values.get(tensor)) is not None:
                self._unknown[value.untyped_storage()] = None

    def _guess(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Gives values to results that code may ask about: indices along a dim, and masks."""
        leaves = pytree.tree_leaves(results)
        if (place := _INDEXING.get(func)) is not None:
            with unset_fake_temporarily():
                self._keep(
                    leaves[place : place + 1],
                    self._indices(args[0], _dim_of(func, args, kwargs), leaves[place]),
                    is_guessed=True,
                )
        elif func in _COMPARING or func in _SELDOM:
            shape, is_true = tuple(leaves[0].shape), func in _COMPARING and self.are_true
            if math.prod(shape) <= MOST_ELEMENTS:
                with unset_fake_temporarily():
                    self._keep(leaves, torch.full(shape, is_true, device="cpu"), is_guessed=True)

    def _indices(self, x: Tensor, dim: int | None, result: Tensor) -> Tensor:
        """Indices along a dim of x, or of all of it: in a row of several no two are equal."""
        size = max(1, x.numel() if dim is None else x.shape[dim])
        has_rows = dim is not None and result.dim() == x.dim() > 0
        each = max(1, result.shape[dim]) if has_rows and dim is not None else 1
        places = torch.arange(result.numel(), device="cpu")
        found = (places if self.is_even else places % each) % size
        if not has_rows or dim is None:
            return found.reshape(result.shape)
        rows = [own for place, own in enumerate(result.shape) if place != dim]
        return found.reshape(*rows, result.shape[dim]).movedim(-1, dim).contiguous()

    def _selected(self, func: Any, args: Any) -> Tensor | None:
        """As many elements as a known mask selects; None for any other call."""
        mask = self.value(args[1]) if func is aten.masked_select.default else None
        if mask is None:
            return None
        with unset_fake_temporarily():
            count = int((mask & torch.ones(args[0].shape, dtype=torch.bool, device="cpu")).sum())
        return args[0].new_empty((count,))  # type: ignore[no-any-return]

    def _by_indices(self, func: Any, args: Any) -> Any:
        """The arguments of a call with indices in place of masks that are known."""
        if func not in TAKING_MASKS:
            return args
        x, indices, *others = args
        return (x, [own for index in indices for own in self._as_indices(index)], *others)

    def _as_indices(self, index: Tensor | None) -> list[Tensor | None]:
        value = self.value(index) if index is not None and index.dtype in (torch.bool, torch.uint8) else None
        if value is None:
            return [index]
        with unset_fake_temporarily():
            found = value.nonzero().unbind(1)
        return [_fake_like(own) for own in found]


class _NumpyOfValues(TorchFunctionMode):
    """A mode that gives code a copy of a tensor's values as a NumPy array."""

    def __init__(self, values: GuessedValues) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy and (value := self.values.value(args[0])) is not None:
            self.values.note(value)
            with unset_fake_temporarily():
                return value.clone().numpy()
        return func(*args, **(kwargs or {}))


def _dim_of(func: Any, args: Any, kwargs: Any) -> int | None:
    """The dim along which an op gives indices; None where it is all of them."""
    dim: int | None = -1  # of an op that has no choice
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dim":
            dim = args[place] if place < len(args) else kwargs.get("dim", argument.default_value)
    return None if dim is None else dim % max(args[0].dim(), 1)


def _fake_like(value: Tensor) -> Tensor:
    """A fake tensor of the sizes of a value."""
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)

"""The calls that tensors were computed by, as far as they tell how integers are spread: which values the integers are
compared with, and of how many places they are indices."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tpplan.torch_internals import pytree

#: a function, its arguments, and those by name
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

#: functions that give indices along a dim, and the place of that dim among their arguments
_PLACES_OF_DIM = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "argmin": 1, "multinomial": 9}
#: functions that compare integers with others
_COMPARING = frozenset({"eq", "__eq__"})


def calls_behind(leaves: Iterable[Any], made: Mapping[int, tuple[Tensor, int, Call]]) -> Iterator[Call]:
    """Yields the calls that the tensors among leaves were computed by, the last one first; `made` has by a tensor's id
    itself, its place among a call's results, and the call."""
    met, waiting = set[int](), [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in met or id(tensor) not in made:
            continue
        met.add(id(tensor))
        _, _, call = made[id(tensor)]
        yield call
        waiting += tensors_of(call)


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors among a call's arguments."""
    return [leaf for leaf in pytree.tree_leaves(call[1:]) if isinstance(leaf, Tensor)]


def values_compared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The operands of a call that compares integers: these, and what they are compared with; () for any other call."""
    name = getattr(func, "__name__", "")
    if name == "one_hot":
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return (*args[:1], list(range(classes))) if classes > 0 else ()
    return (*args, *kwargs.values()) if name in _COMPARING else ()


def places_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of places that a call gives indices of, along a dim or of all; 0 for any other call."""
    place, operands = _PLACES_OF_DIM.get(getattr(func, "__name__", "")), tensors_of((func, args, kwargs))
    if place is None or not operands:
        return 0
    dim, x = kwargs.get("dim", args[place] if len(args) > place else -1), operands[0]
    return x.numel() if dim is None or x.dim() == 0 else x.shape[dim]

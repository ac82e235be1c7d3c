"""Tensors that a forward leaves behind for others to read: on modules, in objects that modules hold, in global lists.

A training loop may add such a tensor to its loss (`loss + sum(m.aux_loss for m in ...)`), which no trace sees. So each
one that carries a gradient counts as an output of the model: whole on every rank, and so is its gradient. So does one
that forward puts in a buffer's place (`self.mean = 0.9 * self.mean + ...`), which the next step and state_dict read.
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from types import NoneType
from typing import Any

from torch import Tensor, nn

from tpplan.core.graph import joined_name
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.tensors import plain_calls
from tpplan.trace.answers.planned_device import is_foreign

#: top-level packages whose objects are not searched
_OF_LIBRARIES = frozenset({"torch", "tpplan", "builtins", "typing", "types", "functools", "re", "logging", "numpy"})
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: types of which an empty value holds no tensor, and those of which none does: most attributes of most modules are such
_EMPTY = frozenset({list, tuple, dict, set, OrderedDict})
_CLOSED = frozenset({NoneType, bool, int, float, str})
#: attributes that every module has: besides its parameters and buffers, submodules and hooks, which are callables
_OF_TORCH = frozenset(vars(nn.Module()))
#: levels of nested containers and objects that are searched, below an attribute or a global name
MOST_DEEP = 6


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors reachable from a model's modules, their classes and the files of these classes, by dotted path."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    classes: dict[type[nn.Module], None] = {}
    for name, module in model.named_modules():
        classes[type(module)] = None
        for table in (own_parameters(module), own_buffers(module)):
            _collect(table, name, seen, found, 0)
        for key, value in vars(module).items():
            if key in _OF_TORCH or type(value) in _CLOSED or (type(value) in _EMPTY and not value):
                continue
            _collect(value, joined_name(name, key), seen, found, 0)
    files: dict[str, Any] = {}
    for base in {base: None for cls in classes for base in cls.__mro__ if issubclass(base, nn.Module)}:
        file = sys.modules.get(base.__module__)
        if file is not None and is_foreign(str(getattr(file, "__file__", None) or "")):
            files[base.__module__] = vars(file)
            files[f"{base.__module__}.{base.__qualname__}"] = vars(base)
    for path, namespace in files.items():
        for name, value in _state(namespace).items():
            _collect(value, joined_name(path, name), seen, found, 0)
    return found


def left_behind(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors held now and not `before` that a forward computed and that carry a gradient or are buffers, by dotted
    path."""
    known = {id(tensor) for tensor in before.values()}
    buffers = {joined_name(name, key) for name, module in model.named_modules() for key in own_buffers(module)}
    with plain_calls():
        return {
            name: tensor
            for name, tensor in held_tensors(model).items()
            if id(tensor) not in known and (name in buffers or (tensor.requires_grad and not tensor.is_leaf))
        }


def _state(namespace: Any) -> dict[str, Any]:
    """The entries of a namespace that may hold tensors: containers and objects, not functions, classes or modules."""
    return {name: value for name, value in namespace.items() if not name.startswith("__") and _is_open(value)}


def _is_open(value: object) -> bool:
    """True for a tensor and for what may hold one: a container, an object of a class that no library above defines."""
    if isinstance(value, (Tensor, dict, *_CONTAINERS)):
        return True
    is_plain = isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__") or callable(value)
    return not is_plain and type(value).__module__.partition(".")[0] not in _OF_LIBRARIES


def _collect(value: Any, path: str, seen: set[int], found: dict[str, Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            found[path] = value
        return
    if depth > MOST_DEEP or id(value) in seen or not _is_open(value):
        return
    seen.add(id(value))
    for key, inner in _members(value):
        if type(inner) not in _CLOSED:
            _collect(inner, joined_name(path, str(key)), seen, found, depth + 1)


def _members(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _CONTAINERS):
        return list(enumerate(value))
    return list(vars(value).items())

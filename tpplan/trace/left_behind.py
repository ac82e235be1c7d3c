"""Tensors that a forward leaves behind for others to read: on modules, in objects that modules hold, in global lists.

A training loop may add such a tensor to its loss (`loss + sum(m.aux_loss for m in ...)`), which no trace sees. So each
one that carries a gradient counts as an output of the model: whole on every rank, and so is its gradient. So does one
that forward puts in a buffer's place (`self.mean = 0.9 * self.mean + ...`), which the next step and state_dict read.
Any other counts as one where the next step's forward reads it (with_carried).
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from torch import Tensor, nn

from tpplan.core.errors import ModelError
from tpplan.core.graph import LEFT_AT, ModelGraph, enclosing, joined_name
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.layouts.buffer_writes import BATCH, WEIGHTS, origins_of, read_in_later_steps
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.recording import is_recorded
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


#: where forward keeps a tensor without a gradient -> the value
Kept = dict[str, str]


class CarriedError(ModelError):
    """A step runs other code than the first one, as that has kept a tensor. `module` is the innermost module in which
    it is kept and read."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


@dataclass(slots=True)
class LeftBehind:
    """By dotted path, the tensors that a model holds `before` a forward, and those that forward leaves there: `outputs`
    carry a gradient or are buffers; `kept` are all other ones that it computed."""

    before: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)

    def start(self, model: nn.Module) -> None:
        """Notes what a model holds before its forward."""
        self.before = held_tensors(model)

    def end(self, model: nn.Module) -> None:
        """Notes what its forward has left."""
        known = {id(tensor) for tensor in self.before.values()}
        buffers = {joined_name(name, key) for name, module in model.named_modules() for key in own_buffers(module)}
        with plain_calls():
            for name, tensor in held_tensors(model).items():
                if id(tensor) in known:
                    continue
                if name in buffers or (tensor.requires_grad and not tensor.is_leaf):
                    self.outputs[name] = tensor
                elif not tensor.requires_grad and is_recorded(tensor):
                    self.kept[name] = tensor


def with_carried(graph: ModelGraph, kept: Kept, run_again: Callable[[], tuple[ModelGraph, Kept]]) -> ModelGraph:
    """The graph, with those tensors among its outputs that forward keeps and later forwards read.

    What follows from constants and buffers alone is a cache. For the rest the model runs again, as it was left:
    run_again() gives the graph of that, and what it keeps. Where that reads what was kept, it must be of the same code,
    as the plan is made for one graph. Raises CarriedError where it is not.
    """
    origins = origins_of(graph, kept.values())
    moving = {path: value for path, value in kept.items() if origins[value] & {BATCH, WEIGHTS}}
    carried = dict(kept)
    if moving:
        later, kept_later = run_again()
        read = read_in_later_steps(later, kept_later) & moving.keys()
        if read and _code(graph) != _code(later):
            raise _other_code(graph, moving, later, read)
        storages = {graph.values[moving[path]].storage for path in read}
        unread = {path for path, value in moving.items() if graph.values[value].storage not in storages}
        carried = {path: value for path, value in kept.items() if path not in unread}
    outputs = tuple((LEFT_AT + path, value) for path, value in carried.items())
    return replace(graph, outputs=graph.outputs + outputs) if outputs else graph


def _code(graph: ModelGraph) -> str:
    """A digest of what a forward runs, in which a constant that the model holds is known by where that is."""
    sources = (replace(own, label=graph.held.get(own.result, own.label)) for own in graph.sources)
    return graph_fingerprint(replace(graph, sources=tuple(sources), outputs=()))


def _other_code(graph: ModelGraph, kept: Kept, later: ModelGraph, read: Collection[str]) -> "CarriedError":
    """The error for a forward that runs other code once it holds what it has kept."""
    held = [value for value, path in later.held.items() if path in read]
    modules = [node.module for value in held for node in later.consumers.get(value, ())]
    modules += [node.module for path in read if (node := graph.producers.get(kept[path])) is not None]
    around = set.intersection(*(set(enclosing(module)) for module in modules))
    path = min(read)
    return CarriedError(
        f"the forward keeps a tensor at {path}, which the next forward reads and the first one does not: give the "
        "model one from the start, as a buffer, or keep none from one step to the next",
        max(around, key=len),
    )


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

"""What a layer's forward does, as a sequence that can be compared with a sibling's: torch's functions as the code calls
them, the module that runs, literals, which values they are given, and what they give.

Two forwards with equal logs give equal graphs, whatever their code read to come to it: objects, closures, lists of a
file, a table keyed by id(self), counters, iterators. A value is named by where it comes from: an input by its place, a
parameter, buffer or other tensor of the layer by its place in it, a result by its number. A tensor from anywhere else
is itself, so that no other equals it; so is an object that is no plain value. In doubt two logs differ.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import pytree, recording
from tpplan.torch_internals.autograd import Apply, functions_run_by
from tpplan.torch_internals.checkpoints import is_reentrant_checkpoint, keeps_inputs
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.tensors import local_part, plain_calls
from tpplan.trace.answers.concrete_values import QUESTIONS, KnownValues
from tpplan.trace.hooks.call_rewriting import is_own_code_running
from tpplan.trace.noted_calls import Calling

#: values that are equal where they are one
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type, type(None), type(...))
_NUMBERS = (bool, int, complex, bytes)
#: stands for the results of a call that neither is given nor gives tensors: it changes how torch computes
_AGAIN = object()


class AsksError(Exception):
    """A forward asks a tensor for its values where the one that it is compared with asked for none."""


def contents(modules: Iterable[nn.Module]) -> list[object]:
    """What the attributes of modules hold: code may leave something there for others to read."""
    found: list[object] = []
    for module in modules:
        _flatten(vars(module).values(), found)
    return found


def _flatten(values: Iterable[object], found: list[object]) -> None:
    """Appends what is in dicts, lists and tuples. torch's pytree takes ten times as long."""
    for value in values:
        if isinstance(value, dict):
            if value:
                _flatten(value.values(), found)
        elif isinstance(value, (list, tuple)):
            _flatten(value, found)
        else:
            found.append(value)


@final
class CallLog(TorchFunctionMode):
    """While it is on, the calls of one forward of a layer are logged, in `entries`.

    `given` are the leaves of its arguments; `modules` are the layer's, by their names in it, and `names` are these by
    their names in the model; `running` holds the names of the modules that run, the innermost last. Where there is a
    `leader`, a question to a tensor is an error, and a call that the leader's forward made at that place is not made
    again, which on meta tensors takes most of the time: its results are like the leader's. From the first other call on
    everything runs.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        names: Mapping[str, str],
        running: Sequence[str],
        given: Sequence[object],
        leader: "CallLog | None" = None,
    ) -> None:
        super().__init__()
        #: (function and module that runs, operands), results; and last what the forward returns
        self.entries: list[tuple[object, object]] = []
        #: what the calls gave; _AGAIN for those that are made again, as they change no tensor
        self._results: list[Any] = []
        self._modules = modules
        self._names = names
        self._running = running
        self._is_leader = leader is None
        #: where a tensor comes from, by id, and what comes from there, which keeps the id taken
        self._origins: dict[int, object] = {}
        self._sources: dict[object, Tensor] = {}
        self._others: list[object] = []
        self._num_made = 0
        #: its own tensors have been named, and those that it holds otherwise
        self._has_own = self._has_held = False
        #: a function with a backward of its own ran: siblings run whole
        self.has_functions: bool = False
        self._leader = None if leader is None or leader.has_functions else leader
        self._functions = contextlib.ExitStack()
        #: a call runs whose own calls are not logged; the last call was given tensors
        self._is_inside = self._has_operands = False
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                self._name(leaf, ("given", place))

    def __enter__(self) -> "CallLog":
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.enter_context(functions_run_by(self._applied))
        return self

    def __exit__(self, *error: object) -> None:
        self._functions.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _applied(self, cls: type[torch.autograd.Function], apply: Apply, *args: Any, **kwargs: Any) -> Any:
        """What a function with a backward of its own gives."""
        if is_reentrant_checkpoint(cls) or keeps_inputs(cls) or self._is_inside:  # calls in checkpoints are logged
            return apply(*args, **kwargs)
        if is_own_code_running():
            return self._run(apply, cls, args, kwargs, is_one=True)
        self.has_functions, self._leader = True, None
        return self._log(self._call(cls, args, kwargs, is_open=True), apply(*args, **kwargs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._is_inside:
            return func(*args, **kwargs)
        if not self._is_leader and name in QUESTIONS and isinstance(args[0], Tensor) and not is_own_code_running():
            raise AsksError
        if name == "__get__" and not self._is_next(func):
            results = func(*args, **kwargs)  # what a tensor says of itself follows from what it is
            return self._log(self._call(func, args, kwargs), results) if isinstance(results, Tensor) else results
        return self._run(func, func, args, kwargs)

    def close(self, output: object) -> None:
        """Logs what the forward returns."""
        with plain_calls():
            self.entries.append((None, self._described(output)))

    def is_like(self, other: "CallLog") -> bool:
        """True where both forwards did the same."""
        return self.entries == other.entries

    def has_left(self) -> bool:
        """True where a tensor that was made is there still, once the forward's output has gone. Ends the log."""
        made = [weakref.ref(tensor) for origin, tensor in self._sources.items() if isinstance(origin, int)]
        self._sources.clear()
        self._results.clear()
        return any(tensor() is not None for tensor in made)

    def _is_next(self, func: object) -> bool:
        """True where the leader calls it now."""
        if self._leader is None:
            return False
        call = self._leader.entries[len(self.entries)][0]
        return call is not None and call[0] == func  # type: ignore[index]

    def _run(self, function: Callable[..., Any], func: object, args: Any, kwargs: Any, *, is_one: bool = False) -> Any:
        """The call's results, logged: made, or like the leader's. is_one: the calls in it are not logged."""
        call, leader = self._call(func, args, kwargs), self._leader
        if leader is not None:
            place = len(self.entries)
            if leader.entries[place][0] == call:
                self.entries.append(leader.entries[place])
                known = leader._results[place]
                return function(*args, **kwargs) if known is _AGAIN else self._like(known, leader)
            self._leader = None
        is_state, self._is_inside = not self._has_operands, is_one
        try:
            results = function(*args, **kwargs)
        finally:
            self._is_inside = False
        return self._log(call, results, is_state=is_state)

    def _like(self, known: Any, leader: "CallLog") -> Any:
        """Results like the leader's."""
        if isinstance(known, Tensor):
            origin = leader._origins[id(known)]
            if origin not in self._sources:
                with plain_calls():
                    alias = known.detach()
                    self._name(alias.requires_grad_() if known.requires_grad else alias, origin)
            return self._sources[origin]
        if isinstance(known, list | tuple):
            return type(known)([self._like(item, leader) for item in known])
        return known

    def _call(self, func: object, args: Any, kwargs: Any, *, is_open: bool = False) -> object:
        """What is called, in which module, with what. is_open: what runs inside is logged as well, so that the objects
        that it is given matter by that alone."""
        self._has_operands = False
        with plain_calls():
            described = self._shaped if is_open or is_own_code_running() else self._described
            scope = self._running[-1] if self._running else ""
            return func, self._names.get(scope, scope), described(args), described(kwargs) if kwargs else None

    def _log(self, call: object, results: Any, *, is_state: bool = False) -> Any:
        with plain_calls():
            is_tensor = isinstance(results, Tensor)
            for leaf in (results,) if is_tensor else pytree.tree_leaves(results):
                if isinstance(leaf, Tensor) and id(leaf) not in self._origins:
                    self._name(leaf, self._num_made)
                    self._num_made += 1
            self.entries.append((call, self._result(results)))
        is_state &= not is_tensor
        self._results.append(_AGAIN if is_state else list(results) if isinstance(results, list) else results)
        return results

    def _name(self, tensor: Tensor, origin: object) -> None:
        if id(tensor) not in self._origins:
            self._origins[id(tensor)] = origin
            self._sources[origin] = tensor

    def _is_known(self, tensor: Tensor) -> bool:
        """True for a tensor that was given, made, or is the layer's."""
        if id(tensor) not in self._origins and not self._has_own:
            self._has_own = True
            for name, module in self._modules.items():
                for own, value in (*own_parameters(module).items(), *own_buffers(module).items()):
                    if value is not None:
                        self._name(value, ("own", name, own))
                    if isinstance(value, DTensor):
                        self._name(local_part(value), ("local", name, own))
        if id(tensor) not in self._origins and not self._has_held:
            self._has_held = True
            for place, leaf in enumerate(contents(self._modules.values())):
                if isinstance(leaf, Tensor):
                    self._name(leaf, ("held", place))
        return id(tensor) in self._origins

    def _origin(self, tensor: Tensor) -> object:
        """Where a tensor comes from."""
        self._has_operands = True
        if id(tensor) not in self._origins and not self._is_known(tensor):
            self._name(tensor, ("other", id(tensor)))
        return self._origins[id(tensor)]

    def _result(self, value: object) -> object:
        """A result: of a tensor also what it is, of an object its type."""
        if isinstance(value, Tensor):
            return self._origin(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self._result, value))
        is_plain = isinstance(value, (*_NAMED, *_NUMBERS, str, float)) and not is_own_code_running()
        return self._described(value) if is_plain else type(value)

    def _shaped(self, value: object) -> object:
        """The tensors in a value, the rest by its type."""
        if isinstance(value, Tensor):
            return self._origin(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._shaped, value))
        return tuple(map(self._shaped, value.values())) if isinstance(value, dict) else type(value)

    def _described(self, value: object) -> object:
        """A value that equals another's where they mean one thing; an unknown object equals itself alone."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self._origin(value)
        if kind is str:
            return "module", self._names.get(str(value), value)
        if kind in _NUMBERS:
            return kind, value
        if kind is float:
            return repr(value)
        if isinstance(value, _NAMED):
            return value
        if isinstance(value, list | tuple):
            return kind, tuple(map(self._described, value))
        if isinstance(value, dict):
            return kind, tuple((self._described(key), self._described(item)) for key, item in value.items())
        if isinstance(value, slice):
            return kind, self._described(value.start), self._described(value.stop), self._described(value.step)
        self._others.append(value)
        return "other", id(value)


def untraced() -> contextlib.AbstractContextManager[None]:
    """While it lasts, what runs does not enter the trace that is running, nor what it notes of calls, nor asks it for
    values."""
    return recording.untraced((KnownValues, Calling))

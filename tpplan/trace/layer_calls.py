"""A log of a layer's forward, to compare with a sibling's: each call of a torch function, the module that makes it, its
literals, operands and results.

Two forwards with equal logs give equal graphs, whatever else their code read: objects, closures, global lists, a table
keyed by id(self), counters, iterators. A tensor is named by where it comes from: an input by its position, a parameter,
buffer or other tensor of the layer by its place in the layer, a result by its number. A tensor from anywhere else, and
an object that is no plain value, equals itself alone. In doubt two logs differ.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import pytree, recording
from tpplan.torch_internals.autograd import functions_run_by
from tpplan.torch_internals.checkpoints import is_reentrant_checkpoint, keeps_inputs
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.tensors import local_part, plain_calls
from tpplan.trace.answers.concrete_values import QUESTIONS, ConcreteValues
from tpplan.trace.answers.planned_device import as_planned
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import is_own_code_running
from tpplan.trace.noted_calls import CallNotes

#: types whose values are compared as they are
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type, type(None), type(...))
_NUMBERS = frozenset({bool, int, complex, bytes})
#: in place of the results of a call without tensors among its operands and results: the call changes torch's state (the
#: default dtype, say), so each sibling must make it too
_MADE_EACH_TIME = object()


class AsksError(Exception):
    """A sibling's forward asks a tensor for its values, which the layer it is compared with does not."""


def contents(modules: Iterable[nn.Module]) -> list[object]:
    """All values in the attributes of modules, dicts and lists flattened: what a forward may leave for others to
    read."""
    found: list[object] = []
    for module in modules:
        _flatten(vars(module).values(), found)
    return found


def _flatten(values: Iterable[object], found: list[object]) -> None:
    """Appends the values, and those in dicts, lists and tuples, to `found`. torch's pytree takes ten times as long."""
    for value in values:
        if not isinstance(value, (dict, list, tuple)):
            found.append(value)
        elif value:
            _flatten(value.values() if isinstance(value, dict) else value, found)


@final
class CallLog(TorchFunctionMode):
    """A mode that logs the calls of one forward of a layer in `entries`.

    modules: the layer's modules, by their names in the layer. names: these names by the names in the model.
    running: names of the modules that run, the innermost last. given: leaves of the forward's arguments.
    leader: the log of the sibling to compare with. A call that the leader made at the same position is not made again,
        which on meta tensors would take most of the time: its results are aliases of the leader's. From the first
        different call on everything runs. A question about a tensor's values raises AsksError.
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
        #: (call, results) in order, and last (None, what the forward returns)
        self.entries: list[tuple[object, object]] = []
        #: results of the calls; _MADE_EACH_TIME for those that every sibling makes
        self._results: list[Any] = []
        self._modules = modules
        self._names = names
        self._running = running
        self._is_leader = leader is None
        #: by a tensor's id, the place that it comes from; by place, the tensor: holding it keeps its id from being
        #: used again
        self._origins: dict[int, object] = {}
        self._tensors: dict[object, Tensor] = {}
        #: objects compared by id, held for the same reason
        self._others: list[object] = []
        self._num_made = 0
        #: whether the layer's parameters and buffers have an origin yet, and whether tensors in its attributes do
        self._has_own = self._has_held = False
        #: whether an autograd.Function of the model ran: siblings then make all calls themselves
        self.has_functions: bool = False
        self._leader = None if leader is None or leader.has_functions else leader
        self._contexts = contextlib.ExitStack()
        #: the function that makes calls of marks outside of this log
        self._around = custom_ops.caller()
        #: whether a call is running whose inner calls are not logged; whether the last call was given tensors
        self._is_inside = self._has_operands = False
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                self._name(leaf, ("given", place))

    def __enter__(self) -> "CallLog":
        super().__enter__()  # type: ignore[no-untyped-call]
        self._contexts.enter_context(functions_run_by(self._applied))
        self._contexts.enter_context(custom_ops.called_by(self._marked))
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _marked(self, op: Any, args: tuple[Any, ...]) -> Any:
        """Logs a call of a mark, which the trace records or which is copied from the leader; NotImplemented where it is
        neither."""
        if self._is_inside:
            return NotImplemented
        call, leader, place = self._call(op, args, None), self._leader, len(self.entries)
        if self._is_leader:
            results = self._around(op, args)
            return results if results is NotImplemented else self._log(call, results)
        if leader is None or leader.entries[place][0] != call:
            return NotImplemented
        self.entries.append(leader.entries[place])
        return self._like(leader._results[place], leader)

    def _applied(self, cls: type[torch.autograd.Function], apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs and logs an autograd.Function; calls inside a checkpoint are logged one by one."""
        if is_reentrant_checkpoint(cls) or keeps_inputs(cls) or self._is_inside:
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
            results = func(*args, **kwargs)  # other attributes follow from what is compared already
            return self._log(self._call(func, args, kwargs), results) if isinstance(results, Tensor) else results
        return self._run(func, func, args, kwargs)

    def close(self, output: object) -> None:
        """Ends the log with what the forward returns."""
        with plain_calls():
            self.entries.append((None, self._described(output)))

    def is_like(self, other: "CallLog") -> bool:
        """True where both forwards made equal calls with equal results."""
        return self.entries == other.entries

    def has_left(self) -> bool:
        """True where a tensor that the forward made is alive though its output is not; the log is unusable after."""
        made = [weakref.ref(tensor) for origin, tensor in self._tensors.items() if isinstance(origin, int)]
        self._tensors.clear()
        self._results.clear()
        return any(tensor() is not None for tensor in made)

    def _is_next(self, func: object) -> bool:
        """True where the leader's next call is of this function."""
        if self._leader is None:
            return False
        call = self._leader.entries[len(self.entries)][0]
        return call is not None and call[0] == func  # type: ignore[index]

    def _run(self, function: Callable[..., Any], func: object, args: Any, kwargs: Any, *, is_one: bool = False) -> Any:
        """The results of a call, made or copied from the leader, and logged. is_one: calls inside it are not logged."""
        call, leader = self._call(func, args, kwargs), self._leader
        if leader is not None:
            place = len(self.entries)
            if leader.entries[place][0] == call:
                self.entries.append(leader.entries[place])
                known = leader._results[place]
                return function(*args, **kwargs) if known is _MADE_EACH_TIME else self._like(known, leader)
            self._leader = None
        is_state, self._is_inside = not self._has_operands, is_one
        try:
            results = function(*args, **kwargs)
        finally:
            self._is_inside = False
        return self._log(call, results, is_state=is_state)

    def _like(self, known: Any, leader: "CallLog") -> Any:
        """The leader's results with this log's own alias for each tensor."""
        if isinstance(known, Tensor):
            origin = leader._origins[id(known)]
            if origin not in self._tensors:
                with plain_calls():
                    alias = known.detach()
                    self._name(alias.requires_grad_() if known.requires_grad else alias, origin)
            return self._tensors[origin]
        if isinstance(known, list | tuple):
            return type(known)([self._like(item, leader) for item in known])
        return known

    def _call(self, func: object, args: Any, kwargs: Any, *, is_open: bool = False) -> object:
        """The (function, module, arguments) to compare. is_open: calls inside are logged as well, so objects among the
        arguments need not be equal."""
        self._has_operands = False
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
        self._results.append(_MADE_EACH_TIME if is_state else list(results) if isinstance(results, list) else results)
        return results

    def _name(self, tensor: Tensor, origin: object) -> None:
        if id(tensor) not in self._origins:
            self._origins[id(tensor)] = origin
            self._tensors[origin] = tensor

    def _is_known(self, tensor: Tensor) -> bool:
        """True for an argument, a result, and a tensor that the layer holds."""
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
        """The place that a tensor comes from, by which it is compared."""
        self._has_operands = True
        if id(tensor) not in self._origins and not self._is_known(tensor):
            self._name(tensor, ("other", id(tensor)))
        return self._origins[id(tensor)]

    def _result(self, value: object) -> object:
        """The key by which results are compared: a tensor's origin, shape, strides, dtype and gradient; an object's
        type."""
        if isinstance(value, Tensor):
            return self._origin(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self._result, value))
        is_plain = isinstance(value, (*_NAMED, *_NUMBERS, str, float)) and not is_own_code_running()
        return self._described(value) if is_plain else type(value)

    def _shaped(self, value: object) -> object:
        """The key by which arguments are compared where objects need not be equal: tensors by origin, the rest by
        type."""
        if isinstance(value, Tensor):
            return self._origin(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._shaped, value))
        return tuple(map(self._shaped, value.values())) if isinstance(value, dict) else type(value)

    def _described(self, value: object) -> object:
        """The key by which arguments are compared: tensors by origin, plain values as they are, other objects by
        identity."""
        kind = type(value)
        if kind is str:
            return "module", self._names.get(str(value), value)
        if kind in _NUMBERS:
            return kind, value
        if isinstance(value, Tensor):
            return self._origin(value)
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


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """A context in which ops run beside the running trace: they are neither recorded, nor noted as calls, nor answered
    with concrete values. Tensors answer as on the planned device, as in the trace."""
    with recording.untraced((ConcreteValues, CallNotes)), as_planned("meta", lambda _problem: None):
        yield

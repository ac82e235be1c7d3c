"""Recomputes modules by a generated subclass whose forward runs again in backward instead of keeping its activations.

torch.utils.checkpoint is put around the class's own forward, conversions included. A wrapper module would add its name
to those of the parameters.

torch.utils.checkpoint restores torch's random states and nothing else. A forward may also draw from NumPy or Python,
count its calls, update a running mean in a buffer, or store features on a module: run again, it would draw other
numbers, start from other values and apply each update twice. So the replay here starts from the state that the first
run found (random states, attributes, containers compared one level deep, copies of the buffers that it writes to), and
restores the current state afterwards. The first training forward copies all buffers to find out which are written to.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpplan.apply.kept_results import KEPT_OPS, contexts_keeping
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.graph import joined_name
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import Recompute
from tpplan.torch_internals.modules import follows_statistics, own_buffers
from tpplan.torch_internals.tensors import version_of
from tpplan.trace.hooks.generated_class import subclass
from tpplan.trace.hooks.host_rng import restored, states_of_generators


def check_recomputable(module: nn.Module, name: str) -> None:
    """Raises PlanMismatchError for a module whose class defines no forward."""
    if type(module).forward is nn.Module.forward:
        kind = type(module).__name__
        raise PlanMismatchError(
            f"{kind} has no forward of its own that could run again: take it out of the plan's recompute, or solve "
            "again",
            plan_path=f"recompute.{name or ROOT}",
        )


def recompute(module: nn.Module, mode: Recompute) -> None:
    """Makes the module's forward run again in backward whenever it is called with gradients enabled."""
    module.__class__ = recomputed_class(type(module), mode)  # type: ignore[arg-type]


@functools.cache
def recomputed_class(cls: type[nn.Module], mode: Recompute) -> type[nn.Module]:
    """Returns the subclass of cls whose forward is recomputed. The subclass has the name of cls."""
    contexts: dict[str, Any] = {}
    if mode.is_selective:
        contexts["context_fn"] = functools.partial(contexts_keeping, KEPT_OPS[mode])

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        run: Callable[..., Any] = functools.partial(cls.forward, self)
        if not torch.compiler.is_compiling():  # torch.compile replays random states by itself and traces forward once
            run = _ReplayableForward(self, run)
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    return subclass(cls, {"forward": forward}, recomputed_class, (mode,))


#: key in a module's __dict__ of the names of the buffers at or below it that its forward writes to
_WRITTEN = "_tpplan_written_buffers"
#: attributes that every nn.Module has (parameters, modules, hooks), which a forward may not replace
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Missing:
    """The value of an attribute that does not exist."""


_MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class _BufferBefore:
    """A buffer before the first run, in the dict `table` of its owner; `copy` is None where no copy was taken."""

    name: str
    table: dict[str, Any]
    key: str
    buffer: Tensor
    version: int
    copy: Tensor | None


@dataclass(slots=True, eq=False)
class _ReplayableForward:
    """A module's forward: the first call runs it, later calls replay it from the state in which the first began."""

    module: nn.Module
    run: Callable[..., Any]
    #: states of all random generators before the first call
    rng_states: tuple[Any, ...] = ()
    #: attributes that the first call set: the dict, the key, and the value before
    changed: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    #: containers that the first call changed, each with a copy from before
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    #: buffers that the first call wrote to: the dict, the key, and a copy from before
    written: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    has_run: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_run:
            return self._first(*args, **kwargs)
        with restored(self.rng_states), self._as_before():
            return self.run(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, and notes what it changes."""
        self.rng_states = states_of_generators()
        before = [(table, dict(table)) for table in _tables(self.module)]
        values = (value for _, own in before for key, value in own.items() if key not in _OF_ANY_MODULE)
        held = [(value, _copied(value)) for value in values if _is_container(value)]
        known: frozenset[str] | None = vars(self.module).get(_WRITTEN)
        buffers = [
            _BufferBefore(
                name=name,
                table=own_buffers(owner),
                key=key,
                buffer=buffer,
                version=version_of(buffer),
                copy=buffer.clone() if known is None or name in known or follows_statistics(owner) else None,
            )
            for name, owner, key, buffer in _buffers(self.module)
        ]
        output = self.run(*args, **kwargs)
        self.changed = [change for table, own in before for change in _changes(table, own)]
        self.filled = [(value, then) for value, then in held if not _holds(value, then)]
        self._note_written(buffers, known)
        self.has_run = True
        return output

    def _note_written(self, buffers: Iterable[_BufferBefore], known: frozenset[str] | None) -> None:
        """Notes the buffers that the first call wrote to; `known` are those that earlier forwards wrote to.

        Raises UsageError for a written buffer of which no copy was taken.
        """
        names = set(known or ())
        for then in buffers:
            is_written = version_of(then.buffer) != then.version
            if not is_written and (then.copy is None or (known is None and not _differ(then.buffer, then.copy))):
                continue
            if then.copy is None:
                raise UsageError(
                    f"buffer {then.name} of a {type(self.module).__name__} that is recomputed was written to in this "
                    "forward and not in the first, so that it cannot run again as it ran: plan with --recompute none"
                )
            self.written.append((then.table, then.key, then.copy))
            names.add(then.name)
        vars(self.module)[_WRITTEN] = frozenset(names)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restores the state from before the first call, and at the end the state from before the replay."""
        now = [(table, key, table.get(key, _MISSING)) for table, key, _ in (*self.changed, *self.written)]
        held = [(value, _copied(value)) for value, _ in self.filled]
        for table, key, value in self.changed:
            _put(table, key, value)
        for value, then in self.filled:
            _fill(value, then)
        for table, key, copy in self.written:
            table[key] = copy.clone()  # the forward may be replayed more than once
        try:
            yield
        finally:
            for table, key, value in now:
                _put(table, key, value)
            for value, then in held:
                _fill(value, then)


def _tables(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields the dicts of attributes and of buffers of a module and all below it, which its code may write to."""
    for inner in module.modules():
        yield vars(inner)
        if buffers := own_buffers(inner):
            yield buffers


def _changes(table: dict[str, Any], before: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for key in table.keys() | before.keys():
        then = before.get(key, _MISSING)
        if table.get(key, _MISSING) is not then and key not in _OF_ANY_MODULE and key != _WRITTEN:
            yield table, key, then


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for name, inner in module.named_modules():
        for key, buffer in own_buffers(inner).items():
            if buffer is not None and not buffer.is_inference():
                yield joined_name(name, key), inner, key, buffer


def _differ(buffer: Tensor, copy: Tensor) -> bool:
    """True where a buffer's values differ from its copy: batch norm writes to buffers without raising their version."""
    return not buffer.is_meta and type(buffer) is Tensor and not torch.equal(buffer, copy)


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set)


def _copied(value: Any) -> Any:
    return type(value)(value)


def _holds(value: Any, then: Any) -> bool:
    """True where a container holds the same objects as its earlier copy `then`, in the same order."""
    if len(value) != len(then):
        return False
    pairs = zip(value.items(), then.items(), strict=True) if isinstance(value, dict) else zip(value, then, strict=True)
    if isinstance(value, dict):
        return all(own[0] is other[0] and own[1] is other[1] for own, other in pairs)
    return all(own is other for own, other in pairs)


def _fill(value: Any, then: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(then)
    else:
        value.update(then)

"""A forward that runs again in backward as it ran before: what it draws, and what it keeps on its modules.

torch.utils.checkpoint restores torch's random states and no others. A forward may draw from NumPy or Python, too; it
may count its calls, follow a mean in a buffer, put features on a module. Run again it would draw other numbers, start
from other values, and do it all twice. So here it starts again from what it found, on copies of the buffers that it
writes to, and leaves everything as it is then.

What containers hold is seen one level deep. The first forward copies all buffers, and shows which are written to.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.chance import restored, states_of_generators
from tpplan.errors import UsageError
from tpplan.torch_internals.modules import follows_statistics, own_buffers
from tpplan.torch_internals.tensors import version_of

#: where a module keeps the buffers below it that its forward writes to, by their names
_WRITTEN = "_tpplan_written_buffers"
#: what each module has, besides its parameters and modules, which a forward may not replace
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Missing:
    """Of an attribute that is not there."""


_MISSING = _Missing()


@dataclass(slots=True, eq=False)
class RunAgain:
    """A module's forward. Its first call runs it, any later one runs it again as it ran then."""

    module: nn.Module
    run: Callable[..., Any]
    #: states of generators before the first call
    draws: tuple[Any, ...] = ()
    #: what the first call changed, as it was before: a dict, its key and the value; containers and what they held
    changed: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    #: buffers that it wrote to, as they were before, by dict and key
    written: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    has_run: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_run:
            return self._first(*args, **kwargs)
        with restored(self.draws), self._as_before():
            return self.run(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self.draws = states_of_generators()
        tables = list(_tables(self.module))
        before = [(table, dict(table)) for table in tables]
        values = (value for _, own in before for key, value in own.items() if key not in _OF_ANY_MODULE)
        held = [(value, _copied(value)) for value in values if _is_container(value)]
        known: frozenset[str] | None = vars(self.module).get(_WRITTEN)

        def is_copied(name: str, owner: nn.Module) -> bool:
            return known is None or name in known or follows_statistics(owner)

        buffers = [
            (
                name,
                own_buffers(owner),
                key,
                buffer,
                version_of(buffer),
                buffer.clone() if is_copied(name, owner) else None,
            )
            for name, owner, key, buffer in _buffers(self.module)
        ]
        output = self.run(*args, **kwargs)
        self.changed = [change for table, own in before for change in _changes(table, own)]
        self.filled = [(value, then) for value, then in held if not _holds(value, then)]
        written = [
            (name, table, key, copy)
            for name, table, key, buffer, version, copy in buffers
            if version_of(buffer) != version or (copy is not None and (known is not None or _differ(buffer, copy)))
        ]
        for name, table, key, copy in written:
            if copy is None:
                raise UsageError(
                    f"buffer {name} of a {type(self.module).__name__} that is recomputed was written to in this "
                    "forward and not in the first, so that it cannot run again as it ran: plan with --recompute none"
                )
            self.written.append((table, key, copy))
        vars(self.module)[_WRITTEN] = frozenset(name for name, *_ in written) | (known or frozenset())
        self.has_run = True
        return output

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        now = [(table, key, table.get(key, _MISSING)) for table, key, _ in (*self.changed, *self.written)]
        held = [(value, _copied(value)) for value, _ in self.filled]
        for table, key, value in self.changed:
            _put(table, key, value)
        for value, then in self.filled:
            _fill(value, then)
        for table, key, copy in self.written:
            table[key] = copy.clone()  # it may run a third time
        try:
            yield
        finally:
            for table, key, value in now:
                _put(table, key, value)
            for value, then in held:
                _fill(value, then)


def _tables(module: nn.Module) -> Iterator[dict[str, Any]]:
    """What code of a module's may set: attributes and buffers."""
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
                yield f"{name}.{key}".removeprefix("."), inner, key, buffer


def _differ(buffer: Tensor, copy: Tensor) -> bool:
    """True where a copy shows that a buffer was written to, of which a batch norm tells nobody."""
    return not buffer.is_meta and type(buffer) is Tensor and not torch.equal(buffer, copy)


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set)


def _copied(value: Any) -> Any:
    return type(value)(value)


def _holds(value: Any, then: Any) -> bool:
    """True where a container holds what it held, in order."""
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

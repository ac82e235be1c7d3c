"""Rewrites calls in a module's own code while its forward runs, such as sizes that are smaller on a rank.

A module with rewriters gets a subclass whose forward runs under a mode. Calls in forwards of the modules inside it are
left alone, as the plan names the module whose code makes a call; so is code of tpplan that runs within a forward. Code
that is checkpointed is rewritten in the same way when it runs again in backward, after the forward is over.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import PlanMismatchError
from tpplan.torch_internals.operators import hides_sizes, seen_by
from tpplan.trace.hooks.checkpoint_context import ContextFactory, in_checkpoint_replay_as
from tpplan.trace.hooks.generated_class import subclass
from tpplan.trace.hooks.nested_integers import (
    Copied,
    Path,
    num_references,
    parse_path,
    path_text,
    value_at,
    with_integers,
)

F = TypeVar("F", bound=Callable[..., Any])


class Rewriter(Protocol):
    """Gives a call's result, or NotImplemented for a call to leave as it is. Must be hashable and picklable."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...


@runtime_checkable
class ReplacesAttributes(Protocol):
    """A rewriter that also gives integers of its module other values while the module's forward runs.

    `attributes` has, by path (tpplan.trace.hooks.nested_integers), what the integer is and what the forward reads.
    """

    @property
    def attributes(self) -> Mapping[str, tuple[int, int]]: ...


class _LeftAlone(Enum):
    """Code in which no call is rewritten: of a module without rewriters, or tpplan's own."""

    OF_THE_MODEL = auto()
    OUR_OWN = auto()


#: the code that is running, the innermost last; only the innermost rewrites
_running: list["_Rewriting | _LeftAlone"] = []


def rewrite_calls(rewriters: Mapping[nn.Module, Iterable[Rewriter]]) -> None:
    """From now on calls in these modules' own forwards are rewritten, each by the first rewriter that takes it."""
    inside = {child for module in rewriters for child in _called(module)} - rewriters.keys()
    for module, own in rewriters.items():
        module.__class__ = _rewriting_class(type(module), tuple(own))  # type: ignore[arg-type]
    for child in inside:
        child.__class__ = _as_written_class(type(child))  # type: ignore[arg-type]


def own_code(function: F) -> F:
    """Marks a function as code of tpplan that runs within a model's forwards: no call in it is rewritten, and a trace
    of the applied model can tell it from the model's code."""
    return _left_alone(function, _LeftAlone.OUR_OWN)


def is_own_code_running() -> bool:
    """True while a function marked by own_code runs."""
    return bool(_running) and _running[-1] is _LeftAlone.OUR_OWN


def is_frame_of_own_code(frame: FrameType) -> bool:
    """True for the frame in which a function marked by own_code is called."""
    return frame.f_code is _OWN_CALL and frame.f_locals.get("whose") is _LeftAlone.OUR_OWN


def running_rewriters() -> tuple[Rewriter, ...]:
    """The rewriters of the innermost forward that runs; none inside code that is left alone."""
    return _running[-1].rewriters if _running and isinstance(_running[-1], _Rewriting) else ()


def _left_alone(function: F, whose: _LeftAlone) -> F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _running.append(whose)  # not `with _leaving_alone`: a generator costs three times as much
        try:
            return function(*args, **kwargs)
        finally:
            _running.pop()

    return cast(F, run)


#: the code object that all functions returned by own_code share
_OWN_CALL = own_code(lambda: None).__code__


@contextlib.contextmanager
def _leaving_alone(whose: _LeftAlone) -> Iterator[None]:
    _running.append(whose)
    try:
        yield
    finally:
        _running.pop()


def _as_now() -> ContextFactory:
    """Makes contexts in which calls are rewritten, or left alone, as in the code that is running now."""
    innermost = _running[-1]
    if isinstance(innermost, _Rewriting):
        return functools.partial(_Rewriting, innermost.rewriters)
    return functools.partial(_leaving_alone, innermost)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the nearest modules inside that have a forward."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


@functools.cache
def _as_written_class(cls: type[nn.Module]) -> type[nn.Module]:
    return subclass(cls, {"forward": _left_alone(cls.forward, _LeftAlone.OF_THE_MODEL)}, _as_written_class)


@functools.cache
def _rewriting_class(cls: type[nn.Module], rewriters: tuple[Rewriter, ...]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with _Rewriting(rewriters):
                return cls.forward(self, *args, **kwargs)
        # Where torch.compile gives up on this forward it would compile what the forward calls, and not rewrite there.
        with _Rewriting(rewriters), in_checkpoint_replay_as(_as_now):
            return _uncompiled(cls.forward)(self, *args, **kwargs)

    replaced: dict[str, dict[Path, tuple[int, int]]] = {}
    for own in rewriters:
        for text, pair in own.attributes.items() if isinstance(own, ReplacesAttributes) else ():
            (name, _), *path = parse_path(text)
            replaced.setdefault(str(name), {})[tuple(path)] = pair
    read = {name: _attribute(name, numbers, rewriters) for name, numbers in replaced.items()}
    return subclass(cls, {"forward": forward, **read}, _rewriting_class, (rewriters,))


def _uncompiled(function: F) -> F:
    """The function, which torch.compile does not look into, where it is loaded at all: loading it takes a second."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@functools.cache
def _disabled(function: Callable[..., Any]) -> Any:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def _attribute(name: str, numbers: Mapping[Path, tuple[int, int]], rewriters: tuple[Rewriter, ...]) -> property:
    """A property in place of the attribute `name`: a forward with these rewriters reads a rank's integers in it, all
    other code what was set. `numbers` has, by path inside the attribute, (planned integer, a rank's integer).

    Where the integers are inside an object, the forward reads a copy of it (_Rewriting.copied), as other modules may
    share it. Reading or setting the attribute in such a forward raises PlanMismatchError where an integer is no longer
    the planned one, or the forward sets the attribute: it is no size then.
    """

    def read(self: nn.Module) -> object:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        own, running = self.__dict__[name], _running[-1] if _running else None
        if not isinstance(running, _Rewriting) or running.rewriters != rewriters:
            return own
        for path, (written, _) in numbers.items():
            now = own if path == () else value_at(own, path)
            if type(now) is not int or now != written:
                whole = path_text(((name, False), *path))
                raise PlanMismatchError(
                    f"{type(self).__name__}.{whole} is {now!r}, and was {written} when the plan was made, as a "
                    "size: solve again for this value"
                )
        return numbers[()][1] if () in numbers else running.copied(self, name, own, numbers)

    def write(self: nn.Module, value: object) -> None:
        if running_rewriters() == rewriters:
            raise _not_a_size(self, name, "set by its forward")
        self.__dict__[name] = value

    return property(read, write, doc=f"{name}: the module's own, or a rank's while the module's forward runs")


def _not_a_size(module: nn.Module, name: str, what: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{type(module).__name__}.{name} is {what}, and the plan takes integers of it for sizes: keep the module whole "
        "by a pin"
    )


@dataclass(slots=True)
class _Copies:
    """The value that a forward reads in place of an attribute, the containers copied for it, and the number of
    references to each copy before the forward has any."""

    module: nn.Module
    value: object
    made: list[Copied]
    num_references: list[int] = field(default_factory=list)


class _Rewriting(TorchFunctionMode):
    """A mode that offers each call of one forward to the forward's rewriters."""

    def __init__(self, rewriters: tuple[Rewriter, ...]) -> None:
        super().__init__()
        self.rewriters = rewriters
        self._copies: dict[tuple[int, str], _Copies] | None = None

    def copied(self, module: nn.Module, name: str, value: object, numbers: Mapping[Path, tuple[int, int]]) -> object:
        """The copy of a module's attribute that this forward reads, with other integers inside."""
        if torch.compiler.is_compiling():
            raise PlanMismatchError(
                f"{type(module).__name__}.{name} has sizes inside, of which a rank reads a copy, and torch.compile "
                "does not: leave the module out of what is compiled"
            )
        self._copies = self._copies or {}
        key = id(module), name
        if key not in self._copies:
            made: list[Copied] = []
            local = {path: number for path, (_, number) in numbers.items()}
            self._copies[key] = _Copies(module, with_integers(value, local, made.append), made)
            self._copies[key].num_references = [num_references(copied) for copied in made]
        return self._copies[key].value

    def _check_copies(self) -> None:
        """Raises PlanMismatchError where the forward changed what it read a copy of, or has left the copy behind."""
        for (_, name), own in (self._copies or {}).items():
            if any(copied.is_changed() for copied in own.made):
                raise _not_a_size(own.module, name, "changed by its forward")
            if own.num_references != [num_references(copied) for copied in own.made]:
                raise _not_a_size(own.module, name, "kept by its forward")

    def __enter__(self) -> "_Rewriting":
        _running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _running.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._copies is not None and error[0] is None:
            self._check_copies()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _running[-1] is not self:
            return func(*args, **kwargs)
        for rewriter in self.rewriters:
            result = rewriter(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return seen_by(self, func)(*args, **kwargs) if hides_sizes(func) else func(*args, **kwargs)

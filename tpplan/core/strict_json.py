"""Strict JSON: what a dataclass declares is what a file must hold, no key more and no key less.

A dataclass is the schema. Field types understood: str, int, float, a bool, StrEnum, another such dataclass,
tuple[X, ...] of these, Mapping[str, X], and `X | None` for a key that may be absent. A number's range is written in
its type: Annotated[float, Above(0)].
Errors name the file and the path of the key: `profiles/h100-sxm.json: collectives[3].time_s[0]: expected > 0, got -1`.
"""

import dataclasses
import difflib
import json
import math
import types
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tpplan.core.errors import TpplanError
from tpplan.core.escapes import escaped
from tpplan.core.files import read_text

T = TypeVar("T")

#: what torch counts in; no size or count is beyond it
MAX_INTEGER = 2**63 - 1
#: SI amounts that mean anything, besides 0; products and quotients of a few of them are finite
LEAST, MOST = 1e-30, 1e30
#: of a key, in characters: names of modules are shorter
MAX_KEY = 1_000
#: digits of an integer that is read; one with more is beyond MAX_INTEGER anyway
_MOST_DIGITS = 100
#: characters of a value in a message
_MOST_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Above:
    """A number must be greater than this."""

    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """A number must be this or greater."""

    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """The member is written as text: str() of it, read back by `parse`; `pattern` says the same to a JSON Schema."""

    parse: Callable[[str], object]
    pattern: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in which file a value stands, and which error its mistakes raise."""

    origin: str
    error: type[TpplanError]
    path: str = ""

    def at(self, key: str | int) -> "Place":
        """The place of a member or of an element; a member without a name stands as an empty text."""
        dot = "." if self.path else ""
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}{dot}" + (escaped(key) or '""')
        return dataclasses.replace(self, path=path)

    def fail(self, problem: str) -> NoReturn:
        """Raise the error: file, path, problem."""
        raise self.error(": ".join(part for part in (self.origin, self.path, problem) if part))


def read_json(path: Path, *, origin: str, error: type[TpplanError]) -> object:
    """The content of a JSON file; duplicate keys, NaN and infinities are refused like any syntax error."""
    place = Place(origin=origin, error=error)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        if repeated:
            place.fail(f"duplicate key {repeated[0]!r}")
        return dict(pairs)

    def no_constant(text: str) -> NoReturn:
        place.fail(f"expected finite numbers, got {text}")

    text = read_text(path, error=error, origin=origin)
    try:
        return cast(object, json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_int=_integer))
    except RecursionError:
        raise error(f"{origin}: not valid JSON: objects and arrays stand in each other too deep") from None
    except ValueError as cause:
        raise error(f"{origin}: not valid JSON: {cause}") from cause


def _integer(text: str) -> int | float:
    """An integer; infinity for one of very many digits, which takes long to read: it is refused where it stands."""
    return int(text) if len(text) <= _MOST_DIGITS else math.inf


def decode(cls: type[T], value: object, *, origin: str, error: type[TpplanError]) -> T:
    """A `cls` from what json gave. Raises `error` with the path of the first key that is wrong."""
    return cast(T, _decode(cls, value, Place(origin=origin, error=error)))


def encode(value: object) -> object:
    """The inverse of decode: dataclasses as dicts without their None members, tuples as lists, enums as text."""
    return _encode(type(value), value)


def _encode(hint: object, value: object) -> object:
    origin = get_origin(hint)
    if origin is Annotated:
        inner, bound = get_args(hint)
        return str(value) if isinstance(bound, Text) else _encode(inner, value)
    if origin in (Union, types.UnionType):
        return _encode(next(option for option in get_args(hint) if option is not type(None)), value)
    if isinstance(value, tuple):
        return [_encode(get_args(hint)[0], element) for element in value]
    if isinstance(value, Mapping):
        return {key: _encode(get_args(hint)[1], member) for key, member in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        members = ((name, getattr(value, name)) for name in hints)
        return {name: _encode(hints[name], member) for name, member in members if member is not None}
    if hint is float and isinstance(value, int):
        return float(value)
    return value.value if isinstance(value, StrEnum) else value


def _decode(hint: object, value: object, place: Place) -> object:
    """Dispatch on the declared type."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, bound = get_args(hint)
        if isinstance(bound, Text):
            return _decode_text(bound, value, place)
        return _bounded(_decode(inner, value, place), bound, place)
    if origin in (Union, types.UnionType):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return _decode(inner, value, place)
    if origin is tuple:
        return _decode_array(get_args(hint)[0], value, place)
    if origin is Mapping:
        return _decode_mapping(get_args(hint)[1], value, place)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_object(hint, value, place)
    return _decode_scalar(hint, value, place)


def _decode_object(cls: type, value: object, place: Place) -> object:
    if not isinstance(value, Mapping):
        place.fail(f"expected an object, got {_kind(value)}")
    hints = get_type_hints(cls, include_extras=True)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint)}
    for key in value:
        if key not in hints:
            _check_key(key, place)
            near = difflib.get_close_matches(str(key), hints, n=1)
            place.at(str(key)).fail("unknown key" + (f"; did you mean {near[0]!r}?" if near else ""))
    for name in hints:
        if name not in value and name not in optional:
            place.at(name).fail("missing key")
    members = {name: _decode(hints[name], value[name], place.at(name)) for name in hints if name in value}
    members |= {name: None for name in optional if name not in value}
    try:
        return cls(**members)
    except place.error as cause:
        raise place.error(f"{place.origin}: {place.path}{'.' if place.path else ''}{cause}") from None


def _decode_mapping(hint: object, value: object, place: Place) -> dict[str, object]:
    if not isinstance(value, Mapping):
        place.fail(f"expected an object, got {_kind(value)}")
    for key in value:
        _check_key(key, place)
    return {str(key): _decode(hint, member, place.at(str(key))) for key, member in value.items()}


def _check_key(key: object, place: Place) -> None:
    """Raises the error for a key that no name can be: too long to be shown, or no Unicode."""
    text = str(key)
    if len(text) > MAX_KEY:
        place.at(text[:_MOST_SHOWN] + "...").fail(f"a key of {len(text)} characters: expected at most {MAX_KEY}")
    _check_unicode(text, place)


def _check_unicode(text: str, place: Place) -> None:
    """Raises the error for half of a surrogate pair, which JSON can say and no file can hold."""
    if not text.isascii() and any("\ud800" <= mark <= "\udfff" for mark in text):
        place.fail(f"expected Unicode text, got {text[:_MOST_SHOWN]!a}")


def _decode_text(text: Text, value: object, place: Place) -> object:
    if not isinstance(value, str):
        place.fail(f"expected text, got {_kind(value)}")
    try:
        return text.parse(value)
    except (TpplanError, ValueError) as cause:
        return place.fail(_cut(str(cause)))


def _cut(text: str) -> str:
    """A message that repeats a value of any length."""
    return text if len(text) <= 4 * _MOST_SHOWN else f"{text[: 4 * _MOST_SHOWN]}..."


def _decode_array(hint: object, value: object, place: Place) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        place.fail(f"expected an array, got {_kind(value)}")
    return tuple(_decode(hint, element, place.at(index)) for index, element in enumerate(value))


def _decode_scalar(hint: object, value: object, place: Place) -> object:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, place)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) <= MAX_INTEGER else place.fail(f"expected an integer below 2^63, got {_kind(value)}")
    if isinstance(value, str):
        _check_unicode(value, place)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value if value else place.fail("expected text, got an empty string")
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        choices = [str(member) for member in hint]
        return (
            hint(value)
            if value in choices
            else place.fail(f"expected one of {', '.join(choices)}, got {_shown(value)}")
        )
    expected = {float: "a number", int: "an integer", bool: "true or false"}.get(cast(type, hint), "text")
    return place.fail(f"expected {expected}, got {_kind(value)}")


def _finite(value: int | float, place: Place) -> float:
    """A finite float, 0 or of a size that can be reckoned with."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        place.fail(f"expected a finite number, got {_shown(value)}")
    if number and not LEAST <= abs(number) <= MOST:
        place.fail(f"expected 0 or a number from {LEAST:g} to {MOST:g}, got {number:g}")
    return number


def _bounded(value: object, bound: object, place: Place) -> object:
    number = cast(float, value)
    if isinstance(bound, Above) and number <= bound.bound:
        place.fail(f"expected > {bound.bound:g}, got {number:g}")
    if isinstance(bound, AtLeast) and number < bound.bound:
        place.fail(f"expected >= {bound.bound:g}, got {number:g}")
    return value


def _kind(value: object) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {dict: "an object", list: "an array", tuple: "an array", str: "text", int: "an integer", float: "a number"}
    name = names.get(type(value), type(value).__name__)
    return f"{name} {_shown(value)}" if isinstance(value, int | float | str) else name


def _shown(value: int | float | str) -> str:
    """A scalar in a message; not all of one that is long."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"of {value.bit_length()} bits"  # in decimal it could have more digits than Python writes
    shown = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= _MOST_SHOWN + 2 else shown[:_MOST_SHOWN] + "..."

"""Strict JSON: a file must hold exactly the keys and types that a dataclass declares.

The dataclass is the schema. Types of fields: str, int, float, bool, StrEnum, another such dataclass, tuple[X, ...] and
Mapping[str, X] of these, and `X | None` for an optional key. A number's range is part of its type: Annotated[float,
Above(0)]. Errors name the file and the path of the key: `profiles/h100-sxm.json: collectives[3].time_s[0]: expected >
0, got -1`.
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

#: largest size or count: torch uses 64-bit integers
MAX_INTEGER = 2**63 - 1
#: smallest and largest absolute value of a nonzero number; products and quotients of a few of them stay finite
LEAST, MOST = 1e-30, 1e30
#: largest length of a key in characters; names of modules are shorter
MAX_KEY = 1_000
#: digits of the longest integer that is parsed; longer ones exceed MAX_INTEGER anyway
_MOST_DIGITS = 100
#: characters of a value that a message shows
_MOST_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Above:
    """The number must be greater than `bound`."""

    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """The number must be at least `bound`."""

    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """The member is stored as its str(), read back by `parse`; `pattern` is its regular expression in a JSON Schema."""

    parse: Callable[[str], object]
    pattern: str


#: Count: how many, at least 1. Size: a size, or a position from 0. Amount: seconds, bytes or a share, not negative
Count = Annotated[int, AtLeast(1)]
Size = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The file and key path of a value, and the error that its mistakes raise."""

    origin: str
    error: type[TpplanError]
    path: str = ""

    def at(self, key: str | int) -> "Place":
        """The place of a member or an element of this value; an empty key is shown as `""`."""
        dot = "." if self.path else ""
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}{dot}" + (escaped(key) or '""')
        return dataclasses.replace(self, path=path)

    def fail(self, problem: str) -> NoReturn:
        """Raises the error with file, path and problem."""
        raise self.error(": ".join(part for part in (self.origin, self.path, problem) if part))


def read_json(path: Path, *, origin: str, error: type[TpplanError]) -> object:
    """The content of a JSON file. Raises `error` for wrong syntax, duplicate keys, NaN and infinities."""
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
        raise error(f"{origin}: not valid JSON: objects and arrays are nested too deep") from None
    except ValueError as cause:
        raise error(f"{origin}: not valid JSON: {cause}") from cause


def _integer(text: str) -> int | float:
    """The integer, or infinity for one with very many digits, which would take long to parse and is refused later."""
    return int(text) if len(text) <= _MOST_DIGITS else math.inf


def decode(cls: type[T], value: object, *, origin: str, error: type[TpplanError]) -> T:
    """A `cls` decoded from JSON data. Raises `error` with the path of the first wrong key."""
    return cast(T, _decode(cls, value, Place(origin=origin, error=error)))


def encode(value: object) -> object:
    """JSON data of a dataclass, the inverse of decode: None members left out, tuples as lists, enums as text."""
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
    """Decodes a value by its declared type."""
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
    """Raises the error for a key that is too long or not valid Unicode."""
    text = str(key)
    if len(text) > MAX_KEY:
        place.at(text[:_MOST_SHOWN] + "...").fail(f"a key of {len(text)} characters: expected at most {MAX_KEY}")
    _check_unicode(text, place)


def _check_unicode(text: str, place: Place) -> None:
    """Raises the error for a lone surrogate, which JSON can express and UTF-8 cannot."""
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
    """The message, shortened where it repeats a long value."""
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
    """The number as a float. Raises the error unless it is finite and either 0 or between LEAST and MOST in size."""
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
    """The JSON type of a value, with the value where it is a scalar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {dict: "an object", list: "an array", tuple: "an array", str: "text", int: "an integer", float: "a number"}
    name = names.get(type(value), type(value).__name__)
    return f"{name} {_shown(value)}" if isinstance(value, int | float | str) else name


def _shown(value: int | float | str) -> str:
    """A scalar as a message shows it, shortened where it is long."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"of {value.bit_length()} bits"  # in decimal it could have more digits than Python writes
    shown = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= _MOST_SHOWN + 2 else shown[:_MOST_SHOWN] + "..."

"""Makes text from files safe to print on a terminal: characters that would move the cursor, set colours, or hide or
reorder text become escapes (`\\x1b`), as Python writes them."""

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar, cast

T = TypeVar("T")

#: control characters (C0, DEL, C1), direction marks, zero-width characters, line separators, surrogates, tags
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e0fff]"
)


def escaped(text: str, *, keep: str = "") -> str:
    """The text with every hidden character replaced by its escape, except the characters in `keep`."""
    return _HIDDEN.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def escaped_lines(text: str) -> str:
    """The text with hidden characters escaped; line ends and tabs are kept."""
    return escaped(text, keep="\n\t")


def escaped_data(value: T) -> T:
    """A copy of a dataclass, mapping or tuple with all text in it escaped, including keys and line ends."""
    return cast(T, _escaped_data(value))


def _escaped_data(value: object) -> object:
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, tuple):
        return tuple(map(_escaped_data, value))
    if isinstance(value, Mapping):
        return {_escaped_data(key): _escaped_data(member) for key, member in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: made for name, own in members.items() if (made := _escaped_data(own)) != own}
        return dataclasses.replace(value, **changed) if changed else value
    return value

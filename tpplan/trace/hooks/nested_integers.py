"""Integers inside a module's attributes, by path, and copies of attributes in which they are others.

A path is written as Python's code behind `self.` would be: `heads`, `config.num_heads`, `sizes["h"]`, `axes[0][1]`.
Each part is an attribute of an object, a key of a dict (a string or an integer), or an index of a list or tuple. Only
plain data is entered: tuples, lists, dicts, and objects of classes written in Python that are created without
arguments (dataclasses and configurations); no module, tensor, function, class, or enum.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

#: an attribute ("heads", False), a key or an index ("h", True), (1, True)
Step: TypeAlias = tuple[str | int, bool]
Path: TypeAlias = tuple[Step, ...]

_STEP = re.compile(r'\.?(?P<name>[^\W\d]\w*)|\[(?P<index>-?\d+)\]|\["(?P<key>[^"\\]*)"\]')
#: containers with more members hold data, not sizes
_MOST_MEMBERS = 512


def parse_path(text: str) -> Path:
    """The steps of a path; () for a text that is none."""
    steps: list[Step] = []
    end = 0
    while end < len(text):
        found = _STEP.match(text, end)
        if found is None:
            return ()
        name, index, key = found["name"], found["index"], found["key"]
        steps.append((name, False) if name is not None else (int(index) if index is not None else key, True))
        end = found.end()
    return tuple(steps)


def path_text(path: Path) -> str:
    """The path as code behind `self.`."""
    return "".join(_step_text(key, is_item) for key, is_item in path).removeprefix(".")


def integers_within(value: object, path: Path, most_deep: int) -> Iterator[tuple[Path, int]]:
    """Yields integers at most `most_deep` steps inside a value that stands at `path`, and their paths."""
    if type(value) is int:
        yield path, value
    elif most_deep > 0 and (members := _members(value)) is not None and len(members) <= _MOST_MEMBERS:
        for step, inner in members.items():
            if parse_path(_step_text(*step)) == (step,):
                yield from integers_within(inner, (*path, step), most_deep - 1)


def value_at(value: object, path: Path) -> object:
    """The object at a path inside a value; None where there is none."""
    for step in path:
        value = (_members(value) or {}).get(step)
    return value


@dataclass(frozen=True, slots=True)
class Copied:
    """A container on the way to an integer, its copy, and the members of both when it was copied."""

    container: object
    copy: object
    members: Mapping[Step, object]
    copied_members: Mapping[Step, object]

    def is_changed(self) -> bool:
        """True where a member of either is another object now, or was added or removed."""
        pairs = ((self.container, self.members), (self.copy, self.copied_members))
        return not all(_are_identical(_members(now) or {}, then) for now, then in pairs)


def with_integers(value: object, numbers: Mapping[Path, int], made: Callable[[Copied], None]) -> object:
    """A copy of a value with other integers at these paths inside it; what is on no path is shared with the value.

    `made` is called with each container that was copied.
    """
    if () in numbers:
        return numbers[()]
    members = dict(_members(value) or {})
    changed = dict(members)
    for step in dict.fromkeys(path[0] for path in numbers):
        inner = {path[1:]: number for path, number in numbers.items() if path[0] == step}
        changed[step] = with_integers(members[step], inner, made)
    copy = _copy(value, changed)
    made(Copied(value, copy, members, changed))
    return copy


def num_references(copied: Copied) -> int:
    """How many references to a copy there are."""
    return sys.getrefcount(copied.copy)


def _step_text(key: str | int, is_item: bool) -> str:
    if not is_item:
        return f".{key}"
    return f"[{key}]" if isinstance(key, int) else f'["{key}"]'


def _are_identical(now: Mapping[Step, object], then: Mapping[Step, object]) -> bool:
    return now.keys() == then.keys() and all(now[step] is then[step] for step in then)


def _members(value: object) -> dict[Step, Any] | None:
    """The members of a container or plain object, by step; None for anything else.

    Keys of dicts that are neither strings nor integers are left out of paths, not of copies (_copy).
    """
    if isinstance(value, list | tuple):
        return {(index, True): inner for index, inner in enumerate(value)} if _is_sequence(value) else None
    if not _is_plain(value):
        return None
    found: dict[Step, Any] = {(name, False): inner for name, inner in _attributes(value).items()}
    if isinstance(value, dict):
        found |= {(key, True): inner for key, inner in value.items()}
    return found


def _is_sequence(value: object) -> bool:
    return type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(type(value), "_make"))


def _is_plain(value: object) -> bool:
    """True for a dict, and an object whose whole state is its attributes."""
    if type(value) is dict or type(value) in (SimpleNamespace, Namespace):
        return True
    cls = type(value)
    if isinstance(value, nn.Module | Tensor | Enum | type) or cls.__module__ == "builtins":
        return False
    is_new_plain = cls.__new__ is (dict.__new__ if isinstance(value, dict) else object.__new__)
    return is_new_plain and all(_is_written_in_python(base) for base in cls.__mro__ if base not in (dict, object))


def _is_written_in_python(cls: type) -> bool:
    """True for a class made by a class statement: only these can be changed, and have all state in their attributes."""
    return bool(cls.__flags__ & _HEAP_TYPE) and "__module__" in vars(cls)


#: Py_TPFLAGS_HEAPTYPE of CPython's stable ABI
_HEAP_TYPE = 1 << 9


def _attributes(value: object) -> dict[str, Any]:
    """The attributes that an object has itself, in its __dict__ and its slots."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            own = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if own not in ("__dict__", "__weakref__") and hasattr(value, own):
                found[own] = getattr(value, own)
    return found


def _copy(value: Any, members: Mapping[Step, object]) -> object:
    """A container of the value's type with these members."""
    cls: Any = type(value)
    if isinstance(value, tuple):
        return tuple(members.values()) if cls is tuple else cls._make(members.values())
    if isinstance(value, list):
        return list(members.values())
    copy: Any = cls.__new__(cls)
    for (key, is_item), inner in members.items():
        if is_item:
            dict.__setitem__(copy, key, inner)
        elif key in getattr(value, "__dict__", ()):
            copy.__dict__[key] = inner
        else:
            object.__setattr__(copy, str(key), inner)
    return copy

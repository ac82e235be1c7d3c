"""Makes functions held by a copied model see the copy.

copy.deepcopy copies neither a function nor what it has closed over: a lambda on a module (an activation, a hook) of the
copy would read modules and weights of the original model. Here such functions are made anew, closed over the copies.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

#: types of attributes that are functions or may hold some
_HOLDING = (list, dict, tuple, functools.partial, types.FunctionType)


def rebind(copied: nn.Module, images: Mapping[int, Any]) -> None:
    """Makes functions that the modules of a copy hold see the copy.

    `images` are the copies by the id of their originals, as copy.deepcopy leaves them in its memo.
    """
    rebound = _Rebound(images)
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, _HOLDING) and value and (found := rebound.held(value)) is not value:
                module.__dict__[name] = found


class _Rebound:
    """Maps objects of the original model to those of the copy."""

    def __init__(self, images: Mapping[int, Any]) -> None:
        self._images = images
        #: (original, its image) by the original's id; holding the original keeps its id from being used again
        self._made: dict[int, tuple[Any, Any]] = {}
        #: containers of the copy that were visited, by id
        self._seen: dict[int, Any] = {}

    def held(self, value: Any) -> Any:
        """The image of an attribute of a copied module. Containers are copies already, functions in them are not."""
        if isinstance(value, list | dict):
            if id(value) in self._seen:
                return value
            self._seen[id(value)] = value
        match value:
            case list():
                value[:] = map(self.held, value)
            case dict():
                for key, item in list(value.items()):
                    found = self.held(item)
                    if found is not item:
                        value[key] = found
            case tuple() if type(value) is tuple:
                found = tuple(map(self.held, value))
                return value if all(a is b for a, b in zip(found, value, strict=True)) else found
            case functools.partial():
                function = self.held(value.func)
                return value if function is value.func else functools.partial(function, *value.args, **value.keywords)
            case types.FunctionType():
                return self.image(value)
        return value

    def image(self, value: Any) -> Any:
        """The image of an object that a function of the original has closed over; the object itself where it has
        none."""
        if id(value) in self._images:
            return self._images[id(value)]
        if id(value) in self._made:
            return self._made[id(value)][1]
        found = value
        self._made[id(value)] = (value, value)
        match value:
            case types.FunctionType():
                found = self._function(value)
            case types.MethodType():
                found = _changed(value, (value.__func__, value.__self__), self.image, types.MethodType)
            case functools.partial():
                parts = (value.func, value.args, value.keywords)
                found = _changed(value, parts, self.image, lambda f, args, named: functools.partial(f, *args, **named))
            case list() | tuple() if type(value) in (list, tuple):
                found = _changed(value, value, self.image, lambda *items: type(value)(items))
            case dict() if type(value) is dict:
                found = _changed(value, value.values(), self.image, lambda *items: dict(zip(value, items, strict=True)))
        self._made[id(value)] = (value, found)
        return found

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """The function with images in its cells and defaults; the function itself where none of them changes."""
        cells = function.__closure__ or ()
        if not cells and not function.__defaults__ and not function.__kwdefaults__:
            return function
        # The new function may be in one of its own cells: a function that calls itself.
        empty = tuple(types.CellType() for _ in cells)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, empty or None
        )
        self._made[id(function)] = (function, made)
        is_changed = False
        for cell, own in zip(cells, empty, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            own.cell_contents = self.image(content)
            is_changed |= own.cell_contents is not content and own.cell_contents is not made
        defaults, named = self.image(function.__defaults__), self.image(function.__kwdefaults__)
        is_changed |= defaults is not function.__defaults__ or named is not function.__kwdefaults__
        if not is_changed:
            self._made[id(function)] = (function, function)
            return function
        made.__defaults__, made.__kwdefaults__ = defaults, named
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        made.__dict__.update(function.__dict__)
        return made


def _changed(value: Any, parts: Any, image: Callable[[Any], Any], make: Callable[..., Any]) -> Any:
    """make(*images of the parts), or the value itself where every part is its own image."""
    parts = tuple(parts)
    found = tuple(map(image, parts))
    return value if all(a is b for a, b in zip(found, parts, strict=True)) else make(*found)

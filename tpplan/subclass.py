"""Subclasses made at run time, which print, copy and pickle as the class they come from.

Pickle finds a class by its name, and such a class has none of its own. It knows its recipe instead: the function that
made it, the class it was made from, which may be another of its kind, and the arguments.
"""

import copyreg
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

#: where a module of a generated class keeps its part of a plan; in __dict__, so neither a submodule nor in state_dict
SITE = "_tpplan_site"
_RECIPE = "_tpplan_recipe"


def subclass(
    cls: type, namespace: Mapping[str, Any], maker: Callable[..., type], arguments: tuple[Hashable, ...] = ()
) -> type:
    """A subclass of cls with these members. `maker(cls, *arguments)` must make it again; cache it there."""

    def reduce_ex(self: object, protocol: Any) -> tuple[Any, ...]:
        reduced = super(generated, self).__reduce_ex__(protocol)  # type: ignore[arg-type]  # made by its metaclass
        if type(self) is not generated or not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return cast(tuple[Any, ...], reduced)
        return _new, (_recipe(generated),), *reduced[2:]

    named = {attribute: getattr(cls, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    own = {_RECIPE: (maker, cls, arguments), "__reduce_ex__": reduce_ex}
    generated: type = type(cls)(cls.__name__, (cls,), {**namespace, **named, **own})
    return generated


def is_generated(cls: type) -> bool:
    """True for a class that `subclass` made."""
    return _RECIPE in cls.__dict__


def _recipe(cls: type) -> object:
    """The class itself where it can be found by name, else how to make it."""
    if not is_generated(cls):
        return cls
    maker, base, arguments = cls.__dict__[_RECIPE]
    return maker, _recipe(base), arguments


def _new(recipe: object) -> object:
    cls: Any = _made(recipe)
    return cls.__new__(cls)


def _made(recipe: Any) -> type:
    if isinstance(recipe, type):
        return recipe
    maker, base, arguments = recipe
    return cast(type, maker(_made(base), *arguments))

"""Classes generated at run time, by which a plan gives modules another forward.

A generated class has the name of the class it is made from, and its instances print and copy like that class's. Pickle
finds a class by its name, so an instance is pickled by its class's recipe instead: the function that made the class,
the class it was made from (which may be generated, too), and the arguments.

A forward that code has put on the module itself would hide that of a generated class, and is therefore folded into a
class first.
"""

import copyreg
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

from torch import nn


def fold_forwards(model: nn.Module) -> None:
    """Moves each forward that is an attribute of a module into a class generated for the module."""
    for module in model.modules():
        forward = module.__dict__.pop("forward", None)
        if forward is not None:
            module.__class__ = patched_class(type(module), forward)


def patched_class(cls: type[nn.Module], function: Callable[..., Any]) -> type[nn.Module]:
    """The subclass of cls, under the name of cls, whose forward calls the function, with the function's signature."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    taken = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = taken.replace(parameters=[own, *taken.parameters.values()])  # type: ignore[attr-defined]
    return subclass(cls, {"forward": forward}, patched_class, (function,))


#: the key of a module's __dict__ for the module's part of a plan; not an attribute that nn.Module would register
BINDING = "_tpplan_site"
_RECIPE = "_tpplan_recipe"


def subclass(
    cls: type, namespace: Mapping[str, Any], maker: Callable[..., type], arguments: tuple[Hashable, ...] = ()
) -> type:
    """A subclass of cls with the members of `namespace`, picklable. maker(cls, *arguments) must make the same class
    again: `maker` calls this function, and caches its result."""

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
    """A picklable description of a class: the class itself, or for a generated one (maker, recipe of its base,
    arguments)."""
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

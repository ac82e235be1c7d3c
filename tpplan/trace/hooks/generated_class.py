"""Classes generated at run time: a forward of a module's own, folded into a class made for that module.

A generated class prints, copies and pickles as the class it comes from. Pickle finds a class by its name, which such a
class has none of its own; it is pickled by its recipe instead: the function that made it, the class it was made from
(which may be generated, too), and the arguments.

Classes generated for a plan replace the forward of a module's class. A forward that code has put on the module itself
would hide theirs, and is therefore folded into a class first.
"""

import copyreg
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

from torch import nn


def fold_forwards(model: nn.Module) -> None:
    """From now on no module has a forward of its own. What runs is the same."""
    for module in model.modules():
        forward = module.__dict__.pop("forward", None)
        if forward is not None:
            module.__class__ = patched_class(type(module), forward)


def patched_class(cls: type[nn.Module], function: Callable[..., Any]) -> type[nn.Module]:
    """The subclass of cls with this for a forward, which takes what the function takes. It bears cls's own name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    taken = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = taken.replace(parameters=[own, *taken.parameters.values()])  # type: ignore[attr-defined]
    return subclass(cls, {"forward": forward}, patched_class, (function,))


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

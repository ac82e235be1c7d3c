"""A forward that code has put on a module, and not on its class, as a class's: of one made for that module.

Classes made for a plan replace their class's forward, and one on the module itself would hide that.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from tpplan.subclass import subclass


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

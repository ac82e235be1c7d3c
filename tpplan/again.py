"""Code that torch.utils.checkpoint runs again in backward, by when its module's forward is over: what surrounded it
there, such as plain tensors in place of weights, surrounds it then, too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction

#: makes what surrounds code once
Surroundings = Callable[[], contextlib.AbstractContextManager[object]]

#: torch's function for checkpoints that are not reentrant, which it looks up for each
_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def surrounded_again(surroundings: Surroundings) -> Iterator[None]:
    """Whatever is checkpointed while this lasts runs in new surroundings() each time, the first included."""
    with remembered_again(lambda: surroundings):
        yield


@contextlib.contextmanager
def remembered_again(remember: Callable[[], Surroundings]) -> Iterator[None]:
    """The same, with the surroundings that remember() gives where the checkpoint is made."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        surroundings = remember()

        def run(*args: Any, **kwargs: Any) -> Any:
            with surroundings():
                return function(*args, **kwargs)

        return run

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(within(function), *args)  # type: ignore[no-untyped-call]

    def generate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(within(function), *args, **kwargs)

    reentrant, own_apply = CheckpointFunction.apply, vars(CheckpointFunction).get("apply")
    generator = vars(checkpoints)[_WITHOUT_REENTRANT]
    CheckpointFunction.apply = apply  # type: ignore[method-assign]
    setattr(checkpoints, _WITHOUT_REENTRANT, generate)
    try:
        yield
    finally:
        setattr(checkpoints, _WITHOUT_REENTRANT, generator)
        if own_apply is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own_apply  # type: ignore[method-assign]

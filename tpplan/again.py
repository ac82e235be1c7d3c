"""Code that torch.utils.checkpoint runs again in backward, by when its module's forward is over: what surrounded it
there, such as plain tensors in place of weights, surrounds it then, too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tpplan.torch_internals.checkpoints import reentrant_run_by, run_again_as

#: makes what surrounds code once
Surroundings = Callable[[], contextlib.AbstractContextManager[object]]


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

    def run_both(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(within(function), *args)

    with reentrant_run_by(run_both), run_again_as(within):
        yield

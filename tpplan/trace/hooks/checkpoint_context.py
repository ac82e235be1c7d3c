"""What surrounds code that torch.utils.checkpoint runs again in backward, when its module's forward is over.

A context manager that was entered around the first run (plain local tensors in place of weights, for example) is
entered around the second run, too.

Reentrant checkpoints (use_reentrant=True) run as non-reentrant ones where FSDP2 holds the model. They start a backward
within the backward, and FSDP2 takes the end of the inner one for the end of the whole: of a layer that is called twice
it reduces part of the gradients, without a word (torch 2.13). Non-reentrant checkpoints keep as little, run the same
code again, and have one backward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpplan.torch_internals import pytree
from tpplan.torch_internals.checkpoints import reentrant_run_by, run_again_as
from tpplan.trace.hooks.generated_class import subclass

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


def leave_reentry(model: nn.Module) -> None:
    """From now on no checkpoint that is made in the model's forward is reentrant."""
    model.__class__ = _one_backward_class(type(model))  # type: ignore[arg-type]


@functools.cache
def _one_backward_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls in whose forward no checkpoint is reentrant. It bears cls's own name."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which makes one backward of either kind
            return cls.forward(self, *args, **kwargs)
        with without_reentry():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward}, _one_backward_class)


@contextlib.contextmanager
def without_reentry() -> Iterator[None]:
    """While it lasts no checkpoint is reentrant, nor when what is checkpointed runs again, which may be later."""
    with remembered_again(lambda: without_reentry), reentrant_run_by(_checkpointed):
        yield


def _checkpointed(
    _reentrant: Callable[..., Any], function: Callable[..., Any], preserves_rng_state: bool, *given: Any
) -> Any:
    """What a reentrant checkpoint gives: without a gradient where nothing that it is given has one, nor in what
    stands in a list or dict of its results."""
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
        with torch.no_grad():
            return function(*given)
    results = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=preserves_rng_state)
    return tuple(map(_as_result, results)) if isinstance(results, tuple) else _as_result(results)


def _as_result(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

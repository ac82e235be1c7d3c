"""Runs recomputed code under the context managers its first run was under (plain local weights, for example).

torch.utils.checkpoint runs code again in backward, when the forward of the code's module is over.

Where FSDP2 holds the model, reentrant checkpoints (use_reentrant=True) run as non-reentrant ones. A reentrant
checkpoint starts a backward within the backward, and FSDP2 takes the end of the inner one for the end of the outer one:
of a layer that is called twice it silently reduces only part of the gradients (torch 2.13). Non-reentrant checkpoints
keep as little, run the same code again, and have one backward.
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

#: makes a context manager to run code in, a new one for each run
ContextFactory = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def in_checkpoint_replay(make_context: ContextFactory) -> Iterator[None]:
    """Runs code that is checkpointed inside under a new make_context() each time, at first and again in backward."""
    with in_checkpoint_replay_as(lambda: make_context):
        yield


@contextlib.contextmanager
def in_checkpoint_replay_as(remember: Callable[[], ContextFactory]) -> Iterator[None]:
    """Runs code that is checkpointed inside under a new make_context() each time, at first and again in backward, where
    make_context = remember() when the checkpoint is made."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        make_context = remember()

        def run(*args: Any, **kwargs: Any) -> Any:
            with make_context():
                return function(*args, **kwargs)

        return run

    def run_both(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(within(function), *args)

    with reentrant_run_by(run_both), run_again_as(within):
        yield


def leave_reentry(model: nn.Module) -> None:
    """From now on every checkpoint that is made in the model's forward is non-reentrant."""
    model.__class__ = _one_backward_class(type(model))  # type: ignore[arg-type]


@functools.cache
def _one_backward_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under the name of cls, in whose forward every checkpoint is non-reentrant."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile makes one backward of either kind
            return cls.forward(self, *args, **kwargs)
        with without_reentry():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward}, _one_backward_class)


@contextlib.contextmanager
def without_reentry() -> Iterator[None]:
    """Makes every checkpoint inside non-reentrant, also those made when checkpointed code runs again in backward."""
    with in_checkpoint_replay_as(lambda: without_reentry), reentrant_run_by(_checkpointed):
        yield


def _checkpointed(
    _reentrant: Callable[..., Any], function: Callable[..., Any], preserves_rng_state: bool, *given: Any
) -> Any:
    """The results of a non-reentrant checkpoint with the gradients of a reentrant one: none where no argument carries
    one, and none for tensors in a list or dict among the results."""
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
        with torch.no_grad():
            return function(*given)
    results = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=preserves_rng_state)
    return tuple(map(_as_result, results)) if isinstance(results, tuple) else _as_result(results)


def _as_result(result: Any) -> Any:
    """A result of a reentrant checkpoint: a tensor as it is, tensors in containers detached."""
    if isinstance(result, Tensor):
        return result
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

"""Reentrant checkpoints of a model's own code, run as those that are not, where FSDP2 holds the model.

A reentrant checkpoint (use_reentrant=True) starts a backward within the backward. FSDP2 takes the end of the inner one
for the end of the whole, and reduces what is there: of a layer that is called twice, gradients were wrong without a
word (torch 2.13). The other kind keeps as little, runs the same code again, and has one backward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpplan.again import remembered_again
from tpplan.subclass import subclass
from tpplan.torch_internals import pytree
from tpplan.torch_internals.checkpoints import reentrant_run_by


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

"""Both kinds of torch.utils.checkpoint, reentrant and non-reentrant, by the functions that they look up at each call.

Models import `checkpoint` by name, so replacing `checkpoint` itself would not reach them.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tpplan.torch_internals.autograd import running_backward
from tpplan.torch_internals.probes import Probe

#: the function that a checkpoint runs, and runs again in backward
Forward = Callable[..., Any]
#: torch's generators that run a non-reentrant checkpoint, by release, the newest first; they take the forward
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


def is_reentrant_checkpoint(function: type[torch.autograd.Function]) -> bool:
    """True for the autograd.Function by which a reentrant checkpoint runs."""
    return function is CheckpointFunction


def keeps_inputs(function: type[torch.autograd.Function]) -> bool:
    """True for the autograd.Functions that compute nothing, by which a non-reentrant checkpoint keeps its inputs (torch
    2.11's _NoopSaveInputs)."""
    return function.__module__ == checkpoints.__name__ and function is not CheckpointFunction


@contextlib.contextmanager
def reentrant_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """Makes each reentrant checkpoint run(checkpoint, forward, preserves_rng_state, *arguments), where `checkpoint` is
    torch's own and takes (forward, preserves_rng_state, *arguments)."""
    before, own = CheckpointFunction.apply, vars(CheckpointFunction).get("apply")
    CheckpointFunction.apply = functools.partial(run, before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own  # type: ignore[method-assign]


@contextlib.contextmanager
def run_again_as(replaced: Callable[[Forward], Forward]) -> Iterator[None]:
    """Makes each non-reentrant checkpoint run replaced(forward) in place of `forward` when it recomputes in backward;
    the first run stays."""
    with _generated_by(lambda generator, forward, *args, **kwargs: generator(replaced(forward), *args, **kwargs)):
        yield


@contextlib.contextmanager
def unfinished_ended() -> Iterator[None]:
    """At its end, closes non-reentrant checkpoints that began inside and whose forward raised, the last first.

    torch before 2.13 leaves the hooks of such a checkpoint on saved tensors in place for as long as the exception is
    kept, and tensors that are saved meanwhile are lost.
    """
    begun: list[Generator[Any, Any, Any]] = []

    def noted(generator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun.append(generator(*args, **kwargs))
        return begun[-1]

    with _generated_by(noted):
        try:
            yield
        finally:
            for one in reversed(begun):
                one.close()


@contextlib.contextmanager
def _generated_by(make: Callable[..., Any]) -> Iterator[None]:
    """Makes the generator of each non-reentrant checkpoint make(torch's own function for it, *arguments)."""
    name = next(name for name in _GENERATORS if name in vars(checkpoints))
    generator = vars(checkpoints)[name]
    setattr(checkpoints, name, functools.partial(make, generator))
    try:
        yield
    finally:
        setattr(checkpoints, name, generator)


# ---- probes


def _reentrant() -> bool:
    """The replaced forward runs both times, at first and in backward, and only inside the context."""
    x = torch.ones(1, requires_grad=True)
    runs: list[bool] = []

    def run(before: Callable[..., Any], forward: Forward, *rest: Any) -> Any:
        def noted(*args: Any) -> Any:
            runs.append(running_backward() >= 0)
            return forward(*args)

        return before(noted, *rest)

    with reentrant_run_by(run):
        checkpoint(torch.sin, x, use_reentrant=True).backward()
    checkpoint(torch.sin, x, use_reentrant=True).backward()
    return runs == [False, True] and "apply" not in vars(CheckpointFunction)


def _not_reentrant() -> bool:
    """The replaced forward runs in backward only, even where the context is over by then."""
    x = torch.ones(1, requires_grad=True)
    runs: list[bool] = []

    def replaced(forward: Forward) -> Forward:
        def noted(*args: Any) -> Any:
            runs.append(running_backward() >= 0)
            return forward(*args)

        return noted

    with run_again_as(replaced):
        y = checkpoint(torch.sin, x, use_reentrant=False)
    y.backward()
    checkpoint(torch.sin, x, use_reentrant=False).backward()
    return runs == [True] and x.grad is not None


def _raised() -> bool:
    """Tensors saved after a checkpoint whose forward raised are there in backward, while the exception is kept."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(str(x.sin().shape))

    x, kept = torch.ones(1, requires_grad=True), None
    try:
        with unfinished_ended():
            checkpoint(fail, x, use_reentrant=False)
    except RuntimeError as error:
        kept = error
    torch.autograd.backward(x.exp())
    return kept is not None and x.grad is not None


def _wrapper() -> bool:
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    x = torch.ones(1, 1, requires_grad=True)
    wrapper.checkpoint_wrapper(torch.nn.Linear(1, 1))(x).sum().backward()
    return x.grad is not None


PROBES = (
    Probe(
        name="checkpointed modules",
        uses="torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        needed_for="files that `tpplan export` writes",
        works=_wrapper,
    ),
    Probe(
        name="reentrant checkpoints",
        uses="torch.utils.checkpoint.CheckpointFunction.apply, replaced",
        needed_for="models that checkpoint their layers, under FSDP2",
        works=_reentrant,
    ),
    Probe(
        name="non-reentrant checkpoints",
        uses=f"torch.utils.checkpoint.{_GENERATORS[0]} or {_GENERATORS[1]}, replaced",
        needed_for="models that checkpoint their layers",
        works=_not_reentrant,
    ),
    Probe(
        name="checkpoints whose forward raises",
        uses=f"torch.utils.checkpoint.{_GENERATORS[0]} or {_GENERATORS[1]}, ended",
        needed_for="going on after a trace that stopped in a checkpoint",
        works=_raised,
    ),
)

"""torch.utils.checkpoint, both kinds, by the functions that it looks up at each call.

Code imports `checkpoint` by name, so that replacing that would not reach it.
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

#: a forward that is checkpointed
Forward = Callable[..., Any]
#: of a checkpoint that is not reentrant, torch's generator by release, the newest first: it takes the forward and runs
#: it again in backward
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


def is_reentrant_checkpoint(function: type[torch.autograd.Function]) -> bool:
    """True for the autograd function that a reentrant checkpoint is."""
    return function is CheckpointFunction


def keeps_inputs(function: type[torch.autograd.Function]) -> bool:
    """True for the autograd functions by which a checkpoint that is not reentrant keeps its inputs (torch 2.11's
    _NoopSaveInputs): they compute nothing."""
    return function.__module__ == checkpoints.__name__ and function is not CheckpointFunction


@contextlib.contextmanager
def reentrant_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a reentrant checkpoint is run(checkpoint, forward, preserves_rng_state, *arguments), where
    `checkpoint` is what it was before and takes the rest."""
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
    """While it lasts, a forward that is checkpointed without reentrance runs as replaced(forward) when it runs again in
    backward. The first run is the forward's own."""
    with _generated_by(lambda generator, forward, *args, **kwargs: generator(replaced(forward), *args, **kwargs)):
        yield


@contextlib.contextmanager
def unfinished_ended() -> Iterator[None]:
    """At its end, checkpoints without reentrance that began within, and whose forward raised, are ended, the last
    first. torch before 2.13 leaves their hooks on what autograd saves in place for as long as somebody keeps the
    exception, and what is saved meanwhile is lost."""
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
    """While it lasts, the generator of a checkpoint without reentrance is make(torch's function for it, *arguments)."""
    name = next(name for name in _GENERATORS if name in vars(checkpoints))
    generator = vars(checkpoints)[name]
    setattr(checkpoints, name, functools.partial(make, generator))
    try:
        yield
    finally:
        setattr(checkpoints, name, generator)


# ---- probes


def _reentrant() -> bool:
    """Both runs of a reentrant checkpoint are those of the replaced forward; without the replacement it is torch's."""
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
    """The second run is that of the replaced forward, in a backward that comes after the replacement's end."""
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
    """What is saved after a checkpoint whose forward raised is there in backward, while the exception is kept."""

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
        name="modules that are checkpointed",
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
        name="checkpoints that are not reentrant",
        uses=f"torch.utils.checkpoint.{_GENERATORS[0]} or {_GENERATORS[1]}, replaced",
        needed_for="models that checkpoint their layers",
        works=_not_reentrant,
    ),
    Probe(
        name="checkpoints whose forward raises",
        uses=f"torch.utils.checkpoint.{_GENERATORS[0]} or {_GENERATORS[1]}, ended",
        needed_for="planning on after a trace that stopped in a checkpoint",
        works=_raised,
    ),
)

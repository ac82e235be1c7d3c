"""Both kinds of torch.utils.checkpoint, reentrant and non-reentrant, by the functions that they look up at each call.

Models import `checkpoint` by name, so replacing `checkpoint` itself would not reach them.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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


class KeptResult:
    """A tensor that a selective checkpoint keeps from forward to its replay."""

    __slots__ = ("_index", "_table")

    def __init__(self, table: Any, index: int) -> None:
        self._table, self._index = table, index

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        found: torch.Tensor = self._table[self._index].val
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor in its place, which must not be written to until the replay."""
        self._table[self._index] = _VersionWrapper(tensor)

    def put_made(self, make: Callable[[], torch.Tensor]) -> None:
        """Keeps nothing in its place, and a tensor is made for the replay."""
        self._table[self._index] = _Made(make)


@dataclass(frozen=True, slots=True)
class _Made:
    """In the place of torch's holder of a kept tensor."""

    make: Callable[[], torch.Tensor]

    def get_val(self, _allow_cache_entry_mutation: object) -> torch.Tensor:
        """The tensor for the replay."""
        return self.make()


class KeptResults:
    """The results that a selective checkpoint has kept so far."""

    __slots__ = ("_by_op",)

    def __init__(self, by_op: Mapping[Any, Any]) -> None:
        self._by_op = by_op

    def last(self, op: Any) -> KeptResult | None:
        """The result of an op's last call; None where it is no tensor, or is not kept."""
        if not (table := self._by_op.get(op)):
            return None
        index = next(reversed(table)) if isinstance(table, Mapping) else len(table) - 1
        is_tensor = isinstance(table[index], _VersionWrapper) and isinstance(table[index].val, torch.Tensor)
        return KeptResult(table, index) if is_tensor else None


def selective_contexts(policy_of: Callable[[KeptResults], Callable[..., CheckpointPolicy]]) -> tuple[Any, Any]:
    """The contexts of a selective checkpoint's forward and of its replay, by the policy that is made of the results
    that they keep."""
    policies: list[Callable[..., CheckpointPolicy]] = []

    def policy(*args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policies[0](*args, **kwargs)

    create: Callable[..., tuple[Any, Any]] = create_selective_checkpoint_contexts
    contexts = create(policy)
    policies.append(policy_of(KeptResults(contexts[0].storage)))
    return contexts


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


def _selective() -> bool:
    """A tensor that is put in the place of a kept result is the one that the replay gets."""
    kept: list[KeptResults] = []
    products: list[torch.Tensor] = []

    def policy_of(results: KeptResults) -> Callable[..., CheckpointPolicy]:
        kept.append(results)
        mm, modes = torch.ops.aten.mm.default, CheckpointPolicy
        return lambda _, op, *args, **kwargs: modes.MUST_SAVE if op is mm else modes.PREFER_RECOMPUTE

    def forward(x: torch.Tensor) -> torch.Tensor:
        first, second = x @ x, x @ (x + 1)
        if not products:
            result = kept[0].last(torch.ops.aten.mm.default)
            assert result is not None
            result.put_made(lambda: torch.full((2, 2), 7.0))
            assert kept[0].last(torch.ops.aten.sin.default) is None
        products.extend((first.detach(), second.detach()))
        return (first * second).sin()

    x = torch.eye(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False, context_fn=lambda: selective_contexts(policy_of)).sum().backward()
    return torch.equal(products[2], torch.eye(2)) and torch.equal(products[3], torch.full((2, 2), 7.0))


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
        name="selective checkpoints",
        uses="create_selective_checkpoint_contexts(...)[0].storage, torch.utils.checkpoint._VersionWrapper",
        needed_for="letting go of products under selective recomputation once they are summed over ranks",
        works=_selective,
    ),
    Probe(
        name="checkpoints whose forward raises",
        uses=f"torch.utils.checkpoint.{_GENERATORS[0]} or {_GENERATORS[1]}, ended",
        needed_for="going on after a trace that stopped in a checkpoint",
        works=_raised,
    ),
)

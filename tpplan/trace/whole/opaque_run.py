"""Observes a module that runs whole, by running it once on fake tensors, forward and backward.

The run gives the shapes of the module's outputs, and the operators below autograd by which the module is priced.
Functions handed to torch.while_loop and torch.cond run once each, whatever the data would say, and are priced once.
"""

import contextlib
import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tpplan.core.errors import first_line
from tpplan.core.graph import joined_name
from tpplan.torch_internals import pytree
from tpplan.torch_internals.checkpoints import unfinished_ended
from tpplan.torch_internals.fakes import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    flex_attention_anywhere,
)
from tpplan.torch_internals.tensors import gradient_hooks, storage_key, version_of
from tpplan.trace.answers.concrete_values import raising_line
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.answers.planned_device import as_planned, machine_as_planned
from tpplan.trace.hooks.checkpoint_context import ContextFactory, in_checkpoint_replay
from tpplan.trace.whole.backward_code import backward_code_noted, modules_noted, unnoted
from tpplan.trace.whole.guessed_values import GuessedValues, is_question, most_asked
from tpplan.trace.whole.op_log import ForeignError, OpLog, num_bytes, on_meta
from tpplan.trace.whole.opaque import PLAIN, OpaqueCall, OpaqueTrace, OpRecord, described, running_modes
from tpplan.trace.whole.opaque_fakes import ForeignReads, UnobservableError, fake, modes_of, on_fakes
from tpplan.trace.whole.row_origins import RowOrigins

logger = logging.getLogger(__name__)


def observe(module: nn.Module, call: OpaqueCall, *, is_untouched: bool = False) -> OpaqueTrace:
    """Observes one call of the module: its outputs, operators and memory, by forward and backward on fake tensors.

    is_untouched: the module is the whole model, whose parameters the plan leaves as they are; its code may then read
    parameters past their modules, and replace them. Raises UnobservableError where the module cannot be one operator.
    """
    try:
        try:
            return _observed(module, call, None, is_untouched)
        except Exception as error:
            if not is_question(error):
                raise
            return _observed_guessing(module, call, is_untouched)
    except UnobservableError:
        raise
    except Exception as error:
        if (failure := own_failure(error, has_run=False)) is not None:
            raise failure from error
        line = raising_line(error)
        where = f" at {line}" if line else ""
        raise UnobservableError(f"{type(error).__name__}: {first_line(error)}{where}") from error


def given_by(module: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """The outputs of a module for arguments with tensors on the meta device; None where it cannot be one operator."""
    call = OpaqueCall(
        module="",
        kind="",
        leaves=tuple(leaves),
        spec=spec,
        weights=dict(module.named_parameters()),
        modes=running_modes(),
    )
    try:
        seen = observe(module, call)
    except UnobservableError as error:
        logger.info("a module gives what its code does not tell from shapes alone: %s", error)
        return None
    return pytree.tree_unflatten(list(seen.outputs), seen.spec)


def _observed_guessing(module: nn.Module, call: OpaqueCall, is_untouched: bool) -> OpaqueTrace:
    """A call observed with guessed values, those that rows meet evenly. Raises UnobservableError where what the module
    returns depends on the guess."""
    most = most_asked(call.weights.values())
    guesses = GuessedValues(most)
    even = _observed(module, call, guesses, is_untouched)
    for others in (GuessedValues(most, is_even=False), GuessedValues(most, are_true=False)):
        try:
            other = _observed(module, call, others, is_untouched)
        except UnobservableError:
            raise
        except Exception as error:  # the module's own code may refuse what it asks about
            if is_question(error):
                raise
            logger.info("module %s refuses a guess: %s", call.module or "the root", first_line(error))
            continue
        if even.spec != other.spec or list(map(described, even.outputs)) != list(map(described, other.outputs)):
            raise UnobservableError("data decides the sizes, or the numbers, that it returns")
    return replace(even, guessed=tuple(guesses.asking))


def _observed(module: nn.Module, call: OpaqueCall, guesses: GuessedValues | None, is_untouched: bool) -> OpaqueTrace:
    try:
        return _observe(module, call, lambda _: contextlib.nullcontext(), guesses, is_untouched)
    except ForeignError:
        own = is_untouched
        return _observe(module, call, lambda fakes: ForeignReads(fakes if own else {}), guesses, is_untouched)


def _observe(
    module: nn.Module,
    call: OpaqueCall,
    reads: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[object]],
    guesses: GuessedValues | None,
    is_untouched: bool,
) -> OpaqueTrace:
    """Does the work of observe; reads(fake weights) is the context that deals with tensors read past the modules."""
    environment = ShapeEnv()
    with (
        FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True),
        modes_of(call),
        flex_attention_anywhere(),
    ):
        weights = {name: fake(weight) for name, weight in call.weights.items()}
        leaves = [fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        buffers = {name: fake(buffer) for name, buffer in module.named_buffers()}
        make_context = functools.partial(on_fakes, module, weights | buffers, reads(weights))
        backward_code: dict[str, None] = {}
        again: list[nn.Module] = []
        with backward_code_noted(backward_code):
            ran = _run_forward(
                module, call, environment, weights, leaves, buffers, make_context, guesses, is_untouched, backward_code
            )
        # The forward's frame is gone: of its tensors, those are alive that autograd keeps.
        log, kept = ran.log, ran.log.made.live_bytes
        keeps, keeps_results = _living(ran.given), _living(ran.results)
        kept_results = {ran.results[i].key: ran.results[i].num_bytes for i in keeps_results}
        log.restart()
        if ran.ends and any(isinstance(x, Tensor) and x.requires_grad for x in (*leaves, *weights.values())):
            # Code in backward may run modules, and read what the forward has left on them.
            with make_context(), _with_attributes(ran.attributes), _guessing(guesses), log, modules_noted(again):
                torch.autograd.backward(tuple(ran.ends), [torch.empty_like(like) for like in ran.ends.values()])
    return OpaqueTrace(
        key=_digest(type(module), call, ran.outputs, ran.forward, log.ran),
        outputs=ran.outputs,
        spec=ran.spec,
        forward=ran.forward,
        backward=tuple(log.ran),
        keeps=keeps,
        keeps_results=keeps_results,
        kept_bytes=max(0, kept - sum(kept_results.values())),
        forward_bytes=ran.forward_bytes,
        backward_bytes=log.made.peak_bytes - kept,
        bodies=tuple(sorted(log.bodies)),
        is_bounded=log.is_bounded,
        written=ran.written,
        backward_code=tuple(backward_code),
        buffers=ran.buffers,
        runs_again=bool(again and backward_code),  # torch's higher-order operators run modules there too
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardRun:
    """The results and effects of a forward on fake tensors. Holds none of its tensors but `parameters`.

    `outputs` are on the meta device, `ends` the outputs' gradient edges, each with a fake of its gradient's shape;
    `given` and `results` watch the storages of arguments and outputs; forward_bytes is the most that was held beyond
    what is alive at the end; `written` are the names of weights that were changed or replaced.
    """

    log: OpLog
    forward: tuple[OpRecord, ...]
    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    ends: Mapping[GradientEdge, Tensor]
    given: list["_Watched"]
    results: list["_Watched"]
    forward_bytes: int
    written: frozenset[str]
    #: as in OpaqueTrace
    buffers: tuple[tuple[str, bool], ...]
    #: the module's parameters after the forward, which as in training stay alive
    parameters: Mapping[str, nn.Parameter]
    #: each module's attributes after the forward, where that puts code of its own into backward
    attributes: Sequence[tuple[nn.Module, dict[str, Any]]]


def _run_forward(
    module: nn.Module,
    call: OpaqueCall,
    environment: ShapeEnv,
    weights: Mapping[str, Tensor],
    leaves: list[Any],
    buffers: Mapping[str, Tensor],
    make_context: ContextFactory,
    guesses: GuessedValues | None,
    is_untouched: bool,
    backward_code: Mapping[str, None],
) -> _ForwardRun:
    """Runs the module's forward on fake leaves. Raises UnobservableError for what no operator gives or does."""
    # Code may write to its arguments, which is an error of autograd's for leaves; so it is given clones.
    given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if guesses is not None:
        for place, size in call.places.items():
            guesses.give(given[place], size)
    tensors = [x for x in given if isinstance(x, Tensor)]
    origins = RowOrigins(tensors, buffers)
    log = OpLog(environment, [*weights.values(), *buffers.values(), *tensors], origins)
    args, kwargs = pytree.tree_unflatten(given, call.spec)
    modules = list(module.modules())
    storages = {name: storage_key(weight) for name, weight in weights.items()}
    output, after, buffers_after, attributes = _call_forward(
        module, args, kwargs, log, make_context, _guessing(guesses), backward_code
    )
    replaced = {name for name in storages.keys() | after.keys() if _is_replaced(name, storages, weights, after)}
    if pytree.tree_structure((args, kwargs)) != call.spec:
        raise UnobservableError("it changes a list or dict that it is given")
    if replaced and not (is_untouched and list(module.modules()) == modules):
        raise UnobservableError(f"its forward puts a new parameter, or new data, at {min(replaced)!r}")
    found, spec = pytree.tree_flatten(output)
    _check(found, given, weights)
    results = [leaf for leaf in found if isinstance(leaf, Tensor)]
    outputs = tuple(on_meta(leaf, environment) if isinstance(leaf, Tensor) else leaf for leaf in found)
    ends = {get_gradient_edge(result): fake(result) for result in results if result.requires_grad}
    return _ForwardRun(
        log=log,
        forward=tuple(log.ran),
        outputs=outputs,
        spec=spec,
        ends=ends,
        given=_watched(given, environment),
        results=_watched(results, environment),
        forward_bytes=log.made.peak_bytes - log.made.live_bytes,
        written=frozenset(name for name in storages if storages[name] in log.written or name in replaced),
        buffers=origins.written(buffers_after, results),
        parameters=after,
        attributes=attributes,
    )


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module and its submodules hold in plain attributes, by name."""
    named = (
        (joined_name(name, key), own) for name, inner in module.named_modules() for key, own in vars(inner).items()
    )
    return {name: own for name, own in named if isinstance(own, Tensor)}


def _call_forward(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    log: OpLog,
    make_context: ContextFactory,
    guessing: contextlib.AbstractContextManager[object],
    backward_code: Mapping[str, None],
) -> tuple[Any, dict[str, nn.Parameter], dict[str, Tensor], list[tuple[nn.Module, dict[str, Any]]]]:
    """A forward's output, and the module's parameters, other tensors and attributes after it; no attributes without
    code of its own in backward. Raises UnobservableError where the code asked for what no plan can know, even if it
    caught the error."""
    refused: list[str] = []
    with (
        unfinished_ended(),
        in_checkpoint_replay(lambda: unnoted(make_context)),
        make_context(),
        guessing,
        log,
        as_planned("cpu", refused.append),
        machine_as_planned(refused.append),
    ):
        held = _attributes(module)
        log.origins.start(held)
        output = type(module).forward(module, *args, **kwargs)
        after, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        # A new tensor with values, such as a random state, was made by no operator that was seen.
        found = _attributes(module).items()
        buffers |= {name: own for name, own in found if name in held or isinstance(own, FakeTensor)}
        left = [(inner, dict(vars(inner))) for inner in module.modules()] if backward_code else []
    if refused:
        raise UnobservableError(refused[0])
    return output, after, buffers, left


@contextlib.contextmanager
def _with_attributes(left: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Gives modules attributes that they had; whoever enters this puts their own back."""
    for inner, attributes in left:
        vars(inner).update(attributes)
    yield


def _guessing(guesses: GuessedValues | None) -> contextlib.AbstractContextManager[object]:
    return guesses.on() if guesses is not None else contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor's storage by a weak reference, to see whether anything else keeps it alive."""

    storage: "weakref.ref[torch.UntypedStorage]"
    key: int
    num_bytes: int


def _watched(leaves: list[Any], environment: ShapeEnv) -> list[_Watched]:
    """The storages of the tensors among the leaves, in order."""
    return [
        _Watched(weakref.ref(leaf.untyped_storage()), storage_key(leaf), num_bytes(leaf, environment))
        for leaf in leaves
        if isinstance(leaf, Tensor)
    ]


def _living(watched: list[_Watched]) -> frozenset[int]:
    """Positions of the storages that are still alive."""
    return frozenset(i for i, one in enumerate(watched) if one.storage() is not None)


def _is_replaced(
    name: str, storages: Mapping[str, int], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> bool:
    """True where a forward has put another parameter at this name, or other data into it (`.data = ...`)."""
    return after.get(name) is not before.get(name) or storage_key(after[name]) != storages[name]


def _check(found: list[Any], given: list[Any], weights: Mapping[str, Tensor]) -> None:
    """Raises UnobservableError for outputs (`found`) and effects on arguments that no operator may have."""
    inputs = [leaf for leaf in given if isinstance(leaf, Tensor)]
    if not (inputs or weights) or not any(isinstance(leaf, Tensor) for leaf in found):
        raise UnobservableError("it is given no tensor, or returns none")
    storages = {storage_key(tensor) for tensor in inputs}
    for leaf in found:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise UnobservableError(f"it returns a {type(leaf).__name__}, which the code around it may depend on")
        if isinstance(leaf, Tensor) and not all(isinstance(size, int) for size in leaf.shape):
            raise UnobservableError("data decides the size of what it returns")
        if isinstance(leaf, Tensor) and storage_key(leaf) in storages:
            raise UnobservableError("it returns what it was given, or a view of it")
    if any(version_of(tensor) for tensor in inputs):
        raise UnobservableError("it writes to what it is given")
    if any(gradient_hooks(tensor) for tensor in (*inputs, *weights.values())):
        raise UnobservableError("it puts a hook on the gradient of what it is given")


def _digest(cls: type, call: OpaqueCall, outputs: tuple[Any, ...], *ran: Any) -> str:
    """Sixteen hex digits of what an observation depends on and saw, without the module's name."""
    ops = [[(str(step.op), [described(x) for x in pytree.tree_leaves(step.args)]) for step in steps] for steps in ran]
    seen = (cls.__qualname__, call.signature[1:], [described(leaf) for leaf in outputs], ops)  # type: ignore[index]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

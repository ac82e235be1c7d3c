"""Finds the modules that must run whole: traces again with more of them marked, until a trace goes through.

Where a trace stops, the innermost module whose forward was running is marked (tpplan.trace.whole.opaque). Where that
module cannot be one operator, the module around it is marked, up to the model itself. A mark only ever moves outwards,
so this ends.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from tpplan.core.errors import ModelError, first_line
from tpplan.core.graph import Boundary, ModelGraph, Op, within
from tpplan.layouts.rules import OPAQUE
from tpplan.torch_internals.modules import has_backward_hooks, has_forward_hooks
from tpplan.torch_internals.tensors import gradient_hooks
from tpplan.trace.answers.one_dtype import MixedDtypesError
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.boundary_marks import BoundaryHook
from tpplan.trace.dedup_layers import alike_layers
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.fx_to_graph import CapturedError, UnreadableError
from tpplan.trace.left_behind import CarriedError
from tpplan.trace.stopped_trace import ReplacedError, TraceError
from tpplan.trace.trace import Loss, quiet, trace, training, unchanged
from tpplan.trace.whole.opaque import OpaqueCall, Opaques, UnobservedError
from tpplan.trace.whole.opaque_fakes import UnobservableError
from tpplan.trace.whole.opaque_run import observe

logger = logging.getLogger(__name__)

#: signatures of calls that are observed for one kind of module, each of which costs a trace
MOST_CALLS = 16


def trace_marking(
    model: nn.Module,
    build: Callable[[], nn.Module],
    inputs: Inputs,
    *,
    loss: Loss | None = None,
    cast: BoundaryHook = unchanged,
    untouched: str = "",
    whole: Sequence[tuple[str, str]] = (),
    notes_calls: bool = True,
    like: ModelGraph | None = None,
) -> tuple[ModelGraph, Opaques]:
    """The graph of a model, as tpplan.trace.trace.trace gives it, and the modules that are one operator in it.

    build: gives a copy of the model without its hooks; each trace needs its own, as a forward may leave tensors behind.
    untouched: why parameters must stay as they are, so that the whole model is one operator; "" where they need not.
        The whole model is one operator also where nothing less goes through.
    whole: (module, reason) to mark from the start; of a module that is marked already, the one around it.
    notes_calls: whether what modules call goes into the graph's `calls`.
    like: as `trace` takes it.

    Raises ModelError, with the error of the first trace, where the model cannot run on fake tensors as a whole either.
    """
    run = functools.partial(trace, inputs=inputs, loss=loss, cast=cast, fresh=build, notes_calls=notes_calls, like=like)

    def traced(untouched: str) -> tuple[ModelGraph, Opaques]:
        marks = _Marks(model)
        marks.begin(untouched, () if untouched else whole)
        return _trace_until_through(marks, build, run), marks.opaques

    if untouched:
        return traced(untouched)
    try:
        return traced("")
    except ModelError as error:
        if isinstance(error.__cause__, MixedDtypesError):
            raise  # fake tensors would let it pass
        try:
            return traced(first_line(error))
        except ModelError:
            raise error from error.__cause__  # the first error says more than that of the last resort


def _trace_until_through(marks: "_Marks", build: Callable[[], nn.Module], run: Callable[..., ModelGraph]) -> ModelGraph:
    """The graph that run(a copy of the model, opaques=...) gives once each module that cannot be traced is marked."""
    while True:
        try:
            graph = run(build(), opaques=marks.opaques)
        except TraceError as error:
            _mark_failed(marks, build, error)
        except CapturedError:
            raise
        except (UnreadableError, ReplacedError, CarriedError) as error:
            marks.add(error.module, first_line(error), error)
        else:
            outside = next(_read_outside(graph, marks), None)
            if outside is None:
                return graph
            marks.widen(*outside)


@dataclass(slots=True)
class _Marks:
    """The marked modules of a model, by name the error that each was marked for, and the calls observed so far."""

    model: nn.Module
    opaques: Opaques = field(default_factory=Opaques)
    errors: dict[str, ModelError] = field(default_factory=dict)
    observed: list[OpaqueCall] = field(default_factory=list)

    def begin(self, untouched: str, whole: Sequence[tuple[str, str]]) -> None:
        """Marks the root where `untouched`, the modules with hooks on gradients, and (module, reason) of `whole`."""
        if untouched:
            self.opaques.untouched = untouched
            self.add("", untouched, ModelError(untouched))
        for name, reason in _with_hooks(self.model):
            if "" not in self.opaques.reasons and name not in self.opaques.reasons and not self.opaques.hides(name):
                self.add(name, reason, ModelError(f"module {name or 'the root'} {reason}"))
        for name, reason in whole:
            self.add(name, reason, ModelError(reason))

    def add(self, name: str | None, reason: str, error: ModelError) -> None:
        """Marks a module under all its names; where it is marked already, or cannot be, the nearest module around it.

        Raises the error where nothing is left to mark.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        if name not in modules or "" in self.opaques.reasons:
            raise error
        assert name is not None
        while name in self.opaques.reasons or not (has_forward(modules[name]) and self._is_closed(name)):
            if not name:
                raise error
            name = self._around(name)
        like = {id(modules[other]) for other in self._alike(name)}
        names = [other for other, module in modules.items() if id(module) in like]
        for inner in [other for other in self.opaques.reasons if any(within(other, own) for own in names)]:
            del self.opaques.reasons[inner]
        logger.info("module %s runs whole: %s", name or "the root", reason)
        for own in names:
            self.opaques.reasons[own] = reason
            self.opaques.kinds[own] = names[0]
            self.errors[own] = error

    def _alike(self, name: str) -> Iterator[str]:
        """Names of the module and of its counterparts in layers like the one around it, as like layers are traced and
        observed once."""
        yield name
        for layers in alike_layers(self.model):
            around = next((layer for layer, _ in layers if within(name, layer)), None)
            if around is not None:
                yield from (layer + name.removeprefix(around) for layer, _ in layers)

    def widen(self, name: str, why: str) -> None:
        """Marks the module around a marked one instead. Raises ModelError, with the first error, where there is
        none."""
        reason, error = self.opaques.reasons[name], self.errors[name]
        logger.info("module %s cannot stand as one operator: %s", name or "the root", why)
        if not name:
            again = "that fails in the same way" if first_line(error.__cause__ or error) in why else why
            raise ModelError(
                f"{error}\nNor can the model run whole on fake tensors, as torch.export would run it: {again}"
            ) from (error.__cause__ or error)
        self.add(self._around(name), reason, error)

    def _around(self, name: str) -> str:
        """Name of the nearest module around the named one that has a forward."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        while name:
            name = name.rpartition(".")[0]
            if has_forward(modules[name]):
                break
        return name

    def _is_closed(self, name: str) -> bool:
        """True where no module inside has a name outside too, and no hooks see what crosses the module's boundary."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        module = modules[name]
        own = [other for other, found in modules.items() if found is module]
        inside = {id(child) for child in module.modules()} - {id(module)}
        is_shared = any(
            id(found) in inside and not any(within(other, around) for around in own) for other, found in modules.items()
        )
        has_hooks = has_forward_hooks(module) or has_backward_hooks(module)
        return not name or not (is_shared or has_hooks)


def has_forward(module: nn.Module) -> bool:
    """False for a container such as nn.ModuleList, which cannot be called."""
    return type(module).forward is not nn.Module.forward


def _mark_failed(marks: _Marks, build: Callable[[], nn.Module], error: TraceError) -> None:
    """Marks the module in which a trace failed; where a marked module was called in a way not observed yet, observes
    that. Raises the error for mixed dtypes, and tpplan's own failure where that is the cause."""
    cause = error.__cause__
    if isinstance(cause, MixedDtypesError):
        raise error
    if isinstance(cause, UnobservedError):
        _observe(marks, build, cause)
    elif (failure := own_failure(cause, has_run=False)) is not None:
        raise failure from cause
    else:
        at = f", at {error.line}" if error.line else ""
        marks.add(error.module, first_line(cause or error) + at, error)


def _observe(marks: _Marks, build: Callable[[], nn.Module], unobserved: UnobservedError) -> None:
    """Observes the call; where that cannot be done, marks the module around the one that is called."""
    call, model = unobserved.call, build()
    try:
        if sum(known.kind == call.kind for known in marks.observed) >= MOST_CALLS:
            raise UnobservableError(f"it is called in more than {MOST_CALLS} ways")
        marks.observed.append(call)
        with training(model), quiet():
            submodule, is_untouched = model.get_submodule(call.module), bool(marks.opaques.untouched)
            marks.opaques.calls[call.signature] = observe(submodule, call, is_untouched=is_untouched)
    except UnobservableError as error:
        marks.widen(call.module, str(error))


def _with_hooks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, reason) of each module with hooks on gradients: they are written for whole gradients, not for slices."""
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            yield name, "has a backward hook"
        if any(gradient_hooks(parameter) for parameter in module.parameters(recurse=False)):
            yield name, "has a parameter with a gradient hook"


def _read_outside(graph: ModelGraph, marks: _Marks) -> Iterator[tuple[str, str]]:
    """(name, reason) of each opaque module with a weight that other modules read too, or with a hook on a weight that
    is read more than once."""
    hooked = {name for name, parameter in marks.model.named_parameters() if gradient_hooks(parameter)}
    for source in graph.parameters:
        names = (source.label, *source.aliases)
        readers = graph.consumers.get(source.result, ())
        for marked in marks.opaques.reasons:
            if not all(within(name, marked) for name in names):
                continue
            if any(not _is_call_of(reader, marked) for reader in readers):
                yield marked, f"{source.label} is read outside of it"
            if len(readers) > 1 and not hooked.isdisjoint(names):
                yield marked, f"{source.label} has a hook, and is read {len(readers)} times"


def _is_call_of(node: Op | Boundary, module: str) -> bool:
    return isinstance(node, Op) and node.target == OPAQUE and node.module == module

"""From a torch model to a ModelGraph: one training forward on meta tensors, with every module boundary marked.

Hooks on every module pass each tensor that enters or leaves its forward through the custom op `tpplan::boundary`, which
is a view, so aliasing stays as it was. The model's code runs as in training (tpplan.trace.record_fx), but on meta
tensors: nothing is computed.
"""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tpplan.core.graph import (
    AS_IF_EVEN,
    LOSS_SCOPE,
    OWN_SCOPE,
    Direction,
    ModelGraph,
    enclosing,
    joined_name,
    read_outside,
)
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.layouts.rules import OPAQUE
from tpplan.stages.stage_model import layer_class
from tpplan.stages.stub import Stub
from tpplan.torch_internals import pytree, tensors
from tpplan.torch_internals.tensors import storage_key
from tpplan.trace.answers.autocast import autocast_on
from tpplan.trace.answers.concrete_values import Compared
from tpplan.trace.answers.planned_device import autocast_device, is_foreign
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.answers.varying_dims import varying_as, with_varying
from tpplan.trace.boundary_marks import BoundaryHook, BoundaryMarks, boundaries_marked
from tpplan.trace.dedup_layers import PlanDigest, like_layers_once
from tpplan.trace.forward_arguments import Inputs, forward_inputs, path_of
from tpplan.trace.fx_to_graph import GraphReader
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import is_own_code_running
from tpplan.trace.hooks.loss_on_slices import LossOnSlices
from tpplan.trace.layer_images import NotAlikeError
from tpplan.trace.left_behind import Kept, LeftBehind, with_carried
from tpplan.trace.noted_calls import CallNotes, digest, naming_modules
from tpplan.trace.record_fx import Program, StoppedError, on_meta, record
from tpplan.trace.stopped_trace import TraceError, check_modules, explained
from tpplan.trace.whole.opaque import Opaques, recording

logger = logging.getLogger(__name__)

#: (outputs, inputs) -> scalar
Loss = Callable[[Any, Any], torch.Tensor]

#: the most questions about values of inputs for each of which one more trace, in which the answer is the other one,
#: tells whether the graph depends on the answer; the graph is taken to depend on the answers to all further questions
MOST_TRIED = 8

#: traces in which like layers run once; after each, layers that did something else than the one they stood for get a
#: class of their own. After the last one every layer is traced
MOST_CLASSIFIED = 3


def unchanged(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
    """The boundary hook that does nothing."""
    return tensor


def repeated_children(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that FSDP gathers one at a time: numbered siblings of one class that have
    parameters and submodules; in place of a list or dict of modules, which cannot be called, what is in it.

    Of nested ones the outermost count. The rest of the model is gathered with the root.
    """
    return _layers(model, lambda name: not _is_container(model.get_submodule(name)))


def _siblings(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost numbered siblings of one class that have parameters and submodules."""
    found: dict[str, None] = {}
    for name, container in model.named_modules():
        if any(around in found for around in enclosing(name)):
            continue
        layers = [
            (joined_name(name, child_name), child)
            for child_name, child in container.named_children()
            if child_name.isdecimal() and any(True for _ in child.children()) and any(True for _ in child.parameters())
        ]
        classes = [layer_class(child) for _, child in layers] + _absent_classes(container)
        found.update((child_name, None) for child_name, child in layers if classes.count(layer_class(child)) > 1)
    return tuple(found)


def _absent_classes(container: nn.Module) -> list[type[nn.Module]]:
    """The classes of children that are stubs, or whose weights all are of other stages, as their parts are stubs."""
    stubs = [child.absent_class for child in container.children() if isinstance(child, Stub)]
    emptied = (child for child in container.children() if not isinstance(child, Stub) and not list(child.parameters()))
    return stubs + [layer_class(child) for child in emptied if any(isinstance(own, Stub) for own in child.modules())]


def gathered_layers(model: nn.Module, graph: ModelGraph) -> tuple[str, ...]:
    """The layers that FSDP gathers and a checkpoint runs again, both of which is done around a call: in place of
    repeated siblings whose parameters are also read outside of their calls, parts of them."""
    outside = read_outside(graph)
    return _layers(model, lambda name: name not in outside and not _is_container(model.get_submodule(name)))


def called_layers(model: nn.Module, graph: ModelGraph) -> tuple[str, ...]:
    """The repeated siblings that are called, between which a model may be cut; in place of others, parts of them."""
    called = {boundary.module for boundary in graph.boundaries}
    return _layers(model, called.__contains__)


def _layers(model: nn.Module, is_layer: Callable[[str], bool]) -> tuple[str, ...]:
    """The repeated siblings; in place of one that is no layer, such as one of which the code around it calls the parts,
    the outermost modules inside it that are, and that have a matrix. A module with several names has the first."""
    first: dict[int, str] = {}

    def found(name: str) -> Iterator[str]:
        if is_layer(name):
            yield name
            return
        for child_name, child in model.get_submodule(name).named_children():
            if not isinstance(child, Stub) and any(weight.dim() > 1 for weight in child.parameters()):
                yield from found(joined_name(name, child_name))

    for name in itertools.chain.from_iterable(map(found, _siblings(model))):
        first.setdefault(id(model.get_submodule(name)), name)
    return tuple(first.values())


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


class _Step(nn.Module):
    """Model and loss as one module, called with the flat leaves of the inputs, so that each leaf has a name."""

    def __init__(self, model: nn.Module, loss: Loss | None, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.spec = spec
        self.behind = LeftBehind()

    def forward(self, *leaves: Any) -> Any:
        inputs = pytree.tree_unflatten(list(leaves), self.spec)
        accepted = forward_inputs(self.model, inputs)
        self.behind.start(self.model)
        device_type = autocast_device()
        with autocast_on(device_type) if device_type is not None else contextlib.nullcontext():
            with custom_ops.OwnOperators():
                outputs = self.model(**accepted) if isinstance(accepted, Mapping) else self.model(*accepted)
            self.behind.end(self.model)
            if self.loss is None:
                return outputs
            with LossOnSlices():
                return self.loss(outputs, inputs)


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss: Loss | None = None,
    cast: BoundaryHook = unchanged,
    plan_digest: PlanDigest | None = None,
    otherwise: frozenset[int] = frozenset(),
    opaques: Opaques | None = None,
    fresh: Callable[[], nn.Module] | None = None,
    notes_calls: bool = False,
    is_compared: bool = False,
    like: ModelGraph | None = None,
) -> ModelGraph:
    """The graph of one training forward, loss included, at the shapes of `inputs`.

    inputs: what example_inputs gives; entries of a mapping that forward does not take go to the loss alone.
    cast: changes each tensor before it crosses a boundary, as FSDP's mixed precision does.
    plan_digest: of a model that a plan was applied to, plan_digest(module name) is what the plan does inside the
        module. Layers that are alike, and for which it is equal, are traced once.
    otherwise: numbers of the code's yes-or-no questions about values of inputs that are answered the other way.
    opaques: the modules that run whole, each as one operator.
    fresh: gives another copy of the model, in which nothing has run yet, for each further run.
    notes_calls: whether what modules call goes into the graph's `calls`.
    like: a graph whose `varying` dims this one takes where both have the same ops and no size was guessed.
    is_compared: whether the graph is only compared with another one, node by node; then it has no `blocks`, and all its
        values are said to be read.

    Raises TraceError where the forward raises, naming the module that was running and the original error; ReplacedError
    where the forward replaced a module or parameter; ModelError where forward does not take the inputs.
    """
    request = _TraceArguments(
        inputs=inputs,
        loss=loss,
        cast=cast,
        plan_digest=plan_digest,
        otherwise=otherwise,
        opaques=opaques or Opaques(),
        notes_calls=notes_calls,
        is_compared=is_compared,
    )
    copies = itertools.chain([lambda: model], itertools.repeat(fresh or (lambda: model)))
    graph, program = _run_deduplicated(request, copies, extra=0)
    if program.compared:
        request = replace(request, compared=program.compared)
        graph, program = _run_deduplicated(request, copies, extra=0)
    if not program.varies:
        return graph
    if like is not None and not program.guessed and (known := varying_as(graph, like)) is not None:
        return known
    longer = replace(request, notes_calls=False, is_compared=True)
    try:
        return with_varying(graph, _run_deduplicated(longer, copies, extra=1)[0], program.guessed)
    except TraceError:
        if program.guessed:
            raise
        return graph  # for the number of elements that the inputs give, which is among the assumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceArguments:
    """The arguments of `trace`: a model, its inputs, and how they are traced."""

    inputs: Inputs
    loss: Loss | None
    cast: BoundaryHook
    plan_digest: PlanDigest | None
    otherwise: frozenset[int]
    opaques: Opaques
    notes_calls: bool
    is_compared: bool
    compared: Compared = field(default_factory=dict)


def _run_deduplicated(
    request: _TraceArguments, copies: Iterator[Callable[[], nn.Module]], extra: int
) -> tuple[ModelGraph, Program]:
    """The graph and program of a run in which like layers are traced once, as far as they turn out to be alike.

    copies: makers of the model, one for each run. extra: elements added wherever data decides how many there are.
    """
    classes: Mapping[str, str] = {}
    for _ in range(MOST_CLASSIFIED):
        marks = BoundaryMarks(request.cast, [])
        model = next(copies)()
        once = like_layers_once(model, marks, request.plan_digest, classes)
        try:
            return _with_next(model, request, extra, _run(model, request, once, marks, extra))
        except NotAlikeError as reason:
            logger.info("more layers are traced: %s", reason)
            classes = reason.classes
        if not classes:
            break
    model = next(copies)()
    return _with_next(model, request, extra, _run_layer_by_layer(model, request, extra))


def _with_next(
    model: nn.Module, request: _TraceArguments, extra: int, ran: tuple[ModelGraph, GraphReader]
) -> tuple[ModelGraph, Program]:
    """The graph and program of a run, with what the model, which it has left as it is now, hands to its next one."""
    graph, reader = ran

    def run_again() -> tuple[ModelGraph, Kept]:
        later, its = _run_layer_by_layer(model, replace(request, notes_calls=False), extra)
        return later, its.kept

    if reader.kept:
        graph = with_carried(graph, reader.kept, run_again)
    return graph if request.is_compared else reader.complete(graph), reader.program


def _run_layer_by_layer(model: nn.Module, request: _TraceArguments, extra: int) -> tuple[ModelGraph, GraphReader]:
    """One run in which every layer is traced."""
    return _run(model, request, contextlib.nullcontext(), BoundaryMarks(request.cast, []), extra)


def assumptions(
    graph: ModelGraph,
    model: nn.Module,
    inputs: Inputs,
    *,
    loss: Loss | None = None,
    cast: BoundaryHook = unchanged,
    opaques: Opaques | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> tuple[str, ...]:
    """The answers about values of the inputs that the graph depends on, each as `line of code is answer`, once.

    A question whose other answer gives the same graph, or an error of the model's own, is left out. fresh() gives
    copies of the model in which nothing has run.
    """
    numbers: dict[tuple[str, str, bool], list[int]] = {}
    for number, question in enumerate(graph.questions):
        numbers.setdefault(question, []).append(number)
    found = []
    for place, ((where, answer, is_choice), asked) in enumerate(numbers.items()):
        if is_choice and place < MOST_TRIED:
            try:
                own = fresh() if fresh is not None else model
                otherwise = frozenset(asked)
                other = trace(own, inputs, loss=loss, cast=cast, otherwise=otherwise, opaques=opaques, fresh=fresh)
            except TraceError as error:
                if _is_raised_by_model(error.__cause__):
                    continue
            else:
                if graph_fingerprint(other) == graph_fingerprint(graph):
                    continue
        found.append(f"{where} is {answer}")
    return tuple(found)


def _is_raised_by_model(error: BaseException | None) -> bool:
    """True for an error that the model's own code raises, as it would in training."""
    step = error.__traceback__ if error is not None else None
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    is_open = isinstance(error, NotImplementedError | UnknownValueError)
    return step is not None and not is_open and is_foreign(step.tb_frame.f_code.co_filename)


def _run(
    model: nn.Module,
    request: _TraceArguments,
    once: contextlib.AbstractContextManager[None],
    marks: BoundaryMarks,
    extra: int,
) -> tuple[ModelGraph, GraphReader]:
    """One run of the model: its graph, and the reader that made it of a program.

    once: the context in which like layers are traced once. marks: those of module boundaries, for this run alone.
    Raises what `trace` raises, and NotAlikeError.
    """
    leaves, spec = pytree.tree_flatten(request.inputs)
    paths = [path_of(path) for path, _ in pytree.tree_flatten_with_path(request.inputs)[0]]
    modules, opaques, running = dict(model.named_modules()), request.opaques, marks.running
    calling = CallNotes(model) if request.notes_calls else None

    def scope() -> str:
        if is_own_code_running():
            return OWN_SCOPE
        return running[-1] if running else LOSS_SCOPE

    with (
        on_meta(model),
        training(model),
        recording(model, opaques),
        once,
        boundaries_marked(model, opaques, marks),
        naming_modules(model, running, opaques.hides) as apart,
        quiet(),
    ):
        parameters = {name: (own, storage_key(own)) for name, own in model.named_parameters()}
        try:
            step = _Step(model, request.loss, spec)
            program = record(
                step, leaves, paths, scope, request.otherwise, extra, step.behind, calling, request.compared
            )
        except StoppedError as stopped:
            check_modules(model, modules, parameters)
            error = explained(stopped, model, request.inputs, running, has_loss=request.loss is not None)
            raise error from stopped.__cause__
        check_modules(model, modules, parameters)
        reader = GraphReader(model, program)
        graph = reader.read()
        questions = *graph.questions, *_guessed(graph, opaques)
        graph = replace(graph, questions=questions, apart=frozenset(apart))
        return replace(graph, calls=_digests(calling)) if calling is not None else graph, reader


def _guessed(graph: ModelGraph, opaques: Opaques) -> Iterator[tuple[str, str, bool]]:
    """Yields the questions, each once, that modules which run whole ask, and that were answered with a guess."""
    observed = opaques.by_key()
    lines: dict[str, None] = {}
    for op in graph.ops if observed else ():
        if op.target == OPAQUE:
            lines.update(dict.fromkeys(observed[str(op.args[2])].guessed))
    yield from ((line, AS_IF_EVEN, False) for line in lines)


def _digests(calling: CallNotes) -> dict[str, tuple[str, ...]]:
    """Digests of what each module called; none at all where the trace ran both branches of a torch.cond."""
    if calling.has_chosen:
        return {}
    return {
        name: tuple(sorted(map(digest, calls))) for name, calls in calling.found.items() if name not in calling.unsure
    }


def why_untouched(model: nn.Module) -> str:
    """Why the model's parameters must stay as they are: the first one with a hook on its accumulated gradient; "" where
    none has any. Distributing the parameter would leave the hook behind, or show it one data-parallel rank's gradient.
    """
    named = (name for name, parameter in model.named_parameters() if tensors.accumulated_hooks(parameter))
    name = next(named, "")
    return (
        f"parameter {name} has a hook on its accumulated gradient; register it after the plan is applied"
        if name
        else ""
    )


def hooked_weight(model: nn.Module) -> str:
    """The model's first parameter with a hook on its gradient; "" without one."""
    return next((name for name, own in model.named_parameters() if tensors.gradient_hooks(own)), "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's warnings and logged tracebacks: here every failure is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Puts the model in training mode, and each module back in its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

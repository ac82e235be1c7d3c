"""From a torch model to a ModelGraph: one training forward on meta tensors, with every module boundary marked.

Hooks on every module pass each tensor that enters or leaves its forward through the custom op `tpplan::boundary`, which
is a view, so aliasing stays as it was. The model runs as it will in training (tpplan.trace.record_fx), on meta tensors:
nothing is computed.
"""

import contextlib
import difflib
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.core.errors import ModelError
from tpplan.core.graph import LOSS_SCOPE, OWN_SCOPE, Direction, ModelGraph, within
from tpplan.torch_internals import pytree, tensors
from tpplan.torch_internals.tensors import storage_key
from tpplan.trace.answers.concrete_values import raising_line
from tpplan.trace.answers.planned_device import is_foreign
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.dedup_layers import Doings, standing_in
from tpplan.trace.fx_to_graph import GraphReader, NotAlikeError, path_of
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import is_own_code_running, own_code
from tpplan.trace.left_behind import held_tensors, left_behind
from tpplan.trace.noted_calls import Calling, digest
from tpplan.trace.opaque import Opaques, recording
from tpplan.trace.record_fx import Program, StoppedError, naming_modules, on_meta, record

logger = logging.getLogger(__name__)

#: changes a tensor at a boundary while tracing, by (module, direction, path)
BoundaryHook = Callable[[torch.Tensor, str, Direction, str], torch.Tensor]

#: questions about inputs that are answered otherwise, to see whether it matters; others are taken to matter
MOST_TRIED = 8

#: traces after each of which layers that did something else than those like them are classed by what they did; then
#: every layer is traced
MOST_CLASSIFIED = 3

Loss = Callable[[Any, Any], torch.Tensor]
Inputs = Mapping[str, Any] | tuple[Any, ...]


def unchanged(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
    """The boundary hook that does nothing."""
    return tensor


def forward_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """What of the inputs the model's forward takes: a mapping's other entries are the loss's alone (targets)."""
    if not isinstance(inputs, Mapping):
        return inputs
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return inputs
    accepted = {parameter.name for parameter in parameters}
    return {name: value for name, value in inputs.items() if name in accepted}


def repeated_children(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that FSDP gathers one at a time: siblings of one class with parameters and submodules.

    The outermost such siblings of each container; the rest of the model is the root's.
    """
    found: list[str] = []
    for name, container in model.named_modules():
        if any(within(name, unit) for unit in found):
            continue
        layers = [
            (f"{name}.{child_name}" if name else child_name, child)
            for child_name, child in container.named_children()
            if child_name.isdecimal() and any(True for _ in child.children()) and any(True for _ in child.parameters())
        ]
        classes = [type(child) for _, child in layers]
        found += [child_name for child_name, child in layers if classes.count(type(child)) > 1]
    return tuple(found)


class _Step(nn.Module):
    """Model and loss as one module. Inputs come flat, so that each has a name."""

    def __init__(self, model: nn.Module, loss: Loss | None, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.spec = spec
        #: what the model's forward leaves behind, by where it is
        self.left: dict[str, torch.Tensor] = {}

    def forward(self, *leaves: Any) -> Any:
        inputs = pytree.tree_unflatten(list(leaves), self.spec)
        accepted = forward_inputs(self.model, inputs)
        before = held_tensors(self.model)
        with custom_ops.CrossEntropyMode():
            outputs = self.model(**accepted) if isinstance(accepted, Mapping) else self.model(*accepted)
        self.left.update(left_behind(self.model, before))
        return self.loss(outputs, inputs) if self.loss is not None else outputs


def named_tensors(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The tree with each tensor replaced by change(path, tensor)."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return pytree.tree_unflatten(
        [change(path_of(path), leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves], spec
    )


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a forward takes without one."""
    return tuple(
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under their parameter's name, so that a path does not depend on how a call is written."""
    positional = positional_names(module)
    names = [positional[i] if i < len(positional) else f"args{i}" for i in range(len(args))]
    return dict(zip(names, args, strict=True)) | kwargs


def convert_arguments(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[str, torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a forward with each tensor replaced by change(path, tensor)."""
    changed = named_tensors(bound_arguments(module, args, kwargs), change)
    values = list(changed.values())
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


@contextlib.contextmanager
def _marked(model: nn.Module, opaques: Opaques, cast: BoundaryHook, running: list[str]) -> Iterator[None]:
    """Hooks that mark every crossing of every module, removed at the end. A parameter that crosses is read before, by
    the module whose code hands it on: `running` holds those that run."""

    def read(tensor: torch.Tensor, direction: Direction) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        entered = [running.pop()] if direction is Direction.INPUT else []
        passed: torch.Tensor = torch.ops.aten.alias(tensor)
        running.extend(entered)
        return passed

    def mark(name: str, direction: Direction) -> Callable[[str, torch.Tensor], torch.Tensor]:
        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):  # an output that an applied plan leaves sharded
                return _again(tensor, custom_ops.boundary(_local(tensor), name, str(direction), path))
            tensor = cast(read(tensor, direction), name, direction, path)
            return custom_ops.boundary(tensor, name, str(direction), path)

        return change

    given: dict[str, list[tuple[Any, pytree.TreeSpec]]] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any, name: str) -> Any:
        changed = convert_arguments(module, args, kwargs, mark(name, Direction.INPUT))
        given.setdefault(name, []).append((changed, pytree.tree_structure(changed)))
        return changed

    def leave(output: Any, name: str) -> Any:
        changed, structure = given[name].pop()
        if pytree.tree_structure(changed) != structure:
            raise ModelError(f"module {name or 'the root'} changes a list or dict that it is given: return it instead")
        return named_tensors({"output": output}, mark(name, Direction.OUTPUT))["output"]

    handles = []
    for name, module in model.named_modules():
        if type(module).forward is nn.Module.forward or opaques.hides(name):  # a container: nothing crosses it
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: enter(m, args, kwargs, name), with_kwargs=True
            )
        )
        # Before hooks of the code's own: what they see is converted already.
        handles.append(module.register_forward_hook(lambda _m, _args, out, name=name: leave(out, name), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss: Loss | None = None,
    cast: BoundaryHook = unchanged,
    doings: Doings | None = None,
    otherwise: frozenset[int] = frozenset(),
    opaques: Opaques | None = None,
    fresh: Callable[[], nn.Module] | None = None,
    notes_calls: bool = False,
) -> ModelGraph:
    """The graph of one training forward, loss included, at the shapes of `inputs`.

    `inputs` is what example_inputs gives: keyword arguments (those forward does not take go to the loss alone), or a
    tuple. `cast` changes a tensor before it crosses a boundary, as FSDP's mixed precision does. Like layers are traced
    once; of a model that a plan was applied to, doings(module) says what the plan does inside one. Questions about the
    inputs' values are answered by them, those in `otherwise` the other way. Modules in `opaques` run whole, each an
    operator. Where it runs more than once, fresh() gives another copy, in which nothing has run yet. With
    notes_calls, what modules call is noted. Raises TraceError
    where it stops, naming the module that was running and the original error.
    """
    hidden = opaques or Opaques()
    copies = itertools.chain([lambda: model], itertools.repeat(fresh or (lambda: model)))

    def calling(own: nn.Module) -> Calling | None:
        return Calling(own) if notes_calls else None

    def run(extra: int) -> tuple[ModelGraph, Program]:
        classes: Mapping[str, str] = {}
        for _ in range(MOST_CLASSIFIED):
            running: list[str] = []
            own = next(copies)()
            siblings = standing_in(own, doings, classes, running)
            try:
                return _trace(own, inputs, loss, cast, hidden, siblings, otherwise, extra, running, calling(own))
            except NotAlikeError as reason:
                logger.info("more layers are traced: %s", reason)
                classes = reason.classes
            if not classes:
                break
        own, nobody = next(copies)(), contextlib.nullcontext()
        return _trace(own, inputs, loss, cast, hidden, nobody, otherwise, extra, [], calling(own))

    graph, program = run(0)
    if not program.varies:
        return graph
    try:
        return _with_varying(graph, run(1)[0], program.guessed)
    except TraceError:
        if program.guessed:
            raise
        return graph  # made for as many as the inputs say, which stands among the assumptions


def _with_varying(graph: ModelGraph, other: ModelGraph, guessed: Mapping[str, str]) -> ModelGraph:
    """The graph with the dims marked that differ where data gives one element more, and with what was guessed.

    Raises ModelError where other ops run then.
    """
    if graph.values.keys() != other.values.keys():
        raise ModelError(f"how many elements there are decides what runs: {', '.join(guessed)}")
    values = {
        name: replace(value, varying=tuple(i for i, size in enumerate(value.shape) if size != there.shape[i]))
        for (name, value), there in zip(graph.values.items(), other.values.values(), strict=True)
    }
    found = ((line, guess, False) for line, guess in guessed.items())
    return replace(graph, values=values, questions=(*graph.questions, *found))


@own_code
def _local(tensor: DTensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    return local


@own_code
def _again(tensor: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)


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
    """What the trace of a model took from the values of its inputs, and would be another without. fresh() gives copies
    in which nothing has run.

    A question that could have been answered otherwise, and with the same graph or an error, is none.
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
                if other.fingerprint == graph.fingerprint:
                    continue
        found.append(f"{where} is {answer}")
    return tuple(found)


def _is_raised_by_model(error: BaseException | None) -> bool:
    """True for an error that the model's own code raises: it would in training, too."""
    step = error.__traceback__ if error is not None else None
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    is_open = isinstance(error, NotImplementedError | UnknownValueError)
    return step is not None and not is_open and is_foreign(step.tb_frame.f_code.co_filename)


def _trace(
    model: nn.Module,
    inputs: Inputs,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques,
    siblings: contextlib.AbstractContextManager[None],
    otherwise: frozenset[int],
    extra: int,
    running: list[str],
    calling: Calling | None,
) -> tuple[ModelGraph, Program]:
    leaves, spec = pytree.tree_flatten(inputs)
    paths = [path_of(path) for path, _ in pytree.tree_flatten_with_path(inputs)[0]]
    modules = dict(model.named_modules())

    def scope() -> str:
        if is_own_code_running():
            return OWN_SCOPE
        return running[-1] if running else LOSS_SCOPE

    with (
        on_meta(model),
        training(model),
        recording(model, opaques),
        siblings,
        _marked(model, opaques, cast, running),
        naming_modules(model, running, opaques.hides),
        quiet(),
    ):
        parameters = {name: (own, storage_key(own)) for name, own in model.named_parameters()}
        try:
            step = _Step(model, loss, spec)
            program = record(step, leaves, paths, scope, otherwise, extra, step.left, calling)
        except StoppedError as stopped:
            _check_modules(model, modules, parameters)
            error = stopped.__cause__
            assert error is not None
            if isinstance(error, TypeError) and (problem := _uncallable(model, inputs)):
                raise ModelError(problem) from error
            where = _place(running, loss)
            reason = (str(error).strip() or "no message").splitlines()[0]
            raise TraceError(
                f"the model could not be traced: {type(error).__name__} {where}: {reason}{_advice(error, reason)}",
                ran=stopped.ran,
                module=running[-1] if running else None,
            ) from error
        _check_modules(model, modules, parameters)
        graph = GraphReader(model, program).read()
        return replace(graph, calls=_digests(calling)) if calling is not None else graph, program


def _digests(calling: Calling) -> dict[str, tuple[str, ...]]:
    """Of what each module called; of none where the trace ran both branches of a choice."""
    if calling.has_chosen:
        return {}
    return {
        name: tuple(sorted(map(digest, calls))) for name, calls in calling.found.items() if name not in calling.unsure
    }


def _advice(error: BaseException, reason: str) -> str:
    """The line of code that raised an error, and what to try where the error does not say so itself."""
    line = raising_line(error)
    at = f"\nat {line}" if line else ""
    match error:
        case ModelError():
            return at
        case UnknownValueError():
            return (
                f"{at}\nKeep it a tensor, choose with torch.where or torch.cond, or decide it by the configuration "
                "or by the example inputs, whose values are known."
            )
        case _ if "Meta" in reason or "fake impl" in reason:
            return (
                f"{at}\ntorch does not say what that op gives: register it and its backward with "
                "torch.library.register_fake."
            )
        case _ if "out of meta tensor" in reason or "numpy" in reason:
            return f"{at}\nThere are no values while a model is planned: compute it with torch."
    return (
        f"{at}\nIf the model fails so without tpplan too, on the same inputs, mend it first. Otherwise it does there "
        "what tensors without values cannot: look for control flow on values, numpy."
    )


def _place(running: Sequence[str], loss: Loss | None) -> str:
    """Where a trace stopped; `running` are the modules whose forwards ran."""
    if running and running[-1]:
        return f"in module {running[-1]!r}"
    if running:
        return "in the model's forward"
    return "in the loss" if loss is not None else "where the model is called"


def _uncallable(model: nn.Module, inputs: Inputs) -> str:
    """Why forward cannot be called with the example inputs, and what to give instead; "" where it can."""
    signature, given = inspect.signature(model.forward), forward_inputs(model, inputs)
    try:
        signature.bind(**given) if isinstance(given, Mapping) else signature.bind(*given)
    except TypeError as error:
        takes = f"{type(model).__name__}.forward takes {signature}"
        if not isinstance(inputs, Mapping):
            return (
                f"{takes}, and example_inputs gives {len(inputs)} values: {error}. All of a tuple goes to forward; of "
                "a dict, the loss takes what forward does not"
            )
        left = [name for name in inputs if name not in signature.parameters]
        missing = [name for name in signature.parameters if name not in inputs]
        near = [(name, found) for name in left for found in difflib.get_close_matches(name, missing, n=1)]
        hint = f" Did you mean {near[0][1]!r} by {near[0][0]!r}?" if near else ""
        return (
            f"{takes}, and example_inputs gives {', '.join(map(repr, inputs))}: {error}.{hint} A dict's entries go to "
            "forward by its arguments' names, and the others to the loss alone"
        )
    return ""


def _check_modules(
    model: nn.Module, modules: Mapping[str, nn.Module], parameters: Mapping[str, tuple[nn.Parameter, int]]
) -> None:
    """Raises ReplacedError where a forward has put another module or parameter in the place of one, or other data into
    one, which no plan would reach. Parameters are given with their storages."""
    for name, module in model.named_modules():
        if modules.get(name) is not module:
            raise ReplacedError(
                f"the forward puts a new {type(module).__name__} at {name!r}: a plan is for the modules that the "
                "builder returns. Call the model once there, or configure it so that it stays as it is",
                module=name.rpartition(".")[0],
            )
    for name, parameter in model.named_parameters():
        own, storage = parameters.get(name, (None, 0))
        if own is not parameter or storage_key(parameter) != storage:
            what = "a new parameter" if own is not parameter else "new data"
            raise ReplacedError(
                f"the forward puts {what} at {name!r}: a plan is for those that the builder returns. Write to "
                "it under torch.no_grad() (copy_)",
                module=name.rpartition(".")[0],
            )


def accumulated_hooks(model: nn.Module) -> str:
    """The first parameter with a hook on its accumulated gradient, which would stay behind when the parameter is
    distributed, and see one data-parallel rank's; "" where there is none."""
    named = (name for name, parameter in model.named_parameters() if tensors.accumulated_hooks(parameter))
    name = next(named, "")
    return (
        f"parameter {name} has a hook on its accumulated gradient; register it after the plan is applied"
        if name
        else ""
    )


class ReplacedError(ModelError):
    """A forward replaced something of a module's, which is `module`."""

    def __init__(self, message: str, *, module: str) -> None:
        super().__init__(message)
        self.module = module


class TraceError(ModelError):
    """The trace stopped. `ran` is the graph of what had run until then, `module` the innermost that was running."""

    def __init__(self, message: str, *, ran: torch.fx.Graph, module: str | None) -> None:
        super().__init__(message)
        self.ran = ran
        self.module = module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings and its logged tracebacks: what goes wrong here is raised."""
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
    """The model in training mode; at the end each module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

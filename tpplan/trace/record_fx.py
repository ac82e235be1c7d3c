"""One forward as a torch.fx graph of every op that runs, in order, on meta tensors.

Ops are recorded before autograd takes them apart: `aten.linear`, attention and views as the code called them. Only the
tensors differ from a training step, so the code takes the branches that it takes in training. Under torch.export it
need not: code can tell, and transformers then builds masks that training does without.
"""

import contextlib
import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.core.errors import ModelError
from tpplan.core.graph import SourceKind
from tpplan.torch_internals import pytree
from tpplan.torch_internals.autograd import forwards_seen_by, functions_run_by, saved_hooks_seen_by
from tpplan.torch_internals.checkpoints import is_reentrant_checkpoint, keeps_inputs
from tpplan.torch_internals.modules import tensors_in_place
from tpplan.torch_internals.operators import is_op, more_shapes_known, only_writes
from tpplan.torch_internals.recording import (
    call_recorded,
    dispatched_plainly,
    is_recording,
    recorded,
    recorder,
    results_kept_by,
    untraced,
)
from tpplan.torch_internals.tensors import local_part, plain_calls, storage_key
from tpplan.trace.answers.concrete_values import Compared, ConcreteValues, Question, misses_forgotten
from tpplan.trace.answers.cond import higher_order_ops_traced
from tpplan.trace.answers.data_dependent_sizes import Counts, as_many_as_can_be, counting_by
from tpplan.trace.answers.one_dtype import check_one_dtype
from tpplan.trace.answers.planned_device import is_foreign, line_of, machine_as_planned
from tpplan.trace.answers.saved_tensor_hooks import check_saved_hooks
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import is_own_code_running
from tpplan.trace.hooks.host_rng import same_draws
from tpplan.trace.left_behind import LeftBehind
from tpplan.trace.noted_calls import CallNotes
from tpplan.trace.whole.opaque_run import given_by

#: keys of a node's meta: the module that was running, a digest of values that the code wrote down, whether gradients
#: were on, and the line of the model's code
SCOPE, CONSTANT, DIFFERENTIATED = "tpplan_scope", "tpplan_constant", "tpplan_differentiated"
LINE = "tpplan_line"

#: ops that hooks put around the model's code, which have no line of it
_MARKS = frozenset(
    {torch.ops.tpplan.boundary.default, torch.ops.tpplan.frame.default, torch.ops.tpplan.sibling.default}
)
_EMPTY = torch.ops.aten.empty.memory_format
_WHOLE = torch.ops.tpplan.whole.default
#: held while recording, as a tracer's modes, and what is changed in torch meanwhile, belong to the whole process
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """A placeholder node of the graph by `name`; `label` is a parameter's or buffer's name, or an input's path."""

    name: str
    kind: SourceKind
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A recorded forward. A node's results are its meta["val"], the module that ran it is its meta[SCOPE]."""

    graph_module: torch.fx.GraphModule
    given: tuple[Placeholder, ...]
    out_spec: pytree.TreeSpec
    #: where the forward leaves tensors behind, by dotted path; as outputs these tensors follow the returned ones
    left: tuple[str, ...]
    #: where it keeps tensors without a gradient, as outputs behind those
    kept: tuple[str, ...]
    #: by a storage's key, where the model holds a tensor before the forward
    held: Mapping[int, str]
    questions: tuple[Question, ...]
    #: lines of code where data decides a size, and the size that was taken instead
    guessed: Mapping[str, str]
    #: whether data decides some size
    varies: bool
    #: what another run needs to share such sizes evenly (tpplan.trace.answers.concrete_values); empty where none would
    compared: Compared


class StoppedError(Exception):
    """The forward raised the cause of this error. `ran` is the graph of the ops until then."""

    def __init__(self, ran: torch.fx.Graph) -> None:
        super().__init__("the forward raised")
        self.ran = ran


def record(
    module: nn.Module,
    leaves: Sequence[Any],
    paths: Sequence[str],
    scope: Callable[[], str],
    otherwise: frozenset[int] = frozenset(),
    extra: int = 0,
    behind: LeftBehind | None = None,
    calling: CallNotes | None = None,
    compared: Compared | None = None,
) -> Program:
    """Records module(*leaves) on meta tensors; a DTensor parameter is given as its local tensor.

    paths: names of the leaves. scope(): name of the module that is running. otherwise: numbers of the yes-or-no
    questions about the leaves' values that are answered the other way. extra: elements added wherever data decides how
    many there are; where the data is not known, there are as many as there can be, or an even share. behind: filled by
    the module while it runs, with tensors that become outputs. calling: notes the calls of modules. compared: of an
    earlier program, where it has any. Draws from NumPy and Python are the same in every run.

    Raises StoppedError where the forward raises, or asks what only real data can answer.
    """
    placed = [_placed(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given, behind = _given(module, paths, placed), behind or LeftBehind()
    inputs = ((p, v) for p, v in zip(placed, leaves, strict=True) if isinstance(v, Tensor))
    known = ConcreteValues(inputs, otherwise, extra, compared)
    counts = Counts(known, extra)
    if calling is not None:
        calling.asked = lambda: sum(map(len, (known.questions, known.guessed, counts.guessed, counts.shared)))
    specs: list[pytree.TreeSpec] = []
    graphs: list[torch.fx.Graph] = []

    def run(*_: Tensor) -> list[Any]:
        """Runs the module. Its arguments, which are the module's own tensors and the leaves, need not be handed on."""
        tracer = recorder().tracer
        graphs.append(tracer.graph)
        with known, dispatched_plainly(_answers(known)), _nodes_noted(tracer, scope, known), _nothing_hidden(calling):
            with (
                custom_ops.called_by(_caller(known)),
                machine_as_planned(known.miss),
                calling.noting() if calling is not None else contextlib.nullcontext(),
            ):
                output = module(*placed)
            known.check_all_answered()
            found, spec = pytree.tree_flatten(_dataclasses_as_dicts(output))
        specs.append(spec)
        found += [*behind.outputs.values(), *behind.kept.values()]
        return [_local(leaf) if isinstance(leaf, Tensor) else None for leaf in found]

    try:
        with _ONE_AT_A_TIME, same_draws(), more_shapes_known(), counting_by(counts), results_kept_by(_aliased):
            graph_module = recorded(run, [tensor for _, _, tensor in given])
            _drop_failed(_without_empty(graph_module.graph))
    except Exception as error:
        raise StoppedError(_without_empty(graphs[0]) if graphs else torch.fx.Graph()) from error
    return _program(graph_module, given, specs[0], behind, known, counts)


class _Called(nn.Module):
    """Calls a module with the leaves of its arguments, and keeps its outputs."""

    def __init__(self, module: nn.Module, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.module, self.spec = module, spec
        self.given: Any = None

    def forward(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        self.given = self.module(*args, **kwargs)
        return self.given


def given_on_meta(module: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Runs a module on the meta device and returns its outputs; `leaves` and `spec` are its arguments.

    The kernels are those of a trace, so that outputs are the same in a trace and outside of one; no mode sees the
    module's calls. Where its code asks for values it is run again, and they are answered as in a trace, or else
    guessed. Raises what `record` raises.
    """
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    with untraced((CallNotes,)), torch.no_grad(), more_shapes_known(), counting_by(as_many_as_can_be):
        with contextlib.suppress(RuntimeError, TypeError), misses_forgotten():  # torch's, for tensors without values
            return module(*args, **kwargs)
        called = _Called(module, spec)
        try:
            with misses_forgotten():
                record(called, leaves, [str(i) for i in range(len(leaves))], lambda: "")
        except StoppedError:
            with untraced((ConcreteValues,)):
                given = given_by(module, leaves, spec)
            if given is None:
                raise
            return given
        return called.given


def _program(
    graph_module: torch.fx.GraphModule,
    given: Sequence[tuple[SourceKind, str, Tensor]],
    out_spec: pytree.TreeSpec,
    behind: LeftBehind,
    known: ConcreteValues,
    counts: Counts,
) -> Program:
    """The program of a recorded graph, and the answers that its code was given."""
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    return Program(
        graph_module=graph_module,
        given=tuple(
            Placeholder(name=name, kind=kind, label=label)
            for name, (kind, label, _) in zip(placeholders, given, strict=True)
        ),
        out_spec=out_spec,
        left=tuple(behind.outputs),
        kept=tuple(behind.kept),
        held=dict(_storages(behind.before)),
        questions=tuple(known.questions),
        guessed={
            **{line: f"{count} elements, all there can be" for line, count in counts.guessed.items()},
            **{line: f"{count} elements, an even share of all" for line, count in counts.shared.items()},
            **known.guessed,
        },
        varies=counts.varies or bool(known.guessed),
        compared={place: values for place, values in known.compared.items() if len(values) > 1},
    )


def _storages(held: Mapping[str, Tensor]) -> Iterator[tuple[int, str]]:
    """Yields the storage's key of each tensor that has one, and the tensor's path."""
    for path, tensor in held.items():
        with contextlib.suppress(NotImplementedError, RuntimeError):  # of sparse tensors, and inside torch.func
            yield storage_key(tensor), path


def _placed(leaf: Tensor) -> Tensor:
    """An input on the meta device. One with a gradient comes from another stage, which computed it: it is no leaf of
    autograd, to which code may not write."""
    return leaf.to("meta").clone() if leaf.requires_grad else leaf.to("meta")


def _given(module: nn.Module, paths: Sequence[str], leaves: Sequence[Any]) -> list[tuple[SourceKind, str, Tensor]]:
    """(kind, label, tensor) of each placeholder: parameters, buffers, tensor inputs."""
    return [
        *((SourceKind.PARAMETER, name, _local(value)) for name, value in module.named_parameters()),
        *((SourceKind.BUFFER, name, value) for name, value in module.named_buffers()),
        *((SourceKind.INPUT, path, x) for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor)),
    ]


@contextlib.contextmanager
def _nothing_hidden(calling: CallNotes | None) -> Iterator[None]:
    """Makes ops visible that a trace would not see: inside autograd.Functions, torch.cond, and TorchScript, which hides
    optimized code from autograd. Refuses hooks on saved tensors that are the model's own."""
    is_optimized = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    chosen = calling.choose if calling is not None else lambda: None
    with (
        _functions_marked_whole(),
        higher_order_ops_traced(chosen),
        saved_hooks_seen_by(check_saved_hooks),
        is_optimized,
    ):
        yield


def _dataclasses_as_dicts(tree: Any) -> Any:
    """A tree with each dataclass as a dict of its fields, as pytree takes a dataclass for a leaf."""

    def opened(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return _dataclasses_as_dicts({field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)})

    return pytree.tree_map(opened, tree)


def _drop_failed(graph: torch.fx.Graph) -> None:
    """Removes ops without the results that they give: they raised an error, which the code caught."""
    _erase(graph, lambda node: is_op(node.target) and "val" not in node.meta and not only_writes(node.target))


def _without_empty(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph without unread tensors of no elements, of which torch 2.11 makes two for each checkpoint."""
    return _erase(graph, lambda node: node.target is _EMPTY and list(node.args[0]) == [0])


def _erase(graph: torch.fx.Graph, is_idle: Callable[[Any], bool]) -> torch.fx.Graph:
    """The graph without those nodes, among the ones that nothing reads, for which is_idle is true."""
    for node in list(graph.nodes):
        if is_idle(node) and not node.users:
            graph.erase_node(node)
    return graph


def _aliased(extract: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """An alias of an op's result for the node's meta["val"], with the result's storage and requires_grad.

    extract(value, ...) is torch's own way: a new fake tensor for each result, which shares no storage and is slower.
    """
    if isinstance(value, list | tuple):
        return type(value)([_aliased(extract, item, *args, **kwargs) for item in value])
    if type(value) not in (Tensor, nn.Parameter):
        return extract(value, *args, **kwargs)
    with plain_calls():
        alias = value.detach()  # a view: code may change the shape of the result itself
        # Inside torch.vmap even asking for no gradient is refused.
        return alias.requires_grad_() if value.requires_grad else alias


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, DTensor) else value


def _answers(known: ConcreteValues) -> Callable[[Any, tuple[Any, ...]], Any]:
    """Answers aten.item, by which torch itself asks a tensor given as a size for its value, from the known values.
    Refuses ops whose dtypes a device refuses."""

    def answer(func: Any, args: tuple[Any, ...]) -> Any:
        check_one_dtype(func, args)
        return known.item(args[0]) if func is torch.ops.aten.item.default else NotImplemented

    return answer


def _caller(known: ConcreteValues) -> custom_ops.Caller:
    """Records calls of tpplan's marks, whose results are known where the operands' values are."""

    def call(op: Any, args: tuple[Any, ...]) -> Any:
        known.check_all_answered()
        with plain_calls():
            results = call_recorded(op, args)
            if results is not NotImplemented and not is_own_code_running():
                known.note_made(results, op, args, {})
        return results

    return call


@contextlib.contextmanager
def _nodes_noted(tracer: Any, scope: Callable[[], str], known: ConcreteValues) -> Iterator[None]:
    """Puts into the meta of each node that the tracer creates what is running then (SCOPE, CONSTANT,
    DIFFERENTIATED, and LINE except for the marks of hooks)."""
    create_node = tracer.create_node

    def create(*args: Any, **kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = create_node(*args, **kwargs)
        node.meta[SCOPE] = scope()
        node.meta[CONSTANT] = known.constant
        node.meta[DIFFERENTIATED] = torch.is_grad_enabled()
        if node.target not in _MARKS:
            node.meta[LINE] = _running_line()
        return node

    with patch.object(tracer, "create_node", create):
        yield


def _running_line() -> str:
    """The innermost running line of the model's code in a file, as `file:line: text`; "" where torch's layers run
    alone."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename[0] == "<" or not is_foreign(frame.f_code.co_filename)):
        if frame.f_code is record.__code__:
            return ""
        frame = frame.f_back
    return line_of(frame, frame.f_lineno) if frame is not None else ""


@contextlib.contextmanager
def _functions_marked_whole() -> Iterator[None]:
    """Marks operands and results of the model's autograd.Functions, so that they stay whole on every rank: a trace does
    not see their backward, which may do anything. Raises ModelError for one that reads weights it is not given, and for
    one that code calls by an `apply` which it looked up before."""
    running: list[type[torch.autograd.Function]] = []

    def marked(cls: type[torch.autograd.Function], apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_own_code_running() or keeps_inputs(cls):
            return apply(*args, **kwargs)
        if is_reentrant_checkpoint(cls):
            return _checkpointed(*args)
        given, named = pytree.tree_map(_whole, (args, kwargs))
        last = next(reversed(recorder().tracer.graph.nodes), None) if is_recording() else None
        running.append(cls)
        try:
            found = apply(*given, **named)
        finally:
            running.pop()
        if last is not None and _reads_more(last):
            raise ModelError(
                f"autograd.Function {cls.__name__} reads weights, or tensors with a gradient, that it is not given, as "
                "one that runs modules in its forward, and no trace sees its backward: hand them to apply, or use "
                "torch.utils.checkpoint"
            )
        return pytree.tree_map(_whole, found)

    def see(cls: type[torch.autograd.Function]) -> None:
        if not any(issubclass(own, cls) for own in running):
            raise ModelError(
                f"autograd.Function {cls.__name__} is called by an `apply` that was looked up before, as in "
                f"`f = {cls.__name__}.apply`, where no trace sees its backward: call {cls.__name__}.apply(...)"
            )

    with functions_run_by(marked), forwards_seen_by(see):
        yield


def _reads_more(last: torch.fx.Node) -> bool:
    """True where a node recorded after `last` reads an earlier one that carries a gradient and that is not marked."""
    made = set(itertools.takewhile(lambda node: node is not last, reversed(last.graph.nodes)))
    read = {operand for node in made for operand in node.all_input_nodes} - made
    return any(
        getattr(node.meta.get("val"), "requires_grad", False)
        and node.target is not _WHOLE
        and not any(reader.target is _WHOLE for reader in node.users)
        for node in read
    )


def _checkpointed(function: Callable[..., Any], _preserves_rng_state: bool, *given: Any) -> Any:
    """The results of a reentrant checkpoint, which carry a gradient where one of its arguments does."""
    carries = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)
    with torch.set_grad_enabled(torch.is_grad_enabled() and carries):
        return function(*given)


def _whole(argument: Any) -> Any:
    return custom_ops.whole(argument, argument.requires_grad) if isinstance(argument, Tensor) else argument


@contextlib.contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Puts meta tensors in place of the model's parameters and buffers, ties kept; restores its own at the end."""
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    moved = {name: on_meta_like(value) for name, value in values.items() if not value.is_meta}
    with tensors_in_place(model, moved) if moved else contextlib.nullcontext():
        yield


def on_meta_like(value: Tensor) -> Tensor:
    """A meta parameter or tensor with the shape, strides, dtype and requires_grad of a given one."""
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty

"""torch.fx's tracer of dispatched ops, and the modes that are on.

make_fx with pre_dispatch=True records ops before autograd takes them apart: `aten.linear`, attention, views as the code
called them. torch.export does so too, but code may take other branches under it than in training.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    TorchFunctionMetadataMode,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.torch_internals.checkpoints import unfinished_ended
from tpplan.torch_internals.probes import Probe
from tpplan.torch_internals.tensors import plain_calls, storage_key

__all__ = ["PROBES", "TorchDispatchMode"]

#: function modes by which torch records
_TRACERS = (TorchFunctionMetadataMode, PreDispatchTorchFunctionMode)
#: the file of torch's that calls compiled functions, from a function named compile_wrapper
_CALLS_COMPILED = "_dynamo/eval_frame.py"
#: namespaces of ops that return tensors, numbers, and lists of these
_PLAIN_NAMESPACES = frozenset({"aten", "tpplan", "_c10d_functional"})
#: types of arguments that a node has as they are
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
#: ops of which torch records others, or none
_SPECIAL = (
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.is_nonzero.default,
)
#: torch's function that describes each result a second time, as meta["tensor_meta"]
DESCRIBE = "_extract_tensor_metadata"


def recorded(run: Callable[..., Any], tensors: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The graph of run(*tensors): every op, before autograd takes it apart, its results as meta["val"].

    Functions that code has compiled run as they are written. Where `run` raises, unfinished checkpoints are ended
    (checkpoints.unfinished_ended).
    """
    # A graph module writes itself down as code, which nobody runs, unless it is lazy.
    with unfinished_ended(), _compiled_as_written(), _use_lazy_graph_module(True):
        return make_fx(lambda: run(*_entered(tensors)), pre_dispatch=True)()


def _entered(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, each with a placeholder in the graph that is being recorded: torch gives a function's arguments
    theirs in three times the time."""
    tracer = recorder().tracer
    with plain_calls(), unrecorded():
        for position, tensor in enumerate(tensors):
            _track(tensor, tracer.create_node("placeholder", f"arg{position}_1", (), {}), tracer)
    return tensors


def _compiled_as_written() -> contextlib.AbstractContextManager[object]:
    compiler = sys.modules.get("torch._dynamo")  # importing it takes a second, which only compiled code is worth
    if compiler is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[object] = compiler.config.patch(error_on_nested_fx_trace=False)
    return found


def calls_compiled_code(frame: FrameType) -> bool:
    """True for the frame in which torch.compile calls a function that it has compiled; code that is kept from being
    compiled has a frame in the same file."""
    return frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith(_CALLS_COMPILED)


def recorder() -> Any:
    """The recording mode that is on; its `tracer` creates the nodes of `tracer.graph`."""
    mode = get_proxy_mode()
    assert mode is not None, "no recording is running"
    return mode


def is_recording() -> bool:
    """True while ops are recorded, by tpplan or by torch.compile."""
    return get_proxy_mode() is not None


def is_recorded(tensor: Tensor) -> bool:
    """True for the result of a recorded op, and for a tensor that has a placeholder."""
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return slot is not None and slot.proxy.node.op != "get_attr"


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """A context in which no op is recorded."""
    return disable_proxy_modes_tracing()


def call_recorded(op: Any, args: tuple[Any, ...]) -> Any:
    """op(*args), recorded as one node with the node's result as meta["val"]. op: torch.ops.aten.to.dtype, say, or an
    operator without overloads, as torch.ops.tpplan.boundary. NotImplemented where nothing is recorded, or an argument
    is not a recorded tensor."""
    mode: Any = get_proxy_mode()
    if mode is None:
        return NotImplemented
    with plain_calls(), disable_proxy_modes_tracing(), torch._C._DisablePythonDispatcher():
        return _recorded_call(mode.tracer, op if isinstance(op, OpOverload) else op.default, args, {})


class _UnlikeError(Exception):
    """A call has an argument that is no recorded tensor, and nothing whose value a node holds."""


def _recorded_call(tracer: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a call, which becomes a node; NotImplemented where an argument cannot be one of a node as it is.
    The node is without a result where the op raises."""
    try:
        given = tuple(_as_argument(arg, tracer) for arg in args)
        named = {name: _as_argument(arg, tracer) for name, arg in kwargs.items()}
    except _UnlikeError:
        return NotImplemented
    node = tracer.create_node(
        "call_function", op, given, named, tracer.graph._target_to_str(op.overloadpacket.__name__)
    )
    results = op(*args, **kwargs)
    _track_all(results, node, tracer)
    return results


def _as_argument(value: Any, tracer: Any) -> Any:
    """An argument of a call as that of a node. Raises _UnlikeError."""
    if isinstance(value, Tensor):
        slot = get_proxy_slot(value, tracer, None)
        if slot is None or slot.constant is not None:
            raise _UnlikeError
        return slot.proxy.node
    if type(value) in (list, tuple):
        return type(value)(_as_argument(item, tracer) for item in value)
    if type(value) not in _VALUES:
        raise _UnlikeError
    return value


def _track_all(results: Any, node: torch.fx.Node, tracer: Any) -> None:
    """Makes a node the origin of its results: of tensors, and of those in lists, each by a node of its own."""
    if isinstance(results, Tensor):
        _track(results, node, tracer)
    elif isinstance(results, list | tuple):
        node.meta["val"] = proxy_tensor.extract_val(results)
        for position, result in enumerate(results):
            item = tracer.create_node("call_function", operator.getitem, (node, position), {})
            _track_all(result, item, tracer)


@functools.cache
def _is_plain(op: Any) -> bool:
    """True for an op that torch records as it is called: with neither values of its tensors nor copies of them."""
    if not isinstance(op, OpOverload) or op in _SPECIAL:
        return False
    return op.namespace in _PLAIN_NAMESPACES and torch.Tag.data_dependent_output not in op.tags


def _track(tensor: Tensor, node: torch.fx.Node, tracer: Any) -> None:
    """Makes a node the origin of a tensor whose sizes are plain integers."""
    set_proxy_slot(tensor, tracer, _ProxyTensor(tracer.proxy(node), None))
    node.meta["val"] = proxy_tensor.extract_val(tensor, include_real=node.op == "placeholder")


@contextlib.contextmanager
def untraced(others: tuple[type[TorchFunctionMode], ...] = ()) -> Iterator[None]:
    """Runs ops outside of the recording that is on, with function modes of the classes in `others` off."""
    plain_kernels = torch._C._DisablePythonDispatcher()  # torch's kernels in Python are slow, and give other shapes
    kept = _function_modes_kept(lambda mode: not isinstance(mode, (*_TRACERS, *others)))
    with plain_kernels, disable_proxy_modes_tracing(), kept:
        yield


def is_function_mode_on(mode: TorchFunctionMode) -> bool:
    """True where the mode is among those that see calls now."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(one is mode for one in stack)


def without_function_mode(mode: TorchFunctionMode) -> contextlib.AbstractContextManager[None]:
    """A context in which one function mode is off."""
    return _function_modes_kept(lambda one: one is not mode)


@contextlib.contextmanager
def _function_modes_kept(is_kept: Callable[[Any], bool]) -> Iterator[None]:
    """Switches the function modes off for which is_kept is false."""
    before: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    kept = list(filter(is_kept, before))
    _replace_function_modes(before, kept)
    try:
        yield
    finally:
        _replace_function_modes(kept, before)


def _replace_function_modes(before: Sequence[Any], after: Sequence[Any]) -> None:
    for _ in before:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in after:
        _push_mode(mode)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def results_kept_by(keep: Callable[..., Any]) -> Iterator[None]:
    """Makes each recorded node's meta["val"] keep(extract, value, ...).

    extract(value, ...) is what torch itself would take: a fake tensor, which shares storage with no other. Results are
    not described a second time, as passes of torch would need it.
    """
    extract = proxy_tensor.extract_val

    def kept(value: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():  # a view of a tensor is no op of the code
            return keep(extract, value, *args, **kwargs)

    with patch.object(proxy_tensor, "extract_val", kept), patch.object(proxy_tensor, DESCRIBE, lambda *_: None):
        yield


@contextlib.contextmanager
def dispatched_plainly(instead: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Makes recorded ops run by the kernels that they have without a recording, and records most of them directly.

    The recording mode turns on torch's kernels in Python, which give other shapes (0 dims for a cross entropy that is
    not reduced, in torch 2.13). Where instead(op, arguments) is not NotImplemented, it is the op's result, unrecorded.
    """
    mode = recorder()
    dispatch = mode.__torch_dispatch__

    def plain(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = instead(func, args)
        if result is not NotImplemented:
            return result
        with torch._C._DisablePythonDispatcher():
            if _is_plain(func):
                result = _recorded_call(mode.tracer, func, args, kwargs or {})
            return dispatch(func, types, args, kwargs or {}) if result is NotImplemented else result

    with patch.object(mode, "__torch_dispatch__", plain):
        yield


# ---- probes


def _recorded() -> bool:
    """A linear and a view are one node each, in order, and their results share a storage."""
    aliases: list[Any] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        aliases.append(recorder().tracer.graph)
        return torch.nn.functional.linear(x, w).view(-1)

    given = (torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta", requires_grad=True))
    with results_kept_by(lambda extract, value, *args, **kwargs: value.detach()):
        graph = recorded(run, given).graph
    calls = [node for node in graph.nodes if node.op == "call_function" and "detach" not in str(node.target)]
    values = [node.meta["val"] for node in calls]
    return (
        [str(node.target) for node in calls] == ["aten.linear.default", "aten.view.default"]
        and [tuple(value.shape) for value in values] == [(2, 4), (8,)]
        and storage_key(values[0]) == storage_key(values[1])
        and len(aliases) == 1
    )


def _plainly() -> bool:
    seen: list[str] = []

    def instead(func: Any, _args: tuple[Any, ...]) -> Any:
        seen.append(str(func))
        return NotImplemented

    def run(x: Tensor) -> Tensor:
        with unrecorded():
            x.neg()
        with dispatched_plainly(instead):
            return x.sin()

    graph = recorded(run, (torch.empty(2, device="meta"),)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return seen == ["aten.sin.default"] and targets == ["aten.sin.default"]


def _untraced() -> bool:
    """An op inside is neither recorded nor seen by the mode that is off; an op after it is both."""
    seen: list[str] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def run(x: Tensor) -> Tensor:
        with Noting():
            with untraced((Noting,)):
                x.neg()
            return x.sin()

    graph = recorded(run, (torch.empty(2, device="meta"),)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return seen == ["sin"] and targets == ["aten.sin.default"]


def _recorded_calls() -> bool:
    """An operator called directly has the nodes of a plain call, and results with gradients; a constant has none."""
    op: Any = torch.ops.aten.relu
    graphs: list[torch.fx.Graph] = []
    gradients: list[bool] = []
    other = torch.empty(2, device="meta")

    def run(x: Tensor) -> Tensor:
        found: Tensor = call_recorded(op, (x,)) if graphs else op(x)
        gradients.append(found.requires_grad)
        return found.sin()

    for _ in range(2):
        graphs.append(make_fx(run, pre_dispatch=True)(torch.empty(2, device="meta", requires_grad=True)).graph)
    texts = [[(node.name, str(node.target), str(node.args)) for node in graph.nodes] for graph in graphs]
    return texts[0] == texts[1] and gradients == [True, True] and call_recorded(op, (other,)) is NotImplemented


def _compiled() -> bool:
    callers: list[bool] = []

    def sine(x: Tensor) -> Tensor:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not calls_compiled_code(frame):
            frame = frame.f_back
        callers.append(frame is not None)
        return x.sin()

    x = torch.empty(2, device="meta")
    graph = recorded(torch.compile(sine, backend="eager"), (x,)).graph
    recorded(torch.compiler.disable(sine), (x,))  # type: ignore[no-untyped-call]
    return "aten.sin.default" in [str(node.target) for node in graph.nodes] and callers == [True, False]


PROBES = (
    Probe(
        name="recording a forward",
        uses=f"torch.fx.experimental.proxy_tensor.make_fx, get_proxy_mode, extract_val, {DESCRIBE}",
        needed_for="tracing models",
        works=_recorded,
    ),
    Probe(
        name="recording with plain kernels",
        uses="the recorder's __torch_dispatch__, torch._C._DisablePythonDispatcher, disable_proxy_modes_tracing",
        needed_for="the right shapes in a trace",
        works=_plainly,
    ),
    Probe(
        name="recording a call directly",
        uses="proxy_tensor.get_proxy_slot, set_proxy_slot, _ProxyTensor, extract_val, the recorder's tracer's "
        "create_node and proxy",
        needed_for="traces of many layers in little time",
        works=_recorded_calls,
    ),
    Probe(
        name="running beside a trace",
        uses="torch.overrides._get_current_function_mode_stack, _pop_mode, _push_mode, TorchFunctionMetadataMode",
        needed_for="comparing like layers with the traced one",
        works=_untraced,
    ),
    Probe(
        name="recording compiled functions",
        uses="torch._dynamo.config.error_on_nested_fx_trace, compile_wrapper in torch._dynamo.eval_frame",
        needed_for="models with functions that torch.compile compiles",
        works=_compiled,
    ),
)

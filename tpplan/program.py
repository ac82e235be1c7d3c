"""One forward as a program: every op that runs, in order, with the shapes of its results, in a torch.fx graph.

`as_run` runs the module on meta tensors and writes down what runs, before autograd takes it apart: `aten.linear`,
attention and views as the code called them. `as_exported` is torch.export(strict=False): it knows more ways around
values that are not there, but code can tell that it is being exported, and take another path than it does in training.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from tpplan.graph import SourceKind
from tpplan.known import KnownValues

#: names of the modules that run, the innermost last
Running = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A placeholder of the graph: a parameter or buffer by its name, an input by its path, a constant."""

    placeholder: str
    kind: SourceKind
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What ran. Nodes carry their results as meta["val"] and the modules that ran as meta["nn_module_stack"]."""

    graph_module: torch.fx.GraphModule
    given: tuple[Given, ...]
    out_spec: pytree.TreeSpec


class StoppedError(Exception):
    """The module raised. `ran` is the graph until then, where it is known; the module's error is the cause."""

    def __init__(self, error: Exception, ran: torch.fx.Graph | None) -> None:
        super().__init__(str(error))
        self.ran = ran


def as_run(module: nn.Module, leaves: Sequence[Any], paths: Sequence[str]) -> Program:
    """module(*leaves) on meta tensors. Raises StoppedError, also for code that asks for values which are not there."""
    names: list[tuple[SourceKind, str, Tensor]] = [
        *((SourceKind.PARAMETER, name, value) for name, value in module.named_parameters()),
        *((SourceKind.BUFFER, name, value) for name, value in module.named_buffers()),
        *((SourceKind.INPUT, p, leaf) for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)),
    ]
    specs: list[pytree.TreeSpec] = []
    graphs: list[torch.fx.Graph] = []

    def run(*_: Tensor) -> list[Any]:
        """The tensors it is given are the module's own and those among the leaves."""
        mode = get_proxy_mode()
        assert mode is not None
        graphs.append(mode.tracer.graph)
        with KnownValues():
            found, spec = pytree.tree_flatten(module(*leaves))
        specs.append(spec)
        return found

    try:
        tensors = [value for _, _, value in names]
        graph_module = make_fx(run, pre_dispatch=True)(*tensors)
        _Results(graph_module).run(*tensors)
    except Exception as error:
        raise StoppedError(error, graphs[0] if graphs else None) from error
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    given = tuple(
        Given(placeholder=placeholder, kind=kind, label=label)
        for placeholder, (kind, label, _) in zip(placeholders, names, strict=True)
    )
    return Program(graph_module=graph_module, given=given, out_spec=specs[0])


class _Results(torch.fx.Interpreter):
    """Runs the graph once more to see which results share storage; a tracer only notes their shapes."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = result
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().run(*args, **kwargs)


def as_exported(module: nn.Module, leaves: Sequence[Any], paths: Sequence[str]) -> Program:
    """module(*leaves) by torch.export. Raises StoppedError."""
    try:
        exported = torch.export.export(module, tuple(leaves), strict=False)
    except Exception as error:
        raise StoppedError(error, _graph_so_far(error)) from error
    remaining = iter(paths)
    given = []
    for spec in exported.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind.name, SourceKind.CONSTANT)
        name = getattr(spec.arg, "name", "")
        label = next(remaining) if kind is SourceKind.INPUT else str(spec.target or name)
        given.append(Given(placeholder=name, kind=kind, label=label))
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None
    return Program(graph_module=exported.graph_module, given=tuple(given), out_spec=out_spec)


_KINDS = {"PARAMETER": SourceKind.PARAMETER, "BUFFER": SourceKind.BUFFER, "USER_INPUT": SourceKind.INPUT}


def _graph_so_far(error: BaseException) -> torch.fx.Graph | None:
    """The graph that the tracer was filling, from the frames that the error left."""
    found = None
    step = error.__traceback__
    while step is not None:
        graph = getattr(step.tb_frame.f_locals.get("tracer"), "graph", None)
        found = graph if isinstance(graph, torch.fx.Graph) else found
        step = step.tb_next
    return found


@contextlib.contextmanager
def naming_modules(model: nn.Module, running: Running, *, prefix: str, on_nodes: bool) -> Iterator[None]:
    """Keeps in `running` the names of the modules that run; an error leaves them standing. `on_nodes` writes them, as
    `prefix`.name, where export would."""

    def note() -> None:
        if on_nodes:
            names = [f"{prefix}.{name}" if name else prefix for name in running]
            torch.fx.traceback.current_meta["nn_module_stack"] = {name: (name, "") for name in names}

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            running.append(name)
            note()

        return hook

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()
        note()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.fx.traceback.preserve_node_meta() if on_nodes else contextlib.nullcontext():
            note()
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """The model's parameters and buffers as meta tensors, ties kept; its own are back at the end."""
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    moved = {name: _like(value) for name, value in values.items() if not value.is_meta}
    with stateless._reparametrize_module(model, moved, tie_weights=True) if moved else contextlib.nullcontext():
        yield


def _like(value: Tensor) -> Tensor:
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty

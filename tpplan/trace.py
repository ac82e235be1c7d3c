"""From a torch model to a ModelGraph: `torch.export(strict=False)`, with every module boundary marked.

Hooks on every module pass each tensor that enters or leaves its forward through the custom op `tpplan::boundary`, which
is a view, so aliasing stays as it was. The exported graph is pre-dispatch: `aten.linear`, attention and views as the
model wrote them. Nothing is computed: the model should stand on the meta device.
"""

import contextlib
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tpplan.blocks import find_repeated_blocks
from tpplan.errors import ModelError
from tpplan.graph import Argument, Boundary, Direction, ModelGraph, Op, Ref, Source, SourceKind, Value, within
from tpplan.units import FLOATING_DTYPES

logger = logging.getLogger(__name__)

#: what the loss's own ops give as their module
LOSS_SCOPE = "<loss>"

#: changes a tensor at a boundary while tracing, by (module, direction, path); the proof resizes to local shapes here
BoundaryHook = Callable[[torch.Tensor, str, Direction, str], torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]
Inputs = Mapping[str, Any] | tuple[Any, ...]

_LIBRARY = torch.library.Library("tpplan", "FRAGMENT")
_LIBRARY.define("boundary(Tensor(a) x, str module, str direction, str path) -> Tensor(a)")
_LIBRARY.impl("boundary", lambda x, module, direction, path: x.view_as(x), "CompositeImplicitAutograd")

#: bookkeeping that export leaves in the graph and that computes nothing
_IGNORED = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten.sym_size.int"})


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
    """Model and loss as one module. Inputs come flat, so that export names each."""

    def __init__(self, model: nn.Module, loss: Loss | None, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.spec = spec

    def forward(self, *leaves: Any) -> Any:
        inputs = pytree.tree_unflatten(list(leaves), self.spec)
        accepted = forward_inputs(self.model, inputs)
        outputs = self.model(**accepted) if isinstance(accepted, Mapping) else self.model(*accepted)
        return self.loss(outputs, inputs) if self.loss is not None else outputs


def path_of(entries: tuple[Any, ...]) -> str:
    """A pytree key path as dotted text: `attention_mask`, `pos.0`."""
    names = (getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))) for entry in entries)
    return ".".join(str(name) for name in names)


def named_tensors(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The tree with each tensor replaced by change(path, tensor)."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return pytree.tree_unflatten(
        [change(path_of(path), leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves], spec
    )


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under their parameter's name, so that a path does not depend on how a call is written."""
    positional = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
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
def _marked(model: nn.Module, hook: BoundaryHook | None) -> Iterator[None]:
    """Hooks that mark every crossing of every module, removed at the end."""

    def mark(name: str, direction: Direction) -> Callable[[str, torch.Tensor], torch.Tensor]:
        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            marked = torch.ops.tpplan.boundary(tensor, name, str(direction), path)
            return hook(marked, name, direction, path) if hook is not None else marked

        return change

    handles = []
    for name, module in model.named_modules():
        if type(module).forward is nn.Module.forward:  # a container: nothing crosses it
            continue
        enter, leave = mark(name, Direction.INPUT), mark(name, Direction.OUTPUT)
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, kwargs, enter=enter: convert_arguments(m, args, kwargs, enter), with_kwargs=True
            )
        )
        handles.append(
            module.register_forward_hook(lambda m, args, out, leave=leave: named_tensors({"output": out}, leave)["output"])
        )
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
    hook: BoundaryHook | None = None,
) -> ModelGraph:
    """The graph of one training forward, loss included, at the shapes of `inputs`.

    `inputs` is what example_inputs gives: keyword arguments (those forward does not take go to the loss alone), or a
    tuple. Raises ModelError where export fails, naming the module that was running and the original error.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    paths = [path_of(path) for path, _ in pytree.tree_flatten_with_path(inputs)[0]]
    device = next((p.device for p in model.parameters()), torch.device("meta"))
    placed = tuple(leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    model.train()
    running: list[str] = []
    with _marked(model, hook), _call_stack(model, running), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(_Step(model, loss, spec), placed, strict=False)
        except Exception as error:
            where = f"in module {running[-1]!r}" if running and running[-1] else "in the model's forward or loss"
            raise ModelError(
                f"the model could not be traced: {type(error).__name__} {where}: {error}\n"
                "torch.export(strict=False) must run it: look for control flow on tensor values, .item() or numpy there."
            ) from error
    return _Reader(model, program, paths).read()


@contextlib.contextmanager
def _call_stack(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keeps the names of the modules whose forward is running; an error leaves them standing."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: (running.pop(), None)[1]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Reader:
    """Walks an exported program once, into a ModelGraph."""

    model: nn.Module
    program: Any
    input_paths: list[str]
    values: dict[str, Value] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    nodes: list[Op | Boundary] = field(default_factory=list)
    storages: dict[int, str] = field(default_factory=dict)
    with_gradient: bool = True

    def read(self) -> ModelGraph:
        """The whole program."""
        names = self._placeholders()
        outputs = self._walk(self.program.graph_module, names)
        leaves = [(path_of(path), leaf) for path, leaf in pytree.tree_flatten_with_path(self._output_tree(outputs))[0]]
        named = tuple((path or "output", leaf.name) for path, leaf in leaves if isinstance(leaf, Ref))
        scalars = [name for _, name in named if not self.values[name].shape and self.values[name].carries_gradient]
        graph = ModelGraph(
            values=self.values,
            sources=tuple(self.sources),
            nodes=tuple(self.nodes),
            outputs=named,
            loss=scalars[0] if scalars else None,
        )
        return find_repeated_blocks(graph)

    def _output_tree(self, outputs: list[Argument]) -> Any:
        return pytree.tree_unflatten(outputs, self.program.call_spec.out_spec)

    def _placeholders(self) -> dict[str, Argument]:
        """Graph inputs by node name: parameters merged by identity, buffers, constants, the user's inputs in order."""
        signature = self.program.graph_signature
        parameters = {id(p): [] for p in self.model.parameters()}
        for label, parameter in self.model.named_parameters(remove_duplicate=False):
            parameters[id(parameter)].append(label)
        by_label = dict(self.model.named_parameters(remove_duplicate=False))
        paths = iter(self.input_paths)
        canonical: dict[str, str] = {}
        names: dict[str, Argument] = {}
        for spec in signature.input_specs:
            name, kind = getattr(spec.arg, "name", ""), spec.kind.name
            node = next(n for n in self.program.graph.nodes if n.name == name)
            if kind == "PARAMETER":
                label = spec.target.removeprefix("model.")
                labels = tuple(parameters[id(by_label[label])])
                if labels[0] in canonical:
                    names[name] = Ref(canonical[labels[0]])
                    continue
                canonical[labels[0]] = name
                trainable = by_label[label].requires_grad
                source = Source(
                    kind=SourceKind.PARAMETER, result=name, label=labels[0], aliases=labels[1:], trainable=trainable
                )
            elif kind == "USER_INPUT":
                path = next(paths)
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    names[name] = _argument(node.meta.get("val"), {})
                    continue
                source = Source(kind=SourceKind.INPUT, result=name, label=path)
                trainable = False
            else:
                target = str(spec.target or name).removeprefix("model.")
                source_kind = SourceKind.BUFFER if kind == "BUFFER" else SourceKind.CONSTANT
                source = Source(kind=source_kind, result=name, label=target)
                trainable = False
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise ModelError(f"input {name} of the traced graph is a {kind}, which is not a tensor")
            self._add_value(name, node.meta["val"], carries_gradient=trainable)
            self.sources.append(source)
            names[name] = Ref(name)
        return names

    def _add_value(self, name: str, tensor: torch.Tensor, *, carries_gradient: bool) -> None:
        storage = self.storages.setdefault(tensor.untyped_storage()._cdata, name)
        self.values[name] = Value(
            name=name,
            shape=tuple(int(size) for size in tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            carries_gradient=carries_gradient,
            storage=storage,
        )

    def _walk(self, module: Any, names: dict[str, Argument]) -> list[Argument]:
        """One graph, inlining the graphs of higher-order ops. Returns its outputs."""
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    continue
                case "get_attr":
                    names[node.name] = self._attribute(module, node)
                case "call_function":
                    names[node.name] = self._call(module, node, names)
                case "output":
                    return [_argument(argument, names) for argument in node.args[0]]
                case _:
                    raise ModelError(f"traced graph: unexpected node {node.op} {node.name}")
        return []

    def _attribute(self, module: Any, node: Any) -> Argument:
        value = operator.attrgetter(node.target)(module)
        if isinstance(value, torch.Tensor):
            name = f"constant_{node.name}"
            if name not in self.values:
                self._add_value(name, value, carries_gradient=False)
                self.sources.append(Source(kind=SourceKind.CONSTANT, result=name, label=node.target))
            return Ref(name)
        return f"graph:{node.target}"

    def _call(self, module: Any, node: Any, names: dict[str, Argument]) -> Argument:
        if node.target is operator.getitem:
            container = names[node.args[0].name]
            return container[node.args[1]] if isinstance(container, tuple) else None
        if node.target is torch._C._set_grad_enabled:
            self.with_gradient = bool(node.args[0])
            return None
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._higher_order(module, node, names)
        target = str(node.target)
        if target in _IGNORED or target.startswith("sym_"):
            return None
        if target == "tpplan.boundary.default":
            return self._boundary(node, names)
        return self._op(node, target, names)

    def _higher_order(self, module: Any, node: Any, names: dict[str, Argument]) -> Argument:
        """Inlines wrap_with_set_grad_enabled, wrap_with_autocast, checkpoint and the like: the one graph they hold."""
        graphs = [a for a in node.args if isinstance(a, torch.fx.Node) and str(names[a.name]).startswith("graph:")]
        if len(graphs) != 1:
            raise ModelError(f"{node.target} in {_module_of(node)!r} branches over {len(graphs)} graphs: not supported")
        inner = operator.attrgetter(str(names[graphs[0].name]).removeprefix("graph:"))(module)
        tensors = [_argument(a, names) for a in node.args[node.args.index(graphs[0]) + 1 :]]
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        before = self.with_gradient
        if str(node.target) == "wrap_with_set_grad_enabled":
            self.with_gradient = bool(node.args[0])
        outer_names = {n.name: value for n, value in zip(placeholders, tensors[: len(placeholders)], strict=True)}
        outputs = self._walk(inner, outer_names)
        self.with_gradient = before
        return tuple(outputs)

    def _boundary(self, node: Any, names: dict[str, Argument]) -> Argument:
        operand = names[node.args[0].name]
        assert isinstance(operand, Ref)
        name = self._fresh(node.name)
        carries = self.values[operand.name].carries_gradient and self.with_gradient
        self._add_value(name, node.meta["val"], carries_gradient=carries)
        _, module, direction, path = node.args
        self.nodes.append(
            Boundary(
                name=name,
                module=module,
                direction=Direction(direction),
                path=path,
                operand=operand.name,
                result=name,
            )
        )
        return Ref(name)

    def _op(self, node: Any, target: str, names: dict[str, Argument]) -> Argument:
        name = self._fresh(node.name)
        args = tuple(_argument(argument, names) for argument in node.args)
        kwargs = tuple((key, _argument(value, names)) for key, value in node.kwargs.items())
        op = Op(name=name, target=target, args=args, kwargs=kwargs, results=(), module=_module_of(node))
        flows = self.with_gradient and target != "aten.detach.default"
        carries = flows and any(self.values[operand].carries_gradient for operand in op.operands)
        result, results = self._results(name, node.meta.get("val"), carries=carries)
        self.nodes.append(Op(name=name, target=target, args=args, kwargs=kwargs, results=results, module=op.module))
        return result

    def _results(self, name: str, value: Any, *, carries: bool) -> tuple[Argument, tuple[str, ...]]:
        items = value if isinstance(value, tuple | list) else (value,)
        references: list[Argument] = []
        for position, item in enumerate(items):
            if not isinstance(item, torch.Tensor):
                references.append(None)
                continue
            label = name if item is value else f"{name}.{position}"
            floating = str(item.dtype).removeprefix("torch.") in FLOATING_DTYPES
            self._add_value(label, item, carries_gradient=carries and floating)
            references.append(Ref(label))
        results = tuple(reference.name for reference in references if isinstance(reference, Ref))
        return (tuple(references) if isinstance(value, tuple | list) else references[0]), results

    def _fresh(self, name: str) -> str:
        """A name not used yet: graphs of higher-order ops number their nodes anew."""
        candidate, number = name, 1
        while candidate in self.values:
            number += 1
            candidate = f"{name}__{number}"
        return candidate


def _module_of(node: Any) -> str:
    """Name of the innermost module running, LOSS_SCOPE outside the model."""
    stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
    innermost = stack[-1] if stack else ""
    if innermost == "model":
        return ""
    return innermost.removeprefix("model.") if innermost.startswith("model.") else LOSS_SCOPE


def _argument(value: Any, names: Mapping[str, Argument]) -> Argument:
    """A node argument as data: references, literals, tuples; dtypes, devices and the like by name."""
    match value:
        case torch.fx.Node():
            return names[value.name]
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return tuple(_argument(item, names) for item in value)
        case torch.dtype():
            return f"dtype:{str(value).removeprefix('torch.')}"
        case torch.device():
            return f"device:{value}"
        case torch.memory_format() | torch.layout():
            return f"torch:{str(value).removeprefix('torch.')}"
        case _:
            raise ModelError(f"traced graph: an argument of type {type(value).__name__} ({value!r}) is not supported")

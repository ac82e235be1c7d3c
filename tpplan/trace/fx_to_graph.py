"""From a recorded program to a ModelGraph: one walk over the nodes, which copies traced layers for their siblings."""

import hashlib
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tpplan.core.errors import ModelError
from tpplan.core.graph import (
    LEFT_AT,
    OWN_SCOPE,
    Argument,
    Boundary,
    Direction,
    ModelGraph,
    Op,
    Ref,
    Source,
    SourceKind,
    Value,
    unread_values,
)
from tpplan.core.repeated_blocks import find_repeated_blocks
from tpplan.core.units import FLOATING_DTYPES
from tpplan.layouts.rules import base_target
from tpplan.stages.stub import Stub
from tpplan.stages.whole_stubs import unread_in_stubs
from tpplan.torch_internals import pytree
from tpplan.torch_internals.autograd import AUTOCAST_ENDS, SET_GRAD_ENABLED
from tpplan.torch_internals.operators import is_higher_order, is_pointwise
from tpplan.torch_internals.tensors import is_of_functorch, storage_key
from tpplan.trace.forward_arguments import path_of
from tpplan.trace.graph_sources import ModelSources
from tpplan.trace.hooks.parameter_names import registered_name
from tpplan.trace.layer_images import Given, LayerImages, NotAlikeError
from tpplan.trace.record_fx import CONSTANT, DIFFERENTIATED, LINE, SCOPE, Program

#: ops that compute nothing
IGNORED = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten.sym_size.int"})


class UnreadableError(ModelError):
    """A node of the program cannot be in a ModelGraph. `module` is the name of the module that runs it."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


class CapturedError(UnreadableError):
    """Code reads a parameter of the model past the module that has it, so that it would miss what a plan puts there."""


@dataclass(slots=True)
class _Frame:
    """The nodes of a call of a traced layer, nodes[start:end], and the values that enter and leave it."""

    inputs: list[str]
    start: int
    outputs: list[str] = field(default_factory=list)
    end: int = 0


@dataclass
class GraphReader:
    """Turns one program of the model into a ModelGraph; another program needs another reader."""

    model: nn.Module
    program: Program
    values: dict[str, Value] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    nodes: list[Op | Boundary] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    storages: dict[int, str] = field(default_factory=dict)
    frames: dict[str, _Frame] = field(default_factory=dict)
    #: by the name of a traced layer
    given: dict[str, Given] = field(default_factory=dict)
    with_gradient: bool = True
    #: for each tensor with a gradient that is no parameter of the model, an entry of ModelGraph.questions: the trace
    #: takes it for a constant
    unregistered: list[tuple[str, str, bool]] = field(default_factory=list)
    #: by a constant's value, where the model holds it before the forward
    held: dict[str, str] = field(default_factory=dict)
    #: where forward keeps a tensor without a gradient -> the value; known after `read`
    kept: dict[str, str] = field(default_factory=dict)

    @cached_property
    def module_names(self) -> dict[str, str]:
        """The first name of a module, under which it is planned, by each of its names."""
        first: dict[int, str] = {}
        named = self.model.named_modules(remove_duplicate=False)
        return {name: first.setdefault(id(module), name) for name, module in named}

    def read(self) -> ModelGraph:
        """The graph of the whole program, which does not say which values are read or which blocks repeat. Raises
        UnreadableError, ModelError, NotAlikeError."""
        names = self._placeholders()
        outputs = self._walk(names)
        num_returned = len(outputs) - len(self.program.left) - len(self.program.kept)
        tree = pytree.tree_unflatten(outputs[:num_returned], self.program.out_spec)
        leaves = [(path_of(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]
        named = tuple((path or "output", leaf.name) for path, leaf in leaves if isinstance(leaf, Ref))
        scalars = [name for _, name in named if not self.values[name].shape and self.values[name].carries_gradient]
        behind = zip((*self.program.left, *self.program.kept), outputs[num_returned:], strict=True)
        left = list(itertools.islice(behind, len(self.program.left)))
        self.kept = {where: leaf.name for where, leaf in behind if isinstance(leaf, Ref)}
        named += tuple((LEFT_AT + where, leaf.name) for where, leaf in left if isinstance(leaf, Ref))
        stubs = self._stubs()
        dropped = unread_in_stubs(self.nodes, stubs, [name for _, name in named]) if stubs else []
        gone, made = {node.name for node in dropped}, {name for node in dropped for name in node.results}
        return ModelGraph(
            values={name: value for name, value in self.values.items() if name not in made},
            sources=tuple(self.sources),
            nodes=tuple(node for node in self.nodes if node.name not in gone),
            outputs=named,
            loss=scalars[0] if scalars else None,
            questions=(*((q.where, q.answer, q.is_choice) for q in self.program.questions), *self.unregistered),
            read_by_stubs=frozenset(name for node in dropped for name in node.operands) - made,
            lines=self.lines,
            other_names=self._other_names(),
            held=self.held,
        )

    def complete(self, graph: ModelGraph) -> ModelGraph:
        """The graph with which of its values are read, and which blocks repeat."""
        unread = unread_values(graph)
        values = graph.values | {name: replace(graph.values[name], is_read=False) for name in unread}
        return find_repeated_blocks(replace(graph, values=values) if unread else graph, self._stubs())

    def _stubs(self) -> set[str]:
        return {name for name, module in self.model.named_modules() if isinstance(module, Stub)}

    def _other_names(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for name, first in self.module_names.items():
            if name != first:
                found[first] = (*found.get(first, ()), name)
        return found

    def _placeholders(self) -> dict[str, Argument]:
        """The value of each placeholder, by the node's name. Adds the sources."""
        own = ModelSources(self.model)
        nodes = {node.name: node for node in self.program.graph_module.graph.nodes if node.op == "placeholder"}
        names: dict[str, Argument] = {}
        for given in self.program.given:
            value, source = nodes[given.name].meta["val"], own.source(given)
            name = self._fresh(source.result)
            is_differentiated = source.kind is SourceKind.INPUT and value.requires_grad
            self._add_value(name, value, carries_gradient=source.trainable or is_differentiated)
            self.sources.append(replace(source, result=name))
            names[given.name] = Ref(name)
        return names

    def _add_value(self, name: str, tensor: torch.Tensor, *, carries_gradient: bool) -> None:
        if is_of_functorch(tensor):
            raise ModelError(
                f"{name} is a tensor inside torch.func or torch.vmap, which has no layout: compute it without them"
            )
        storage = self.storages.setdefault(storage_key(tensor), name)
        self.values[name] = Value(
            name=name,
            shape=tuple(int(size) for size in tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            carries_gradient=carries_gradient,
            storage=storage,
        )

    def _walk(self, names: dict[str, Argument]) -> list[Argument]:
        """Reads the program's nodes in order. Returns its outputs."""
        for node in self.program.graph_module.graph.nodes:
            match node.op:
                case "placeholder":
                    continue
                case "get_attr" | "call_function":
                    try:
                        names[node.name] = self._attribute(node) if node.op == "get_attr" else self._call(node, names)
                    except UnreadableError:
                        raise
                    except ModelError as error:
                        raise UnreadableError(str(error), node.meta[SCOPE]) from error
                case "output":
                    return [argument_of(argument, names) for argument in node.args[0]]
                case _:
                    raise ModelError(
                        f"torch {torch.__version__} recorded a node of kind {node.op} ({node.name}), and tpplan knows "
                        "ops and tensors alone: `tpplan doctor` says what works with this torch"
                    )
        return []

    def _attribute(self, node: Any) -> Argument:
        value, where = operator.attrgetter(node.target)(self.program.graph_module), node.meta.get(SCOPE) or "the root"
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"module {where} hands an op a {type(value).__name__}, which a plan cannot hold: use tensors, numbers, "
                "texts, dtypes and lists of these"
            )
        if (own := registered_name(value)) is not None:
            raise CapturedError(
                f"module {where} reads parameter {own} past the module that has it (through a closure, a list, a "
                "global name): read it as that module's attribute",
                node.meta[SCOPE],
            )
        name = f"constant_{node.name}"
        made = None if is_of_functorch(value) else self.storages.get(storage_key(value))
        if made is not None and made not in self._held():
            raise ModelError(
                f"module {where} gives an op a tensor that shares memory with {made}, and that no op of torch made "
                "of it in forward (as_subclass, or a view that a module keeps): use detach, view_as or clone there"
            )
        if value.requires_grad and name not in self.values:
            what = f"a weight of shape {list(value.shape)}, which module {where} reads and none registers,"
            self.unregistered.append((what, "constant", False))
        if name not in self.values:
            self._add_value(name, value, carries_gradient=False)
            label = f"{node.target} {node.meta[CONSTANT] or _digest(value)}".strip()
            self.sources.append(Source(kind=SourceKind.CONSTANT, result=name, label=label))
            if not is_of_functorch(value) and (path := self.program.held.get(storage_key(value))) is not None:
                self.held[name] = path
        return Ref(name)

    def _held(self) -> set[str]:
        """The buffers and constants so far."""
        held = (SourceKind.BUFFER, SourceKind.CONSTANT)
        return {source.result for source in self.sources if source.kind in held}

    def _call(self, node: Any, names: dict[str, Argument]) -> Argument:
        if node.target is operator.getitem:
            container = names[node.args[0].name]
            return container[node.args[1]] if isinstance(container, tuple) else None
        # Not by the switches, which are recorded, as an autograd.Function's forward has gradients off without one.
        self.with_gradient = bool(node.meta.get(DIFFERENTIATED, True))
        if node.target is SET_GRAD_ENABLED or node.target in AUTOCAST_ENDS:  # dtypes say what autocast did
            return None
        if is_higher_order(node.target):
            raise ModelError(
                f"module {node.meta[SCOPE] or 'the root'} calls {node.target}: of torch's higher-order ops, tpplan "
                "traces torch.cond and flex_attention alone"
            )
        target = str(node.target)
        if target in IGNORED or target.startswith("sym_"):
            return None
        match target:
            case "tpplan.boundary.default":
                return self._boundary(node, names)
            case "tpplan.frame.default":
                return self._frame(node, names)
            case "tpplan.sibling.default":
                return self._sibling(node, names)
        return self._op(node, target, names)

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

    def _frame(self, node: Any, names: dict[str, Argument]) -> Argument:
        """Notes that a value enters or leaves a layer that siblings may copy. Returns the value."""
        operand = names[node.args[0].name]
        assert isinstance(operand, Ref)
        _, module, side = node.args
        if side == "enter":
            frame = self.frames.setdefault(module, _Frame([], len(self.nodes)))
            frame.inputs.append(operand.name)
            frame.start = len(self.nodes)
        else:
            self.frames[module].outputs.append(operand.name)
            self.frames[module].end = len(self.nodes)
        return operand

    def _sibling(self, node: Any, names: dict[str, Argument]) -> Argument:
        """Copies the nodes of a traced layer for a sibling, under the sibling's names. Raises NotAlikeError."""
        inputs, module, like = node.args
        frame = self.frames[like]
        known = self.given.get(like)
        if known is None or known.count != len(self.sources):
            known = self.given[like] = Given.of(like, self.sources)
        images = LayerImages(known, self.values, self.lines, self._fresh, self.first_name, like=like, module=module)
        for original, given in zip(frame.inputs, inputs, strict=True):
            operand = names[given.name]
            assert isinstance(operand, Ref)
            images.bind(original, operand.name)
        for original_node in self.nodes[frame.start : frame.end]:
            self.nodes.append(images.copy(original_node))
        outputs = []
        for name, tensor in zip(frame.outputs, node.meta["val"], strict=True):
            if name not in images.made:
                raise NotAlikeError(f"{like} returns one of its arguments")
            self.storages[storage_key(tensor)] = self.values[images.of(name)].storage
            outputs.append(Ref(images.of(name)))
        return tuple(outputs)

    def _op(self, node: Any, target: str, names: dict[str, Argument]) -> Argument:
        name = self._fresh(node.name)
        args = tuple(argument_of(argument, names) for argument in node.args)
        kwargs = tuple((key, argument_of(value, names)) for key, value in node.kwargs.items())
        op = Op(
            name=name,
            target=target,
            args=args,
            kwargs=kwargs,
            results=(),
            module=self.first_name(node.meta[SCOPE]),
            is_pointwise=is_pointwise(node.target),
        )
        # tpplan's own detach is inside an autograd.Function, whose backward gives the gradient.
        detaches = base_target(target) == "aten.detach.default" and node.meta[SCOPE] != OWN_SCOPE
        flows = self.with_gradient and not detaches
        carries = flows and any(self.values[operand].carries_gradient for operand in op.operands)
        carries &= not _stops(node)
        writes = base_target(target) != target and base_target(target) != "aten.detach.default"
        if target == "tpplan.whole.default":
            carries = bool(args[1])
        if writes:
            carries |= self.values[op.operands[0]].carries_gradient
        result, results = self._results(name, node.meta.get("val"), carries=carries)
        if writes and carries:
            self._carry(self.values[op.operands[0]].storage)
        self.nodes.append(replace(op, results=results))
        if line := node.meta.get(LINE):
            self.lines[name] = line
        return result

    def _carry(self, storage: str) -> None:
        """Makes every floating value on a storage carry a gradient: a write to one of its views may be read through any
        other."""
        for name, value in self.values.items():
            if value.storage == storage and not value.carries_gradient and value.dtype in FLOATING_DTYPES:
                self.values[name] = replace(value, carries_gradient=True)

    def _results(self, name: str, value: Any, *, carries: bool) -> tuple[Argument, tuple[str, ...]]:
        """An op's results as an argument for later nodes, and their names; adds their values."""
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

    def first_name(self, module: str) -> str:
        """The name under which a module is planned."""
        return self.module_names.get(module, module)

    def _fresh(self, name: str) -> str:
        """The name, with a number appended where it is taken."""
        candidate, number = name, 1
        while candidate in self.values:
            number += 1
            candidate = f"{name}__{number}"
        return candidate


def _stops(node: torch.fx.Node) -> bool:
    """True for an op that no gradient passes (zeros_like, histc): gradients were on, and some operand carries one, but
    no result does."""

    def has_gradient(values: Any) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(values))

    given = [operand.meta.get("val") for operand in node.all_input_nodes]
    return bool(node.meta.get(DIFFERENTIATED)) and has_gradient(given) and not has_gradient(node.meta.get("val"))


def _digest(constant: torch.Tensor) -> str:
    """Sixteen hex digits of a constant's values; "" on the meta device."""
    if constant.is_meta:
        return ""
    return hashlib.sha256(repr(constant.tolist()).encode()).hexdigest()[:16]


def argument_of(value: Any, names: Mapping[str, Argument]) -> Argument:
    """A node's argument as data: references, literals and tuples of these; dtypes, devices and layouts by name.

    `names` are the values' arguments by node name. Raises ModelError for an argument of any other type.
    """
    match value:
        case torch.fx.Node():
            return names[value.name]
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return tuple(argument_of(item, names) for item in value)
        case torch.dtype():
            return f"dtype:{str(value).removeprefix('torch.')}"
        case torch.device():
            return f"device:{value}"
        case torch.memory_format() | torch.layout():
            return f"torch:{str(value).removeprefix('torch.')}"
        case _:
            raise ModelError(
                f"an op is given an argument of type {type(value).__name__} ({value!r}), which a plan cannot hold: use "
                "tensors, numbers, texts, dtypes and lists of these"
            )

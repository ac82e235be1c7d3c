"""One module run alone: what its code does under a plan, without all that the model runs before it.

A trace of the model shows what the module is given. Alone it is given tensors of these shapes, or of a rank's local
ones. It stands for the module in the model only where, on whole tensors, it runs the same ops as there: code that reads
values, or what the model left elsewhere, does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.core.graph import SAME_TENSOR, Boundary, Direction, ModelGraph, Op, SourceKind, within
from tpplan.core.layout import local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import bound_arguments, tensors_of_call
from tpplan.trace.whole.opaque import PLAIN, running_modes


class PassedError(Exception):
    """A trace has come to the module that it is about, or to that module's end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenTensor:
    """A tensor that a module is given. `path` is that of the boundary at which it enters."""

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def whole(self) -> torch.Tensor:
        """A tensor like it on the meta device."""
        found = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return found.requires_grad_(self.requires_grad)

    def local(self, entry: Boundary, assignment: Assignment) -> torch.Tensor:
        """A rank's part of it in the layout in which it enters; the dims lie in memory in the same order."""
        shape = local_shape(self.shape, assignment.strategy(entry.name).operands[0], assignment.tp)
        if shape == self.shape:
            return self.whole()
        order = sorted(range(len(shape)), key=lambda dim: self.stride[dim], reverse=True)
        dense = torch.empty([shape[dim] for dim in order], dtype=self.dtype, device="meta")
        found = dense.permute([order.index(dim) for dim in range(len(shape))])
        return found.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAlone:
    """A module by name, and the one call of it: the leaves of its arguments, and their structure."""

    module: str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def on_whole(self) -> tuple[Any, ...]:
        """The leaves with whole tensors."""
        return self._with(GivenTensor.whole)

    def on_a_rank(self, assignment: Assignment) -> tuple[Any, ...]:
        """The leaves with a rank's tensors."""
        entries = _entries(assignment.graph, self.module)
        return self._with(lambda given: given.local(entries[given.path], assignment))

    def _with(self, made: Callable[[GivenTensor], torch.Tensor]) -> tuple[Any, ...]:
        """The leaves with tensors in place of what is given; the same one where the same one is given twice."""
        tensors = {id(leaf): made(leaf) for leaf in self.leaves if isinstance(leaf, GivenTensor)}
        return tuple(tensors.get(id(leaf), leaf) for leaf in self.leaves)

    def calling(self, model: nn.Module) -> nn.Module:
        """A model that does nothing but call the module of `model`, under its name."""
        return _Calling(self.module, model, self.spec)


class _Calling(nn.Module):
    """Calls a module with the leaves of its arguments. It holds the module, and what other modules of the model have in
    common with it, under their names in the model."""

    def __init__(self, name: str, model: nn.Module, spec: pytree.TreeSpec) -> None:
        super().__init__()
        module = model.get_submodule(name)
        self.called, self.spec = (module,), spec  # not registered under this name
        inside = {id(own) for own in module.modules()}
        held: list[str] = []
        for first, own in model.named_modules():
            if id(own) in inside and not any(within(first, other) for other in held):
                held.append(first)
                self._hold(first, own)

    def _hold(self, name: str, module: nn.Module) -> None:
        *parents, last = name.split(".")
        holder: nn.Module = self
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, nn.Module())
            holder = holder.get_submodule(parent)
        holder.add_module(last, module)

    def forward(self, *leaves: Any) -> None:
        # A leaf of the autograd graph could not be changed in place.
        trained = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        inner = {own: leaf.clone() for own, leaf in trained.items()}
        args, kwargs = pytree.tree_unflatten([inner.get(id(leaf), leaf) for leaf in leaves], self.spec)
        self.called[0](*args, **kwargs)


class WatchedCall:
    """Sees what a module of models is given when it is called; `seen` is None while it has not, or where that is
    something else than tensors and plain values."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.seen: ModuleAlone | None = None
        self._modes: tuple[Any, ...] | None = None

    def watched(self, model: nn.Module) -> nn.Module:
        """The model; where it calls the module, it is stopped by PassedError."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.get_submodule(self.module).register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)
        return model

    def _begin(self, _model: nn.Module, _args: object) -> None:
        self._modes = running_modes()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        paths: dict[int, list[str]] = {}

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            paths.setdefault(id(tensor), []).append(path)
            return tensor

        tensors_of_call(bound_arguments(module, args, kwargs), note, is_given=True)
        is_plain = all(isinstance(leaf, (*PLAIN, torch.dtype)) or _is_plain_tensor(leaf) for leaf in leaves)
        if tensors and is_plain and tensors.keys() == paths.keys() and running_modes() == self._modes:
            given = {own: _given(tensor, SAME_TENSOR.join(paths[own])) for own, tensor in tensors.items()}
            found = tuple(given.get(id(leaf), leaf) for leaf in leaves)
            self.seen = ModuleAlone(module=self.module, leaves=found, spec=spec)
        raise PassedError


def _is_plain_tensor(leaf: object) -> bool:
    """True for a tensor of sizes that are known, and no parameter."""
    return type(leaf) is torch.Tensor and all(type(size) is int for size in (*leaf.shape, *leaf.stride()))


def _given(tensor: torch.Tensor, path: str) -> GivenTensor:
    return GivenTensor(
        path=path,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
    )


def _entries(graph: ModelGraph, module: str) -> dict[str, Boundary]:
    """The boundaries at which tensors enter a module, by path."""
    own = (boundary for boundary in graph.boundaries if boundary.module == module)
    return {boundary.path: boundary for boundary in own if boundary.direction is Direction.INPUT}


def nodes_of_call(graph: ModelGraph, module: str) -> Sequence[Op | Boundary]:
    """The nodes of a module's call, from the first tensor that enters it to the last that leaves it; it is called
    once."""
    own = [place for place, node in enumerate(graph.nodes) if isinstance(node, Boundary) and node.module == module]
    return graph.nodes[own[0] : own[-1] + 1]


def reads_its_own(graph: ModelGraph, module: str) -> bool:
    """True where all that runs in a module's call reads what the module is given, makes or has: a weight that is put in
    the place of its own (torch.func.functional_call) is none of these."""
    nodes = nodes_of_call(graph, module)
    known = {name for node in nodes for name in node.results}
    for source in graph.sources:
        is_inside = any(within(name, module) for name in (source.label, *source.aliases))
        if is_inside or source.kind is SourceKind.CONSTANT:
            known.add(source.result)
    entries = {boundary.name for boundary in _entries(graph, module).values()}
    return all(known.issuperset(node.operands) for node in nodes if node.name not in entries)


def is_called_once(graph: ModelGraph, module: str) -> bool:
    """True for a module that some tensor leaves, and none twice."""
    return graph.times_called.get(module) == 1

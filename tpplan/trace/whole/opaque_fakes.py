"""Fake tensors in place of a module's own, for one observed call of the module (tpplan.trace.whole.opaque_run)."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensor
from tpplan.torch_internals.modules import tensors_in_place
from tpplan.trace.hooks.parameter_names import registered_name
from tpplan.trace.whole.opaque import OpaqueCall


class UnobservableError(ModelError):
    """A module cannot be one operator: it fails on fake tensors, or does or returns what no operator may."""


def fake(tensor: Tensor) -> Tensor:
    """A tensor like a given one (a fake, under a FakeTensorMode) on the CPU, as a leaf of autograd."""
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def modes_of(call: OpaqueCall) -> Iterator[None]:
    """Switches gradients and autocast as they were at the call."""
    is_enabled, *casts = call.modes
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(is_enabled))
        for device, is_on, dtype in casts:
            if is_on:
                stack.enter_context(torch.autocast(device, dtype))
        yield


@contextlib.contextmanager
def on_fakes(
    module: nn.Module, tensors: dict[str, Tensor], foreign: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    """Runs the module with `tensors` in place of its parameters and buffers, fakes in place of its other tensors, and
    under `foreign`, which deals with tensors that its code reads from elsewhere."""
    with _attributes_on_fakes(module), tensors_in_place(module, tensors), foreign:
        yield


@contextlib.contextmanager
def _attributes_on_fakes(module: nn.Module) -> Iterator[None]:
    """Replaces meta tensors that modules hold as plain attributes by fakes; restores all attributes at the end."""
    before = [(inner, dict(inner.__dict__)) for inner in module.modules()]
    for inner, attributes in before:
        found = {name: value for name, value in attributes.items() if isinstance(value, Tensor) and value.is_meta}
        inner.__dict__.update({name: fake(value) for name, value in found.items()})
    try:
        yield
    finally:
        for inner, attributes in before:
            inner.__dict__.clear()
            inner.__dict__.update(attributes)


class ForeignReads(TorchFunctionMode):
    """A mode that replaces tensors which code reads past its modules (from a closure, a list) by fakes.

    `weights` are the fakes of the model's parameters that may be read like this, by name; any other tensor is a
    constant. Raises UnobservableError for other parameters.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = weights
        #: (tensor, its fake) by the tensor's id; holding the tensor keeps its id from being used again
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def _in_place(self, leaf: Any) -> Any:
        """The fake that stands in for a leaf; the leaf itself where none is needed."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor) or not leaf.is_meta:
            return leaf
        name = registered_name(leaf)
        if name is not None and name not in self.weights:
            raise UnobservableError(f"it reads parameter {name} past the module that has it")
        if id(leaf) not in self._known:
            self._known[id(leaf)] = (leaf, fake(leaf) if name is None else self.weights[name])
        return self._known[id(leaf)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._in_place, (args, kwargs or {}))
        return func(*args, **kwargs)

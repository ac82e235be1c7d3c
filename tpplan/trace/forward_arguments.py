"""The arguments of a forward: what of the example inputs a model takes, and each tensor among them by a dotted path."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from tpplan.torch_internals import pytree

#: what example_inputs gives: keyword arguments by name, or a tuple of positional arguments
Inputs = Mapping[str, Any] | tuple[Any, ...]


def forward_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs that the model's forward takes. Other entries of a mapping (targets) are for the loss alone."""
    if not isinstance(inputs, Mapping):
        return inputs
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return inputs
    accepted = {parameter.name for parameter in parameters}
    return {name: value for name, value in inputs.items() if name in accepted}


def path_of(entries: tuple[Any, ...]) -> str:
    """A pytree key path as dotted text: `attention_mask`, `pos.0`."""
    names = (getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))) for entry in entries)
    return ".".join(str(name) for name in names)


def named_tensors(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The tree with each tensor replaced by change(path, tensor), and in dataclasses, which pytree takes for leaves."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return pytree.tree_unflatten([_changed(path_of(path), leaf, change) for path, leaf in leaves], spec)


def _changed(path: str, leaf: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(path, leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | Collection):
        return leaf  # a container may hold its fields a second time
    own = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}
    changed = named_tensors(own, lambda inside, tensor: change(f"{path}.{inside}", tensor))
    if all(found is own[name] for name, found in changed.items()):
        return leaf
    copied = copy.copy(leaf)
    for name, found in changed.items():
        object.__setattr__(copied, name, found)  # frozen ones, too
    return copied


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of the module's forward that may be given by position, in order."""
    return tuple(
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by parameter name, positional ones too, so that paths do not depend on how a call is written.

    Positional arguments of `*args` are named args0, args1, ... by their position in the call.
    """
    positional = positional_names(module)
    names = [positional[i] if i < len(positional) else f"args{i}" for i in range(len(args))]
    return dict(zip(names, args, strict=True)) | kwargs


def convert_arguments(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[str, torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of a forward with each tensor replaced by change(path, tensor)."""
    changed = named_tensors(bound_arguments(module, args, kwargs), change)
    values = list(changed.values())
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

"""The arguments of a forward: what of the example inputs a model takes, and each tensor among them by a dotted path."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from tpplan.torch_internals import pytree

#: what example_inputs gives: keyword arguments by name, or a tuple of positional arguments
Inputs = Mapping[str, Any] | tuple[Any, ...]
#: types of leaves that hold nothing else
_LEAVES = frozenset({torch.Tensor, nn.Parameter, NoneType, bool, int, float, str})


def forward_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs that the model's forward takes. Other entries of a mapping (targets) are for the loss alone."""
    if not isinstance(inputs, Mapping):
        return inputs
    parameters = signature_of(model).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return inputs
    accepted = {parameter.name for parameter in parameters}
    return {name: value for name, value in inputs.items() if name in accepted}


def called_on(model: nn.Module, inputs: Inputs) -> Any:
    """The outputs of a model on those of the inputs that its forward takes."""
    accepted = forward_inputs(model, inputs)
    return model(**accepted) if isinstance(accepted, Mapping) else model(*accepted)


def path_of(entries: tuple[Any, ...]) -> str:
    """A pytree key path as dotted text: `attention_mask`, `pos.0`."""
    names = (getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))) for entry in entries)
    return ".".join(str(name) for name in names)


def named_tensors(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor], *, is_given: bool = False) -> Any:
    """The tree with each tensor replaced by change(path, tensor), and in dataclasses, which pytree takes for leaves.

    A frozen dataclass is copied, any other one changed in place. In arguments (`is_given`) only frozen ones are opened,
    as the caller may hold them.
    """
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return pytree.tree_unflatten([_changed(path_of(path), leaf, change, is_given) for path, leaf in leaves], spec)


def tensors_by_path(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors in a tree by their dotted paths, those in dataclasses too."""
    found: dict[str, torch.Tensor] = {}
    named_tensors(tree, found.setdefault)
    return found


def is_flat(tree: Any) -> bool:
    """True for a dict by text of tensors and plain values: most calls are given nothing else."""
    return (
        type(tree) is dict
        and all(type(leaf) in _LEAVES for leaf in tree.values())
        and all(type(name) is str for name in tree)
    )


def tensors_of_call(
    tree: dict[str, Any], change: Callable[[str, torch.Tensor], torch.Tensor], *, is_given: bool = False
) -> dict[str, Any]:
    """Does what named_tensors does to a call's arguments by name, and takes less time where all of them are tensors and
    plain values: torch walks no tree then."""
    if is_flat(tree):
        return {name: change(name, leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in tree.items()}
    changed: dict[str, Any] = named_tensors(tree, change, is_given=is_given)
    return changed


def _changed(path: str, leaf: Any, change: Callable[[str, torch.Tensor], torch.Tensor], is_given: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(path, leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | Collection):
        return leaf  # a container may hold its fields a second time
    is_frozen: bool = leaf.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if is_given and not is_frozen:
        return leaf
    own = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}
    inside = named_tensors(own, lambda name, tensor: change(f"{path}.{name}", tensor), is_given=is_given)
    changed = {name: found for name, found in inside.items() if found is not own[name]}
    result = copy.copy(leaf) if changed and is_frozen else leaf
    for name, found in changed.items():
        object.__setattr__(result, name, found)
    return result


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of the module's forward, without `self`."""
    function = _function_of(module)
    return inspect.signature(module.forward) if function is None else _signature_of_method(function)


def _function_of(module: nn.Module) -> FunctionType | None:
    """The function that the module's class has as its forward; None for a static method, or a function that the module
    holds."""
    forward = module.forward
    if type(forward) is not MethodType or forward.__self__ is not module or type(forward.__func__) is not FunctionType:
        return None
    return forward.__func__


@functools.lru_cache(maxsize=1024)
def _signature_of_method(function: FunctionType) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of the module's forward that may be given by position, in order."""
    function = _function_of(module)
    return _positional(signature_of(module)) if function is None else _positional_of_method(function)


@functools.lru_cache(maxsize=1024)
def _positional_of_method(function: FunctionType) -> tuple[str, ...]:
    return _positional(_signature_of_method(function))


def _positional(signature: inspect.Signature) -> tuple[str, ...]:
    return tuple(
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by parameter name, positional ones too, so that paths do not depend on how a call is written.

    Positional arguments of `*args` are named args0, args1, ... by their position in the call.
    """
    return named_arguments(positional_names(module), args, kwargs)


def named_arguments(positional: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by parameter name, as bound_arguments gives them; `positional` are the names of the forward's
    positional parameters."""
    names = [positional[i] if i < len(positional) else f"args{i}" for i in range(len(args))]
    return dict(zip(names, args, strict=True)) | kwargs

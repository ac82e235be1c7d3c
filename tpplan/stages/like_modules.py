"""Whether modules are alike, as far as a trace can see from their attributes: in a trace one layer stands for others,
and of like stubs one finds the shapes for all."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpplan.experts.expert_share import SHARE, share_of
from tpplan.torch_internals.tensors import plain_calls
from tpplan.trace.hooks.generated_class import BINDING

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_UNCOMPARED = _HOOKS | {BINDING, SHARE}
_LEAVES = frozenset({bool, float, str, type(None)})
_TABLES = frozenset({dict, OrderedDict, set, list, tuple})


#: whether the modules of two names are alike
Alike = Callable[[str, str], bool]


@dataclass(slots=True)
class LikeModules:
    """Which modules of a model are alike, by their names; each pair is compared once."""

    model: nn.Module
    _known: dict[tuple[str, str], bool] = field(default_factory=dict)

    def __call__(self, first: str, second: str) -> bool:
        if (known := self._known.get((first, second))) is None:
            one, other = map(self.model.get_submodule, (first, second))
            known = self._known[first, second] = are_alike(one, other)
        return known


def are_alike(first: Any, second: Any, met: "_Pairs | None" = None) -> bool:
    """True where two layers, or attributes of theirs, are equal as far as a trace can depend on them; in doubt False.

    `met`: pairs of modules compared so far, as a module may be reached by several ways, or from inside itself.
    """
    if first is second and not isinstance(first, nn.Module):
        return True
    if type(first) is not type(second):
        return False
    met = _Pairs() if met is None else met
    match first:
        case nn.Module():
            is_known = id(first) in met.images
            return met.are_a_pair(first, second) and (is_known or first is second or _modules_alike(first, second, met))
        case torch.Tensor():
            return first.device.type == "meta" == second.device.type and signature(first) == signature(second)
        case dict():
            return list(first) == list(second) and all(are_alike(first[key], second[key], met) for key in first)
        case list() | tuple():
            return len(first) == len(second) and all(are_alike(a, b, met) for a, b in zip(first, second, strict=True))
        case set() | frozenset():
            return bool(first == second)
        case _:
            return isinstance(first, _PLAIN) and bool(first == second)


@dataclass(slots=True)
class _Pairs:
    """Pairs of modules that correspond to each other, one to one, by their ids."""

    images: dict[int, nn.Module] = field(default_factory=dict)
    origins: dict[int, nn.Module] = field(default_factory=dict)

    def are_a_pair(self, first: nn.Module, second: nn.Module) -> bool:
        """True where the two are a pair, or become one as neither has another partner."""
        return self.images.setdefault(id(first), second) is second and (
            self.origins.setdefault(id(second), first) is first
        )


def _modules_alike(first: nn.Module, second: nn.Module, met: _Pairs) -> bool:
    ours, theirs = vars(first), vars(second)
    if any(module.get(name) for module in (ours, theirs) for name in _HOOKS) or "forward" in ours:
        return False
    return (
        list(ours) == list(theirs)
        and share_of(first) == share_of(second)
        and all(
            _are_plainly_alike(own, theirs[name]) or are_alike(own, theirs[name], met)
            for name, own in ours.items()
            if name not in _UNCOMPARED
        )
    )


def _are_plainly_alike(first: object, second: object) -> bool:
    """True for the most frequent like attributes: what needs no comparison, empty tables, and two integers, by which a
    layer may be numbered. Where its code computes with these, or decides by them, the trial of the layer shows that."""
    kind = type(first)
    if kind is not type(second):
        return False
    return kind is int or (first is second and kind in _LEAVES) or (kind in _TABLES and not first and not second)


def signature(leaf: Any) -> object:
    """Shape, strides, dtype and requires_grad of a tensor; any other value itself."""
    if isinstance(leaf, torch.Tensor):
        with plain_calls():  # otherwise every attribute goes through the trace's modes
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf

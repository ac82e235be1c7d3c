"""Modules that run whole: what a trace cannot see through is one operator, of the module whose code it is.

A marked module gets a class whose forward, in a trace, is `tpplan::opaque`: tensors and weights in, tensors out. What
comes out is found by running the module once on fake tensors (tpplan.trace.opaque_run), as torch.export would; what ran
then is also its price. Where a plan was applied, its code runs as it is written, on plain tensors in place of the
weights below it, and the classes of the modules inside it are their own: torch compiles such code as it stands.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpplan.core.errors import ModelError
from tpplan.core.graph import within
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import tensors_in_place
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.checkpoint_context import surrounded_again
from tpplan.trace.hooks.generated_class import SITE, subclass

#: where a module keeps hooks on the gradients of weights below it, by their names
HOOKS = "_tpplan_weight_hooks"
#: what may stand among a forward's outputs beside tensors
PLAIN = (bool, int, float, str, bytes, type(None))


class Whole(Protocol):
    """What a Site offers an opaque module."""

    def whole_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Plain tensors by the names of the weights below the module."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """An operator below autograd that ran; its tensors are on the meta device."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """One call of an opaque module: what it gives (on the meta device), what it ran, and the bytes that it held.

    `keeps` are those of the tensors given, by position, that stay for backward, `keeps_results` those of the tensors
    among its outputs, and `kept_bytes` stay besides; forward_bytes and backward_bytes are the most that was held on
    top. `bodies` are the loops and choices whose functions ran once each. `is_bounded`: every size that data decides
    has a bound, by which it was counted. `written` are the weights, by name, whose values it changes, or in whose
    places it puts others. Equal keys: the same ran.
    """

    key: str
    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    forward: tuple[Ran, ...]
    backward: tuple[Ran, ...]
    keeps: frozenset[int]
    keeps_results: frozenset[int]
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    bodies: tuple[str, ...]
    is_bounded: bool
    written: frozenset[str]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the outputs."""
        return tuple(leaf for leaf in self.outputs if isinstance(leaf, Tensor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpaqueCall:
    """A call as its shapes show it: leaves of the arguments, weights by name, whether gradients and autocast are on.
    `kind` is the first of the modules that are like the one called."""

    module: str
    kind: str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    weights: Mapping[str, Tensor]
    modes: tuple[Any, ...]

    @property
    def signature(self) -> object:
        """Hashable; calls of one signature give the same. Strides may differ: a conversion gives contiguous slices."""
        has_gradients = bool(self.modes[0])
        leaves = tuple(described(leaf, has_gradients) for leaf in self.leaves)
        named = tuple((name, described(weight, has_gradients)) for name, weight in self.weights.items())
        return self.kind, str(self.spec), leaves, named, self.modes


class UnobservedError(ModelError):
    """A call that has not been observed was made in a trace."""

    def __init__(self, call: OpaqueCall) -> None:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in call.leaves if isinstance(leaf, Tensor))
        where = call.module or "the root"
        super().__init__(f"module {where} runs whole, and is called otherwise than it was before: ({shapes})")
        self.call = call


@dataclass(slots=True)
class Opaques:
    """The modules of a model that run whole: why, by name, and the calls of them that were observed."""

    reasons: dict[str, str] = field(default_factory=dict)
    #: the module that each is like, which is observed for it
    kinds: dict[str, str] = field(default_factory=dict)
    calls: dict[object, Observed] = field(default_factory=dict)
    #: why the parameters must stay the tensors that they are; the root runs whole then
    untouched: str = ""
    #: they must because of hooks on accumulated gradients, which run at the end of every backward
    is_hooked: bool = False

    def num_averages(self, num_backwards: int) -> int | None:
        """How often a step of so many backwards averages all gradients, where parameters stay
        (tpplan.apply.collectives.dp_gradients)."""
        if not self.untouched:
            return None
        return num_backwards if self.is_hooked else 1

    def hides(self, name: str) -> bool:
        """True for a module inside one of them."""
        return any(name != marked and within(name, marked) for marked in self.reasons)

    def by_key(self) -> dict[str, Observed]:
        """The observed calls by the literal that stands in the graph."""
        return {observed.key: observed for observed in self.calls.values()}


# In a trace


@dataclass(slots=True)
class _Recorder:
    """Gives the operator for each call of a marked module."""

    names: dict[int, str]
    opaques: Opaques

    def call(self, module: nn.Module, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        name = self.names[id(module)]
        call = OpaqueCall(
            module=name, kind=self.opaques.kinds[name], leaves=tuple(leaves), spec=spec, weights=weights, modes=_modes()
        )
        observed = self.opaques.calls.get(call.signature)
        if observed is None:
            raise UnobservedError(call)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [place for place, weight in enumerate(weights) if weight in observed.written]
        made = iter(custom_ops.opaque(given, list(weights.values()), observed.key, written))
        found = [next(made) if isinstance(leaf, Tensor) else leaf for leaf in observed.outputs]
        return pytree.tree_unflatten(found, observed.spec)


#: traces that are running, the innermost last
_recorders: list[_Recorder] = []


@contextlib.contextmanager
def recording(model: nn.Module, opaques: Opaques) -> Iterator[None]:
    """While it lasts, the marked modules of a model are operators in a trace."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, str] = {}
    for name in opaques.reasons:
        names.setdefault(id(modules[name]), name)
    swapped = {id(modules[name]): (modules[name], type(modules[name])) for name in opaques.reasons}
    _recorders.append(_Recorder(names, opaques))
    custom_ops.running_opaques.append({key: observed.tensors for key, observed in opaques.by_key().items()})
    for module, cls in swapped.values():
        if not is_opaque(cls):
            module.__class__ = opaque_class(cls)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _recorders.pop()
        custom_ops.running_opaques.pop()
        for module, cls in swapped.values():
            module.__class__ = cls


@functools.cache
def opaque_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls that runs whole. It bears cls's own name."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: Whole | None = self.__dict__.get(SITE)
        recorder = _recorders[-1] if _recorders and id(self) in _recorders[-1].names else None
        weights = site.whole_weights(self) if site is not None else dict(self.named_parameters())
        if recorder is not None:
            return recorder.call(self, weights, args, kwargs)
        hooked = {name: _hooked(weights[name], hooks) for name, hooks in self.__dict__.get(HOOKS, {}).items()}

        def on_weights() -> contextlib.AbstractContextManager[object]:
            return tensors_in_place(self, weights | hooked)

        with surrounded_again(on_weights), on_weights():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward, "_tpplan_is_opaque": True}, opaque_class)


def is_opaque(cls: type) -> bool:
    """True for a class that opaque_class made, or one made of such a class."""
    return getattr(cls, "_tpplan_is_opaque", False)


def _hooked(weight: Tensor, hooks: tuple[Callable[[Tensor], Tensor | None], ...]) -> Tensor:
    """The weight as this forward reads it: its gradient is that of all readings, and goes through the hooks."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    read = weight.view_as(weight)
    for hook in hooks:
        read.register_hook(hook)  # type: ignore[no-untyped-call]
    return read


def _modes() -> tuple[Any, ...]:
    """Gradients on or off, and autocast by device."""
    casts = (
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), *casts


def described(leaf: Any, has_gradients: bool = True) -> object:
    """What of a leaf tells calls apart."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad and has_gradients
    return repr(leaf) if isinstance(leaf, (*PLAIN, torch.dtype, torch.device)) else type(leaf).__qualname__

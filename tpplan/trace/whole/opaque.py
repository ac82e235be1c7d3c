"""Modules that run whole: a module whose code a trace cannot follow is one operator of the graph.

A marked module gets a class whose forward, in a trace, is `tpplan::opaque`: tensors and weights in, tensors out. The
outputs are found by running the module once on fake tensors (tpplan.trace.whole.opaque_run), as torch.export would; the
operators of that run are also what the module is priced by. Where a plan was applied, the module's code runs as it is
written, on plain tensors in place of its weights, and the modules inside keep their own classes, so that torch can
compile such code.
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
from tpplan.trace.answers.concrete_values import places_of
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.checkpoint_context import in_checkpoint_replay
from tpplan.trace.hooks.generated_class import BINDING, subclass

#: the attribute in which an opaque module keeps hooks on the gradients of its weights, by the weights' names
HOOKS = "_tpplan_weight_hooks"
#: types that may be among a forward's outputs beside tensors
PLAIN = (bool, int, float, str, bytes, type(None))


class WholeWeights(Protocol):
    """The part of an applied plan (in a module's BINDING attribute) that an opaque module uses."""

    def whole_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Plain, unsharded tensors of the weights in the module, by their names in it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpRecord:
    """One call of an operator below autograd, its tensors on the meta device."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpaqueTrace:
    """One call of an opaque module: its outputs (on the meta device), the operators that it ran, the bytes it held.

    key: digest of the class, the signature, the outputs and the operators; equal keys stand for equal calls.
    keeps, keeps_results: positions of the tensors among the arguments, and among the outputs, kept for backward.
    kept_bytes: kept for backward besides these tensors. forward_bytes, backward_bytes: the most held on top of what is
        kept, while each pass runs.
    bodies: names of the loops and choices (torch.while_loop, torch.cond) whose functions ran once each.
    is_bounded: every size that data decides has an upper bound, which was counted for it.
    written: names of the weights that the call changes or replaces.
    guessed: the lines of code that ask for values which training alone decides.
    backward_code: the lines of code by which the module computes with gradients itself.
    buffers: the names of buffers that the call writes to from what it is given, each with whether outputs of a later
        call follow from it.
    runs_again: whether code of its own runs modules in backward, other than torch's checkpoints.
    """

    key: str
    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    forward: tuple[OpRecord, ...]
    backward: tuple[OpRecord, ...]
    keeps: frozenset[int]
    keeps_results: frozenset[int]
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    bodies: tuple[str, ...]
    is_bounded: bool
    written: frozenset[str]
    guessed: tuple[str, ...] = ()
    backward_code: tuple[str, ...] = ()
    buffers: tuple[tuple[str, bool], ...] = ()
    runs_again: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the outputs."""
        return tuple(leaf for leaf in self.outputs if isinstance(leaf, Tensor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpaqueCall:
    """A call of an opaque module in a trace: leaves of its arguments, weights by name, modes (gradients, autocast).

    places: by position of a leaf that has integers, the number of places that they are indices of, where it is known.
    `kind` is the first of the modules that are alike, of which one is observed for all.
    """

    module: str
    kind: str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    weights: Mapping[str, Tensor]
    modes: tuple[Any, ...]
    places: Mapping[int, int] = field(default_factory=dict)

    @property
    def signature(self) -> object:
        """A hashable key: calls with equal keys give equal outputs. Strides do not count, as a conversion changes
        them."""
        has_gradients = bool(self.modes[0])
        leaves = tuple(described(leaf, has_gradients) for leaf in self.leaves)
        named = tuple((name, described(weight, has_gradients)) for name, weight in self.weights.items())
        return self.kind, str(self.spec), leaves, named, self.modes, tuple(self.places.items())


class UnobservedError(ModelError):
    """A trace met a call of an opaque module that has not been observed."""

    def __init__(self, call: OpaqueCall) -> None:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in call.leaves if isinstance(leaf, Tensor))
        where = call.module or "the root"
        super().__init__(
            f"module {where} runs whole, and is called with other shapes or modes than it was before: ({shapes})"
        )
        self.call = call


@dataclass(slots=True)
class Opaques:
    """The modules of a model that run whole: by name, why they do; and the calls of them that were observed."""

    reasons: dict[str, str] = field(default_factory=dict)
    #: by the name of each, the first of the modules like it, which is observed for all of them
    kinds: dict[str, str] = field(default_factory=dict)
    #: by signature
    calls: dict[object, OpaqueTrace] = field(default_factory=dict)
    #: why a plan must leave the parameters the tensors that they are, "" where it need not; the root runs whole then
    untouched: str = ""
    #: whether `untouched` is for hooks on accumulated gradients, which run at the end of every backward
    is_hooked: bool = False
    #: the first parameter with a hook on its gradient, which sees that of one micro-batch on one data-parallel rank
    hooked_weight: str = ""

    def num_averages(self, num_backwards: int) -> int | None:
        """How often a step with so many backwards averages all gradients over data-parallel ranks where parameters are
        left as they are (tpplan.apply.collectives.dp_gradients); None where they are not."""
        if not self.untouched:
            return None
        return num_backwards if self.is_hooked else 1

    def hides(self, name: str) -> bool:
        """True for a module inside one that runs whole."""
        return any(name != marked and within(name, marked) for marked in self.reasons)

    def by_key(self) -> dict[str, OpaqueTrace]:
        """The observed calls by their key, which is a literal of the operator in the graph."""
        return {observed.key: observed for observed in self.calls.values()}


# ---- in a trace


@dataclass(slots=True)
class _Recorder:
    """A trace that is running: turns calls of opaque modules into operators. `names`: module names by the modules'
    id."""

    names: dict[int, str]
    opaques: Opaques

    def call(self, module: nn.Module, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        name = self.names[id(module)]
        call = OpaqueCall(
            module=name,
            kind=self.opaques.kinds[name],
            leaves=tuple(leaves),
            spec=spec,
            weights=weights,
            modes=running_modes(),
            places={place: size for place, leaf in enumerate(leaves) if (size := _places_of(leaf))},
        )
        observed = self.opaques.calls.get(call.signature)
        if observed is None:
            raise UnobservedError(call)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [place for place, weight in enumerate(weights) if weight in observed.written]
        made = iter(custom_ops.opaque(given, list(weights.values()), observed.key, written))
        found = [next(made) if isinstance(leaf, Tensor) else leaf for leaf in observed.outputs]
        return pytree.tree_unflatten(found, observed.spec)


def _places_of(leaf: Any) -> int:
    is_index = isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
    return places_of(leaf) if is_index else 0


#: traces that are running, the innermost last
_recorders: list[_Recorder] = []


@contextlib.contextmanager
def recording(model: nn.Module, opaques: Opaques) -> Iterator[None]:
    """Makes each call of an opaque module of the model one operator of the trace that runs inside."""
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
    """The subclass of cls, under the name of cls, whose modules run whole: in a trace as one operator, else cls's code
    on plain weights."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: WholeWeights | None = self.__dict__.get(BINDING)
        recorder = _recorders[-1] if _recorders and id(self) in _recorders[-1].names else None
        weights = site.whole_weights(self) if site is not None else dict(self.named_parameters())
        if recorder is not None:
            return recorder.call(self, weights, args, kwargs)
        hooked = {name: _hooked(weights[name], hooks) for name, hooks in self.__dict__.get(HOOKS, {}).items()}

        def on_weights() -> contextlib.AbstractContextManager[object]:
            return tensors_in_place(self, weights | hooked)

        with in_checkpoint_replay(on_weights), on_weights():
            return cls.forward(self, *args, **kwargs)

    return subclass(cls, {"forward": forward, "_tpplan_is_opaque": True}, opaque_class)


def is_opaque(cls: type) -> bool:
    """True for a class that opaque_class made, and for subclasses of it."""
    return getattr(cls, "_tpplan_is_opaque", False)


def _hooked(weight: Tensor, hooks: tuple[Callable[[Tensor], Tensor | None], ...]) -> Tensor:
    """A view of the weight for one forward to read. The gradient of all its reads goes through the hooks at once."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    read = weight.view_as(weight)
    for hook in hooks:
        read.register_hook(hook)  # type: ignore[no-untyped-call]
    return read


def running_modes() -> tuple[Any, ...]:
    """The part of torch's global state that what a call runs depends on: (whether gradients are on, then for each
    device its name, whether autocast is on, autocast's dtype)."""
    casts = (
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), *casts


def described(leaf: Any, has_gradients: bool = True) -> object:
    """The key by which arguments and outputs are compared: of a tensor shape, dtype, and whether it carries a gradient;
    of a plain value its repr; of any other object its type's name."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad and has_gradients
    return repr(leaf) if isinstance(leaf, (*PLAIN, torch.dtype, torch.device)) else type(leaf).__qualname__

"""A stub: what stands in a stage's model for a module of another stage."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.core.errors import ModelError, first_line
from tpplan.core.graph import joined_name, within
from tpplan.plan.sections.modes import Precision
from tpplan.plan.sections.ranks import RECEIVED
from tpplan.stages.like_modules import Alike, are_alike
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import own_children, own_parameters
from tpplan.torch_internals.recording import untraced
from tpplan.torch_internals.tensors import plain_calls, until_written

#: attributes of a stub that its copies share: the module that it stands for, how it is run, and what its calls give
_SHARED = ("_absent", "_run", "_known")
#: key of the __dict__ of a tensor without memory
_STAND_IN = "_tpplan_stand_in"
#: what a module on the meta device gives for leaves of its arguments and their structure
Run = Callable[[nn.Module, Sequence[Any], pytree.TreeSpec], Any]


@final
class Stub(nn.Module):
    """Stands for a module of another stage. A call gives tensors of the shapes that the module would give: what was
    received, or zeros that share one element of memory, those that it is given itself where they have the shape. Plain
    attributes are read from the module; its tensors are on the meta device, in the dtype that they are computed with,
    and once it was called with tensors that have memory, such zeros on their device stand for them. It keeps the
    module's parameters that the stage reads too. `units` are the model's layers whose inputs FSDP casts, `run` says
    what the module gives (tpplan.trace.record_fx.given_on_meta)."""

    def __init__(self, name: str, module: nn.Module, precision: Precision, units: Iterable[str], run: Run) -> None:
        super().__init__()
        self.name = name
        self.receives = False
        #: what the running call gives, where the stub stands for the layer before a stage
        self.received: tuple[Tensor, ...] | None = None
        #: a tensor like those of the last call, on a device with memory
        self.like: Tensor | None = None
        self.casts = precision is Precision.BF16_MIXED and name in units
        # In a tuple it is not registered: the module has no part in the stage's parameters, hooks or state.
        self._absent = (_computing_in(precision, name, _on_the_meta_device(module), units),)
        self._run = (run,)
        #: by the arguments of a call: the leaves of the results, (shape, dtype) for a tensor, and their structure
        self._known: dict[object, tuple[list[Any], pytree.TreeSpec]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stub":
        memo[id(self)] = found = Stub.__new__(Stub)
        for key, value in self.__dict__.items():
            found.__dict__[key] = value if key in _SHARED else copy.deepcopy(value, memo)
        return found

    def again(self) -> "Stub":
        """Another stub for the module, which keeps none of its parameters; calls of both give the same."""
        found = Stub.__new__(Stub)
        nn.Module.__init__(found)
        found.name, found.receives, found.received, found.casts = self.name, False, None, self.casts
        found.like = None
        for key in _SHARED:
            found.__dict__[key] = self.__dict__[key]
        return found

    def keep(self, path: str, weight: nn.Parameter) -> None:
        """Registers a parameter of the module under its path there, on stubs of the modules inside."""
        child, _, rest = path.partition(".")
        if not rest:
            own_parameters(self)[child] = weight
            return
        inside = own_children(self).get(child)
        if inside is None:
            module = self._absent[0].get_submodule(child)
            inside = own_children(self)[child] = Stub(f"{self.name}.{child}", module, Precision.FP32, (), *self._run)
        assert isinstance(inside, Stub)
        inside.keep(rest, weight)

    def share_known(self, others: Sequence["Stub"], alike: Alike | None = None) -> None:
        """Takes what a call of the module gives from the first of `others` that stands for a like module; `alike` says
        so of two names of modules, where it is known."""
        for other in others:
            if other.casts == self.casts and (
                alike(other.name, self.name) if alike is not None else are_alike(other._absent[0], self._absent[0])
            ):
                self._known = other._known
                return

    def __getattr__(self, name: str) -> Any:
        for own in (self.__dict__.get("_parameters") or {}, self.__dict__.get("_modules") or {}):
            if own.get(name) is not None:
                return own[name]
        absent = self.__dict__.get("_absent")
        if absent is None or name.startswith("__"):
            raise AttributeError(name)
        found, like = getattr(absent[0], name), self.__dict__.get("like")
        return found if like is None else self._on_device(name, found, like)

    def _on_device(self, name: str, found: Any, like: Tensor) -> Any:
        """Returns zeros for a tensor of the module, and a stub for a module inside it, on the device of `like`."""
        if isinstance(found, nn.Module):
            inside = Stub(joined_name(self.name, name), found, Precision.FP32, (), *self._run)
            inside.like = like
            return inside
        with plain_calls():  # which the code around does not make
            is_own = isinstance(found, Tensor) and found.is_meta
            return stand_in(like, found.shape, found.dtype) if is_own else found

    @property
    def absent_class(self) -> type[nn.Module]:
        """The class of the module that the stub stands for."""
        return type(self._absent[0])

    def absent_names(self) -> tuple[str, ...]:
        """Names of the parameters and buffers of the module that the stub stands for."""
        absent = self._absent[0]
        return tuple(dict((*absent.named_parameters(remove_duplicate=False), *absent.named_buffers())))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if like is None:
            raise ModelError(
                f"module {self.name}, which is in another stage, is called without a tensor, by which its stub would "
                "know the device: give the module a tensor, or plan without stages (--pp 1)"
            )
        if not like.is_meta:
            self.like = like.new_empty(())
        found, made = self._shapes(leaves, spec)
        if self.receives:
            given = iter(self._taken(sum(isinstance(leaf, tuple) for leaf in found)))
            return pytree.tree_unflatten([next(given) if isinstance(x, tuple) else x for x in found], made)
        own = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_stand_in(leaf)]
        with plain_calls():
            others = {(leaf.shape, leaf.dtype): leaf for leaf in own}
        new = [leaf for leaf in found if isinstance(leaf, tuple) and leaf not in others]
        if new:
            with torch.no_grad():
                others |= {leaf: stand_in(like, *leaf) for leaf in dict.fromkeys(new)}
        return pytree.tree_unflatten([others[x] if isinstance(x, tuple) else x for x in found], made)

    def _taken(self, count: int) -> tuple[Tensor, ...]:
        if self.received is None or len(self.received) != count:
            given = "none" if self.received is None else len(self.received)
            raise ModelError(
                f"a stage takes the {count} tensors of {self.name} as `{RECEIVED}`, and was given {given}: train by "
                "model.step, which passes them"
            )
        return self.received

    def _shapes(self, leaves: list[Any], spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of what the module gives, (shape, dtype) for a tensor, and their structure."""
        with plain_calls():  # else each attribute of a tensor goes through a trace's modes
            key = tuple(_described(leaf) for leaf in leaves), spec
        if key not in self._known:
            with untraced(), torch.no_grad():
                given = [_halved(leaf) if self.casts else leaf for leaf in map(_on_meta, leaves)]
                outputs = self._outputs(given, spec)
            found, made = pytree.tree_flatten(outputs)
            self._known[key] = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in found], made
        return self._known[key]

    def _outputs(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        try:
            return self._run[0](self._absent[0], leaves, spec)
        except Exception as error:  # the module's own code, on tensors without values
            raise ModelError(
                f"module {self.name}, which is in another stage, gives there what its code does not tell from shapes "
                f"alone: {first_line(error.__cause__ or error)}; plan without stages (--pp 1)"
            ) from error


def _on_the_meta_device(module: nn.Module) -> nn.Module:
    is_there = all(own.is_meta for own in (*module.parameters(), *module.buffers()))
    return module if is_there else module.to("meta")


def _computing_in(precision: Precision, name: str, module: nn.Module, units: Iterable[str]) -> nn.Module:
    """The module with its parameters in the dtype that a plan computes with; under mixed precision what enters a unit
    inside it is cast. `name` is the module's in its model, `units` are the model's."""
    if precision.makes_half:
        for parameter in module.parameters():
            parameter.data = _halved(parameter.data)
    if precision is Precision.BF16_MIXED:
        for unit in units:
            if unit != name and within(unit, name):
                own = module.get_submodule(unit[len(name) :].removeprefix("."))
                own.register_forward_pre_hook(_enter_halved, with_kwargs=True)
    return module


def _enter_halved(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(_halved, args), pytree.tree_map(_halved, kwargs)


def _halved(leaf: Any) -> Any:
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


def _described(leaf: Any) -> object:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def without_memory(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    """Zeros of a shape that share one element, on the device of another tensor."""
    element = like.new_zeros((), dtype=dtype)
    with plain_calls():  # a view that is made without gradients may not be written to with them
        was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    found = element.expand(shape)
    with plain_calls():
        torch.set_grad_enabled(was_enabled)
    found.__dict__[_STAND_IN] = True
    return found


def stand_in(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    """Zeros of a shape that share one element until code writes to them, and have memory of their own from then on."""
    found = without_memory(like, shape, dtype)
    if type(found) is not Tensor or found.is_meta:  # where a write needs no memory
        return found
    found = until_written(found)
    found.__dict__[_STAND_IN] = True
    return found


def is_stand_in(tensor: Tensor | None) -> bool:
    """True for what `without_memory` gave."""
    return tensor is not None and _STAND_IN in tensor.__dict__

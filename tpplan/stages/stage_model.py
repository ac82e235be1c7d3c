"""The model as one stage runs it: its own modules, and stubs in place of those of other stages.

    model = build_model()
    as_stage(model, plan.stage)                  # the same module, which takes `received` besides its inputs
    sent = model(**inputs, received=tensors)     # a tuple of tensors; the model's own output on the last stage

The root's own code runs on each stage, on the same inputs. A stub gives a tensor without memory of the shape that its
module would give; the stub of the layer before the stage gives the tensors that were received; what the stage's last
layer gives is sent, and what the code behind it makes of stubs is dropped. Names of parameters stay as they are.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.core.errors import ModelError, PlanMismatchError
from tpplan.plan.sections import StagePlan
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.recording import untraced
from tpplan.trace.hooks.generated_class import subclass

#: name of the argument by which a stage is given the tensors of the one before
RECEIVED = "received"
#: key of the root's __dict__ for its stage
STAGE = "_tpplan_stage"
#: key of a module's __dict__ for what it gave in the call that runs
_SENT = "_tpplan_sent"


def stage_of(model: nn.Module) -> StagePlan | None:
    """The stage that a model is; None for a whole model."""
    found: StagePlan | None = model.__dict__.get(STAGE)
    return found


def as_stage(model: nn.Module, stage: StagePlan) -> nn.Module:
    """Makes a model one of its stages, in place: modules of other stages become stubs, their weights are dropped.

    Raises PlanMismatchError for a module or parameter that the model does not have.
    """
    for name in stage.absent:
        parent, child = _parent(model, name)
        if not isinstance(parent._modules.get(child), nn.Module):
            raise PlanMismatchError(f"the plan names module {name}, which the model does not have: solve again")
        parent._modules[child] = Stub(name, parent._modules[child])  # type: ignore[arg-type]
    for name in stage.blank:
        parent, child = _parent(model, name)
        weight = own_parameters(parent).get(child)
        if weight is None:
            raise PlanMismatchError(f"the plan names parameter {name}, which the model does not have: solve again")
        del own_parameters(parent)[child]
        parent.register_buffer(child, _without_memory(weight, weight.shape, weight.dtype), persistent=False)
    if stage.received is not None:
        stub = model.get_submodule(stage.received)
        assert isinstance(stub, Stub)
        stub.receives = True
    if stage.last is not None:
        model.get_submodule(stage.last).register_forward_hook(_keep_output)
    model.__dict__[STAGE] = stage
    model.__class__ = _stage_class(type(model))  # type: ignore[assignment]
    return model


def with_stage(build_model: Callable[[], nn.Module], stage: StagePlan) -> nn.Module:
    """The model that a builder makes, as one of its stages."""
    return as_stage(build_model(), stage)


def received_on_meta(stage: StagePlan) -> tuple[Tensor, ...]:
    """The tensors that a stage receives, without memory; a gradient is computed for each."""
    return tuple(
        torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta", requires_grad=True)
        for one in stage.receives
    )


@final
class Stub(nn.Module):
    """Stands for a module of another stage. A call gives tensors of the shapes that the module would give: zeros that
    share one element of memory, or what was received. Plain attributes are read from the module; its tensors are on the
    meta device."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.receives = False
        #: the tensors that the call that runs gives, where the stub stands for the layer before a stage
        self.received: tuple[Tensor, ...] | None = None
        # Not registered: the module has no part in the stage's parameters, hooks or state.
        self.__dict__["_absent"] = (module.to("meta"),)
        self.__dict__["_known"] = {}

    def __getattr__(self, name: str) -> Any:
        absent = self.__dict__.get("_absent")
        if absent is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(absent[0], name)

    @property
    def absent_class(self) -> type[nn.Module]:
        """The class of the module that the stub stands for."""
        cls: type[nn.Module] = type(self.__dict__["_absent"][0])
        return cls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if like is None:
            raise ModelError(f"module {self.name}, which is in another stage, is called without a tensor")
        found, made = self._shapes(leaves, spec)
        if self.receives:
            given = iter(self._taken(sum(isinstance(leaf, tuple) for leaf in found)))
            return pytree.tree_unflatten([next(given) if isinstance(x, tuple) else x for x in found], made)
        with torch.no_grad():
            results = [_without_memory(like, *leaf) if isinstance(leaf, tuple) else leaf for leaf in found]
        return pytree.tree_unflatten(results, made)

    def _taken(self, count: int) -> tuple[Tensor, ...]:
        if self.received is None or len(self.received) != count:
            given = "none" if self.received is None else len(self.received)
            raise ModelError(f"a stage takes the {count} tensors of {self.name} as `{RECEIVED}`, and was given {given}")
        return self.received

    def _shapes(self, leaves: list[Any], spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of what the module gives, (shape, dtype) for a tensor, and their structure."""
        key = tuple(_described(leaf) for leaf in leaves), spec
        if key not in self._known:
            with untraced(), torch.no_grad():
                given = [
                    torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
                    for x in leaves
                ]
                args, kwargs = pytree.tree_unflatten(given, spec)
                outputs = self.__dict__["_absent"][0](*args, **kwargs)
            found, made = pytree.tree_flatten(outputs)
            self._known[key] = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in found], made
        known: tuple[list[Any], pytree.TreeSpec] = self._known[key]
        return known


def _described(leaf: Any) -> object:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def _without_memory(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    """Zeros of a shape that share one element, on the device of another tensor."""
    return like.new_zeros((), dtype=dtype).expand(shape)


def _keep_output(module: nn.Module, _args: Any, output: Any) -> None:
    module.__dict__[_SENT] = tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    around, _, child = name.rpartition(".")
    try:
        return model.get_submodule(around), child
    except AttributeError:
        raise PlanMismatchError(f"the plan names {name}, which the model does not have: solve again") from None


@functools.cache
def _stage_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under its name, whose forward takes `received` and gives what the stage sends."""

    def forward(self: nn.Module, *args: Any, received: tuple[Tensor, ...] = (), **kwargs: Any) -> Any:
        stage = stage_of(self)
        if stage is None:
            return cls.forward(self, *args, **kwargs)
        stub = self.get_submodule(stage.received) if stage.received is not None else None
        if isinstance(stub, Stub):
            stub.received = tuple(received)
        try:
            output = cls.forward(self, *args, **kwargs)
        finally:
            if isinstance(stub, Stub):
                stub.received = None
        return output if stage.last is None else self.get_submodule(stage.last).__dict__.pop(_SENT)

    taken = inspect.signature(cls.forward)
    extra = inspect.Parameter(RECEIVED, inspect.Parameter.KEYWORD_ONLY, default=())
    named = list(taken.parameters.values())
    place = next((i for i, one in enumerate(named) if one.kind is inspect.Parameter.VAR_KEYWORD), len(named))
    forward.__signature__ = taken.replace(parameters=[*named[:place], extra, *named[place:]])  # type: ignore[attr-defined]
    return subclass(cls, {"forward": forward}, _stage_class)

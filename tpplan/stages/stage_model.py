"""The model as one stage runs it: its own modules, and stubs in place of those of other stages.

    model = build_model()
    as_stage(model, plan.stage, plan.precision, layers, run)  # takes `received` besides its inputs
    sent = model(**inputs, received=tensors)     # a tuple of tensors; the model's own output on the last stage

The root's own code runs on each stage, on the same inputs. A stub gives a tensor without memory of the shape that its
module would give; the stub of the layer before the stage gives the tensors that were received; what the stage's last
layer gives is sent, the code behind it gets tensors without memory instead, and what it makes of them is dropped. Names
of parameters stay as they are.
"""

import copy
import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.core.errors import PlanMismatchError, UsageError, first_line
from tpplan.core.graph import enclosing, joined_name, within
from tpplan.plan.sections.modes import Precision
from tpplan.plan.sections.ranks import RECEIVED, StagePlan, TensorPlan
from tpplan.stages.like_modules import Alike
from tpplan.stages.stub import Run, Stub, is_stand_in, stand_in, without_memory
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import own_buffers, own_children, own_parameters
from tpplan.trace.hooks.generated_class import subclass

#: key of the root's __dict__ for its stage
STAGE = "_tpplan_stage"
#: key of the __dict__ of a root that stands for several stages of a rank
_TOGETHER = "_tpplan_stages_together"
#: key of a module's __dict__ for what it gave, there while the root's forward runs: not where backward runs it again
_SENT = "_tpplan_sent"
#: attribute of the class of a stage's last layer: the class that its like have
_LAYER_CLASS = "_tpplan_layer_class"
#: key of a module's __dict__ for the shape of the whole of which it gives a slice
_WHOLE = "_tpplan_whole_shape"


def stage_of(model: nn.Module) -> StagePlan | None:
    """The stage that a model is; None for a whole model."""
    found: StagePlan | None = model.__dict__.get(STAGE)
    return found


def layer_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, which it shares with its like though it is a stage's last."""
    found: type[nn.Module] = getattr(type(layer), _LAYER_CLASS, type(layer))
    return found


def keep_stages(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Notes on a model that it is what some stages hold together."""
    model.__dict__[_TOGETHER] = tuple(stage for part in parts if (stage := stage_of(part)) is not None)


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that the stages of other ranks have; none of a whole model."""
    stage = stage_of(model)
    own = (stage,) if stage is not None else model.__dict__.get(_TOGETHER, ())
    if not own:
        return frozenset()
    stubs = ((name, module) for name, module in model.named_modules() if isinstance(module, Stub))
    blank = {name for one in own for name in one.blank}
    absent = {f"{name}.{own}" for name, stub in stubs for own in stub.absent_names()}
    return (frozenset(blank) | absent) - dict(model.named_parameters(remove_duplicate=False)).keys()


def as_stage(
    model: nn.Module,
    stage: StagePlan,
    precision: Precision,
    units: Iterable[str],
    run: Run,
    alike: Alike | None = None,
) -> nn.Module:
    """Makes a model one of its stages, in place: modules of other stages become stubs, their weights are dropped.
    Stubs that the model has already, from another stage of it, stay. The precision, and the layers (`units`) whose
    inputs FSDP casts in it, decide the dtypes of what stubs give; `run` runs their modules, of which one stands for
    those that are `alike`, where that is known.

    Raises PlanMismatchError for a module or parameter that the model does not have.
    """
    present = _present(model, stage)
    stubs: list[Stub] = []
    for name in stage.absent:
        parent, child = _parent(model, name)
        module = own_children(parent).get(child)
        if module is None:
            raise PlanMismatchError(f"the plan names module {name}, which the model does not have: solve again")
        if isinstance(module, Stub):
            stubs.append(module)
            continue
        kept = [one.name.removeprefix(f"{name}.") for one in stage.ties if within(one.name, name)]
        weights = {path: _parameter(module, path) for path in kept}
        stub = Stub(name, _apart(name, module, present), precision, units, run)
        for path, kept_weight in weights.items():
            stub.keep(path, kept_weight)
        stub.share_known(stubs, alike)
        stubs.append(stub)
        own_children(parent)[child] = stub
    _leave_out(model, stage.blank)
    if stage.received is not None:
        before = model.get_submodule(stage.received)
        assert isinstance(before, Stub)
        before.receives = True
    if stage.last is not None:
        last = model.get_submodule(stage.last)
        last.__class__ = _last_class(type(last))  # type: ignore[arg-type]
    model.__dict__[STAGE] = stage
    model.__class__ = _stage_class(type(model))  # type: ignore[arg-type]
    return model


def _leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Puts buffers without memory in place of some parameters."""
    for name in names:
        parent, child = _parent(model, name)
        weight = own_parameters(parent).get(child)
        if weight is None and is_stand_in(own_buffers(parent).get(child)):  # of a module with several names
            continue
        if weight is None:
            raise PlanMismatchError(f"the plan names parameter {name}, which the model does not have: solve again")
        del own_parameters(parent)[child]
        parent.register_buffer(child, without_memory(weight, weight.shape, weight.dtype), persistent=False)


def _parameter(module: nn.Module, path: str) -> nn.Parameter:
    try:
        return module.get_parameter(path)
    except AttributeError:
        raise PlanMismatchError(
            f"the plan names parameter {path}, which the model does not have: solve again"
        ) from None


def _present(model: nn.Module, stage: StagePlan) -> frozenset[int]:
    """Ids of the modules that a stage has, of their parameters, and of those that its stubs keep."""
    absent, tied = frozenset(stage.absent), {one.name for one in stage.ties}
    found: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        is_present = absent.isdisjoint(enclosing(name))
        weights = own_parameters(module).items()
        found.update(id(weight) for own, weight in weights if is_present or joined_name(name, own) in tied)
        if is_present:
            found.add(id(module))
    return frozenset(found)


def _apart(name: str, module: nn.Module, present: Collection[int]) -> nn.Module:
    """A module of another stage for its stub, without the parameters that the stage has: a copy on the meta device
    where the stage runs some of the modules inside, whose ids are in `present` too."""
    if all(id(own) not in present for own in module.modules()):
        for own in map(own_parameters, module.modules()):
            own |= {key: _blank(weight) for key, weight in own.items() if weight is not None and id(weight) in present}
        return module
    memo: dict[int, Tensor] = {id(weight): _blank(weight) for weight in module.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            f"module {name} shares modules with other stages, so that its stub needs a copy, and copy.deepcopy of it "
            f"fails: {first_line(error)}; plan without stages (--pp 1)"
        ) from error


def _blank(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)


def keep_whole_shape(model: nn.Module, stage: StagePlan) -> None:
    """Notes the shape of what a stage sends as slices, as planned, for the code behind its last layer."""
    if stage.last is not None and any(one.sliced is not None for one in stage.sends):
        (sent,) = stage.sends
        model.get_submodule(stage.last).__dict__[_WHOLE] = sent.shape


def received_on_a_rank(inputs: Any, stage: StagePlan | None, tp: int) -> Any:
    """The inputs of a stage with slices in place of what one of `tp` ranks receives as slices; without values."""
    if stage is None or all(one.sliced is None for one in stage.receives):
        return inputs
    return {**inputs, RECEIVED: without_values(one.on_a_rank(tp) for one in stage.receives)}


def without_values(planned: Iterable[TensorPlan]) -> tuple[Tensor, ...]:
    """Tensors on the meta device for those planned between stages; a gradient is computed for each."""
    return tuple(
        torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta", requires_grad=True) for one in planned
    )


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    around, _, child = name.rpartition(".")
    try:
        return model.get_submodule(around), child
    except AttributeError:
        raise PlanMismatchError(f"the plan names {name}, which the model does not have: solve again") from None


@functools.cache
def _last_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under its name, of a stage's last layer: a call keeps what the layer gives, and gives the
    code behind it tensors without memory instead, of the whole shape. Hooks of the layer, as FSDP's, see the former."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = cls.__call__(self, *args, **kwargs)
        if _SENT in self.__dict__:
            self.__dict__[_SENT] = tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        shape = self.__dict__.get(_WHOLE)

        def without_values(leaf: Any) -> Any:
            return stand_in(leaf, shape or leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

        with torch.no_grad():
            return pytree.tree_map(without_values, output)

    return subclass(cls, {"__call__": call, _LAYER_CLASS: cls}, _last_class)


@functools.cache
def _stage_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under its name, whose forward takes `received` and gives what the stage sends."""

    def forward(self: nn.Module, *args: Any, received: tuple[Tensor, ...] = (), **kwargs: Any) -> Any:
        stage = stage_of(self)
        if stage is None:
            return cls.forward(self, *args, **kwargs)
        stub = self.get_submodule(stage.received) if stage.received is not None else None
        last = self.get_submodule(stage.last).__dict__ if stage.last is not None else {}
        if isinstance(stub, Stub):
            stub.received = tuple(received)
        last[_SENT] = ()
        try:
            output = cls.forward(self, *args, **kwargs)
        finally:
            sent = last.pop(_SENT)
            if isinstance(stub, Stub):
                stub.received = None
        return output if stage.last is None else sent

    taken = inspect.signature(cls.forward)
    extra = inspect.Parameter(RECEIVED, inspect.Parameter.KEYWORD_ONLY, default=())
    named = list(taken.parameters.values())
    place = next((i for i, one in enumerate(named) if one.kind is inspect.Parameter.VAR_KEYWORD), len(named))
    forward.__signature__ = taken.replace(parameters=[*named[:place], extra, *named[place:]])  # type: ignore[attr-defined]
    return subclass(cls, {"forward": forward}, _stage_class)

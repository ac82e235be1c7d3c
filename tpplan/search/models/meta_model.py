"""A model on the meta device, as its builder makes it there: parameters without values, ties kept."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tpplan.core.errors import ModelError, first_line
from tpplan.plan.plan import Precision, StagePlan
from tpplan.prove.apply_as_rank import copied
from tpplan.search.models.model_spec import UserCodeError
from tpplan.stages.like_modules import LikeModules
from tpplan.stages.stage_model import as_stage
from tpplan.stages.stub import Stub
from tpplan.torch_internals.modules import COMPILED, own_buffers, own_children, own_parameters
from tpplan.trace.answers.concrete_values import DESCRIPTIONS, QUESTIONS, ConcreteValues
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.hooks.parameter_names import register_names
from tpplan.trace.record_fx import given_on_meta, on_meta_like
from tpplan.trace.trace import repeated_children

#: how a builder fails that the meta device does not give what it needs
_NEEDS_VALUES = (RuntimeError, NotImplementedError, UnknownValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model on the meta device, the dtypes that its parameters were built in by name, notes on how it was built where
    its builder alone could not, and which of its modules are alike. `stubs` are those of its stages so far, by
    precision and name."""

    model: nn.Module
    dtypes: Mapping[str, torch.dtype]
    notes: tuple[str, ...]
    alike: LikeModules
    stubs: dict[tuple[Precision, str], Stub] = field(default_factory=dict)

    def stage(self, stage: StagePlan, precision: Precision) -> "Built":
        """A stage of the model, made of a copy of it."""
        units = repeated_children(self.model)
        # What other stages have is copied once for all; a stub that keeps tied weights is a stage's own.
        names = [name for name in stage.absent if not stage.ties and (precision, name) in self.stubs]
        with self._replaced({name: self.stubs[precision, name] for name in names}):
            model = copied(self.model)
        as_stage(model, stage, precision, units, given_on_meta, self.alike)
        for name in stage.absent if not stage.ties else ():
            stub = model.get_submodule(name)
            assert isinstance(stub, Stub)
            self.stubs.setdefault((precision, name), stub.again())
        register_names(model)
        return replace(self, model=model, dtypes={name: self.dtypes[name] for name, _ in model.named_parameters()})

    @contextlib.contextmanager
    def _replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which the model has other modules under some names."""
        places = [(own_children(self.model.get_submodule(name.rpartition(".")[0])), name) for name in modules]
        before = {name: children[name.rpartition(".")[2]] for children, name in places}
        try:
            for children, name in places:
                children[name.rpartition(".")[2]] = modules[name]
            yield
        finally:
            for children, name in places:
                children[name.rpartition(".")[2]] = before[name]


def built_on_meta(build_model: Callable[[], nn.Module], *, is_half: bool) -> Built:
    """The model that a builder makes, on the meta device. `is_half` turns float32 parameters into bfloat16, in which
    the model computes then.

    Warns where the builder needs values, and so runs on the CPU. Raises ModelError for what is no module, has no
    parameters, or has some without a shape.
    """
    notes: tuple[str, ...] = ()
    try:
        with torch.device("meta"), _Building():
            model = build_model()
    except (*_NEEDS_VALUES, UserCodeError) as error:
        # Code that asks weights for values, as torch.nn.utils.parametrizations.orthogonal does, needs some.
        own = error.__cause__ if isinstance(error, UserCodeError) else error
        if not isinstance(own, _NEEDS_VALUES):
            raise
        reason = first_line(own)
        notes = (f"the builder fails on the meta device, and runs on the CPU: {reason}",)
        warnings.warn(notes[0], stacklevel=2)
        model = build_model()
    if not isinstance(model, nn.Module):
        raise ModelError(f"the builder returned {type(model).__name__}, expected a torch.nn.Module")
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train or to shard")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"parameter {name} has no shape before the first call: call the model in the builder")
    model = _uncompiled(model)
    _put_on_meta(model)
    register_names(model)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    if is_half:
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
    return Built(model=model, dtypes=dtypes, notes=notes, alike=LikeModules(model))


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model with modules in place of what torch.compile makes of them: a plan names them without the wrapper."""
    for module in model.modules():
        children = own_children(module)
        for name, child in children.items():
            if child is not None and COMPILED in own_children(child):
                children[name] = own_children(child)[COMPILED]
    return own_children(model).get(COMPILED) or model


class _Building(ConcreteValues):
    """The mode in which a builder runs on the meta device: answers its questions about values that are not drawn.

    Leaves tensors as they are where code would fill them with random numbers: they hold none, and torch takes
    milliseconds for each to find that out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")
        is_meta = isinstance(first, torch.Tensor) and first.is_meta
        if func in _FILLS and is_meta:
            self.lay_bare(first)
            return first
        name = getattr(func, "__name__", "")
        if name in QUESTIONS and is_meta:
            return self.on_real(func, args, kwargs)
        if is_meta and getattr(func, "__self__", None) is torch.Tensor.data:
            self.lay_bare(first)
        results = func(*args, **kwargs)
        if "empty" not in name and name not in DESCRIPTIONS:
            self.note_made(results, func, args, kwargs)
        return results


_FILLS = frozenset({
    nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_normal_, nn.init.kaiming_uniform_,
    nn.init.xavier_normal_, nn.init.xavier_uniform_, torch.Tensor.normal_, torch.Tensor.uniform_,
})  # fmt: skip


def _put_on_meta(model: nn.Module) -> None:
    """Replaces parameters and buffers on other devices by ones on the meta device, ties kept: some of torch's functions
    (torch.normal) make tensors on the CPU whatever device is set."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta:
                    _, table[name] = moved.setdefault(id(tensor), (tensor, on_meta_like(tensor)))

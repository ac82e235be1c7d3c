"""Traces like layers once: in a trace, a sibling that must give the same graph as a traced layer is one operator.

Two layers are taken for alike when their class is equal, their attributes are equal all the way down, parameters and
buffers agree in shape, dtype and requires_grad, and neither has hooks. A layer that knows its own index differs from
its sibling, and is traced. A sibling copies the first layer it is like only where it is also called alike: tensors of
equal shape, stride and dtype, other arguments equal, gradients and autocast on or off alike. A layer that asked tensors
for values, or left something behind on itself, is copied by none. A forward that the code around it calls past its
module is part of that code, and is traced.

Nobody can list what else a layer's code reads (objects, closures, a table keyed by id(self)). So each sibling runs
beside the trace, with the marks of its boundary, and its calls are compared with those of the traced layer
(tpplan.trace.layer_calls). Where they differ, layers get classes by what they did, and the model is traced anew, one
layer of each class.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpplan.core.errors import ModelError
from tpplan.core.graph import joined_name
from tpplan.stages.like_modules import are_alike, signature
from tpplan.stages.stub import Stub
from tpplan.torch_internals import pytree
from tpplan.trace.answers.concrete_values import ConcreteValues
from tpplan.trace.boundary_marks import BoundaryMarks
from tpplan.trace.forward_arguments import positional_names, signature_of
from tpplan.trace.hooks import custom_ops
from tpplan.trace.layer_calls import CallLog, contents, untraced
from tpplan.trace.layer_images import NotAlikeError
from tpplan.trace.whole.opaque import running_modes

#: gives for a module's name what an applied plan does inside the module, as a hashable value to compare
PlanDigest = Callable[[str], object]


@contextlib.contextmanager
def like_layers_once(
    model: nn.Module,
    marks: BoundaryMarks,
    plan_digest: PlanDigest | None = None,
    classes: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Runs one layer of each group of like layers in a trace; its siblings give the operator `tpplan::sibling`.

    marks: those of module boundaries; layers of a group make theirs inside their forwards. plan_digest: layers that a
    plan treats differently are not alike. classes: class of a layer by its name; layers of different classes are not
    alike. Raises NotAlikeError at the end, whatever else was raised, where a sibling did something else than the layer
    it was taken to be like.
    """
    outputs: dict[str, list[torch.Tensor]] = {}
    wrapped: list[nn.Module] = []
    trial = _Trial(names={id(module): name for name, module in model.named_modules()}, marks=marks)
    custom_ops.running_traces.append(outputs)
    try:
        for group in alike_layers(model):
            like = _LikeLayers(trial, outputs)
            for name, layer in group:
                if layer in wrapped:  # under another name, in an earlier group
                    continue
                key = (plan_digest(name) if plan_digest is not None else None, (classes or {}).get(name))
                layer.forward = like.forward_of(layer, name, key)
                wrapped.append(layer)
        yield
    except Exception as error:
        trial.check(classes, error)
        raise
    else:
        trial.check(classes)
    finally:
        custom_ops.running_traces.pop()
        for layer in wrapped:
            del layer.forward


@dataclass(slots=True)
class _Trial:
    """The logs of a trace's layers, and the siblings that did something else than the layer they stand for."""

    #: names of the model's modules, by the modules' id
    names: Mapping[int, str]
    marks: BoundaryMarks
    #: logs of the traced layers, by name
    logs: dict[str, CallLog] = field(default_factory=dict)
    #: class of each sibling that differs, by its name
    differing: dict[str, str] = field(default_factory=dict)
    #: by class, the log of the layer that the class is named for
    others: dict[str, CallLog] = field(default_factory=dict)
    #: why the first of these siblings differs
    reason: str = ""

    def log(self, modules: Mapping[str, nn.Module], leaves: Sequence[object], like: str | None = None) -> CallLog:
        """A log for the next forward of the layer with these modules, to be compared with the layer named `like`."""
        names = {self.names[id(module)]: name for name, module in modules.items()}
        return CallLog(modules, names, self.marks.running, leaves, None if like is None else self.logs[like])

    def run(self, forward: Callable[..., Any], layer: nn.Module, name: str, like: str, args: Any, kwargs: Any) -> None:
        """Runs a sibling's forward beside the trace, and notes where it does something else than the traced layer
        `like`.

        Raises the sibling's own exception.
        """
        modules = dict(layer.named_modules())
        before = contents(modules.values())
        log = self.log(modules, pytree.tree_leaves((args, kwargs)), like)
        try:
            with untraced(), log:
                output = forward(*args, **kwargs)
                log.close(output)
        except Exception as error:
            self._note(name, None, f"{name} fails where {like} does not: {type(error).__name__}: {error}")
            raise
        del output
        if log.has_left() or not _are_identical(contents(modules.values()), before):
            self._note(name, None, f"{name} leaves something behind for others to read")
        elif not log.is_like(self.logs[like]):
            self._note(name, log, f"{name} does something else than {like}, though their attributes are equal")

    def _note(self, name: str, log: CallLog | None, reason: str) -> None:
        """Notes a sibling that differs, in the class of those with an equal log; without a log in one of its own."""
        self.reason = self.reason or reason
        known = (like for like, other in self.others.items() if log is not None and log.is_like(other))
        own = name if name in self.differing else next(known, name)
        self.differing[name] = own
        if log is not None and own == name:
            self.others[name] = log

    def check(self, classes: Mapping[str, str] | None, error: Exception | None = None) -> None:
        """Raises NotAlikeError, with the classes to trace by, where a sibling differed."""
        if self.differing:
            raise NotAlikeError(self.reason, {**(classes or {}), **self.differing}) from error


@dataclass(slots=True)
class _LikeLayers:
    """A group of like layers in a trace: the first that is called in a certain way runs in the trace, later ones run
    beside it and give the operator `tpplan::sibling`."""

    trial: _Trial
    #: results of the traced layers of all groups, by name
    outputs: dict[str, list[torch.Tensor]]
    #: structure of these results
    specs: dict[str, Any] = field(default_factory=dict)
    #: name of the traced layer by way of call
    traced: dict[object, str] = field(default_factory=dict)

    def forward_of(self, layer: nn.Module, name: str, key: object) -> Callable[..., Any]:
        """The forward for a layer of the group. Layers are alike only where their keys are equal."""
        own_signature, marks = signature_of(layer), self.trial.marks
        marks.inside[name] = positional_names(layer)

        def run(*args: Any, **kwargs: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return marks.crossed(layer, args, kwargs, name)

            if not marks.is_called(name):
                return type(layer).forward(layer, *args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            call = (key, running_modes(), spec, *(signature(leaf) for leaf in leaves))
            if not tensors or name in self.outputs or not _is_hashable(call):
                return forward(*args, **kwargs)
            like = self.traced.setdefault(call, name)
            if like == name:
                return self._run_first(forward, layer, name, call, args, kwargs)
            self.trial.run(forward, layer, name, like, args, kwargs)
            return pytree.tree_unflatten(custom_ops.sibling(tensors, name, like), self.specs[like])

        run.__signature__ = own_signature  # type: ignore[attr-defined]
        return run

    def _run_first(
        self, forward: Callable[..., Any], layer: nn.Module, name: str, call: object, args: Any, kwargs: Any
    ) -> Any:
        """Runs a layer's forward in the trace for others to be compared with, unless it asked for values, left
        something behind, or returns something beside tensors. Raises ModelError where it changes a list or dict among
        its arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                custom_ops.frame(leaf, name, "enter")
        modules = dict(layer.named_modules())
        num_answered, before = ConcreteValues.num_answered, contents(modules.values())
        with self.trial.log(modules, leaves) as log:
            output = forward(*args, **kwargs)
            log.close(output)
        found, self.specs[name] = pytree.tree_flatten(output)
        if pytree.tree_structure((args, kwargs)) != spec:
            raise ModelError(f"module {name} changes a list or dict that it is given: return it instead")
        is_alone = ConcreteValues.num_answered != num_answered or not _are_identical(contents(modules.values()), before)
        if is_alone or not found or not all(isinstance(leaf, torch.Tensor) for leaf in found):
            del self.traced[call]
            return output
        self.outputs[name], self.trial.logs[name] = found, log
        for leaf in found:
            custom_ops.frame(leaf, name, "leave")
        return output


def _are_identical(first: list[object], second: list[object]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def alike_layers(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Groups of two or more like siblings, as (name, layer), outermost ones only. Layers with tied parameters, and
    stubs, are in no group."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    unique = {name for name, _ in model.named_parameters()}
    tied = {id(model.get_parameter(name)) for name in names if name not in unique}
    groups: list[list[tuple[str, nn.Module]]] = []
    inside: set[int] = set()
    for prefix, container in model.named_modules():
        if id(container) in inside:
            continue
        kinds: list[list[tuple[str, nn.Module]]] = []
        for child_name, child in container.named_children():
            if not child_name.isdecimal() or isinstance(child, Stub) or any(id(p) in tied for p in child.parameters()):
                continue
            name = joined_name(prefix, child_name)
            kind = next((kind for kind in kinds if are_alike(kind[0][1], child)), None)
            if kind is None:
                kinds.append([(name, child)])
            else:
                kind.append((name, child))
        for kind in kinds:
            if len(kind) > 1:
                groups.append(kind)
                inside |= {id(module) for _, layer in kind for module in layer.modules()}
    return groups


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True

"""Marks of module boundaries in a trace.

Hooks pass each tensor that enters or leaves a module's forward through the custom op `tpplan::boundary`. A layer that
is like others does so in its forward, so that its siblings' marks are compared and copied like all else that it does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.core.errors import ModelError
from tpplan.core.graph import SAME_TENSOR, Direction
from tpplan.stages.stub import Stub, is_stand_in
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import is_flat, named_arguments, positional_names, tensors_of_call
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import own_code
from tpplan.trace.whole.opaque import Opaques

#: changes a tensor before it crosses a boundary in a trace, by (tensor, module, direction, path)
BoundaryHook = Callable[[torch.Tensor, str, Direction, str], torch.Tensor]


@dataclass(slots=True)
class BoundaryMarks:
    """The hooks that a trace puts at boundaries. `running`: names of the modules that run, the innermost last."""

    cast: BoundaryHook
    running: list[str]
    #: by module name, for each of its calls that runs: the arguments, and their structure when the call began; None
    #: where no argument is a container
    given: dict[str, list[tuple[Any, pytree.TreeSpec | None]]] = field(default_factory=dict)
    #: by the name of each module that marks its boundary in its forward: the names of its positional parameters
    inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: names of the modules in `inside` that were called, and whose forwards have not begun
    called: set[str] = field(default_factory=set)
    #: by id the tensors that stubs were given
    noted: dict[int, torch.Tensor] = field(default_factory=dict)

    def is_called(self, name: str) -> bool:
        """True where a forward that begins does so by a call of its module, whose boundary is marked, and not by a call
        of the forward alone."""
        is_called = name in self.called
        self.called.discard(name)
        return is_called

    def crossed(self, module: nn.Module, args: Any, kwargs: Any, name: str) -> Any:
        """The output of a forward of the module's class, with marks of what enters and leaves it."""
        args, kwargs = self.enter(module, args, kwargs, name)
        return self.leave(type(module).forward(module, *args, **kwargs), name)

    def enter(self, module: nn.Module, args: Any, kwargs: Any, name: str) -> Any:
        """A forward pre-hook: the arguments, their tensors marked. One given several times is marked once, as code may
        ask whether its arguments are the same."""
        positional = self.inside[name] if name in self.inside else positional_names(module)
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most calls are
            (path,) = named_arguments(positional, args, kwargs)
            alone = (self._mark(name, Direction.INPUT, path, args[0]),), dict[str, Any]()
            self.given.setdefault(name, []).append((alone, None))
            return alone
        paths: dict[int, list[str]] = {}
        marked: dict[int, torch.Tensor] = {}

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            paths.setdefault(id(tensor), []).append(path)
            return tensor

        def mark(_path: str, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in marked:
                path = SAME_TENSOR.join(paths[id(tensor)])
                marked[id(tensor)] = self._mark(name, Direction.INPUT, path, tensor)
            return marked[id(tensor)]

        bound = named_arguments(positional, args, kwargs)
        tensors_of_call(bound, note, is_given=True)
        values = list(tensors_of_call(bound, mark, is_given=True).values())
        changed = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        self.given.setdefault(name, []).append((changed, None if is_flat(bound) else pytree.tree_structure(changed)))
        return changed

    def leave(self, output: Any, name: str) -> Any:
        """A forward hook: the output, its tensors marked. Raises ModelError where the arguments have changed."""
        changed, structure = self.given[name].pop()
        if structure is not None and pytree.tree_structure(changed) != structure:
            raise ModelError(f"module {name or 'the root'} changes a list or dict that it is given: return it instead")
        if type(output) is torch.Tensor:
            return self._mark(name, Direction.OUTPUT, "output", output)
        return tensors_of_call({"output": output}, functools.partial(self._mark, name, Direction.OUTPUT))["output"]

    def note_given(self, _module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        """A forward pre-hook of a stub: marks the tensors that it is given, but those that stubs made, and those that
        another stub was given too. The stub gets them as they are."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not is_stand_in(leaf) and id(leaf) not in self.noted:
                self.noted[id(leaf)] = leaf
                local = _local_tensor(leaf) if isinstance(leaf, DTensor) else self._read(leaf, Direction.INPUT)
                custom_ops.boundary(local, name, str(Direction.INPUT), "given")

    def _mark(self, name: str, direction: Direction, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):  # an output that an applied plan leaves sharded
            return _as_dtensor(custom_ops.boundary(_local_tensor(tensor), name, str(direction), path), tensor)
        tensor = self.cast(self._read(tensor, direction), name, direction, path)
        return custom_ops.boundary(tensor, name, str(direction), path)

    def _read(self, tensor: torch.Tensor, direction: Direction) -> torch.Tensor:
        """An alias of a parameter that crosses, so that the module whose code hands the parameter on reads it."""
        if type(tensor) is torch.Tensor or not isinstance(tensor, nn.Parameter):  # the latter takes long to ask
            return tensor
        entered = [self.running.pop()] if direction is Direction.INPUT else []
        passed: torch.Tensor = torch.ops.aten.alias(tensor)
        self.running.extend(entered)
        return passed


@contextlib.contextmanager
def boundaries_marked(model: nn.Module, opaques: Opaques, marks: BoundaryMarks) -> Iterator[None]:
    """Puts hooks on every module that mark each tensor crossing its boundary, or tell a module that marks it inside
    that it is called; removes them at the end. Of stubs only that which gives what a stage receives has them; what
    others are given is marked once."""
    handles = []
    for name, module in model.named_modules():
        if type(module).forward is nn.Module.forward or opaques.hides(name):  # a container: nothing crosses it
            continue
        if isinstance(module, Stub) and not module.receives:
            note = functools.partial(marks.note_given, name=name)
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
            continue
        if name in marks.inside:
            handles.append(module.register_forward_pre_hook(lambda _m, _args, name=name: marks.called.add(name)))
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: marks.enter(m, args, kwargs, name), with_kwargs=True
            )
        )
        # Before the model's own hooks: what they see is converted already.
        handles.append(
            module.register_forward_hook(lambda _m, _args, out, name=name: marks.leave(out, name), prepend=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@own_code
def _local_tensor(tensor: DTensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    return local


@own_code
def _as_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)

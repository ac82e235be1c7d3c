"""Makes modules run on plain local tensors: a generated subclass per class, a ModuleBinding per module with its plan.

At rest a parameter is a DTensor. While a forward runs, reading a parameter gives this rank's local tensor in the layout
planned for the reader (the module whose forward is running), and its gradient is converted back. The generated class
has a property for each of its own parameters, and a forward that converts inputs and outputs:

    push this module as the reader -> convert inputs -> the class's own forward -> convert outputs -> pop

Names, state_dict, hooks, buffers and `isinstance` stay as they were. All calls of a module share its ModuleBinding,
and calls are not counted, so recomputation and re-entrant calls work like any other call.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpplan.apply.collectives.redistribute import Converter, TpGroup, local_rows, mask_rows
from tpplan.apply.collectives.tp_gradients import Reducer
from tpplan.apply.modules.buffer_reads import BufferReads
from tpplan.apply.modules.parameter_reads import ParameterReads
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.layout import ROWS, Conversion
from tpplan.core.name_patterns import ROOT
from tpplan.torch_internals.autograd import NO_BACKWARD, running_backward
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.trace.answers.own_failure import as_internal
from tpplan.trace.forward_arguments import named_tensors, signature_of
from tpplan.trace.hooks.call_rewriting import own_code
from tpplan.trace.hooks.generated_class import BINDING, subclass


@final
@dataclass(slots=True, kw_only=True, eq=False)
class TensorParallel:
    """State that all bindings of a model's modules share: the tp axis, the running forwards (innermost last), the
    reducer."""

    mesh: DeviceMesh
    group: TpGroup
    reducer: Reducer
    frames: list["Frame"] = field(default_factory=list)
    #: True once a warning was given about a tensor in another dtype than planned
    has_warned: bool = False

    @classmethod
    def on(cls, mesh: DeviceMesh) -> "TensorParallel":
        """Returns the shared state for a one-dimensional mesh."""
        group = TpGroup.of(mesh.get_group())
        return cls(mesh=mesh, group=group, reducer=Reducer(group=group))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallel":
        """Copies the reducer, as a copied model has its own gradients, and keeps the mesh and process group."""
        copied = TensorParallel(mesh=self.mesh, group=self.group, reducer=Reducer(group=self.group))
        memo[id(self)] = copied
        copied.reducer = copy.deepcopy(self.reducer, memo)
        return copied


@final
@dataclass(slots=True, eq=False)
class Frame:
    """A running forward; `foreign_rows` is the mask of ids whose rows are on other ranks, set by `R -> rows`."""

    site: "ModuleBinding"
    foreign_rows: Tensor | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryConversion:
    """One conversion at a module's boundary. `num_local_rows` is a rank's rows of the table, for `R -> rows` only."""

    conversion: Conversion
    dtype: torch.dtype
    group: TpGroup
    where: str
    num_local_rows: int = 0
    converter: Converter | None = field(init=False)

    def __post_init__(self) -> None:
        rest = self.conversion.after_mask if self.conversion.source == ROWS else self.conversion
        converter = None if rest.target == ROWS else Converter(rest, self.group, where=self.where)
        object.__setattr__(self, "converter", converter)

    @own_code
    def __call__(self, x: Tensor, frames: list[Frame]) -> Tensor:
        """Returns the tensor in its layout on the other side of the boundary."""
        if self.converter is None:
            x, frames[-1].foreign_rows = local_rows(x, self.num_local_rows, self.group)
            return x
        if self.conversion.source == ROWS:
            x = mask_rows(x, self._foreign_rows(frames))
        return self.converter(x)

    def _foreign_rows(self, frames: list[Frame]) -> Tensor:
        """Returns the mask of the innermost running forward that has one: the ids may have entered a module around."""
        for frame in reversed(frames):
            if frame.foreign_rows is not None:
                return frame.foreign_rows
        raise PlanMismatchError(
            f"{self.where}: {self.conversion}: no ids were converted by 'R -> rows' before, here or in a module "
            "around: plan that conversion at the module that takes the ids"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of forward with its conversions by path; `position` is None where it is passed by name only."""

    name: str
    position: int | None
    crossings: Mapping[str, BoundaryConversion]


#: (tensor, conversion, converted) of a call's arguments. No dict by the tensor's id: torch.compile would compile anew
#: for each tensor
Converted = list[tuple[Tensor, Conversion, Tensor]]


@final
@dataclass(slots=True, kw_only=True, eq=False)
class ModuleBinding:
    """How the plan is applied to one module: its conversions, and the reads of its parameters."""

    shared: TensorParallel
    #: the module's names; several where the model holds it in several places
    names: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    outputs: Mapping[str, BoundaryConversion] = field(default_factory=dict)
    #: sharded dim by output path, for outputs that the model returns as sharded DTensors
    sharded_outputs: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, ParameterReads] = field(default_factory=dict)
    #: reads of the module's own buffers that some module reads as a slice
    buffers: Mapping[str, BufferReads] = field(default_factory=dict)
    #: reads of the weights below the module by their names relative to it, where the module runs whole
    whole: Mapping[str, ParameterReads] | None = None
    #: True where ids become rows here, and a module around this one converts the looked-up rows
    hands_rows_on: bool = False
    #: converters of the parameters that the module reads itself, by their names in it. Code that torch.compile traces
    #: looks up no names that differ between like layers: it would be compiled anew for each
    own_reads: Mapping[str, Converter | None] = field(init=False)

    def __post_init__(self) -> None:
        name = self.names[0]
        self.own_reads = {own: reads.converters[name] for own, reads in self.reads.items() if name in reads.converters}

    @property
    def name(self) -> str:
        """The module's first name, for messages."""
        return self.names[0] or ROOT

    def read(self, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        """Returns the parameter's local tensor for the running forward; the parameter itself when none runs."""
        reads = self.reads.get(name)
        if reads is None or parameter is None:
            return parameter
        frames = self.shared.frames
        if frames:
            site = frames[-1].site
            if site is self and name in self.own_reads and isinstance(parameter, DTensor):
                return reads.converted(parameter, self.own_reads[name])
            return reads.local(parameter, site.names)
        # A checkpointed function, rather than a checkpointed module, is recomputed with no forward running.
        if torch.is_grad_enabled() and running_backward() != NO_BACKWARD:
            return reads.local(parameter, self.names)
        return parameter

    def read_buffer(self, name: str, buffer: Tensor | None) -> Tensor | None:
        """Returns the buffer as the running forward reads it; the buffer itself when none runs."""
        reads = self.buffers.get(name)
        if reads is None or buffer is None:
            return buffer
        if frames := self.shared.frames:
            return reads.local(buffer, frames[-1].site.names)
        # As in `read`: a checkpointed function is recomputed with no forward running.
        if torch.is_grad_enabled() and running_backward() != NO_BACKWARD:
            return reads.local(buffer, self.names)
        return buffer

    def converters(self) -> Iterator[Converter]:
        """Yields the converters of the module's inputs, outputs and parameter reads."""
        crossings = [crossing for argument in self.arguments for crossing in argument.crossings.values()]
        yield from (c.converter for c in (*crossings, *self.outputs.values()) if c.converter is not None)
        for reads in (*self.reads.values(), *(self.whole or {}).values()):
            yield from (converter for converter in reads.converters.values() if converter is not None)
        for buffer in self.buffers.values():
            yield from buffer.converters()

    def whole_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the local tensors of the weights below a module that runs whole, by name, in the layouts it reads."""
        assert self.whole is not None
        return {name: self.whole[name].local(weight, self.names) for name, weight in module.named_parameters()}

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with planned inputs converted; a tensor that is given several times is converted once.
        Raises PlanMismatchError where one is not passed."""
        known: Converted = []
        for argument in self.arguments:
            if argument.name in kwargs:
                value = self._convert(argument.name, kwargs[argument.name], argument.crossings, known)
                kwargs = kwargs | {argument.name: value}
            elif argument.position is not None and argument.position < len(args):
                value = self._convert(argument.name, args[argument.position], argument.crossings, known)
                args = (*args[: argument.position], value, *args[argument.position + 1 :])
            else:
                self._convert(argument.name, None, argument.crossings, known)
        return args, kwargs

    def convert_outputs(self, output: Any) -> Any:
        """Returns the output with planned outputs converted, and those that stay sharded as DTensors."""
        if self.outputs:
            output = self._convert("output", output, self.outputs, None)
        if self.sharded_outputs:
            output = self._as_dtensors(output)
        return output

    def _convert(
        self, root: str, tree: Any, crossings: Mapping[str, BoundaryConversion], known: Converted | None
    ) -> Any:
        if isinstance(tree, Tensor) and root in crossings:
            return self._once(crossings[root], tree, known)
        if tree is None:
            path, crossing = next(iter(crossings.items()))
            raise PlanMismatchError(
                f"module {self.name}: the plan converts {path!r} ({crossing.conversion}), and nothing is passed there: "
                "this call takes another path through the model than the planned one; plan with the same inputs as in "
                "training"
            )
        found: set[str] = set()

        def change(path: str, tensor: Tensor) -> Tensor:
            crossing = crossings.get(path)
            if crossing is None:
                return tensor
            found.add(path)
            return self._once(crossing, tensor, known)

        converted = named_tensors({root: tree}, change)[root]
        if missing := sorted(crossings.keys() - found):
            raise PlanMismatchError(
                f"module {self.name}: the plan converts {missing[0]!r}, and {root!r} holds no such tensor: "
                f"it is a {type(tree).__name__}; plan with the same inputs as in training"
            )
        return converted

    def _once(self, crossing: BoundaryConversion, tensor: Tensor, known: Converted | None) -> Tensor:
        """The converted tensor, the same one for each argument of a call that is the same tensor."""
        if known is None:
            return self._converted(crossing, tensor)
        for other, conversion, converted in known:
            if other is tensor and conversion == crossing.conversion:
                return converted
        known.append((tensor, crossing.conversion, self._converted(crossing, tensor)))
        return known[-1][2]

    def _converted(self, crossing: BoundaryConversion, tensor: Tensor) -> Tensor:
        if tensor.dtype != crossing.dtype and not self.shared.has_warned:
            self.shared.has_warned = True
            warnings.warn(
                f"{crossing.where}: the tensor is {tensor.dtype}, and the plan was priced for {crossing.dtype}: "
                "results are right, but the plan's times and memory do not hold; train in the plan's precision, or "
                "solve with another --precision (shown once)",
                stacklevel=2,
            )
        return crossing(tensor, self.shared.frames)

    @own_code
    def _as_dtensors(self, output: Any) -> Any:
        """Returns the output with the tensors that stay sharded as DTensors, for the loss and the user."""

        def change(path: str, tensor: Tensor) -> Tensor:
            dim = self.sharded_outputs.get(path)
            if dim is None:
                return tensor
            return DTensor.from_local(tensor, self.shared.mesh, [Shard(dim)], run_check=False)

        return named_tensors({"output": output}, change)["output"]


def argument_positions(module: nn.Module, crossings: Mapping[str, BoundaryConversion]) -> tuple[Argument, ...]:
    """Groups conversions by the argument of forward that they are in; paths are those of tpplan.trace.trace.

    Raises PlanMismatchError for an argument that forward does not take.
    """
    parameters = list(signature_of(module).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    grouped: dict[str, dict[str, BoundaryConversion]] = {}
    for path, crossing in crossings.items():
        grouped.setdefault(path.partition(".")[0], {})[path] = crossing
    arguments: list[Argument] = []
    for name, members in grouped.items():
        number = name.removeprefix("args")
        position = positional.index(name) if name in positional else None
        if position is None and number.isdecimal() and inspect.Parameter.VAR_POSITIONAL in kinds:
            position = int(number)
        if position is None and name not in named and inspect.Parameter.VAR_KEYWORD not in kinds:
            where, kind = next(iter(members.values())).where, type(module).__name__
            raise PlanMismatchError(
                f"{where}: {kind}.forward takes no argument {name!r}, only {positional}: apply the plan to the model "
                "that it was made for"
            )
        arguments.append(Argument(name=name, position=position, crossings=members))
    return tuple(arguments)


def check_swappable(module: nn.Module, name: str) -> None:
    """Raises UsageError for a module that a plan was applied to."""
    if BINDING in module.__dict__:
        raise UsageError(f"module {name or ROOT}: a plan is applied already: build the model again")


def swap_class(module: nn.Module, site: ModuleBinding) -> None:
    """Stores the ModuleBinding on a module and replaces its class by the generated subclass."""
    module.__dict__[BINDING] = site
    names = tuple(sorted(site.reads)), tuple(sorted(site.buffers))
    module.__class__ = local_class(type(module), *names)  # type: ignore[arg-type]


@functools.cache
def local_class(cls: type[nn.Module], names: tuple[str, ...], buffers: tuple[str, ...] = ()) -> type[nn.Module]:
    """Returns the subclass of cls, with its name, that converts at its boundary and reads parameters `names` and
    `buffers` as local tensors."""
    namespace: dict[str, Any] = {name: _local(name, own_parameters, ModuleBinding.read) for name in names}
    namespace |= {name: _local(name, own_buffers, ModuleBinding.read_buffer) for name in buffers}
    if cls.forward is not nn.Module.forward:
        namespace["forward"] = _local_forward(cls)
    return subclass(cls, namespace, local_class, (names, buffers))


def _local(
    name: str, table_of: Callable[[nn.Module], Mapping[str, Any]], read: Callable[[ModuleBinding, str, Any], Any]
) -> property:
    """The property in place of a parameter or buffer: the entry `name` of table_of(module), as `read` gives it to the
    running forward."""

    def local(self: nn.Module) -> Any:
        held = table_of(self)
        if name not in held:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        site: ModuleBinding | None = self.__dict__.get(BINDING)
        try:
            return held[name] if site is None else read(site, name, held[name])
        except AttributeError as error:  # nn.Module would fall back to __getattr__ and return the entry
            raise as_internal(error) from error

    return property(local, doc=f"{name}: the entry of the module's table, or during a forward this rank's part of it")


def _local_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: ModuleBinding | None = self.__dict__.get(BINDING)
        if site is None:  # an instance made from the class alone, such as a slice of a container
            return cls.forward(self, *args, **kwargs)
        frames = site.shared.frames
        frames.append(Frame(site))
        try:
            if site.arguments:
                args, kwargs = site.convert_inputs(args, kwargs)
            output = cls.forward(self, *args, **kwargs)
            if site.outputs or site.sharded_outputs:
                output = site.convert_outputs(output)
            if site.hands_rows_on and len(frames) > 1:
                frames[-2].foreign_rows = frames[-1].foreign_rows
            return output
        finally:
            frames.pop()

    return forward

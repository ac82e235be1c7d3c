"""Turns a plan into ParallelStyle objects, which `parallelize_module` and apply_plan apply module by module.

    parallelize_module(model, mesh["tp"], tpplan.styles(plan))

A style distributes the parameters of its module and replaces the module's class (tpplan.apply.modules.local_modules).
The styles of one plan share the mesh axis, the stack of running forwards, the gradient reducer and the tied parameters.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.tp_gradients import Slot
from tpplan.apply.modules.buffer_reads import buffer_reads, check_buffer
from tpplan.apply.modules.local_modules import (
    BoundaryConversion,
    ModuleBinding,
    TensorParallel,
    argument_positions,
    check_swappable,
    swap_class,
)
from tpplan.apply.modules.parameter_reads import ParameterReads, check_reads, placement_of, plan_reads
from tpplan.core.errors import PlanError, PlanMismatchError
from tpplan.core.graph import LEFT_AT, within
from tpplan.core.layout import ROWS, LayoutKind, S, fits
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT, module_name
from tpplan.plan.plan import BoundaryPlan, BufferPlan, ParameterPlan, Plan
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.tensors import labelled, local_part, spec_of
from tpplan.trace.hooks.generated_class import BINDING
from tpplan.trace.whole.opaque import opaque_class

T = TypeVar("T")

_NO_CONVERSIONS = BoundaryPlan(inputs={}, outputs={})
_NO_GROUP = TpGroup(name="", size=1, rank=0)


@final
@dataclass(slots=True, eq=False)
class Application:
    """State that the styles of one plan share while they are applied."""

    plan: Plan
    on_mesh: TensorParallel | None = None
    #: axes ep and tp of the mesh on which weights of divided experts are cut, and the names of these weights' modules
    of_experts: DeviceMesh | None = None
    divided: frozenset[str] = frozenset()
    #: by the original parameter's id: the original, held so that its id is not reused, and the distributed parameter
    distributed: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    #: DTensors on the meta device by what they are cut from, and how
    like: dict[Hashable, DTensor] = field(default_factory=dict)
    #: by the parameter's canonical name
    reads: dict[str, ParameterReads] = field(default_factory=dict)
    #: by the name of a module that runs whole: reads of the weights below it, by their names relative to it
    whole: dict[str, dict[str, ParameterReads]] = field(default_factory=dict)

    def tensor_parallel(self, mesh: DeviceMesh) -> TensorParallel:
        """Returns the shared state of the tp axis. Raises PlanMismatchError unless the mesh is the plan's tp axis."""
        if self.on_mesh is None:
            if mesh.ndim != 1 or mesh.size() != self.plan.mesh.tp:
                raise PlanMismatchError(
                    f"the plan is for tp = {self.plan.mesh.tp}, the mesh given is {mesh}: pass a one-dimensional mesh "
                    f"of {self.plan.mesh.tp} ranks"
                )
            self.on_mesh = TensorParallel.on(mesh)
        return self.on_mesh

    def distribute(
        self, parameter: nn.Parameter, name: str, plan: ParameterPlan, mesh: DeviceMesh, src_data_rank: int | None
    ) -> nn.Parameter:
        """Returns the parameter as a DTensor with values from src_data_rank (None: each rank's own values).

        Calls with the same parameter return the same object.
        """
        if id(parameter) in self.distributed:
            return self.distributed[id(parameter)][1]
        placements = [placement_of(plan.placement, path=f"parameters.{name}.placement")]
        if self.of_experts is not None and name.rpartition(".")[0] in self.divided:
            mesh, placements = self.of_experts, [Shard(0), *placements]
        distributed: Tensor
        if parameter.is_meta:
            distributed = self._on_meta(parameter.detach(), mesh, placements)
        else:
            distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=src_data_rank)
            if src_data_rank is None and plan.placement.dim is not None:
                distributed = distributed.clone()  # a view of the whole tensor would keep its storage alive
        result = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        result.__dict__.update(parameter.__dict__)
        self.distributed[id(parameter)] = (parameter, result)
        return result

    def _on_meta(self, whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
        """The DTensor of a tensor on the meta device, which has no values to send. Torch cuts like tensors once: that
        would take half of the time of applying a plan there."""
        key = tuple(whole.shape), whole.stride(), whole.dtype, mesh, tuple(placements)
        known = self.like.get(key)
        if known is None:
            self.like[key] = known = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        cut = local_part(known)
        local = torch.empty_strided(cut.shape, cut.stride(), dtype=cut.dtype, device="meta")
        return labelled(local, spec_of(known))

    def reads_of(self, name: str, plan: ParameterPlan, slot: Slot, shared: TensorParallel) -> ParameterReads:
        """Returns how modules read a parameter. Tied names share one entry and one slot in the reducer."""
        if name not in self.reads:
            self.reads[name] = plan_reads(name, plan, shared.group, shared.reducer, slot)
        return self.reads[name]


@final
class ModuleStyle(ParallelStyle):
    """Applies a plan to one module: its parameters, boundary conversions and reads."""

    def __init__(
        self,
        application: Application,
        name: str,
        *,
        boundary: BoundaryPlan,
        sharded_outputs: Mapping[str, int],
        parameters: Mapping[str, tuple[str, ParameterPlan]],
        buffers: Mapping[str, tuple[str, BufferPlan]],
        num_local_rows: int,
        hands_rows_on: bool,
        opaque: str | None = None,
    ) -> None:
        super().__init__()
        self.application = application
        self.name = name
        self.boundary = boundary
        self.sharded_outputs = sharded_outputs
        #: by attribute name: the parameter's canonical name and its plan
        self.parameters = parameters
        #: by attribute name, for buffers that some module reads as a slice: the buffer's canonical name and its plan
        self.buffers = buffers
        self.num_local_rows = num_local_rows
        self.hands_rows_on = hands_rows_on
        #: name of the module that runs whole: this one or the one around it
        self.opaque = opaque

    @property
    def _is_inside_whole(self) -> bool:
        """True inside a module that runs whole: weights are distributed, and the class stays as it is."""
        return self.opaque is not None and self.opaque != self.name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shared = self.application.tensor_parallel(device_mesh)
        known: ModuleBinding | None = module.__dict__.get(BINDING)
        if known is not None and known.shared is shared:
            return self._add_name(module, known)
        self.check(module)
        reads: dict[str, ParameterReads] = {}
        for attribute, (name, plan) in self.parameters.items():
            parameters = own_parameters(module)
            parameter = parameters[attribute]
            assert parameter is not None
            parameters[attribute] = self.application.distribute(parameter, name, plan, device_mesh, self.src_data_rank)
            slot = Slot(module=module, name=attribute)
            reads[attribute] = self.application.reads_of(name, plan, slot, shared)
        if self.opaque is not None:
            below = self.name.removeprefix(self.opaque).removeprefix(".")
            prefix = f"{below}." if below else ""
            whole = self.application.whole.setdefault(self.opaque, {})
            whole.update({prefix + attribute: read for attribute, read in reads.items()})
            if self._is_inside_whole:
                return module
            reads = {}
            module.__class__ = opaque_class(type(module))  # type: ignore[arg-type]
        site = ModuleBinding(
            shared=shared,
            names=(self.name,),
            arguments=argument_positions(module, self._crossings("input", shared.group)),
            outputs=self._crossings("output", shared.group),
            sharded_outputs=self.sharded_outputs,
            reads=reads,
            buffers={own: buffer_reads(name, plan, shared.group) for own, (name, plan) in self.buffers.items()},
            whole=self.application.whole.setdefault(self.opaque, {}) if self.opaque is not None else None,
            hands_rows_on=self.hands_rows_on,
        )
        swap_class(module, site)
        return module

    def check(self, module: nn.Module) -> None:
        """Raises the error that applying this style would raise, without changing the module."""
        if not self._is_inside_whole:
            check_swappable(module, self.name)
        tp = self.application.plan.mesh.tp
        for attribute, (name, plan) in self.parameters.items():
            parameter = own_parameters(module).get(attribute)
            if parameter is None:
                kind = type(module).__name__
                raise PlanMismatchError(
                    f"module {self.name or ROOT} ({kind}) has no parameter {attribute!r}, which the plan lays out: "
                    "apply the plan to the model that it was made for, or solve again for this one"
                )
            check_reads(name, plan.placement, plan.reads)
            if not fits(tuple(parameter.shape), plan.placement, tp):
                raise PlanMismatchError(
                    f"shape {list(parameter.shape)} cannot be {plan.placement} on tp = {tp}: "
                    "name a dim that divides by tp, place the parameter as R, or solve again",
                    plan_path=f"parameters.{name}",
                )
        for attribute, (name, buffer) in self.buffers.items():
            check_buffer(name, buffer, own_buffers(module).get(attribute), tp)
        argument_positions(module, self._crossings("input", _NO_GROUP))

    def _crossings(self, direction: str, group: TpGroup) -> dict[str, BoundaryConversion]:
        planned = self.boundary.inputs if direction == "input" else self.boundary.outputs
        return {
            path: BoundaryConversion(
                conversion=crossing.conversion,
                dtype=_dtype(crossing.dtype, path=f"boundaries.{self.name or ROOT}.{direction}s.{path}"),
                group=group,
                where=f"module {self.name or ROOT}, {direction} {path}",
                num_local_rows=self.num_local_rows if crossing.conversion.target == ROWS else 0,
            )
            for path, crossing in planned.items()
            if not crossing.conversion.is_identity
        }

    def _add_name(self, module: nn.Module, site: ModuleBinding) -> nn.Module:
        """Adds a second name to a module that is applied already. Raises PlanError where its conversions differ there.

        All calls of a module share one boundary, which the plan lists under one of its names.
        """
        inputs = {path: c for argument in site.arguments for path, c in argument.crossings.items()}
        known_crossings = (("input", inputs), ("output", site.outputs))
        for direction, known in known_crossings if self.boundary is not _NO_CONVERSIONS else ():
            here = self._crossings(direction, site.shared.group)
            if {path: c.conversion for path, c in known.items()} == {path: c.conversion for path, c in here.items()}:
                continue
            raise PlanError(
                f"modules {site.name} and {self.name} are one module, and the plan converts its {direction}s "
                "differently under each name: give both names the same boundary"
            )
        site.names = (*site.names, self.name)
        return module


def styles(plan: Plan) -> dict[str, ParallelStyle]:
    """Returns a style by module name for each module that owns parameters, reads others' or has conversions.

    For tp = 1 only modules with scalar parameters, which FSDP2 cannot shard, have a style. Unlike apply_plan, these
    styles leave the fast path of torch's encoder layers on: evaluate such layers under
    torch.backends.mha.set_fastpath_enabled(False).
    """
    return dict(module_styles(plan))


def module_styles(
    plan: Plan, *, even_alone: bool = False, of_experts: DeviceMesh | None = None
) -> dict[str, ModuleStyle]:
    """Returns the ModuleStyle of each module by name, as `styles` does.

    even_alone=True gives all styles for tp = 1 too, where they change no value. `of_experts` is the mesh of divided
    experts, whose axes ep and tp cut their weights.
    """
    divided = frozenset(plan.expert_calls())
    axes = of_experts[str(Axis.EP), str(Axis.TP)] if of_experts is not None else None
    application = Application(plan, of_experts=axes, divided=divided)
    is_alone = plan.mesh.tp == 1
    parameters = plan.parameter_plans()
    if is_alone and not even_alone:
        parameters = _styled_alone(plan, divided if of_experts is not None else frozenset())
    if not parameters and is_alone:
        return {}
    boundaries = {module_name(name): boundary for name, boundary in plan.boundary_plans().items()}
    sharded_outputs = _sharded_outputs(plan)
    buffers = {} if is_alone else plan.buffer_plans()
    opaque = () if is_alone else plan.opaque_modules()
    owned = _by_owner((label, name, own) for name, own in parameters.items() for label in (name, *own.aliases))
    held = _by_owner((name, name, own) for name, own in buffers.items())
    reads = [own.reads for own in parameters.values()] + [own.reads for own in buffers.values()]
    readers = (reader for own in reads for reader in own if not reader.startswith("<"))
    names = {*owned, *held, *opaque, *boundaries, *readers}
    if sharded_outputs:
        names.add("")
    return {
        name: ModuleStyle(
            application,
            name,
            boundary=boundaries.get(name, _NO_CONVERSIONS),
            sharded_outputs=sharded_outputs if name == "" else {},
            parameters=owned.get(name, {}),
            buffers=held.get(name, {}),
            num_local_rows=_num_local_rows(name, boundaries.get(name, _NO_CONVERSIONS), plan),
            hands_rows_on=_hands_rows_on(name, boundaries),
            opaque=next((around for around in opaque if within(name, around)), None),
        )
        for name in sorted(names, key=lambda name: (name not in boundaries, name))
    }


def _styled_alone(plan: Plan, divided: frozenset[str]) -> dict[str, ParameterPlan]:
    """The parameters whose modules have a style on one tensor-parallel rank: scalars that FSDP2 cannot hold, and those
    of the modules whose experts are divided."""
    own = {name: own for name, own in plan.parameter_plans().items() if name.rpartition(".")[0] in divided}
    return plan.scalars_beside_fsdp() | own


def _by_owner(entries: Iterable[tuple[str, str, T]]) -> dict[str, dict[str, tuple[str, T]]]:
    """Name of a module -> of its attribute -> (canonical name, plan), of entries (name, canonical name, plan)."""
    found: dict[str, dict[str, tuple[str, T]]] = {}
    for name, canonical, plan in entries:
        owner, _, attribute = name.rpartition(".")
        found.setdefault(owner, {})[attribute] = (canonical, plan)
    return found


def _dtype(name: str, *, path: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        problem = f"{name!r} is no dtype of torch {torch.__version__}: expected one such as 'float32'"
        raise PlanError(problem, plan_path=path)
    return dtype


def _sharded_outputs(plan: Plan) -> dict[str, int]:
    """Returns the sharded dim of each output that the model returns sharded, by path.

    Raises PlanError for an output in a layout that DTensor does not have, which the caller could not read.
    """
    dims: dict[str, int] = {}
    for path, layout in plan.outputs.items():
        match layout.kind:
            case LayoutKind.REPLICATE:
                continue
            case LayoutKind.SHARD if layout.is_plain:
                assert layout.dim is not None
                if not path.startswith(LEFT_AT):  # tensors left on modules stay a rank's slice: nobody reads them
                    dims[path] = layout.dim
            case _:
                raise PlanError(f"expected R or S(dim), got {layout}", plan_path=f"outputs.{path}")
    return dims


def _num_local_rows(name: str, boundary: BoundaryPlan, plan: Plan) -> int:
    """Returns a rank's number of rows of the table that is looked up inside the module; 0 where no input becomes rows.

    Raises PlanError unless exactly one size fits.
    """
    if not any(crossing.conversion.target == ROWS for crossing in boundary.inputs.values()):
        return 0
    rows = {
        parameter.shape[0] // plan.mesh.tp
        for parameter in plan.parameter_plans().values()
        if any(layout == S(0) and within(reader, name) for reader, layout in parameter.reads.items())
    }
    if len(rows) != 1:
        raise PlanError(
            f"ids become local rows of one table, and tables of {len(rows)} sizes are read by rows inside this module: "
            "convert the ids at the module that looks them up",
            plan_path=f"boundaries.{name or ROOT}.inputs",
        )
    return rows.pop()


def _hands_rows_on(name: str, boundaries: Mapping[str, BoundaryPlan]) -> bool:
    """True where ids become rows at this module's input, and no output of it or below converts the looked-up rows.

    A module around this one converts them then.
    """
    inputs = boundaries[name].inputs.values() if name in boundaries else ()
    if not any(crossing.conversion.target == ROWS for crossing in inputs):
        return False
    return not any(
        crossing.conversion.source == ROWS
        for other, boundary in boundaries.items()
        if within(other, name)
        for crossing in boundary.outputs.values()
    )

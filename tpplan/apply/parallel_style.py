"""A plan as parallel styles: what `parallelize_module` takes, and what apply_plan itself goes through.

    parallelize_module(model, mesh["tp"], tpplan.styles(plan))

A style distributes the parameters its module owns and swaps the module's class (tpplan.apply.modules.local_modules).
Styles of one call share the tensor-parallel axis, the stack of running forwards, the reducer, and which parameters are
tied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.tp_gradients import Slot
from tpplan.apply.modules.local_modules import (
    Crossing,
    Site,
    TensorParallel,
    argument_positions,
    check_swappable,
    swap_class,
)
from tpplan.apply.modules.parameter_reads import ParameterReads, check_reads, placement_of, plan_reads
from tpplan.core.errors import PlanError, PlanMismatchError
from tpplan.core.graph import LEFT_AT, within
from tpplan.core.layout import ROWS, LayoutKind, S, fits
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import BoundaryPlan, ParameterPlan, Plan
from tpplan.torch_internals.modules import own_parameters
from tpplan.trace.hooks.generated_class import SITE
from tpplan.trace.opaque import opaque_class

_NO_CONVERSIONS = BoundaryPlan(inputs={}, outputs={})
_NO_GROUP = TpGroup(name="", size=1, rank=0)


@final
@dataclass(slots=True, eq=False)
class Application:
    """What the styles of one plan share while they are applied."""

    plan: Plan
    on_mesh: TensorParallel | None = None
    #: what each parameter became, with the original, whose id must not be given to another
    distributed: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    reads: dict[str, ParameterReads] = field(default_factory=dict)
    #: by the name of a module that runs whole: reads of the weights below it, by their names there
    whole: dict[str, dict[str, ParameterReads]] = field(default_factory=dict)

    def tensor_parallel(self, mesh: DeviceMesh) -> TensorParallel:
        """The shared state. Raises PlanMismatchError for a mesh of another size than the plan's tp."""
        if self.on_mesh is None:
            if mesh.ndim != 1 or mesh.size() != self.plan.mesh.tp:
                raise PlanMismatchError(f"the plan is for tp = {self.plan.mesh.tp}, the mesh given is {mesh}")
            self.on_mesh = TensorParallel.on(mesh)
        return self.on_mesh

    def distribute(
        self, parameter: nn.Parameter, name: str, plan: ParameterPlan, mesh: DeviceMesh, src_data_rank: int | None
    ) -> nn.Parameter:
        """The parameter as a DTensor with its values from src_data_rank; the same object for the same parameter."""
        if id(parameter) in self.distributed:
            return self.distributed[id(parameter)][1]
        placement = placement_of(plan.placement, where=f"parameters.{name}.placement")
        distributed: Tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src_data_rank)
        if src_data_rank is None and plan.placement.dim is not None:
            distributed = distributed.clone()  # a chunk would keep the whole alive
        result = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        result.__dict__.update(parameter.__dict__)
        self.distributed[id(parameter)] = (parameter, result)
        return result

    def reads_of(self, name: str, plan: ParameterPlan, slot: Slot, shared: TensorParallel) -> ParameterReads:
        """How a parameter is read; tied names have one entry, and one slot in the reducer."""
        if name not in self.reads:
            self.reads[name] = plan_reads(name, plan, shared.group, shared.reducer, slot)
        return self.reads[name]


@final
class ModuleStyle(ParallelStyle):
    """What a plan says of one module."""

    def __init__(
        self,
        application: Application,
        name: str,
        *,
        boundary: BoundaryPlan,
        sharded_outputs: Mapping[str, int],
        parameters: Mapping[str, tuple[str, ParameterPlan]],
        num_local_rows: int,
        hands_rows_on: bool,
        opaque: str | None = None,
    ) -> None:
        super().__init__()
        self.application = application
        self.name = name
        self.boundary = boundary
        self.sharded_outputs = sharded_outputs
        #: by the attribute's name: the parameter's canonical name and its plan
        self.parameters = parameters
        self.num_local_rows = num_local_rows
        self.hands_rows_on = hands_rows_on
        #: itself, or the module around it, that runs whole
        self.opaque = opaque

    @property
    def _is_inside(self) -> bool:
        """It stands inside a module that runs whole: weights are laid out, and its code is left alone."""
        return self.opaque is not None and self.opaque != self.name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shared = self.application.tensor_parallel(device_mesh)
        known: Site | None = module.__dict__.get(SITE)
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
            if self._is_inside:
                return module
            reads = {}
            module.__class__ = opaque_class(type(module))  # type: ignore[arg-type]
        site = Site(
            shared=shared,
            names=(self.name,),
            arguments=argument_positions(module, self._crossings("input", shared.group)),
            outputs=self._crossings("output", shared.group),
            sharded_outputs=self.sharded_outputs,
            reads=reads,
            whole=self.application.whole.setdefault(self.opaque, {}) if self.opaque is not None else None,
            hands_rows_on=self.hands_rows_on,
        )
        swap_class(module, site)
        return module

    def check(self, module: nn.Module) -> None:
        """Raises the error that applying would end in, with nothing changed yet."""
        if not self._is_inside:
            check_swappable(module, self.name)
        tp = self.application.plan.mesh.tp
        for attribute, (name, plan) in self.parameters.items():
            parameter = own_parameters(module).get(attribute)
            if parameter is None:
                kind = type(module).__name__
                raise PlanMismatchError(f"module {self.name or ROOT} ({kind}) has no parameter {attribute!r}")
            check_reads(name, plan.placement, plan.reads)
            if not fits(tuple(parameter.shape), plan.placement, tp):
                shape = list(parameter.shape)
                raise PlanMismatchError(f"parameters.{name}: shape {shape} cannot be {plan.placement} on tp = {tp}")
        argument_positions(module, self._crossings("input", _NO_GROUP))

    def _crossings(self, direction: str, group: TpGroup) -> dict[str, Crossing]:
        planned = self.boundary.inputs if direction == "input" else self.boundary.outputs
        return {
            path: Crossing(
                conversion=crossing.conversion,
                dtype=_dtype(crossing.dtype, where=f"boundaries.{self.name or ROOT}.{direction}s.{path}"),
                group=group,
                where=f"module {self.name or ROOT}, {direction} {path}",
                num_local_rows=self.num_local_rows if crossing.conversion.target == ROWS else 0,
            )
            for path, crossing in planned.items()
            if not crossing.conversion.is_identity
        }

    def _add_name(self, module: nn.Module, site: Site) -> nn.Module:
        """The same module in a second place: all its calls share one boundary, planned under one of its names."""
        inputs = {path: c for argument in site.arguments for path, c in argument.crossings.items()}
        known_crossings = (("input", inputs), ("output", site.outputs))
        for direction, known in known_crossings if self.boundary is not _NO_CONVERSIONS else ():
            here = self._crossings(direction, site.shared.group)
            if {path: c.conversion for path, c in known.items()} == {path: c.conversion for path, c in here.items()}:
                continue
            raise PlanError(f"modules {site.name} and {self.name} are one module, and the plan converts differently")
        site.names = (*site.names, self.name)
        return module


def styles(plan: Plan) -> dict[str, ParallelStyle]:
    """A style for each module that owns parameters, reads those of others, or has conversions; for tp = 1 those of
    parameters that FSDP2 cannot hold.

    Evaluate torch's own encoder layers with torch.backends.mha.set_fastpath_enabled(False) then; apply_plan sees to it.
    """
    return dict(module_styles(plan))


def module_styles(plan: Plan, *, even_alone: bool = False) -> dict[str, ModuleStyle]:
    """The same, as what they are; with even_alone for tp = 1 all of them, where they change no value."""
    application = Application(plan)
    parameters = plan.parameter_plans() if plan.mesh.tp > 1 or even_alone else plan.scalars_beside_fsdp()
    if not parameters and plan.mesh.tp == 1:
        return {}
    boundaries = {"" if name == ROOT else name: boundary for name, boundary in plan.boundary_plans().items()}
    sharded_outputs = _sharded_outputs(plan)
    owned: dict[str, dict[str, tuple[str, ParameterPlan]]] = {}
    readers: set[str] = set()
    for canonical, parameter in parameters.items():
        for label in (canonical, *parameter.aliases):
            owner, _, attribute = label.rpartition(".")
            owned.setdefault(owner, {})[attribute] = (canonical, parameter)
        readers.update(parameter.reads)
    opaque = plan.opaque_modules() if plan.mesh.tp > 1 else ()
    names = {*owned, *opaque, *boundaries, *(reader for reader in readers if not reader.startswith("<"))}
    if sharded_outputs:
        names.add("")
    return {
        name: ModuleStyle(
            application,
            name,
            boundary=boundaries.get(name, _NO_CONVERSIONS),
            sharded_outputs=sharded_outputs if name == "" else {},
            parameters=owned.get(name, {}),
            num_local_rows=_num_local_rows(name, boundaries.get(name, _NO_CONVERSIONS), plan),
            hands_rows_on=_hands_rows_on(name, boundaries),
            opaque=next((around for around in opaque if within(name, around)), None),
        )
        for name in sorted(names, key=lambda name: (name not in boundaries, name))
    }


def _dtype(name: str, *, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{where}: {name!r} is no dtype of torch {torch.__version__}")
    return dtype


def _sharded_outputs(plan: Plan) -> dict[str, int]:
    """Dims of the returned outputs that stay sharded. Raises PlanError for an output that no one outside could read."""
    dims: dict[str, int] = {}
    for path, layout in plan.outputs.items():
        match layout.kind:
            case LayoutKind.REPLICATE:
                continue
            case LayoutKind.SHARD if layout.is_plain:
                assert layout.dim is not None
                if not path.startswith(LEFT_AT):  # what is left behind stays a rank's slice, for nobody reads it
                    dims[path] = layout.dim
            case _:
                raise PlanError(f"outputs.{path}: expected R or S(dim), got {layout}")
    return dims


def _num_local_rows(name: str, boundary: BoundaryPlan, plan: Plan) -> int:
    """Rows on a rank of the one weight that is looked up inside the module. 0 where no ids become local rows."""
    if not any(crossing.conversion.target == ROWS for crossing in boundary.inputs.values()):
        return 0
    rows = {
        parameter.shape[0] // plan.mesh.tp
        for parameter in plan.parameter_plans().values()
        if any(layout == S(0) and within(reader, name) for reader, layout in parameter.reads.items())
    }
    if len(rows) != 1:
        raise PlanError(f"boundaries.{name or ROOT}.inputs: ids become local rows of one weight, and {len(rows)} fit")
    return rows.pop()


def _hands_rows_on(name: str, boundaries: Mapping[str, BoundaryPlan]) -> bool:
    """True when ids enter as rows here, and what is looked up leaves only a module around this one."""
    inputs = boundaries[name].inputs.values() if name in boundaries else ()
    enters = any(crossing.conversion.target == ROWS for crossing in inputs)
    leaves = any(
        crossing.conversion.source == ROWS
        for other, boundary in boundaries.items()
        if within(other, name)
        for crossing in boundary.outputs.values()
    )
    return enters and not leaves

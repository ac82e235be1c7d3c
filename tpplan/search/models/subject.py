"""The subject of a plan: a caller's model, and all else that its traces depend on."""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from tpplan.core.errors import ModelError, ProfileError
from tpplan.core.graph import Direction
from tpplan.experts.expert_share import Division
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import Plan, Precision, StagePlan
from tpplan.plan.sections.ranks import RECEIVED
from tpplan.search.models.model_spec import takes_batch_alone
from tpplan.stages.stage_model import without_values
from tpplan.torch_internals import pytree
from tpplan.torch_internals.tensors import plain_calls
from tpplan.trace.answers.planned_device import PlannedDevice, planning_for
from tpplan.trace.boundary_marks import BoundaryHook
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.hooks import custom_ops
from tpplan.trace.trace import Loss

BuildModel = Callable[[], nn.Module]
#: a function of batch and length, or of the batch alone where samples have no length
ExampleInputs = Callable[..., Inputs]

#: profile of the device to trace for where a plan names neither a device nor a known profile
STAND_IN = "h100-sxm"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A caller's model, and all else that its traces depend on: the sequence length, the precision of compute, the
    device that its code is told to run on, how its experts are divided (None: every rank has all), and which stage of
    it is planned (None: the whole model)."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    loss: Loss | None
    seq_len: int
    precision: Precision
    device: PlannedDevice
    experts: Division | None = None
    stage: StagePlan | None = None

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        build_model: BuildModel,
        example_inputs: ExampleInputs,
        loss: Loss | None,
        *,
        profile: HardwareProfile | None = None,
    ) -> "Subject":
        """The subject of a plan, for the device of its proof; where the plan names none, for that of `profile`, else of
        the plan's profile, else of STAND_IN."""
        device = plan.proof.device
        return cls(
            build_model=build_model,
            example_inputs=example_inputs,
            loss=loss,
            seq_len=plan.batch.seq_len,
            precision=plan.precision,
            device=PlannedDevice.parse(device, plan_path="proof.device")
            if device
            else PlannedDevice.of(profile or _profile_of(plan)),
            experts=Division.of(plan),
            stage=plan.stage.bare if plan.stage is not None else None,
        )

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model is traced as it will run: on the planned device, under the planned autocast."""
        is_autocast = self.precision is Precision.BF16_AUTOCAST
        return planning_for(self.device, autocast=is_autocast, precision=str(self.precision))

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for subjects with one model, on whatever device; for a stage at whatever micro-batch."""
        functions = map(hashable, (self.build_model, self.example_inputs, self.loss))
        outline = self.stage.outline if self.stage is not None else None
        return *functions, self.seq_len, self.precision, self.experts, outline

    def made_inputs(self, micro_batch: int, seq_len: int) -> Inputs:
        """The example inputs as the caller's function makes them, with what a stage receives. Raises ModelError for a
        stage at another length than planned."""
        own = self.example_inputs(micro_batch, *(() if takes_batch_alone(self.example_inputs) else (seq_len,)))
        if self.stage is None or not self.stage.receives:
            return own
        if not isinstance(own, Mapping):
            raise ModelError(
                "a model in stages takes its inputs by name: let example_inputs give a dict, in place of a "
                f"{type(own).__name__}"
            )
        if (micro_batch, seq_len) != (self.stage.micro_batch, self.seq_len):
            raise ModelError(
                f"a stage receives tensors of the planned shapes alone: micro-batch {self.stage.micro_batch} of length "
                f"{self.seq_len}, got {micro_batch} of length {seq_len}"
            )
        return {**own, RECEIVED: without_values(self.stage.receives)}

    def inputs(self, micro_batch: int, seq_len: int) -> Inputs:
        """The example inputs, in the dtype of compute."""
        return in_precision(self.made_inputs(micro_batch, seq_len), self.precision)

    @property
    def casts(self) -> bool:
        """True where FSDP casts what enters its units."""
        return self.precision is Precision.BF16_MIXED

    def cast(self, units: tuple[str, ...]) -> BoundaryHook:
        """A hook that casts tensors that enter the root or a unit, as FSDP's mixed precision does."""

        cast_at = frozenset(("", *units)) if self.casts else frozenset()

        def cast(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
            if direction is not Direction.INPUT or module not in cast_at:
                return tensor
            with plain_calls():
                casts = tensor.dtype == torch.float32
            return custom_ops.cast(tensor, torch.bfloat16) if casts else tensor

        return cast


def _profile_of(plan: Plan) -> HardwareProfile:
    """The profile that a plan names. Warns, and takes STAND_IN, where that is not known."""
    try:
        return load_profile(plan.cluster.profile)
    except ProfileError:
        warnings.warn(
            f"the plan names no device, and its profile {plan.cluster.profile!r} is not known: the model is traced as "
            f"on {STAND_IN}; solve again to have a plan that names its device",
            stacklevel=2,
        )
        return load_profile(STAND_IN)


def hashable(function: object) -> Hashable:
    """The function; where it has no hash, as a method of an unhashable object, a key that is equal to no other."""
    try:
        hash(function)
    except TypeError:
        return object()
    return function


def in_precision(inputs: Inputs, precision: Precision) -> Inputs:
    """The inputs as a model of this precision takes them: float32 tensors in bfloat16 where all of it is bfloat16."""
    if precision is not Precision.BF16:
        return inputs
    found: Inputs = pytree.tree_map_only(torch.Tensor, _without_float32, inputs)
    return found


def _without_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor

"""The sections of a plan's file: a dataclass for each, whose fields are its keys, and the modes that it names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from tpplan.core.errors import PlanError
from tpplan.core.layout import LAYOUT_PATTERN, Conversion, Layout, parse_conversion, parse_layout
from tpplan.core.mesh import Axis, Mesh
from tpplan.core.strict_json import AtLeast, Text
from tpplan.plan.input_dims import DIM_PATTERN, Dim, parse_dim
from tpplan.solvers.problem import Status

LayoutText = Annotated[Layout, Text(parse_layout, LAYOUT_PATTERN)]
DimText = Annotated[Dim, Text(parse_dim, DIM_PATTERN)]
Count = Annotated[int, AtLeast(1)]
Size = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]


class Precision(StrEnum):
    """fp32: as the model was built. bf16-mixed: float32 parameters and optimizer states, bfloat16 compute. bf16:
    bfloat16 throughout, including the user's floating inputs. bf16-autocast: as the model was built, forward and loss
    under torch.autocast(dtype=torch.bfloat16), which the training code opens."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    BF16_AUTOCAST = "bf16-autocast"

    @property
    def makes_half(self) -> bool:
        """True where the model computes with bfloat16 parameters."""
        return self in (Precision.BF16, Precision.BF16_MIXED)


def uses_fsdp(mesh: Mesh, precision: Precision) -> bool:
    """True where FSDP2 shards, replicates or casts parameters."""
    return mesh.data_parallel > 1 or precision is Precision.BF16_MIXED


class WorkKind(StrEnum):
    """The work that makes a tensor in forward: a matrix product or convolution, attention, a sum or an exchange over
    ranks (all-reduce, reduce-scatter, all-to-all), or anything else."""

    PRODUCT = "product"
    ATTENTION = "attention"
    SUM = "sum over ranks"
    REST = "rest"


class Recompute(StrEnum):
    """The part of a module's forward that runs again in backward; a row of _MODES says all that defines a mode. none:
    nothing, as an exception to a pattern."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"

    @property
    def keeps(self) -> frozenset[WorkKind]:
        """The kinds of work whose results are kept from forward to backward, beside the module's inputs; the rest runs
        again."""
        return _MODES[self][0]

    @property
    def says(self) -> str:
        """The words for it in a report."""
        return _MODES[self][1]

    @property
    def is_selective(self) -> bool:
        """True where some results are kept and others are made again."""
        return bool(self.keeps) and self is not Recompute.NONE

    @property
    def lighter(self) -> "tuple[Recompute, ...]":
        """The modes that run less again: those before this one by the number of kinds kept, most first."""
        by_work = sorted(Recompute, key=lambda mode: -len(mode.keeps))
        return tuple(by_work[: by_work.index(self)])


_MODES = {
    Recompute.NONE: (frozenset(WorkKind), "nothing runs again"),
    Recompute.FULL: (frozenset[WorkKind](), "forward runs again in backward"),
    Recompute.SELECTIVE: (
        frozenset((WorkKind.PRODUCT, WorkKind.ATTENTION, WorkKind.SUM)),
        "all but products, attention and sums over ranks run again in backward",
    ),
}


class Compile(StrEnum):
    """The use of torch.compile that a prediction assumes. none: the model runs eagerly. blocks: each repeated layer is
    compiled separately, and so are the modules around them."""

    NONE = "none"
    BLOCKS = "blocks"


class Pass(StrEnum):
    """When a collective runs: in forward or backward of each micro-batch, or once per optimizer step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster for which the plan was solved."""

    gpus: Count
    gpus_per_node: Count
    profile: str
    profile_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """The request that a plan answers: the model as named on the command line, the command, and the pins; model and
    command are absent where the plan was made from Python."""

    pins: Mapping[str, str]
    model: str | None = None
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Degrees of the mesh; ranks are numbered with tp innermost."""

    replicate: Count
    shard: Count
    tp: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """How a module of `experts` experts is called: the names of its arguments rows [T, D], index [T, K] into the
    experts, and weight [T, K]. It returns [T, D']."""

    experts: Count
    rows: str
    index: str
    weight: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """The modules whose experts are divided among `ep` ranks of a shard group, each with experts / ep of them, and the
    `imbalance` planned for: rows that the busiest rank gets, over those that it would get of an even routing. `check`
    says how it is known that the modules compute row by row. `rows` are those that a rank gets for a call, as planned;
    `seconds_of_rows` are the seconds of a step that grow with them, of kernels and exchanges."""

    ep: Count
    imbalance: Annotated[float, AtLeast(1)]
    modules: Mapping[str, ExpertCall]
    check: str
    rows: Size
    seconds_of_rows: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The shape and dtype of a tensor that one stage sends to the next, for one micro-batch."""

    shape: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage `index` of `count` (from 0) of a model. Modules in `absent` are those of other stages; `blank` are
    parameters that only other stages read. The tensors that layer `received` gives on the stage before come in
    (`receives`); those that layer `last` gives go out. A stage keeps the activations of up to `in_flight` micro-batches
    at once, of `kept_bytes` each, while its ranks hold `beside_bytes` of their other stages and of received and sent
    tensors. Parameters, gradients, states, and what stays gathered of a stage that does not run are `resting_bytes`.
    `micro_batch` is the batch that these shapes are for."""

    index: Size
    count: Count
    absent: tuple[str, ...]
    blank: tuple[str, ...]
    received: str | None
    last: str | None
    receives: tuple[TensorPlan, ...]
    sends: tuple[TensorPlan, ...]
    in_flight: Count
    micro_batch: Count
    beside_bytes: Amount = 0.0
    kept_bytes: Amount = 0.0
    resting_bytes: Amount = 0.0

    @property
    def bare(self) -> "StagePlan":
        """The stage without what a rank holds: what it runs."""
        return replace(self, in_flight=1, beside_bytes=0.0, kept_bytes=0.0, resting_bytes=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """global_batch = micro_batch * accumulation_steps * data-parallel ranks, in samples of seq_len tokens; seq_len is 1
    where samples have no length (images, tables, graphs)."""

    global_batch: Count
    micro_batch: Count
    accumulation_steps: Count
    seq_len: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """A parameter's placement on the tp axis, and the layout in which each module reads it."""

    placement: LayoutText
    reads: Mapping[str, LayoutText]
    shape: tuple[Size, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """The layout in which each module reads a buffer that some module reads as a slice; every rank has it whole."""

    reads: Mapping[str, LayoutText]
    shape: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class CrossingPlan:
    """The conversion of a tensor at a module's boundary, and the dtype in which it crosses: `S(1) -> R as float32`."""

    conversion: Conversion
    dtype: str

    def __str__(self) -> str:
        return f"{self.conversion} as {self.dtype}"


def parse_crossing(text: str) -> CrossingPlan:
    """The crossing from its str(). Raises PlanError for any other text."""
    conversion, separator, dtype = text.partition(" as ")
    if not separator or re.fullmatch(_DTYPE_PATTERN, dtype) is None:
        raise PlanError(f"expected a conversion and a dtype such as 'R -> S(1) as bfloat16', got {text!r}")
    return CrossingPlan(parse_conversion(conversion), dtype)


_DTYPE_PATTERN = "[a-z][a-z0-9_]*"
CrossingText = Annotated[
    CrossingPlan, Text(parse_crossing, f"(?:{LAYOUT_PATTERN}) -> (?:{LAYOUT_PATTERN}) as {_DTYPE_PATTERN}")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """Conversions of the tensors that enter and leave a module's forward, by path of the argument or output."""

    inputs: Mapping[str, CrossingText]
    outputs: Mapping[str, CrossingText]


#: how SizePlan.call begins for an attribute of the module
ATTRIBUTE = "self."


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """A size in a module's code, `written`, and the size that one rank needs in its place, `local`.

    With `call` "self.NAME" the size is this attribute of the module, which its forward reads as `local`; a path such as
    self.config.heads or self.axes[0][1] leads inside plain data that other modules may share. Else `call` is view
    (reshape too), unflatten, expand, repeat_interleave, split, slice, narrow, new (zeros, new_empty and the like), or
    groups (of a convolution). The call has `count` sizes, of which `position` counts from 0. A sliced or narrowed
    tensor has `count` dims; `position` is twice the dim for a start, and one more for an end or a length. `of` is the
    local shape of the tensor in the call, with 0 where any size matches, so that a call on another tensor with an equal
    number is left alone. With `dims`, the size is the product of these dims of the tensor, and of `times`, at every
    batch and length: where code gives a size in the proportion written to local, the local product replaces it.
    """

    call: str
    of: tuple[Size, ...]
    count: Count
    position: Size
    written: int
    local: int
    dims: tuple[Size, ...] | None = None
    times: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPlan:
    """Modules that fully_shard wraps, in this order ("<root>" last), and whether they reshard after forward (ZeRO-3) or
    stay gathered until backward (ZeRO-2). Units in `exceptions` do the opposite. The root never reshards.

    `whole_gradients` is true where each rank keeps gradients whole between micro-batches, so that FSDP reduces them
    once a step; absent where FSDP reduces those of every micro-batch, and a rank keeps its shard of them.
    """

    units: tuple[str, ...]
    reshard_after_forward: bool
    exceptions: tuple[str, ...]
    whole_gradients: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """`count` equal collectives per optimizer step on one rank; num_bytes is the size of the whole value of each."""

    where: str
    kind: str
    axis: Axis
    during: Pass
    dtype: str
    num_bytes: Size
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds per optimizer step and bytes per GPU, by part. step_time_error_s is one standard deviation.

    memory_bytes are the parts of the peak, which occurs in the pass `peak_during` while an op of the module
    `peak_module` runs ("<root>" is the model itself). slack_bytes are added for the framework and its allocator, from
    the profile. The limit applies to peak and slack together. model_flop are the FLOP of a step's matmuls and attention
    without recomputation, on all ranks together; peak_flop_per_s those of a GPU in the profile's fastest matmul.
    """

    step_time_s: Amount
    step_time_error_s: Amount
    is_extrapolated: bool
    time_s: Mapping[str, Amount]
    peak_memory_bytes: Amount
    slack_bytes: Amount
    memory_limit_bytes: Amount
    memory_bytes: Mapping[str, Amount]
    peak_during: Pass
    peak_module: str
    model_flop: Amount | None = None
    peak_flop_per_s: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """The solver's certificate: bound_s <= the optimum <= objective_s, over the meshes and micro-batches searched.

    `meshes_tried` counts those that were solved; `skipped` counts the others by why they cannot be faster. `unsearched`
    lists the meshes that were not considered, with reasons.
    """

    name: str
    status: Status
    objective_s: Amount
    bound_s: Amount
    gap: Amount
    meshes_tried: Count
    skipped: Mapping[str, Count]
    unsearched: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """sha256 of the parameters (names, shapes, trainable) and of the traced graph; shapes of the traced inputs."""

    parameters: str
    graph: str
    inputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePlan:
    """A module that every tensor-parallel rank runs whole by its own code: the reason why it could not be traced, and
    its seconds per step. `bodies` are its loops and branches whose functions were counted once."""

    reason: str
    seconds: Amount
    bodies: tuple[str, ...]


class ProofStatus(StrEnum):
    """proven: on the first and last rank, the applied model runs the model's ops on local shapes and literals
    as planned, and the layout of every value and gradient was derived from the plan alone. unproven: nothing
    was checked."""

    UNPROVEN = "unproven"
    PROVEN = "proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiples:
    """Batches or lengths, besides the planned one, for which the plan is proven: multiples of `multiple`. Where there
    are none, `multiple` is absent and `reason` says why."""

    multiple: Count | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherShapes:
    """The dims of each input as functions of batch and length, and for which of these the plan holds."""

    inputs: Mapping[str, tuple[DimText, ...]]
    batch: Multiples
    length: Multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """How the plan was checked: the rounds of solving, and the choices that counterexamples forbade (`cuts`).

    `assumptions` are values of example inputs on which the model's code branched. `plan_hash` is the hash of the plan
    that was proven (tpplan.plan.proof_hash); a plan with another hash, or without one, counts as unproven. `device` is
    the device that the model's code was told it runs on ("cuda 9.0"). `other_shapes` is absent where shapes do not
    matter because every rank has the whole model (tp = 1). `calls` are digests of the calls of each module
    (tpplan.trace.noted_calls).
    """

    status: ProofStatus
    rounds: Size
    cuts: tuple[str, ...]
    assumptions: tuple[str, ...]
    other_shapes: OtherShapes | None = None
    device: str | None = None
    calls: Mapping[str, tuple[str, ...]] | None = None
    plan_hash: str | None = None

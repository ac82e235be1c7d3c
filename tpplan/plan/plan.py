"""The plan: what to shard, convert and reduce, keyed by names of modules and parameters; strict JSON, never pickle.

A key with `*` stands for every member of a repeated block (`layers.*.attention` with the block `layers.*`); a key
without `*` overrides the pattern. Applying a plan needs the plan and the model: no tracing, solving or profile.
plan.schema.json describes the file; `load(dump(plan)) == plan`.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

from tpplan.core.errors import PlanError, UsageError
from tpplan.core.files import format_json, write_atomically
from tpplan.core.layout import LAYOUT_PATTERN, Conversion, Layout, parse_conversion, parse_layout
from tpplan.core.mesh import MAX_GPUS, Axis, Mesh
from tpplan.core.name_patterns import ROOT, block_of, holders, is_pattern, parse_ranges, substitute
from tpplan.core.strict_json import MAX_INTEGER, AtLeast, Text, decode, encode, read_json
from tpplan.plan.batch_share import BatchShare
from tpplan.plan.input_dims import DIM_PATTERN, Dim, parse_dim
from tpplan.plan.tp_shares import TpShares
from tpplan.solvers.problem import Status

SCHEMA_VERSION = 1
#: most names that all patterns of a plan may stand for; a thousand layers of 100 parameters have half as many
MAX_NAMES = 200_000
#: most names that an error lists
_MOST_LISTED = 16
#: most dims of a torch tensor
MAX_DIMS = 64

T = TypeVar("T")

LayoutText = Annotated[Layout, Text(parse_layout, LAYOUT_PATTERN)]
DimText = Annotated[Dim, Text(parse_dim, DIM_PATTERN)]
Count = Annotated[int, AtLeast(1)]
Size = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]


class Precision(StrEnum):
    """fp32: as the model was built. bf16-mixed: float32 parameters and optimizer states, bfloat16 compute. bf16:
    bfloat16 throughout, including the user's floating inputs."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"


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
class MeshPlan:
    """Degrees of the mesh; ranks are numbered with tp innermost."""

    replicate: Count
    shard: Count
    tp: Count


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

    With `call` "self.NAME" the size is this attribute of the module, which its forward reads as `local`. Else `call` is
    view (reshape too), unflatten, expand, repeat_interleave, split, slice, narrow, new (zeros, new_empty and the like),
    or groups (of a convolution). The call has `count` sizes, of which `position` counts from 0. A sliced or narrowed
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
    stay gathered until backward (ZeRO-2). Units in `exceptions` do the opposite. The root never reshards."""

    units: tuple[str, ...]
    reshard_after_forward: bool
    exceptions: tuple[str, ...]


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
    the profile. The limit applies to peak and slack together.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete plan. `blocks` gives the indices of each repeated block as ranges: {"layers.*": "0-31"}.

    `sizes` are numbers to replace while a module's forward runs. `losses` are modules whose forward computes a cross
    entropy on a slice of that many classes; `draws` are modules whose dropout runs on slices. `recompute` are modules
    whose forward runs again in backward, each as one region. `compile` is what the predicted times assume; applying the
    plan compiles nothing. `unruled_ops` are ops without a rule, which run whole, with their seconds per step; `opaque`
    are modules that run whole. `outputs` are the model's outputs that are returned sharded, by path. `untouched` is the
    reason why parameters must stay plain tensors: each rank then has all of them, and gradients are averaged over
    data-parallel ranks. `tp_shares` say what tensor parallelism divides; absent where tp is 1. `notes` tell the reader
    how the plan was made: changes to the request, and costs that are guesses.
    """

    schema_version: Count
    tpplan_version: str
    torch_version: str
    cluster: ClusterPlan
    mesh_degrees: MeshPlan
    batch: BatchPlan
    precision: Precision
    optimizer: str
    blocks: Mapping[str, str]
    parameters: Mapping[str, ParameterPlan]
    boundaries: Mapping[str, BoundaryPlan]
    outputs: Mapping[str, LayoutText]
    sizes: Mapping[str, tuple[SizePlan, ...]]
    losses: Mapping[str, Count]
    draws: tuple[str, ...]
    recompute: Mapping[str, Recompute]
    compile: Compile
    fsdp: FsdpPlan
    collectives: tuple[CollectivePlan, ...]
    predicted: Prediction
    solver: SolverReport
    fingerprints: Fingerprints
    proof: ProofReport
    unruled_ops: Mapping[str, Amount]
    opaque: Mapping[str, OpaquePlan] | None = None
    untouched: str | None = None
    tp_shares: TpShares | None = None
    notes: tuple[str, ...] | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the plan runs."""
        return Mesh(replicate=self.mesh_degrees.replicate, shard=self.mesh_degrees.shard, tp=self.mesh_degrees.tp)

    def batch_for(self, rank: int) -> BatchShare:
        """The rows of each global batch that a rank reads, by micro-batch; all ranks of a tp group read the same rows.

        Ranks are numbered as in apply_plan's own mesh. Raises UsageError for a rank outside the mesh.
        """
        if not 0 <= rank < self.mesh.num_gpus:
            raise UsageError(
                f"rank {rank}: expected 0 to {self.mesh.num_gpus - 1}, the ranks of the plan's mesh {self.mesh}"
            )
        return BatchShare(
            global_batch=self.batch.global_batch,
            seq_len=self.batch.seq_len,
            micro_batch=self.batch.micro_batch,
            accumulation_steps=self.batch.accumulation_steps,
            data_parallel=self.mesh.data_parallel,
            data_rank=self.mesh.data_rank(rank),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """The plan in a file. Raises PlanError that names the file and the path of the first wrong key."""
        return cls.from_dict(read_json(Path(path), origin=str(path), error=PlanError), origin=str(path))

    @classmethod
    def from_dict(cls, data: object, *, origin: str = "plan") -> "Plan":
        """The plan from parsed JSON. Raises PlanError that names `origin` and the path of the first wrong key."""
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise PlanError(
                f"{origin}: schema_version: this tpplan reads version {SCHEMA_VERSION}, the file has {version}; "
                "solve again"
            )
        plan = decode(cls, data, origin=origin, error=PlanError)
        plan._check(origin)
        return plan

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON data."""
        data = encode(self)
        assert isinstance(data, dict)
        return data

    def dumps(self) -> str:
        """The text of the plan's file: sorted keys; an object or list of scalars on one line."""
        return format_json(self.to_dict()) + "\n"

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan's file atomically."""
        write_atomically(Path(path), self.dumps())

    @property
    def hash(self) -> str:
        """sha256 of the plan's text, which all ranks compare before the first collective."""
        return "sha256:" + hashlib.sha256(self.dumps().encode()).hexdigest()

    def parameter_plans(self) -> dict[str, ParameterPlan]:
        """Parameter name -> its plan, with patterns expanded."""
        return {
            name: replace(
                plan,
                reads={substitute(reader, index): layout for reader, layout in plan.reads.items()},
                aliases=tuple(substitute(alias, index) for alias in plan.aliases),
            )
            for name, (plan, index) in self._expanded(self.parameters).items()
        }

    def boundary_plans(self) -> dict[str, BoundaryPlan]:
        """Module name -> its conversions, with patterns expanded."""
        return {name: plan for name, (plan, _) in self._expanded(self.boundaries).items()}

    def size_plans(self) -> dict[str, tuple[SizePlan, ...]]:
        """Module name ("" for the root) -> sizes to replace, with patterns expanded."""
        return {"" if name == ROOT else name: sizes for name, (sizes, _) in self._expanded(self.sizes).items() if sizes}

    def called(self) -> dict[str, tuple[str, ...]]:
        """Module name -> digests of its calls, with patterns expanded."""
        return {name: digests for name, (digests, _) in self._expanded(self.proof.calls or {}).items()}

    def sharded_losses(self) -> dict[str, int]:
        """Module name ("" for the root) -> number of classes of its sharded cross entropy, with patterns expanded."""
        return {"" if name == ROOT else name: count for name, (count, _) in self._expanded(self.losses).items()}

    def drawing_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) whose dropout runs on slices, with patterns expanded."""
        names = dict.fromkeys(name for key in self.draws for name, _ in self.expand(key))
        return tuple("" if name == ROOT else name for name in names)

    def opaque_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that run whole, with patterns expanded."""
        return tuple("" if name == ROOT else name for name in self._expanded(self.opaque or {}))

    def scalars_beside_fsdp(self) -> dict[str, ParameterPlan]:
        """Name -> plan of parameters without dims, which FSDP2 cannot hold; empty where FSDP2 is not used."""
        if not uses_fsdp(self.mesh, self.precision) or self.untouched is not None:
            return {}
        return {name: parameter for name, parameter in self.parameter_plans().items() if not parameter.shape}

    def recomputed_modules(self) -> dict[str, Recompute]:
        """Module name ("" for the root) -> how it is recomputed, with patterns expanded, without those that are not."""
        expanded = self._expanded(self.recompute)
        modes = {"" if name == ROOT else name: mode for name, (mode, _) in expanded.items()}
        return {name: mode for name, mode in modes.items() if mode is not Recompute.NONE}

    def fsdp_units(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that fully_shard wraps, with patterns expanded."""
        names = [name for unit in self.fsdp.units for name, _ in self.expand(unit)]
        return tuple("" if name == ROOT else name for name in names)

    def layers(self) -> tuple[str, ...]:
        """Names of the repeated layers: FSDP units without the root, else members of blocks, else the root, ""."""
        units = tuple(filter(None, self.fsdp_units()))
        return units or tuple(name for pattern in self.blocks for name, _ in self.expand(pattern)) or ("",)

    def resharded_units(self) -> dict[str, bool]:
        """Name of each FSDP unit except the root -> whether it reshards after forward, with patterns expanded."""
        found = {name: self.fsdp.reshard_after_forward for name in self.fsdp_units() if name}
        opposite = (name for key in self.fsdp.exceptions for name, _ in self.expand(key))
        return found | dict.fromkeys(opposite, not self.fsdp.reshard_after_forward)

    def expand(self, key: str) -> Iterator[tuple[str, int | None]]:
        """Yields (name, index) for each name that a key stands for. Raises PlanError for a `*` that is in no block."""
        if not is_pattern(key):
            yield key, None
            return
        pattern = block_of(key)
        if pattern not in self.blocks or is_pattern(substitute(key, 0)):
            raise PlanError(f"{key!r} matches none of the blocks {sorted(self.blocks)[:_MOST_LISTED]}")
        for index in parse_ranges(self.blocks[pattern]):
            yield substitute(key, index), index

    def _expanded(self, table: Mapping[str, T]) -> dict[str, tuple[T, int | None]]:
        found: dict[str, tuple[T, int | None]] = {}
        for key in sorted(table, key=is_pattern, reverse=True):
            for name, index in self.expand(key):
                found[name] = (table[key], index)
        return found

    def _check(self, origin: str) -> None:
        """Raises PlanError where products, patterns or ranges are inconsistent, which types cannot express."""
        batch = self.batch
        ranks = self.mesh.data_parallel
        if self.cluster.gpus > MAX_GPUS:
            raise PlanError(f"{origin}: cluster.gpus: expected at most {MAX_GPUS}, got {self.cluster.gpus}")
        if self.mesh.num_gpus > self.cluster.gpus:
            raise PlanError(f"{origin}: mesh_degrees: {self.mesh} needs more than cluster.gpus, {self.cluster.gpus}")
        if batch.global_batch != batch.micro_batch * batch.accumulation_steps * ranks:
            raise PlanError(
                f"{origin}: batch.global_batch: expected micro_batch {batch.micro_batch} * accumulation_steps "
                f"{batch.accumulation_steps} * {ranks} data-parallel ranks, got {batch.global_batch}"
            )
        self._check_names(origin)
        for place, key, _ in self._written_names():
            try:
                tuple(self.expand(key))
            except PlanError as error:
                raise PlanError(f"{origin}: {place}: {error}") from None
        for name, parameter in self.parameters.items():
            if len(parameter.shape) > MAX_DIMS or prod(parameter.shape) > MAX_INTEGER:
                raise PlanError(f"{origin}: parameters.{name}.shape: more elements than a tensor can have")
        for name, parameter in self.parameter_plans().items():
            if name in parameter.aliases:
                raise PlanError(f"{origin}: parameters.{name}.aliases: a name cannot be its own alias")
            starred = next(filter(is_pattern, (*parameter.reads, *parameter.aliases)), None)
            if starred is not None:
                raise PlanError(
                    f"{origin}: parameters.{name}: {starred!r} has a '*', but the parameter's name has none"
                )
        units = set(self.fsdp_units()) - {""}
        for position, key in enumerate(self.fsdp.exceptions):
            if not {name for name, _ in self.expand(key)} <= units:
                raise PlanError(f"{origin}: fsdp.exceptions[{position}]: {key!r} is not in fsdp.units, or is the root")
        self._check_regions(origin)

    def _check_names(self, origin: str) -> None:
        """Raises PlanError for more than MAX_NAMES names, so that a hostile file cannot exhaust memory."""
        counts: dict[str, int] = {}
        total = 0

        def add(place: str, number: int) -> None:
            nonlocal total
            total += number
            if total > MAX_NAMES:
                raise PlanError(
                    f"{origin}: {place}: patterns up to here stand for {total} names: expected at most {MAX_NAMES}"
                )

        for pattern, ranges in self.blocks.items():
            if not is_pattern(pattern) or is_pattern(pattern[:-1]) or not pattern.endswith("*"):
                raise PlanError(f"{origin}: blocks.{pattern}: expected a pattern that ends in its only '*'")
            try:
                counts[pattern] = len(parse_ranges(ranges))
            except ValueError as error:
                raise PlanError(f"{origin}: blocks.{pattern}: {error}") from error
            add(f"blocks.{pattern}", counts[pattern])
        for place, key, copies in self._written_names():
            add(place, copies * counts.get(block_of(key), 1))

    def _written_names(self) -> Iterator[tuple[str, str, int]]:
        """Yields (place in the file, key, number of names made of each name that the key stands for)."""
        for key, parameter in self.parameters.items():
            yield f"parameters.{key}", key, 1 + len(parameter.reads) + len(parameter.aliases)
        tables: dict[str, Iterable[str]] = {
            "boundaries": self.boundaries,
            "sizes": self.sizes,
            "losses": self.losses,
            "recompute": self.recompute,
            "opaque": self.opaque or (),
            "proof.calls": self.proof.calls or (),
        }
        for section, keys in tables.items():
            yield from ((f"{section}.{key}", key, 1) for key in keys)
        lists = {"draws": self.draws, "fsdp.units": self.fsdp.units, "fsdp.exceptions": self.fsdp.exceptions}
        for section, names in lists.items():
            yield from ((f"{section}[{position}]", key, 1) for position, key in enumerate(names))

    def _check_regions(self, origin: str) -> None:
        """Raises PlanError for a recomputed region inside another, whose ops would run three times."""
        regions = self.recomputed_modules()
        for inner in regions:
            region = next((around for around in holders(inner) if around in regions), None)
            if region is not None:
                raise PlanError(
                    f"{origin}: recompute.{region or ROOT}: {inner} inside it is recomputed too; name only one of them"
                )

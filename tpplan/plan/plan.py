"""The plan: what to shard, convert and reduce, keyed by module and parameter names; strict JSON, never pickle.

A key with `*` stands for every member of a repeated block (`layers.*.attention` with the block `layers.*`); a key
without it wins over the pattern. Applying a plan needs the plan and the model: no tracing, no solving, no profile.
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
from tpplan.solvers.problem import Status

SCHEMA_VERSION = 1
#: names that all patterns of a plan may stand for together; a model with a thousand layers of 100 parameters has fewer
MAX_NAMES = 200_000
#: names that an error lists
_MOST_LISTED = 16
#: dims of a tensor, as torch counts them
MAX_DIMS = 64

T = TypeVar("T")

LayoutText = Annotated[Layout, Text(parse_layout, LAYOUT_PATTERN)]
DimText = Annotated[Dim, Text(parse_dim, DIM_PATTERN)]
Count = Annotated[int, AtLeast(1)]
Size = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]


class Precision(StrEnum):
    """fp32: as built. bf16-mixed: float32 parameters and states, bfloat16 compute. bf16: bfloat16 throughout,
    the floating inputs that the user gives included."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"


def uses_fsdp(mesh: Mesh, precision: Precision) -> bool:
    """FSDP2 shards, replicates, or casts."""
    return mesh.data_parallel > 1 or precision is Precision.BF16_MIXED


class Recompute(StrEnum):
    """What of a module's forward is kept for its backward, besides its inputs. full: nothing. selective: products,
    attention and sums over ranks; the rest, which costs little to do again, is not. none: an exception to a pattern."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class Compile(StrEnum):
    """What torch.compile makes of the model, as far as the prediction goes. none: it runs eager. blocks: each repeated
    layer is compiled on its own, and so is what stands around them."""

    NONE = "none"
    BLOCKS = "blocks"


class Pass(StrEnum):
    """When a collective runs: each micro-batch's forward or backward, or once per optimizer step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The machine the plan was solved for."""

    gpus: Count
    gpus_per_node: Count
    profile: str
    profile_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Degrees of the mesh, ranks numbered with tp innermost."""

    replicate: Count
    shard: Count
    tp: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """global_batch = micro_batch * accumulation_steps * data-parallel ranks, in sequences of seq_len."""

    global_batch: Count
    micro_batch: Count
    accumulation_steps: Count
    seq_len: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """A parameter's placement on the tp axis, and under which layout each module reads it."""

    placement: LayoutText
    reads: Mapping[str, LayoutText]
    shape: tuple[Size, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CrossingPlan:
    """How a tensor's layout changes at a module's boundary, and in which dtype it crosses: `S(1) -> R as float32`."""

    conversion: Conversion
    dtype: str

    def __str__(self) -> str:
        return f"{self.conversion} as {self.dtype}"


def parse_crossing(text: str) -> CrossingPlan:
    """The crossing that str() wrote. Raises PlanError for anything else."""
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
    """Conversions of the tensors that enter and leave a module's forward, by argument or output path."""

    inputs: Mapping[str, CrossingText]
    outputs: Mapping[str, CrossingText]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """A number written in a module's code that counts elements, and the one that a rank needs instead.

    `call` is view (reshape too), unflatten, expand, repeat_interleave, split, slice, narrow or groups (of a
    convolution), given `count` sizes, of which `position` counts from 0. What is sliced or narrowed has `count` dims,
    and `position` is twice the dim for a start, one more for an end or a length. `of` is the shape of the tensor that
    the call is about, on a rank, 0 where any size will do: a batch or a length that happens to be `written`, in a
    call about another tensor, is left alone. With `dims` the size is the product of these dims of the tensor at every
    batch and length: code that gives `written` for `local` of them, in that proportion, gives it in another layout.
    """

    call: str
    of: tuple[Size, ...]
    count: Count
    position: Size
    written: int
    local: int
    dims: tuple[Size, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPlan:
    """Modules that fully_shard wraps in this order ("<root>" last), and whether they reshard after forward (ZeRO-3) or
    stay gathered until their backward (ZeRO-2); for the units in `exceptions` the opposite holds. The root stays."""

    units: tuple[str, ...]
    reshard_after_forward: bool
    exceptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """`count` collectives of one kind per optimizer step on a rank; num_bytes is that of the whole value, each."""

    where: str
    kind: str
    axis: Axis
    during: Pass
    dtype: str
    num_bytes: Size
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds per optimizer step and bytes per GPU, by part. error_s is one standard deviation.

    memory_bytes is what lives at the peak: in the pass `peak_during`, when something of the module `peak_module` runs
    ("<root>" is the model itself). slack_bytes are beside it, whatever runs: the profile's, for what the framework and
    its allocator hold. The limit is one on both together.
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
    """What the solver proved: bound_s <= the optimum <= objective_s, over every mesh with every micro-batch.

    So many of those were solved; `skipped` counts the others by why they cannot be faster. `unsearched` says which
    meshes are not among them, and why.
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
    """sha256 of the parameters (names, shapes, trainable) and of the traced graph; the traced input shapes."""

    parameters: str
    graph: str
    inputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePlan:
    """A module that every tensor-parallel rank runs whole, by its own code: what stopped the trace there, and the
    seconds that it takes in a step. Of each of `bodies` (loops and choices) the functions were counted once."""

    reason: str
    seconds: Amount
    bodies: tuple[str, ...]


class ProofStatus(StrEnum):
    """proven: what apply makes of the model, on the first and the last rank, runs the model's ops on local shapes and
    literals as planned, and the layout of every value and gradient was derived from the plan alone. unproven: nothing
    was checked."""

    UNPROVEN = "unproven"
    PROVEN = "proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiples:
    """Batches, or lengths, for which the plan is proven besides the planned one: multiples of `multiple`. `reason` says
    why for no other; then no multiple stands there."""

    multiple: Count | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherShapes:
    """How the dims of each input follow from batch and length, by path, and for which other of those the plan holds."""

    inputs: Mapping[str, tuple[DimText, ...]]
    batch: Multiples
    length: Multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """How the plan was checked, after how many rounds of solving, and what was forbidden on the way. `assumptions` are
    answers that the model's code had from the values of its example inputs, and would go another way without.
    `plan_hash` is that of the plan that was proven (tpplan.plan.proof_hash): where the plan has another, or the proof
    none, the plan counts as unproven. `device` is what the model's code was told that it runs on ("cuda 9.0").
    `other_shapes` is absent where shapes do not matter: every rank has all of the model (tp = 1). `calls` are digests
    of what each module calls (tpplan.trace.noted_calls).
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

    `sizes` are numbers to replace while a module's forward runs. `losses` names the modules in whose forward a cross
    entropy meets a slice of that many classes, `draws` those in which dropout falls on slices. `recompute` names the
    modules whose forward runs again in backward, each as one region. `compile` is what the predicted times assume;
    applying the plan compiles nothing. `unruled_ops` are those that no rule covers, which run whole, with the seconds
    they take in a step, `opaque` modules that do. `outputs` are the model's outputs that it returns sharded, by path.
    `untouched` says why parameters stay the plain tensors that they are, where they must: each rank has all of them,
    and gradients are averaged over data-parallel ranks. `notes` are what a reader is to know of how it was made: what a
    builder did that was not asked of it, which costs are guesses.
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
    notes: tuple[str, ...] | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh the plan runs on."""
        return Mesh(replicate=self.mesh_degrees.replicate, shard=self.mesh_degrees.shard, tp=self.mesh_degrees.tp)

    def batch_for(self, rank: int) -> BatchShare:
        """Which rows of each global batch a rank reads, micro-batch by micro-batch; all of a tp group read the same.

        Ranks are numbered as apply_plan's own mesh numbers them. Raises UsageError for a rank outside it.
        """
        if not 0 <= rank < self.mesh.num_gpus:
            raise UsageError(f"rank {rank} is none of the plan's {self.mesh.num_gpus} ({self.mesh})")
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
        """Reads a plan file. Raises PlanError naming the file and the path of the first key that is wrong."""
        return cls.from_dict(read_json(Path(path), origin=str(path), error=PlanError), origin=str(path))

    @classmethod
    def from_dict(cls, data: object, *, origin: str = "plan") -> "Plan":
        """A plan from parsed JSON. Raises PlanError as load does."""
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
        """The file's text: sorted keys, one line for what holds no further objects."""
        return format_json(self.to_dict()) + "\n"

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically: it appears whole or not at all."""
        write_atomically(Path(path), self.dumps())

    @property
    def hash(self) -> str:
        """sha256 of the file's text; ranks agree on it before the first collective."""
        return "sha256:" + hashlib.sha256(self.dumps().encode()).hexdigest()

    def parameter_plans(self) -> dict[str, ParameterPlan]:
        """Plans by parameter name, patterns expanded."""
        return {
            name: replace(
                plan,
                reads={substitute(reader, index): layout for reader, layout in plan.reads.items()},
                aliases=tuple(substitute(alias, index) for alias in plan.aliases),
            )
            for name, (plan, index) in self._expanded(self.parameters).items()
        }

    def boundary_plans(self) -> dict[str, BoundaryPlan]:
        """Conversions by module name, patterns expanded."""
        return {name: plan for name, (plan, _) in self._expanded(self.boundaries).items()}

    def size_plans(self) -> dict[str, tuple[SizePlan, ...]]:
        """Sizes to replace by module name, patterns expanded, "" for the root."""
        return {"" if name == ROOT else name: sizes for name, (sizes, _) in self._expanded(self.sizes).items() if sizes}

    def called(self) -> dict[str, tuple[str, ...]]:
        """Digests of what modules call by module name, patterns expanded."""
        return {name: digests for name, (digests, _) in self._expanded(self.proof.calls or {}).items()}

    def sharded_losses(self) -> dict[str, int]:
        """Numbers of classes by module name, patterns expanded, "" for the root."""
        return {"" if name == ROOT else name: count for name, (count, _) in self._expanded(self.losses).items()}

    def drawing_modules(self) -> tuple[str, ...]:
        """Modules that draw by rank, patterns expanded, "" for the root."""
        names = dict.fromkeys(name for key in self.draws for name, _ in self.expand(key))
        return tuple("" if name == ROOT else name for name in names)

    def opaque_modules(self) -> tuple[str, ...]:
        """Modules that run whole, patterns expanded, "" for the root."""
        return tuple("" if name == ROOT else name for name in self._expanded(self.opaque or {}))

    def scalars_beside_fsdp(self) -> dict[str, ParameterPlan]:
        """Parameters without dims, by name, where FSDP2 is used, which cannot hold them."""
        if not uses_fsdp(self.mesh, self.precision) or self.untouched is not None:
            return {}
        return {name: parameter for name, parameter in self.parameter_plans().items() if not parameter.shape}

    def recomputed_modules(self) -> dict[str, Recompute]:
        """The regions that are recomputed by module name, patterns expanded, "" for the root."""
        expanded = self._expanded(self.recompute)
        modes = {"" if name == ROOT else name: mode for name, (mode, _) in expanded.items()}
        return {name: mode for name, mode in modes.items() if mode is not Recompute.NONE}

    def fsdp_units(self) -> tuple[str, ...]:
        """Module names that fully_shard wraps, patterns expanded, "" for the root."""
        names = [name for unit in self.fsdp.units for name, _ in self.expand(unit)]
        return tuple("" if name == ROOT else name for name in names)

    def layers(self) -> tuple[str, ...]:
        """Names of the repeated layers: FSDP's units, else those of blocks, else the root, ""."""
        units = tuple(filter(None, self.fsdp_units()))
        return units or tuple(name for pattern in self.blocks for name, _ in self.expand(pattern)) or ("",)

    def resharded_units(self) -> dict[str, bool]:
        """Whether each unit but the root is resharded after forward, by module name, patterns expanded."""
        found = {name: self.fsdp.reshard_after_forward for name in self.fsdp_units() if name}
        opposite = (name for key in self.fsdp.exceptions for name, _ in self.expand(key))
        return found | dict.fromkeys(opposite, not self.fsdp.reshard_after_forward)

    def expand(self, key: str) -> Iterator[tuple[str, int | None]]:
        """The names a key stands for, with the index put for `*`. Raises PlanError for a `*` outside a block."""
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
        """What types cannot say: products, patterns, ranges."""
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
                raise PlanError(f"{origin}: parameters.{name}: {starred!r} has a '*' that the parameter's name has not")
        units = set(self.fsdp_units()) - {""}
        for position, key in enumerate(self.fsdp.exceptions):
            if not {name for name, _ in self.expand(key)} <= units:
                raise PlanError(f"{origin}: fsdp.exceptions[{position}]: {key!r} is none of the units but the root")
        self._check_regions(origin)

    def _check_names(self, origin: str) -> None:
        """Raises PlanError where patterns stand for more names than a model has: each is gone through, many times."""
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
        """Where a module or parameter is named, by which key, and how many names are made of one that it stands for."""
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
        """A region inside another would run three times."""
        regions = self.recomputed_modules()
        for inner in regions:
            region = next((around for around in holders(inner) if around in regions), None)
            if region is not None:
                raise PlanError(
                    f"{origin}: recompute.{region or ROOT}: {inner} in it is recomputed too; name one of them"
                )

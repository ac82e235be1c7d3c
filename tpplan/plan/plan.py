"""The plan: what to shard, convert and reduce, keyed by names of modules and parameters; strict JSON, never pickle.

A key with `*` stands for every member of a repeated block (`layers.*.attention` with the block `layers.*`); a key
without `*` overrides the pattern. Applying a plan needs the plan and the model: no tracing, solving or profile.
plan.schema.json describes the file; `load(dump(plan)) == plan`.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

from tpplan.core.errors import PlanError, UsageError
from tpplan.core.files import format_json, write_atomically
from tpplan.core.graph import enclosing
from tpplan.core.mesh import MAX_GPUS, Mesh
from tpplan.core.name_patterns import ROOT, block_of, is_pattern, module_name, parse_ranges, substitute
from tpplan.core.strict_json import MAX_INTEGER, Amount, Count, decode, encode, read_json
from tpplan.plan.batch_share import BatchShare
from tpplan.plan.sections.modes import Compile, Pass, Precision, Recompute, WorkKind, uses_fsdp
from tpplan.plan.sections.prediction import CollectivePlan, Prediction
from tpplan.plan.sections.provenance import (
    Fingerprints,
    Multiples,
    OtherShapes,
    ProofReport,
    ProofStatus,
    RequestPlan,
    SolverReport,
)
from tpplan.plan.sections.ranks import BatchPlan, ClusterPlan, ExpertCall, ExpertsPlan, MeshPlan, StagePlan
from tpplan.plan.sections.sharding import (
    ATTRIBUTE,
    BoundaryPlan,
    BufferPlan,
    CrossingPlan,
    FsdpPlan,
    LayoutText,
    OpaquePlan,
    ParameterPlan,
    SizePlan,
    unit_of,
    why_not_over_tp,
)
from tpplan.plan.tp_shares import TpShares

__all__ = [
    "ATTRIBUTE",
    "MAX_NAMES",
    "SCHEMA_VERSION",
    "BatchPlan",
    "BoundaryPlan",
    "BufferPlan",
    "ClusterPlan",
    "CollectivePlan",
    "Compile",
    "CrossingPlan",
    "ExpertCall",
    "ExpertsPlan",
    "Fingerprints",
    "FsdpPlan",
    "LayoutText",
    "MeshPlan",
    "Multiples",
    "OpaquePlan",
    "OtherShapes",
    "ParameterPlan",
    "Pass",
    "Plan",
    "Precision",
    "Prediction",
    "ProofReport",
    "ProofStatus",
    "Recompute",
    "RequestPlan",
    "SizePlan",
    "SolverReport",
    "StagePlan",
    "WorkKind",
    "uses_fsdp",
]

SCHEMA_VERSION = 1
#: most names that all patterns of a plan may stand for; a thousand layers of 100 parameters have half as many
MAX_NAMES = 200_000
#: most names that an error lists
_MOST_LISTED = 16
#: most dims of a torch tensor
MAX_DIMS = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete plan. `blocks` gives the indices of each repeated block as ranges: {"layers.*": "0-31"}.

    `sizes` are numbers to replace while a module's forward runs. `losses` are modules whose forward computes a cross
    entropy on a slice of that many classes; `draws` are modules whose dropout runs on slices. `recompute` are modules
    whose forward runs again in backward, each as one region. `compile` is what the predicted times assume; applying the
    plan compiles nothing. `unruled_ops` are ops without a rule, which run whole, with their seconds per step; `opaque`
    are modules that run whole. `outputs` are the model's outputs that are returned sharded, by path. `untouched` is the
    reason why parameters must stay plain tensors: each rank then has all of them, and gradients are averaged over
    data-parallel ranks. `experts` says how experts are divided over ranks, where they are. `tp_shares` say what tensor
    parallelism divides; absent where tp is 1. `notes` tell the reader how the plan was made: changes to the request,
    and costs that are guesses. `request` is what was asked for. `stage` says which stage of a pipeline the plan is for,
    where it is for one (tpplan.plan.pipeline_plan). `buffers` are those that a module reads as a slice. `bags` are
    modules whose forward adds up a rank's own rows of tables of that many rows in all.
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
    request: RequestPlan | None = None
    experts: ExpertsPlan | None = None
    stage: StagePlan | None = None
    buffers: Mapping[str, BufferPlan] | None = None
    bags: Mapping[str, tuple[Count, ...]] | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the plan runs."""
        degrees, ep = self.mesh_degrees, self.experts.ep if self.experts is not None else 1
        return Mesh(replicate=degrees.replicate, shard=degrees.shard, tp=degrees.tp, ep=ep)

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
        if isinstance(data, Mapping) and "stages" in data:
            raise PlanError(
                f"{origin}: a plan of stages, where one of a whole model is expected: `tpplan show` prints it, "
                "tpplan.apply_plan applies it"
            )
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise PlanError(
                f"{origin}: schema_version: this tpplan reads version {SCHEMA_VERSION}, the file has {version}; "
                "solve again"
            )
        plan = decode(cls, data, origin=origin, error=PlanError)
        if (problem := next(plan._problems(), None)) is not None:
            raise PlanError(f"{origin}: {problem}")
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

    def buffer_plans(self) -> dict[str, BufferPlan]:
        """Buffer name -> its plan, with patterns expanded; only buffers that a module reads as a slice."""
        return {
            name: replace(plan, reads={substitute(reader, index): layout for reader, layout in plan.reads.items()})
            for name, (plan, index) in self._expanded(self.buffers or {}).items()
        }

    def boundary_plans(self) -> dict[str, BoundaryPlan]:
        """Module name -> its conversions, with patterns expanded."""
        return {name: plan for name, (plan, _) in self._expanded(self.boundaries).items()}

    def size_plans(self) -> dict[str, tuple[SizePlan, ...]]:
        """Module name ("" for the root) -> sizes to replace, with patterns expanded."""
        return {name: sizes for name, sizes in self._by_module(self.sizes).items() if sizes}

    def called(self) -> dict[str, tuple[str, ...]]:
        """Module name -> digests of its calls, with patterns expanded."""
        return {name: digests for name, (digests, _) in self._expanded(self.proof.calls or {}).items()}

    def sharded_losses(self) -> dict[str, int]:
        """Module name ("" for the root) -> number of classes of its sharded cross entropy, with patterns expanded."""
        return self._by_module(self.losses)

    def row_bags(self) -> dict[str, tuple[int, ...]]:
        """Module name ("" for the root) -> numbers of rows of the tables of which its forward adds up a rank's own in
        bags, with patterns expanded."""
        return self._by_module(self.bags or {})

    def drawing_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) whose dropout runs on slices, with patterns expanded."""
        return tuple(dict.fromkeys(self._modules(self.draws)))

    def opaque_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that run whole, with patterns expanded."""
        return tuple(self._by_module(self.opaque or {}))

    def expert_calls(self) -> dict[str, ExpertCall]:
        """Module name -> how it is called, of modules whose experts are divided over ranks, with patterns expanded."""
        found = self._expanded(self.experts.modules) if self.experts is not None else {}
        return {name: call for name, (call, _) in found.items()}

    def scalars_beside_fsdp(self) -> dict[str, ParameterPlan]:
        """Name -> plan of parameters without dims, which FSDP2 cannot hold; empty where FSDP2 is not used."""
        if not uses_fsdp(self.mesh, self.precision) or self.untouched is not None:
            return {}
        return {name: parameter for name, parameter in self.parameter_plans().items() if not parameter.shape}

    def recomputed_modules(self) -> dict[str, Recompute]:
        """Module name ("" for the root) -> how it is recomputed, with patterns expanded, without those that are not."""
        return {name: mode for name, mode in self._by_module(self.recompute).items() if mode is not Recompute.NONE}

    def fsdp_units(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that fully_shard wraps, with patterns expanded."""
        return tuple(self._modules(self.fsdp.units))

    def layers(self) -> tuple[str, ...]:
        """Names of the repeated layers: FSDP units without the root, else members of blocks, else the root, ""."""
        return tuple(filter(None, self.fsdp_units())) or tuple(self._modules(self.blocks)) or ("",)

    def resharded_units(self) -> dict[str, bool]:
        """Name of each FSDP unit except the root -> whether it reshards after forward, with patterns expanded."""
        found = {name: self.fsdp.reshard_after_forward for name in self.fsdp_units() if name}
        return found | dict.fromkeys(self._modules(self.fsdp.exceptions), not self.fsdp.reshard_after_forward)

    def units_over_tp(self) -> frozenset[str]:
        """Names of FSDP units that are sharded over the shard and tp axes together, with patterns expanded."""
        return frozenset(self._modules(self.fsdp.over_tp or ()))

    def parameters_over_tp(self) -> frozenset[str]:
        """Names of the parameters of these units, all of which tp replicates."""
        units, over_tp = {*self.fsdp_units(), ""}, self.units_over_tp()
        return frozenset(name for name in self.parameter_plans() if unit_of(name, units) in over_tp)

    def may_have_units_over_tp(self) -> bool:
        """True where some FSDP unit, but the root, could be sharded over the shard and tp axes together."""
        units = set(self.fsdp_units()) - {""}
        if not units or 1 in (self.mesh.shard, self.mesh.tp):
            return False
        wrong = {unit for unit, _ in why_not_over_tp(units, self.parameter_plans(), self.expert_calls())}
        return not units.issubset(wrong)

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

    def _by_module(self, table: Mapping[str, T]) -> dict[str, T]:
        """Module name ("" for the root) -> its entry in a table, with patterns expanded."""
        return {module_name(name): entry for name, (entry, _) in self._expanded(table).items()}

    def _modules(self, keys: Iterable[str]) -> Iterator[str]:
        """Yields the names of modules ("" for the root) that each key stands for."""
        return (module_name(name) for key in keys for name, _ in self.expand(key))

    def _problems(self) -> Iterator[str]:
        """Yields where products, patterns or ranges are inconsistent, which types cannot express, by place in the
        file; those after the first may be its consequences."""
        yield from self._wrong_degrees()
        yield from self._wrong_patterns()
        yield from self._wrong_readers()
        units = set(self.fsdp_units()) - {""}
        for position, key in enumerate(self.fsdp.exceptions):
            if not units.issuperset(self._modules([key])):
                yield f"fsdp.exceptions[{position}]: {key!r} is not in fsdp.units, or is the root"
        for position, key in enumerate(self.fsdp.over_tp or ()):
            if not units.issuperset(self._modules([key])):
                yield f"fsdp.over_tp[{position}]: {key!r} is not in fsdp.units, or is the root"
        if over_tp := self.units_over_tp():
            if 1 in (self.mesh.shard, self.mesh.tp):
                yield f"fsdp.over_tp: expected a mesh with several ranks on shard and on tp, got {self.mesh}"
            found = why_not_over_tp(units, self.parameter_plans(), self.expert_calls())
            yield from (f"fsdp.over_tp: {unit} has {what}" for unit, what in found if unit in over_tp)
        regions = self.recomputed_modules()
        for inner in regions:  # whose ops would run three times
            if (region := next(filter(regions.__contains__, enclosing(inner)[1:]), None)) is not None:
                yield f"recompute.{region or ROOT}: {inner} inside it is recomputed too; name only one of them"

    def _wrong_degrees(self) -> Iterator[str]:
        """Yields degrees and numbers of samples that do not multiply to what they should."""
        degrees, ep = self.mesh_degrees, self.experts.ep if self.experts is not None else 1
        if degrees.shard % ep:
            yield f"experts.ep: {ep} does not divide mesh_degrees.shard, {degrees.shard}, inside which it is laid out"
            return
        batch, mesh = self.batch, self.mesh
        if self.cluster.gpus > MAX_GPUS:
            yield f"cluster.gpus: expected at most {MAX_GPUS}, got {self.cluster.gpus}"
        if mesh.num_gpus > self.cluster.gpus:
            yield f"mesh_degrees: {mesh} needs more than cluster.gpus, {self.cluster.gpus}"
        if batch.global_batch != batch.micro_batch * batch.accumulation_steps * mesh.data_parallel:
            yield (
                f"batch.global_batch: expected micro_batch {batch.micro_batch} * accumulation_steps "
                f"{batch.accumulation_steps} * {mesh.data_parallel} data-parallel ranks, got {batch.global_batch}"
            )

    def _wrong_patterns(self) -> Iterator[str]:
        """Yields blocks without a range, more than MAX_NAMES names, so that a hostile file cannot exhaust memory, and
        patterns of no block."""
        counts: dict[str, int] = {}
        total = 0
        too_many = "{}: patterns up to here stand for {} names: expected at most {}"
        for pattern, ranges in self.blocks.items():
            if not is_pattern(pattern) or is_pattern(pattern[:-1]) or not pattern.endswith("*"):
                yield f"blocks.{pattern}: expected a pattern that ends in its only '*'"
            try:
                counts[pattern] = len(parse_ranges(ranges))
            except ValueError as error:
                yield f"blocks.{pattern}: {error}"
                continue
            total += counts[pattern]
            if total > MAX_NAMES:
                yield too_many.format(f"blocks.{pattern}", total, MAX_NAMES)
        for place, key, copies in self._written_names():
            total += copies * counts.get(block_of(key), 1)
            if total > MAX_NAMES:
                yield too_many.format(place, total, MAX_NAMES)
        for place, key, _ in self._written_names():
            try:
                tuple(self.expand(key))
            except PlanError as error:
                yield f"{place}: {error}"

    def _wrong_readers(self) -> Iterator[str]:
        """Yields parameters and buffers that are too large, or whose readers and aliases cannot be theirs."""
        for name, parameter in self.parameters.items():
            if len(parameter.shape) > MAX_DIMS or prod(parameter.shape) > MAX_INTEGER:
                yield f"parameters.{name}.shape: more elements than a tensor can have"
        for name, parameter in self.parameter_plans().items():
            if name in parameter.aliases:
                yield f"parameters.{name}.aliases: a name cannot be its own alias"
            if starred := next(filter(is_pattern, (*parameter.reads, *parameter.aliases)), None):
                yield f"parameters.{name}: {starred!r} has a '*', but the parameter's name has none"
        for name, buffer in self.buffer_plans().items():
            if starred := next(filter(is_pattern, buffer.reads), None):
                yield f"buffers.{name}: {starred!r} has a '*', but the buffer's name has none"

    def _written_names(self) -> Iterator[tuple[str, str, int]]:
        """Yields (place in the file, key, number of names made of each name that the key stands for)."""
        for key, parameter in self.parameters.items():
            yield f"parameters.{key}", key, 1 + len(parameter.reads) + len(parameter.aliases)
        for key, buffer in (self.buffers or {}).items():
            yield f"buffers.{key}", key, 1 + len(buffer.reads)
        tables: dict[str, Iterable[str]] = {
            "boundaries": self.boundaries,
            "sizes": self.sizes,
            "losses": self.losses,
            "bags": self.bags or (),
            "recompute": self.recompute,
            "opaque": self.opaque or (),
            "proof.calls": self.proof.calls or (),
        }
        for section, keys in tables.items():
            yield from ((f"{section}.{key}", key, 1) for key in keys)
        lists = {
            "draws": self.draws,
            "fsdp.units": self.fsdp.units,
            "fsdp.exceptions": self.fsdp.exceptions,
            "fsdp.over_tp": self.fsdp.over_tp or (),
        }
        for section, names in lists.items():
            yield from ((f"{section}[{position}]", key, 1) for position, key in enumerate(names))

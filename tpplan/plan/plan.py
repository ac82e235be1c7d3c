"""The plan: what to shard, convert and reduce, keyed by names of modules and parameters; strict JSON, never pickle.

A key with `*` stands for every member of a repeated block (`layers.*.attention` with the block `layers.*`); a key
without `*` overrides the pattern. Applying a plan needs the plan and the model: no tracing, solving or profile.
plan.schema.json describes the file; `load(dump(plan)) == plan`.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpplan.core.errors import PlanError, UsageError
from tpplan.core.files import format_json, write_atomically
from tpplan.core.strict_json import decode, encode, read_json
from tpplan.plan.batch_share import BatchShare
from tpplan.plan.plan_entries import PlanEntries
from tpplan.plan.plan_problems import problems
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
    SHAPE,
    BoundaryPlan,
    BufferPlan,
    CrossingPlan,
    FsdpPlan,
    LayoutText,
    OpaquePlan,
    ParameterPlan,
    SizePlan,
)

__all__ = [
    "ATTRIBUTE",
    "SCHEMA_VERSION",
    "SHAPE",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanEntries):
    """A complete plan: its entries (tpplan.plan.plan_entries), read from a file and checked, or written to one."""

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
                "`tpplan verify` checks it, tpplan.apply_plan applies it"
            )
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise PlanError(
                f"{origin}: schema_version: this tpplan reads version {SCHEMA_VERSION}, the file has {version}; "
                "solve again"
            )
        plan = decode(cls, data, origin=origin, error=PlanError)
        if (problem := next(problems(plan), None)) is not None:
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

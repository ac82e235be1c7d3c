"""The plan of a model in stages: a plan for each stage, on as many ranks each, and the schedule that joins them.

Ranks are numbered part by part of the pipeline: with n ranks a stage, rank r is in part r // n, and rank r % n of the
mesh of each of its stages. Of p parts with v stages each, part i has stages i, i + p, i + 2p, ... Rank r sends to rank
r + n, and those of the last part to the first. All stages read the same rows of the batch at the same rank of their
meshes.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tpplan.core.errors import PlanError, UsageError
from tpplan.core.files import format_json, write_atomically
from tpplan.core.strict_json import Amount, Count, decode, encode, read_json
from tpplan.plan.batch_share import BatchShare
from tpplan.plan.plan import SCHEMA_VERSION, BatchPlan, Compile, Plan, uses_fsdp
from tpplan.plan.sections.provenance import RequestPlan, SolverReport
from tpplan.plan.sections.ranks import TiedPlan


class Schedule(StrEnum):
    """The order in which stages run forwards and backwards of micro-batches (tpplan.stages.schedule). 1f1b: a stage
    runs as many forwards ahead as there are stages behind it, then one forward and one backward in turns. interleaved:
    1f1b with several stages on each rank, so that a micro-batch visits a rank several times. zero-bubble: a stage
    computes the gradients of linear layers' weights later than the rest of a backward, where it would wait for others;
    with one stage on each rank or with several."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


def rounds_of(ranks: int, micro_batches: int) -> int:
    """The rounds in which an interleaved or zero-bubble schedule takes micro-batches through the stages of its ranks.
    [torch.distributed.pipelining.ScheduleInterleaved1F1B]"""
    return max(1, micro_batches // ranks)


def why_unscheduled(schedule: Schedule, ranks: int, virtual_stages: int, micro_batches: int) -> str:
    """Why a schedule cannot run so many micro-batches, with what to do; "" where it can."""
    if schedule is not Schedule.ZERO_BUBBLE and (schedule is Schedule.INTERLEAVED) != (virtual_stages > 1):
        return (
            f"schedule {schedule} with {virtual_stages} stages a rank: expected 1 stage a rank for "
            f"{Schedule.ONE_F_ONE_B}, 2 or more for {Schedule.INTERLEAVED}"
        )
    if micro_batches < ranks:
        return (
            f"{micro_batches} micro-batches are fewer than {ranks} stages of a pipeline: the schedule {schedule} needs "
            f"{ranks} at least"
        )
    if schedule is not Schedule.ONE_F_ONE_B and micro_batches % rounds_of(ranks, micro_batches):
        return (
            f"{micro_batches} micro-batches do not divide into {rounds_of(ranks, micro_batches)} rounds: the schedule "
            f"{schedule} needs rounds of equally many, such as a multiple of {ranks}"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrediction:
    """Seconds of a step: of the slowest rank's stages alone, of waiting while the pipeline fills and drains
    (`bubble_s`), and of sending between stages that nothing hides (`send_s`)."""

    step_time_s: Amount
    stage_s: Amount
    bubble_s: Amount
    send_s: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Plans of all stages in order, each for the ranks of one stage, their schedule and what a step takes. Each rank
    has `virtual_stages` stages. `request` is what was asked for.

    The bound of `solver` is on all plans of this number of parts, or of all numbers where that was open, whatever the
    cuts, degrees and micro-batches: kernels and tp collectives at their least, evenly on all ranks, or with one stage
    on each by the cuts that balance them best.
    """

    schema_version: Count
    schedule: Schedule
    predicted: PipelinePrediction
    solver: SolverReport
    stages: tuple[Plan, ...]
    notes: tuple[str, ...] | None = None
    virtual_stages: Count = 1
    request: RequestPlan | None = None

    @property
    def parts(self) -> int:
        """Number of parts of the pipeline: of stages whose ranks are not the same."""
        return len(self.stages) // self.virtual_stages

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all stages."""
        return self.parts * self.ranks_per_stage

    @property
    def ep(self) -> int:
        """Number of ranks of a stage that divide its experts; a stage without experts has 1 in its own plan."""
        return max(plan.mesh.ep for plan in self.stages)

    @property
    def ranks_per_stage(self) -> int:
        """Number of GPUs of a stage."""
        return self.stages[0].mesh.num_gpus

    @property
    def hash(self) -> str:
        """sha256 of the plan's text, which all ranks compare before the first collective."""
        return "sha256:" + hashlib.sha256(self.dumps().encode()).hexdigest()

    @property
    def batch(self) -> BatchPlan:
        """The batch, which is that of every stage."""
        return self.stages[0].batch

    def stages_of(self, rank: int) -> tuple[Plan, ...]:
        """The plans of a rank's stages. Raises UsageError for a rank outside the plan."""
        if not 0 <= rank < self.num_gpus:
            raise UsageError(f"rank {rank}: expected 0 to {self.num_gpus - 1}, the ranks of {len(self.stages)} stages")
        return self.stages[rank // self.ranks_per_stage :: self.parts]

    def batch_for(self, rank: int) -> BatchShare:
        """The rows of each global batch that a rank reads, by micro-batch; every stage reads them, for positions, masks
        and targets. Raises UsageError for a rank outside the plan."""
        return self.stages_of(rank)[0].batch_for(rank % self.ranks_per_stage)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PipelinePlan":
        """The plan in a file. Raises PlanError that names the file and the path of the first wrong key."""
        return cls.from_dict(read_json(Path(path), origin=str(path), error=PlanError), origin=str(path))

    @classmethod
    def from_dict(cls, data: object, *, origin: str = "plan") -> "PipelinePlan":
        """The plan from parsed JSON. Raises PlanError that names `origin` and the path of the first wrong key."""
        stages = data.get("stages") if isinstance(data, Mapping) else None
        if isinstance(stages, list):
            for index, stage in enumerate(stages):  # each is checked as a plan
                Plan.from_dict(stage, origin=f"{origin}: stages[{index}]")
        plan = decode(cls, data, origin=origin, error=PlanError)
        plan.check(origin)
        return plan

    def dumps(self) -> str:
        """The text of the plan's file: sorted keys; an object or list of scalars on one line."""
        data = encode(self)
        assert isinstance(data, dict)
        return format_json(data) + "\n"

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan's file atomically."""
        write_atomically(Path(path), self.dumps())

    def check(self, origin: str) -> None:
        """Raises PlanError where the stages do not fit together."""
        if self.schema_version != SCHEMA_VERSION:
            raise PlanError(
                f"{origin}: schema_version: this tpplan reads version {SCHEMA_VERSION}, the file has "
                f"{self.schema_version}; solve again"
            )
        count = len(self.stages)
        if count < 2 * self.virtual_stages or count % self.virtual_stages:
            raise PlanError(
                f"{origin}: stages: expected a multiple of virtual_stages, {self.virtual_stages}, and at least twice "
                f"as many, got {count}"
            )
        for index, plan in enumerate(self.stages):
            where = f"{origin}: stages[{index}]"
            stage = plan.stage
            if stage is None or (stage.index, stage.count) != (index, count):
                found = f"index {stage.index} of {stage.count}" if stage is not None else "none"
                raise PlanError(f"{where}.stage: expected index {index} of {count}, got {found}")
            first = self.stages[0]
            if (plan.batch, plan.precision) != (first.batch, first.precision):
                raise PlanError(f"{where}: batch or precision differ from those of stages[0]")
            if plan.mesh.without_experts != first.mesh.without_experts:
                raise PlanError(f"{where}.mesh_degrees: {plan.mesh} is not that of stages[0], {first.mesh}")
            if plan.mesh.ep not in (1, self.ep):
                raise PlanError(f"{where}.mesh_degrees: experts over {plan.mesh.ep} ranks, in another stage {self.ep}")
            before = self.stages[index - 1].stage if index else None
            if before is not None and (before.sends, before.last) != (stage.receives, stage.received):
                raise PlanError(f"{where}.stage.receives: not what stages[{index - 1}] sends")
            if problem := stage.why_not_sliced(plan.mesh.tp):
                raise PlanError(f"{where}.stage.sends: {problem}")
            for one in stage.ties:
                self._check_tied(one, where, index)
            if self.schedule is Schedule.ZERO_BUBBLE:
                _check_deferred(plan, where)
        steps = self.batch.accumulation_steps
        if problem := why_unscheduled(self.schedule, self.parts, self.virtual_stages, steps):
            raise PlanError(f"{origin}: {problem}")

    def _check_tied(self, one: TiedPlan, where: str, index: int) -> None:
        """Raises PlanError for a parameter that stages could not add the gradients of."""
        parts = {stage % self.parts for stage in one.stages}
        others = [self.stages[stage] for stage in one.stages if stage < len(self.stages)]
        if index not in one.stages or len(others) < len(one.stages) or len(parts) < len(one.stages):
            raise PlanError(
                f"{where}.stage.tied: {one.name} in stages {list(one.stages)}: expected this stage and others, each in "
                "a part of its own"
            )
        if any(other.stage is None or one not in other.stage.ties for other in others):
            raise PlanError(f"{where}.stage.tied: the other stages do not say that they have {one.name}")
        found = {(_placement(other, one.name), one.name in other.parameters_over_tp()) for other in others}
        if len(found) > 1:
            raise PlanError(
                f"{where}.parameters: {one.name} lies otherwise than in the other stages that have it, and gradients "
                "of both could not be added: solve again"
            )


def _check_deferred(plan: Plan, where: str) -> None:
    """Raises PlanError for a stage that cannot defer weights' gradients."""
    if uses_fsdp(plan.mesh, plan.precision) and not plan.fsdp.whole_gradients:
        raise PlanError(
            f"{where}.fsdp.whole_gradients: expected true with schedule {Schedule.ZERO_BUBBLE}, whose gradients are "
            "complete at the end of a step, and are reduced then"
        )
    if plan.compile is not Compile.NONE:
        raise PlanError(
            f"{where}.compile: expected {Compile.NONE} with schedule {Schedule.ZERO_BUBBLE}: compiled layers defer "
            "nothing"
        )


def _placement(plan: Plan, name: str) -> str:
    """The layout in which a stage has a parameter at rest."""
    known = plan.parameter_plans().get(name)
    return str(known.placement) if known is not None else ""


def load_plan(path: str | os.PathLike[str]) -> Plan | PipelinePlan:
    """The plan in a file, of a whole model or of a model in stages. Raises PlanError that names the file and the path
    of the first wrong key."""
    data = read_json(Path(path), origin=str(path), error=PlanError)
    kind = PipelinePlan if isinstance(data, Mapping) and "stages" in data else Plan
    return kind.from_dict(data, origin=str(path))

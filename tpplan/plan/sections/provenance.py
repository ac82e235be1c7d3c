"""The sections on how a plan came about: what was asked for, how it was solved, and how it was proven."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tpplan.core.strict_json import Amount, Count, Size, Text
from tpplan.plan.sections.input_dims import DIM_PATTERN, Dim, parse_dim
from tpplan.solvers.problem import Status

DimText = Annotated[Dim, Text(parse_dim, DIM_PATTERN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """The request that a plan answers: the model as named on the command line, the command, and the pins; model and
    command are absent where the plan was made from Python."""

    pins: Mapping[str, str]
    model: str | None = None
    command: str | None = None


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

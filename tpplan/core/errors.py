"""One exception tree; each class of mistake has its own exit code.

0 is success and 1 an unexpected failure. An error's message says what, where, the numbers, and what to do next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that alone makes a plan fit: on how many GPUs, with what step time at most, and its peak."""

    what: str
    num_gpus: int
    step_time_s: float
    peak_bytes: float

    @property
    def gpu_seconds(self) -> float:
        """What a step costs."""
        return self.num_gpus * self.step_time_s


class TpplanError(Exception):
    """Root of what tpplan raises for a mistake that is not its own."""

    exit_code: ClassVar[int] = 1


class UsageError(TpplanError):
    """The request contradicts itself: degrees that do not multiply, an unknown option value."""

    exit_code = 2


class IndivisibleError(UsageError):
    """Degrees or the batch do not divide among so many GPUs; among others they may."""


class InfeasibleError(TpplanError):
    """No plan fits the memory limit: the smallest peak needs so many bytes, by part; remedies come cheapest first."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        limit_bytes: float = 0.0,
        needed_bytes: float = 0.0,
        parts: Mapping[str, float] | None = None,
        remedies: tuple[Remedy, ...] = (),
    ) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.needed_bytes = needed_bytes
        self.parts = dict(parts or {})
        self.remedies = remedies


class VerificationError(TpplanError):
    """A plan was found not to compute the same model."""

    exit_code = 4


class RankFailedError(TpplanError):
    """A rank raised, died or was cut off; the message, the same on all ranks, names it and says why."""


class InternalError(TpplanError):
    """tpplan's own code failed, or torch's beneath it; the message names the exception, where, and torch's version."""


class TorchVersionError(TpplanError, ImportError):
    """torch is older than any that tpplan works with."""

    exit_code = 12


class ModelError(TpplanError):
    """The model file, its builder or its trace failed."""

    exit_code = 5


class ProfileError(TpplanError):
    """A profile is unknown, malformed, or does not cover what was asked of it."""

    exit_code = 6


class PlanError(TpplanError):
    """A plan file is unreadable or malformed; the message names the path of the key."""

    exit_code = 7


class PlanMismatchError(PlanError):
    """The plan was made for another model, another world size or another graph."""

    exit_code = 8


class SolverError(TpplanError):
    """No solver is installed, or it stopped without a feasible solution."""

    exit_code = 9


class WeightsError(TpplanError):
    """Weights or a checkpoint are missing, unreadable, or of another model."""

    exit_code = 10


class ExportError(TpplanError):
    """A plan says what another form has no words for; the message names the module."""

    exit_code = 11

"""One exception tree; each class of mistake has its own exit code.

0 is success and 1 an unexpected failure. An error's message says what, where, the numbers, and what to do next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A single change that makes a plan fit: its text, the number of GPUs, the largest step time, the peak memory."""

    what: str
    num_gpus: int
    step_time_s: float
    peak_bytes: float

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of one step: num_gpus * step_time_s."""
        return self.num_gpus * self.step_time_s


class TpplanError(Exception):
    """Root of the exceptions that tpplan raises for the user's mistakes and for failures it can explain. The message
    begins with `plan_path`, the place of a mistake in a plan's file ("outputs.logits"); "" where it is elsewhere."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", *, plan_path: str = "") -> None:
        super().__init__(f"{plan_path}: {message}" if plan_path else message)
        self.plan_path = plan_path


def first_line(error: BaseException, otherwise: str = "") -> str:
    """The first line of an exception's message; `otherwise`, by default its class's name, where there is none."""
    return next(iter(str(error).strip().splitlines()), otherwise or type(error).__name__)


class UsageError(TpplanError):
    """The request contradicts itself, such as degrees that do not multiply to the GPUs or an unknown option value."""

    exit_code = 2


class IndivisibleError(UsageError):
    """The pinned degrees or the batch do not divide by this number of GPUs; another number of GPUs may work."""


class InfeasibleError(TpplanError):
    """No plan fits the memory limit. `needed_bytes` is the smallest peak found, `parts` are its bytes by part, and
    `remedies` are changes that make a plan fit, the cheapest first."""

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
    """The planned model does not compute the same function as the original model."""

    exit_code = 4


class RankFailedError(TpplanError):
    """A rank raised, died or timed out. All ranks raise the same message, which names the rank and the cause."""


class InternalError(TpplanError):
    """tpplan's own code, or torch below it, failed. The message names the exception, its place and torch's version."""


class TorchVersionError(TpplanError, ImportError):
    """The installed torch is older than the oldest version that tpplan supports."""

    exit_code = 12


class ModelError(TpplanError):
    """The model file, the function that builds the model, or the trace of the model failed."""

    exit_code = 5


class ProfileError(TpplanError):
    """A profile is unknown or malformed, or has no data for a requested prediction."""

    exit_code = 6


class PlanError(TpplanError):
    """A plan file is unreadable or malformed; the message names the path of the key."""

    exit_code = 7


class PlanMismatchError(PlanError):
    """The plan was made for another model, another world size or another graph."""

    exit_code = 8


class SolverError(TpplanError):
    """No solver is installed, or the solver stopped without a feasible solution."""

    exit_code = 9


class WeightsError(TpplanError):
    """Weights or a checkpoint are missing or unreadable, or belong to another model."""

    exit_code = 10


class ExportError(TpplanError):
    """The export format cannot express a part of the plan; the message names the module."""

    exit_code = 11

"""One exception tree; each class of mistake has its own exit code.

0 is success and 1 an unexpected failure. An error's message says what, where, the numbers, and what to do next.
"""

from typing import ClassVar


class TpplanError(Exception):
    """Root of what tpplan raises for a mistake that is not its own."""

    exit_code: ClassVar[int] = 1


class UsageError(TpplanError):
    """The request contradicts itself: degrees that do not multiply, an unknown option value."""

    exit_code = 2


class IndivisibleError(UsageError):
    """Degrees or the batch do not divide among so many GPUs; among others they may."""


class InfeasibleError(TpplanError):
    """No plan fits the memory limit."""

    exit_code = 3


class VerificationError(TpplanError):
    """A plan was found not to compute the same model."""

    exit_code = 4


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

"""Probes: a check of the installed torch for each internal that tpplan needs; and the function that runs them all."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from tpplan.core.errors import first_line

#: the files of this room that use torch; one that cannot be imported counts as a failed probe
FILES = (
    "pytree", "tensors", "modules", "autograd", "checkpoints", "recording", "operators", "fakes", "groups", "parallel",
    "checkpoint_files",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A check that the installed torch does what tpplan needs of it.

    uses: torch's functions. needed_for: what of tpplan does not work without them. works: returns False, or raises,
    where torch behaves differently; takes milliseconds on the CPU, needs no process group, and leaves torch as it was.
    """

    name: str
    uses: str
    needed_for: str
    works: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedProbe:
    """A probe that failed; `reason` says how."""

    name: str
    uses: str
    needed_for: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.uses}), needed for {self.needed_for}: {self.reason}"


def probes() -> Iterator[Probe | FailedProbe]:
    """Yields every probe; for a file of this room that cannot be imported, a FailedProbe in place of its probes."""
    for file in FILES:
        try:
            module = importlib.import_module(f"tpplan.torch_internals.{file}")
        except (ImportError, AttributeError) as error:
            yield FailedProbe(
                name=file, uses=file, needed_for="all of tpplan", reason=f"{type(error).__name__}: {error}"
            )
            continue
        found: tuple[Probe, ...] = module.PROBES
        yield from found


@cache
def failed_probes() -> tuple[FailedProbe, ...]:
    """The probes that fail. Takes under a second on the CPU; to be called while no mode of torch is on."""
    return tuple(found for probe in probes() if (found := _outcome(probe)) is not None)


def _outcome(probe: Probe | FailedProbe) -> FailedProbe | None:
    if isinstance(probe, FailedProbe):
        return probe
    try:
        reason = "" if probe.works() else "this torch behaves differently"
    except Exception as error:  # torch's own code may raise anything
        reason = f"{type(error).__name__}: {first_line(error, 'no message')}"
    if not reason:
        return None
    return FailedProbe(name=probe.name, uses=probe.uses, needed_for=probe.needed_for, reason=reason)

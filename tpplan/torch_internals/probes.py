"""Probes: what tpplan wants of torch's internals, thing by thing, each with a check of the torch at hand; and all of
them run."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

#: the files of this room that use torch; one that does not load is itself a failure
FILES = (
    "pytree", "tensors", "modules", "autograd", "checkpoints", "recording", "operators", "fakes", "groups", "fsdp",
    "devices", "checkpoint_files",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`works` returns False, or raises, where the torch at hand does not do what tpplan counts on. It takes
    milliseconds on the CPU, needs no process group, and leaves torch as it was.

    `uses` names torch's own functions; `needed_for` says what of tpplan does not work without them.
    """

    name: str
    uses: str
    needed_for: str
    works: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """What this torch does not do: its name, torch's functions, what of tpplan needs them, and what happened."""

    name: str
    uses: str
    needed_for: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.uses}), needed for {self.needed_for}: {self.reason}"


def probes() -> Iterator[Probe | Lacking]:
    """Each probe; for a file of this room that torch does not let load, what is missing."""
    for file in FILES:
        try:
            module = importlib.import_module(f"tpplan.torch_internals.{file}")
        except (ImportError, AttributeError) as error:
            yield Lacking(name=file, uses=file, needed_for="all of it", reason=f"{type(error).__name__}: {error}")
            continue
        found: tuple[Probe, ...] = module.PROBES
        yield from found


@cache
def lacking() -> tuple[Lacking, ...]:
    """What fails, of all; under a second on the CPU. To be asked while no mode of torch's is on."""
    return tuple(found for probe in probes() if (found := _outcome(probe)) is not None)


def _outcome(probe: Probe | Lacking) -> Lacking | None:
    if isinstance(probe, Lacking):
        return probe
    try:
        reason = "" if probe.works() else "it does otherwise"
    except Exception as error:  # of any kind: it is torch's own code
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if not reason:
        return None
    return Lacking(name=probe.name, uses=probe.uses, needed_for=probe.needed_for, reason=reason)

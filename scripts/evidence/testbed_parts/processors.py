"""A processor for every rank, as fast whatever the others do.

Ranks that share a core in the ordinary way hand it to each other whenever they wait: a stage that waits for another
speeds up the one that it waits for, which no cluster does. So every rank gets cores of its own where there are enough,
and otherwise a fixed part of its node's cores, by Linux's control groups (either version) as root.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: part of the machine's time that ranks get together where they share cores; the rest is the kernel's
SHARED_OUT = 0.9
#: microseconds after which a rank's part begins anew: a quarter of the shortest window that `tpplan profile` times.
#: Linux refuses parts of less than 1,000
PERIOD_US = 5_000
ROOT = Path("/sys/fs/cgroup")


class NoProcessorsError(Exception):
    """There are fewer cores than ranks, and no control groups to share them out by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """The cores of `ranks` ranks; `part` of one for each where they are fewer than ranks, else None."""

    cores: tuple[int, ...]
    ranks: int

    @property
    def part(self) -> float | None:
        """Part of a core's time that a rank gets."""
        return SHARED_OUT * len(self.cores) / self.ranks if len(self.cores) < self.ranks else None

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """Cores of its own; or, where they are shared, the one on which it has its part."""
        each = len(self.cores) // self.ranks
        if each:
            return self.cores[rank * each : (rank + 1) * each]
        return (self.cores[rank * len(self.cores) // self.ranks],)


def groups() -> Path:
    """The folder of control groups that limit time. Raises NoProcessorsError where this machine has none."""
    if (ROOT / "cpu").is_dir():
        return ROOT / "cpu"
    controllers = ROOT / "cgroup.subtree_control"
    if controllers.is_file() and "cpu" in controllers.read_text(encoding="ascii").split():
        return ROOT
    raise NoProcessorsError(f"{ROOT}: no control groups for processor time")


def limits(folder: Path, part: float) -> dict[Path, str]:
    """The text of each file that limits a control group to this part of a core."""
    quota_us = round(part * PERIOD_US)
    if folder.parent == ROOT:
        return {folder / "cpu.max": f"{quota_us} {PERIOD_US}"}
    return {folder / "cpu.cfs_period_us": str(PERIOD_US), folder / "cpu.cfs_quota_us": str(quota_us)}


def make(name: str, processors: Processors) -> None:
    """Control groups where cores are shared. Raises NoProcessorsError where they cannot be made."""
    part = processors.part
    if part is None:
        return
    for rank in range(processors.ranks):
        folder = groups() / f"{name}-{rank}"
        try:
            folder.mkdir(exist_ok=True)
            for file, text in limits(folder, part).items():
                file.write_text(text, encoding="ascii")
        except OSError as error:
            raise NoProcessorsError(f"{folder}: {error.strerror}") from None


def remove(name: str) -> None:
    """Removes the control groups of a name, whose processes have ended. Harmless where there are none."""
    with contextlib.suppress(NoProcessorsError):
        for folder in groups().glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def entering(name: str, processors: Processors, rank: int) -> Callable[[], None]:
    """What puts the process that calls it, and those that it starts, on a rank's processor."""
    cores = processors.cores_of(rank)
    folder = groups() / f"{name}-{rank}" if processors.part is not None else None

    def enter() -> None:
        os.sched_setaffinity(0, cores)
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    return enter

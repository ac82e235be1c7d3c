"""What scripts/gpu/gpu.py found: a row a plan, predicted beside measured, their errors, the bars they are held to."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from tpplan.core.units import format_bytes, format_seconds
from tpplan.plan.parts import OPTIMIZER
from tpplan.plan.plan import Plan

#: the median over the plans of |predicted / measured - 1| of time is at most this
TIME_BAR = 0.10
#: predicted / measured - 1 of every plan's memory lies between these
MEMORY_BAR = (0.0, 0.05)


def splits_sequence(plan: Plan) -> bool:
    """True where a slice of the sequence enters an attention, from x [B, T, D]."""
    crossings = (
        crossing
        for module, boundary in plan.boundary_plans().items()
        if module.endswith(".attention")
        for crossing in boundary.inputs.values()
    )
    return any(crossing.conversion.source.dim == 1 for crossing in crossings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each timed step; launches and seconds of a step's kernels by name (empty: the device cannot tell); the
    most bytes that were allocated, without what lay on the device before."""

    steps_s: tuple[float, ...]
    kernels: Mapping[str, tuple[int, float]]
    peak_bytes: int

    @property
    def kernels_s(self) -> float | None:
        """Seconds of a step in which a kernel ran."""
        return sum(seconds for _, seconds in self.kernels.values()) if self.kernels else None

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """From the fastest step to the slowest, of the median."""
        return (max(self.steps_s) - min(self.steps_s)) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan with its prediction, and what was measured: forward and backward of a step."""

    name: str
    plan: Plan
    measured: Measured

    @property
    def predicted_s(self) -> float:
        """All but the optimizer, which does not run."""
        return self.plan.predicted.step_time_s - self.plan.predicted.time_s.get(OPTIMIZER, 0.0)

    @property
    def time_error(self) -> float:
        """Relative; above 0 where it ran faster than predicted."""
        return self.predicted_s / self.measured.step_s - 1

    @property
    def memory_error(self) -> float:
        """Relative; above 0 where less was allocated than predicted."""
        return self.plan.predicted.peak_memory_bytes / self.measured.peak_bytes - 1

    def to_dict(self) -> dict[str, object]:
        """The row of results.json."""
        return {
            "name": self.name,
            "plan": f"plans/{self.name}.json",
            "tp": self.plan.mesh.tp,
            "sequence_parallel": splits_sequence(self.plan),
            "recompute": {name: str(mode) for name, mode in self.plan.recompute.items()},
            "predicted_s": self.predicted_s,
            "predicted_error_s": self.plan.predicted.step_time_error_s,
            "predicted_s_by_part": dict(self.plan.predicted.time_s),
            "measured_s": self.measured.step_s,
            "measured_steps_s": self.measured.steps_s,
            "measured_spread": self.measured.spread,
            "measured_kernels_s": self.measured.kernels_s,
            "measured_kernels": dict(self.measured.kernels),
            "time_relative_error": self.time_error,
            "predicted_bytes": self.plan.predicted.peak_memory_bytes,
            "predicted_bytes_by_part": dict(self.plan.predicted.memory_bytes),
            "measured_bytes": self.measured.peak_bytes,
            "memory_relative_error": self.memory_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors over the plans, beside the bars."""

    time_error_median: float
    time_error_range: tuple[float, float]
    memory_error_range: tuple[float, float]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Summary":
        """Of at least one row."""
        times, memory = [row.time_error for row in rows], [row.memory_error for row in rows]
        return cls(
            time_error_median=statistics.median(map(abs, times)),
            time_error_range=(min(times), max(times)),
            memory_error_range=(min(memory), max(memory)),
        )

    @property
    def keeps_time_bar(self) -> bool:
        """Half of the plans, at least, are that near."""
        return self.time_error_median <= TIME_BAR

    @property
    def keeps_memory_bar(self) -> bool:
        """Every plan is that near."""
        return MEMORY_BAR[0] <= self.memory_error_range[0] and self.memory_error_range[1] <= MEMORY_BAR[1]

    def to_dict(self, *, judges: bool) -> dict[str, object]:
        """The end of results.json; without `judges` the bars say nothing, and are null."""
        return {
            "time_error_median": self.time_error_median,
            "time_error_range": self.time_error_range,
            "memory_error_range": self.memory_error_range,
            "time_bar": TIME_BAR,
            "memory_bar": MEMORY_BAR,
            "keeps_time_bar": self.keeps_time_bar if judges else None,
            "keeps_memory_bar": self.keeps_memory_bar if judges else None,
        }

    def lines(self, *, judges: bool) -> str:
        """The same, to be read."""
        verdict = {True: "kept", False: "missed"}
        low, high = self.time_error_range
        time = f"time: median error {self.time_error_median:.1%}, from {low:+.1%} to {high:+.1%}"
        memory = "memory: error from {:+.1%} to {:+.1%}".format(*self.memory_error_range)
        if not judges:
            return f"{time}\n{memory}\nat toy size no bar is judged: launches and caches decide"
        return (
            f"{time} (bar: median {TIME_BAR:.0%}: {verdict[self.keeps_time_bar]})\n"
            f"{memory} (bar: {MEMORY_BAR[0]:+.0%} to {MEMORY_BAR[1]:+.0%}: {verdict[self.keeps_memory_bar]})"
        )


def table(rows: Sequence[Row]) -> Table:
    """A line a plan; `kernels` is the part of the measured time in which one ran."""
    found = Table(box=None, pad_edge=False)
    found.add_column("plan", no_wrap=True)
    for name in ("time: predicted", "measured", "spread", "kernels", "error", "memory: predicted", "measured", "error"):
        found.add_column(name, justify="right")
    for row in rows:
        measured, kernels_s = row.measured, row.measured.kernels_s
        found.add_row(
            row.name,
            format_seconds(row.predicted_s),
            format_seconds(measured.step_s),
            f"{measured.spread:.1%}",
            "-" if kernels_s is None else f"{kernels_s / measured.step_s:.0%}",
            f"{row.time_error:+.1%}",
            format_bytes(row.plan.predicted.peak_memory_bytes),
            format_bytes(measured.peak_bytes),
            f"{row.memory_error:+.1%}",
        )
    return found

"""What a profile is made of: estimates, and one table per thing that was measured.

Symbols: p ranks, q ranks per node, n bytes of the WHOLE (unsharded) value, T seconds, L latency in seconds.

A table is valid once it exists: its axes ascend and its times never decrease. Each names its sources, and `inferred`
says how a number came about that nobody measured. Field names are the keys of the JSON file, units included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, assert_never

from tpplan.errors import ProfileError
from tpplan.interpolate import blend, bracket
from tpplan.mesh import GroupShape
from tpplan.strict import Above, AtLeast
from tpplan.units import DTYPE_BYTES

Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted time and its error bar, in seconds.

    Estimates add up. Errors add linearly, not in quadrature: those that come from one table are the same error again.
    """

    seconds: float
    error_s: float
    extrapolated: bool = False

    @classmethod
    def zero(cls) -> "Estimate":
        """No time at all, for certain."""
        return cls(seconds=0.0, error_s=0.0)

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            seconds=self.seconds + other.seconds,
            error_s=self.error_s + other.error_s,
            extrapolated=self.extrapolated or other.extrapolated,
        )

    def __mul__(self, factor: float) -> "Estimate":
        return Estimate(
            seconds=self.seconds * factor, error_s=self.error_s * abs(factor), extrapolated=self.extrapolated
        )

    __rmul__ = __mul__


class Collective(StrEnum):
    """The collectives a plan may contain."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


def bottleneck_traffic(kind: Collective, group: GroupShape) -> float:
    """What a bandwidth-bound time is a multiple of: bytes through a rank's slowest link, per byte of the whole value.

    Ring all-gather and reduce-scatter move (p - 1)/p, all-reduce 2 (p - 1)/p; across nodes q ranks share that between
    q network ports. All-to-all sends n/p per rank, of which (p - 1)/p leaves the rank and (p - q)/p leaves the node.
    """
    p, q, crosses = group.ranks, group.ranks_per_node, group.nodes > 1
    ring = (p - 1) / p / (q if crosses else 1)
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * ring
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return ring
        case Collective.ALL_TO_ALL:
            return (p - q if crosses else p - 1) / p**2
        case _:
            assert_never(kind)


def latency_steps(group: GroupShape) -> float:
    """What the latency of a group is a multiple of: ring steps p - 1 across nodes, tree depth log2 p inside one.

    Leaving measured groups out prefers these. Nothing small was measured on many nodes, where NCCL has algorithms
    with fewer steps than a ring: there this is the cautious side.
    """
    return group.ranks - 1 if group.nodes > 1 else math.log2(group.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where numbers come from, and under which licence."""

    id: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory, and what of it is never the model's: CUDA context, NCCL buffers, allocator slack."""

    memory_bytes: Count
    reserved_bytes: Annotated[int, AtLeast(0)]
    sources: tuple[str, ...]
    inferred: str | None = None

    def __post_init__(self) -> None:
        if self.reserved_bytes >= self.memory_bytes:
            bound = f"memory_bytes = {self.memory_bytes}"
            raise ProfileError(f"reserved_bytes: expected < {bound}, got {self.reserved_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Device memory bandwidth, bytes read plus bytes written per second."""

    hbm_bytes_per_s: Positive
    relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The least time a kernel takes, however little it does."""

    launch_s: Positive
    relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable:
    """Time of batched (m, k) @ (k, n) over a grid: time_s is row-major over batch, m, n, k and never decreases."""

    dtype: str
    batch: tuple[Count, ...]
    m: tuple[Count, ...]
    n: tuple[Count, ...]
    k: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: NonNegative
    extrapolation_relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The four axes of the table, in the order of time_s."""
        return self.batch, self.m, self.n, self.k

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ProfileError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        for name, grid in zip(("batch", "m", "n", "k"), self.grids, strict=True):
            check_ascending(name, grid, strictly=True)
        check_length("time_s", self.time_s, math.prod(len(grid) for grid in self.grids))
        stride = 1
        for name, grid in zip(("k", "n", "m", "batch"), reversed(self.grids), strict=True):
            for i, time in enumerate(self.time_s):
                if i // stride % len(grid) and time < self.time_s[i - stride]:
                    raise ProfileError(
                        f"time_s[{i}]: expected >= time_s[{i - stride}] = {self.time_s[i - stride]:g}"
                        f" (time never decreases with {name}), got {time:g}"
                    )
            stride *= len(grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Throughput of fused attention, in executed FLOP per second."""

    dtype: str
    forward_flop_per_s: Positive
    backward_flop_per_s: Positive
    relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Time of one collective on one group by bytes of the whole value, never decreasing; latency_s is that of 0 bytes.

    relative_error stands beside each point: small messages are noisier than large ones.
    """

    kind: Collective
    ranks: Annotated[int, AtLeast(2)]
    ranks_per_node: Count
    latency_s: Positive
    bytes: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: tuple[NonNegative, ...]
    sources: tuple[str, ...]
    inferred: str | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node > self.ranks:
            raise ProfileError(f"ranks_per_node: expected <= ranks {self.ranks}, got {self.ranks_per_node}")
        check_ascending("bytes", self.bytes, strictly=True)
        check_length("time_s", self.time_s, len(self.bytes))
        check_length("relative_error", self.relative_error, len(self.bytes))
        check_ascending("time_s", self.time_s, strictly=False)
        if self.latency_s > self.time_s[0]:
            raise ProfileError(f"latency_s: expected <= time_s[0] = {self.time_s[0]:g}, got {self.latency_s:g}")

    @property
    def group(self) -> GroupShape:
        """The group that was measured."""
        return GroupShape(ranks=self.ranks, ranks_per_node=self.ranks_per_node)

    def time(self, num_bytes: float) -> Estimate:
        """Linear in logarithms between points; below the first L + (T_0 - L) n/n_0; above the last T_last n/n_last."""
        cell = bracket(self.bytes, num_bytes)
        i, w = cell
        seconds = blend(self.time_s, cell)
        if num_bytes < self.bytes[0]:
            seconds = self.latency_s + (self.time_s[0] - self.latency_s) * num_bytes / self.bytes[0]
        seconds *= max(1.0, num_bytes / self.bytes[-1])
        left, right = self.relative_error[i], self.relative_error[min(i + 1, len(self.bytes) - 1)]
        return Estimate(
            seconds=seconds,
            error_s=seconds * ((1 - w) * left + w * right),
            extrapolated=num_bytes > self.bytes[-1] or not self.shows_latency(num_bytes),
        )

    def shows_latency(self, num_bytes: float) -> bool:
        """Whether so small a message was measured, or its latency was."""
        return num_bytes >= self.bytes[0] or self.latency_s == self.time_s[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExtrapolation:
    """Error of predicting a group from another, found by leaving each measured group out once (relative, RMS)."""

    in_node_relative_error: NonNegative
    across_nodes_relative_error: NonNegative


def check_ascending(name: str, values: Sequence[float], *, strictly: bool) -> None:
    if not values:
        raise ProfileError(f"{name}: expected at least one value, got none")
    for i in range(1, len(values)):
        if values[i] < values[i - 1] or (strictly and values[i] == values[i - 1]):
            relation = ">" if strictly else ">="
            bound = f"{name}[{i - 1}] = {values[i - 1]:g}"
            raise ProfileError(f"{name}[{i}]: expected {relation} {bound}, got {values[i]:g}")


def check_length(name: str, values: Sequence[float], expected: int) -> None:
    if len(values) != expected:
        raise ProfileError(f"{name}: expected {expected} values, got {len(values)}")


def check_unique(name: str, keys: Sequence[object]) -> None:
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ProfileError(f"{name}[{i}]: expected one entry for {key}, got a second")

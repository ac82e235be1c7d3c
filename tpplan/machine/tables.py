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

from tpplan.core.errors import ProfileError
from tpplan.core.mesh import GroupShape
from tpplan.core.strict_json import Above, AtLeast
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.interpolate import blend, bracket, multilinear

Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]
Index = Annotated[int, AtLeast(0)]

#: a profile may hold so many numbers that were fitted to training runs
MOST_FITTED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted time and its error bar, in seconds.

    Estimates add up. Errors add linearly, not in quadrature: those that come from one table are the same error again.
    Over tables tpplan.costs.error_bars adds them up.
    """

    seconds: float
    error_s: float
    extrapolated: bool = False

    @property
    def relative_error(self) -> float:
        """The error over the time; 0 for no time."""
        return self.error_s / self.seconds if self.seconds else 0.0

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
class Spread:
    """How far apart the repeats of each point lay: the middle half of them over their median, (q75 - q25) / q50.

    relative: in the order of the table's time_s. noisy: where in it they exceed noisy_above, ascending: such a point
    is used like any other, and whoever reads the profile is told.
    """

    relative: tuple[NonNegative, ...]
    noisy_above: Positive
    noisy: tuple[Index, ...]

    def __post_init__(self) -> None:
        above = tuple(i for i, spread in enumerate(self.relative) if spread > self.noisy_above)
        if self.noisy != above:
            raise ProfileError(
                f"noisy: expected the points whose relative spread exceeds {self.noisy_above:g}, {list(above)},"
                f" got {list(self.noisy)}"
            )


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
class MemoryBoundTable:
    """Time of a kernel that only moves memory, by bytes read plus bytes written, never decreasing.

    What stays in a cache is faster than what does not: one bandwidth is not true of both.
    """

    bytes: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: tuple[NonNegative, ...]
    sources: tuple[str, ...]
    spread: Spread | None = None
    inferred: str | None = None

    def __post_init__(self) -> None:
        _check_curve(self.bytes, self.time_s, self.relative_error, self.spread)

    def time(self, num_bytes: float) -> Estimate:
        """Linear in logarithms between points; below the first its time; above the last T_last n/n_last."""
        seconds, error = _along(self.bytes, self.time_s, self.relative_error, num_bytes)
        seconds *= max(1.0, num_bytes / self.bytes[-1])
        return Estimate(seconds=seconds, error_s=seconds * error, extrapolated=num_bytes > self.bytes[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """launch_s: the least time a kernel takes on the device, however little it does.

    issue_s: what the CPU needs to issue one, where the device works while the CPU goes on; else a kernel's time holds
    it already. relative_error is that of both.
    """

    launch_s: Positive
    relative_error: NonNegative
    sources: tuple[str, ...]
    issue_s: Positive | None = None
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerIssue:
    """What the CPU takes of an optimizer's step for each parameter, however small it is, on one of
    tpplan.plan.optimizers.

    sharded_s: of a DTensor, as parameters of applied plans are. plain_s: of a tensor of one rank.
    """

    optimizer: str
    sharded_s: Positive
    plain_s: Positive
    relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable:
    """Time of batched (m, k) @ (k, n) over a grid: time_s is row-major over batch, m, n, k and never decreases.

    A measured one is the mean of a product's three forms in training, forward and both gradients, which differ in how
    their operands lie in memory: a step runs each once. Their differences are in the error.
    """

    dtype: str
    batch: tuple[Count, ...]
    m: tuple[Count, ...]
    n: tuple[Count, ...]
    k: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: NonNegative
    extrapolation_relative_error: NonNegative
    sources: tuple[str, ...]
    spread: Spread | None = None
    inferred: str | None = None

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The four axes of the table, in the order of time_s."""
        return self.batch, self.m, self.n, self.k

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _check_grid(("batch", "m", "n", "k"), self.grids, self.time_s, self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes of one fused attention: query [batch_heads, queries, head_dim], keys and values [.., keys, head_dim].

    batch_heads counts the heads of queries; head_dim is the mean of keys' and values' where these differ.
    """

    batch_heads: int
    queries: int
    keys: int
    head_dim: float
    causal: bool

    @property
    def sequence(self) -> float:
        """Of as many queries as keys, with as much work."""
        return math.sqrt(self.queries * self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable:
    """Time of fused attention, one way, causal or not, on sequence queries and as many keys.

    time_s is row-major over batch_heads, sequence, head_dim and never decreases.
    """

    dtype: str
    causal: bool
    backward: bool
    batch_heads: tuple[Count, ...]
    sequence: tuple[Count, ...]
    head_dim: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: NonNegative
    extrapolation_relative_error: NonNegative
    sources: tuple[str, ...]
    spread: Spread | None = None
    inferred: str | None = None

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The three axes of the table, in the order of time_s."""
        return self.batch_heads, self.sequence, self.head_dim

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _check_grid(("batch_heads", "sequence", "head_dim"), self.grids, self.time_s, self.spread)

    def time(self, sizes: AttentionSizes, launch_s: float) -> Estimate:
        """T = L + (T_c - L) f: T_c is the interpolated time of the sizes clamped to the table, f the FLOP over T_c's.

        L is launch_s, which does not grow with the work. Other numbers of queries than of keys count as the sequence
        with as much work, and as extrapolated.
        """
        point = (sizes.batch_heads, sizes.sequence, sizes.head_dim)
        clamped = [min(max(size, grid[0]), grid[-1]) for size, grid in zip(point, self.grids, strict=True)]
        inside = multilinear(self.grids, self.time_s, clamped)
        heads, sequence, dim = (size / within for size, within in zip(point, clamped, strict=True))
        work = heads * sequence**2 * dim
        fixed = min(launch_s, inside)
        seconds = fixed + (inside - fixed) * work if work != 1 else inside
        extrapolated = tuple(clamped) != point or sizes.queries != sizes.keys
        error = math.hypot(self.relative_error, self.extrapolation_relative_error if extrapolated else 0.0)
        return Estimate(seconds=seconds, error_s=seconds * error, extrapolated=extrapolated)


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
    spread: Spread | None = None
    inferred: str | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node > self.ranks:
            raise ProfileError(f"ranks_per_node: expected <= ranks {self.ranks}, got {self.ranks_per_node}")
        _check_curve(self.bytes, self.time_s, self.relative_error, self.spread)
        if self.latency_s > self.time_s[0]:
            raise ProfileError(f"latency_s: expected <= time_s[0] = {self.time_s[0]:g}, got {self.latency_s:g}")

    @property
    def group(self) -> GroupShape:
        """The group that was measured."""
        return GroupShape(ranks=self.ranks, ranks_per_node=self.ranks_per_node)

    def time(self, num_bytes: float) -> Estimate:
        """Linear in logarithms between points; below the first L + (T_0 - L) n/n_0; above the last T_last n/n_last."""
        seconds, error = _along(self.bytes, self.time_s, self.relative_error, num_bytes)
        if num_bytes < self.bytes[0]:
            seconds = self.latency_s + (self.time_s[0] - self.latency_s) * num_bytes / self.bytes[0]
        seconds *= max(1.0, num_bytes / self.bytes[-1])
        return Estimate(
            seconds=seconds,
            error_s=seconds * error,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What running at once costs: a matmul beside a collective takes 1 + matmul_slowdown times as long as alone, the
    collective beside it 1 + collective_slowdown times. relative_error is that of these factors."""

    matmul_slowdown: NonNegative
    collective_slowdown: NonNegative
    relative_error: NonNegative
    sources: tuple[str, ...]
    inferred: str | None = None


#: what names its sources, and how it was inferred where it was
Part = (
    Memory
    | Bandwidth
    | Launch
    | OptimizerIssue
    | MemoryBoundTable
    | MatmulTable
    | AttentionRate
    | AttentionTable
    | CollectiveTable
    | Overlap
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A number that was fitted to training runs: to how many, with which residual (relative, RMS), and what it is."""

    name: str
    value: float
    residual: NonNegative
    runs: Count
    what: str


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise ProfileError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")


def _along(grid: Sequence[float], times: Sequence[float], errors: Sequence[float], size: float) -> tuple[float, float]:
    """Time and relative error at a size clamped to the grid: linear in logarithms, and linear between these."""
    i, w = cell = bracket(grid, size)
    return blend(times, cell), (1 - w) * errors[i] + w * errors[min(i + 1, len(grid) - 1)]


def _check_curve(grid: Sequence[float], times: Sequence[float], errors: Sequence[float], spread: Spread | None) -> None:
    """bytes ascend; time_s is as long and never decreases; so is relative_error, and the spread where there is one."""
    check_ascending("bytes", grid, strictly=True)
    check_length("time_s", times, len(grid))
    check_length("relative_error", errors, len(grid))
    check_ascending("time_s", times, strictly=False)
    if spread is not None:
        check_length("spread.relative", spread.relative, len(grid))


def _check_grid(
    names: Sequence[str], grids: Sequence[Sequence[int]], times: Sequence[float], spread: Spread | None
) -> None:
    """Axes ascend; time_s covers their product, row-major, and decreases along none; the spread is as long."""
    for name, grid in zip(names, grids, strict=True):
        check_ascending(name, grid, strictly=True)
    check_length("time_s", times, math.prod(len(grid) for grid in grids))
    if spread is not None:
        check_length("spread.relative", spread.relative, len(times))
    stride = 1
    for name, grid in zip(reversed(names), reversed(grids), strict=True):
        for i, time in enumerate(times):
            if i // stride % len(grid) and time < times[i - stride]:
                raise ProfileError(
                    f"time_s[{i}]: expected >= time_s[{i - stride}] = {times[i - stride]:g}"
                    f" (time never decreases with {name}), got {time:g}"
                )
        stride *= len(grid)


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

"""The parts of a profile: estimates, and one table for each kind of measurement.

Symbols: p ranks, q ranks per node, n bytes of the WHOLE (unsharded) value, T seconds, L latency in seconds.

Tables are valid on construction: axes ascend and times never decrease. Each names its sources; `inferred` says how
numbers that were not measured came about. Field names are the keys of the JSON file, with units.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, assert_never

from tpplan.core.errors import ProfileError
from tpplan.core.mesh import GroupShape
from tpplan.core.strict_json import Above, Amount, AtLeast, Count, Size
from tpplan.machine.interpolate import blend, bracket, multilinear
from tpplan.machine.table_checks import along, check_ascending, check_curve, check_dtype, check_grid, check_length

Positive = Annotated[float, Above(0)]

#: most numbers of a profile that were fitted to training runs
MOST_FITTED = 2
#: rows of matrices begin at multiples of so many bytes for the fast kernels of tensor cores, or of fewer
ALIGNED_BYTES, MISALIGNED_BYTES = 16, (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted time and its error bar (one standard deviation), in seconds.

    Estimates add up. Errors add linearly, not in quadrature, because times from one table share their error.
    tpplan.costs.error_bars combines errors of several tables.
    """

    seconds: float
    error_s: float
    extrapolated: bool = False

    @property
    def relative_error(self) -> float:
        """The error relative to the time; 0 where the time is 0."""
        return self.error_s / self.seconds if self.seconds else 0.0

    @classmethod
    def zero(cls) -> "Estimate":
        """No time, without error."""
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
    """The collectives that a plan may contain."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


def bottleneck_traffic(kind: Collective, group: GroupShape) -> float:
    """Bytes through a rank's slowest link, per byte of the whole value; bandwidth-bound times are proportional to it.

    Ring all-gather and reduce-scatter move (p - 1)/p, all-reduce 2 (p - 1)/p; across nodes, the q ranks of a node share
    this among q network ports. All-to-all sends n/p per rank, of which (p - 1)/p leaves the rank and (p - q)/p leaves
    the node.
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
    """The number of latencies in a collective: ring steps p - 1 across nodes, tree depth log2 p inside a node.

    Leaving out measured groups favours these. Small messages on many nodes, where NCCL has algorithms with fewer steps
    than a ring, were not measured; there this overestimates.
    """
    return group.ranks - 1 if group.nodes > 1 else math.log2(group.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where numbers come from, and their licence."""

    id: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far apart the repeats of each point are: (q75 - q25) / q50.

    relative: in the order of the table's time_s. noisy: indices of points above noisy_above, ascending. Noisy points
    are used like others; `tpplan profile check` warns of them.
    """

    relative: tuple[Amount, ...]
    noisy_above: Positive
    noisy: tuple[Size, ...]

    def __post_init__(self) -> None:
        above = tuple(i for i, spread in enumerate(self.relative) if spread > self.noisy_above)
        if self.noisy != above:
            raise ProfileError(
                f"noisy: expected the points whose relative spread exceeds {self.noisy_above:g}, {list(above)},"
                f" got {list(self.noisy)}"
            )


def _relative(spread: Spread | None) -> tuple[float, ...] | None:
    return None if spread is None else spread.relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a profile: the ids of the sources of its numbers, and how numbers that were not measured came about."""

    sources: tuple[str, ...]
    inferred: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Part):
    """Device memory, and the part that the model cannot use: CUDA context, NCCL buffers, allocator overhead."""

    memory_bytes: Count
    reserved_bytes: Size

    def __post_init__(self) -> None:
        if self.reserved_bytes >= self.memory_bytes:
            bound = f"memory_bytes = {self.memory_bytes}"
            raise ProfileError(f"reserved_bytes: expected < {bound}, got {self.reserved_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Part):
    """Device memory bandwidth: bytes read plus bytes written per second."""

    hbm_bytes_per_s: Positive
    relative_error: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBoundTable(Part):
    """Time of a kernel that only moves memory, by bytes read plus bytes written; never decreasing.

    A table instead of one bandwidth, because small tensors stay in caches.
    """

    bytes: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: tuple[Amount, ...]
    spread: Spread | None = None

    def __post_init__(self) -> None:
        check_curve(self.bytes, self.time_s, self.relative_error, _relative(self.spread))

    def time(self, num_bytes: float) -> Estimate:
        """Linear in logarithms between points; the first time below them; T_last n/n_last above."""
        seconds, error = along(self.bytes, self.time_s, self.relative_error, num_bytes)
        seconds *= max(1.0, num_bytes / self.bytes[-1])
        return Estimate(seconds=seconds, error_s=seconds * error, extrapolated=num_bytes > self.bytes[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Part):
    """launch_s: the least time of a kernel on the device.

    issue_s: CPU time to issue a kernel, where the device runs in parallel to the CPU; elsewhere kernel times include
    it. relative_error applies to both.
    """

    launch_s: Positive
    relative_error: Amount
    issue_s: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerIssue(Part):
    """CPU time of an optimizer's step per parameter of any size; `optimizer` is one of tpplan.plan.optimizers.

    sharded_s: for a DTensor, as under an applied plan. plain_s: for a plain tensor on one rank.
    """

    optimizer: str
    sharded_s: Positive
    plain_s: Positive
    relative_error: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable(Part):
    """Time of batched (m, k) @ (k, n) over a grid: time_s is row-major over batch, m, n, k and never decreases.

    A measured time is the mean of a product's three forms in training, forward and both gradients, which differ in the
    memory layout of their operands and run once each in a step. Their differences count in the error.
    """

    dtype: str
    batch: tuple[Count, ...]
    m: tuple[Count, ...]
    n: tuple[Count, ...]
    k: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: Amount
    extrapolation_relative_error: Amount
    spread: Spread | None = None

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The four axes, in the order of time_s."""
        return self.batch, self.m, self.n, self.k

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_grid(("batch", "m", "n", "k"), self.grids, self.time_s, _relative(self.spread))


@dataclass(frozen=True, slots=True, kw_only=True)
class MisalignedMatmuls(Part):
    """How much longer matmuls take on matrices whose rows begin at multiples of `bytes`, and of no more.

    Tensor cores load 16 bytes at once; where rows do not begin at multiples of 16 bytes, slower kernels run. Measured
    are large products: flop_per_s, and aligned_flop_per_s of like ones that are aligned. relative_error is that of the
    further time of a FLOP.
    """

    dtype: str
    bytes: int
    flop_per_s: Positive
    aligned_flop_per_s: Positive
    relative_error: Amount

    @property
    def further_s_per_flop(self) -> float:
        """Seconds that a FLOP takes longer than in an aligned matmul: 1/r - 1/r_aligned, or nothing."""
        return max(0.0, 1 / self.flop_per_s - 1 / self.aligned_flop_per_s)

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.bytes not in MISALIGNED_BYTES:
            expected = ", ".join(map(str, MISALIGNED_BYTES))
            raise ProfileError(f"bytes: expected one of {expected}, got {self.bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedMatmuls(Part):
    """Rates of batches of products (m, k) @ (k, n) of which one size is small, as those of attention that is not fused.

    inner_flop_per_s are rates where k is each of `sizes` and m and n are as large as the last, outer_flop_per_s where m
    or n is. Both end with the rate where no size is small. The time of a product never decreases with its size.
    """

    dtype: str
    sizes: tuple[Count, ...]
    inner_flop_per_s: tuple[Positive, ...]
    outer_flop_per_s: tuple[Positive, ...]
    relative_error: Amount

    def seconds(self, *, m: int, n: int, k: int, batch: int) -> float:
        """The longer of both: all FLOP at the inner rate of k, and at the outer rate of min(m, n).

        The time of a FLOP is interpolated; above the last size it is that of the last. Below the first, a product takes
        as much less than one of the first size as it moves fewer bytes.
        """
        short, long = sorted((m, n))
        inner = self._of_size(self.inner_flop_per_s, k, m * n, m + n)
        return 2.0 * batch * max(inner, self._of_size(self.outer_flop_per_s, short, long * k, long + k))

    def _of_size(self, rates: tuple[float, ...], size: int, area: int, sides: int) -> float:
        """Seconds of a pair of FLOP in one product, of `size` and two others with this product and this sum."""
        first, last = self.sizes[0], self.sizes[-1]
        if size < first:
            return first * area / rates[0] * (size * sides + area) / (first * sides + area)
        times = [own / rate for own, rate in zip(self.sizes, rates, strict=True)]
        return area * (size / rates[-1] if size > last else blend(times, bracket(self.sizes, size)))

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_ascending("sizes", self.sizes, strictly=True)
        for name, rates in (("inner", self.inner_flop_per_s), ("outer", self.outer_flop_per_s)):
            check_length(f"{name}_flop_per_s", rates, len(self.sizes))
            times = [size / rate for size, rate in zip(self.sizes, rates, strict=True)]
            check_ascending(f"sizes / {name}_flop_per_s", times, strictly=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Sizes of one fused attention: query [batch_heads, queries, head_dim], keys and values [.., keys, head_dim].

    batch_heads counts query heads; head_dim is the mean of the keys' and the values' where they differ.
    """

    batch_heads: int
    queries: int
    keys: int
    head_dim: float
    causal: bool

    @property
    def sequence(self) -> float:
        """The length of equally many queries and keys with the same work: sqrt(queries * keys)."""
        return math.sqrt(self.queries * self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable(Part):
    """Time of fused attention in one direction, causal or not, with as many queries as keys.

    time_s is row-major over batch_heads, sequence, head_dim and never decreases.
    """

    dtype: str
    causal: bool
    backward: bool
    batch_heads: tuple[Count, ...]
    sequence: tuple[Count, ...]
    head_dim: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: Amount
    extrapolation_relative_error: Amount
    spread: Spread | None = None

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The three axes, in the order of time_s."""
        return self.batch_heads, self.sequence, self.head_dim

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_grid(("batch_heads", "sequence", "head_dim"), self.grids, self.time_s, _relative(self.spread))

    def time(self, sizes: AttentionSizes, launch_s: float) -> Estimate:
        """T = L + (T_c - L) f; T_c is the interpolated time of the sizes clamped to the table, f the FLOP over T_c's.

        L is launch_s, which does not grow with the work. Attention with other numbers of queries than keys is priced as
        the sequence with the same work, and counts as extrapolated.
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
class AttentionRate(Part):
    """Throughput of fused attention, in executed FLOP per second."""

    dtype: str
    forward_flop_per_s: Positive
    backward_flop_per_s: Positive
    relative_error: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable(Part):
    """Time of a collective on one group, by bytes of the whole value, never decreasing; latency_s is for 0 bytes.

    relative_error has a value for each point: small messages are noisier than large ones.
    """

    kind: Collective
    ranks: Annotated[int, AtLeast(2)]
    ranks_per_node: Count
    latency_s: Positive
    bytes: tuple[Count, ...]
    time_s: tuple[Positive, ...]
    relative_error: tuple[Amount, ...]
    spread: Spread | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node > self.ranks:
            raise ProfileError(f"ranks_per_node: expected <= ranks {self.ranks}, got {self.ranks_per_node}")
        check_curve(self.bytes, self.time_s, self.relative_error, _relative(self.spread))
        if self.latency_s > self.time_s[0]:
            raise ProfileError(f"latency_s: expected <= time_s[0] = {self.time_s[0]:g}, got {self.latency_s:g}")

    @property
    def group(self) -> GroupShape:
        """The measured group."""
        return GroupShape(ranks=self.ranks, ranks_per_node=self.ranks_per_node)

    def time(self, num_bytes: float) -> Estimate:
        """Linear in logarithms between points; L + (T_0 - L) n/n_0 below them; T_last n/n_last above."""
        seconds, error = along(self.bytes, self.time_s, self.relative_error, num_bytes)
        if num_bytes < self.bytes[0]:
            seconds = self.latency_s + (self.time_s[0] - self.latency_s) * num_bytes / self.bytes[0]
        seconds *= max(1.0, num_bytes / self.bytes[-1])
        return Estimate(
            seconds=seconds,
            error_s=seconds * error,
            extrapolated=num_bytes > self.bytes[-1] or not self.shows_latency(num_bytes),
        )

    def shows_latency(self, num_bytes: float) -> bool:
        """True where a message as small as this was measured, or latency_s is the smallest measured time."""
        return num_bytes >= self.bytes[0] or self.latency_s == self.time_s[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExtrapolation:
    """Relative error (RMS) of predicting a group from another one, found by leaving out each measured group once."""

    in_node_relative_error: Amount
    across_nodes_relative_error: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Part):
    """Slowdown of simultaneous work: a matmul beside a collective takes 1 + matmul_slowdown times as long as alone, the
    collective 1 + collective_slowdown times. relative_error applies to both factors."""

    matmul_slowdown: Amount
    collective_slowdown: Amount
    relative_error: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A number that was fitted to training runs: their number, the relative residual (RMS), and what the number is."""

    name: str
    value: float
    residual: Amount
    runs: Count
    what: str

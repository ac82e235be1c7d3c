"""The device mesh replicate x shard x tp, and how many ranks of each axis share a node.

Ranks are numbered row-major with tp innermost, as in torch's init_device_mesh: ranks of a tp group are adjacent, those
of a shard group have stride tp, those of a replicate group stride shard * tp. Where experts are divided over ranks
(tpplan.experts), neighbours on the shard axis form groups of ep ranks: ep is laid out inside shard, next to tp. The
ranks of shard and tp together are adjacent too: over them FSDP shards units whose weights tp replicates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tpplan.core.errors import IndivisibleError, UsageError

#: largest number of GPUs that can be planned for
MAX_GPUS = 2**20
#: largest number of sequences per step, and of tokens per sequence
MAX_COUNT = 2**32


class Axis(StrEnum):
    """A mesh axis: replicas of the model, FSDP shards, or tensor parallelism (AXES). Where experts are divided, the
    shard axis has two parts: EP, ranks with different experts, and EXPERT_SHARD, ranks with the same experts, over
    which FSDP shards these. SHARD_TP is the shard and tp axes as one."""

    REPLICATE = "replicate"
    SHARD = "shard"
    TP = "tp"
    EP = "ep"
    EXPERT_SHARD = "expert_shard"
    SHARD_TP = "shard_tp"


#: the axes whose sizes multiply to the number of GPUs, outermost first
AXES = (Axis.REPLICATE, Axis.SHARD, Axis.TP)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The size of a process group and the number of its ranks on each node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans; the last node may be partly filled."""
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the three axes; their product is the number of GPUs. `ep` is the number of ranks of a shard group that
    divide experts among them; it divides shard. Raises UsageError for a size below 1, and for an ep that does not."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, Axis.EP):
            if self.size(axis) < 1:
                raise UsageError(f"mesh: {axis} must be at least 1, got {self.size(axis)}")
        if self.shard % self.ep:
            raise UsageError(f"mesh: ep {self.ep} does not divide shard {self.shard}, inside which it is laid out")

    def size(self, axis: Axis) -> int:
        """Number of ranks along one axis."""
        match axis:
            case Axis.REPLICATE:
                return self.replicate
            case Axis.SHARD:
                return self.shard
            case Axis.TP:
                return self.tp
            case Axis.EP:
                return self.ep
            case Axis.EXPERT_SHARD:
                return self.shard // self.ep
            case Axis.SHARD_TP:
                return self.shard * self.tp

    @property
    def without_experts(self) -> "Mesh":
        """The mesh of ranks that divide no experts."""
        return replace(self, ep=1)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the mesh."""
        return self.replicate * self.shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different data: replicate * shard."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Index of the batch slice that a global rank reads; all ranks of a tp group read the same slice."""
        return rank // self.tp

    def stride(self, axis: Axis) -> int:
        """Distance of neighbours along an axis, in ranks."""
        match axis:
            case Axis.TP | Axis.SHARD_TP:
                return 1
            case Axis.SHARD | Axis.EP:
                return self.tp
            case Axis.EXPERT_SHARD:
                return self.tp * self.ep
            case Axis.REPLICATE:
                return self.tp * self.shard

    def group(self, axis: Axis, gpus_per_node: int) -> GroupShape:
        """The shape of the axis's process groups on nodes of `gpus_per_node` GPUs.

        Where groups are spread differently, this is the group with the fewest ranks on some node: all data of the group
        passes through that node's few network ports.
        """
        stride = self.stride(axis)
        ranks = self.size(axis)
        num_blocks = self.num_gpus // (stride * ranks)
        return GroupShape(ranks=ranks, ranks_per_node=_fewest_on_a_node(ranks, stride, num_blocks, gpus_per_node))

    def __str__(self) -> str:
        experts = f", experts over {self.ep} of the shard ranks" if self.ep > 1 else ""
        return f"replicate {self.replicate} x shard {self.shard} x tp {self.tp}{experts}"


def _fewest_on_a_node(ranks: int, stride: int, num_blocks: int, gpus_per_node: int) -> int:
    """The fewest ranks that any group has on a node it touches, over `stride` groups in each of `num_blocks` blocks.

    Rank i of a group is GPU start + i * stride. A group's start in its node depends on where its block starts.
    """
    if ranks == 1 or stride >= gpus_per_node:
        return 1
    block = stride * ranks
    if gpus_per_node % stride == 0 and (gpus_per_node % block == 0 or block % gpus_per_node == 0):
        return min(ranks, gpus_per_node // stride)
    period = gpus_per_node // math.gcd(block, gpus_per_node)
    starts = {(i * block + j) % gpus_per_node for i in range(min(num_blocks, period)) for j in range(stride)}
    return min(_fewest_from(start, ranks, stride, gpus_per_node) for start in starts)


def _fewest_from(start: int, ranks: int, stride: int, gpus_per_node: int) -> int:
    """The fewest ranks per node of a group whose first rank is GPU `start` of its node; stride < gpus_per_node."""
    last = start + stride * (ranks - 1)
    if last < gpus_per_node:
        return ranks
    on_first, on_last = -(-(gpus_per_node - start) // stride), last % gpus_per_node // stride + 1
    is_between = last // gpus_per_node > 1
    return min(on_first, on_last, gpus_per_node // stride if is_between else on_first)


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(dict.fromkeys((*low, *(n // d for d in reversed(low)))))


def sub_clusters(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of GPUs worth planning for, out of `gpus`: divisors of a node, whole nodes, and all GPUs; ascending."""
    whole_nodes = range(gpus_per_node, gpus + 1, gpus_per_node)
    return tuple(sorted({n for n in (*divisors(gpus_per_node), *whole_nodes, gpus) if n <= gpus}))


def tp_degrees(gpus: int, gpus_per_node: int, *, across_nodes: bool) -> tuple[int, ...]:
    """Tensor-parallel degrees that divide `gpus` and never leave a node shared by partial groups: divisors of a node
    and, where `across_nodes`, multiples of a node; ascending."""
    return tuple(
        degree
        for degree in divisors(gpus)
        if gpus_per_node % degree == 0 or (across_nodes and degree % gpus_per_node == 0)
    )


def meshes(
    gpus: int, gpus_per_node: int, *, tp: int | None = None, fsdp: int | None = None, across_nodes: bool = False
) -> Iterator[Mesh]:
    """Yields every mesh of `gpus` GPUs whose tp is among tp_degrees; `tp` and `fsdp` pin the tp and shard axes.

    A pinned tp may be any divisor of `gpus`. Raises IndivisibleError where a pinned degree does not divide `gpus`.
    """
    for name, degree in (("tp", tp), ("fsdp", fsdp), ("tp * fsdp", (tp or 1) * (fsdp or 1))):
        if degree is not None and (degree < 1 or gpus % degree):
            listed = ", ".join(map(str, divisors(gpus)))
            raise IndivisibleError(f"{name} = {degree} does not divide {gpus} GPUs; degrees that do: {listed}")
    for tp_degree in (tp,) if tp else tp_degrees(gpus, gpus_per_node, across_nodes=across_nodes):
        for shard in (fsdp,) if fsdp else divisors(gpus // tp_degree):
            if (gpus // tp_degree) % shard == 0:
                yield Mesh(replicate=gpus // tp_degree // shard, shard=shard, tp=tp_degree)

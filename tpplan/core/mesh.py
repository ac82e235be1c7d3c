"""The device mesh: replicate x shard x tp, and which ranks of each axis share a node.

Ranks are numbered row-major with tp innermost, as torch's init_device_mesh does, so tp groups are neighbours, shard
groups have stride tp and replicate groups stride shard * tp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tpplan.core.errors import IndivisibleError, UsageError

#: GPUs to plan for; no cluster has more
MAX_GPUS = 2**20
#: sequences of a step, tokens of a sequence
MAX_COUNT = 2**32


class Axis(StrEnum):
    """A mesh axis: batch replicas, FSDP shards, tensor parallelism."""

    REPLICATE = "replicate"
    SHARD = "shard"
    TP = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A process group as the network sees it: how many ranks, and how many of them on each node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Nodes the group spans, the last of which may be partly filled."""
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the three axes; their product is the number of GPUs used.

    Raises UsageError for a size below 1.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.size(axis) < 1:
                raise UsageError(f"mesh: {axis} must be at least 1, got {self.size(axis)}")

    def size(self, axis: Axis) -> int:
        """Number of ranks along one axis."""
        return {Axis.REPLICATE: self.replicate, Axis.SHARD: self.shard, Axis.TP: self.tp}[axis]

    @property
    def num_gpus(self) -> int:
        """GPUs in the mesh."""
        return self.replicate * self.shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that read different data: replicate * shard."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which slice of the batch a global rank reads: ranks of one tp group read the same."""
        return rank // self.tp

    def group(self, axis: Axis, gpus_per_node: int) -> GroupShape:
        """The process groups of one axis on nodes of gpus_per_node GPUs; where these lie differently, the one of which
        some node has the fewest ranks: all of a group's data passes through that node's few ports."""
        stride = {Axis.TP: 1, Axis.SHARD: self.tp, Axis.REPLICATE: self.tp * self.shard}[axis]
        ranks = self.size(axis)
        num_blocks = self.num_gpus // (stride * ranks)
        return GroupShape(ranks=ranks, ranks_per_node=_fewest_on_a_node(ranks, stride, num_blocks, gpus_per_node))

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tp {self.tp}"


def _fewest_on_a_node(ranks: int, stride: int, num_blocks: int, gpus_per_node: int) -> int:
    """The fewest ranks that a group has on any node it touches, over `stride` groups in each of num_blocks blocks.

    Rank i of a group is GPU start + i * stride. Groups begin at each place in a node that a block's start leads to.
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
    """The fewest ranks on a node of one group, whose first rank is at `start` in its node; stride < gpus_per_node."""
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
    """Numbers of GPUs to use of so many: what divides a node, whole nodes, and all, ascending."""
    whole_nodes = range(gpus_per_node, gpus + 1, gpus_per_node)
    return tuple(sorted({n for n in (*divisors(gpus_per_node), *whole_nodes, gpus) if n <= gpus}))


def tp_degrees(gpus: int, gpus_per_node: int, *, across_nodes: bool) -> tuple[int, ...]:
    """Degrees of tensor parallelism that leave no node to several groups in part: divisors of a node and, across
    nodes, multiples of one; ascending."""
    return tuple(
        degree
        for degree in divisors(gpus)
        if gpus_per_node % degree == 0 or (across_nodes and degree % gpus_per_node == 0)
    )


def meshes(
    gpus: int, gpus_per_node: int, *, tp: int | None = None, fsdp: int | None = None, across_nodes: bool = False
) -> Iterator[Mesh]:
    """Every replicate x shard x tp factorization of gpus with tp of tp_degrees; tp and fsdp pin a degree.

    A pinned tp may be any divisor: the user asked for it. Raises IndivisibleError where a pinned degree does not
    divide.
    """
    for name, degree in (("tp", tp), ("fsdp", fsdp), ("tp * fsdp", (tp or 1) * (fsdp or 1))):
        if degree is not None and (degree < 1 or gpus % degree):
            raise IndivisibleError(f"{name} = {degree} does not divide {gpus} GPUs; degrees that do: {divisors(gpus)}")
    for tp_degree in (tp,) if tp else tp_degrees(gpus, gpus_per_node, across_nodes=across_nodes):
        for shard in (fsdp,) if fsdp else divisors(gpus // tp_degree):
            if (gpus // tp_degree) % shard == 0:
                yield Mesh(replicate=gpus // tp_degree // shard, shard=shard, tp=tp_degree)

"""Times collectives on every group that a mesh on these nodes can have, alone and beside a matmul.

Ranks are numbered node by node. A group inside a node is of neighbouring ranks; one across nodes takes every (ranks per
node / the group's ranks per node)-th rank, as a mesh with tp innermost does. All groups of one shape, which together
are all ranks, run at the same time, so that the times include what they share, such as a node's network port. The
collectives are the functional ones that an applied plan issues.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import numpy as np
import torch
import torch.distributed as dist

from tpplan.core.errors import UsageError
from tpplan.core.mesh import GroupShape, divisors
from tpplan.core.units import DTYPE_BYTES, MIB
from tpplan.machine.fit_tables import TIME_DIGITS, Array, collective_table, digits, relative_error
from tpplan.machine.profile import Collective
from tpplan.machine.tables import CollectiveTable, Overlap
from tpplan.measure.device import MEASURED, dtype_of
from tpplan.measure.timer import (
    LONGEST_WINDOW_S,
    WINDOWS_PER_POINT,
    Progress,
    Stopwatch,
    silent,
    slowest,
    synchronize,
)
from tpplan.torch_internals.operators import collectives

#: a size is left out only if time grows this many times towards it, or if measuring it would take more than so many
#: seconds; beyond its last size a table is extrapolated in proportion to bytes
VISIBLE_GROWTH, DEAR_S = 2.0, 2.0
#: a size that takes no more seconds than this is always measured
CHEAP_S = 0.5
OVERLAP_REPEATS = 3
#: windows' worth of time for one repeat of the overlap: the collectives alone, then slowed by matmuls beside them
WINDOWS_PER_OVERLAP = 4
#: fewest matmuls that must fit into a window of collectives
FEWEST_MATMULS = 5
#: sizes that keep a device and a link busy: M = N = K of the matmul, bytes of the all-reduce
OVERLAP_SIZES = {"cpu": (256, MIB), "cuda": (4096, 64 * MIB)}


def ranks_per_node() -> int:
    """Number of ranks on each node, as torchrun's variables say. Every rank of the default group must call this.

    Raises UsageError where torchrun's GROUP_RANK and LOCAL_WORLD_SIZE are not set, where nodes have different numbers
    of ranks, and where ranks are not numbered node by node.
    """
    told = os.environ.get("GROUP_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    by_rank: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(by_rank, told)
    unset = [rank for rank, pair in enumerate(by_rank) if None in pair]
    if unset:
        raise UsageError(
            f"GROUP_RANK and LOCAL_WORLD_SIZE are not set on ranks {', '.join(map(str, unset))}: start every rank with "
            "torchrun, which sets them"
        )
    nodes = [int(node or 0) for node, _ in by_rank]
    (per_node, *others) = sorted({int(size or 0) for _, size in by_rank})
    if others:
        raise UsageError(
            f"nodes have {' or '.join(map(str, (per_node, *others)))} ranks: start as many on each node, with the same "
            "torchrun --nproc-per-node N"
        )
    if nodes != [rank // per_node for rank in range(len(nodes))]:
        raise UsageError(
            f"ranks are on nodes {nodes}: expected them numbered node by node, {per_node} on each, as torchrun does"
        )
    return per_node


def group_shapes(world: int, ranks_per_node: int) -> tuple[GroupShape, ...]:
    """Shapes of the groups of more than one rank that a mesh can have, those inside a node first.

    >>> [str((shape.ranks, shape.ranks_per_node)) for shape in group_shapes(4, 2)]
    ['(2, 2)', '(2, 1)', '(4, 2)']
    """
    return tuple(
        GroupShape(ranks=nodes * per_node, ranks_per_node=per_node)
        for nodes in divisors(world // ranks_per_node)
        for per_node in divisors(ranks_per_node)
        if nodes * per_node > 1
    )


def group_members(shape: GroupShape, world: int, ranks_per_node: int) -> list[list[int]]:
    """The ranks of each group of this shape; together they are all ranks."""
    stride = max(1, ranks_per_node // shape.ranks_per_node) if shape.nodes > 1 else 1
    block = shape.ranks * stride
    return [list(range(base + i, base + block, stride)) for base in range(0, world, block) for i in range(stride)]


def measure_collectives(
    group_sizes: Sequence[int],
    sizes: Sequence[int],
    *,
    device: torch.device,
    ranks_per_node: int,
    budget_s: float,
    progress: Progress = silent,
) -> tuple[CollectiveTable, ...]:
    """Tables of all four collectives on groups of consecutive ranks. Every rank of the default group must call this.

    sizes: bytes of the whole value, rounded so that they divide among the ranks. Raises UsageError for a group size
    that does not divide the number of ranks, and where there is no process group.
    """
    if not dist.is_initialized():
        raise UsageError(
            "measure_collectives: there is no process group: start with torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group first"
        )
    world = dist.get_world_size()
    wrong = [ranks for ranks in group_sizes if ranks not in divisors(world)[1:]]
    if wrong:
        raise UsageError(
            f"measure_collectives: group sizes {wrong} do not divide a world of {world} ranks;"
            f" sizes that do: {list(divisors(world)[1:])}"
        )
    start = time.perf_counter()
    wanted = [
        (kind, GroupShape(ranks=ranks, ranks_per_node=min(ranks, ranks_per_node)))
        for ranks in group_sizes
        for kind in Collective
    ]
    groups = {shape: subgroup(shape, ranks_per_node) for shape in dict.fromkeys(shape for _, shape in wanted)}
    tables = []
    for done, (kind, shape) in enumerate(wanted):
        (spent_s,) = slowest(device, [time.perf_counter() - start])
        share_s = max(0.0, budget_s - spent_s) / (len(wanted) - done)
        tables.append(measure_collective(kind, shape, groups[shape], sizes, device=device, budget_s=share_s))
        progress("collectives", done + 1, len(wanted))
    return tuple(sorted(tables, key=lambda table: list(Collective).index(table.kind)))


def subgroup(shape: GroupShape, ranks_per_node: int) -> str:
    """Makes the groups of a shape; every rank must call this. Returns the name of this rank's group, which lives as
    long as the default group."""
    members = group_members(shape, dist.get_world_size(), ranks_per_node)
    group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]
    name: str = group.group_name
    return name


def measure_collective(
    kind: Collective,
    shape: GroupShape,
    group: str,
    sizes: Sequence[int],
    *,
    device: torch.device,
    budget_s: float,
) -> CollectiveTable:
    """The table of one collective on this rank's group, given by its shape and name. All ranks must call this.

    sizes: bytes of the whole value. The largest are left out where the budget is too short for them (_is_too_dear).
    """
    start = time.perf_counter()
    samples: dict[int, Array] = {}
    rounded = _divisible(sizes, shape.ranks)
    for done, num_bytes in enumerate(rounded):
        (spent_s,) = slowest(device, [time.perf_counter() - start])
        left_s = max(0.0, budget_s - spent_s)
        if done >= 2 and _is_too_dear(samples, rounded[done - 2 : done + 1], left_s):
            break
        window_s = min(left_s / (len(rounded) - done) / WINDOWS_PER_POINT, LONGEST_WINDOW_S)
        work = _collective(kind, device, num_bytes, shape.ranks, group)
        samples[num_bytes] = Stopwatch(device=device, window_s=window_s).samples(work)
    return collective_table(kind, shape, samples, MEASURED)


def _is_too_dear(samples: Mapping[int, Array], sizes: Sequence[int], left_s: float) -> bool:
    """True where the last of three sizes is to be left out, if time grows towards it as between the two before."""
    before, last, size = sizes
    before_s, last_s = (float(np.median(samples[measured])) for measured in (before, last))
    growth = min(max(1.0, last_s / before_s), size / last)
    cost_s = last_s * growth * WINDOWS_PER_POINT
    return cost_s > max(left_s, CHEAP_S) and (growth >= VISIBLE_GROWTH or cost_s > DEAR_S)


def _divisible(sizes: Sequence[int], ranks: int) -> list[int]:
    """Sizes in bytes rounded down to a multiple of ranks^2 float32 numbers, but not to zero: each rank's part must
    divide among the ranks once more, for the all-to-all."""
    block = DTYPE_BYTES["float32"] * ranks**2
    return sorted({max(1, size // block) * block for size in sizes})


def _collective(kind: Collective, device: torch.device, num_bytes: int, ranks: int, group: str) -> Callable[[], object]:
    """A function that runs the collective once on a whole value of num_bytes, and waits for the result."""
    ops = collectives()
    whole = torch.ones(num_bytes // DTYPE_BYTES["float32"], device=device)
    local = torch.ones(len(whole) // ranks, device=device)
    lengths = [len(local) // ranks] * ranks
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: ops.wait_tensor(ops.all_reduce(whole, "sum", group))
        case Collective.ALL_GATHER:
            return lambda: ops.wait_tensor(ops.all_gather_into_tensor(local, ranks, group))
        case Collective.REDUCE_SCATTER:
            return lambda: ops.wait_tensor(ops.reduce_scatter_tensor(whole, "sum", ranks, group))
        case Collective.ALL_TO_ALL:
            return lambda: ops.wait_tensor(ops.all_to_all_single(local, lengths, lengths, group))
        case _:
            assert_never(kind)


# --- beside a matmul -----------------------------------------------------------------------------------------------


def measure_overlap(
    device: torch.device, *, dtype: str, budget_s: float, sizes: tuple[int, int] | None = None
) -> Overlap:
    """How much matmuls, and all-reduces over all ranks, slow each other; measured in about budget_s seconds.

    sizes: M = N = K of the matmul, bytes of the all-reduce. Matmuls run one by one until a fixed number of all-reduces
    is done. Every rank of the default group must call this.
    """
    size, num_bytes = sizes or OVERLAP_SIZES[device.type]
    left, right = (torch.randn(size, size, dtype=dtype_of(dtype), device=device) for _ in range(2))
    gradients = torch.zeros(num_bytes // DTYPE_BYTES["float32"], device=device)

    def multiply() -> None:
        torch.matmul(left, right)
        synchronize(device)

    def reduce(calls: int) -> list[dist.Work]:
        under_way = (dist.all_reduce(gradients, async_op=True) for _ in range(calls))
        return [work for work in under_way if work is not None]

    window_s = min(budget_s / (WINDOWS_PER_OVERLAP * OVERLAP_REPEATS), LONGEST_WINDOW_S)
    stopwatch = Stopwatch(device=device, window_s=window_s / WINDOWS_PER_POINT)
    matmul_s = float(np.median(stopwatch.samples(multiply)))
    (reduce_s,) = slowest(device, [_until_done(device, reduce, 2, None)[0] / 2])
    calls = math.ceil(max(window_s, FEWEST_MATMULS * matmul_s) / reduce_s)
    alone = np.array(slowest(device, [_until_done(device, reduce, calls, None)[0] for _ in range(OVERLAP_REPEATS)]))
    together = [_until_done(device, reduce, calls, multiply) for _ in range(OVERLAP_REPEATS)]
    reductions = np.array(slowest(device, [elapsed for elapsed, _ in together])) / float(np.median(alone))
    matmuls = np.array(slowest(device, [elapsed / done for elapsed, done in together])) / matmul_s
    spread = np.concatenate([factors / np.median(factors) for factors in (matmuls, reductions)])
    return Overlap(
        matmul_slowdown=digits(max(0.0, float(np.median(matmuls)) - 1), TIME_DIGITS),
        collective_slowdown=digits(max(0.0, float(np.median(reductions)) - 1), TIME_DIGITS),
        relative_error=relative_error(spread),
        sources=MEASURED,
    )


def _until_done(
    device: torch.device,
    reduce: Callable[[int], Sequence[dist.Work]],
    calls: int,
    multiply: Callable[[], None] | None,
) -> tuple[float, int]:
    """(seconds from a common start until this rank's all-reduces are done, number of matmuls done meanwhile)."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    under_way, done = reduce(calls), 0
    while multiply is not None and not (done and under_way[-1].is_completed()):
        multiply()
        done += 1
    for work in under_way:
        work.wait()
    synchronize(device)
    return time.perf_counter() - start, done

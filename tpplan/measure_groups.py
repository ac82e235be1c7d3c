"""Collectives on every group that a mesh on these nodes can have, and what it costs to run them beside a matmul.

Ranks are numbered node by node. A group inside a node is of neighbours; one across nodes takes every (ranks per node /
its ranks per node)-th rank, as a mesh with tp innermost does. All like groups, which together are all ranks, run at the
same time: what they share, a node's network port too, is in the numbers. Collectives are the functional ones that an
applied plan issues.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

import numpy as np
import torch
import torch.distributed as dist

from tpplan.errors import UsageError
from tpplan.fit import TIME_DIGITS, Array, collective_table, digits, relative_error
from tpplan.machine import dtype_of
from tpplan.mesh import GroupShape, divisors
from tpplan.profile import Collective
from tpplan.profile_tables import CollectiveTable, Overlap
from tpplan.stopwatch import (
    LONGEST_WINDOW_S,
    WINDOWS_PER_POINT,
    Progress,
    Stopwatch,
    silent,
    slowest,
    synchronize,
)
from tpplan.units import DTYPE_BYTES, MIB

#: what a table tells nothing about is predicted in proportion to its last size: that must have been seen to take this
#: many times as long as the one before, or else cost this many seconds, before sizes are left out
VISIBLE_GROWTH, DEAR_S = 2.0, 2.0
#: what runs beside what is timed lasts so many times as long, alone: neither may be slowed by more and be seen so
LOAD_WINDOWS = 3
OVERLAP_REPEATS = 3
#: windows of an overlap's repeat: two alone, two with a load, which stretches both
WINDOWS_PER_OVERLAP = 2 + 2 * 2 * LOAD_WINDOWS
#: large enough to keep a device and a link busy: M = N = K of the matmul, bytes of the whole value that is gathered
OVERLAP_SIZES = {"cpu": (256, MIB), "cuda": (4096, 64 * MIB)}


def ranks_per_node() -> int:
    """Ranks of a node, as torchrun tells them. Every rank of the default group must call this.

    Raises UsageError where torchrun's GROUP_RANK and LOCAL_WORLD_SIZE are not set, where nodes have different numbers
    of ranks, and where ranks are not numbered node by node.
    """
    told = os.environ.get("GROUP_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    by_rank: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(by_rank, told)
    if any(None in pair for pair in by_rank):
        raise UsageError("no GROUP_RANK and LOCAL_WORLD_SIZE on every rank: start with torchrun --nproc-per-node 4")
    nodes = [int(node or 0) for node, _ in by_rank]
    (per_node, *others) = sorted({int(size or 0) for _, size in by_rank})
    if others:
        raise UsageError(f"nodes have {[per_node, *others]} ranks: expected as many on each")
    if nodes != [rank // per_node for rank in range(len(nodes))]:
        raise UsageError(f"ranks are on nodes {nodes}: expected them node by node, {per_node} on each")
    return per_node


def group_shapes(world: int, ranks_per_node: int) -> tuple[GroupShape, ...]:
    """Groups of more than one rank that a mesh of divisors can have, inside a node first.

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
    """All four collectives on consecutive ranks of the default group, whose every rank must call this.

    sizes are bytes of the whole value, rounded to what divides among the ranks. Needs a process group. Raises
    UsageError for a group size that does not divide the world, and where nothing was initialised.
    """
    if not dist.is_initialized():
        raise UsageError("measure_collectives: no process group; start with torchrun --nproc-per-node 4")
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
    """Name of this rank's group of a shape; every rank must call this. torch keeps it until the default one is gone."""
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
    """The table of one collective on this rank's group of a shape, whose name is given; all ranks must call this.

    The largest sizes are left out where the budget is too short for them and time was seen to grow with bytes.
    """
    start = time.perf_counter()
    samples: dict[int, Array] = {}
    rounded = _divisible(sizes, shape.ranks)
    for done, num_bytes in enumerate(rounded):
        (spent_s,) = slowest(device, [time.perf_counter() - start])
        left_s = max(0.0, budget_s - spent_s)
        before = [float(np.median(samples[size])) for size in rounded[:done][-2:]]
        if len(before) == 2 and _is_too_dear(before[0], before[1], left_s):
            break
        window_s = min(left_s / (len(rounded) - done) / WINDOWS_PER_POINT, LONGEST_WINDOW_S)
        work = _collective(kind, device, num_bytes, shape.ranks, group)
        samples[num_bytes] = Stopwatch(device=device, window_s=window_s).samples(work)
    return collective_table(kind, shape, samples, ("measured",))


def _is_too_dear(before_s: float, last_s: float, left_s: float) -> bool:
    """Whether the next size, if it takes longer than the last as that did than the one before, is left out."""
    growth = max(1.0, last_s / before_s)
    cost_s = last_s * growth * WINDOWS_PER_POINT
    return cost_s > left_s and (growth >= VISIBLE_GROWTH or cost_s > DEAR_S)


def _divisible(sizes: Sequence[int], ranks: int) -> list[int]:
    """Sizes rounded down, but not to zero, to ranks^2 numbers: all-to-all splits a rank's share once more."""
    block = DTYPE_BYTES["float32"] * ranks**2
    return sorted({max(1, size // block) * block for size in sizes})


def _collective(kind: Collective, device: torch.device, num_bytes: int, ranks: int, group: str) -> Callable[[], object]:
    """One call on n = num_bytes of the whole value, waited for, with its result in a new tensor."""
    ops = torch.ops._c10d_functional
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
    """How much a matmul and an all-gather over all ranks slow each other, in about budget_s seconds.

    sizes: M = N = K, and the bytes of the whole value. What is timed runs beside a load that is made to outlast it.
    Every rank of the default group must call this.
    """
    size, num_bytes = sizes or OVERLAP_SIZES[device.type]
    left, right = (torch.rand(size, size, device=device).to(dtype_of(dtype)) for _ in range(2))
    world = dist.get_world_size()
    whole_bytes = _divisible([num_bytes], world)[0]
    everyone = subgroup(GroupShape(ranks=world, ranks_per_node=world), world)
    gather = _collective(Collective.ALL_GATHER, device, whole_bytes, world, everyone)

    def multiply() -> object:
        return left @ right

    window_s = budget_s / (WINDOWS_PER_OVERLAP * OVERLAP_REPEATS)
    once = Stopwatch(device=device, window_s=min(window_s, LONGEST_WINDOW_S), repeats=OVERLAP_REPEATS)
    multiply_s, gather_s = (float(np.median(once.samples(work))) for work in (multiply, gather))
    window_s = max(window_s, multiply_s, gather_s)
    calls = {multiply: round(window_s / multiply_s), gather: round(window_s / gather_s)}

    def slowdown(work: Callable[[], object], load: Callable[[], object]) -> Array:
        alone = [_timed_beside(device, work, calls[work], nothing, 0) for _ in range(OVERLAP_REPEATS)]
        beside = [
            _timed_beside(device, work, calls[work], load, LOAD_WINDOWS * calls[load]) for _ in range(OVERLAP_REPEATS)
        ]
        return np.array(slowest(device, beside)) / float(np.median(slowest(device, alone)))

    factors = slowdown(multiply, gather), slowdown(gather, multiply)
    middle = [float(np.median(factor)) for factor in factors]
    return Overlap(
        matmul_slowdown=digits(max(0.0, middle[0] - 1), TIME_DIGITS),
        collective_slowdown=digits(max(0.0, middle[1] - 1), TIME_DIGITS),
        relative_error=relative_error(np.concatenate([f / m for f, m in zip(factors, middle, strict=True)])),
        sources=("measured",),
    )


def nothing() -> None:
    """No load."""


def _timed_beside(
    device: torch.device, work: Callable[[], object], calls: int, load: Callable[[], object], load_calls: int
) -> float:
    """Seconds of the calls on this rank from a common start, while a thread runs the load on a stream of its own."""
    dist.barrier()
    synchronize(device)
    started = threading.Event()

    def run_load() -> None:
        with _own_stream(device):
            started.set()
            for _ in range(load_calls):
                load()
            synchronize(device)

    thread = threading.Thread(target=run_load)
    thread.start()
    started.wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    elapsed = time.perf_counter() - start
    thread.join()
    return elapsed


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A new stream as the current one of this thread; nothing on a CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

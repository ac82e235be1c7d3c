"""Benchmarks of one device -> the tables of a HardwareProfile, and the profile of all tables.

Every rank of the default process group, where there is one, does the same work at the same time, and a repeat takes as
long as its slowest rank takes: what ranks of one machine share (cores, memory bandwidth, links) is in the numbers.
A repeat is a window of many calls in a row, long against a scheduler's time slice, so that a core shared by two ranks
counts as half a core for small kernels too. Medians of repeats after a warm-up become the tables, made monotone as
tpplan.machine.fit_tables says; the spread of the repeats becomes the error bars, and marks the points that are noisy.

Kernels find their operands as in a model: one was just made, and is in the caches that hold it, the other was last read
long ago. Results live on for a while, so that each is allocated elsewhere. Operands are random: a GPU is faster, and
draws less power, on numbers that are all alike.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.core.errors import UsageError
from tpplan.core.units import DTYPE_BYTES, KIB, MIB
from tpplan.machine.fit_tables import (
    TIME_DIGITS,
    UNKNOWN_RELATIVE_ERROR,
    Array,
    digits,
    group_extrapolation,
    matmul_table,
    memory_bound_table,
)
from tpplan.machine.profile import SCHEMA_VERSION, HardwareProfile
from tpplan.machine.tables import (
    AttentionRate,
    AttentionTable,
    Bandwidth,
    CollectiveTable,
    GroupExtrapolation,
    Launch,
    MatmulTable,
    MemoryBoundTable,
    OptimizerIssue,
    Overlap,
    Source,
)
from tpplan.measure.attention import AttentionShape, measure_attention
from tpplan.measure.collectives import measure_collectives
from tpplan.measure.device import MEASURED, device_name, dtype_name, dtype_of, memory, software
from tpplan.measure.launch import measure_launch
from tpplan.measure.optimizer_step import measure_optimizers
from tpplan.measure.timer import (
    LARGEST_PART,
    NUM_REPEATS,
    PROBE_REPEATS,
    SHORTEST_USEFUL_WINDOW_S,
    WINDOWS_BESIDE,
    Progress,
    Stopwatch,
    in_rounds,
    in_turn,
    overhead_s,
    silent,
)

__all__ = [
    "AttentionShape",
    "ComputeGrid",
    "ComputeTables",
    "default_grid",
    "make_profile",
    "measure_attention",
    "measure_collectives",
    "measure_compute",
    "measure_launch",
    "measure_matmuls",
    "measure_memory_bound",
    "measure_optimizers",
]

#: from what a cache holds to what none does; on a CPU below 32 MiB, from where on glibc returns memory to the system
#: each time, and page faults, not copies, are measured
GPU_COPIED_KIB, CPU_COPIED_KIB = tuple(4**i for i in range(3, 11)), tuple(4**i for i in range(1, 8))
#: token counts, and widths of models whole and split by up to 8: 14336 / 8 = 1792, 28672 / 8 = 3584
GPU_MATMUL_SIZES = (64, 128, 256, 512, 1024, 1792, 3584, 4096, 8192, 14336, 16384, 28672)
CPU_MATMUL_SIZES = tuple(2**i for i in range(4, 11))
#: batched products of larger matrices fill a device as one does
LARGEST_BATCHED = {"cpu": 256, "cuda": 1024}
#: fewest sizes per axis that a matmul table is thinned to; three of them give an interpolation error
FEWEST_MATMUL_SIZES = 4
#: how the operands of x w^T, dy w and dy^T x lie, rows first: whether the left and whether the right is transposed
MATMUL_FORMS = ((False, True), (False, False), (True, False))
MATMUL_REPEATS = 3
#: more than the last cache of a device holds: a CPU's core has a few MiB of it, a GPU up to 126 MiB (B200)
COLD_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
#: so many operands that lie apart, and results that live on, are enough: small ones stay in caches in a model too
MOST_APART = 256
#: of the time for compute; matmuls have the rest
LAUNCH_SHARE, OPTIMIZER_SHARE, MEMORY_BOUND_SHARE, ATTENTION_SHARE = 0.02, 0.03, 0.05, 0.13
MATMUL_SHARE = 1 - LAUNCH_SHARE - OPTIMIZER_SHARE - MEMORY_BOUND_SHARE - ATTENTION_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeGrid:
    """Which points to measure: sizes ascend and serve M, N and K; bytes are those of the tensor that is copied.

    Batches above 1 are measured where no size exceeds largest_batched, and elsewhere are as many single products. The
    attention shapes of one mask make a table where they are all combinations of batch * heads, sequence and head_dim.
    """

    matmul_batches: tuple[int, ...]
    matmul_sizes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    attention: tuple[AttentionShape, ...]
    largest_batched: int | None = None


def default_grid(device_type: str) -> ComputeGrid:
    """What training at tp 1 to 8 asks of a GPU: products to 28,672, attention to 16,384. A CPU's core: 1,024, 512."""
    on_gpu = device_type == "cuda"
    heads: tuple[int, ...] = (4, 16, 64) if on_gpu else (4, 16)
    sequences = tuple(2**i for i in (range(9, 15) if on_gpu else range(6, 10)))
    head_dims = (64, 128) if on_gpu else (32, 64)
    return ComputeGrid(
        matmul_batches=(1, 4),
        matmul_sizes=GPU_MATMUL_SIZES if on_gpu else CPU_MATMUL_SIZES,
        copied_bytes=tuple(size * KIB for size in (GPU_COPIED_KIB if on_gpu else CPU_COPIED_KIB)),
        attention=tuple(
            AttentionShape(batch=1, heads=num_heads, sequence=sequence, head_dim=head_dim, causal=causal)
            for causal, num_heads, sequence, head_dim in product((False, True), heads, sequences, head_dims)
        ),
        largest_batched=LARGEST_BATCHED["cuda" if on_gpu else "cpu"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTables:
    """What one device does alone; the parts of a profile under the same names."""

    bandwidth: Bandwidth
    launch: Launch
    optimizer_issues: tuple[OptimizerIssue, ...]
    memory_bound_table: MemoryBoundTable
    matmuls: tuple[MatmulTable, ...]
    attention_rates: tuple[AttentionRate, ...]
    attention_tables: tuple[AttentionTable, ...]


def measure_compute(
    device: torch.device,
    *,
    dtypes: Sequence[str],
    budget_s: float,
    grid: ComputeGrid | None = None,
    progress: Progress = silent,
) -> ComputeTables:
    """Launch cost, optimizers', memory-bound, attention and matmul times of a device, in about budget_s seconds.

    dtypes are torch's names. With little time the largest sizes of matmuls and attention are left out, if they would
    take most of it, and matmul sizes between others. Every rank of the default group, if any, must call this. Raises
    UsageError for an unknown dtype.
    """
    if not dtypes or budget_s <= 0:
        raise UsageError(f"measure_compute: expected dtypes and a budget, got {list(dtypes)} and {budget_s} s")
    torch_dtypes = [dtype_of(name) for name in dtypes]
    grid = grid or default_grid(device.type)
    share_s = budget_s / len(dtypes)
    launch = measure_launch(device, LAUNCH_SHARE * budget_s)
    bandwidth, memory_bound = measure_memory_bound(device, grid.copied_bytes, MEMORY_BOUND_SHARE * budget_s, progress)
    attention = [
        measure_attention(device, dtype, grid.attention, ATTENTION_SHARE * share_s, launch.launch_s, progress)
        for dtype in torch_dtypes
    ]
    return ComputeTables(
        launch=launch,
        optimizer_issues=measure_optimizers(device, OPTIMIZER_SHARE * budget_s),
        bandwidth=bandwidth,
        memory_bound_table=memory_bound,
        attention_rates=tuple(rate for rate, _ in attention),
        attention_tables=tuple(table for _, tables in attention for table in tables),
        matmuls=tuple(
            measure_matmuls(device, dtype, grid, MATMUL_SHARE * share_s, launch.launch_s, progress)
            for dtype in torch_dtypes
        ),
    )


# --- memory ---------------------------------------------------------------------------------------------


def measure_memory_bound(
    device: torch.device, copied_bytes: Sequence[int], budget_s: float, progress: Progress = silent
) -> tuple[Bandwidth, MemoryBoundTable]:
    """Copies into new tensors, and sums of two tensors into a third, that read and write as many bytes.

    What is copied, and one of the two that are added, was last read long ago. The bandwidth is that of the largest.
    """
    width = DTYPE_BYTES["float32"]
    pool = torch.rand(max(COLD_BYTES[device.type], *copied_bytes) // width, device=device)
    left = torch.rand(max(copied_bytes) // width, device=device)

    def make(point: tuple[int, int]) -> Callable[[], Tensor]:
        # As many bytes in all: a copy moves two tensors, a sum three.
        size, num_tensors = point
        numbers = 2 * size // num_tensors // width
        cold = _apart(pool, numbers)
        is_copy = num_tensors == 2
        works = [right.clone if is_copy else partial(torch.add, left[:numbers], right) for right in cold]
        return in_turn(works, kept=len(works))

    samples = in_rounds(device, list(product(copied_bytes, (2, 3))), make, "memory", budget_s, progress)
    kinds = {2 * size: np.stack([samples[size, num_tensors] for num_tensors in (2, 3)]) for size in copied_bytes}
    table = memory_bound_table(kinds, MEASURED)
    bandwidth = Bandwidth(
        hbm_bytes_per_s=digits(table.bytes[-1] / table.time_s[-1], TIME_DIGITS),
        relative_error=table.relative_error[-1],
        sources=MEASURED,
    )
    return bandwidth, table


# --- matmuls -------------------------------------------------------------------------------------------------------


def measure_matmuls(
    device: torch.device,
    dtype: torch.dtype,
    grid: ComputeGrid,
    budget_s: float,
    launch_s: float,
    progress: Progress = silent,
) -> MatmulTable:
    """(m, k) @ (k, n) in the forms of MATMUL_FORMS, batched where the batch is above one, over the grid."""
    batches, largest = grid.matmul_batches, grid.largest_batched or grid.matmul_sizes[-1]
    windows = len(MATMUL_FORMS) * (MATMUL_REPEATS + WINDOWS_BESIDE)
    sizes = _affordable_sizes(device, dtype, grid.matmul_sizes, LARGEST_PART * budget_s / windows)
    most_points = budget_s / windows / (SHORTEST_USEFUL_WINDOW_S[device.type] + overhead_s(device))
    sizes = _thinned(sizes, lambda sizes: sum(1 for _ in _measured_points(batches, sizes, largest)) <= most_points)
    measured = list(_measured_points(batches, sizes, largest))
    operands = _Operands.of(device, dtype, max(math.prod(point) // min(point[1:]) for point in measured))

    def make(point: tuple[tuple[int, int, int, int], tuple[bool, bool]]) -> Callable[[], Tensor]:
        return operands.product(*point)

    points, section = list(product(measured, MATMUL_FORMS)), f"matmul {dtype_name(dtype)}"
    by_form = in_rounds(device, points, make, section, budget_s, progress, repeats=MATMUL_REPEATS)
    samples: dict[tuple[int, ...], list[Array]] = {
        point: [by_form[point, form] for form in MATMUL_FORMS] for point in measured
    }
    axes = (batches, sizes, sizes, sizes)
    table = np.stack([_of_batch(samples, point, batches[0]) for point in product(*axes)])
    table = table.reshape(*(len(axis) for axis in axes), len(MATMUL_FORMS), MATMUL_REPEATS)
    how = f"batches above {batches[0]} with a size above {largest}: so many times the time of batch {batches[0]}"
    return matmul_table(
        dtype_name(dtype), axes, table, launch_s, MEASURED, how if len(samples) < math.prod(table.shape[:4]) else None
    )


def _measured_points(
    batches: Sequence[int], sizes: Sequence[int], largest_batched: int
) -> Iterator[tuple[int, int, int, int]]:
    """(batch, m, n, k): all of the smallest batch, and of the others what is small."""
    for batch, m, n, k in product(batches, sizes, sizes, sizes):
        if batch == batches[0] or max(m, n, k) <= largest_batched:
            yield batch, m, n, k


def _of_batch(samples: Mapping[tuple[int, ...], list[Array]], point: tuple[int, ...], smallest: int) -> Array:
    """Samples (form, repeat) of a point; of a batch that was not measured those of the smallest, as often."""
    if point in samples:
        return np.stack(samples[point])
    return np.stack(samples[(smallest, *point[1:])]) * (point[0] / smallest)


def _affordable_sizes(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], budget_s: float
) -> tuple[int, ...]:
    """The largest left out until a call of every product fits the budget, by the rate of one of middling size."""
    middle = sizes[len(sizes) // 2]
    work = _Operands.of(device, dtype, middle**2).product((1, middle, middle, middle), MATMUL_FORMS[0])
    window_s = SHORTEST_USEFUL_WINDOW_S[device.type]
    (seconds,) = Stopwatch(device=device, window_s=window_s, repeats=PROBE_REPEATS).samples(work)
    while len(sizes) > FEWEST_MATMUL_SIZES and sum(sizes) ** 3 / middle**3 * seconds > budget_s:
        sizes = sizes[:-1]
    return sizes


def _thinned(sizes: tuple[int, ...], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Fewer sizes, as evenly apart as they can be, the first and the last kept, until they fit or few are left."""
    all_of_them = sizes
    while not fits(sizes) and len(sizes) > FEWEST_MATMUL_SIZES:
        count = len(sizes) - 1
        sizes = tuple(all_of_them[round(i * (len(all_of_them) - 1) / (count - 1))] for i in range(count))
    return sizes


@dataclass(frozen=True, slots=True)
class _Operands:
    """Random numbers that the operands of all products are views of.

    What a layer multiplies from the left, its input or a gradient, was just made. What it multiplies with, a weight or
    an earlier input, was last read long ago: right operands lie apart, over more than a cache holds.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, numbers: int) -> "_Operands":
        apart = max(numbers, COLD_BYTES[device.type] // dtype.itemsize)
        return cls(*(torch.randn(count, dtype=dtype, device=device) for count in (numbers, apart)))

    def product(self, point: tuple[int, int, int, int], form: tuple[bool, bool]) -> Callable[[], Tensor]:
        """mm where there is one matrix, as linear layers issue it, else bmm; operands lie as the form says."""
        batch, m, n, k = point
        left = _matrices(self.left, batch, m, k, form[0])
        works = [
            partial(torch.matmul, left, _matrices(right, batch, k, n, form[1]))
            for right in _apart(self.right, batch * k * n)
        ]
        kept = COLD_BYTES[left.device.type] // (batch * m * n * left.dtype.itemsize)
        return in_turn(works, kept=min(max(1, kept), MOST_APART))


def _apart(pool: Tensor, numbers: int) -> list[Tensor]:
    """Slices of so many numbers each, one behind the other."""
    return [pool[i * numbers : (i + 1) * numbers] for i in range(min(MOST_APART, len(pool) // numbers))]


def _matrices(numbers: Tensor, batch: int, rows: int, columns: int, transposed: bool) -> Tensor:
    """A view [batch, rows, columns], without the batch where it is 1, contiguous or the transpose of what is."""
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    matrices = numbers[: math.prod(shape)].view(shape if batch > 1 else shape[1:])
    return matrices.mT if transposed else matrices


# --- the profile ---------------------------------------------------------------------------------------------------


def make_profile(
    *,
    name: str,
    device: torch.device,
    compute: ComputeTables,
    collectives: tuple[CollectiveTable, ...],
    gpus_per_node: int,
    overlap: Overlap | None = None,
    notes: Sequence[str] = (),
) -> HardwareProfile:
    """The profile of what was measured, on this machine, today; gpus_per_node is the number of ranks per machine."""
    description = device_name(device)
    today = datetime.now(UTC).date()
    profile = HardwareProfile(
        schema_version=SCHEMA_VERSION,
        name=name,
        device=description,
        device_type=device.type,
        gpus_per_node=gpus_per_node,
        notes=(*_notes(device, gpus_per_node), *notes),
        sources=(
            Source(
                id="measured",
                licence="own measurement",
                source=f"tpplan profile, {today.isoformat()}, {description}",
            ),
        ),
        memory=memory(device, gpus_per_node),
        bandwidth=compute.bandwidth,
        launch=compute.launch,
        matmuls=compute.matmuls,
        attention_rates=compute.attention_rates,
        group_extrapolation=GroupExtrapolation(
            in_node_relative_error=UNKNOWN_RELATIVE_ERROR, across_nodes_relative_error=UNKNOWN_RELATIVE_ERROR
        ),
        collectives=collectives,
        software=software(device),
        date=today,
        attention_tables=compute.attention_tables or None,
        memory_bound_table=compute.memory_bound_table,
        optimizer_issues=compute.optimizer_issues,
        overlap=overlap,
    )
    return dataclasses.replace(profile, group_extrapolation=group_extrapolation(profile))


def _notes(device: torch.device, ranks_per_machine: int) -> Iterator[str]:
    """What a reader of the file must know of how it was made."""
    if dist.is_initialized():
        yield (
            f"all {dist.get_world_size()} ranks did the same work at the same time and the slowest counts: what"
            f" {ranks_per_machine} ranks of a machine share is in the numbers; collectives, on {dist.get_backend()},"
            " ran in all groups at once"
        )
    if device.type == "cuda":
        yield f"float32 matmuls: {torch.get_float32_matmul_precision()}"
    else:
        yield f"{torch.get_num_threads()} thread(s) per rank, {os.cpu_count()} cores"
    yield (
        f"medians of {NUM_REPEATS} windows of many calls after a warm-up; matmuls: the mean of forward and both"
        f" gradients' operand layouts, {MATMUL_REPEATS} windows each; collectives: bytes of the whole value"
    )

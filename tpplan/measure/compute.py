"""Benchmarks one device into the tables of a HardwareProfile, and puts the profile together.

Every rank of the default process group, where there is one, does the same work at the same time, and a repeat takes as
long as on its slowest rank: the times include what ranks of one machine share (cores, memory bandwidth, links). A
repeat is a window of many calls in a row, much longer than a scheduler's time slice, so that a core shared by two ranks
counts as half a core for small kernels too. The tables are medians of repeats after a warm-up, made monotone as in
tpplan.machine.fit_tables; the spread of the repeats gives the error bars, and marks noisy points.

Kernels find their operands as in a model: one was just made, and is in the caches that hold it; the other was last read
long ago. Results are kept for a while, so that each is allocated elsewhere. Operands are random, as a GPU is faster,
and draws less power, on numbers that are all equal."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.core.errors import UsageError
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.fit_tables import (
    TIME_DIGITS,
    UNKNOWN_RELATIVE_ERROR,
    digits,
    group_extrapolation,
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
    MisalignedMatmuls,
    OptimizerIssue,
    Overlap,
    Source,
)
from tpplan.measure.attention import measure_attention
from tpplan.measure.device import MEASURED, device_name, dtype_of, memory, software
from tpplan.measure.grid import ComputeGrid, default_grid
from tpplan.measure.launch import measure_launch
from tpplan.measure.matmuls import MATMUL_REPEATS, measure_matmuls
from tpplan.measure.misaligned import measure_misaligned
from tpplan.measure.optimizer_step import measure_optimizers
from tpplan.measure.timer import COLD_BYTES, NUM_REPEATS, Progress, apart, in_rounds, in_turn, silent

#: shares of the time for compute; matmuls have the rest
LAUNCH_SHARE, OPTIMIZER_SHARE, MEMORY_BOUND_SHARE, ATTENTION_SHARE, MISALIGNED_SHARE = 0.02, 0.03, 0.05, 0.13, 0.02
MATMUL_SHARE = 1 - LAUNCH_SHARE - OPTIMIZER_SHARE - MEMORY_BOUND_SHARE - ATTENTION_SHARE - MISALIGNED_SHARE
#: devices whose kernels go by where rows begin
ALIGNED_DEVICES = ("cuda",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTables:
    """The tables of one device without collectives, under the names that they have in a profile."""

    bandwidth: Bandwidth
    launch: Launch
    optimizer_issues: tuple[OptimizerIssue, ...]
    memory_bound_table: MemoryBoundTable
    matmuls: tuple[MatmulTable, ...]
    attention_rates: tuple[AttentionRate, ...]
    attention_tables: tuple[AttentionTable, ...]
    misaligned_matmuls: tuple[MisalignedMatmuls, ...] = ()


def measure_compute(
    device: torch.device,
    *,
    dtypes: Sequence[str],
    budget_s: float,
    grid: ComputeGrid | None = None,
    progress: Progress = silent,
) -> ComputeTables:
    """Measures launches, optimizers, memory-bound kernels, attention and matmuls, in about budget_s seconds.

    dtypes: torch's names. Where the budget is short, the largest sizes of matmuls and attention are left out, and
    matmul sizes between others. Every rank of the default group, if any, must call this. Raises UsageError for an
    unknown dtype.
    """
    if not dtypes or budget_s <= 0:
        raise UsageError(
            f"measure_compute: expected one dtype or more and a budget above 0 s, got {list(dtypes)} and {budget_s} s"
        )
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
        misaligned_matmuls=tuple(
            entry
            for dtype in (torch_dtypes if device.type in ALIGNED_DEVICES else ())
            for entry in measure_misaligned(device, dtype, grid, MISALIGNED_SHARE * share_s, progress)
        ),
    )


# --- memory ---------------------------------------------------------------------------------------------


def measure_memory_bound(
    device: torch.device, copied_bytes: Sequence[int], budget_s: float, progress: Progress = silent
) -> tuple[Bandwidth, MemoryBoundTable]:
    """Times copies into new tensors, and sums of two tensors into a third that read and write as many bytes in all.

    The copied tensor, and one of the two that are added, was last read long ago. The bandwidth is that of the largest
    size.
    """
    width = DTYPE_BYTES["float32"]
    pool = torch.rand(max(COLD_BYTES[device.type], *copied_bytes) // width, device=device)
    left = torch.rand(max(copied_bytes) // width, device=device)

    def make(point: tuple[int, int]) -> Callable[[], Tensor]:
        # A copy moves two tensors and a sum three, so those of a sum are smaller: both move equal bytes.
        size, num_tensors = point
        numbers = 2 * size // num_tensors // width
        cold = apart(pool, numbers)
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
    """The profile of this machine from measured tables, dated today. gpus_per_node: number of ranks per machine."""
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
        misaligned_matmuls=compute.misaligned_matmuls or None,
        optimizer_issues=compute.optimizer_issues,
        overlap=overlap,
    )
    return dataclasses.replace(profile, group_extrapolation=group_extrapolation(profile))


def _notes(device: torch.device, ranks_per_machine: int) -> Iterator[str]:
    """Yields notes for the profile's file on how it was measured."""
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

"""Benchmarks on this machine -> HardwareProfile.

Every rank of the default process group, where there is one, does the same work at the same time, and a repeat takes as
long as its slowest rank takes: what ranks of one machine share (cores, memory bandwidth, links) is in the numbers.
A repeat is a window of many calls in a row, long against a scheduler's time slice, so that a core shared by two ranks
counts as half a core for small kernels too. Medians of repeats after a warm-up become the tables, made monotone as
tpplan.fit says; the spread of the repeats becomes the error bars.

Kernels allocate their results and find their operands in the caches that hold them, as most do in a model. Collectives
are the functional ones that an applied plan issues; all groups of a size that partition the ranks run at once.
"""

import dataclasses
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import assert_never

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tpplan.errors import UsageError
from tpplan.fit import (
    TIME_DIGITS,
    UNKNOWN_RELATIVE_ERROR,
    Array,
    collective_table,
    digits,
    group_extrapolation,
    matmul_table,
    relative_error,
)
from tpplan.mesh import GroupShape, divisors
from tpplan.profile import SCHEMA_VERSION, Collective, HardwareProfile
from tpplan.profile_tables import (
    AttentionRate,
    Bandwidth,
    CollectiveTable,
    GroupExtrapolation,
    Launch,
    MatmulTable,
    Memory,
    Source,
)
from tpplan.stopwatch import (
    NUM_REPEATS,
    SHORTEST_USEFUL_WINDOW_S,
    WINDOWS_PER_POINT,
    Progress,
    Stopwatch,
    paced,
    silent,
)
from tpplan.units import DTYPE_BYTES, KIB

__all__ = [
    "AttentionShape",
    "ComputeGrid",
    "ComputeTables",
    "default_grid",
    "make_profile",
    "measure_collectives",
    "measure_compute",
]

SOURCES = ("measured",)
#: beyond a GPU's caches; on a CPU those of a small model's activations: from 32 MiB on glibc returns memory to the
#: system each time, and page faults, not copies, are measured
GPU_COPIED_KIB, CPU_COPIED_KIB = (64 * KIB, 256 * KIB, 1024 * KIB), (256, 1024, 4096, 16384)
#: fewest sizes per axis that a matmul table is thinned to; three of them give an interpolation error
FEWEST_MATMUL_SIZES = 4
#: of the time for compute; matmuls have the rest
LAUNCH_SHARE, BANDWIDTH_SHARE, ATTENTION_SHARE = 0.02, 0.05, 0.13
#: backward of flash attention recomputes the scores: 5 products against the forward's 2 [Dao 2023, section 3.1]
ATTENTION_BACKWARD_PRODUCTS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Query, key and value are each (batch, heads, sequence, head_dim)."""

    batch: int
    heads: int
    sequence: int
    head_dim: int
    causal: bool

    @property
    def forward_flop(self) -> float:
        """Executed FLOP of Q K^T and of the product with V; half of them where causal."""
        flop = 4.0 * self.batch * self.heads * self.sequence**2 * self.head_dim
        return flop / 2 if self.causal else flop


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeGrid:
    """Which points to measure: sizes ascend and serve M, N and K; bytes are those of the tensor that is copied."""

    matmul_batches: tuple[int, ...]
    matmul_sizes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    attention: tuple[AttentionShape, ...]


def default_grid(device_type: str) -> ComputeGrid:
    """Sizes that show a device's plateau: to 1,024 on a CPU's core, to 8,192 on a GPU."""
    on_gpu = device_type == "cuda"
    # (batch, heads, sequence, head_dim)
    shapes = [(2, 16, 1024, 64), (2, 16, 2048, 128), (1, 16, 4096, 128), (1, 16, 8192, 128)]
    if not on_gpu:
        shapes = [(8, 4, 128, 32), (4, 4, 128, 64), (1, 4, 256, 64), (1, 4, 512, 64)]
    return ComputeGrid(
        matmul_batches=(1, 4),
        matmul_sizes=tuple(2**i for i in (range(6, 14) if on_gpu else range(4, 11))),
        copied_bytes=tuple(size * KIB for size in (GPU_COPIED_KIB if on_gpu else CPU_COPIED_KIB)),
        attention=tuple(
            AttentionShape(batch=batch, heads=heads, sequence=sequence, head_dim=head_dim, causal=causal)
            for batch, heads, sequence, head_dim in shapes
            for causal in (False, True)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTables:
    """What one device does alone; the parts of a profile under the same names."""

    bandwidth: Bandwidth
    launch: Launch
    matmuls: tuple[MatmulTable, ...]
    attention_rates: tuple[AttentionRate, ...]


# --- compute -------------------------------------------------------------------------------------------------------


def measure_compute(
    device: torch.device,
    *,
    dtypes: Sequence[str],
    budget_s: float,
    grid: ComputeGrid | None = None,
    progress: Progress = silent,
) -> ComputeTables:
    """Launch cost, bandwidth, attention and matmul times of a device, in about budget_s seconds.

    dtypes are torch's names. With little time every other matmul size is left out; work whose single call outlasts its
    share takes longer. Every rank of the default group, if any, must call this. Raises UsageError for an unknown dtype.
    """
    if not dtypes or budget_s <= 0:
        raise UsageError(f"measure_compute: expected dtypes and a budget, got {list(dtypes)} and {budget_s} s")
    torch_dtypes = [_dtype(name) for name in dtypes]
    grid = grid or default_grid(device.type)
    matmul_share = 1 - LAUNCH_SHARE - BANDWIDTH_SHARE - ATTENTION_SHARE
    attention_budget_s = ATTENTION_SHARE * budget_s / len(dtypes)
    matmul_budget_s = matmul_share * budget_s / len(dtypes)
    launch = _launch(device, LAUNCH_SHARE * budget_s)
    return ComputeTables(
        launch=launch,
        bandwidth=_bandwidth(device, grid.copied_bytes, BANDWIDTH_SHARE * budget_s, progress),
        attention_rates=tuple(
            _attention_rate(device, dtype, grid.attention, attention_budget_s, progress) for dtype in torch_dtypes
        ),
        matmuls=tuple(
            _matmul_table(device, dtype, grid, matmul_budget_s, launch.launch_s, progress) for dtype in torch_dtypes
        ),
    )


def _launch(device: torch.device, budget_s: float) -> Launch:
    """The smallest kernel: one number plus itself."""
    number = torch.ones(1, device=device)
    stopwatch = Stopwatch(device=device, window_s=budget_s / WINDOWS_PER_POINT)
    samples = stopwatch.samples(lambda: number + number)
    launch_s = float(np.median(samples))
    return Launch(
        launch_s=digits(launch_s, TIME_DIGITS), relative_error=relative_error(samples / launch_s), sources=SOURCES
    )


def _bandwidth(device: torch.device, sizes: Sequence[int], budget_s: float, progress: Progress) -> Bandwidth:
    """Median rate of copies into new tensors, read plus written; the spread is that between the sizes too."""
    rates = []
    for num_bytes, stopwatch in paced(device, sizes, "bandwidth", budget_s, progress):
        tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        rates.append(2 * num_bytes / stopwatch.samples(tensor.clone))
    median = float(np.median([np.median(rate) for rate in rates]))
    return Bandwidth(
        hbm_bytes_per_s=digits(median, TIME_DIGITS),
        relative_error=relative_error(np.concatenate(rates) / median),
        sources=SOURCES,
    )


def _matmul_table(
    device: torch.device, dtype: torch.dtype, grid: ComputeGrid, budget_s: float, launch_s: float, progress: Progress
) -> MatmulTable:
    """(m, k) @ (k, n), batched where the batch is above one, over the grid."""
    batches = grid.matmul_batches
    sizes = _thinned(grid.matmul_sizes, len(batches), budget_s)
    axes = (batches, sizes, sizes, sizes)
    points = list(product(*axes))
    samples = []
    for (batch, m, n, k), stopwatch in paced(device, points, f"matmul {_name(dtype)}", budget_s, progress):
        samples.append(stopwatch.samples(_matmul(device, dtype, batch, m, n, k)))
    table = np.stack(samples).reshape(*(len(axis) for axis in axes), NUM_REPEATS)
    return matmul_table(_name(dtype), axes, table, launch_s, SOURCES)


def _matmul(device: torch.device, dtype: torch.dtype, batch: int, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """mm where there is one matrix, as linear layers issue it, else bmm."""
    leading = (batch,) if batch > 1 else ()
    left = torch.ones(*leading, m, k, dtype=dtype, device=device)
    right = torch.ones(*leading, k, n, dtype=dtype, device=device)
    return lambda: left @ right


def _thinned(sizes: tuple[int, ...], num_batches: int, budget_s: float) -> tuple[int, ...]:
    """Every other size left out, the largest kept, until windows are long enough or few sizes are left."""
    while (len(sizes) + 1) // 2 >= FEWEST_MATMUL_SIZES:
        points = num_batches * len(sizes) ** 3
        if points * WINDOWS_PER_POINT * SHORTEST_USEFUL_WINDOW_S <= budget_s:
            break
        sizes = sizes[::-1][::2][::-1]
    return sizes


def _attention_rate(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[AttentionShape],
    budget_s: float,
    progress: Progress,
) -> AttentionRate:
    """Median rates of the fused kernel over the shapes; the spread is that between the shapes too."""
    points = list(product((False, True), shapes))
    rates: dict[bool, list[Array]] = {False: [], True: []}
    for (is_backward, shape), stopwatch in paced(device, points, f"attention {_name(dtype)}", budget_s, progress):
        size = (shape.batch, shape.heads, shape.sequence, shape.head_dim)
        inputs = [torch.randn(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            work = (_attention_backward if is_backward else _attention)(inputs, shape.causal)
            flop = shape.forward_flop * (ATTENTION_BACKWARD_PRODUCTS if is_backward else 1.0)
            rates[is_backward].append(flop / stopwatch.samples(work))
    medians = {way: float(np.median(np.median(samples, axis=1))) for way, samples in rates.items()}
    return AttentionRate(
        dtype=_name(dtype),
        forward_flop_per_s=digits(medians[False], TIME_DIGITS),
        backward_flop_per_s=digits(medians[True], TIME_DIGITS),
        relative_error=relative_error(np.stack([np.stack(rates[way]) / medians[way] for way in rates])),
        sources=SOURCES,
    )


def _attention(inputs: Sequence[Tensor], causal: bool) -> Callable[[], object]:
    query, key, value = inputs
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal)


def _attention_backward(inputs: Sequence[Tensor], causal: bool) -> Callable[[], object]:
    query, key, value = inputs
    result = scaled_dot_product_attention(query, key, value, is_causal=causal)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


# --- collectives ---------------------------------------------------------------------------------------------------


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
    groups = {ranks: _subgroup(ranks) for ranks in group_sizes}
    points = [
        (kind, ranks, num_bytes)
        for kind, ranks in product(Collective, group_sizes)
        for num_bytes in _divisible(sizes, ranks)
    ]
    samples: dict[tuple[Collective, int], dict[int, Array]] = {}
    for (kind, ranks, num_bytes), stopwatch in paced(device, points, "collectives", budget_s, progress):
        work = _collective(kind, device, num_bytes, ranks, groups[ranks])
        samples.setdefault((kind, ranks), {})[num_bytes] = stopwatch.samples(work)
    return tuple(
        collective_table(kind, GroupShape(ranks=ranks, ranks_per_node=min(ranks, ranks_per_node)), by_size, SOURCES)
        for (kind, ranks), by_size in samples.items()
    )


def _subgroup(ranks: int) -> str:
    """Name of this rank's group of consecutive ranks. torch keeps the group until the default one is destroyed."""
    group, _ = dist.new_subgroups(ranks)  # type: ignore[no-untyped-call]
    name: str = group.group_name
    return name


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


# --- the profile ---------------------------------------------------------------------------------------------------


def make_profile(
    *,
    name: str,
    device: torch.device,
    compute: ComputeTables,
    collectives: tuple[CollectiveTable, ...],
    gpus_per_node: int,
    notes: Sequence[str] = (),
) -> HardwareProfile:
    """The profile of what was measured, on this machine, today; gpus_per_node is the number of ranks per machine."""
    description = _device_name(device)
    today = datetime.now(UTC).date().isoformat()
    profile = HardwareProfile(
        schema_version=SCHEMA_VERSION,
        name=name,
        device=description,
        device_type=device.type,
        gpus_per_node=gpus_per_node,
        notes=(*_notes(device, gpus_per_node), *notes),
        sources=(Source(id="measured", licence="own measurement", source=f"tpplan.measure, {today}, {description}"),),
        memory=_memory(device, gpus_per_node),
        bandwidth=compute.bandwidth,
        launch=compute.launch,
        matmuls=compute.matmuls,
        attention_rates=compute.attention_rates,
        group_extrapolation=GroupExtrapolation(
            in_node_relative_error=UNKNOWN_RELATIVE_ERROR, across_nodes_relative_error=UNKNOWN_RELATIVE_ERROR
        ),
        collectives=collectives,
    )
    return dataclasses.replace(profile, group_extrapolation=group_extrapolation(profile))


def _memory(device: torch.device, ranks_per_machine: int) -> Memory:
    """A GPU's memory, or a rank's part of the machine's; reserved is what is taken before there is a model."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = total - free - torch.cuda.memory_reserved(device)
        how = "reserved_bytes: context and communicators after the measurement; no allocator slack"
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_per_machine
        reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        how = "memory_bytes: the machine's, divided by its ranks; reserved_bytes: this process at its largest"
    return Memory(memory_bytes=total, reserved_bytes=reserved, sources=SOURCES, inferred=how)


def _notes(device: torch.device, ranks_per_machine: int) -> Iterator[str]:
    """What a reader of the file must know of how it was made."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if dist.is_initialized():
        versions += f", {dist.get_backend()}"
        yield (
            f"all {dist.get_world_size()} ranks did the same work at the same time and the slowest counts: what"
            f" {ranks_per_machine} ranks of a machine share is in the numbers; collectives ran in all groups at once"
        )
    if device.type == "cuda":
        yield f"{versions}, CUDA {torch.version.cuda}, float32 matmuls: {torch.get_float32_matmul_precision()}"
    else:
        yield f"{versions}, {torch.get_num_threads()} thread(s) per rank, {os.cpu_count()} cores"
    yield f"medians of {NUM_REPEATS} windows of many calls after a warm-up; collectives: bytes of the whole value"


def _device_name(device: torch.device) -> str:
    """The device as its vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name not in DTYPE_BYTES:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(DTYPE_BYTES)}")
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

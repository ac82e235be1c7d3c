"""The points at which a device is measured: sizes of matmuls, copied tensors and attention."""

from dataclasses import dataclass
from itertools import product

from tpplan.core.units import KIB
from tpplan.measure.attention import AttentionShape

#: sizes of copied tensors in KiB, from those that fit into a cache to those that fit into none; on a CPU below 32 MiB,
#: as glibc returns larger ones to the system each time, so that page faults would be measured
GPU_COPIED_KIB, CPU_COPIED_KIB = tuple(4**i for i in range(3, 11)), tuple(4**i for i in range(1, 8))
#: sizes of matmuls: token counts, and widths of models, whole and divided by up to 8 (14336 / 8 = 1792, 28672 / 8 =
#: 3584)
GPU_MATMUL_SIZES = (64, 128, 256, 512, 1024, 1792, 3584, 4096, 8192, 14336, 16384, 28672)
CPU_MATMUL_SIZES = tuple(2**i for i in range(4, 11))
#: largest matmul size that is measured batched, by device type: a single product of larger matrices fills a device
LARGEST_BATCHED = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeGrid:
    """The points to measure.

    matmul_batches, matmul_sizes: ascending; each size serves as M, N and K. Batches above the first are measured where
    no size exceeds largest_batched; elsewhere they count as so many products of the first batch.
    copied_bytes: bytes of the tensor that is copied.
    attention: the shapes of one mask make a table if they are all combinations of batch * heads, sequence and head_dim.
    """

    matmul_batches: tuple[int, ...]
    matmul_sizes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    attention: tuple[AttentionShape, ...]
    largest_batched: int | None = None


def default_grid(device_type: str) -> ComputeGrid:
    """The points that training at tp 1 to 8 needs: matmul sizes up to 28,672 and sequences up to 16,384 on a GPU, up to
    1,024 and 512 on a CPU."""
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

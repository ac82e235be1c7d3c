"""Times matmuls on matrices whose rows do not begin at multiples of 16 bytes, beside aligned ones."""

import math
from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tpplan.costs.runs.kernels import dtype_name
from tpplan.machine.fit_tables import LEAST_RELATIVE_ERROR, TIME_DIGITS, Array, digits
from tpplan.machine.tables import ALIGNED_BYTES, MISALIGNED_BYTES, MisalignedMatmuls
from tpplan.measure.device import MEASURED
from tpplan.measure.grid import ComputeGrid
from tpplan.measure.matmuls import MATMUL_FORMS, MATMUL_REPEATS, Operands
from tpplan.measure.timer import Progress, in_rounds, silent

#: the largest size of the products, and how much smaller those are that show the error
LARGEST, SMALLER = 8192, 4
#: (size, bytes that rows begin at multiples of, form)
Point = tuple[int, int, tuple[bool, bool]]


def measure_misaligned(
    device: torch.device, dtype: torch.dtype, grid: ComputeGrid, budget_s: float, progress: Progress = silent
) -> tuple[MisalignedMatmuls, ...]:
    """Times (m, k) @ (k, n) with n = k just above m, in the forms of MATMUL_FORMS, for each number of bytes that rows
    can begin at multiples of; () where every row is aligned."""
    large = max((size for size in grid.matmul_sizes if size <= LARGEST), default=grid.matmul_sizes[0])
    sizes = (large, max(1, large // SMALLER))
    misaligned = [count for count in MISALIGNED_BYTES if count >= dtype.itemsize]
    points = list(product(sizes, (ALIGNED_BYTES, *misaligned), MATMUL_FORMS))
    operands = Operands.of(device, dtype, (large + ALIGNED_BYTES) ** 2)

    def make(point: Point) -> Callable[[], Tensor]:
        size, count, form = point
        width = _width(size, count, dtype)
        return operands.product((1, size, width, width), form)

    section = f"misaligned matmul {dtype_name(dtype)}"
    samples = in_rounds(device, points, make, section, budget_s, progress, repeats=MATMUL_REPEATS)
    rates = {
        (size, count): 2.0 * size * _width(size, count, dtype) ** 2 / _seconds(samples, size, count)
        for size, count in product(sizes, (ALIGNED_BYTES, *misaligned))
    }
    return tuple(misaligned_matmuls(dtype_name(dtype), count, rates) for count in misaligned)


def _width(size: int, count: int, dtype: torch.dtype) -> int:
    """Elements of a row that follows another at a multiple of `count` bytes and of no more; about `size`."""
    return size if count == ALIGNED_BYTES else size + count // dtype.itemsize


def _seconds(samples: Mapping[Point, Array], size: int, count: int) -> float:
    return float(np.mean([np.median(samples[size, count, form]) for form in MATMUL_FORMS]))


def misaligned_matmuls(dtype: str, count: int, rates: Mapping[tuple[int, int], float]) -> MisalignedMatmuls:
    """The entry of rates in FLOP/s by (size, bytes), of two sizes: the larger's, and as error how far what a FLOP takes
    longer in the smaller is from that in the larger, in logarithms."""
    small, large = sorted({size for size, _ in rates})
    further = [1 / rates[size, count] - 1 / rates[size, ALIGNED_BYTES] for size in (small, large)]
    error = abs(math.log(further[0] / further[1])) if min(further) > 0 else 1.0
    return MisalignedMatmuls(
        dtype=dtype,
        bytes=count,
        flop_per_s=digits(rates[large, count], TIME_DIGITS),
        aligned_flop_per_s=digits(rates[large, ALIGNED_BYTES], TIME_DIGITS),
        relative_error=digits(max(LEAST_RELATIVE_ERROR, error), 2),
        sources=MEASURED,
    )

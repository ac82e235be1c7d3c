"""Times matmuls, plain and batched, in the operand layouts of a linear layer's forward and backward."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tpplan.costs.runs.kernels import dtype_name
from tpplan.machine.fit_tables import Array, matmul_table
from tpplan.machine.tables import MatmulTable
from tpplan.measure.device import MEASURED
from tpplan.measure.grid import ComputeGrid
from tpplan.measure.timer import (
    COLD_BYTES,
    LARGEST_PART,
    MOST_APART,
    PROBE_REPEATS,
    SHORTEST_USEFUL_WINDOW_S,
    WINDOWS_BESIDE,
    Progress,
    Stopwatch,
    apart,
    in_rounds,
    in_turn,
    overhead_s,
    silent,
)

#: fewest sizes per axis of a matmul table; with three or more, the interpolation error can be estimated
FEWEST_MATMUL_SIZES = 4
#: (is left transposed, is right transposed) for row-major operands of x w^T, dy w and dy^T x
MATMUL_FORMS = ((False, True), (False, False), (True, False))
MATMUL_REPEATS = 3


def measure_matmuls(
    device: torch.device,
    dtype: torch.dtype,
    grid: ComputeGrid,
    budget_s: float,
    launch_s: float,
    progress: Progress = silent,
) -> MatmulTable:
    """Times (m, k) @ (k, n), batched where the batch is above one, over the grid and in the forms of MATMUL_FORMS."""
    batches, largest = grid.matmul_batches, grid.largest_batched or grid.matmul_sizes[-1]
    windows = len(MATMUL_FORMS) * (MATMUL_REPEATS + WINDOWS_BESIDE)
    sizes = _affordable_sizes(device, dtype, grid.matmul_sizes, LARGEST_PART * budget_s / windows)
    most_points = budget_s / windows / (SHORTEST_USEFUL_WINDOW_S[device.type] + overhead_s(device))
    sizes = _thinned(sizes, lambda sizes: sum(1 for _ in _measured_points(batches, sizes, largest)) <= most_points)
    measured = list(_measured_points(batches, sizes, largest))
    operands = Operands.of(device, dtype, max(math.prod(point) // min(point[1:]) for point in measured))

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
    """Yields (batch, m, n, k): all sizes for the smallest batch, sizes up to largest_batched for the others."""
    for batch, m, n, k in product(batches, sizes, sizes, sizes):
        if batch == batches[0] or max(m, n, k) <= largest_batched:
            yield batch, m, n, k


def _of_batch(samples: Mapping[tuple[int, ...], list[Array]], point: tuple[int, ...], smallest: int) -> Array:
    """Samples [form, repeat] of a point; of a batch that was not measured, the smallest batch's times the ratio."""
    if point in samples:
        return np.stack(samples[point])
    return np.stack(samples[(smallest, *point[1:])]) * (point[0] / smallest)


def _affordable_sizes(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], budget_s: float
) -> tuple[int, ...]:
    """The sizes without the largest, until one call of every product fits the budget at the rate of a middle size."""
    middle = sizes[len(sizes) // 2]
    work = Operands.of(device, dtype, middle**2).product((1, middle, middle, middle), MATMUL_FORMS[0])
    window_s = SHORTEST_USEFUL_WINDOW_S[device.type]
    (seconds,) = Stopwatch(device=device, window_s=window_s, repeats=PROBE_REPEATS).samples(work)
    while len(sizes) > FEWEST_MATMUL_SIZES and sum(sizes) ** 3 / middle**3 * seconds > budget_s:
        sizes = sizes[:-1]
    return sizes


def _thinned(sizes: tuple[int, ...], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """The sizes, thinned evenly, the first and the last kept, until they fit or FEWEST_MATMUL_SIZES are left."""
    all_of_them = sizes
    while not fits(sizes) and len(sizes) > FEWEST_MATMUL_SIZES:
        count = len(sizes) - 1
        sizes = tuple(all_of_them[round(i * (len(all_of_them) - 1) / (count - 1))] for i in range(count))
    return sizes


@dataclass(frozen=True, slots=True)
class Operands:
    """Random numbers that the operands of all products are views of.

    The left operand of a layer's products, its input or a gradient, was just made: one view serves all calls. The right
    one, a weight or an earlier input, was last read long ago: its views are at different addresses, over more bytes
    than a cache holds.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, numbers: int) -> "Operands":
        cold = max(numbers, COLD_BYTES[device.type] // dtype.itemsize)
        return cls(*(torch.randn(count, dtype=dtype, device=device) for count in (numbers, cold)))

    def product(self, point: tuple[int, int, int, int], form: tuple[bool, bool]) -> Callable[[], Tensor]:
        """A function that multiplies operands in a form of MATMUL_FORMS: mm for a batch of 1, as linear layers do, else
        bmm."""
        batch, m, n, k = point
        left = _matrices(self.left, batch, m, k, form[0])
        works = [
            partial(torch.matmul, left, _matrices(right, batch, k, n, form[1]))
            for right in apart(self.right, batch * k * n)
        ]
        kept = COLD_BYTES[left.device.type] // (batch * m * n * left.dtype.itemsize)
        return in_turn(works, kept=min(max(1, kept), MOST_APART))


def _matrices(numbers: Tensor, batch: int, rows: int, columns: int, transposed: bool) -> Tensor:
    """A view [batch, rows, columns], without the batch where it is 1; contiguous, or the transpose of such a view."""
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    matrices = numbers[: math.prod(shape)].view(shape if batch > 1 else shape[1:])
    return matrices.mT if transposed else matrices

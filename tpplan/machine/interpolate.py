"""Interpolation that is linear in logarithms, so that it is exact for power laws."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence


def bracket(grid: Sequence[float], x: float) -> tuple[int, float]:
    """(i, w) with ln x = (1 - w) ln grid[i] + w ln grid[i + 1], w in [0, 1]; x is clamped to the grid.

    The grid is positive and strictly ascending. A grid of one point gives (0, 0.0).
    """
    if x <= grid[0]:
        return 0, 0.0
    if x >= grid[-1]:
        return max(0, len(grid) - 2), 1.0 if len(grid) > 1 else 0.0
    i = bisect_right(grid, x) - 1
    return i, math.log(x / grid[i]) / math.log(grid[i + 1] / grid[i])


def blend(values: Sequence[float], cell: tuple[int, float]) -> float:
    """Geometric mean of two neighbours: exp((1 - w) ln values[i] + w ln values[i + 1]); exact at the points."""
    i, w = cell
    if w == 0.0 or values[i] == values[min(i + 1, len(values) - 1)]:
        return values[i]
    if w == 1.0:
        return values[i + 1]
    return math.exp((1.0 - w) * math.log(values[i]) + w * math.log(values[i + 1]))


def multilinear(grids: Sequence[Sequence[float]], values: Sequence[float], point: Sequence[float]) -> float:
    """Multilinear in logarithms over a row-major table, exact at its points; the point is clamped to the grid."""
    cells = [bracket(grid, x) for grid, x in zip(grids, point, strict=True)]
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(grids)):
        weight = math.prod(w if up else 1.0 - w for up, (_, w) in zip(corner, cells, strict=True))
        if weight == 0.0:
            continue
        index = 0
        for grid, up, (i, _) in zip(grids, corner, cells, strict=True):
            index = index * len(grid) + i + up
        if weight == 1.0:
            return values[index]
        total += weight * math.log(values[index])
    return math.exp(total)

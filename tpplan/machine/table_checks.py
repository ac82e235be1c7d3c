"""Checks that a profile's tables are valid (axes ascend, times never decrease), and interpolates along one axis."""

import math
from collections.abc import Sequence

from tpplan.core.errors import ProfileError
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.interpolate import blend, bracket


def check_dtype(dtype: str) -> None:
    """Raises ProfileError for a dtype of unknown size."""
    if dtype not in DTYPE_BYTES:
        raise ProfileError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")


def along(grid: Sequence[float], times: Sequence[float], errors: Sequence[float], size: float) -> tuple[float, float]:
    """(time, relative error) at a size clamped to the grid; time linear in logarithms, error between neighbours."""
    i, w = cell = bracket(grid, size)
    return blend(times, cell), (1 - w) * errors[i] + w * errors[min(i + 1, len(grid) - 1)]


def check_curve(
    grid: Sequence[float], times: Sequence[float], errors: Sequence[float], spread: Sequence[float] | None
) -> None:
    """Raises ProfileError unless sizes ascend, times never decrease, and all arrays have the same length."""
    check_ascending("bytes", grid, strictly=True)
    check_length("time_s", times, len(grid))
    check_length("relative_error", errors, len(grid))
    check_ascending("time_s", times, strictly=False)
    if spread is not None:
        check_length("spread.relative", spread, len(grid))


def check_grid(
    names: Sequence[str], grids: Sequence[Sequence[int]], times: Sequence[float], spread: Sequence[float] | None
) -> None:
    """Raises ProfileError unless axes ascend, and time_s covers their product, row-major, decreasing along none."""
    for name, grid in zip(names, grids, strict=True):
        check_ascending(name, grid, strictly=True)
    check_length("time_s", times, math.prod(len(grid) for grid in grids))
    if spread is not None:
        check_length("spread.relative", spread, len(times))
    stride = 1
    for name, grid in zip(reversed(names), reversed(grids), strict=True):
        for i, time in enumerate(times):
            if i // stride % len(grid) and time < times[i - stride]:
                raise ProfileError(
                    f"time_s[{i}]: expected >= time_s[{i - stride}] = {times[i - stride]:g}"
                    f" (time never decreases with {name}), got {time:g}"
                )
        stride *= len(grid)


def check_ascending(name: str, values: Sequence[float], *, strictly: bool) -> None:
    """Raises ProfileError unless there are values that never decrease, or always increase where `strictly`."""
    if not values:
        raise ProfileError(f"{name}: expected at least one value, got none")
    for i in range(1, len(values)):
        if values[i] < values[i - 1] or (strictly and values[i] == values[i - 1]):
            relation = ">" if strictly else ">="
            bound = f"{name}[{i - 1}] = {values[i - 1]:g}"
            raise ProfileError(f"{name}[{i}]: expected {relation} {bound}, got {values[i]:g}")


def check_length(name: str, values: Sequence[float], expected: int) -> None:
    """Raises ProfileError for another number of values than expected."""
    if len(values) != expected:
        raise ProfileError(f"{name}: expected {expected} values, got {len(values)}")


def check_unique(name: str, keys: Sequence[object]) -> None:
    """Raises ProfileError where two entries of the array `name` have one key."""
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ProfileError(f"{name}[{i}]: expected one entry for {key}, got a second")

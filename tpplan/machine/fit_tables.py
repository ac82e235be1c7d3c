"""Fits a profile's tables to samples: the nearest monotone tables, and residuals that become their error bars.

All deviations are logarithmic: ln(sample / table), which is the relative error where small.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpplan.core.errors import ProfileError
from tpplan.core.mesh import GroupShape
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.machine.tables import (
    AttentionTable,
    CollectiveTable,
    GroupExtrapolation,
    MatmulTable,
    MemoryBoundTable,
    Spread,
)

Array = NDArray[np.float64]

#: smallest relative error of a table: two runs of a benchmark do not agree better
LEAST_RELATIVE_ERROR = 0.01
#: relative error where no sample is left to compare with: 100 %
UNKNOWN_RELATIVE_ERROR = 1.0
#: significant digits of times in a table
TIME_DIGITS = 4
#: relative spread (q75 - q25) / median of a point's repeats above which the point is noisy
NOISY_RELATIVE_SPREAD = 0.2
#: axis number -> the power of that axis with which the work grows
MATMUL_POWERS = {1: 1, 2: 1, 3: 1}
ATTENTION_POWERS = {0: 1, 1: 2, 2: 1}


def isotonic_median(values: ArrayLike) -> Array:
    """Non-decreasing sequence of least absolute log deviation: pools adjacent violators, each pool at its median."""
    pools: list[list[float]] = []
    for value in np.log(values):
        pools.append([float(value)])
        while len(pools) > 1 and np.median(pools[-2]) > np.median(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return np.asarray(np.exp(np.concatenate([np.full(len(pool), np.median(pool)) for pool in pools])))


def isotonic_grid(times: Array) -> Array:
    """Table of least maximal log deviation that decreases along no axis: midway between its two monotone envelopes."""
    upper = lower = np.log(times)
    for axis in range(times.ndim):
        upper = np.maximum.accumulate(upper, axis=axis)
        lower = np.flip(np.minimum.accumulate(np.flip(lower, axis), axis=axis), axis)
    return np.asarray(np.exp((upper + lower) / 2))


def rms(values: ArrayLike) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def digits(value: float, count: int) -> float:
    """The value rounded to `count` significant digits; order is kept, so monotone tables stay monotone."""
    return float(f"{value:.{count - 1}e}")


def relative_error(ratios: Array) -> float:
    """RMS of the logarithms of ratios (sample over table), at least LEAST_RELATIVE_ERROR."""
    return digits(max(LEAST_RELATIVE_ERROR, rms(np.log(ratios))), 2)


def neighbour_errors(sizes: ArrayLike, times: Array, sample_sizes: ArrayLike, samples: Array) -> list[float]:
    """Relative error at each size: RMS over the samples at that size and its two neighbours."""
    position = np.searchsorted(sizes, sample_sizes)
    deviation = np.log(samples / times[position])
    near = [deviation[np.abs(position - i) <= 1] for i in range(len(times))]
    return [digits(max(LEAST_RELATIVE_ERROR, rms(values)), 2) for values in near]


def spread(samples: Array) -> Spread:
    """Spread of each point's repeats; samples are (*points, repeat)."""
    return _spread(_middle_half(samples).ravel())


def widest(samples: Array) -> Spread:
    """Spread of each point's widest form; samples are (*points, form, repeat)."""
    return _spread(_middle_half(samples).max(axis=-1).ravel())


def _middle_half(samples: Array) -> Array:
    """(q75 - q25) / q50 over the last axis."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75), axis=-1)
    return np.asarray((high - low) / middle)


def _spread(relative: Iterable[float]) -> Spread:
    rounded = tuple(digits(float(value), 2) for value in relative)
    noisy = tuple(i for i, value in enumerate(rounded) if value > NOISY_RELATIVE_SPREAD)
    return Spread(relative=rounded, noisy_above=NOISY_RELATIVE_SPREAD, noisy=noisy)


def interpolation_error(
    axes: Sequence[Sequence[int]], times: Array, powers: Mapping[int, int] = MATMUL_POWERS
) -> float:
    """RMS log error of predicting each inner plane along an axis from its neighbours, linear in logarithms.

    `powers` names the axes that count. These neighbours are twice as far apart as the table's own points, so the error
    is an upper estimate. UNKNOWN_RELATIVE_ERROR where no axis has three points.
    """
    errors = []
    for axis in powers:
        places = np.log(axes[axis])
        weight = (places[1:-1] - places[:-2]) / (places[2:] - places[:-2])
        along = np.moveaxis(np.log(times), axis, -1)
        errors.append(((1 - weight) * along[..., :-2] + weight * along[..., 2:] - along[..., 1:-1]).ravel())
    found = np.concatenate(errors)
    return rms(found) if len(found) else UNKNOWN_RELATIVE_ERROR


def beyond_error(
    axes: Sequence[Sequence[int]], times: Array, launch_s: float, powers: Mapping[int, int] = MATMUL_POWERS
) -> float:
    """RMS log error of predicting the last plane of each axis from the one before, as the profile extrapolates.

    `powers` gives the power of each axis with which the work grows. UNKNOWN_RELATIVE_ERROR where every axis has one
    point.
    """
    errors = []
    for axis, power in powers.items():
        if len(axes[axis]) < 2:
            continue
        along = np.moveaxis(times, axis, 0)
        fixed = np.minimum(launch_s, along[-2])
        growth = (axes[axis][-1] / axes[axis][-2]) ** power
        errors.append(np.log((fixed + (along[-2] - fixed) * growth) / along[-1]).ravel())
    return rms(np.concatenate(errors)) if errors else UNKNOWN_RELATIVE_ERROR


def leave_one_group_out(profile: HardwareProfile) -> Iterator[tuple[CollectiveTable, Array]]:
    """Yields (table, ln(predicted / measured) over its sizes), predicting each measured group from the other groups."""
    for left_out in profile.collectives:
        others = tuple(table for table in profile.collectives if table != left_out)
        rest = dataclasses.replace(profile, collectives=others)
        try:
            predicted = [rest.collective(left_out.kind, left_out.group, n).seconds for n in left_out.bytes]
        except ProfileError:
            continue  # the only group of its kind: no other predicts it
        yield left_out, np.log(np.array(predicted) / np.array(left_out.time_s))


def group_extrapolation(profile: HardwareProfile) -> GroupExtrapolation:
    """RMS of the leave-one-group-out errors, in a node and across nodes; UNKNOWN_RELATIVE_ERROR without any."""
    errors = list(leave_one_group_out(profile))

    def residual(*, across: bool) -> float:
        found = [error for table, error in errors if (table.group.nodes > 1) == across]
        return digits(rms(np.concatenate(found)), 2) if found else UNKNOWN_RELATIVE_ERROR

    return GroupExtrapolation(
        in_node_relative_error=residual(across=False), across_nodes_relative_error=residual(across=True)
    )


def matmul_table(
    dtype: str,
    axes: Sequence[tuple[int, ...]],
    samples: Array,
    launch_s: float,
    sources: tuple[str, ...],
    inferred: str | None = None,
) -> MatmulTable:
    """The table of samples (batch, m, n, k, form, repeat) in seconds over axes (batch, m, n, k).

    A point is the mean over a product's forms of their medians; the differences between forms count in the error.
    """
    times = isotonic_grid(np.median(samples, axis=-1).mean(axis=-1))
    smoothed = rms(np.log(samples / times[..., None, None]))
    batch, m, n, k = axes
    return MatmulTable(
        dtype=dtype,
        batch=batch,
        m=m,
        n=n,
        k=k,
        time_s=tuple(digits(seconds, TIME_DIGITS) for seconds in times.ravel()),
        relative_error=digits(max(LEAST_RELATIVE_ERROR, math.hypot(smoothed, interpolation_error(axes, times))), 2),
        extrapolation_relative_error=digits(beyond_error(axes, times, launch_s), 2),
        spread=widest(samples),
        sources=sources,
        inferred=inferred,
    )


def attention_table(
    dtype: str,
    *,
    causal: bool,
    backward: bool,
    axes: Sequence[tuple[int, ...]],
    samples: Array,
    launch_s: float,
    sources: tuple[str, ...],
) -> AttentionTable:
    """The table of samples (batch_heads, sequence, head_dim, repeat) in seconds over those axes."""
    times = isotonic_grid(np.median(samples, axis=-1))
    smoothed = rms(np.log(samples / times[..., None]))
    between = interpolation_error(axes, times, ATTENTION_POWERS)
    batch_heads, sequence, head_dim = axes
    return AttentionTable(
        dtype=dtype,
        causal=causal,
        backward=backward,
        batch_heads=batch_heads,
        sequence=sequence,
        head_dim=head_dim,
        time_s=tuple(digits(seconds, TIME_DIGITS) for seconds in times.ravel()),
        relative_error=digits(max(LEAST_RELATIVE_ERROR, math.hypot(smoothed, between)), 2),
        extrapolation_relative_error=digits(beyond_error(axes, times, launch_s, ATTENTION_POWERS), 2),
        spread=spread(samples),
        sources=sources,
    )


def memory_bound_table(samples: Mapping[int, Array], sources: tuple[str, ...]) -> MemoryBoundTable:
    """The table of bytes (read plus written) -> samples (kind of kernel, repeat) in seconds.

    A point is the mean over the kinds of their medians; the differences between kinds count in the error.
    """
    sizes = sorted(samples)
    by_size = np.stack([samples[size] for size in sizes])
    times = isotonic_median(np.median(by_size, axis=-1).mean(axis=-1))
    sample_sizes = np.repeat(sizes, by_size[0].size)
    return MemoryBoundTable(
        bytes=tuple(sizes),
        time_s=tuple(digits(seconds, TIME_DIGITS) for seconds in times),
        relative_error=tuple(neighbour_errors(sizes, times, sample_sizes, by_size.ravel())),
        spread=widest(by_size),
        sources=sources,
    )


def collective_table(
    kind: Collective, group: GroupShape, samples: Mapping[int, Array], sources: tuple[str, ...]
) -> CollectiveTable:
    """The table of bytes of the whole value -> samples in seconds."""
    sizes = sorted(samples)
    times = isotonic_median([float(np.median(samples[size])) for size in sizes])
    sample_sizes = np.repeat(sizes, [len(samples[size]) for size in sizes])
    rounded = tuple(digits(seconds, TIME_DIGITS) for seconds in times)
    return CollectiveTable(
        kind=kind,
        ranks=group.ranks,
        ranks_per_node=group.ranks_per_node,
        latency_s=rounded[0],
        bytes=tuple(sizes),
        time_s=rounded,
        relative_error=tuple(
            neighbour_errors(sizes, times, sample_sizes, np.concatenate([samples[size] for size in sizes]))
        ),
        spread=_spread(float(_middle_half(samples[size])) for size in sizes),
        sources=sources,
    )

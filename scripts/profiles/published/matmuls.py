"""Tables of matmuls: grids that were measured, and grids scaled from a like machine along the roofline.

Measured: the nearest table, in largest log deviation, that does not decrease in batch, m, n or k.

Scaled: T' = L + (T - L) R'/R, with L the launch time, and R = max(F / c, M / b) the roofline's time: F FLOP at the best
rate c of large products, M bytes of operands and result, moved once at the achieved bandwidth b. So products that
arithmetic bounds go with the rate, thin ones with the bandwidth.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from published.machines import (
    DATA_SHEETS,
    ML_ENGINEERING,
    BestRate,
    Machine,
    MeasuredMatmuls,
    PowerLimited,
    PublishedBatched,
    PublishedMisaligned,
    SpareRatios,
    SpareRows,
)
from published.read import Array, Data, matmul_grid, matmul_rows
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.fit_tables import TIME_DIGITS, beyond_error, digits, interpolation_error, isotonic_grid, rms
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import BatchedMatmuls, MatmulTable, MisalignedMatmuls

#: of what follows from a table of another dtype or machine and was compared with nothing
UNCHECKED_RELATIVE_ERROR = 0.1
BEST_RATE, TERA = "best_achieved_bf16_tflops", 1e12
FULL_PRECISION = "float32"
#: operands of one byte, as in spare rows of 8-bit floats, and a result of two
EIGHT_BIT_OPERAND_BYTES, EIGHT_BIT_RESULT_BYTES = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """bfloat16 FLOP/s of large products, and how it came about; error and its reason where it was not measured."""

    flop_per_s: float
    how: str
    relative_error: float = 0.0
    because: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What bounds a product: arithmetic and memory."""

    flop_per_s: float
    bytes_per_s: float

    def seconds(self, flop: Array | float, num_bytes: Array | float) -> Array:
        """The larger of both times."""
        return np.maximum(np.asarray(flop) / self.flop_per_s, np.asarray(num_bytes) / self.bytes_per_s)


# --- measured ------------------------------------------------------------------------------------------------------


def measured_table(
    data: Data, grid: MeasuredMatmuls, csv_dtype: str, dtype: str, launch_s: float, inferred: str | None
) -> MatmulTable:
    """One dtype's table; inferred says why the dtype is not what was measured, and widens the residual."""
    axes, measured = matmul_grid(data, grid.hardware, grid.source, csv_dtype)
    times = isotonic_grid(measured)
    smoothed = rms(np.log(measured / times))
    widening = UNCHECKED_RELATIVE_ERROR if inferred else 0.0
    batch, m, n, k = (tuple(axis) for axis in axes)
    return MatmulTable(
        dtype=dtype,
        batch=batch,
        m=m,
        n=n,
        k=k,
        time_s=tuple(digits(time, TIME_DIGITS) for time in times.ravel()),
        relative_error=digits(math.hypot(smoothed, interpolation_error(axes, times), widening), 2),
        extrapolation_relative_error=digits(beyond_error(axes, times, launch_s), 2),
        sources=(grid.source,),
        inferred=inferred,
    )


def measured_tables(data: Data, grid: MeasuredMatmuls, launch_s: float) -> list[MatmulTable]:
    """bfloat16 as measured; float16 and float32 as far as they follow from the table."""
    half = "the tensor cores run float16 at the rate of bfloat16 (vendor's data sheet); bfloat16 was measured"
    full = (
        "the table says f32 and reaches 0.5 x bfloat16, far above what float32 units can: taken as TF32,"
        " torch.set_float32_matmul_precision('high')"
    )
    return [
        measured_table(data, grid, "bf16", "bfloat16", launch_s, None),
        measured_table(data, grid, "bf16", "float16", launch_s, half),
        measured_table(data, grid, "f32(tf32?)", FULL_PRECISION, launch_s, full),
    ]


def shortest(data: Data, grid: MeasuredMatmuls) -> float:
    """The shortest product of the bfloat16 grid, in seconds."""
    return digits(float(matmul_grid(data, grid.hardware, grid.source, "bf16")[1].min()), 3)


def best_rate(data: Data, grid: MeasuredMatmuls) -> float:
    """FLOP/s of the fastest product of the bfloat16 grid."""
    axes, times = matmul_grid(data, grid.hardware, grid.source, "bf16")
    return float((2 * np.prod(np.meshgrid(*axes, indexing="ij"), axis=0) / times).max())


def slower_in_full_precision(data: Data, grid: MeasuredMatmuls) -> float:
    """Rate of float32 over that of bfloat16 in the larger half of the grid."""
    large = np.s_[:, -2:, -2:, -2:]
    bf16, f32 = (matmul_grid(data, grid.hardware, grid.source, dtype)[1][large] for dtype in ("bf16", "f32(tf32?)"))
    return float(np.median(bf16 / f32))


# --- scaled --------------------------------------------------------------------------------------------------------


def rate_of(data: Data, machine: Machine, like_rate: float | None) -> Rate:
    """The best rate of a machine's large products."""
    match machine.compute:
        case BestRate(hardware=hardware):
            tflops = data.figure(hardware, BEST_RATE)
            return Rate(flop_per_s=tflops * TERA, how=f"{tflops:g} TFLOP/s achieved")
        case PowerLimited() as limit:
            if like_rate is None:
                raise ValueError(f"{machine.name}: a rate under less power needs a like machine")
            return power_limited_rate(data, limit, like_rate)


def power_limited_rate(data: Data, limit: PowerLimited, like_rate: float) -> Rate:
    """r (W / W_0)^e with the pair's e = ln(r_1 / r_2) / ln(W_1 / W_2); at worst, e = 1: work in proportion to power."""
    low, high = (data.figure(hardware, BEST_RATE) for hardware in limit.pair)
    exponent = math.log(high / low) / math.log(limit.pair_watts[1] / limit.pair_watts[0])
    less = math.log(limit.like_watts / limit.watts)
    factor = math.exp(-exponent * less)
    return Rate(
        flop_per_s=like_rate * factor,
        relative_error=(1 - exponent) * less,
        because="to reach a rate in proportion to power",
        sources=(DATA_SHEETS,),
        how=f"{factor:.2f} x the rate, for {limit.watts:g} W of {limit.like_watts:g} W with the exponent"
        f" {exponent:.2f} of {limit.pair[0]} ({limit.pair_watts[0]:g} W, {low:g} TFLOP/s) against {limit.pair[1]}"
        f" ({limit.pair_watts[1]:g} W, {high:g} TFLOP/s)",
    )


def scaled_table(table: MatmulTable, launch_s: float, was: Roofline, now: Roofline) -> MatmulTable:
    """The table on another roofline, monotone again; errors and provenance as they were."""
    batch, m, n, k = (np.array(axis, dtype=float) for axis in np.meshgrid(*table.grids, indexing="ij"))
    flop = 2 * batch * m * n * k
    num_bytes = batch * (m * k + k * n + m * n) * DTYPE_BYTES[table.dtype]
    times = np.array(table.time_s).reshape(flop.shape)
    fixed = np.minimum(launch_s, times)
    scaled = isotonic_grid(fixed + (times - fixed) * now.seconds(flop, num_bytes) / was.seconds(flop, num_bytes))
    return dataclasses.replace(
        table,
        time_s=tuple(digits(time, TIME_DIGITS) for time in scaled.ravel()),
        extrapolation_relative_error=digits(beyond_error(table.grids, scaled, launch_s), 2),
    )


def scaled_tables(like: HardwareProfile, was: Roofline, now: Roofline) -> list[MatmulTable]:
    """Every dtype's table of the like machine; rooflines are bfloat16's, and float32's peak moves with it."""
    found = []
    for table in like.matmuls:
        slower = full_precision_share(like) if table.dtype == FULL_PRECISION else 1.0
        rooflines = (dataclasses.replace(line, flop_per_s=line.flop_per_s * slower) for line in (was, now))
        found.append(scaled_table(table, like.launch_s, *rooflines))
    return found


def full_precision_share(profile: HardwareProfile) -> float:
    """Rate of float32 over that of bfloat16 at the largest product of the grid."""
    full, half = (
        next(table for table in profile.matmuls if table.dtype == dtype) for dtype in (FULL_PRECISION, "bfloat16")
    )
    return half.time_s[-1] / full.time_s[-1]


def with_error(table: MatmulTable, error: float, how: str, sources: tuple[str, ...]) -> MatmulTable:
    """A scaled table with its error bar and provenance."""
    return dataclasses.replace(
        table,
        relative_error=digits(math.hypot(table.relative_error, error), 2),
        sources=tuple(dict.fromkeys(table.sources + sources)),
        inferred=f"{how}; there: {table.inferred}" if table.inferred else how,
    )


def misaligned(data: Data, figures: PublishedMisaligned, machine: Machine, rate: Rate) -> list[MisalignedMatmuls]:
    """Half-precision rates of misaligned products: as published, and on other hardware the same share of its rate."""
    share, error = rate.flop_per_s / (TERA * data.figure(figures.hardware, BEST_RATE)), figures.relative_error
    is_measured, how = machine.compute == BestRate(hardware=figures.hardware), "float16 was measured, on an A100"
    if not is_measured:
        error = math.hypot(error, figures.unlike_error)
        how += (
            f"; its rates times {share:.3g}, as large aligned products; relative_error: its own there, with"
            f" {figures.unlike_error:g}, assumed"
        )
    return [
        MisalignedMatmuls(
            dtype=dtype,
            bytes=num_bytes,
            flop_per_s=digits(share * TERA * tflops, 3),
            aligned_flop_per_s=digits(share * TERA * figures.aligned_tflops, 3),
            relative_error=digits(error, 2),
            sources=(figures.source, ML_ENGINEERING),
            inferred=None if is_measured and dtype == "float16" else how,
        )
        for dtype in ("bfloat16", "float16")
        for num_bytes, tflops in figures.tflops.items()
    ]


def batched(figures: PublishedBatched, machine: Machine, rate: Rate) -> list[BatchedMatmuls]:
    """Half-precision rates of batches on the hardware that was measured, none elsewhere: the published shares of the
    rate of large ones, times this machine's, so that large products take as long as in its table."""
    if machine.compute != BestRate(hardware=figures.hardware):
        return []
    best = rate.flop_per_s / figures.outer_tflops[-1]

    def rates(tflops: tuple[float, ...]) -> tuple[float, ...]:
        times = isotonic_grid(np.array([size / own for size, own in zip(figures.sizes, tflops, strict=True)]))
        return tuple(digits(best * size / time, 3) for size, time in zip(figures.sizes, times, strict=True))

    how = (
        f"shares of the rate of large products, {figures.outer_tflops[-1]:g} TFLOP/s, times"
        f" {rate.flop_per_s / TERA:g}; which memory that A100 has is not stated"
    )
    return [
        BatchedMatmuls(
            dtype=dtype,
            sizes=figures.sizes,
            inner_flop_per_s=rates(figures.inner_tflops),
            outer_flop_per_s=rates(figures.outer_tflops),
            relative_error=figures.relative_error,
            sources=(figures.source, ML_ENGINEERING),
            inferred=how if dtype == "float16" else f"{how}; float16 was measured",
        )
        for dtype in ("bfloat16", "float16")
    ]


# --- checks --------------------------------------------------------------------------------------------------------

#: (m, n, k)
Shape = tuple[int, int, int]


def spare_rows_deviations(data: Data, spare: SpareRows, profile: HardwareProfile) -> dict[Shape, float]:
    """ln(predicted / measured) of the times."""
    rows = matmul_rows(data, spare.hardware, spare.dtype_in_file)
    return {
        (m, n, k): math.log(profile.matmul(m=m, n=n, k=k, dtype=spare.dtype).seconds / seconds)
        for (m, n, k), seconds in rows.items()
    }


def spare_ratios_deviations(data: Data, spare: SpareRatios, was: Roofline, now: Roofline) -> dict[Shape, float]:
    """ln(predicted / measured) of time here over time on the like machine, for products of 8-bit floats."""
    own, likes = (matmul_rows(data, name, spare.dtype_in_file) for name in (spare.hardware, spare.like_hardware))
    best = max(2.0 * math.prod(shape) / seconds for shape, seconds in likes.items())
    before, after = (
        Roofline(flop_per_s=best * line.flop_per_s / was.flop_per_s, bytes_per_s=line.bytes_per_s)
        for line in (was, now)
    )
    found = {}
    for (m, n, k), seconds in own.items():
        if (m, n, k) in likes:
            work = 2.0 * m * n * k, EIGHT_BIT_OPERAND_BYTES * (m * k + k * n) + EIGHT_BIT_RESULT_BYTES * m * n
            predicted = float(after.seconds(*work) / before.seconds(*work))
            found[m, n, k] = math.log(predicted * likes[m, n, k] / seconds)
    return found

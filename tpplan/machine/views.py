"""Tables and charts of a profile: throughput by shape, bus bandwidth by bytes and group.

Only measured points are shown; noisy ones are marked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tpplan.core.mesh import GroupShape
from tpplan.core.units import format_bytes, format_seconds
from tpplan.machine.lint import table_name
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.machine.tables import AttentionTable, CollectiveTable, MatmulTable, Spread, bottleneck_traffic

#: mark after a number whose repeats are far apart
NOISY_MARK = "~"
NOISY_NOTE = f"{NOISY_MARK} repeats lie far apart"
#: the m, or the nearest below it, at which matmuls of all weights are compared: tokens of one sequence
TYPICAL_TOKENS = 4096
#: most sizes of messages in a table; charts have all
_MOST_MESSAGE_COLUMNS = 9
#: FLOP of attention per batch x heads x sequence^2 x head dim, forward and backward [Dao 2023, section 3.1]
_FORWARD_FLOP, _BACKWARD_FLOP = 4.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A table of text, whose first column names the row; `note` is printed below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart: points by ascending x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over a logarithmic x axis; y is logarithmic where is_log_y."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_is_bytes: bool = False
    is_log_y: bool = False


def facts(profile: HardwareProfile) -> tuple[tuple[str, str], ...]:
    """(name, text) of everything that is one number or one line."""
    launch, bandwidth = profile.launch, profile.bandwidth
    lines = [
        ("profile", f"{profile.name} ({profile.fingerprint[:12]})"),
        ("device", f"{profile.device}, {profile.gpus_per_node} per node"),
        ("memory", f"{format_bytes(profile.memory_bytes)}, {format_bytes(profile.usable_bytes)} usable"),
        ("bandwidth", f"{_rate(bandwidth.hbm_bytes_per_s)}B/s +/- {bandwidth.relative_error:.0%}"),
        ("launch", f"{format_seconds(launch.launch_s)} a kernel +/- {launch.relative_error:.0%}"),
    ]
    if launch.issue_s is not None:
        lines.append(("issue", f"{format_seconds(launch.issue_s)} of the CPU a kernel"))
    for dtype in dict.fromkeys(own.dtype for own in profile.misaligned_matmuls or ()):
        entries = [own for own in profile.misaligned_matmuls or () if own.dtype == dtype]
        rates = ", ".join(f"{own.bytes} bytes {_rate(own.flop_per_s)}FLOP/s" for own in entries)
        aligned = f"{_rate(entries[0].aligned_flop_per_s)}FLOP/s"
        lines.append(("alignment", f"{dtype} matmuls on rows at multiples of {rates}; aligned, {aligned}"))
    for batched in profile.batched_matmuls or ():
        small, large = f"{_rate(batched.inner_flop_per_s[0])}FLOP/s", f"{_rate(batched.inner_flop_per_s[-1])}FLOP/s"
        sizes = f"a summed size of {batched.sizes[0]}; {batched.sizes[-1]}, {large}"
        lines.append(("batches", f"{batched.dtype} matmuls in batches, {small} with {sizes}"))
    for step in profile.optimizer_issues or ():
        lines.append(
            (
                "optimizer",
                f"{step.optimizer}: {format_seconds(step.sharded_s)} of the CPU a sharded parameter,"
                f" {format_seconds(step.plain_s)} a plain one, +/- {step.relative_error:.0%}",
            )
        )
    if (overlap := profile.overlap) is not None:
        lines.append(
            (
                "overlap",
                f"while both run, a matmul takes {1 + overlap.matmul_slowdown:.2f} times as long, a collective"
                f" {1 + overlap.collective_slowdown:.2f} times, +/- {overlap.relative_error:.0%}",
            )
        )
    for number in profile.fitted or ():
        text = f"{number.name} = {number.value:g} on {number.runs} runs, +/- {number.residual:.0%}: {number.what}"
        lines.append(("fitted", text))
    if profile.software:
        lines.append(("software", ", ".join(f"{name} {version}" for name, version in profile.software.items())))
    if profile.date is not None:
        lines.append(("date", profile.date.isoformat()))
    lines.append(("sources", ", ".join(f"{source.id} ({source.licence})" for source in profile.sources)))
    return tuple(lines)


def views(profile: HardwareProfile) -> tuple[View, ...]:
    """All tables: matmuls, attention, memory, collectives."""
    return (*_matmul_views(profile), *_attention_views(profile), *_memory_views(profile), *_collective_views(profile))


def charts(profile: HardwareProfile) -> tuple[Chart, ...]:
    """All charts that have lines: matmuls, attention, memory, collectives."""
    found = (*_matmul_charts(profile), *_attention_charts(profile), _memory_chart(profile), *_bus_charts(profile))
    return tuple(chart for chart in found if chart.series)


# --- matmuls -------------------------------------------------------------------------------------------------------


def _matmul_rate(table: MatmulTable, m: int, n: int, k: int) -> tuple[float, bool]:
    """FLOP/s at a point of the smallest batch, and whether it is noisy."""
    place = (0, table.m.index(m), table.n.index(n), table.k.index(k))
    index = _index(table.grids, place)
    return 2.0 * table.batch[0] * m * n * k / table.time_s[index], _is_noisy(table.spread, index)


def _matmul_views(profile: HardwareProfile) -> Iterator[View]:
    for table in profile.matmuls:
        error = f"+/- {table.relative_error:.0%} inside the table, {table.extrapolation_relative_error:.0%} beyond"
        unit, scale = _unit(_rates(table))
        shared = [n for n in table.n if n in table.k]
        yield View(
            title=f"matmul {table.dtype}, {unit}FLOP/s: m by n = k",
            columns=("m", *map(str, shared)),
            rows=tuple((str(m), *(_cell(_matmul_rate(table, m, n, n), scale) for n in shared)) for m in table.m),
            note=_note(error, table.spread),
        )
        tokens = _tokens(table)
        yield View(
            title=f"matmul {table.dtype}, {unit}FLOP/s: n by k, at m = {tokens}",
            columns=("n", *map(str, table.k)),
            rows=tuple((str(n), *(_cell(_matmul_rate(table, tokens, n, k), scale) for k in table.k)) for n in table.n),
            note=_note(error, table.spread),
        )


def _matmul_charts(profile: HardwareProfile) -> Iterator[Chart]:
    for table in profile.matmuls:
        unit, scale = _unit(_rates(table))
        yield Chart(
            title=f"matmul {table.dtype}: m tokens by weights n = k",
            x_label="n = k",
            y_label=f"{unit}FLOP/s",
            series=tuple(
                Series(
                    name=f"m {m}",
                    points=tuple((n, _matmul_rate(table, m, n, n)[0] / scale) for n in table.n if n in table.k),
                )
                for m in _evenly_spaced(table.m)
            ),
        )
        tokens = _tokens(table)
        yield Chart(
            title=f"matmul {table.dtype}: thin ones, m = {tokens}",
            x_label="n",
            y_label=f"{unit}FLOP/s",
            series=tuple(
                Series(name=f"k {k}", points=tuple((n, _matmul_rate(table, tokens, n, k)[0] / scale) for n in table.n))
                for k in _evenly_spaced(table.k)
            ),
        )


def _tokens(table: MatmulTable) -> int:
    return max((m for m in table.m if m <= TYPICAL_TOKENS), default=table.m[0])


def _rates(table: MatmulTable) -> list[float]:
    return [_matmul_rate(table, m, n, k)[0] for m, n, k in product(table.m, table.n, table.k)]


# --- attention -----------------------------------------------------------------------------------------------------


def _attention_rate(table: AttentionTable, heads: int, sequence: int, dim: int) -> tuple[float, bool]:
    """Executed FLOP/s at a point (half of all where causal), and whether it is noisy."""
    index = _index(
        table.grids, tuple(axis.index(x) for axis, x in zip(table.grids, (heads, sequence, dim), strict=True))
    )
    flop = (_BACKWARD_FLOP if table.backward else _FORWARD_FLOP) * heads * sequence**2 * dim
    return flop / (2 if table.causal else 1) / table.time_s[index], _is_noisy(table.spread, index)


def _attention_views(profile: HardwareProfile) -> Iterator[View]:
    if profile.attention_rates:
        unit, scale = _unit([rate.forward_flop_per_s for rate in profile.attention_rates])
        yield View(
            title=f"attention, {unit}FLOP/s: one rate for all sizes",
            columns=("dtype", "forward", "backward", "+/-"),
            rows=tuple(
                (
                    rate.dtype,
                    _number(rate.forward_flop_per_s / scale),
                    _number(rate.backward_flop_per_s / scale),
                    f"{rate.relative_error:.0%}",
                )
                for rate in profile.attention_rates
            ),
            note="used where no table below covers the dtype and the mask",
        )
    for table in profile.attention_tables or ():
        points = list(product(*table.grids))
        unit, scale = _unit([_attention_rate(table, *point)[0] for point in points])
        yield View(
            title=f"attention {table_name(table)}, {unit}FLOP/s: by sequence",
            columns=("batch x heads, head dim", *map(str, table.sequence)),
            rows=tuple(
                (f"{heads}, {dim}", *(_cell(_attention_rate(table, heads, s, dim), scale) for s in table.sequence))
                for heads, dim in product(table.batch_heads, table.head_dim)
            ),
            note=_note(f"+/- {table.relative_error:.0%}", table.spread),
        )


def _attention_charts(profile: HardwareProfile) -> Iterator[Chart]:
    for dtype in dict.fromkeys(table.dtype for table in profile.attention_tables or ()):
        tables = [table for table in profile.attention_tables or () if table.dtype == dtype]
        rates = [_attention_rate(table, *point)[0] for table in tables for point in product(*table.grids)]
        unit, scale = _unit(rates)
        yield Chart(
            title=f"attention {dtype}: by head dim, batch x heads {tables[0].batch_heads[-1]}",
            x_label="sequence",
            y_label=f"{unit}FLOP/s",
            series=tuple(
                Series(
                    name=f"{table_name(table).partition(' ')[2]}, {dim}",
                    points=tuple(
                        (s, _attention_rate(table, table.batch_heads[-1], s, dim)[0] / scale) for s in table.sequence
                    ),
                )
                for table, dim in product(tables, tables[0].head_dim)
            ),
        )


# --- memory --------------------------------------------------------------------------------------------------------


def _memory_views(profile: HardwareProfile) -> Iterator[View]:
    table = profile.memory_bound_table
    if table is None:
        return
    rows = enumerate(zip(table.bytes, table.time_s, table.relative_error, strict=True))
    yield View(
        title="memory-bound kernels, by bytes read and written",
        columns=("bytes", "time", "rate", "+/-"),
        rows=tuple(
            (
                short_bytes(size),
                format_seconds(seconds) + (NOISY_MARK if _is_noisy(table.spread, i) else ""),
                f"{_rate(size / seconds)}B/s",
                f"{error:.0%}",
            )
            for i, (size, seconds, error) in rows
        ),
        note=_note("", table.spread),
    )


def _memory_chart(profile: HardwareProfile) -> Chart:
    table = profile.memory_bound_table
    points = tuple((n, n / s / 1e9) for n, s in zip(table.bytes, table.time_s, strict=True)) if table else ()
    return Chart(
        title="memory-bound kernels",
        x_label="bytes read and written",
        y_label="GB/s",
        series=(Series(name="copies and sums", points=points),) if points else (),
        x_is_bytes=True,
    )


# --- collectives ---------------------------------------------------------------------------------------------------


def bus_bandwidth(table: CollectiveTable, num_bytes: float) -> float:
    """Bytes per second as nccl-tests defines busbw: what a ring moves through each rank's link.

    2 (p - 1)/p n / T for all_reduce, (p - 1)/p n / T for all_gather and reduce_scatter, (p - 1)/p (n/p) / T for
    all_to_all; p ranks, n bytes of the whole value.
    """
    flat = GroupShape(ranks=table.ranks, ranks_per_node=table.ranks)
    return bottleneck_traffic(table.kind, flat) * num_bytes / table.time(num_bytes).seconds


def _collective_views(profile: HardwareProfile) -> Iterator[View]:
    for kind in Collective:
        tables = [table for table in profile.collectives if table.kind == kind]
        if not tables:
            continue
        sizes = sorted({_rounded(size) for table in tables for size in table.bytes})
        sizes = _evenly_spaced(sizes, _MOST_MESSAGE_COLUMNS)
        noisy = [table.spread for table in tables if table.spread is not None and table.spread.noisy]
        yield View(
            title=f"{kind}, bus bandwidth in GB/s: by bytes of the whole value",
            columns=("ranks (per node)", "latency", *(short_bytes(size) for size in sizes)),
            rows=tuple(
                (
                    f"{table.ranks} ({table.ranks_per_node})",
                    format_seconds(table.latency_s),
                    *(_bus_cell(table, size) for size in sizes),
                )
                for table in sorted(tables, key=lambda table: (table.group.nodes, table.ranks_per_node))
            ),
            note=_note("", noisy[0] if noisy else None),
        )


def _bus_cell(table: CollectiveTable, size: int) -> str:
    """The bus bandwidth at a size as text; blank outside of the measured sizes."""
    near = min(range(len(table.bytes)), key=lambda i: abs(math.log(table.bytes[i] / size)))
    if not table.bytes[0] <= size * math.sqrt(2) or size > table.bytes[-1] * math.sqrt(2):
        return ""
    exact = min(max(size, table.bytes[0]), table.bytes[-1])
    return _cell((bus_bandwidth(table, exact), _is_noisy(table.spread, near)), 1e9)


def _bus_charts(profile: HardwareProfile) -> Iterator[Chart]:
    for kind in Collective:
        tables = sorted(
            (table for table in profile.collectives if table.kind == kind),
            key=lambda table: (table.group.nodes, table.ranks_per_node),
        )
        yield Chart(
            title=f"{kind}: ranks (per node)",
            x_label="bytes of the whole value",
            y_label="bus bandwidth, GB/s",
            series=tuple(
                Series(
                    name=f"{table.ranks} ({table.ranks_per_node})",
                    points=tuple((n, bus_bandwidth(table, n) / 1e9) for n in table.bytes),
                )
                for table in tables
            ),
            x_is_bytes=True,
            is_log_y=True,
        )


# --- numbers -------------------------------------------------------------------------------------------------------


def _index(grids: Sequence[Sequence[int]], place: Sequence[int]) -> int:
    """Row-major index of a place in a grid."""
    index = 0
    for grid, i in zip(grids, place, strict=True):
        index = index * len(grid) + i
    return index


def _is_noisy(spread: Spread | None, index: int) -> bool:
    return spread is not None and index in spread.noisy


def _note(text: str, spread: Spread | None) -> str:
    noisy = f"{NOISY_NOTE} (more than {spread.noisy_above:.0%})" if spread is not None and spread.noisy else ""
    return "; ".join(part for part in (text, noisy) if part)


def _unit(rates: Sequence[float]) -> tuple[str, float]:
    """The prefix T or G and its factor, chosen by the largest rate."""
    return ("T", 1e12) if max(rates) >= 1e12 else ("G", 1e9)


def _cell(rate: tuple[float, bool], scale: float) -> str:
    return _number(rate[0] / scale) + (NOISY_MARK if rate[1] else "")


def _number(value: float) -> str:
    """A number with three significant digits at most: 812, 41.3, 0.052."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def _rate(per_second: float) -> str:
    """A rate with its unit's prefix: 2.90 T, 41.3 G."""
    unit, scale = _unit([per_second])
    return f"{_number(per_second / scale)} {unit}"


def short_bytes(num_bytes: float) -> str:
    """Bytes as text without trailing zeros: 1 KiB, 256 MiB, 1.5 GiB."""
    number, unit = format_bytes(num_bytes).split(" ")
    return f"{float(number):g} {unit}"


def _rounded(size: int) -> int:
    """The nearest power of two: groups of six ranks measured multiples of 36 bytes."""
    return int(2 ** round(math.log2(size)))


def _evenly_spaced(sizes: Sequence[int], most: int = 6) -> list[int]:
    """At most `most` of the sizes, evenly spaced, including the first and the last."""
    if len(sizes) <= most:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)]

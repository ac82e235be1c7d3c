"""Tables of collectives: those that were measured, and those scaled from a like machine by the rates of the links.

Measured: several rows of one source at one size (in place and out of place) -> their median; several sources -> the
median of these; then the nearest non-decreasing sequence in the sense of least absolute log deviation (XLA's table
scatters by 2-3 x at small sizes, which medians ignore).

Scaled: T' = L + (T - L) r, with r the like machine's link rate over this one's, and L the latency, which does not go
with the rate. How wrong that is shows where a scaled table meets a measured one; that is what a scaled one's error
bar holds, beside the like machine's own.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from published.machines import DATA_SHEETS, XLA_COLLECTIVES, Machine
from published.read import Array
from tpplan.machine.fit_tables import TIME_DIGITS, digits, isotonic_median, neighbour_errors, rms
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import Collective, CollectiveTable

#: kind, ranks, ranks per node
GroupKey = tuple[Collective, int, int]

#: a table that starts above this tells nothing about latency on its own
LATENCY_VISIBLE_BYTES = 1024**2
#: one that starts above this does not even show it in an affine fit
LATENCY_FITTED_BYTES = 1024**3
#: messages whose time is bandwidth
LARGE_BYTES = 16 * 1024**2
#: one guide's measurements of three machines, the last of which others measured too
GUIDE_SOURCES = ("S02", "S04", "S03")
#: it gives bus bandwidth alone, in GB/s of two decimals: half a unit of the last
ROUNDING_GBPS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingError:
    """Relative error of scaling, below and from LARGE_BYTES, and where it was seen."""

    small: float
    large: float
    seen: str

    def at(self, num_bytes: float) -> float:
        """That of a message."""
        return self.large if num_bytes >= LARGE_BYTES else self.small


def groups(rows: pd.DataFrame) -> Iterator[tuple[GroupKey, pd.DataFrame]]:
    """Rows by (kind, ranks, ranks per node), in the order of a profile's tables."""
    keyed = {
        (Collective(str(kind)), int(str(ranks)), int(str(per_node))): group
        for (kind, ranks, per_node), group in rows.groupby(["kind", "ranks", "ranks_per_node"])
    }
    for key in sorted(keyed, key=table_order):
        yield key, keyed[key]


def table_order(key: GroupKey) -> tuple[int, int, int]:
    """Kinds in their own order, groups by ranks per node, then ranks."""
    return list(Collective).index(key[0]), key[2], key[1]


def key_of(table: CollectiveTable) -> GroupKey:
    """What a table is the only one of."""
    return table.kind, table.ranks, table.ranks_per_node


def lone_source_error(rows: pd.DataFrame, kind: Collective, source: str = XLA_COLLECTIVES) -> float:
    """How far a source is from the median of the others where both measured this kind: median |ln| from 16 MiB on."""
    same = rows[(rows.kind == kind) & (rows.n >= LARGE_BYTES)]
    place = ["ranks", "ranks_per_node", "n"]
    own = same[same.source_id == source].groupby(place).time_s.median()
    others = same[same.source_id != source].groupby(place).time_s.median()
    ratio = (own / others).dropna()
    return float(np.median(np.abs(np.log(ratio.to_numpy()))))


def affine_latency(sizes: Array, times: Array) -> float:
    """L of T = L + n/B, least squares of the relative error, between 0 and the shortest time measured."""
    design = np.stack([np.ones_like(times), sizes], axis=1) / times[:, None]
    latency = np.linalg.lstsq(design, np.ones_like(times), rcond=None)[0][0]
    return float(np.clip(latency, 0.0, times[0]))


def latencies(measured: Mapping[GroupKey, tuple[Array, Array]]) -> dict[GroupKey, tuple[float, str | None]]:
    """Latency of each group and how it was inferred: measured, else fitted, else from a group that was fitted."""
    found: dict[GroupKey, tuple[float, str | None]] = {}
    blind: list[GroupKey] = []
    for key, (sizes, times) in measured.items():
        smallest = sizes[0] / (key[1] if key[0] is Collective.ALL_TO_ALL else 1)
        if smallest <= LATENCY_VISIBLE_BYTES:
            found[key] = float(times[0]), None
        elif smallest <= LATENCY_FITTED_BYTES:
            found[key] = affine_latency(sizes, times), "latency_s: affine fit T = L + n/B of the points above"
        else:
            blind.append(key)
    for key in blind:
        kind, ranks, per_node = key
        donor = next(other for other in found if other[0] is kind and other[2] == per_node and other[1] > per_node)
        latency = found[donor][0] * (ranks - 1) / (donor[1] - 1)
        how = f"latency_s: that of {donor[1]} ranks, {per_node} per node, by ring steps"
        found[key] = min(latency, float(measured[key][1][0])), how
    return found


def measured_tables(rows: pd.DataFrame, reference: pd.DataFrame) -> list[CollectiveTable]:
    """One table per measured group.

    reference: rows of a machine that several sources measured. They tell how far one source alone can be off.
    """
    measured: dict[GroupKey, tuple[Array, Array]] = {}
    for key, group in groups(rows):
        merged = group.groupby(["n", "source_id"]).time_s.median().groupby("n").median()
        measured[key] = merged.index.to_numpy(dtype=np.int64), isotonic_median(merged.to_numpy())
    latency = latencies(measured)
    tables = []
    for key, group in groups(rows):
        sizes, times = measured[key]
        seconds, how = latency[key]
        cited = tuple(sorted(group.source_id.unique().tolist()))
        errors = neighbour_errors(sizes, times, group.n.to_numpy(), group.time_s.to_numpy())
        if len(cited) == 1:
            alone = alone_errors(group, cited[0], key[0], sizes, reference)
            errors = [digits(math.hypot(error, more), 2) for error, more in zip(errors, alone, strict=True)]
        tables.append(
            CollectiveTable(
                kind=key[0],
                ranks=key[1],
                ranks_per_node=key[2],
                latency_s=digits(seconds, TIME_DIGITS),
                bytes=tuple(sizes.tolist()),
                time_s=tuple(digits(time, TIME_DIGITS) for time in times),
                relative_error=tuple(errors),
                sources=cited,
                inferred=how,
            )
        )
    return tables


def alone_errors(
    group: pd.DataFrame, source: str, kind: Collective, sizes: Array, reference: pd.DataFrame
) -> list[float]:
    """What one source's scatter around itself does not show, by size: its bias, and the rounding of what it printed."""
    if source == XLA_COLLECTIVES:
        # It scatters little around itself, and lies up to a fifth above what others measured.
        return [lone_source_error(reference, kind)] * len(sizes)
    if source not in GUIDE_SOURCES:
        return [0.0] * len(sizes)
    bias = lone_source_error(reference, kind, GUIDE_SOURCES[-1])
    busbw = group.groupby("n").busbw_GBps.median()
    return [math.hypot(bias, ROUNDING_GBPS / busbw[size]) for size in sizes]


# --- scaled from a like machine ------------------------------------------------------------------------------------


def scaled_tables(like: HardwareProfile, like_machine: Machine, machine: Machine) -> list[CollectiveTable]:
    """Every group of the like machine, at this machine's links; without the error of scaling.

    Left out is the all_reduce of a whole node where the like machine's switch adds up and this one's does not.
    """
    shortcut = (Collective.ALL_REDUCE, machine.gpus_per_node, machine.gpus_per_node)
    lacks_shortcut = like_machine.switch_reduces and not machine.switch_reduces
    return [
        scaled_table(table, *links(table, like_machine, machine), like.name)
        for table in like.collectives
        if not (lacks_shortcut and key_of(table) == shortcut)
    ]


def links(table: CollectiveTable, like_machine: Machine, machine: Machine) -> tuple[float, str]:
    """Rate of the like machine's link over this one's, and how to say it."""
    if table.group.nodes > 1:
        was, now = like_machine.across_nodes, machine.across_nodes
    else:
        was, now = like_machine.in_node, machine.in_node
    name = f"{was.name} to {now.name}" if was != now else f"{now.name} as there"
    return was.bytes_per_s / now.bytes_per_s, name


def scaled_table(table: CollectiveTable, ratio: float, link: str, like: str) -> CollectiveTable:
    """T' = L + (T - L) ratio, sizes and latency as they were."""
    how = f"{like}'s, {link}" + (f": what is not latency times {ratio:g}" if ratio != 1 else "")
    if table.inferred:
        how += f" ({table.inferred})" if table.inferred.startswith("latency_s") else ", where it is inferred too"
    return dataclasses.replace(
        table,
        time_s=tuple(digits(table.latency_s + (time - table.latency_s) * ratio, TIME_DIGITS) for time in table.time_s),
        inferred=how,
    )


def with_error(table: CollectiveTable, error: ScalingError) -> CollectiveTable:
    """A scaled table with its error bar, and the source of the links' rates."""
    return dataclasses.replace(
        table,
        relative_error=tuple(
            digits(math.hypot(own, error.at(num_bytes)), 2)
            for own, num_bytes in zip(table.relative_error, table.bytes, strict=True)
        ),
        sources=tuple(dict.fromkeys((*table.sources, DATA_SHEETS))),
        inferred=f"{table.inferred}; relative_error: its own there, with {error.seen}",
    )


def deviations(predicted: HardwareProfile, measured: Sequence[CollectiveTable]) -> tuple[Array, Array]:
    """ln(predicted / measured) at the points of the measured tables, below and from LARGE_BYTES."""
    points = [
        (n, math.log(predicted.collective(table.kind, table.group, n).seconds / time))
        for table in measured
        for n, time in zip(table.bytes, table.time_s, strict=True)
    ]
    return tuple(np.array([error for n, error in points if (n >= LARGE_BYTES) == large]) for large in (False, True))


def seen_error(predicted: HardwareProfile, measured: Sequence[CollectiveTable], where: str) -> ScalingError:
    """The RMS deviations."""
    small, large = deviations(predicted, measured)
    return ScalingError(small=rms(small), large=rms(large), seen=where)

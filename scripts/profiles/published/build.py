"""A machine's profile: what was measured, and where nothing was, what the like machine's becomes on this one."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from published import attention, collectives, matmuls
from published.collectives import ScalingError
from published.machines import (
    BATCHED,
    COUNTING,
    MACHINES,
    MISALIGNED,
    ML_ENGINEERING,
    Achieved,
    BestAttention,
    Machine,
    MeasuredMatmuls,
    OtherFabric,
    PublishedAttention,
    ShareOfPeak,
    SpareRatios,
    SpareRows,
)
from published.matmuls import Rate, Roofline
from published.read import Array, Data, collective_rows, described_sources, unnamed_interconnects
from tpplan.machine.fit_tables import digits, group_extrapolation, rms
from tpplan.machine.profile import SCHEMA_VERSION, HardwareProfile
from tpplan.machine.tables import (
    AttentionRate,
    Bandwidth,
    CollectiveTable,
    GroupExtrapolation,
    Launch,
    MatmulTable,
    Memory,
)

TERA = 1e12
#: no benchmark of memory is nearer to what a model's kernels reach
LEAST_BANDWIDTH_ERROR = 0.1
#: assumed: how long the CPU and the driver take was not measured
LAUNCH_ERROR = 0.5
RESERVED_BYTES = 2 * 1024**3
RESERVED_BECAUSE = "reserved_bytes: assumed, for CUDA context, NCCL buffers and allocator slack"
#: before the groups were left out one by one
UNKNOWN_EXTRAPOLATION = GroupExtrapolation(in_node_relative_error=0.0, across_nodes_relative_error=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was predicted by scaling and measured by somebody: ln(predicted / measured) by place, one or several."""

    what: str
    deviations: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A profile, with what it was made of."""

    machine: Machine
    profile: HardwareProfile
    rate: Rate
    roofline: Roofline
    rows: pd.DataFrame
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        """The profile's."""
        return self.machine.name


def build_all(data: Data) -> dict[str, Built]:
    """Every machine, by name. A machine stands after the one that it is like, and the first was measured by several.

    Raises ValueError for data that contradict themselves or that must not be bundled, and ProfileError for a profile
    that would not load.
    """
    built: dict[str, Built] = {}
    for machine in MACHINES:
        reference = next(iter(built.values())).rows if built else own_rows(data, machine)
        built[machine.name] = build(data, machine, built[machine.like] if machine.like else None, reference)
    return built


def build(data: Data, machine: Machine, like: Built | None, reference: pd.DataFrame) -> Built:
    """One machine's profile; reference: rows of collectives of a machine that several sources measured."""
    rows = own_rows(data, machine)
    tables, collective_checks = collectives_of(data, machine, like, rows, reference)
    bandwidth, launch = bandwidth_of(data, machine), launch_of(data, machine, like)
    rate = matmuls.rate_of(data, machine, like.rate.flop_per_s if like else None)
    roofline = Roofline(flop_per_s=rate.flop_per_s, bytes_per_s=bandwidth.hbm_bytes_per_s)
    matmul_tables, matmul_checks = matmuls_of(data, machine, like, rate, roofline, launch)
    misaligned = matmuls.misaligned(data, MISALIGNED, machine, rate)
    batched = matmuls.batched(BATCHED, machine, rate)
    rates = attention_of(data, machine, like, rate)
    memory = Memory(
        memory_bytes=machine.memory_bytes,
        reserved_bytes=RESERVED_BYTES,
        sources=(machine.memory_source.id,),
        inferred="; ".join(filter(None, (machine.memory_inferred, RESERVED_BECAUSE))),
    )
    cited = {
        id_
        for part in (memory, bandwidth, launch, *matmul_tables, *misaligned, *batched, *rates, *tables)
        for id_ in part.sources
    }
    profile = HardwareProfile(
        schema_version=SCHEMA_VERSION,
        name=machine.name,
        device=machine.device,
        device_type="cuda",
        gpus_per_node=machine.gpus_per_node,
        notes=notes(data, machine, like),
        sources=tuple(described_sources(data.sources, cited, (machine.memory_source,))),
        memory=memory,
        bandwidth=bandwidth,
        launch=launch,
        matmuls=tuple(matmul_tables),
        attention_rates=tuple(rates),
        group_extrapolation=UNKNOWN_EXTRAPOLATION,
        collectives=tuple(tables),
        misaligned_matmuls=tuple(misaligned),
        batched_matmuls=tuple(batched) or None,
    )
    profile = dataclasses.replace(profile, group_extrapolation=group_extrapolation(profile))
    return Built(
        machine=machine,
        profile=HardwareProfile.from_dict(profile.to_dict(), machine.name),
        rate=rate,
        roofline=roofline,
        rows=rows,
        checks=(*collective_checks, *matmul_checks),
    )


def like_of(machine: Machine, like: Built | None) -> Built:
    """The like machine. Raises ValueError where an entry has neither a measurement nor one."""
    if like is None:
        raise ValueError(f"{machine.name}: something was not measured, and its entry names no like machine")
    return like


# --- collectives ---------------------------------------------------------------------------------------------------


def own_rows(data: Data, machine: Machine) -> pd.DataFrame:
    """The machine's measured collectives. Raises ValueError for a fabric that its entry does not name."""
    named = [*machine.collectives, *([machine.other_fabric.rows] if machine.other_fabric else [])]
    unnamed = unnamed_interconnects(data, named)
    if unnamed:
        raise ValueError(f"{machine.name}: interconnects that its entry does not name: {', '.join(sorted(unnamed))}")
    parts = [collective_rows(data, which) for which in machine.collectives]
    return pd.concat(parts) if parts else pd.DataFrame()


def collectives_of(
    data: Data, machine: Machine, like: Built | None, rows: pd.DataFrame, reference: pd.DataFrame
) -> tuple[list[CollectiveTable], list[Check]]:
    """The measured tables and, for groups that nobody measured, the like machine's, scaled; how they compare."""
    measured = collectives.measured_tables(rows, reference) if len(rows) else []
    if like is None:
        return measured, []
    scaled = collectives.scaled_tables(like.profile, like.machine, machine)
    # Clusters of one kind of machine differ by as much as each predicts another.
    unseen = like.profile.group_extrapolation.across_nodes_relative_error
    seen = f"{unseen:g}, by which clusters of {like.name} predict each other"
    in_node = across = ScalingError(small=unseen, large=unseen, seen=seen)
    checks = []
    if measured:
        predicted = dataclasses.replace(like.profile, collectives=tuple(scaled))
        in_node = collectives.seen_error(predicted, measured, "how far scaled times are from those measured in a node")
        checks.append(collective_check("collectives in a node, scaled against measured", predicted, measured))
    if machine.other_fabric:
        across, check = other_fabric_error(data, machine, machine.other_fabric, like, reference)
        checks.append(check)
    known = {collectives.key_of(table) for table in measured}
    tables = measured + [
        collectives.with_error(table, across if table.group.nodes > 1 else in_node)
        for table in scaled
        if collectives.key_of(table) not in known
    ]
    return sorted(tables, key=lambda table: collectives.table_order(collectives.key_of(table))), checks


def other_fabric_error(
    data: Data, machine: Machine, fabric: OtherFabric, like: Built, reference: pd.DataFrame
) -> tuple[ScalingError, Check]:
    """How far the like machine's times, scaled to another fabric of this machine, are from those measured there."""
    elsewhere = dataclasses.replace(machine, across_nodes=fabric.link)
    tables = collectives.scaled_tables(like.profile, like.machine, elsewhere)
    predicted = dataclasses.replace(like.profile, collectives=tuple(tables))
    measured = collectives.measured_tables(collective_rows(data, fabric.rows), reference)
    error = collectives.seen_error(predicted, measured, f"how far times scaled to {fabric.link.name} are from measured")
    return error, collective_check(f"collectives across nodes, scaled to {fabric.link.name}", predicted, measured)


def collective_check(what: str, predicted: HardwareProfile, measured: list[CollectiveTable]) -> Check:
    """Deviations of each measured group, small and large."""
    found = {
        f"{table.kind} {table.ranks} x {table.ranks_per_node}, {size}": part
        for table in measured
        for size, part in zip(("small", "large"), collectives.deviations(predicted, [table]), strict=True)
        if len(part)
    }
    return Check(what=what, deviations=found)


# --- memory and launches -------------------------------------------------------------------------------------------


def launch_of(data: Data, machine: Machine, like: Built | None) -> Launch:
    """The shortest product of a measured grid, else the like machine's."""
    if machine.matmuls is None:
        there = like_of(machine, like).profile
        return dataclasses.replace(there.launch, inferred=f"{there.name}'s; there: {there.launch.inferred}")
    return Launch(
        launch_s=matmuls.shortest(data, machine.matmuls),
        relative_error=LAUNCH_ERROR,
        sources=(machine.matmuls.source,),
        inferred="no measurement of launches: the shortest matmul of the table; relative_error is assumed",
    )


def bandwidth_of(data: Data, machine: Machine) -> Bandwidth:
    """As hardware.csv has it, else the share of the peak that the measured ones reach."""
    match machine.bandwidth:
        case Achieved(hardware=hardware, source=source):
            copied = data.figure(hardware, "hbm_achieved_TBps")
            note = str(data.hardware.loc[hardware, "hbm_achieved_note"])
            triad, dot = (float(found) for found in re.findall(r"(?:triad|dot) ([\d.]+)", note))
            return Bandwidth(
                hbm_bytes_per_s=copied * TERA,
                relative_error=max(LEAST_BANDWIDTH_ERROR, digits(math.log(dot / copied), 2)),
                sources=(source,),
                inferred=f"relative_error: BabelStream's other kernels (triad {triad:.2f}, dot {dot:.2f} TB/s) against"
                f" copy, {copied:.2f}",
            )
        case ShareOfPeak(peak_bytes_per_s=peak, source=source):
            others = [other.bandwidth for other in MACHINES if isinstance(other.bandwidth, Achieved)]
            shares = [achieved_share(data, other.hardware) for other in others]
            share = float(np.median(shares))
            farthest = max(abs(math.log(other / share)) for other in shares)
            return Bandwidth(
                hbm_bytes_per_s=digits(peak * share, 3),
                relative_error=digits(math.hypot(farthest, LEAST_BANDWIDTH_ERROR), 2),
                sources=tuple(dict.fromkeys((source, ML_ENGINEERING, *(other.source for other in others)))),
                inferred=f"{share:.3f} of a peak of {peak / TERA:g} TB/s, the median share of the {len(shares)}"
                " machines whose copy was measured; relative_error: the farthest, with that of other kernels",
            )


def achieved_share(data: Data, hardware: str) -> float:
    """Achieved over peak bandwidth."""
    return data.figure(hardware, "hbm_achieved_TBps") / data.figure(hardware, "hbm_spec_TBps")


# --- matmuls and attention -----------------------------------------------------------------------------------------


def matmuls_of(
    data: Data, machine: Machine, like: Built | None, rate: Rate, roofline: Roofline, launch: Launch
) -> tuple[list[MatmulTable], list[Check]]:
    """Measured tables, else the like machine's on this roofline; the spare rows beside."""
    if machine.matmuls is not None:
        return matmuls.measured_tables(data, machine.matmuls, launch.launch_s), []
    like = like_of(machine, like)
    tables = matmuls.scaled_tables(like.profile, like.roofline, roofline)
    check = spare_check(data, machine, like, roofline, tables)
    if check:
        error, seen = rms(np.concatenate(list(check.deviations.values()))), check.what
    else:
        error, seen = matmuls.UNCHECKED_RELATIVE_ERROR, "assumed: no product was measured"
    how = (
        f"{like.name}'s, along the roofline: {rate.how}, there {like.rate.flop_per_s / TERA:.4g} TFLOP/s;"
        f" {roofline.bytes_per_s / TERA:.3g} TB/s, there {like.roofline.bytes_per_s / TERA:.3g};"
        f" relative_error: its own there, with {error:.2g}, {seen}"
    )
    if rate.relative_error:
        how += f", and with {rate.relative_error:.2g}, {rate.because}"
    sources = (ML_ENGINEERING, *rate.sources, *spare_sources(data, machine))
    error = math.hypot(error, rate.relative_error)
    return [matmuls.with_error(table, error, how, sources) for table in tables], [check] if check else []


def spare_check(
    data: Data, machine: Machine, like: Built, roofline: Roofline, tables: list[MatmulTable]
) -> Check | None:
    """The scaled tables against products that were measured and are in no grid."""
    match machine.spare_matmuls:
        case None:
            return None
        case SpareRows() as spare:
            bandwidth = dataclasses.replace(like.profile.bandwidth, hbm_bytes_per_s=roofline.bytes_per_s)
            predicted = dataclasses.replace(like.profile, matmuls=tuple(tables), bandwidth=bandwidth)
            found = matmuls.spare_rows_deviations(data, spare, predicted)
            what = f"how far {len(found)} {spare.dtype_in_file} products are that were measured elsewhere"
        case SpareRatios() as spare:
            found = matmuls.spare_ratios_deviations(data, spare, like.roofline, roofline)
            what = f"how far the ratio to {like.name} is for {len(found)} {spare.dtype_in_file} products of both"
    places = {f"matmul {m} x {n} x {k}": np.array([deviation]) for (m, n, k), deviation in found.items()}
    return Check(what=f"{what} (median {np.median(list(found.values())):+.1%})", deviations=places)


def spare_sources(data: Data, machine: Machine) -> tuple[str, ...]:
    """Sources of the spare rows."""
    spare = machine.spare_matmuls
    if spare is None:
        return ()
    names = [spare.hardware, *([spare.like_hardware] if isinstance(spare, SpareRatios) else [])]
    rows = data.matmuls[data.matmuls.hardware.isin(names) & (data.matmuls.dtype == spare.dtype_in_file)]
    return tuple(sorted(rows.source_id.unique().tolist()))


def attention_of(data: Data, machine: Machine, like: Built | None, rate: Rate) -> list[AttentionRate]:
    """Published rates, else the like machine's times the ratio of rates."""
    match machine.attention:
        case PublishedAttention() as figures:
            return attention.published(figures, float32_share(data, machine, like))
        case BestAttention() as figures:
            shapes = like_of(machine, like).machine.attention
            if not isinstance(shapes, PublishedAttention):
                raise ValueError(f"{machine.name}: a best rate of attention needs a like machine with figures by shape")
            return attention.from_best(figures, shapes, float32_share(data, machine, like))
        case None:
            like = like_of(machine, like)
            factor = rate.flop_per_s / like.rate.flop_per_s
            how = f"{like.name}'s times {factor:.3g}, as large matmuls"
            sources = (ML_ENGINEERING, *rate.sources)
            return attention.scaled(like.profile.attention_rates, factor, rate.relative_error, how, sources)


def float32_share(data: Data, machine: Machine, like: Built | None) -> float:
    """Rate of float32 over that of bfloat16 in large matmuls, here or on the like machine."""
    grid = machine.matmuls or like_of(machine, like).machine.matmuls
    if grid is None:
        raise ValueError(f"{machine.name}: neither it nor its like machine has a grid of matmuls")
    return matmuls.slower_in_full_precision(data, grid)


# --- words ---------------------------------------------------------------------------------------------------------


def notes(data: Data, machine: Machine, like: Built | None) -> tuple[str, ...]:
    """What a reader of the file must know."""
    found = [COUNTING]
    if like:
        found.append(f"like {like.name}: {machine.because}")
    if machine.matmuls:
        found += matmul_notes(data, machine, machine.matmuls)
    return (*found, *machine.notes)


def matmul_notes(data: Data, machine: Machine, grid: MeasuredMatmuls) -> list[str]:
    """The check of a measured grid against an independent source."""
    best = matmuls.best_rate(data, grid) / TERA
    achieved = matmuls.rate_of(data, machine, None).flop_per_s / TERA
    found = [
        f"matmuls: the best of the bfloat16 table is {best:.1f} TFLOP/s, {best / achieved:.3f} x the {achieved} TFLOP/s"
        " that a search over shapes reached elsewhere (stas00/ml-engineering, mamf-finder; a check, not bundled)"
    ]
    if "SKU not stated" in grid.hardware:
        found.append(f"matmuls: {grid.source} states sm_90 and no SKU; taken as the SXM part, as the rate above shows")
    return found

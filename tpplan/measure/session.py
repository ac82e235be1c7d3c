"""Measures a machine section by section, within a budget, so that an interrupted measurement can be resumed.

A section is a kind of kernel in one dtype, or a collective on one group. Each has a weight, and gets of the remaining
budget its share of the remaining weights. After each section the tables so far are written beside the output; a later
run on equal device, software, ranks and grid goes on from there.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from tpplan.core.errors import ProfileError, UsageError
from tpplan.core.files import write_atomically
from tpplan.core.mesh import GroupShape
from tpplan.core.strict_json import decode, encode, read_json
from tpplan.core.units import KIB
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.machine.tables import (
    AttentionRate,
    AttentionTable,
    Bandwidth,
    CollectiveTable,
    Launch,
    MatmulTable,
    MemoryBoundTable,
    MisalignedMatmuls,
    OptimizerIssue,
    Overlap,
)
from tpplan.measure.attention import measure_attention
from tpplan.measure.collectives import group_shapes, measure_collective, measure_overlap, ranks_per_node, subgroup
from tpplan.measure.compute import (
    ALIGNED_DEVICES,
    ATTENTION_SHARE,
    LAUNCH_SHARE,
    MATMUL_SHARE,
    MEMORY_BOUND_SHARE,
    MISALIGNED_SHARE,
    OPTIMIZER_SHARE,
    ComputeTables,
    make_profile,
    measure_memory_bound,
)
from tpplan.measure.device import device_name, dtype_of, software
from tpplan.measure.grid import ComputeGrid, default_grid
from tpplan.measure.launch import measure_launch
from tpplan.measure.matmuls import measure_matmuls
from tpplan.measure.misaligned import measure_misaligned
from tpplan.measure.optimizer_step import measure_optimizers
from tpplan.measure.timer import Progress, silent, slowest

#: shares of the budget where there are collectives to measure, which have the rest
COMPUTE_SHARE, OVERLAP_SHARE = 0.6, 0.03
#: sizes of collectives: bytes of the whole value, by device type
MESSAGE_BYTES = {"cpu": tuple(KIB * 4**i for i in range(8)), "cuda": tuple(KIB * 4**i for i in range(11))}
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16", "float32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The tables measured so far, under the names that they have in a profile."""

    launch: Launch | None = None
    optimizer_issues: tuple[OptimizerIssue, ...] = ()
    bandwidth: Bandwidth | None = None
    memory_bound_table: MemoryBoundTable | None = None
    overlap: Overlap | None = None
    attention_rates: tuple[AttentionRate, ...] = ()
    attention_tables: tuple[AttentionTable, ...] = ()
    matmuls: tuple[MatmulTable, ...] = ()
    misaligned_matmuls: tuple[MisalignedMatmuls, ...] = ()
    collectives: tuple[CollectiveTable, ...] = ()

    def compute(self) -> ComputeTables:
        """The tables of one device. All of them must have been measured."""
        assert self.launch
        assert self.bandwidth
        assert self.memory_bound_table
        return ComputeTables(
            launch=self.launch,
            optimizer_issues=self.optimizer_issues,
            bandwidth=self.bandwidth,
            memory_bound_table=self.memory_bound_table,
            matmuls=self.matmuls,
            misaligned_matmuls=self.misaligned_matmuls,
            attention_rates=self.attention_rates,
            attention_tables=self.attention_tables,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The content of the file beside the output: the tables so far, and what they depend on (Survey.where)."""

    where: Mapping[str, str]
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the measurement: `measure` takes the tables so far and a budget in seconds, and returns them with the
    section's own tables."""

    name: str
    weight: float
    is_done: bool
    measure: Callable[[Measured, float], Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A measurement to make: device, dtypes (torch's names), points, and the number of ranks (`world`)."""

    device: torch.device
    dtypes: tuple[str, ...]
    grid: ComputeGrid
    message_bytes: tuple[int, ...]
    world: int
    ranks_per_node: int
    progress: Progress = silent

    def where(self) -> dict[str, str]:
        """The conditions that must be equal for a measurement to be resumed: device, software, ranks, grid."""
        points = json.dumps([encode(self.grid), self.message_bytes])
        return {
            "device": device_name(self.device),
            "ranks": f"{self.world}, {self.ranks_per_node} per node",
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "threads": str(torch.get_num_threads()),
            "grid": hashlib.sha256(points.encode()).hexdigest()[:12],
            **software(self.device),
        }

    def sections(self, done: Measured) -> Iterator[Section]:
        """Yields all sections in order; each may use the tables of those before it."""
        of_compute = COMPUTE_SHARE if self.world > 1 else 1.0
        yield Section(
            name="launch",
            weight=of_compute * LAUNCH_SHARE,
            is_done=done.launch is not None,
            measure=lambda so_far, budget_s: replace(so_far, launch=measure_launch(self.device, budget_s)),
        )
        yield Section(
            name="optimizers",
            weight=of_compute * OPTIMIZER_SHARE,
            is_done=bool(done.optimizer_issues),
            measure=lambda so_far, budget_s: replace(
                so_far, optimizer_issues=measure_optimizers(self.device, budget_s)
            ),
        )
        yield Section(
            name="memory",
            weight=of_compute * MEMORY_BOUND_SHARE,
            is_done=done.memory_bound_table is not None,
            measure=self._memory_bound,
        )
        for name in self.dtypes:
            yield self._attention(name, of_compute * ATTENTION_SHARE / len(self.dtypes), done)
        for name in self.dtypes:
            yield self._matmuls(name, of_compute * MATMUL_SHARE / len(self.dtypes), done)
        if self.device.type in ALIGNED_DEVICES:
            for name in self.dtypes:
                yield self._misaligned(name, of_compute * MISALIGNED_SHARE / len(self.dtypes), done)
        if self.world > 1:
            yield from self._collectives(1 - COMPUTE_SHARE - OVERLAP_SHARE, done)
            yield Section(
                name="overlap",
                weight=OVERLAP_SHARE,
                is_done=done.overlap is not None,
                measure=lambda so_far, budget_s: replace(
                    so_far, overlap=measure_overlap(self.device, dtype=self.dtypes[0], budget_s=budget_s)
                ),
            )

    def _memory_bound(self, so_far: Measured, budget_s: float) -> Measured:
        bandwidth, table = measure_memory_bound(self.device, self.grid.copied_bytes, budget_s, self.progress)
        return replace(so_far, bandwidth=bandwidth, memory_bound_table=table)

    def _attention(self, dtype: str, weight: float, done: Measured) -> Section:
        def measure(so_far: Measured, budget_s: float) -> Measured:
            rate, tables = measure_attention(
                self.device, dtype_of(dtype), self.grid.attention, budget_s, _launch_s(so_far), self.progress
            )
            return replace(
                so_far,
                attention_rates=(*so_far.attention_rates, rate),
                attention_tables=(*so_far.attention_tables, *tables),
            )

        is_done = any(rate.dtype == dtype for rate in done.attention_rates)
        return Section(name=f"attention {dtype}", weight=weight, is_done=is_done, measure=measure)

    def _matmuls(self, dtype: str, weight: float, done: Measured) -> Section:
        def measure(so_far: Measured, budget_s: float) -> Measured:
            table = measure_matmuls(self.device, dtype_of(dtype), self.grid, budget_s, _launch_s(so_far), self.progress)
            return replace(so_far, matmuls=(*so_far.matmuls, table))

        is_done = any(table.dtype == dtype for table in done.matmuls)
        return Section(name=f"matmul {dtype}", weight=weight, is_done=is_done, measure=measure)

    def _misaligned(self, dtype: str, weight: float, done: Measured) -> Section:
        def measure(so_far: Measured, budget_s: float) -> Measured:
            entries = measure_misaligned(self.device, dtype_of(dtype), self.grid, budget_s, self.progress)
            return replace(so_far, misaligned_matmuls=(*so_far.misaligned_matmuls, *entries))

        is_done = any(entry.dtype == dtype for entry in done.misaligned_matmuls)
        return Section(name=f"misaligned matmul {dtype}", weight=weight, is_done=is_done, measure=measure)

    def _collectives(self, weight: float, done: Measured) -> Iterator[Section]:
        wanted = [(shape, kind) for shape in group_shapes(self.world, self.ranks_per_node) for kind in Collective]
        groups: dict[GroupShape, str] = {}

        def section(number: int, shape: GroupShape, kind: Collective) -> Section:
            def measure(so_far: Measured, budget_s: float) -> Measured:
                if shape not in groups:
                    groups[shape] = subgroup(shape, self.ranks_per_node)
                table = measure_collective(
                    kind, shape, groups[shape], self.message_bytes, device=self.device, budget_s=budget_s
                )
                self.progress("collectives", number, len(wanted))
                return replace(so_far, collectives=(*so_far.collectives, table))

            return Section(
                name=f"{kind} on {shape.ranks} ranks, {shape.ranks_per_node} per node",
                weight=weight / len(wanted),
                is_done=any((table.kind, table.group) == (kind, shape) for table in done.collectives),
                measure=measure,
            )

        for number, (shape, kind) in enumerate(wanted, start=1):
            yield section(number, shape, kind)


def _launch_s(so_far: Measured) -> float:
    assert so_far.launch
    return so_far.launch.launch_s


def survey_of(
    device: torch.device,
    *,
    dtypes: Sequence[str] = (),
    grid: ComputeGrid | None = None,
    message_bytes: Sequence[int] = (),
    progress: Progress = silent,
) -> Survey:
    """The survey of this machine, with the device's defaults, on the ranks of the default group where there is one.

    Every rank must call this. Raises UsageError for a dtype that cannot be measured, and where ranks are not numbered
    as torchrun does.
    """
    names = tuple(dtypes) or DTYPES[device.type]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"dtypes: expected each once, got {', '.join(repeated)} more than once")
    for name in names:
        dtype_of(name)
    if device.type == "cuda" and "float64" in names:
        raise UsageError(
            "dtypes: float64 has no fused attention on a GPU, so it cannot be measured there; leave it out"
        )
    return Survey(
        device=device,
        dtypes=names,
        grid=grid or default_grid(device.type),
        message_bytes=tuple(message_bytes) or MESSAGE_BYTES[device.type],
        world=dist.get_world_size() if dist.is_initialized() else 1,
        ranks_per_node=ranks_per_node() if dist.is_initialized() else 1,
        progress=progress,
    )


def measure_machine(
    survey: Survey,
    *,
    name: str,
    budget_s: float,
    notes: Sequence[str] = (),
    partial: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> HardwareProfile:
    """Measures the profile of this machine in about budget_s seconds. Every rank must call this.

    partial: the file in which the first rank keeps the tables of finished sections; the caller removes it. Sections in
        it are not measured again if device, software, ranks and grid are equal.
    say: told whether the measurement goes on from that file.

    Raises PlanError where the file cannot be written.
    """
    start = time.perf_counter()
    measured = _resumed(survey, partial, say)
    pending = [section for section in survey.sections(measured) if not section.is_done]
    for place, section in enumerate(pending):
        (spent_s,) = slowest(survey.device, [time.perf_counter() - start])
        part = section.weight / sum(later.weight for later in pending[place:])
        measured = section.measure(measured, max(0.0, budget_s - spent_s) * part)
        if partial is not None and _is_first_rank():
            write_atomically(partial, json.dumps(encode(Partial(where=survey.where(), measured=measured))))
    return make_profile(
        name=name,
        device=survey.device,
        compute=measured.compute(),
        collectives=tuple(sorted(measured.collectives, key=_place)),
        gpus_per_node=survey.ranks_per_node,
        overlap=measured.overlap,
        notes=(*_left_out(survey, measured), *notes),
    )


def _place(table: CollectiveTable) -> tuple[int, int, int]:
    return list(Collective).index(table.kind), table.group.nodes, table.ranks_per_node


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _resumed(survey: Survey, partial: Path | None, say: Callable[[str], None]) -> Measured:
    """The tables in the first rank's file, on every rank; no tables where there is no file of this measurement."""
    found: list[object] = [None]
    if partial is not None and _is_first_rank() and partial.exists():
        found = [_read_partial(survey, partial, say)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return decode(Measured, found[0], origin="partial", error=ProfileError) if found[0] is not None else Measured()


def _read_partial(survey: Survey, path: Path, say: Callable[[str], None]) -> object:
    """The tables in the file, as data; None where the file is damaged or of another measurement."""
    try:
        data = read_json(path, origin=str(path), error=ProfileError)
        content = decode(Partial, data, origin=str(path), error=ProfileError)
    except ProfileError as error:
        say(f"measuring all anew: {error}")
        return None
    here = survey.where()
    other = [key for key in sorted({*here, *content.where}) if here.get(key) != content.where.get(key)]
    if other:
        shown = "; ".join(f"{key} was {content.where.get(key, 'none')}, is {here.get(key, 'none')}" for key in other)
        say(f"measuring all anew: {path} is of a different measurement: {shown}")
        return None
    left = [section.name for section in survey.sections(content.measured) if not section.is_done]
    say(f"going on from {path}: left are {', '.join(left) or 'no sections'}")
    return encode(content.measured)


def _left_out(survey: Survey, measured: Measured) -> Iterator[str]:
    """Yields notes on the points of the grid that were left out, as the budget was too short."""
    sequences = {shape.sequence for shape in survey.grid.attention}
    for table in measured.matmuls:
        yield from _missing(f"matmul {table.dtype}: sizes", {*survey.grid.matmul_sizes} - {*table.m})
    for dtype in dict.fromkeys(table.dtype for table in measured.attention_tables):
        tables = [table for table in measured.attention_tables if table.dtype == dtype]
        yield from _missing(f"attention {dtype}: sequences", sequences - {s for t in tables for s in t.sequence})
    largest = max(survey.message_bytes)
    ends: dict[int, list[str]] = {}
    for one in measured.collectives:
        # Sizes are rounded to what divides among the ranks.
        if one.bytes[-1] < largest / 2:
            ends.setdefault(one.bytes[-1], []).append(f"{one.kind} on {one.ranks} ({one.ranks_per_node} per node)")
    for num_bytes, names in sorted(ends.items()):
        yield f"the budget was too short for more than {num_bytes} bytes: {', '.join(names)}"


def _missing(what: str, sizes: set[int]) -> Iterator[str]:
    if sizes:
        yield f"{what} {', '.join(map(str, sorted(sizes)))} were left out: the budget was too short"

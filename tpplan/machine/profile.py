"""HardwareProfile: measured times of a machine, with error bars.

Symbols: p ranks, q ranks per node, n bytes of the WHOLE (unsharded) value, T seconds, L latency in seconds.

Every time is an Estimate: seconds, an error bar from the profile's own residuals, and whether it is extrapolated. What
a profile does not cover raises a ProfileError that names the missing measurement; nothing is free. A machine is a JSON
file (profiles/), read strictly; each table names its sources and what was inferred.
"""

import datetime
import difflib
import hashlib
import importlib.resources
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, cast

from tpplan.core.errors import ProfileError
from tpplan.core.files import PACKAGE
from tpplan.core.mesh import GroupShape
from tpplan.core.strict_json import Count, Text, decode, encode, read_json
from tpplan.core.units import DTYPE_BYTES, FLOATING_DTYPES
from tpplan.machine.interpolate import multilinear
from tpplan.machine.table_checks import check_unique
from tpplan.machine.tables import (
    ALIGNED_BYTES,
    MOST_FITTED,
    AttentionRate,
    AttentionSizes,
    AttentionTable,
    Bandwidth,
    BatchedMatmuls,
    Collective,
    CollectiveTable,
    Estimate,
    Fitted,
    GroupExtrapolation,
    Launch,
    MatmulTable,
    Memory,
    MemoryBoundTable,
    MisalignedMatmuls,
    OptimizerIssue,
    Overlap,
    Part,
    Source,
    bottleneck_traffic,
    latency_steps,
)

__all__ = ["AttentionSizes", "Collective", "Estimate", "HardwareProfile", "load_profile", "shipped_profiles"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """A machine's memory, kernels and network. Its fields are the keys of its JSON file.

    Optional: software (version by name: torch, cuda, nccl, driver, python) and date of the measurement;
    attention_tables, replaced by attention_rates; memory_bound_table, replaced by the bandwidth; misaligned_matmuls,
    replaced by aligned ones; batched_matmuls, replaced by matmuls; optimizer_issues; overlap; and fitted, at most two
    numbers that were fitted to training runs.
    """

    schema_version: int
    name: str
    device: str
    device_type: str
    gpus_per_node: Count
    notes: tuple[str, ...]
    sources: tuple[Source, ...]
    memory: Memory
    bandwidth: Bandwidth
    launch: Launch
    matmuls: tuple[MatmulTable, ...]
    attention_rates: tuple[AttentionRate, ...]
    group_extrapolation: GroupExtrapolation
    collectives: tuple[CollectiveTable, ...]
    software: Mapping[str, str] | None = field(default=None, hash=False)
    date: Annotated[datetime.date, Text(datetime.date.fromisoformat, r"\d{4}-\d{2}-\d{2}")] | None = None
    attention_tables: tuple[AttentionTable, ...] | None = None
    memory_bound_table: MemoryBoundTable | None = None
    misaligned_matmuls: tuple[MisalignedMatmuls, ...] | None = None
    batched_matmuls: tuple[BatchedMatmuls, ...] | None = None
    optimizer_issues: tuple[OptimizerIssue, ...] | None = None
    overlap: Overlap | None = None
    fitted: tuple[Fitted, ...] | None = None

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ProfileError(f"schema_version: expected {SCHEMA_VERSION}, got {self.schema_version}")
        if self.device_type not in ("cuda", "cpu"):
            raise ProfileError(f"device_type: expected cuda or cpu, got {self.device_type!r}")
        check_unique("sources", [source.id for source in self.sources])
        check_unique("matmuls", [table.dtype for table in self.matmuls])
        check_unique("attention_rates", [rate.dtype for rate in self.attention_rates])
        check_unique("collectives", [(table.kind, table.ranks, table.ranks_per_node) for table in self.collectives])
        check_unique("attention_tables", [(t.dtype, t.causal, t.backward) for t in self.attention_tables or ()])
        check_unique("misaligned_matmuls", [(own.dtype, own.bytes) for own in self.misaligned_matmuls or ()])
        check_unique("batched_matmuls", [own.dtype for own in self.batched_matmuls or ()])
        check_unique("optimizer_issues", [issue.optimizer for issue in self.optimizer_issues or ()])
        check_unique("fitted", [number.name for number in self.fitted or ()])
        if len(self.fitted or ()) > MOST_FITTED:
            raise ProfileError(f"fitted: expected at most {MOST_FITTED} numbers, got {len(self.fitted or ())}")
        self._check_sources()

    @classmethod
    def from_dict(cls, data: Mapping[str, object], origin: str) -> "HardwareProfile":
        """The profile from parsed JSON; errors call it `origin`. Raises ProfileError with the path of the key."""
        return decode(cls, data, origin=origin, error=ProfileError)

    def to_dict(self) -> dict[str, object]:
        """The profile as JSON data, the inverse of from_dict."""
        return cast(dict[str, object], encode(self))

    def dumps(self) -> str:
        """The text of the profile's file: one line for each number and each array of numbers."""
        return _lines(self.to_dict(), "") + "\n"

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the content, independent of the file's format."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.memory.memory_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes of device memory that the model cannot use: context, communicators, allocator overhead."""
        return self.memory.reserved_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory that the model can use."""
        return self.memory_bytes - self.slack_bytes

    @property
    def matmul_slowdown(self) -> float:
        """Time of matmuls in training relative to a benchmark: fitted, or 1."""
        return self._fitted("matmul_slowdown", 1.0)

    @property
    def overlap_slowdown(self) -> float:
        """Extra time of kernels that run beside a collective, as a share of the collective's time: fitted, or measured.

        At most 1, where overlapping gains nothing.
        """
        measured = self.overlap.matmul_slowdown if self.overlap is not None else 0.0
        return min(1.0, self._fitted("overlap_slowdown", measured))

    def _fitted(self, name: str, default: float) -> float:
        return next((number.value for number in self.fitted or () if number.name == name), default)

    @property
    def launch_s(self) -> float:
        """Least time of a kernel, in seconds."""
        return self.launch.launch_s

    @property
    def issue_s(self) -> float | None:
        """CPU seconds to issue a kernel for another device; None where it was not measured."""
        return self.launch.issue_s if self.device_type == "cuda" else None

    @property
    def issuing(self) -> Estimate:
        """Time that issuing a kernel adds to the kernel's own: nothing on a GPU, where the CPU issues in parallel."""
        if self.device_type == "cuda" or self.launch.issue_s is None:
            return Estimate.zero()
        return Estimate(seconds=self.launch.issue_s, error_s=self.launch.issue_s * self.launch.relative_error)

    def optimizer_issue(self, optimizer: str, *, is_sharded: bool) -> Estimate:
        """CPU time of an optimizer's step for each parameter; nothing where it was not measured."""
        found = next((issue for issue in self.optimizer_issues or () if issue.optimizer == optimizer), None)
        if found is None:
            return Estimate.zero()
        seconds = found.sharded_s if is_sharded else found.plain_s
        return Estimate(seconds=seconds, error_s=seconds * found.relative_error)

    @property
    def peak_flop_per_s(self) -> float:
        """FLOP per second of the fastest matmul that was measured, in a 16-bit dtype where there is one; what an MFU
        is relative to. 0 where no matmul of floating numbers was measured."""
        tables = [table for table in self.matmuls if table.dtype in FLOATING_DTYPES]
        halves = [table for table in tables if table.dtype in ("bfloat16", "float16")]
        rates = (
            2 * math.prod(sizes) / seconds
            for table in (halves or tables)
            for sizes, seconds in zip(itertools.product(*table.grids), table.time_s, strict=True)
        )
        return max(rates, default=0.0)

    def matmul(self, *, m: int, n: int, k: int, batch: int = 1, dtype: str, alignment: int = ALIGNED_BYTES) -> Estimate:
        """Batched (m, k) @ (k, n): T = max(L + (T_c - L) f, M) + F, never decreasing in any size.

        T_c is the interpolated time of the sizes clamped to the table, f the FLOP relative to those of T_c (1 inside
        the table), L the launch time, which does not grow with the work. M is the time of reading the operands and
        writing the result once, as in memory_bound [Williams et al. 2009, the roofline model]; it bounds T from below
        outside of the table. Where some sizes are below the table and none above, T is at most T_c, which was measured
        on larger sizes. Where M decides, its error is added. dtype is torch's name. `alignment` is the largest power of
        two, in bytes, that all rows of the three matrices begin at; below 16, F is the further time of misaligned
        matmuls, in proportion to FLOP, where it is known. A batch takes at least what it does by batched_matmuls.
        """
        found = self._aligned_matmul(m, n, k, batch, dtype)
        for own in self.batched_matmuls or ():
            if own.dtype == dtype and batch > 1:
                seconds = own.seconds(m=m, n=n, k=k, batch=batch)
                at_least = Estimate(seconds=seconds, error_s=seconds * own.relative_error)
                found = max(found, at_least, key=lambda estimate: estimate.seconds)
        alike = [own for own in self.misaligned_matmuls or () if own.dtype == dtype and own.bytes >= alignment]
        if not alike:
            return found
        nearest = min(alike, key=lambda own: own.bytes)
        further_s = 2 * m * n * k * batch * nearest.further_s_per_flop
        return found + Estimate(seconds=further_s, error_s=further_s * nearest.relative_error)

    def _aligned_matmul(self, m: int, n: int, k: int, batch: int, dtype: str) -> Estimate:
        sizes = (batch, m, n, k)
        if min(sizes) < 1:
            raise ProfileError(f"matmul: expected sizes >= 1, got m={m} n={n} k={k} batch={batch}")
        table = next((table for table in self.matmuls if table.dtype == dtype), None)
        if table is None:
            raise self._missing(f"matmul measurement for dtype {dtype}", [table.dtype for table in self.matmuls])
        clamped = [min(max(size, grid[0]), grid[-1]) for size, grid in zip(sizes, table.grids, strict=True)]
        inside = multilinear(table.grids, table.time_s, clamped)
        fixed = min(self.launch_s, inside)
        if tuple(clamped) == sizes:
            return Estimate(seconds=inside, error_s=inside * table.relative_error)
        moved = self.memory_bound(num_bytes=batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype])
        is_beyond = any(size > grid[-1] for size, grid in zip(sizes, table.grids, strict=True))
        floor_s = moved.seconds if is_beyond else min(moved.seconds, inside)
        computed_s = fixed + (inside - fixed) * math.prod(sizes) / math.prod(clamped)
        error = math.hypot(table.relative_error, table.extrapolation_relative_error)
        if floor_s > computed_s:
            error = math.hypot(error, moved.relative_error)
        seconds = max(computed_s, floor_s)
        return Estimate(seconds=seconds, error_s=seconds * error, extrapolated=True)

    def attention(self, *, flop: float, dtype: str, backward: bool, sizes: AttentionSizes | None = None) -> Estimate:
        """Fused attention, from the table of this dtype, direction and mask where sizes are given and there is one.

        Otherwise T = max(L, flop / rate), where flop counts executed operations: half of all where causal.
        """
        if sizes is not None:
            for table in self.attention_tables or ():
                if (table.dtype, table.backward, table.causal) == (dtype, backward, sizes.causal):
                    return table.time(sizes, self.launch_s)
        rate = next((rate for rate in self.attention_rates if rate.dtype == dtype), None)
        if rate is None:
            raise self._missing(f"attention measurement for dtype {dtype}", [r.dtype for r in self.attention_rates])
        seconds = flop / (rate.backward_flop_per_s if backward else rate.forward_flop_per_s)
        return self._at_least_launch(seconds, rate.relative_error)

    def memory_bound(self, *, num_bytes: float) -> Estimate:
        """A kernel that only moves memory: from the table, else num_bytes (read plus written) / bandwidth; at
        least L."""
        if self.memory_bound_table is None:
            return self._at_least_launch(num_bytes / self.bandwidth.hbm_bytes_per_s, self.bandwidth.relative_error)
        least = Estimate(seconds=self.launch_s, error_s=self.launch_s * self.launch.relative_error)
        return max(self.memory_bound_table.time(num_bytes), least, key=lambda estimate: estimate.seconds)

    def collective(self, kind: Collective, group: GroupShape, num_bytes: float) -> Estimate:
        """Time of a collective; num_bytes is n, the bytes of the WHOLE value over all ranks of the group.

        all_reduce: every rank holds n and ends with n. all_gather: n/p in, n out. reduce_scatter: n in, n/p out.
        all_to_all: each rank holds n/p and sends n/p^2 to each. (nccl-tests' "size" is n for the first three and n/p
        for the last.) One rank, or no bytes, costs nothing.

        A group that was not measured is predicted from the nearest measured group g of its kind, T = L s/s_g + (T_g(n)
        - L) c/c_g, where c is bottleneck_traffic and s is latency_steps, with the error of such predictions. So is a
        message smaller than the table's smallest where no latency was measured.
        """
        if num_bytes < 0 or group.ranks < 1 or group.ranks_per_node < 1:
            raise ProfileError(f"{kind} on {group}: expected ranks >= 1 and bytes >= 0, got {num_bytes} bytes")
        if group.ranks == 1 or num_bytes == 0:
            return Estimate.zero()
        # A group that fits in a node does not depend on how many further ranks the node could hold.
        group = GroupShape(ranks=group.ranks, ranks_per_node=min(group.ranks, group.ranks_per_node))
        table = self._nearest(kind, group)
        measured = table.time(num_bytes)
        if table.group == group and table.shows_latency(num_bytes):
            return measured
        moving = (measured.seconds - table.latency_s) * bottleneck_traffic(kind, group)
        waiting = table.latency_s * latency_steps(group) / latency_steps(table.group)
        seconds = waiting + moving / bottleneck_traffic(kind, table.group)
        residual = self.group_extrapolation
        error = residual.across_nodes_relative_error if group.nodes > 1 else residual.in_node_relative_error
        error = math.hypot(error, measured.error_s / measured.seconds)
        return Estimate(seconds=seconds, error_s=seconds * error, extrapolated=True)

    @property
    def unmeasured_across_nodes(self) -> tuple[Collective, ...]:
        """Collectives that were measured on no group across nodes, and so cannot be priced there."""
        measured = {table.kind for table in self.collectives if table.group.nodes > 1}
        return tuple(kind for kind in Collective if kind not in measured)

    def _nearest(self, kind: Collective, group: GroupShape) -> CollectiveTable:
        """The measured group, within a node or across like `group`, that is nearest in ranks per node, then in
        nodes."""
        crosses = group.nodes > 1
        if group.ranks_per_node > self.gpus_per_node:
            raise self._missing(
                f"{kind} measurement for {group.ranks_per_node} ranks in a node of {self.gpus_per_node} GPUs",
                [f"up to {self.gpus_per_node} ranks in a node"],
            )
        alike = [table for table in self.collectives if table.kind == kind and (table.group.nodes > 1) == crosses]
        if not alike:
            where = {False: "within a node", True: "across nodes"}
            covered = sorted({f"{table.kind} {where[table.group.nodes > 1]}" for table in self.collectives})
            raise self._missing(f"{kind} measurement {where[crosses]} (asked for {group.ranks} ranks)", covered)

        def distance(table: CollectiveTable) -> tuple[float, float, int]:
            per_node = abs(math.log(table.ranks_per_node / group.ranks_per_node))
            return per_node, abs(math.log(table.group.nodes / group.nodes)), abs(table.ranks - group.ranks)

        return min(alike, key=distance)

    def _at_least_launch(self, seconds: float, relative_error: float) -> Estimate:
        if seconds < self.launch_s:
            return Estimate(seconds=self.launch_s, error_s=self.launch_s * self.launch.relative_error)
        return Estimate(seconds=seconds, error_s=seconds * relative_error)

    def _missing(self, what: str, covered: Sequence[str]) -> ProfileError:
        return ProfileError(
            f"profile {self.name}: no {what}; covered: {', '.join(covered) or 'nothing'}. `tpplan profile` measures a "
            "machine"
        )

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yields (path of the key, part) for every part that names sources."""
        yield from (("memory", self.memory), ("bandwidth", self.bandwidth), ("launch", self.launch))
        if self.memory_bound_table is not None:
            yield "memory_bound_table", self.memory_bound_table
        tables: dict[str, Sequence[Part]] = {
            "matmuls": self.matmuls,
            "attention_rates": self.attention_rates,
            "attention_tables": self.attention_tables or (),
            "misaligned_matmuls": self.misaligned_matmuls or (),
            "batched_matmuls": self.batched_matmuls or (),
            "optimizer_issues": self.optimizer_issues or (),
            "collectives": self.collectives,
        }
        for name, entries in tables.items():
            yield from ((f"{name}[{i}]", entry) for i, entry in enumerate(entries))
        if self.overlap is not None:
            yield "overlap", self.overlap

    def _check_sources(self) -> None:
        known = {source.id for source in self.sources}
        for path, part in self.parts():
            unknown = [id_ for id_ in part.sources if id_ not in known]
            if unknown or not part.sources:
                raise ProfileError(f"{path}.sources: expected ids listed in sources, got {unknown or 'none'}")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with tpplan."""
    return tuple(sorted(path.stem for path in _profile_folder().glob("*.json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """A shipped profile by its name, or a profile by its path (text that ends in .json or contains a folder).

    Raises ProfileError for an unknown name, and for an unreadable or malformed file with the path of the key.
    """
    text = os.fspath(name_or_path)
    is_path = not isinstance(name_or_path, str) or text.endswith(".json") or Path(text).name != text
    if is_path:
        return _load_file(Path(text), origin=text)
    shipped = shipped_profiles()
    if text not in shipped:
        near = difflib.get_close_matches(text, shipped, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ProfileError(f"unknown profile {text!r}{hint} (shipped: {', '.join(shipped) or 'none'}; or give a path)")
    return _load_file(_profile_folder() / f"{text}.json", origin=f"profiles/{text}.json")


def _lines(value: object, indent: str) -> str:
    """JSON with one line for each scalar and each array of numbers or ids."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        members = (f"{inner}{json.dumps(key)}: {_lines(member, inner)}" for key, member in value.items())
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) or len(str(item)) > 40 for item in value):
        return "[\n" + ",\n".join(inner + _lines(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value)


def _load_file(path: Path, *, origin: str) -> HardwareProfile:
    data = read_json(path, origin=origin, error=ProfileError)
    return decode(HardwareProfile, data, origin=origin, error=ProfileError)


def _profile_folder() -> Path:
    """The folder of the installed package tpplan.profiles, or profiles/ beside the package in a checkout."""
    try:
        return Path(str(importlib.resources.files("tpplan.profiles")))
    except ModuleNotFoundError:
        return PACKAGE.parent / "profiles"

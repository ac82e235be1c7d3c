"""HardwareProfile: what a machine was measured to do, and how sure that is.

Symbols: p ranks, q ranks per node, n bytes of the WHOLE (unsharded) value, T seconds, L latency in seconds.

Every time is an Estimate: seconds, an error bar from the profile's own residuals, and whether it goes beyond what was
measured. What a profile does not cover is a ProfileError that names the missing measurement; nothing is ever free.
A machine is a JSON file (profiles/), read strictly; each table names its sources, and says where it was inferred.
"""

import datetime
import difflib
import hashlib
import importlib.resources
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from tpplan.core.errors import ProfileError
from tpplan.core.files import PACKAGE
from tpplan.core.mesh import GroupShape
from tpplan.core.strict_json import Text, decode, encode, read_json
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.interpolate import multilinear
from tpplan.machine.tables import (
    MOST_FITTED,
    AttentionRate,
    AttentionSizes,
    AttentionTable,
    Bandwidth,
    Collective,
    CollectiveTable,
    Count,
    Estimate,
    Fitted,
    GroupExtrapolation,
    Launch,
    MatmulTable,
    Memory,
    MemoryBoundTable,
    OptimizerIssue,
    Overlap,
    Part,
    Source,
    bottleneck_traffic,
    check_unique,
    latency_steps,
)

__all__ = ["AttentionSizes", "Collective", "Estimate", "HardwareProfile", "load_profile", "shipped_profiles"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A machine: its memory, its kernels and its network, as measured. Its fields are the keys of its JSON file.

    What may be absent: software (versions by name: torch, cuda, nccl, driver, python) and the date of the measurement;
    attention_tables, in whose place attention_rates stand; memory_bound_table, in whose place the bandwidth stands;
    optimizer_issues and overlap; and fitted, numbers that no benchmark gave, at most two.
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
        check_unique("optimizer_issues", [issue.optimizer for issue in self.optimizer_issues or ()])
        check_unique("fitted", [number.name for number in self.fitted or ()])
        if len(self.fitted or ()) > MOST_FITTED:
            raise ProfileError(f"fitted: expected at most {MOST_FITTED} numbers, got {len(self.fitted or ())}")
        self._check_sources()

    @classmethod
    def from_dict(cls, data: Mapping[str, object], origin: str) -> "HardwareProfile":
        """A profile from parsed JSON; origin is what errors call it. Raises ProfileError with the path of the key."""
        return decode(cls, data, origin=origin, error=ProfileError)

    def to_dict(self) -> dict[str, object]:
        """The content of the profile's JSON file; from_dict's inverse."""
        return cast(dict[str, object], encode(self))

    def dumps(self) -> str:
        """The text of the profile's file: a line for each number and for each array of numbers."""
        return _lines(self.to_dict(), "") + "\n"

    @property
    def fingerprint(self) -> str:
        """sha256 of the content, independent of how the file was formatted."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.memory.memory_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes of device memory that are never the model's: context, communicators, what the allocator cannot use."""
        return self.memory.reserved_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory that a model may fill."""
        return self.memory_bytes - self.slack_bytes

    @property
    def matmul_slowdown(self) -> float:
        """How many times as long matmuls take in training as alone, in a benchmark: fitted, or 1."""
        return self._fitted("matmul_slowdown", 1.0)

    @property
    def overlap_slowdown(self) -> float:
        """Of the time of a collective that runs beside kernels, how much these take longer: fitted, or as measured.

        At most 1, where the two may as well run one after the other.
        """
        measured = self.overlap.matmul_slowdown if self.overlap is not None else 0.0
        return min(1.0, self._fitted("overlap_slowdown", measured))

    def _fitted(self, name: str, default: float) -> float:
        return next((number.value for number in self.fitted or () if number.name == name), default)

    @property
    def launch_s(self) -> float:
        """The least time of a kernel, in seconds."""
        return self.launch.launch_s

    @property
    def issue_s(self) -> float | None:
        """What the CPU needs to issue a kernel that another device runs, in seconds; None where nothing says it."""
        return self.launch.issue_s if self.device_type == "cuda" else None

    @property
    def issuing(self) -> Estimate:
        """What issuing a kernel adds to its own time: nothing where a GPU runs it while the CPU goes on."""
        if self.device_type == "cuda" or self.launch.issue_s is None:
            return Estimate.zero()
        return Estimate(seconds=self.launch.issue_s, error_s=self.launch.issue_s * self.launch.relative_error)

    def optimizer_issue(self, optimizer: str, *, is_sharded: bool) -> Estimate:
        """What the CPU takes of an optimizer's step for each parameter; nothing where no measurement says it."""
        found = next((issue for issue in self.optimizer_issues or () if issue.optimizer == optimizer), None)
        if found is None:
            return Estimate.zero()
        seconds = found.sharded_s if is_sharded else found.plain_s
        return Estimate(seconds=seconds, error_s=seconds * found.relative_error)

    def matmul(self, *, m: int, n: int, k: int, batch: int = 1, dtype: str) -> Estimate:
        """Batched (m, k) @ (k, n): T = max(L + (T_c - L) f, M), never decreasing in any size.

        T_c is the measured time, interpolated, of the sizes clamped to the table; f the FLOP over those of T_c, 1 in
        the table; L the launch time, which does not grow with the work. Outside of the table nothing is faster than
        reading the operands and writing the result once, M, as memory_bound has it [Williams et al. 2009, the roofline
        model], but where sizes are below the table and none above, nothing is slower than T_c, which was measured on
        larger ones. Where M decides, its error is added. dtype is torch's name.
        """
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

        Else T = max(L, flop / rate), where flop is what is executed: half of it where causal.
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
        """A kernel that only moves memory, bytes read plus bytes written: from the table, else L or bytes / bandwidth.

        Never below L, the launch time.
        """
        if self.memory_bound_table is None:
            return self._at_least_launch(num_bytes / self.bandwidth.hbm_bytes_per_s, self.bandwidth.relative_error)
        least = Estimate(seconds=self.launch_s, error_s=self.launch_s * self.launch.relative_error)
        return max(self.memory_bound_table.time(num_bytes), least, key=lambda estimate: estimate.seconds)

    def collective(self, kind: Collective, group: GroupShape, num_bytes: float) -> Estimate:
        """Time of a collective; num_bytes is n, the bytes of the WHOLE value over all ranks of the group.

        all_reduce: every rank holds n and ends with n. all_gather: n/p in, n out. reduce_scatter: n in, n/p out.
        all_to_all: each rank holds n/p, sends n/p^2 to each. (nccl-tests' "size" is n for the first three and n/p for
        the last.) One rank, or no bytes, costs nothing.

        A group that was not measured is predicted from the nearest one of its kind that was,
        T = L s/s_g + (T_g(n) - L) c/c_g, with c bottleneck_traffic and s latency_steps, and has that prediction's
        error, as has a message too small for the table to have seen its latency.
        """
        if num_bytes < 0 or group.ranks < 1 or group.ranks_per_node < 1:
            raise ProfileError(f"{kind} on {group}: expected ranks >= 1 and bytes >= 0, got {num_bytes} bytes")
        if group.ranks == 1 or num_bytes == 0:
            return Estimate.zero()
        # A group that fits in a node is the same group whatever room there is left beside it.
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
        """Collectives of which no group across nodes was measured: none can be priced there."""
        measured = {table.kind for table in self.collectives if table.group.nodes > 1}
        return tuple(kind for kind in Collective if kind not in measured)

    def _nearest(self, kind: Collective, group: GroupShape) -> CollectiveTable:
        """The measured group of this kind, crossing nodes or not alike, nearest in ranks per node, then in nodes."""
        crosses = group.nodes > 1
        if group.ranks_per_node > self.gpus_per_node:
            raise self._missing(
                f"{kind} measurement for {group.ranks_per_node} ranks in a node of {self.gpus_per_node} GPUs", []
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
        return ProfileError(f"profile {self.name}: no {what}; covered: {', '.join(covered) or 'nothing'}")

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Everything that names its sources, with the path of its key."""
        yield from (("memory", self.memory), ("bandwidth", self.bandwidth), ("launch", self.launch))
        if self.memory_bound_table is not None:
            yield "memory_bound_table", self.memory_bound_table
        tables: dict[str, Sequence[Part]] = {
            "matmuls": self.matmuls,
            "attention_rates": self.attention_rates,
            "attention_tables": self.attention_tables or (),
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
    """Names of the profiles that come with tpplan."""
    return tuple(sorted(path.stem for path in _profile_folder().glob("*.json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """A shipped profile by its name, or any by its path (what ends in .json or has a folder in it).

    Raises ProfileError for an unknown name, and for a file that is unreadable or malformed, with the path of the key.
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
    """JSON with one line per scalar and per array of numbers or ids."""
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
    """The installed package tpplan.profiles, or profiles/ next to the package in a checkout."""
    try:
        return Path(str(importlib.resources.files("tpplan.profiles")))
    except ModuleNotFoundError:
        return PACKAGE.parent / "profiles"

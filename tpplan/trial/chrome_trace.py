"""A torch.profiler trace of training steps, as export_chrome_trace writes it: seconds of a step by part.

On a GPU the kernels count: of collectives, what no other kernel hides; of the rest, the time in which any runs. On a
CPU the main thread's time counts: FSDP's ranges, in which it copies or waits, torch's functional collectives, the
optimizer's range, and all else, which is compute.

Events name their process group by its description, which a mesh makes of its axis ("mesh_tp"); collectives of a group
that is no axis of a mesh count as data-parallel ones.
"""

import gzip
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tpplan.core.errors import UsageError
from tpplan.core.mesh import Axis
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, FSDP_COPIES, OPTIMIZER, TENSOR_PARALLEL

#: the parts of a step that can be told apart in a trace
MEASURED_PARTS = (COMPUTE, TENSOR_PARALLEL, DATA_PARALLEL, FSDP_COPIES, OPTIMIZER)
#: names of ranges
STEP_RANGE, OPTIMIZER_STEP, OPTIMIZER_RANGE, FSDP_RANGE = "ProfilerStep#", "Optimizer.step", "Optimizer.", "FSDP::"
#: categories of what a device runs
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_FUNCTIONAL, _PROCESS_GROUP = "_c10d_functional::", "c10d::"
_MICROSECOND = 1e-6

#: [start, end) in microseconds
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """A range of a trace: its name and category, from `start` to `end` in microseconds on a thread or stream."""

    name: str
    category: str
    start: float
    end: float
    thread: object
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From start to end in seconds."""
        return (self.end - self.start) * _MICROSECOND

    @property
    def span(self) -> Span:
        """From start to end."""
        return self.start, self.end


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of a rank, the description of each process group by its name, and how often the optimizer stepped."""

    events: tuple[Event, ...]
    groups: Mapping[str, str]
    steps: int

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Reads a trace, which may be gzipped. Raises UsageError for a file that is none, or has no optimizer step."""
        try:
            raw = path.read_bytes()
            data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            found = [event for event in data["traceEvents"] if event.get("ph") == "X" and "dur" in event]
            events = tuple(sorted(map(_event, found), key=lambda event: (event.start, -event.end)))
            config = data.get("distributedInfo", {}).get("pg_config", [])
            groups = {str(one["pg_name"]): str(one.get("pg_desc", "")) for one in config}
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: expected a trace that torch.profiler's export_chrome_trace wrote: {error!r:.200}"
            ) from error
        steps = sum(event.name.startswith(OPTIMIZER_STEP) and event.category == "user_annotation" for event in events)
        if not steps:
            raise UsageError(
                f"{path}: no step of an optimizer in the trace: profile whole steps, forward to optimizer.step()"
            )
        return cls(events=events, groups=groups, steps=steps)

    @property
    def is_of_gpu(self) -> bool:
        """True where kernels of a device were traced."""
        return any(event.category in DEVICE_WORK for event in self.events)

    def parts(self, *, is_tp: bool) -> dict[str, float]:
        """Seconds of a step by part, the mean over the traced ones; their sum is the step. Without tensor parallelism
        (is_tp) functional collectives are data-parallel ones."""
        found = self._device_parts() if self.is_of_gpu else self._thread_parts(is_tp=is_tp)
        return {part: found.get(part, 0.0) * _MICROSECOND / self.steps for part in MEASURED_PARTS}

    @cached_property
    def main_thread(self) -> object:
        """The thread whose optimizer steps."""
        return next(e.thread for e in self.events if e.name.startswith(OPTIMIZER_STEP) and "gpu" not in e.category)

    @cached_property
    def window(self) -> Span:
        """The traced steps: the profiler's own steps where it was told of them, else all that the main thread did."""
        own = [event for event in self.events if event.thread == self.main_thread]
        steps = [event for event in own if event.name.startswith(STEP_RANGE)] or own
        return min(event.start for event in steps), max(event.end for event in steps)

    # On a CPU

    def _thread_parts(self, *, is_tp: bool) -> Counter[str]:
        """Microseconds of the main thread by part: each moment belongs to the innermost range that tells its part."""
        found: Counter[str] = Counter()
        functional = TENSOR_PARALLEL if is_tp else DATA_PARALLEL
        start, end = self.window
        now, open_ranges = start, list[tuple[float, str]]()

        def advance(to: float) -> None:
            nonlocal now
            part = open_ranges[-1][1] if open_ranges else COMPUTE
            found[part] += max(0.0, min(to, end) - now)  # type: ignore[assignment]
            now = max(now, min(to, end))

        for event in self.events:
            if event.thread != self.main_thread or event.end <= start or event.start >= end:
                continue
            while open_ranges and open_ranges[-1][0] <= event.start:
                advance(open_ranges[-1][0])
                open_ranges.pop()
            advance(event.start)
            around = open_ranges[-1][1] if open_ranges else COMPUTE
            open_ranges.append((event.end, _part_on_thread(event, around, functional)))
        while open_ranges:
            advance(open_ranges[-1][0])
            open_ranges.pop()
        advance(end)
        return found

    # On a GPU

    def _device_parts(self) -> Counter[str]:
        """Microseconds of the device by part. What hides a collective is not counted as the collective's."""
        work = [event for event in self.events if event.category in DEVICE_WORK]
        ranges = [event for event in self.events if event.category == "gpu_user_annotation"]
        in_optimizer = _merged(e.span for e in ranges if e.name.startswith(OPTIMIZER_RANGE))
        in_fsdp = _merged(e.span for e in ranges if e.name.startswith(FSDP_RANGE))
        spans: dict[str, list[Span]] = defaultdict(list)
        for event in work:
            if is_collective(event):
                spans[TENSOR_PARALLEL if self.axis_of(event) == Axis.TP else DATA_PARALLEL].append(event.span)
            elif _within(event.span, in_optimizer):
                spans[OPTIMIZER].append(event.span)
            else:
                spans[FSDP_COPIES if _within(event.span, in_fsdp) else COMPUTE].append(event.span)
        found, covered = Counter[str](), list[Span]()
        for part in (COMPUTE, OPTIMIZER, FSDP_COPIES, TENSOR_PARALLEL, DATA_PARALLEL):
            together = _merged([*covered, *spans[part]])
            found[part] = _length(together) - _length(covered)  # type: ignore[assignment]
            covered = together
        start, end = min(event.start for event in work), max(event.end for event in work)
        found[COMPUTE] += end - start - _length(covered)  # type: ignore[assignment]
        return found

    def axis_of(self, event: Event) -> str:
        """The axis of the mesh over which a collective goes; the group's own description where it is no axis."""
        name = str(event.arguments.get("Process Group Name", ""))
        described = str(event.arguments.get("Process Group Description") or self.groups.get(name, ""))
        return described.removeprefix("mesh_")


def _event(data: Mapping[str, Any]) -> Event:
    start = float(data["ts"])
    return Event(
        name=str(data["name"]),
        category=str(data.get("cat", "")),
        start=start,
        end=start + float(data["dur"]),
        thread=(data.get("pid"), data.get("tid")),
        arguments=data.get("args") or {},
    )


def is_collective(event: Event) -> bool:
    """True for a kernel that communicates."""
    return event.category == "kernel" and event.name.lower().startswith("nccl")


def _part_on_thread(event: Event, around: str, functional: str) -> str:
    """The part that a range of the main thread belongs to, inside a range of the part `around`."""
    if event.name.startswith(OPTIMIZER_RANGE):
        return OPTIMIZER
    if around == OPTIMIZER:
        return around
    if event.name.startswith(FSDP_RANGE):
        return DATA_PARALLEL
    if around in (DATA_PARALLEL, FSDP_COPIES):
        return DATA_PARALLEL if event.name.startswith(_PROCESS_GROUP) else FSDP_COPIES
    return functional if event.name.startswith(_FUNCTIONAL) else around


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _within(span: Span, merged: Sequence[Span]) -> bool:
    """True where one of the spans, which must be merged, holds the middle of a span."""
    middle = (span[0] + span[1]) / 2
    at = bisect_right(merged, (middle, math.inf)) - 1
    return at >= 0 and middle < merged[at][1]

"""The data of a drawn step: when each of its parts runs on one rank, the memory meanwhile, and the curves of other
plans. Seconds and bytes are predicted, as those of a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tpplan.plan.plan import Pass

# Names of what curves change
GPUS, GLOBAL_BATCH, SEQUENCE_LENGTH, MEMORY_LIMIT = "GPUs", "global batch", "sequence length", "memory limit"
#: of all links, as a multiple of the profile's
BANDWIDTH = "bandwidth of links"


class Stream(StrEnum):
    """Where work runs. Kernels and collectives of tp wait for each other; those of the data axes run beside kernels."""

    COMPUTE = "compute"
    TENSOR = "tensor-parallel"
    DATA = "data-parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Work on a stream from `start_s` on, in seconds from the start of the step, of a module ("" is the root).

    `part` is the part of the step's time that it adds to; "" for a collective that runs beside kernels, and so adds
    nothing. The segments with a part follow on each other without gaps.
    """

    stream: Stream
    part: str
    module: str
    during: Pass
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step to its end."""
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The last micro-batch of a step and what follows it. `earlier` equal micro-batches come before and together take
    `earlier_s` seconds, by part."""

    earlier: int
    earlier_s: Mapping[str, float]
    segments: tuple[Segment, ...]

    @property
    def start_s(self) -> float:
        """Seconds of the earlier micro-batches."""
        return sum(self.earlier_s.values())

    @property
    def end_s(self) -> float:
        """Seconds of the step."""
        return max((segment.end_s for segment in self.segments), default=self.start_s)

    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of the whole step by part; they add up to its time."""
        found = dict(self.earlier_s)
        for segment in self.segments:
            if segment.part:
                found[segment.part] = found.get(segment.part, 0.0) + segment.seconds
        return found


class StageWork(StrEnum):
    """Kinds of work of the ranks of one pipeline part. Weight gradients are a part of the backward, unless the schedule
    defers them. A send of the result of a forward or a backward may run beside all three."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    SENDING = "sending"
    ONCE = "once a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Work of part `part` of a pipeline for stage `stage`, from `start_s` on, in seconds from the start of the step;
    `micro_batch` counts from 0, and is None for what is done once a step."""

    part: int
    stage: int
    work: StageWork
    micro_batch: int | None
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """A step of a model in stages, simulated by its schedule. `has_sending` is False where the machine is not known,
    and the time of sending therefore missing."""

    runs: tuple[StageRun, ...]
    has_sending: bool

    @property
    def end_s(self) -> float:
        """Seconds of the step."""
        return max((run.start_s + run.seconds for run in self.runs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The most that a rank holds while a module runs in a pass, in bytes by part. Moments are listed in the order of
    the step."""

    memory_bytes: Mapping[str, float]
    during: Pass
    module: str

    @property
    def num_bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best plan for one `value` of a curve's quantity: seconds of the step, samples per second and the mesh. Where
    no plan was found, `problem` says why and these three are None."""

    value: float
    step_time_s: float | None = None
    samples_per_s: float | None = None
    mesh: str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The best plans for several values of one quantity, `name`, in ascending order; `now` is its value in the plan."""

    name: str
    now: float
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """A step pulled apart: its timeline, its memory from start to end, and curves, where they were asked for.

    `problem` says in what the numbers differ from those of the plan; "" where they are the same.
    """

    timeline: Timeline
    moments: tuple[Moment, ...]
    curves: tuple[Curve, ...] = ()
    problem: str = ""

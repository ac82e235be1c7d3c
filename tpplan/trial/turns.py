"""Plans tried in turns on the ranks of a process group: seconds of steps, peak memory, and seconds by part."""

import gc
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tpplan.core.errors import PlanMismatchError
from tpplan.measure.timer import slowest
from tpplan.plan.parts import ACCUMULATION, COMPUTE, ISSUE, RECOMPUTATION, TENSOR_PARALLEL, TP_REDUCTION
from tpplan.plan.plan import Plan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.trial.chrome_trace import MEASURED_PARTS, Trace
from tpplan.trial.trainee import Trainee, seconds_of

#: steps of a plan in a turn that do not count: the first makes the optimizer's states, compiles and warms caches
WARM_UP_STEPS = 2
#: parts of a prediction that a trace cannot tell from another part
_COUNTED_AS = {
    RECOMPUTATION: COMPUTE,
    ACCUMULATION: COMPUTE,
    ISSUE: COMPUTE,
    TP_REDUCTION: TENSOR_PARALLEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The measurements under a plan: seconds of each counted step of the slowest rank, by turn; the most bytes that
    the device's allocator gave to tensors on any rank, None on a CPU; and seconds by part of a step that was profiled
    on this rank, which the profiler makes longer."""

    plan: Plan
    turns: tuple[tuple[float, ...], ...]
    peak_bytes: float | None
    parts: Mapping[str, float]

    @property
    def step_time_s(self) -> float:
        """The median step."""
        return statistics.median(seconds for turn in self.turns for seconds in turn)

    @property
    def spread(self) -> float:
        """How far the medians of turns are apart, relative to the median step."""
        medians = [statistics.median(turn) for turn in self.turns]
        return (max(medians) - min(medians)) / self.step_time_s

    @property
    def measured_parts(self) -> dict[str, float]:
        """Seconds of the median step by part: the shares of the profiled step."""
        whole = sum(self.parts.values())
        return {part: seconds / whole * self.step_time_s for part, seconds in self.parts.items()}

    @property
    def predicted_parts(self) -> dict[str, float]:
        """The plan's prediction in the parts that can be measured."""
        return in_measured_parts(self.plan.predicted.time_s)


def in_measured_parts(time_s: Mapping[str, float]) -> dict[str, float]:
    """Predicted seconds of a step by the parts that a trace tells apart."""
    found = dict.fromkeys(MEASURED_PARTS, 0.0)
    for part, seconds in time_s.items():
        found[_COUNTED_AS.get(part, part)] += seconds
    return found


def in_turns(
    plans: Sequence[Plan],
    spec: ModelSpec,
    device: torch.device,
    *,
    turns: int,
    steps: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Tried]:
    """Trains some steps under each plan, in turns, so that what changes on the machine changes for all plans.

    Every rank must call this. The model is built anew in each turn, so that no plan needs memory beside another. Raises
    PlanMismatchError for plans of another number of ranks.
    """
    check_ranks(plans)
    seconds: list[list[tuple[float, ...]]] = [[] for _ in plans]
    peaks: list[list[float]] = [[] for _ in plans]
    parts: list[Mapping[str, float]] = [{} for _ in plans]
    for turn in range(turns):
        for i, plan in enumerate(plans):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            trainee = Trainee.of(plan, spec, device)
            for _ in range(WARM_UP_STEPS):
                trainee.step()
            own = [seconds_of(trainee.step, device) for _ in range(steps)]
            if device.type == "cuda":
                peaks[i] += slowest(device, [float(torch.cuda.max_memory_allocated())])
            seconds[i].append(tuple(slowest(device, own)))
            if turn + 1 == turns:
                parts[i] = profiled(trainee, device).parts(is_tp=plan.mesh.tp > 1)
            del trainee
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            say(f"turn {turn + 1} of {turns}, plan {i + 1} of {len(plans)}: {statistics.median(seconds[i][-1]):.4g} s")
    return [
        Tried(plan=plan, turns=tuple(seconds[i]), peak_bytes=max(peaks[i], default=None), parts=parts[i])
        for i, plan in enumerate(plans)
    ]


def check_ranks(plans: Sequence[Plan]) -> None:
    """Raises PlanMismatchError for a plan of another number of ranks than run."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for i, plan in enumerate(plans):
        if plan.mesh.num_gpus != ranks:
            raise PlanMismatchError(
                f"plan {i + 1} is for {plan.mesh.num_gpus} GPUs ({plan.mesh}), and {ranks} ranks are running: start it "
                f"with torchrun and {plan.mesh.num_gpus} ranks, or solve again with --gpus {ranks} --all-gpus"
            )


def profiled(trainee: Trainee, device: torch.device) -> Trace:
    """The trace of one step on this rank; every rank must call this."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        seconds_of(trainee.step, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Trace.load(path)

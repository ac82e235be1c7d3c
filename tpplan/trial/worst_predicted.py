"""The ops and collectives of a traced step beside the predicted ones, by kind and local shapes."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.core.graph import Op
from tpplan.core.layout import local_shape
from tpplan.core.mesh import Axis
from tpplan.costs.prediction.step_time import formulated
from tpplan.costs.runs.execute import Executor
from tpplan.layouts.assignment import Assignment
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.trial.chrome_trace import DEVICE_WORK, Event, Trace, is_collective

#: names of collectives in traces: of torch's process groups, and of gloo's own events
_KINDS = {
    "allreduce": Collective.ALL_REDUCE,
    "all_reduce": Collective.ALL_REDUCE,
    "_allgather_base": Collective.ALL_GATHER,
    "allgather_into_tensor_coalesced": Collective.ALL_GATHER,
    "all_gather": Collective.ALL_GATHER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "alltoall_base": Collective.ALL_TO_ALL,
}
_GLOO, _ATEN = "gloo:", "aten::"

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, Shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of a step in calls of one op with operands of the same local shapes, or in collectives of one kind:
    measured and predicted, forward and backward together."""

    what: str
    calls: float
    measured_s: float
    predicted_s: float

    @property
    def error_s(self) -> float:
        """Seconds that were predicted too many; below 0 where too few."""
        return self.predicted_s - self.measured_s


def worst(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows with the largest errors, in seconds of the step."""
    return sorted(rows, key=lambda row: -abs(row.error_s))[:count]


# ---- ops


def op_rows(
    trace: Trace, assignment: Assignment, profile: HardwareProfile, gpus_per_node: int, executor: Executor
) -> list[Row]:
    """A row for each op and local shapes that the trace and the plan both have."""
    measured, predicted = measured_ops(trace), dict[Key, float]()
    table = formulated(assignment, profile, gpus_per_node, executor).table
    for op in assignment.graph.ops:
        time, key = table[op.name][0], _key(assignment, op)
        seconds = (time.forward + time.backward).seconds * assignment.accumulation_steps
        predicted[key] = predicted.get(key, 0.0) + seconds
    return [
        Row(
            what=f"{name} {', '.join('x'.join(map(str, shape)) for shape in shapes)}",
            calls=measured[name, shapes][0] / trace.steps,
            measured_s=measured[name, shapes][1] / trace.steps,
            predicted_s=seconds,
        )
        for (name, shapes), seconds in predicted.items()
        if (name, shapes) in measured
    ]


def _key(assignment: Assignment, op: Op) -> Key:
    """The name of an op as profilers have it, and the shapes of its tensors on a rank."""
    layouts = zip(op.operands, assignment.strategy(op.name).operands, strict=True)
    shapes = (local_shape(assignment.graph.values[name].shape, layout, assignment.tp) for name, layout in layouts)
    return op.target.split(".")[1], tuple(shape for shape in shapes if shape)


def measured_ops(trace: Trace) -> dict[Key, tuple[int, float]]:
    """Calls and seconds of each op of forward, with those of its backward, by name and shapes.

    An op inside another one counts as part of that. Autograd gives an op and its backward the same sequence number.
    """
    durations = _Durations.of(trace)
    keys, by_sequence = dict[Event, Key](), dict[int, Key]()
    found: dict[Key, list[float]] = defaultdict(lambda: [0, 0.0])
    backward: list[Event] = []
    for event, outer in _outermost(trace.events):
        number = event.arguments.get("Sequence number")
        if outer.name.startswith("autograd::engine::evaluate_function"):
            if event is outer:
                backward.append(event)
            continue
        if event is outer and event.name.startswith(_ATEN):
            keys[event] = event.name.removeprefix(_ATEN), _shapes(event.arguments.get("Input Dims", ()))
            found[keys[event]][0] += 1
            found[keys[event]][1] += durations.of_event(event)
        if number is not None and outer in keys:
            by_sequence[int(number)] = keys[outer]  # ops before it that need no gradient have the same number
    for event in backward:
        key = by_sequence.get(int(event.arguments.get("Sequence number", -1)))
        if key is not None:
            found[key][1] += durations.of_event(event)
    return {key: (int(calls), seconds) for key, (calls, seconds) in found.items()}


def _outermost(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yields each op with the outermost op around it on its thread, itself where there is none."""
    around: dict[object, Event] = {}
    for event in events:
        if event.category != "cpu_op":
            continue
        outer = around.get(event.thread)
        if outer is None or event.start >= outer.end or not _counts(outer):
            outer = around[event.thread] = event
        yield event, outer


def _counts(event: Event) -> bool:
    """True for an op that the graph of a model has, and for the backward of one."""
    return event.name.startswith((_ATEN, "autograd::engine::evaluate_function"))


def _shapes(dims: object) -> Shapes:
    """The shapes of tensors among an op's `Input Dims`: lists of numbers, and lists of those for lists of tensors."""
    found: list[tuple[int, ...]] = []
    for own in dims if isinstance(dims, list | tuple) else ():
        if own and all(isinstance(size, int) for size in own):
            found.append(tuple(own))
        elif isinstance(own, list):
            found += _shapes(own)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Durations:
    """Seconds of ops: of the kernels that they launch, or on a CPU their own."""

    #: by thread: (launched at, seconds of the kernel), in order; None on a CPU
    launched: Mapping[object, Sequence[tuple[float, float]]] | None

    @classmethod
    def of(cls, trace: Trace) -> "_Durations":
        if not trace.is_of_gpu:
            return cls(None)
        kernels = {
            event.arguments.get("correlation"): event.seconds for event in trace.events if event.category in DEVICE_WORK
        }
        launched: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for event in trace.events:
            number = event.arguments.get("correlation")
            if event.category in ("cuda_runtime", "cuda_driver") and number in kernels:
                launched[event.thread].append((event.start, kernels[number]))
        return cls(launched)

    def of_event(self, event: Event) -> float:
        if self.launched is None:
            return event.seconds
        own = self.launched.get(event.thread, ())
        low, high = bisect_left(own, (event.start, 0.0)), bisect_left(own, (event.end, 0.0))
        return sum(seconds for _, seconds in own[low:high])


# ---- collectives


def collective_rows(trace: Trace, plan: Plan, profile: HardwareProfile) -> list[Row]:
    """A row for each kind of collective, by axis where the trace names it, as it does on a GPU.

    Predicted are collectives alone; what is measured includes waiting for ranks that come later. gloo runs FSDP's
    reduce-scatters as all-reduces, so on a CPU both are one row.
    """
    measured: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in trace.events:
        kind = _kind(event)
        if kind is not None:
            own = measured[_named(kind, trace.axis_of(event), is_gpu=trace.is_of_gpu)]
            own[0] += 1
            own[1] += event.seconds
    predicted: dict[str, float] = defaultdict(float)
    for row in plan.collectives:
        group, kind = plan.mesh.group(Axis(row.axis), plan.cluster.gpus_per_node), Collective(row.kind)
        seconds = row.count * profile.collective(kind, group, row.num_bytes).seconds
        predicted[_named(kind, row.axis, is_gpu=trace.is_of_gpu)] += seconds
    return [
        Row(
            what=name,
            calls=measured[name][0] / trace.steps,
            measured_s=measured[name][1] / trace.steps,
            predicted_s=predicted[name],
        )
        for name in dict.fromkeys((*predicted, *measured))
    ]


def _named(kind: Collective, axis: str, *, is_gpu: bool) -> str:
    if is_gpu:
        return f"{kind} over {axis or 'an unnamed group'}"
    reduces = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    return " and ".join(reduces) if kind in reduces else str(kind)


def _kind(event: Event) -> Collective | None:
    if is_collective(event):
        return _KINDS.get(str(event.arguments.get("Collective name", "")))
    return _KINDS.get(event.name.removeprefix(_GLOO)) if event.name.startswith(_GLOO) else None

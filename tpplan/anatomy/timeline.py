"""When the parts of a step run, derived from what prices them.

The price of a step (tpplan.costs.step.formulate) is a sum; what it adds up is put here in the order in which torch runs
it. Nothing is priced anew: the seconds of a timeline by part are those of `price`. What the price does not say:

- Kernels and collectives of tp run in the order of the graph, in backward in the reverse; a recomputed layer runs again
  where its backward begins, without its order inside.
- The price compares a unit's gather or reduction with the unit's own kernels. So it is drawn from the unit's start on,
  beside kernels alone; what is left waits at the unit's end. FSDP itself works one unit ahead.
- Waiting for the CPU is spread evenly over micro-batches, and drawn at the end of each.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tpplan.core.graph import enclosing
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.step_time import StepTime, rerun, time_of
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.fsdp_communication import OverlappedCollective
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Decider
from tpplan.layouts.layer_treatments import Count, FsdpUnit, LayerGroup
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    DATA_PARALLEL,
    FSDP_COPIES,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
    TP_REDUCTION,
)
from tpplan.plan.plan import Pass
from tpplan.plan.step_anatomy import Segment, Stream, Timeline
from tpplan.solvers.problem import Expression, added, merged, negative

#: kernels that collectives of the data axes run beside
_KERNELS = frozenset({COMPUTE, RECOMPUTATION})


def timeline(assignment: Assignment, formulation: Formulation) -> Timeline:
    """The timeline of a step; `formulation` is that of the assignment alone, as `formulated` makes it.

    Its seconds by part add up to those of `step_time` (both in tpplan.costs.prediction.step_time).
    """
    steps = assignment.accumulation_steps
    micro_batches = _MicroBatches(assignment=assignment, formulation=formulation)
    earlier: dict[str, float] = {}
    for index, times in ((0, 1), (1, steps - 2)):
        if index < steps - 1:
            own = Timeline(earlier=0, earlier_s={}, segments=micro_batches.run(index, 0.0)).seconds_by_part()
            earlier = {part: earlier.get(part, 0.0) + times * own.get(part, 0.0) for part in {**earlier, **own}}
    last = micro_batches.run(steps - 1, sum(earlier.values()))
    return Timeline(earlier=steps - 1, earlier_s=earlier, segments=last)


@dataclass(slots=True)
class _Track:
    """Segments as they are put one after the other; `hidden` are modules whose collectives run beside kernels to come,
    with the seconds that are left of them."""

    at_s: float
    during: Pass = Pass.FORWARD
    segments: list[Segment] = field(default_factory=list)
    hidden: deque[tuple[str, float]] = field(default_factory=deque)

    def run(self, stream: Stream, part: str, module: str, seconds: float) -> None:
        """Puts work after all that is there; collectives that are hidden run beside kernels."""
        if seconds <= 0.0:
            return
        start_s, last = self.at_s, self.segments[-1] if self.segments else None
        self.at_s += seconds
        if last is not None and (last.stream, last.part, last.module, last.during) == (
            stream,
            part,
            module,
            self.during,
        ):
            self.segments.pop()
            start_s = last.start_s
        self._add(stream, part, module, start_s, self.at_s)
        if part in _KERNELS:
            self._run_beside(self.at_s - seconds)

    def _run_beside(self, start_s: float) -> None:
        """Lays what is hidden beside a kernel from `start_s` to now."""
        free_s = self.at_s - start_s
        while self.hidden and free_s > 0.0:
            module, left_s = self.hidden.popleft()
            taken_s = min(free_s, left_s)
            if taken_s > 0.0:
                self._add_beside(module, start_s, start_s + taken_s)
            if taken_s < left_s:
                self.hidden.appendleft((module, left_s - taken_s))
            start_s, free_s = start_s + taken_s, free_s - taken_s

    def _add_beside(self, module: str, start_s: float, end_s: float) -> None:
        """Inserts the segment before the kernel's, so that kernels in a row stay one segment."""
        kernel = self.segments.pop()
        self._add(Stream.DATA, "", module, start_s, end_s)
        self.segments.append(kernel)

    def _add(self, stream: Stream, part: str, module: str, start_s: float, end_s: float) -> None:
        self.segments.append(
            Segment(
                stream=stream, part=part, module=module, during=self.during, start_s=start_s, seconds=end_s - start_s
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """A collective of a unit in a pass: seconds beside kernels, seconds that are waited for, and seconds by which it
    slows down the kernels beside it."""

    hidden_s: float
    exposed_s: float
    slowed_s: float


_NOTHING = _Beside(hidden_s=0.0, exposed_s=0.0, slowed_s=0.0)


@dataclass(frozen=True, kw_only=True)
class _MicroBatches:
    """The micro-batches of an assignment, in parts that its formulation prices."""

    assignment: Assignment
    formulation: Formulation

    def run(self, index: int, start_s: float) -> tuple[Segment, ...]:
        """The segments of a micro-batch, from `start_s` on; after the last one comes the end of the step."""
        steps, step = self.assignment.accumulation_steps, self._step.time_s
        is_last, track = index == steps - 1, _Track(at_s=start_s)
        self._forward(track, is_first=not index)
        track.during = Pass.BACKWARD
        self._backward(track, is_last=is_last)
        if index:
            track.run(Stream.COMPUTE, ACCUMULATION, "", step.get(ACCUMULATION, 0.0) / (steps - 1))
        track.run(Stream.COMPUTE, ISSUE, "", step.get(ISSUE, 0.0) / steps)
        if is_last:
            track.during = Pass.STEP
            track.run(Stream.TENSOR, TP_REDUCTION, "", step.get(TP_REDUCTION, 0.0))
            track.run(Stream.COMPUTE, OPTIMIZER, "", step.get(OPTIMIZER, 0.0))
        return tuple(track.segments)

    # Passes

    def _forward(self, track: _Track, *, is_first: bool) -> None:
        for unit in self._without_nodes:
            self._begin_forward(track, unit, is_first=is_first)
            self._end(track, unit, self._gather(unit, is_first=is_first))
        for position, (name, decider) in enumerate(self._decisions):
            for unit in self._starts.get(position, ()):
                self._begin_forward(track, unit, is_first=is_first)
            time = self.formulation.table[self.formulation.space.classes[name]][0]
            track.run(Stream.COMPUTE, COMPUTE, decider.module, time.forward.seconds)
            track.run(Stream.TENSOR, TENSOR_PARALLEL, decider.module, time.forward_collectives.seconds)
            for unit in self._ends.get(position, ()):
                self._end(track, unit, self._gather(unit, is_first=is_first) if unit.name else _NOTHING)

    def _begin_forward(self, track: _Track, unit: FsdpUnit, *, is_first: bool) -> None:
        gather = self._gather(unit, is_first=is_first)
        if not unit.name:  # nothing runs before the root
            track.run(Stream.DATA, DATA_PARALLEL, unit.name, gather.exposed_s)
        track.hidden.append((unit.name, gather.hidden_s))
        if is_first or not self._stays_gathered(unit):
            track.run(Stream.COMPUTE, FSDP_COPIES, unit.name, self._copies(unit)[0])

    def _stays_gathered(self, unit: FsdpUnit) -> bool:
        """True for a unit that one micro-batch leaves gathered for the next."""
        return self.assignment.gathered_once and not self._is_resharded(unit)

    def _is_resharded(self, unit: FsdpUnit) -> bool:
        return bool(unit.name and self._kind_of[unit.name].count(reshard=True).constant)

    def _backward(self, track: _Track, *, is_last: bool) -> None:
        for position in range(len(self._decisions) - 1, -1, -1):
            name, decider = self._decisions[position]
            for unit in reversed(self._ends.get(position, ())):
                self._begin_backward(track, unit, is_last=is_last)
            for kernels_s, sent_s, again in self._again_at.get(position, ()):
                track.run(Stream.COMPUTE, RECOMPUTATION, again, kernels_s)
                track.run(Stream.TENSOR, TENSOR_PARALLEL, again, sent_s)
            time = self.formulation.table[self.formulation.space.classes[name]][0]
            track.run(Stream.TENSOR, TENSOR_PARALLEL, decider.module, time.backward_collectives.seconds)
            track.run(Stream.COMPUTE, COMPUTE, decider.module, time.backward.seconds)
            for unit in reversed(self._starts.get(position, ())):
                self._end_backward(track, unit, is_last=is_last)
        for unit in self._without_nodes:
            self._begin_backward(track, unit, is_last=is_last)
            self._end_backward(track, unit, is_last=is_last)

    def _begin_backward(self, track: _Track, unit: FsdpUnit, *, is_last: bool) -> None:
        track.hidden.append((unit.name, self._repeated(unit, is_last=is_last).hidden_s))
        if not unit.name:
            return
        gathering_s, _ = self._copies(unit)
        if self._kind_of[unit.name].count(reshard=True).constant:
            track.run(Stream.COMPUTE, FSDP_COPIES, unit.name, gathering_s)
        compute, sent, _ = self._recomputed(unit)
        track.run(Stream.COMPUTE, RECOMPUTATION, unit.name, self._value(compute))
        track.run(Stream.TENSOR, TENSOR_PARALLEL, unit.name, self._value(sent))

    def _end_backward(self, track: _Track, unit: FsdpUnit, *, is_last: bool) -> None:
        if is_last or not self.assignment.whole_gradients:
            track.run(Stream.COMPUTE, FSDP_COPIES, unit.name, self._copies(unit)[1])
        self._end(track, unit, self._repeated(unit, is_last=is_last))

    def _end(self, track: _Track, unit: FsdpUnit, collective: _Beside) -> None:
        track.run(Stream.COMPUTE, DATA_PARALLEL, unit.name, collective.slowed_s)
        track.run(Stream.DATA, DATA_PARALLEL, unit.name, collective.exposed_s)

    # What the formulation prices of a unit

    def _gather(self, unit: FsdpUnit, *, is_first: bool) -> _Beside:
        """The gather in forward; all of the root's is exposed."""
        if not is_first and self._stays_gathered(unit):
            return _NOTHING
        communication = self.formulation.objective.fsdp_communication
        gather, _, _ = communication.collectives_of(self._priced_as(unit))
        sent = communication.sent_in_forward(unit, gather, reshards=self._is_resharded(unit))
        return self._beside(sent, communication.hiding_compute(self._priced_as(unit))[0] if unit.name else None)

    def _repeated(self, unit: FsdpUnit, *, is_last: bool) -> _Beside:
        """The transfers of backward: the gather again, where the unit was resharded, and the reductions."""
        communication, priced_as = self.formulation.objective.fsdp_communication, self._priced_as(unit)
        gather, scatter, reduce = communication.collectives_of(priced_as)
        reshards = self._is_resharded(unit)
        sent = communication.sent_in_backward(unit, gather, scatter, reshards=reshards, is_last=is_last)
        if sent is None:
            return _NOTHING
        beside = None
        if unit.name:
            beside = communication.hiding_compute(priced_as)[1]
            if communication.hides:
                beside = merged(added(beside, self._recomputed(unit)[0]))
        return self._beside(added(sent, reduce) if is_last else sent, beside)

    def _beside(self, transfer: Expression, compute: Expression | None) -> _Beside:
        if self.assignment.mesh.data_parallel == 1:
            return _NOTHING
        uncomputed = None if compute is None else negative(compute)
        issued = OverlappedCollective(transfer=transfer, uncomputed=uncomputed, weight=1.0, count=Count(constant=1))
        sent_s = self._value(transfer)
        exposed_s = sent_s if compute is None else max(0.0, sent_s - self._value(compute))
        slowdown = self.formulation.setting.profile.overlap_slowdown
        added_s = sum(term.value(self._choice) for term in issued.terms(slowdown))
        return _Beside(hidden_s=sent_s - exposed_s, exposed_s=exposed_s, slowed_s=float(added_s - exposed_s))

    def _copies(self, unit: FsdpUnit) -> tuple[float, float]:
        if not self.formulation.uses_fsdp:
            return 0.0, 0.0
        gathering, reducing = self.formulation.objective.fsdp_communication.copies_of(self._priced_as(unit))
        return self._value(gathering), self._value(reducing)

    def _recomputed(self, unit: FsdpUnit) -> tuple[Expression, Expression, Expression]:
        kind = self._kind_of[unit.name]
        (treatment,) = kind.numbers.counts
        priced, units = self.formulation.priced, self.formulation.setting.units
        return priced.recomputed_forward(units, kind.unit.name, treatment.recompute)

    def _priced_as(self, unit: FsdpUnit) -> FsdpUnit:
        """The unit whose price stands for that of its like."""
        return self._kind_of[unit.name].unit if unit.name else unit

    def _value(self, expression: Expression) -> float:
        return float(expression.value(self._choice))

    # Where units begin and end

    @cached_property
    def _choice(self) -> Mapping[str, int]:
        return dict.fromkeys(self.assignment.strategies, 0)

    @cached_property
    def _step(self) -> StepTime:
        return time_of(self.assignment, self.formulation)

    @cached_property
    def _decisions(self) -> Sequence[tuple[str, Decider]]:
        return tuple(self.assignment.deciders.items())

    @cached_property
    def _kind_of(self) -> Mapping[str, LayerGroup]:
        return {unit.name: kind for kind in self.formulation.groups.timed for unit in kind.units}

    @cached_property
    def _spans(self) -> Mapping[str, tuple[int, int]]:
        """By unit the first and the last position of its decisions; the root's are those of the whole."""
        names, found = {unit.name for unit in self.formulation.groups.units}, dict[str, tuple[int, int]]()
        for position, (_, decider) in enumerate(self._decisions):
            for name in {*enclosing(decider.module), ""} & names:
                found[name] = found.get(name, (position,))[0], position
        return found

    @cached_property
    def _starts(self) -> Mapping[int, list[FsdpUnit]]:
        return self._units_at(0, outermost_first=True)

    @cached_property
    def _ends(self) -> Mapping[int, list[FsdpUnit]]:
        return self._units_at(1, outermost_first=False)

    def _units_at(self, end: int, *, outermost_first: bool) -> dict[int, list[FsdpUnit]]:
        found: dict[int, list[FsdpUnit]] = {}
        for unit in sorted(self.formulation.groups.units, key=lambda own: len(own.name), reverse=not outermost_first):
            if unit.name in self._spans:
                found.setdefault(self._spans[unit.name][end], []).append(unit)
        return found

    @cached_property
    def _without_nodes(self) -> tuple[FsdpUnit, ...]:
        """Units that no traced op is in; they are gathered all the same."""
        return tuple(unit for unit in self.formulation.groups.units if unit.name not in self._spans)

    @cached_property
    def _again_at(self) -> Mapping[int, list[tuple[float, float, str]]]:
        """Seconds of kernels and of collectives of modules recomputed beside layers, by the last position in each."""
        found: dict[int, list[tuple[float, float, str]]] = {}
        for module, kernels_s, sent_s in self._recomputed_within():
            inside = (i for i, (_, decider) in enumerate(self._decisions) if module in enclosing(decider.module))
            found.setdefault(max(inside), []).append((kernels_s, sent_s, module))
        return found

    def _recomputed_within(self) -> Iterator[tuple[str, float, float]]:
        modules = self.assignment.recomputed_within
        if not modules:
            return
        lifetimes = Lifetimes(self.assignment, self.formulation.priced.executor)
        times = {name: own[0] for name, own in self.formulation.table.items()}
        for module in modules:
            again = rerun(lifetimes, times, None, (module,))
            yield module, again.compute.seconds, again.collectives.seconds

"""Prices every strategy of every decision: seconds of forward and backward, with errors, for the ILP and pricing."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpplan.core.graph import Op, Value
from tpplan.core.layout import Conversion
from tpplan.core.mesh import Axis, GroupShape
from tpplan.costs.collectives import Transfer, conversion_time, conversion_transfers, op_transfers, steps_key
from tpplan.costs.error_bars import NONE, Residuals
from tpplan.costs.fusion import moved_shares
from tpplan.costs.gradient_sums import MOVED, additions, moved_bytes
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import Execution
from tpplan.costs.runs.kernels import WORK, Attention, Kernel, Matmul, MemoryBound
from tpplan.costs.runs.known_times import KnownTimes
from tpplan.layouts.decision_space import Space
from tpplan.layouts.readings import Reading, reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.machine.profile import Collective, Estimate
from tpplan.plan.plan import Pass, Recompute, WorkKind

ZERO = Estimate.zero()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Kernels and collectives of a pass, or of what recomputation runs a second time, per micro-batch. `kernels` counts
    those of both that the CPU issues; `residuals` are their errors, by table."""

    compute: Estimate = ZERO
    collectives: Estimate = ZERO
    kernels: float = 0.0
    residuals: Residuals = NONE

    @property
    def seconds(self) -> float:
        """Seconds of kernels and collectives."""
        return (self.compute + self.collectives).seconds

    def __add__(self, other: "Work") -> "Work":
        return Work(
            compute=self.compute + other.compute,
            collectives=self.collectives + other.collectives,
            kernels=self.kernels + other.kernels,
            residuals=self.residuals + other.residuals,
        )

    def __mul__(self, number: float) -> "Work":
        return Work(
            compute=self.compute * number,
            collectives=self.collectives * number,
            kernels=self.kernels * number,
            residuals=self.residuals * number,
        )


NO_WORK = Work()
#: of an op: the forward, the backward, and what runs again by mode of recomputation
Works = tuple[Work, Work, Mapping[Recompute, Work]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTime:
    """Seconds of one strategy per micro-batch, kernels and collectives separately.

    `again` is what a mode of recomputation runs a second time, at most. `*_kernels` count the kernels and collectives
    that the CPU issues. `residuals` are the errors of forward and backward, by table.
    """

    forward: Estimate
    backward: Estimate
    forward_collectives: Estimate
    backward_collectives: Estimate
    transfers: tuple[Transfer, ...]
    again: Mapping[Recompute, Work]
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    residuals: Residuals = NONE


#: nothing to run
FREE = StrategyTime(
    forward=ZERO,
    backward=ZERO,
    forward_collectives=ZERO,
    backward_collectives=ZERO,
    transfers=(),
    again=dict.fromkeys(Recompute, NO_WORK),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A kernel with its time, and the share of it, and of its launch, that fusion leaves."""

    kernel: Kernel
    time: Estimate
    share: float


def _summed(parts: Iterable[_Part]) -> Work:
    """Returns the sum of kernels, each by the share that fusion leaves."""
    seconds, error_s, extrapolated, count = 0.0, 0.0, False, 0.0
    errors = {Matmul: 0.0, Attention: 0.0, MemoryBound: 0.0}
    for part in parts:
        error = part.share * part.time.error_s
        seconds += part.share * part.time.seconds
        error_s += error
        extrapolated = extrapolated or part.time.extrapolated
        count += part.share
        errors[type(part.kernel)] += error
    return Work(
        compute=Estimate(seconds=seconds, error_s=error_s, extrapolated=extrapolated),
        kernels=count,
        residuals=Residuals(matmuls=errors[Matmul], attention=errors[Attention], memory=errors[MemoryBound]),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of kernels and ops on a machine, each computed once for all numbers of ranks and micro-batches."""

    times: KnownTimes
    #: by the execution's id and the share that fusion leaves; the execution is held, so that its id is not reused
    _works: dict[tuple[int, float], tuple[Execution, Works]] = field(default_factory=dict)
    _alone: dict[tuple[int, float], tuple[Execution, StrategyTime]] = field(default_factory=dict)

    def work(self, kernels: Iterable[Kernel], moved: float) -> Work:
        """The sum of kernels. `moved` is the share of memory-bound kernels' time and number that fusion leaves."""
        return _summed(self._parts(kernels, moved))

    def works_of(self, execution: Execution, moved: float) -> Works:
        """The work of the forward, of the backward, and of what each mode of recomputation runs again."""
        key = id(execution), moved
        if key not in self._works:
            parts = list(self._parts(execution.forward, moved))
            forward, backward = _summed(parts), self.work(execution.backward, moved)
            kinds = {WORK[type(part.kernel)] for part in parts}
            again = {
                mode: forward
                if kinds.isdisjoint(mode.keeps)
                else _summed(part for part in parts if WORK[type(part.kernel)] not in mode.keeps)
                for mode in Recompute
            }
            self._works[key] = execution, (forward, backward, again)
        return self._works[key][1]

    def alone(self, execution: Execution, moved: float) -> StrategyTime:
        """The time of an op without collectives, of whose results no gradients are added."""
        key = id(execution), moved
        if key not in self._alone:
            forward, backward, again = self.works_of(execution, moved)
            self._alone[key] = execution, _together(forward, backward, again)
        return self._alone[key][1]

    def _parts(self, kernels: Iterable[Kernel], moved: float) -> Iterator[_Part]:
        for kernel in kernels:
            share = moved if isinstance(kernel, MemoryBound) else 1.0
            yield _Part(kernel=kernel, time=self.times.kernel(kernel), share=share)


def _together(
    forward: Work,
    backward: Work,
    again: Mapping[Recompute, Work],
    transfers: tuple[Transfer, ...] = (),
    sent: Estimate = ZERO,
    sent_back: Estimate = ZERO,
) -> StrategyTime:
    """Returns the time of an op with its collectives."""
    number = sum(transfer.during is Pass.FORWARD for transfer in transfers)
    errors = Residuals(tp_collectives=sent.error_s), Residuals(tp_collectives=sent_back.error_s)
    if transfers:
        summed = Work(collectives=sent, kernels=float(number), residuals=errors[0])
        again = {mode: work if WorkKind.SUM in mode.keeps else work + summed for mode, work in again.items()}
    return StrategyTime(
        forward=forward.compute,
        backward=backward.compute,
        forward_collectives=sent,
        backward_collectives=sent_back,
        transfers=transfers,
        again=again,
        forward_kernels=forward.kernels + number,
        backward_kernels=backward.kernels + len(transfers) - number,
        residuals=forward.residuals + backward.residuals + errors[0] + errors[1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The inputs and caches of a table of times."""

    rates: Rates
    group: GroupShape
    #: the group of ranks that divide experts
    experts: GroupShape
    executor: Executor
    #: by decision: the share of its bytes that fusion leaves
    shares: Mapping[str, float]
    #: by decision: the number of additions of gradients behind each of its results
    additions: Mapping[str, tuple[float, ...]]
    #: times of conversions, by all that they depend on
    conversions: dict[Hashable, StrategyTime] = field(default_factory=dict)
    #: times of all strategies of a boundary or reading, by all that they depend on
    converting: dict[Hashable, tuple[StrategyTime, ...]] = field(default_factory=dict)


def time_table(
    space: Space,
    rates: Rates,
    group: GroupShape,
    experts: GroupShape,
    executor: Executor,
    *,
    is_compiled: bool = False,
) -> dict[str, tuple[StrategyTime, ...]]:
    """Returns the times of each class's strategies, in their order, by the class's representative decision."""
    pricing = Pricing(
        rates=rates,
        group=group,
        experts=experts,
        executor=executor,
        shares=moved_shares(space.graph) if is_compiled else {},
        additions=additions(space),
    )
    return {name: strategy_times(space, name, pricing) for name in space.members}


def strategy_times(space: Space, name: str, pricing: Pricing) -> tuple[StrategyTime, ...]:
    """Returns the times of one decision's strategies, in order."""
    decider, values, strategies = space.deciders[name], space.graph.values, space.strategies[name]
    moved, counts = pricing.shares.get(name, 1.0), pricing.additions.get(name, ())
    if isinstance(decider, Op):
        call, results = Call.of(space.graph, decider), [values[result] for result in decider.results]
        sums = (_added(pricing, counts, results, s, moved) if counts else NO_WORK for s in strategies)
        return tuple(_op_time(call, s, pricing, moved, own) for s, own in zip(strategies, sums, strict=True))
    is_reading = isinstance(decider, Reading)
    value = values[decider.source.result if isinstance(decider, Reading) else decider.operand]
    key = strategies, is_reading, value.shape, value.dtype, value.carries_gradient, counts, moved
    if key not in pricing.converting:
        found = []
        for strategy in strategies:
            if is_reading:
                conversion, layout = reading_conversion(strategy), strategy.operands[0]
            else:
                conversion, layout = Conversion(strategy.operands[0], strategy.results[0]), strategy.results[0]
            summed = (counts, value.num_bytes, layout.num_slices(pricing.group.ranks), moved) if counts else ()
            own = steps_key(conversion, value), summed
            if own not in pricing.conversions:
                added = _added(pricing, counts, [value], Strategy((), (layout,)), moved)
                pricing.conversions[own] = _conversion_time(conversion, value, pricing, added)
            found.append(pricing.conversions[own])
        pricing.converting[key] = tuple(found)
    return pricing.converting[key]


def _added(
    pricing: Pricing, counts: Sequence[float], values: Sequence[Value], strategy: Strategy, moved: float
) -> Work:
    """Returns the additions of gradients behind the results of a strategy. An addition that is fused with a neighbour
    reads one gradient and moves nothing else."""
    found = NO_WORK
    for count, value, layout in zip(counts, values, strategy.results, strict=False):
        num_bytes = moved_bytes(value, layout, pricing.group.ranks)
        addition = MemoryBound(num_bytes=round(num_bytes if moved == 1.0 else num_bytes / MOVED))
        one = pricing.rates.work((addition,), 1.0)
        found += Work(compute=count * one.compute, kernels=count, residuals=one.residuals * count)
    return found


def _op_time(call: Call, strategy: Strategy, pricing: Pricing, moved: float, added: Work) -> StrategyTime:
    """Returns the time of an op; its collectives are sums over ranks, or exchanges of experts' rows."""
    execution = pricing.executor.execute(call, strategy, pricing.group.ranks)
    transfers = op_transfers(call, strategy)
    if not transfers and not added.kernels:
        return pricing.rates.alone(execution, moved)
    forward, backward, again = pricing.rates.works_of(execution, moved)
    backward = backward + added if added.kernels else backward
    sent, sent_back = (_sent(pricing, transfers, during) for during in (Pass.FORWARD, Pass.BACKWARD))
    return _together(forward, backward, again, transfers, sent, sent_back)


def _sent(pricing: Pricing, transfers: Sequence[Transfer], during: Pass) -> Estimate:
    """Returns the time of an op's collectives in forward or in backward."""
    groups = {Axis.TP: pricing.group, Axis.EP: pricing.experts}
    own = (transfer for transfer in transfers if transfer.during is during)
    return sum((pricing.rates.times.collective(t.kind, groups[t.axis], t.num_bytes) for t in own), ZERO)


def _conversion_time(conversion: Conversion, value: Value, pricing: Pricing, added: Work) -> StrategyTime:
    """Returns the time of a conversion; a mode that keeps sums over ranks repeats gathers and local steps only."""
    if conversion.is_identity:
        if added == NO_WORK:
            return FREE
        return replace(FREE, backward=added.compute, backward_kernels=added.kernels, residuals=added.residuals)
    transfers, times, group = conversion_transfers(conversion, value), pricing.rates.times, pricing.group
    forward, backward = conversion_time(times, conversion, value, group)
    # A local step counts as a kernel; a step with a collective counts as communication, with its copies.
    moves = {transfer.during for transfer in transfers}
    local, sent = (ZERO, forward) if Pass.FORWARD in moves else (forward, ZERO)
    returned, sent_back = (ZERO, backward) if Pass.BACKWARD in moves else (backward, ZERO)
    gathers = (t for t in transfers if t.during is Pass.FORWARD and t.kind is Collective.ALL_GATHER)
    gathered = sum((times.collective(t.kind, group, t.num_bytes) for t in gathers), ZERO)
    kernels = len(conversion.forward)
    own = Residuals(memory=local.error_s, tp_collectives=sent.error_s)
    back = Residuals(memory=returned.error_s, tp_collectives=sent_back.error_s)
    light = Work(
        compute=local,
        collectives=gathered,
        kernels=kernels if local.seconds + gathered.seconds else 0.0,
        residuals=Residuals(memory=local.error_s, tp_collectives=gathered.error_s),
    )
    whole = Work(compute=local, collectives=sent, kernels=kernels, residuals=own)
    return StrategyTime(
        forward=local,
        backward=returned + added.compute,
        forward_collectives=sent,
        backward_collectives=sent_back,
        transfers=transfers,
        again={mode: light if WorkKind.SUM in mode.keeps else whole for mode in Recompute} | {Recompute.NONE: NO_WORK},
        forward_kernels=kernels,
        backward_kernels=added.kernels + (len(conversion.backward) if value.carries_gradient else 0),
        residuals=own + back + added.residuals,
    )

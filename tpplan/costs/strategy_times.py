"""Prices every strategy of every decision: seconds of forward and backward, with errors, for the ILP and pricing."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpplan.core.graph import Boundary, Op, Value
from tpplan.core.layout import Conversion, Layout
from tpplan.core.mesh import Axis, GroupShape
from tpplan.costs.collectives import Transfer, conversion_time, conversion_transfers, op_transfers
from tpplan.costs.error_bars import NONE, Residuals
from tpplan.costs.execute import Executor
from tpplan.costs.execution import Execution
from tpplan.costs.fusion import moved_shares
from tpplan.costs.gradient_sums import MOVED, additions, moved_bytes
from tpplan.costs.kernels import WORK, Attention, Kernel, Matmul, MemoryBound, kernel_time
from tpplan.layouts.decision_space import Space, reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.machine.profile import Collective, Estimate, HardwareProfile
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


def _work(profile: HardwareProfile, kernels: Iterable[Kernel], moved: float) -> Work:
    """Sums kernels. `moved` is the share of memory-bound kernels' time and number that fusion leaves."""
    time, count, errors = ZERO, 0.0, {Matmul: 0.0, Attention: 0.0, MemoryBound: 0.0}
    for kernel in kernels:
        share = moved if isinstance(kernel, MemoryBound) else 1.0
        own = share * kernel_time(profile, kernel)
        time, count = time + own, count + share
        errors[type(kernel)] += own.error_s
    residuals = Residuals(matmuls=errors[Matmul], attention=errors[Attention], memory=errors[MemoryBound])
    return Work(compute=time, kernels=count, residuals=residuals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The inputs and caches of a table of times."""

    profile: HardwareProfile
    group: GroupShape
    #: the group of ranks that divide experts
    experts: GroupShape
    executor: Executor
    #: by decision: the share of its bytes that fusion leaves
    shares: Mapping[str, float]
    #: by decision: the number of additions of gradients behind each of its results
    additions: Mapping[str, tuple[float, ...]]
    #: works_of by the execution's id and share; the execution is held, so that its id is not reused
    works: dict[tuple[int, float], tuple[Execution, Works]] = field(default_factory=dict)
    #: times of conversions, by all that they depend on
    conversions: dict[Hashable, StrategyTime] = field(default_factory=dict)

    def works_of(self, execution: Execution, moved: float) -> Works:
        """Returns the work of the forward, of the backward, and of what each mode of recomputation runs again."""
        key = id(execution), moved
        if key not in self.works:
            forward, backward = (_work(self.profile, own, moved) for own in (execution.forward, execution.backward))
            again = {}
            for mode in Recompute:
                kernels = [kernel for kernel in execution.forward if WORK[type(kernel)] not in mode.keeps]
                again[mode] = _work(self.profile, kernels, moved)
            self.works[key] = execution, (forward, backward, again)
        return self.works[key][1]


def time_table(
    space: Space,
    profile: HardwareProfile,
    group: GroupShape,
    experts: GroupShape,
    executor: Executor,
    *,
    is_compiled: bool = False,
) -> dict[str, tuple[StrategyTime, ...]]:
    """Returns the times of each class's strategies, in their order, by the class's representative decision."""
    pricing = Pricing(
        profile=profile,
        group=group,
        experts=experts,
        executor=executor,
        shares=moved_shares(space.graph) if is_compiled else {},
        additions=additions(space),
    )
    return {name: tuple(strategy_times(space, name, pricing)) for name in space.members}


def strategy_times(space: Space, name: str, pricing: Pricing) -> Iterator[StrategyTime]:
    """Yields the times of one decision's strategies, in order."""
    decider, values = space.deciders[name], space.graph.values
    moved, counts = pricing.shares.get(name, 1.0), pricing.additions.get(name, ())
    for strategy in space.strategies[name]:
        if isinstance(decider, Op):
            added = _added(pricing, counts, [values[v] for v in decider.results], strategy.results, moved)
            yield _op_time(Call.of(space.graph, decider), strategy, pricing, moved, added)
            continue
        if isinstance(decider, Boundary):
            value, layout = values[decider.operand], strategy.results[0]
            conversion = Conversion(strategy.operands[0], strategy.results[0])
        else:
            value, layout = values[decider.parameter.result], strategy.operands[0]
            conversion = reading_conversion(strategy)
        key = conversion, layout, value.shape, value.dtype, value.carries_gradient, counts, moved
        if key not in pricing.conversions:
            added = _added(pricing, counts, [value], [layout], moved)
            pricing.conversions[key] = _conversion_time(conversion, value, pricing.profile, pricing.group, added)
        yield pricing.conversions[key]


def _added(
    pricing: Pricing, counts: Sequence[float], values: Sequence[Value], layouts: Sequence[Layout], moved: float
) -> Work:
    """Returns the additions of gradients behind values; one that is fused with a neighbour only reads one gradient."""
    found = NO_WORK
    for count, value, layout in zip(counts, values, layouts, strict=False):
        num_bytes = moved_bytes(value, layout, pricing.group.ranks)
        addition = MemoryBound(num_bytes=round(num_bytes if moved == 1.0 else num_bytes / MOVED))
        one = _work(pricing.profile, (addition,), 1.0)
        found += Work(compute=count * one.compute, kernels=count, residuals=one.residuals * count)
    return found


def _op_time(call: Call, strategy: Strategy, pricing: Pricing, moved: float, added: Work) -> StrategyTime:
    """Returns the time of an op; its collectives are sums over ranks, or exchanges of experts' rows."""
    execution = pricing.executor.execute(call, strategy, pricing.group.ranks)
    transfers = op_transfers(call, strategy)
    forward, backward, again = pricing.works_of(execution, moved)
    backward = backward + added if added.kernels else backward
    collectives, sent_back = (_sent(pricing, transfers, during) for during in (Pass.FORWARD, Pass.BACKWARD))
    sent = Residuals(tp_collectives=collectives.error_s)
    number = sum(transfer.during is Pass.FORWARD for transfer in transfers)
    if transfers:
        summed = Work(collectives=collectives, kernels=float(number), residuals=sent)
        again = {mode: work if WorkKind.SUM in mode.keeps else work + summed for mode, work in again.items()}
    return StrategyTime(
        forward=forward.compute,
        backward=backward.compute,
        forward_collectives=collectives,
        backward_collectives=sent_back,
        transfers=transfers,
        again=again,
        forward_kernels=forward.kernels + number,
        backward_kernels=backward.kernels + len(transfers) - number,
        residuals=forward.residuals + backward.residuals + sent + Residuals(tp_collectives=sent_back.error_s),
    )


def _sent(pricing: Pricing, transfers: Sequence[Transfer], during: Pass) -> Estimate:
    """Returns the time of an op's collectives in forward or in backward."""
    groups = {Axis.TP: pricing.group, Axis.EP: pricing.experts}
    own = (transfer for transfer in transfers if transfer.during is during)
    return sum((pricing.profile.collective(t.kind, groups[t.axis], t.num_bytes) for t in own), ZERO)


def _conversion_time(
    conversion: Conversion, value: Value, profile: HardwareProfile, group: GroupShape, added: Work
) -> StrategyTime:
    """Returns the time of a conversion; a mode that keeps sums over ranks repeats gathers and local steps only."""
    if conversion.is_identity:
        free = added == NO_WORK
        return (
            FREE
            if free
            else replace(FREE, backward=added.compute, backward_kernels=added.kernels, residuals=added.residuals)
        )
    transfers = conversion_transfers(conversion, value)
    forward, backward = conversion_time(profile, conversion, value, group)
    # A local step counts as a kernel; a step with a collective counts as communication, with its copies.
    moves = {transfer.during for transfer in transfers}
    local, sent = (ZERO, forward) if Pass.FORWARD in moves else (forward, ZERO)
    returned, sent_back = (ZERO, backward) if Pass.BACKWARD in moves else (backward, ZERO)
    gathers = (t for t in transfers if t.during is Pass.FORWARD and t.kind is Collective.ALL_GATHER)
    gathered = sum((profile.collective(t.kind, group, t.num_bytes) for t in gathers), ZERO)
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

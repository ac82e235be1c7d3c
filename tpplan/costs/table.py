"""Time of every strategy of every decision, forward and backward, as estimates: the numbers the problem is made of."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tpplan.costs.collectives import collectives_of, conversion_time
from tpplan.costs.compute import Executor, Kernel, MemoryBound, kernel_time
from tpplan.costs.fusion import moved_shares
from tpplan.costs.regions import NO_REGIONS, Regions
from tpplan.graph import Boundary, Op, Value
from tpplan.layout import Conversion, LayoutKind
from tpplan.mesh import GroupShape
from tpplan.plan import Pass, Recompute
from tpplan.profile import Collective, Estimate, HardwareProfile
from tpplan.rules import Call, Strategy
from tpplan.space import CROSS_ENTROPY, Space, reading_conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective on the tp axis: num_bytes is that of the whole value."""

    kind: Collective
    during: Pass
    num_bytes: int
    dtype: str


ZERO = Estimate.zero()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTime:
    """Seconds of one strategy per micro-batch, kernels apart from what moves between ranks.

    `again` and `again_collectives` are what of the forward runs a second time where it is recomputed.
    """

    forward: Estimate
    backward: Estimate
    forward_collectives: Estimate
    backward_collectives: Estimate
    transfers: tuple[Transfer, ...]
    again: Estimate = ZERO
    again_collectives: Estimate = ZERO


FREE = StrategyTime(forward=ZERO, backward=ZERO, forward_collectives=ZERO, backward_collectives=ZERO, transfers=())


def time_table(
    space: Space,
    profile: HardwareProfile,
    group: GroupShape,
    executor: Executor,
    regions: Regions = NO_REGIONS,
    *,
    is_compiled: bool = False,
) -> dict[str, tuple[StrategyTime, ...]]:
    """Times by deciding decision (one per class), in the order of its strategies."""
    again = regions.run_again(space, executor)
    shares = moved_shares(space.graph) if is_compiled else {}
    found = {}
    for name in space.members:
        times = tuple(strategy_times(space, name, profile, group, executor, shares.get(name, 1.0)))
        found[name] = (
            tuple(_recomputed(time, regions.mode, profile, group) for time in times) if name in again else times
        )
    return found


def _recomputed(time: StrategyTime, mode: Recompute, profile: HardwareProfile, group: GroupShape) -> StrategyTime:
    """Full recomputation repeats all of a forward; selective what it does not keep: gathers, and all but products,
    attention and sums over ranks."""
    if mode is Recompute.FULL:
        return replace(time, again=time.forward, again_collectives=time.forward_collectives)
    gathers = (t for t in time.transfers if t.during is Pass.FORWARD and t.kind is Collective.ALL_GATHER)
    repeated = sum((profile.collective(t.kind, group, t.num_bytes) for t in gathers), ZERO)
    return replace(time, again=time.again, again_collectives=repeated)


def strategy_times(
    space: Space, name: str, profile: HardwareProfile, group: GroupShape, executor: Executor, moved: float = 1.0
) -> Iterator[StrategyTime]:
    """The times of one decision's strategies, in order; `moved` is the share of an op's bytes that fusion leaves."""
    decider = space.deciders[name]
    for strategy in space.strategies[name]:
        match decider:
            case Op():
                yield _op_time(Call.of(space.graph, decider), strategy, profile, group, executor, moved)
            case Boundary():
                value = space.graph.values[decider.operand]
                yield _conversion_time(Conversion(strategy.operands[0], strategy.results[0]), value, profile, group)
            case _:
                yield _conversion_time(
                    reading_conversion(strategy), space.graph.values[decider.parameter.result], profile, group
                )


def _op_time(
    call: Call, strategy: Strategy, profile: HardwareProfile, group: GroupShape, executor: Executor, moved: float
) -> StrategyTime:
    execution = executor.execute(call, strategy, group.ranks)
    transfers = _cross_entropy_transfers(call, strategy)

    def time(kernels: Iterable[Kernel]) -> Estimate:
        return sum((kernel_time(profile, k) * (moved if isinstance(k, MemoryBound) else 1.0) for k in kernels), ZERO)

    return StrategyTime(
        again=time(kernel for kernel in execution.forward if isinstance(kernel, MemoryBound)),
        forward=time(execution.forward),
        backward=time(execution.backward),
        forward_collectives=sum((profile.collective(t.kind, group, t.num_bytes) for t in transfers), ZERO),
        backward_collectives=ZERO,
        transfers=transfers,
    )


def _cross_entropy_transfers(call: Call, strategy: Strategy) -> tuple[Transfer, ...]:
    """Sharded classes: the maxima, then the sums of exponentials beside the targets' logits, in float32 per row."""
    if call.target != CROSS_ENTROPY or strategy.operands[0].kind is not LayoutKind.SHARD:
        return ()
    logits = call.operands[0]
    rows = logits.num_elements // logits.shape[-1]
    dtype = "float64" if logits.dtype == "float64" else "float32"
    width = 8 if dtype == "float64" else 4
    return tuple(
        Transfer(kind=Collective.ALL_REDUCE, during=Pass.FORWARD, num_bytes=columns * rows * width, dtype=dtype)
        for columns in (1, 2)
    )


def _conversion_time(conversion: Conversion, value: Value, profile: HardwareProfile, group: GroupShape) -> StrategyTime:
    if conversion.is_identity:
        return FREE
    # The reduction of gradients that are summands is once per step, and priced elsewhere.
    transfers = [
        Transfer(kind=kind, during=during, num_bytes=value.num_bytes, dtype=value.dtype)
        for during, steps in ((Pass.FORWARD, conversion.forward), (Pass.BACKWARD, conversion.backward))
        for kind in collectives_of(steps)
        if during is Pass.FORWARD or value.carries_gradient
    ]
    forward, backward = conversion_time(profile, conversion, value, group)
    # A local step is a kernel; a conversion with a collective counts whole as communication.
    moves = {transfer.during for transfer in transfers}
    return StrategyTime(
        again=ZERO if Pass.FORWARD in moves else forward,
        forward=ZERO if Pass.FORWARD in moves else forward,
        backward=ZERO if Pass.BACKWARD in moves else backward,
        forward_collectives=forward if Pass.FORWARD in moves else ZERO,
        backward_collectives=backward if Pass.BACKWARD in moves else ZERO,
        transfers=tuple(transfers),
    )

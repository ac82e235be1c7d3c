"""Prices conversions: the collectives of their steps, and the local kernels around them."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod

from tpplan.core.graph import Boundary, ModelGraph, Op, Value
from tpplan.core.layout import COLLECTIVE_STEPS, Conversion, LayoutKind, Step
from tpplan.core.mesh import Axis, GroupShape
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.runs.known_times import KnownTimes
from tpplan.layouts.decision_space import Decider
from tpplan.layouts.readings import reading_conversion
from tpplan.layouts.rules import Call, Strategy
from tpplan.layouts.rules.indexing import COUNTED, EXCHANGES
from tpplan.layouts.rules.loss import CROSS_ENTROPY
from tpplan.machine.profile import Collective, Estimate
from tpplan.plan.plan import Pass

_COLLECTIVES = {
    Step.ALL_REDUCE: Collective.ALL_REDUCE,
    Step.ALL_GATHER: Collective.ALL_GATHER,
    Step.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    Step.ALL_TO_ALL: Collective.ALL_TO_ALL,
}


def step_time(times: KnownTimes, step: Step, conversion: Conversion, value: Value, group: GroupShape) -> Estimate:
    """Returns the seconds of one step of a conversion, for a value of n bytes over p ranks.

    A collective takes the profile's time for n bytes. Gathering or scattering a dim that is not the outermost, or that
    has parts, also copies the whole value (read and write), since collectives concatenate along the outermost dim. A
    slice copies its n/p bytes; a pad writes n bytes and reads n/p (n/m where neighbours share m slices); divisions and
    masks read and write n; local ids take two passes over the ids.
    """
    whole, local = float(value.num_bytes), value.num_bytes / (conversion.target.slices or group.ranks)
    match step:
        case Step.NONE:
            return Estimate.zero()
        case Step.SLICE:
            return _copy(times, local)
        case Step.PAD:
            return times.move(whole + local)
        case Step.DIVIDE | Step.MASK:
            return _copy(times, whole)
        case Step.LOCAL_ROWS:
            return times.move(4 * whole)
        case _:
            transfer = times.collective(_COLLECTIVES[step], group, whole)
            if step is Step.ALL_REDUCE:
                return transfer
            if step is Step.ALL_TO_ALL:
                return transfer + 2.0 * _copy(times, local)
            return transfer if _is_laid_out(conversion, value) else transfer + _copy(times, whole)


def conversion_time(
    times: KnownTimes, conversion: Conversion, value: Value, group: GroupShape
) -> tuple[Estimate, Estimate]:
    """Returns forward and backward seconds of a conversion; backward is 0 where the value carries no gradient."""
    forward, backward = (
        sum((step_time(times, step, conversion, value, group) for step in steps), Estimate.zero())
        for steps in (conversion.forward, conversion.backward)
    )
    return forward, backward if value.carries_gradient else Estimate.zero()


def collectives_of(steps: tuple[Step, ...]) -> tuple[Collective, ...]:
    """Returns the collectives that the steps issue, in order."""
    return tuple(_COLLECTIVES[step] for step in steps if step in COLLECTIVE_STEPS)


def steps_key(conversion: Conversion, value: Value) -> Hashable:
    """Returns a key that is equal for conversions with the same times and collectives on one group."""
    forward, backward = conversion.forward, conversion.backward
    how = conversion.target.slices, _is_laid_out(conversion, value), value.num_bytes, value.dtype
    return forward, backward, (*how, value.carries_gradient) if forward or backward else ()


def _is_laid_out(conversion: Conversion, value: Value) -> bool:
    """True where slices are contiguous: all dims before the sharded dim have size 1, and it has no parts."""
    dim = conversion.source.dim if conversion.source.dim is not None else conversion.target.dim
    has_parts = bool(conversion.source.parts or conversion.target.parts)
    return prod(value.shape[: dim or 0]) == 1 and not has_parts


def _copy(times: KnownTimes, num_bytes: float) -> Estimate:
    return times.move(2 * num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective on the tp axis, or among the `ranks` ranks that divide experts: num_bytes is that of the whole
    value, of all ranks together."""

    kind: Collective
    during: Pass
    num_bytes: int
    dtype: str
    axis: Axis = Axis.TP
    ranks: int = 0


def transfers_of(graph: ModelGraph, decider: Decider, strategy: Strategy) -> tuple[Transfer, ...]:
    """The collectives on the tp axis that a decision issues in a micro-batch, forward and backward."""
    if isinstance(decider, Op):
        return op_transfers(Call.of(graph, decider), strategy)
    if isinstance(decider, Boundary):
        return conversion_transfers(
            Conversion(strategy.operands[0], strategy.results[0]), graph.values[decider.operand]
        )
    return conversion_transfers(reading_conversion(strategy), graph.values[decider.source.result])


def conversion_transfers(conversion: Conversion, value: Value) -> tuple[Transfer, ...]:
    """The collectives of a conversion. The reduction of gradients that are summands happens once a step and is not
    among them."""
    return tuple(
        Transfer(kind=kind, during=during, num_bytes=value.num_bytes, dtype=value.dtype)
        for during, steps in ((Pass.FORWARD, conversion.forward), (Pass.BACKWARD, conversion.backward))
        for kind in collectives_of(steps)
        if during is Pass.FORWARD or value.carries_gradient
    )


def op_transfers(call: Call, strategy: Strategy) -> tuple[Transfer, ...]:
    """The collectives of an op: a cross entropy over sharded classes reduces the maxima, then the sums of exponentials
    beside the targets' logits, in float32 per row. Rows that go to their experts, and their gradients, are exchanged.
    No other op issues any."""
    if call.target in EXCHANGES:
        return tuple(_exchanges(call))
    if call.target == COUNTED:
        experts, ranks = call.integer(1, "experts"), call.integer(2, "ep")
        num_bytes = DTYPE_BYTES["int64"] * experts * ranks * ranks
        return (_exchange(Pass.FORWARD, num_bytes, "int64", ranks),)
    if call.target != CROSS_ENTROPY or strategy.operands[0].kind is not LayoutKind.SHARD:
        return ()
    logits = call.operands[0]
    rows = logits.num_elements // logits.shape[-1]
    dtype = "float64" if logits.dtype == "float64" else "float32"
    width = DTYPE_BYTES[dtype]
    return tuple(
        Transfer(kind=Collective.ALL_REDUCE, during=Pass.FORWARD, num_bytes=columns * rows * width, dtype=dtype)
        for columns in (1, 2)
    )


def _exchanges(call: Call) -> Iterator[Transfer]:
    """The all-to-alls of rows to their experts or back, in forward and of their gradients in backward."""
    ranks = call.integer(2, "ep")
    rows = max(call.operands[0], call.results[0], key=lambda value: value.num_elements)
    for during in (Pass.FORWARD, Pass.BACKWARD):
        if during is Pass.FORWARD or call.operands[0].carries_gradient:
            yield _exchange(during, rows.num_bytes * ranks, rows.dtype, ranks)


def _exchange(during: Pass, num_bytes: int, dtype: str, ranks: int) -> Transfer:
    """An all-to-all among the ranks that divide experts."""
    return Transfer(
        kind=Collective.ALL_TO_ALL, during=during, num_bytes=num_bytes, dtype=dtype, axis=Axis.EP, ranks=ranks
    )

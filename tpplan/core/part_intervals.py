"""Intervals that each rank holds of a dim whose parts are sharded separately, and the exchange when the parts change.

An interval is (start, length) along the whole dim. A rank's slices of the parts are concatenated in its local tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

Interval = tuple[int, int]
#: sizes of the adjacent parts of a dim; one size where the dim is not divided into parts
Parts = tuple[int, ...]


@cache
def held(parts: Parts, ranks: int) -> tuple[tuple[Interval, ...], ...]:
    """The intervals of each rank, in local order: its slice of the first part, then of the second, and so on."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return tuple(
        tuple((start + rank * (part // ranks), part // ranks) for start, part in zip(starts, parts, strict=True))
        for rank in range(ranks)
    )


@cache
def rank_by_rank(parts: Parts, ranks: int) -> tuple[Interval, ...]:
    """The intervals of all ranks, first rank first: contiguous slices of a dim in this order are the ranks' own."""
    return tuple(chain.from_iterable(held(parts, ranks)))


def positions(laid: Sequence[Interval], wanted: Iterable[Interval]) -> tuple[Interval, ...]:
    """Positions of the `wanted` intervals in a tensor that is the concatenation of the `laid` ones."""
    offset, shifts = 0, []
    for start, length in laid:
        shifts.append((start, start + length, offset - start))
        offset += length
    return tuple(
        (start + shift, length) for start, length in wanted for first, end, shift in shifts if first <= start < end
    )


@cache
def in_order(parts: Parts, ranks: int) -> tuple[Interval, ...]:
    """Positions, in a tensor that is ordered rank by rank, of the intervals in the dim's own order."""
    laid = rank_by_rank(parts, ranks)
    return positions(laid, sorted(laid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One rank's all-to-all when parts change: local positions to send, in order; numbers of elements sent to and
    received from each rank; positions in the received buffer, in the order of the rank's new local tensor."""

    send: tuple[Interval, ...]
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    lay: tuple[Interval, ...]


@cache
def exchange(source: Parts, target: Parts, ranks: int, rank: int) -> Exchange:
    """One rank's all-to-all from slices of the source's parts to slices of the target's; both cover the same dim."""
    before, after = held(source, ranks), held(target, ranks)
    sent = [_common(before[rank], after[other]) for other in range(ranks)]
    received = [_common(before[other], after[rank]) for other in range(ranks)]
    arrived = tuple(chain.from_iterable(received))
    wanted = [piece for start, n in after[rank] for piece in sorted(arrived) if start <= piece[0] < start + n]
    return Exchange(
        send=positions(before[rank], chain.from_iterable(sent)),
        num_sent=tuple(sum(length for _, length in pieces) for pieces in sent),
        num_received=tuple(sum(length for _, length in pieces) for pieces in received),
        lay=positions(arrived, wanted),
    )


def _common(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """The intersections of two sets of intervals, in the dim's order."""
    overlaps = ((max(a, b), min(a + n, b + m)) for a, n in these for b, m in those)
    return sorted((start, end - start) for start, end in overlaps if start < end)

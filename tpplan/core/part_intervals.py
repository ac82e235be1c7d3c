"""What each rank holds of a dim whose parts are all sharded, and who sends what to whom when that changes.

An interval is (start, length) along the whole dim. A rank's slices of several parts lie one after the other on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

Interval = tuple[int, int]
#: sizes of what lies side by side in a dim; one size where the dim is one thing
Parts = tuple[int, ...]


@cache
def held(parts: Parts, ranks: int) -> tuple[tuple[Interval, ...], ...]:
    """What each rank holds, in its local order: its slice of the first part, then of the second."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return tuple(
        tuple((start + rank * (part // ranks), part // ranks) for start, part in zip(starts, parts, strict=True))
        for rank in range(ranks)
    )


@cache
def rank_by_rank(parts: Parts, ranks: int) -> tuple[Interval, ...]:
    """All that is held, the first rank's first: contiguous slices of a dim in this order are what the ranks hold."""
    return tuple(chain.from_iterable(held(parts, ranks)))


def positions(laid: Sequence[Interval], wanted: Iterable[Interval]) -> tuple[Interval, ...]:
    """Where intervals are found in a tensor on which the `laid` ones lie one after the other."""
    offset, shifts = 0, []
    for start, length in laid:
        shifts.append((start, start + length, offset - start))
        offset += length
    return tuple(
        (start + shift, length) for start, length in wanted for first, end, shift in shifts if first <= start < end
    )


@cache
def in_order(parts: Parts, ranks: int) -> tuple[Interval, ...]:
    """Where the dim's own order is found in a tensor that lies rank by rank."""
    laid = rank_by_rank(parts, ranks)
    return positions(laid, sorted(laid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One rank's side of a change of parts: local positions to send in this order, how many to and from each rank, and
    positions of what arrives in the order in which it is to lie."""

    send: tuple[Interval, ...]
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    lay: tuple[Interval, ...]


@cache
def exchange(source: Parts, target: Parts, ranks: int, rank: int) -> Exchange:
    """From slices of the source's parts to slices of the target's; both cover the same dim."""
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
    """What is in both, in the dim's order."""
    overlaps = ((max(a, b), min(a + n, b + m)) for a, n in these for b, m in those)
    return sorted((start, end - start) for start, end in overlaps if start < end)

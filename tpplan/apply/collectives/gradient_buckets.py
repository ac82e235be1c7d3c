"""Groups gradients into buckets. Plan and training step both use this function, so their collectives agree."""

from collections.abc import Iterable

from tpplan.core.units import MIB

#: bytes reduced at once; gradients of many small parameters travel together (torch DDP's default bucket)
BUCKET_BYTES = 25 * MIB


def bucketed(sizes: Iterable[int], bucket_bytes: int) -> list[list[int]]:
    """Positions of `sizes` (bytes), smallest first, in buckets of at most bucket_bytes; a larger size has its own.

    The sums of the buckets depend on the sizes alone, not on their order.
    """
    groups: list[list[int]] = []
    filled = 0
    for position, size in sorted(enumerate(sizes), key=lambda entry: entry[1]):
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(position)
        filled += size
    return groups

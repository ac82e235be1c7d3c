"""Which gradients travel together: the same answer for the plan that lists them and for the step that sends them."""

from collections.abc import Iterable

from tpplan.core.units import MIB

#: bytes reduced at once; gradients of many small parameters travel together (torch DDP's default bucket)
BUCKET_BYTES = 25 * MIB


def bucketed(sizes: Iterable[int], bucket_bytes: int) -> list[list[int]]:
    """Positions of sizes in bytes, grouped: the smallest first, each group at most bucket_bytes unless one alone is
    larger. What the groups add up to is a matter of the sizes alone, not of their order."""
    groups: list[list[int]] = []
    filled = 0
    for position, size in sorted(enumerate(sizes), key=lambda entry: entry[1]):
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(position)
        filled += size
    return groups

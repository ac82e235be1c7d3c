"""Warnings about a valid profile: noisy points, missing tables, inferred numbers.

A profile that does not load raises ProfileError instead. Loading checks that times never decrease, keys are known, and
each table names sources that are listed.
"""

from collections.abc import Iterator, Sequence

from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.machine.tables import (
    ALIGNED_BYTES,
    AttentionRate,
    AttentionTable,
    BatchedMatmuls,
    CollectiveTable,
    MatmulTable,
    MemoryBoundTable,
    MisalignedMatmuls,
    OptimizerIssue,
    Part,
    Spread,
)

_WITH_SPREAD = MatmulTable | AttentionTable | MemoryBoundTable | CollectiveTable
#: largest share of noisy points, of all points, with which a profile counts as a measurement
MOST_NOISE = 0.5


def warnings(profile: HardwareProfile) -> tuple[str, ...]:
    """The warnings, each a sentence that begins with the path of its key."""
    return (*_missing(profile), *_inferred(profile), *_noisy(profile), *_uncited(profile))


def table_name(part: Part) -> str:
    """A table's name in a warning, such as "all_gather on 16 ranks, 8 per node"; "" where the key says it."""
    match part:
        case MatmulTable() | AttentionRate() | BatchedMatmuls():
            return part.dtype
        case AttentionTable():
            return f"{part.dtype}{' causal' if part.causal else ''} {'backward' if part.backward else 'forward'}"
        case MisalignedMatmuls():
            return f"{part.dtype}, {part.bytes} bytes"
        case OptimizerIssue():
            return part.optimizer
        case CollectiveTable():
            return f"{part.kind} on {part.ranks} ranks, {part.ranks_per_node} per node"
        case _:
            return ""


def _named(profile: HardwareProfile) -> Iterator[tuple[str, Part]]:
    """Yields (path with the table's name, part) for all parts."""
    for path, part in profile.parts():
        name = table_name(part)
        yield f"{path} ({name})" if name else path, part


def _missing(profile: HardwareProfile) -> Iterator[str]:
    """Yields a warning for each absent optional part, with its stand-in."""
    if not profile.software:
        yield "software: missing; the versions of torch and the driver that were measured are unknown"
    if profile.date is None:
        yield "date: missing"
    if profile.memory_bound_table is None:
        yield "memory_bound_table: missing; one bandwidth is used for all sizes"
    with_table = {table.dtype for table in profile.attention_tables or ()}
    for rate in profile.attention_rates:
        if rate.dtype not in with_table:
            yield f"attention_tables: none for {rate.dtype}; one rate is used for all sizes"
    if profile.launch.issue_s is None and profile.device_type == "cuda":
        yield "launch.issue_s: missing; how long the CPU takes to issue a kernel is unknown, and priced as nothing"
    if not profile.misaligned_matmuls and profile.device_type == "cuda":
        yield (
            f"misaligned_matmuls: missing; matmuls on rows that do not begin at multiples of {ALIGNED_BYTES} bytes are"
            " priced as aligned ones"
        )
    if not profile.optimizer_issues:
        yield "optimizer_issues: missing; an optimizer's step is priced by its bytes alone"
    for across, where in ((False, "within a node"), (True, "across nodes")):
        have = {table.kind for table in profile.collectives if (table.group.nodes > 1) == across}
        absent = [str(kind) for kind in Collective if kind not in have]
        if absent and (across or profile.gpus_per_node > 1):
            yield f"collectives: no {', '.join(absent)} {where}; plans that need one are refused"
    if profile.overlap is None and profile.collectives:
        yield "overlap: missing; how much matmuls and collectives slow each other down was not measured"


def _inferred(profile: HardwareProfile) -> Iterator[str]:
    for path, part in _named(profile):
        if part.inferred is not None:
            yield f"{path}: inferred: {part.inferred}"


def noisy_share(profile: HardwareProfile) -> float:
    """The share of noisy points among all points with repeats; 0 where no table has a spread of repeats."""
    spreads = [part.spread for _, part in _named(profile) if isinstance(part, _WITH_SPREAD) and part.spread is not None]
    return sum(len(own.noisy) for own in spreads) / (sum(len(own.relative) for own in spreads) or 1)


def why_invalid(profile: HardwareProfile) -> str:
    """Why no plan should be made by this profile: a larger share of its points than MOST_NOISE is noisy; "" where it
    may be used."""
    share = noisy_share(profile)
    if share <= MOST_NOISE:
        return ""
    return (
        f"{share:.0%} of its points are noisy, so plans by it are guesses: measure again on an idle machine, or with a "
        "larger --budget"
    )


def _noisy(profile: HardwareProfile) -> Iterator[str]:
    for path, part in _named(profile):
        match part:
            case MatmulTable():
                yield from _noisy_points(path, part.spread, ("batch", "m", "n", "k"), part.grids)
            case AttentionTable():
                yield from _noisy_points(path, part.spread, ("batch_heads", "sequence", "head_dim"), part.grids)
            case MemoryBoundTable() | CollectiveTable():
                yield from _noisy_points(path, part.spread, ("bytes",), (part.bytes,))
            case _:
                continue


def _noisy_points(
    path: str, spread: Spread | None, names: Sequence[str], grids: Sequence[Sequence[int]]
) -> Iterator[str]:
    if spread is None or not spread.noisy:
        return
    worst = max(spread.noisy, key=lambda i: spread.relative[i])
    index, place = worst, []
    for name, grid in zip(reversed(names), reversed(grids), strict=True):
        index, i = divmod(index, len(grid))
        place.append(f"{name} {grid[i]}")
    yield (
        f"{path}: {len(spread.noisy)} of {len(spread.relative)} points are noisy (repeats spread over more than"
        f" {spread.noisy_above:.0%} of their median), most of all {' '.join(reversed(place))}:"
        f" {spread.relative[worst]:.0%}"
    )


def _uncited(profile: HardwareProfile) -> Iterator[str]:
    """Yields a warning for each source that no table names."""
    cited = {id_ for _, part in profile.parts() for id_ in part.sources}
    for i, source in enumerate(profile.sources):
        if source.id not in cited:
            yield f"sources[{i}]: no table cites {source.id}"

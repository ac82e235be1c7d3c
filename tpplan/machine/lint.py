"""What a reader should know of a profile that loads: noisy points, tables that are missing, numbers that were inferred.

A profile that does not load is an error (ProfileError); none of this is. Loading has already seen to it that times
never decrease, that keys are known, and that each table names sources that are listed.
"""

from collections.abc import Iterator, Sequence

from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.machine.tables import (
    AttentionRate,
    AttentionTable,
    CollectiveTable,
    MatmulTable,
    MemoryBoundTable,
    OptimizerIssue,
    Part,
    Spread,
)


def warnings(profile: HardwareProfile) -> tuple[str, ...]:
    """Each as a sentence that begins with the path of the key it is about."""
    return (*_missing(profile), *_inferred(profile), *_noisy(profile), *_uncited(profile))


def table_name(part: Part) -> str:
    """What a table is of: all_gather on 16 ranks, 8 per node; bfloat16 causal backward. Empty where its key says it."""
    match part:
        case MatmulTable() | AttentionRate():
            return part.dtype
        case AttentionTable():
            return f"{part.dtype}{' causal' if part.causal else ''} {'backward' if part.backward else 'forward'}"
        case OptimizerIssue():
            return part.optimizer
        case CollectiveTable():
            return f"{part.kind} on {part.ranks} ranks, {part.ranks_per_node} per node"
        case _:
            return ""


def _named(profile: HardwareProfile) -> Iterator[tuple[str, Part]]:
    """Parts by path and name."""
    for path, part in profile.parts():
        name = table_name(part)
        yield f"{path} ({name})" if name else path, part


def _missing(profile: HardwareProfile) -> Iterator[str]:
    """Optional parts that are absent, with what stands in for them."""
    if not profile.software:
        yield "software: missing; nobody can tell which versions were measured"
    if profile.date is None:
        yield "date: missing"
    if profile.memory_bound_table is None:
        yield "memory_bound_table: missing; one bandwidth is used for all sizes"
    with_table = {table.dtype for table in profile.attention_tables or ()}
    for rate in profile.attention_rates:
        if rate.dtype not in with_table:
            yield f"attention_tables: none for {rate.dtype}; one rate is used for all sizes"
    if profile.launch.issue_s is None and profile.device_type == "cuda":
        yield "launch.issue_s: missing; nothing says how fast the CPU issues kernels"
    if not profile.optimizer_issues:
        yield "optimizer_issues: missing; an optimizer's step is priced by its bytes alone"
    for across, where in ((False, "within a node"), (True, "across nodes")):
        have = {table.kind for table in profile.collectives if (table.group.nodes > 1) == across}
        absent = [str(kind) for kind in Collective if kind not in have]
        if absent and (across or profile.gpus_per_node > 1):
            yield f"collectives: no {', '.join(absent)} {where}; plans that need one are refused"
    if profile.overlap is None and profile.collectives:
        yield "overlap: missing; nothing says how matmuls and collectives slow each other"


def _inferred(profile: HardwareProfile) -> Iterator[str]:
    for path, part in _named(profile):
        if part.inferred is not None:
            yield f"{path}: inferred: {part.inferred}"


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
    """Sources that no table names."""
    cited = {id_ for _, part in profile.parts() for id_ in part.sources}
    for i, source in enumerate(profile.sources):
        if source.id not in cited:
            yield f"sources[{i}]: no table cites {source.id}"

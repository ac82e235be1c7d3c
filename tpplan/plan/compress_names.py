"""Compresses tables keyed by names: entries that are equal over a repeated block become one entry under its pattern."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tpplan.core.graph import ModelGraph, RepeatedBlock, enclosing, within
from tpplan.core.name_patterns import format_ranges, parse_ranges
from tpplan.plan.plan import BufferPlan, ParameterPlan, Plan

T = TypeVar("T")
#: rewrites the names inside an entry by a function of a name
Rename = Callable[[T, Callable[[str], str]], T]


def blocks_table(graph: ModelGraph) -> dict[str, str]:
    """Pattern -> ranges of indices. Blocks of different structure under one prefix share a pattern."""
    indices: dict[str, set[int]] = {}
    for block in graph.blocks:
        indices.setdefault(block.pattern, set()).update(block.indices)
    return {pattern: format_ranges(tuple(sorted(found))) for pattern, found in indices.items()}


def by_pattern(graph: ModelGraph, table: Mapping[str, T], rename: Rename[T], absent: T | None = None) -> dict[str, T]:
    """The table with each block's commonest entry under the block's pattern, and other entries under full names.

    `rename` rewrites the names inside an entry. `absent` is the entry that a name without one stands for; without
    `absent` (parameters), entries that some siblings lack keep their full names.
    """
    ran = {node.module for node in graph.nodes}
    groups: dict[str, dict[int, T]] = {}
    for name, entry in table.items():
        if (place := _block_of(graph, name)) is not None:
            groups.setdefault(_starred(name, place), {})[place[1]] = rename(entry, partial(_starred, place=place))
    found = dict(table)
    for pattern, entries in groups.items():
        prefix = pattern.partition("*")[0].rstrip(".")
        siblings = sorted(i for block in graph.blocks if block.prefix == prefix for i in block.indices)
        rows = dict(entries)
        if absent is not None:  # siblings of another structure may lack the module
            rows |= {i: absent for i in siblings if i not in entries and _numbered(pattern, i) in ran}
        common, number = _commonest(rows.values())
        if len(rows) < len(siblings) or number < 2:
            continue
        found[pattern] = common
        for i, entry in rows.items():
            name = _numbered(pattern, i)
            found.pop(name, None)
            if entry != common:
                found[name] = rename(entry, partial(_numbered, index=i))
    return found


def _commonest(entries: Iterable[T]) -> tuple[T, int]:
    """The entry with the most equals, the first of several such, and how many they are."""
    found: list[T] = []
    counts: list[int] = []
    for entry in entries:
        if entry in found:
            counts[found.index(entry)] += 1
        else:
            found.append(entry)
            counts.append(1)
    return found[counts.index(max(counts))], max(counts)


def rename_parameter(plan: ParameterPlan, rename: Callable[[str], str]) -> ParameterPlan:
    """A copy of a parameter's plan with its readers and aliases renamed."""
    return replace(
        plan,
        reads={rename(reader): layout for reader, layout in plan.reads.items()},
        aliases=tuple(map(rename, plan.aliases)),
    )


def rename_buffer(plan: BufferPlan, rename: Callable[[str], str]) -> BufferPlan:
    """A copy of a buffer's plan with its readers renamed."""
    return replace(plan, reads={rename(reader): layout for reader, layout in plan.reads.items()})


def pattern_of(graph: ModelGraph, name: str) -> str:
    """The pattern of a name inside a repeated block; any other name unchanged."""
    place = _block_of(graph, name)
    return name if place is None else _starred(name, place)


def names_written(graph: ModelGraph, name: str) -> tuple[str, ...]:
    """The names that cover a name and its counterparts in the block: the pattern, or each full name where blocks of
    another structure share the pattern and may lack the module."""
    place = _block_of(graph, name)
    if place is None:
        return (name,)
    block, pattern = place[0], _starred(name, place)
    if sum(other.pattern == block.pattern for other in graph.blocks) == 1:
        return (pattern,)
    return tuple(_numbered(pattern, index) for index in block.indices)


def _block_of(graph: ModelGraph, name: str) -> tuple[RepeatedBlock, int] | None:
    """The repeated block that a name is inside, and its index there. Blocks are outermost and never nested."""
    places = graph.once(_block_of, lambda: _places(graph))
    return next((places[module] for module in enclosing(name) if module in places), None)


def _places(graph: ModelGraph) -> dict[str, tuple[RepeatedBlock, int]]:
    """Name of a block's member -> (block, index)."""
    return {
        name: (block, index) for block in graph.blocks for index, name in zip(block.indices, block.names, strict=True)
    }


def _numbered(pattern: str, index: int) -> str:
    return pattern.replace("*", str(index), 1)


def _starred(name: str, place: tuple[RepeatedBlock, int]) -> str:
    block, index = place
    own = f"{block.prefix}.{index}" if block.prefix else str(index)
    return block.pattern + name.removeprefix(own) if within(name, own) else name


def block_and_pattern(plan: Plan, key: str) -> tuple[str | None, str]:
    """(pattern of the plan's block that a name is inside, the name with `*` for its index in the block); (None, the
    name) outside of blocks."""
    for pattern, ranges in plan.blocks.items():
        prefix = pattern.removesuffix("*")
        index, _, rest = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and (index == "*" or (index.isdecimal() and int(index) in parse_ranges(ranges))):
            return pattern, f"{pattern}.{rest}" if rest else pattern
    return None, key


def pattern_in(plan: Plan, key: str) -> str:
    """A module's name as the plan writes it: with `*` for its index in a block."""
    return block_and_pattern(plan, key)[1]

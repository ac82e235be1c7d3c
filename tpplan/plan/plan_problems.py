"""What is inconsistent in a plan's file although each value is of its type: degrees, patterns, ranges, names."""

from collections.abc import Iterable, Iterator
from math import prod

from tpplan.core.errors import PlanError
from tpplan.core.graph import enclosing
from tpplan.core.mesh import MAX_GPUS
from tpplan.core.name_patterns import ROOT, block_of, is_pattern, parse_ranges
from tpplan.core.strict_json import MAX_INTEGER
from tpplan.plan.plan_entries import PlanEntries
from tpplan.plan.sections.sharding import why_not_over_tp

#: most names that all patterns of a plan may stand for; a thousand layers of 100 parameters have half as many
MAX_NAMES = 200_000
#: most dims of a torch tensor
MAX_DIMS = 64


def problems(plan: PlanEntries) -> Iterator[str]:
    """Yields where products, patterns or ranges are inconsistent, which types cannot express, by place in the
    file; those after the first may be its consequences."""
    yield from _wrong_degrees(plan)
    yield from _wrong_patterns(plan)
    yield from _wrong_readers(plan)
    units = set(plan.fsdp_units()) - {""}
    for position, key in enumerate(plan.fsdp.exceptions):
        if not units.issuperset(plan.modules([key])):
            yield f"fsdp.exceptions[{position}]: {key!r} is not in fsdp.units, or is the root"
    for position, key in enumerate(plan.fsdp.over_tp or ()):
        if not units.issuperset(plan.modules([key])):
            yield f"fsdp.over_tp[{position}]: {key!r} is not in fsdp.units, or is the root"
    if over_tp := plan.units_over_tp():
        if 1 in (plan.mesh.shard, plan.mesh.tp):
            yield f"fsdp.over_tp: expected a mesh with several ranks on shard and on tp, got {plan.mesh}"
        found = why_not_over_tp(units, plan.parameter_plans(), plan.expert_calls())
        yield from (f"fsdp.over_tp: {unit} has {what}" for unit, what in found if unit in over_tp)
    regions = plan.recomputed_modules()
    for inner in regions:  # whose ops would run three times
        if (region := next(filter(regions.__contains__, enclosing(inner)[1:]), None)) is not None:
            yield f"recompute.{region or ROOT}: {inner} inside it is recomputed too; name only one of them"


def _wrong_degrees(plan: PlanEntries) -> Iterator[str]:
    """Yields degrees and numbers of samples that do not multiply to what they should."""
    degrees, ep = plan.mesh_degrees, plan.experts.ep if plan.experts is not None else 1
    if degrees.shard % ep:
        yield f"experts.ep: {ep} does not divide mesh_degrees.shard, {degrees.shard}, inside which it is laid out"
        return
    batch, mesh = plan.batch, plan.mesh
    if plan.cluster.gpus > MAX_GPUS:
        yield f"cluster.gpus: expected at most {MAX_GPUS}, got {plan.cluster.gpus}"
    if mesh.num_gpus > plan.cluster.gpus:
        yield f"mesh_degrees: {mesh} needs more than cluster.gpus, {plan.cluster.gpus}"
    if batch.global_batch != batch.micro_batch * batch.accumulation_steps * mesh.data_parallel:
        yield (
            f"batch.global_batch: expected micro_batch {batch.micro_batch} * accumulation_steps "
            f"{batch.accumulation_steps} * {mesh.data_parallel} data-parallel ranks, got {batch.global_batch}"
        )


def _wrong_patterns(plan: PlanEntries) -> Iterator[str]:
    """Yields blocks without a range, more than MAX_NAMES names, so that a hostile file cannot exhaust memory, and
    patterns of no block."""
    counts: dict[str, int] = {}
    total = 0
    too_many = "{}: patterns up to here stand for {} names: expected at most {}"
    for pattern, ranges in plan.blocks.items():
        if not is_pattern(pattern) or is_pattern(pattern[:-1]) or not pattern.endswith("*"):
            yield f"blocks.{pattern}: expected a pattern that ends in its only '*'"
        try:
            counts[pattern] = len(parse_ranges(ranges))
        except ValueError as error:
            yield f"blocks.{pattern}: {error}"
            continue
        total += counts[pattern]
        if total > MAX_NAMES:
            yield too_many.format(f"blocks.{pattern}", total, MAX_NAMES)
    for place, key, copies in _written_names(plan):
        total += copies * counts.get(block_of(key), 1)
        if total > MAX_NAMES:
            yield too_many.format(place, total, MAX_NAMES)
    for place, key, _ in _written_names(plan):
        try:
            tuple(plan.expand(key))
        except PlanError as error:
            yield f"{place}: {error}"


def _wrong_readers(plan: PlanEntries) -> Iterator[str]:
    """Yields parameters and buffers that are too large, or whose readers and aliases cannot be theirs."""
    for name, parameter in plan.parameters.items():
        if len(parameter.shape) > MAX_DIMS or prod(parameter.shape) > MAX_INTEGER:
            yield f"parameters.{name}.shape: more elements than a tensor can have"
    for name, parameter in plan.parameter_plans().items():
        if name in parameter.aliases:
            yield f"parameters.{name}.aliases: a name cannot be its own alias"
        if starred := next(filter(is_pattern, (*parameter.reads, *parameter.aliases)), None):
            yield f"parameters.{name}: {starred!r} has a '*', but the parameter's name has none"
    for name, buffer in plan.buffer_plans().items():
        if starred := next(filter(is_pattern, buffer.reads), None):
            yield f"buffers.{name}: {starred!r} has a '*', but the buffer's name has none"


def _written_names(plan: PlanEntries) -> Iterator[tuple[str, str, int]]:
    """Yields (place in the file, key, number of names made of each name that the key stands for)."""
    for key, parameter in plan.parameters.items():
        yield f"parameters.{key}", key, 1 + len(parameter.reads) + len(parameter.aliases)
    for key, buffer in (plan.buffers or {}).items():
        yield f"buffers.{key}", key, 1 + len(buffer.reads)
    tables: dict[str, Iterable[str]] = {
        "boundaries": plan.boundaries,
        "sizes": plan.sizes,
        "losses": plan.losses,
        "bags": plan.bags or (),
        "recompute": plan.recompute,
        "opaque": plan.opaque or (),
        "proof.calls": plan.proof.calls or (),
    }
    for section, keys in tables.items():
        yield from ((f"{section}.{key}", key, 1) for key in keys)
    lists = {
        "draws": plan.draws,
        "fsdp.units": plan.fsdp.units,
        "fsdp.exceptions": plan.fsdp.exceptions,
        "fsdp.over_tp": plan.fsdp.over_tp or (),
    }
    for section, names in lists.items():
        yield from ((f"{section}[{position}]", key, 1) for position, key in enumerate(names))

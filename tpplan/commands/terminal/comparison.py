"""Two plans in columns: the step's seconds and the peak's bytes by part, with their differences."""

from collections.abc import Callable, Iterator

from tpplan.core.units import format_seconds
from tpplan.plan.plan import Plan
from tpplan.plan.report import gib
from tpplan.plan.report.differences import AnyPlan, fullest, memory_differences, time_differences

#: name, in one plan, in the other, difference
Row = tuple[str, str, str, str]
#: most terms of a difference that are named, and the least share of the step at which a term is named
_TERMS, _LEAST_SHARE = 3, 0.0005


def part_rows(plan: AnyPlan, other: AnyPlan) -> Iterator[Row]:
    """Yields the step with its parts, then the peak with its parts, in both plans."""
    yield "step", *times(plan.predicted.step_time_s, other.predicted.step_time_s)
    yield from ((f"  {name}", *times(ours, theirs)) for name, ours, theirs in time_differences(plan, other))
    peaks = [fullest(own).predicted.peak_memory_bytes for own in (plan, other)]
    yield "peak memory", *sizes(*peaks)
    yield from ((f"  {name}", *sizes(ours, theirs)) for name, ours, theirs in memory_differences(plan, other))


def mesh_cell(plan: Plan) -> str:
    """The degrees of a plan's mesh: replicas x FSDP shards x tp ranks."""
    degrees = plan.mesh_degrees
    return f"{degrees.replicate} x {degrees.shard} x {degrees.tp}"


def batch_cell(plan: Plan) -> str:
    """The samples at once on a rank x the micro-batches of a step."""
    return f"{plan.batch.micro_batch} x {plan.batch.accumulation_steps}"


def times(ours: float, theirs: float) -> tuple[str, str, str]:
    """Two times in seconds, and their difference, as text."""
    return format_seconds(ours), format_seconds(theirs), signed(theirs - ours, format_seconds, 1e-12)


def sizes(ours: float, theirs: float) -> tuple[str, str, str]:
    """Two sizes in bytes, and their difference, as text."""
    return gib(ours), gib(theirs), signed(theirs - ours, gib, 0.5)


def signed(difference: float, text_of: Callable[[float], str], least: float) -> str:
    """A difference with its sign; 0 below `least`."""
    if abs(difference) < least:
        return "0"
    return ("+" if difference > 0 else "-") + text_of(abs(difference))


def main_terms(first: Plan, other: Plan) -> str:
    """The terms of time that differ most, and the difference in peak memory, in a line."""
    step = first.predicted.step_time_s
    terms = [
        f"{'+' if theirs > ours else '-'}{format_seconds(abs(theirs - ours))} {name}"
        for name, ours, theirs in time_differences(first, other)[:_TERMS]
        if abs(theirs - ours) > _LEAST_SHARE * step
    ]
    memory = other.predicted.peak_memory_bytes - first.predicted.peak_memory_bytes
    text = ", ".join(terms) or "no term differs by more than 0.05 % of the step"
    return f"{text}; peak memory {'+' if memory >= 0 else '-'}{gib(abs(memory))}."

"""When no plan keeps the pins: which of them is in the way."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tpplan.errors import InfeasibleError, TpplanError, VerificationError
from tpplan.job import Job, Point
from tpplan.pins import Pin
from tpplan.space import NoLayoutError
from tpplan.units import format_bytes


def no_layout(job: Job, micro_batch: int, without: Mapping[int, NoLayoutError]) -> TpplanError:
    """The error where on no tp degree every decision has a strategy: the pins, where they stand at the decisions."""
    held = {tp: job.pinned(micro_batch).pins_of(error.decision) for tp, error in without.items()}
    if not any(held.values()):
        return next(iter(without.values()))
    reasons = "; ".join(
        f"tp {tp}: {_quoted(pins)} leave{'s' if len(pins) == 1 else ''} {without[tp].decision} no layout"
        if pins
        else f"tp {tp}: {without[tp]}"
        for tp, pins in held.items()
    )
    alone = set(without) == {1}
    hint = ". One rank has nothing to cut: pin a tp above 1, or leave it open" if alone else ""
    return InfeasibleError(f"no plan keeps the pins on {job.cluster.gpus} GPUs: {reasons}{hint}.")


def unproven(job: Job, error: NoLayoutError) -> TpplanError:
    """The error where proofs have forbidden all that the pins left."""
    if not job.pins:
        return error
    return VerificationError(
        f"no plan that keeps the pins {_quoted(job.pins)} can be proven: {error.decision} has no layout left. The last "
        f"that was tried: {job.cut_messages[-1]}"
    )


def unkept(job: Job, points: Sequence[Point]) -> InfeasibleError | None:
    """The error where the pins are why no mesh has a plan: each pin without which one has. None where they are not."""
    if not job.pins:
        return None
    names = _quoted(job.pins)
    guilty = [pin for pin in job.pins if _fits(_without(job, {pin}), points)]
    if guilty:
        verb = "it is" if len(guilty) == 1 else "any of these is"
        return InfeasibleError(
            f"no plan keeps the pins within {format_bytes(job.limit)} per GPU on {job.cluster.gpus} GPUs; one does "
            f"where {verb} left out: {_quoted(guilty)}."
        )
    if _fits(_without(job, set(job.pins)), points):
        return InfeasibleError(
            f"no plan keeps the pins within {format_bytes(job.limit)} per GPU on {job.cluster.gpus} GPUs; one does "
            f"without all of them: {names}."
        )
    return None


def _without(job: Job, left_out: set[Pin]) -> Job:
    return job.changed(pins=tuple(pin for pin in job.pins if pin not in left_out), spaces={})


def _fits(job: Job, points: Sequence[Point]) -> bool:
    """Whether some mesh has a plan within the limit: any, not the best."""
    for point in points:
        try:
            problem = job.formulate(point).problem
        except NoLayoutError:
            continue
        if job.solver_of(replace(problem, objective=problem.resources[0].terms)).choice is not None:
            return True
    return False


def _quoted(pins: Iterable[Pin]) -> str:
    return ", ".join(f"'{pin}'" for pin in pins)

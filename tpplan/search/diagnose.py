"""Why there is no plan: how much memory is missing and what would fit, or which of the pins is in the way."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tpplan.core.errors import InfeasibleError, ProfileError, Remedy, SolverError, TpplanError, VerificationError
from tpplan.core.mesh import Mesh
from tpplan.core.units import format_bytes, format_seconds
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.decision_space import NoLayoutError
from tpplan.layouts.pins import Pin
from tpplan.plan.plan import Recompute
from tpplan.search.job import Job, Point
from tpplan.solvers.problem import Problem, Solution, total

#: how many times as many GPUs are tried when nothing fits
LARGER_CLUSTERS = (2, 4, 8, 16, 32, 64)
#: a smaller peak is one that is smaller by this share
LEAST_GAIN = 1e-3


def infeasible(job: Job, points: list[Point]) -> InfeasibleError:
    """The smallest peak on these GPUs by part, and the changes that fit, the cheapest first."""
    needed, formulation, solution = _smallest(job, points)
    choice = solution.choice
    assert choice is not None
    parts: dict[str, float] = {}
    rows = formulation.problem.resources
    for term in max(rows, key=lambda row: total(row.terms, choice)).terms:
        parts[term.name] = parts.get(term.name, 0.0) + term.value(choice)
    parts = {name: n for name, n in sorted(parts.items(), key=lambda row: (-row[1], row[0])) if n}
    remedies = list(_remedies(job, points, formulation.mesh))
    unknown = ""
    try:
        remedies += _larger_clusters(job, formulation.mesh)
    except ProfileError as error:  # of one node: what more of them would do cannot be said
        unknown = f" What more than {job.cluster.gpus} GPUs would do is not known ({error})."
    remedies.sort(key=lambda remedy: remedy.gpu_seconds)
    shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items())
    steps = formulation.setting.accumulation_steps
    micro_batch = job.batch.global_batch // (formulation.mesh.data_parallel * steps)
    return InfeasibleError(
        f"no plan fits {format_bytes(job.limit)} per GPU on {job.cluster.gpus} GPUs: the smallest needs "
        f"{format_bytes(needed)}, {format_bytes(needed - job.limit)} too much, on {formulation.mesh} with micro-batch "
        f"{micro_batch} ({shown}). {_advice(remedies, unknown)}",
        limit_bytes=job.limit,
        needed_bytes=needed,
        parts=parts,
        remedies=tuple(remedies),
    )


def _advice(remedies: list[Remedy], unknown: str) -> str:
    """What would do; `unknown` says why more GPUs were not tried, "" where they were."""
    others = "try a shorter sequence, --precision bf16-mixed or a smaller model."
    if remedies:
        return "; ".join(map(_shown, remedies)) + f".{unknown}"
    return f"T{others[1:]}{unknown}" if unknown else f"More GPUs alone would not do; {others}"


def _shown(remedy: Remedy) -> str:
    peak, seconds = format_bytes(remedy.peak_bytes), format_seconds(remedy.step_time_s)
    return f"{remedy.what} would do ({peak}, at most {seconds} a step)"


def _smallest(job: Job, points: list[Point]) -> tuple[float, Formulation, Solution]:
    """The least peak of any point. More GPUs and a smaller micro-batch never need more."""
    gpus = max(point.num_gpus for point in points)
    meshes = {point.mesh: point for point in sorted(points, reverse=True) if point.num_gpus == gpus}
    return min((_least_memory(job, point) for point in meshes.values()), key=lambda row: row[0])


def least_peak(problem: Problem, solve: Callable[[Problem], Solution]) -> tuple[float, Solution] | None:
    """The least that the largest row of the memory constraint can be, up to LEAST_GAIN, whatever limit there is; None
    where the decisions contradict each other. The largest row is made smaller until all cannot be."""
    rows, needed = problem.resources, math.inf
    row, best = rows[0], None
    while True:
        lower = tuple(replace(other, limit=needed * (1 - LEAST_GAIN)) for other in rows)
        found = solve(replace(problem, objective=row.terms, resources=lower))
        if found.choice is None:
            return best
        peaks = [total(own.terms, found.choice) for own in rows]
        needed = max(peaks)
        row, best = rows[peaks.index(needed)], (needed, found)


def _least_memory(job: Job, point: Point) -> tuple[float, Formulation, Solution]:
    formulation = job.formulate(point, limit=math.inf)
    found = least_peak(formulation.problem, job.solver_of)
    if found is None:
        raise SolverError(f"{point.mesh}: the decisions contradict each other")
    return found[0], formulation, found[1]


def _remedies(job: Job, points: list[Point], mesh: Mesh) -> Iterator[Remedy]:
    """Changes of what was pinned, each of which alone makes something fit."""
    if job.recompute not in (None, Recompute.FULL):
        yield from _tried("recomputation", job.changed(recompute=None), points)
    if job.reshard_after_forward is False:
        yield from _tried("resharding after forward (ZeRO-3)", job.changed(reshard_after_forward=None), points)
    if job.batch.micro_batch is not None and job.batch.micro_batch > 1:
        smaller = replace(job.batch, micro_batch=None)
        freed = job.changed(batch=smaller)
        below = [Point.of(mesh, m) for m in smaller.micro_batches(mesh) if m < job.batch.micro_batch]
        yield from _tried(f"micro-batch {below[0].micro_batch}" if below else "", freed, below[:1])


def _larger_clusters(job: Job, mesh: Mesh) -> Iterator[Remedy]:
    """The least number of GPUs on which something fits. Raises ProfileError where the profile does not know so many."""
    for factor in LARGER_CLUSTERS:
        larger = Mesh(replicate=1, shard=mesh.shard * mesh.replicate * factor, tp=mesh.tp)
        sizes = job.batch.micro_batches(larger)
        own = job if sizes else job.changed(batch=replace(job.batch, global_batch=larger.data_parallel))
        size = min(sizes) if sizes else min(own.batch.micro_batches(larger), default=None)
        if size is None:
            continue
        what = f"{larger.num_gpus} GPUs" + ("" if sizes else f" and a global batch that {larger.data_parallel} divides")
        found = list(_tried(what, own, [Point.of(larger, size)]))
        if found:
            yield from found
            return


def _tried(what: str, job: Job, points: list[Point]) -> Iterator[Remedy]:
    """The remedy, if the point that needs the least memory then fits."""
    if not points:
        return
    needed, formulation, _ = _smallest(job, points)
    if needed > job.limit:
        return
    steps = formulation.setting.accumulation_steps
    micro_batch = job.batch.global_batch // (formulation.mesh.data_parallel * steps)
    found = job.solve_point(Point.of(formulation.mesh, micro_batch))
    choice, seconds = found.solution.choice, found.solution.objective
    if choice is not None and seconds is not None:
        peak = max(total(row.terms, choice) for row in found.formulation.problem.resources)
        yield Remedy(what=what, num_gpus=formulation.mesh.num_gpus, step_time_s=seconds, peak_bytes=peak)


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

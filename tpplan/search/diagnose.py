"""Says why there is no plan: how much memory is missing and what would fit, or which pins prevent it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tpplan.core.errors import InfeasibleError, ProfileError, Remedy, SolverError, TpplanError, VerificationError
from tpplan.core.mesh import Mesh
from tpplan.core.units import format_bytes, format_seconds
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.build_space import NoLayoutError
from tpplan.layouts.decision_space import deciders_of
from tpplan.layouts.in_words import placed
from tpplan.layouts.pins import Pin
from tpplan.plan.plan import Recompute
from tpplan.search.obstacles import Obstacles
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.point_solver import PointSolver, Solvers
from tpplan.solvers.problem import Problem, Solution, total

#: factors of more GPUs to try when nothing fits
LARGER_CLUSTERS = (2, 4, 8, 16, 32, 64)
#: relative gain below which a peak counts as no smaller
LEAST_GAIN = 1e-3


def infeasible(solvers: Solvers, points: list[Point]) -> InfeasibleError:
    """The error with the smallest peak on these GPUs by part, and the changes that fit, the cheapest first: changes to
    plans of the number of ranks that divide experts with which the least memory is needed."""
    each = [(_smallest(solver, own), solver, own) for solver, own in solvers.split(points)]
    (needed, formulation, solution), solver, points = min(each, key=lambda row: row[0][0])
    limit, gpus = solver.request.limit, solver.request.cluster.gpus
    choice = solution.choice
    assert choice is not None
    parts: dict[str, float] = {}
    rows = formulation.problem.resources
    for term in max(rows, key=lambda row: total(row.terms, choice)).terms:
        parts[term.name] = parts.get(term.name, 0.0) + term.value(choice)
    parts = {name: n for name, n in sorted(parts.items(), key=lambda row: (-row[1], row[0])) if n}
    remedies = list(_remedies(solver, points, formulation.mesh))
    unknown = ""
    try:
        remedies += _larger_clusters(solver, formulation.mesh)
    except ProfileError as error:  # the profile is of one node
        unknown = f" Whether more than {gpus} GPUs would do is not known ({error})."
    remedies.sort(key=lambda remedy: remedy.gpu_seconds)
    shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items())
    steps = formulation.setting.accumulation_steps
    micro_batch = solver.request.batch.global_batch // (formulation.mesh.data_parallel * steps)
    return InfeasibleError(
        f"no plan fits {format_bytes(limit)} per GPU on {gpus} GPUs: the smallest needs {format_bytes(needed)}, "
        f"{format_bytes(needed - limit)} too much, on {formulation.mesh} with micro-batch {micro_batch} ({shown}). "
        f"{_advice(remedies, unknown)}",
        limit_bytes=limit,
        needed_bytes=needed,
        parts=parts,
        remedies=tuple(remedies),
    )


def _advice(remedies: list[Remedy], unknown: str) -> str:
    """The changes that would fit, in words; `unknown` says why more GPUs were not tried, "" where they were."""
    others = "try a shorter sequence, --precision bf16-mixed or a smaller model."
    if remedies:
        return "; ".join(map(_shown, remedies)) + f".{unknown}"
    return f"T{others[1:]}{unknown}" if unknown else f"More GPUs alone would not do; {others}"


def _shown(remedy: Remedy) -> str:
    peak, seconds = format_bytes(remedy.peak_bytes), format_seconds(remedy.step_time_s)
    return f"{remedy.what} would do ({peak}, at most {seconds} a step)"


def _smallest(solver: PointSolver, points: list[Point]) -> tuple[float, Formulation, Solution]:
    """The least peak of any point with its ILP and solution; more GPUs or a smaller micro-batch never need more."""
    gpus = max(point.num_gpus for point in points)
    meshes = {point.mesh: point for point in sorted(points, reverse=True) if point.num_gpus == gpus}
    return min((_least_memory(solver, point) for point in meshes.values()), key=lambda row: row[0])


def least_peak(problem: Problem, solve: Callable[[Problem], Solution]) -> tuple[float, Solution] | None:
    """The least possible peak in bytes, up to LEAST_GAIN, whatever the limit; None where the decisions contradict each
    other. Minimizes the largest row again and again, all rows below the last peak, until there is no solution."""
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


def _least_memory(solver: PointSolver, point: Point) -> tuple[float, Formulation, Solution]:
    formulation = solver.formulate(point, limit=math.inf)
    found = least_peak(formulation.problem, solver.solver_of)
    if found is None:
        raise SolverError(f"{point.mesh}: no layouts agree with each other, whatever the memory limit")
    return found[0], formulation, found[1]


def _remedies(solver: PointSolver, points: list[Point], mesh: Mesh) -> Iterator[Remedy]:
    """Yields pinned options that, left open, make some plan fit."""
    request, batch = solver.request, solver.request.batch
    if request.recompute not in (None, Recompute.FULL):
        yield from _tried("recomputation", solver.changed(replace(request, recompute=None)), points)
    if request.reshard_after_forward is False:
        freed = solver.changed(replace(request, reshard_after_forward=None))
        yield from _tried("resharding after forward (ZeRO-3)", freed, points)
    if batch.micro_batch is not None and batch.micro_batch > 1:
        smaller = replace(batch, micro_batch=None)
        freed = solver.changed(replace(request, batch=smaller))
        below = [Point.of(mesh, m) for m in smaller.micro_batches(mesh) if m < batch.micro_batch]
        yield from _tried(f"micro-batch {below[0].micro_batch}" if below else "", freed, below[:1])


def _larger_clusters(solver: PointSolver, mesh: Mesh) -> Iterator[Remedy]:
    """Yields the least number of GPUs on which a plan fits. Raises ProfileError where the profile lacks so many."""
    for factor in LARGER_CLUSTERS:
        larger = replace(mesh, replicate=1, shard=mesh.shard * mesh.replicate * factor)
        sizes = solver.request.batch.micro_batches(larger)
        batch = replace(solver.request.batch, global_batch=larger.data_parallel)
        own = solver if sizes else solver.changed(replace(solver.request, batch=batch))
        size = min(sizes) if sizes else min(own.request.batch.micro_batches(larger), default=None)
        if size is None:
            continue
        what = f"{larger.num_gpus} GPUs" + ("" if sizes else f" and a global batch that {larger.data_parallel} divides")
        found = list(_tried(what, own, [Point.of(larger, size)]))
        if found:
            yield from found
            return


def _tried(what: str, solver: PointSolver, points: list[Point]) -> Iterator[Remedy]:
    """Yields the remedy if the point that needs the least memory then fits."""
    if not points:
        return
    needed, formulation, _ = _smallest(solver, points)
    if needed > solver.request.limit:
        return
    steps = formulation.setting.accumulation_steps
    micro_batch = solver.request.batch.global_batch // (formulation.mesh.data_parallel * steps)
    found = solver.solve_point(Point.of(formulation.mesh, micro_batch))
    choice, seconds = found.solution.choice, found.solution.objective
    if choice is not None and seconds is not None:
        peak = max(total(row.terms, choice) for row in found.formulation.problem.resources)
        yield Remedy(what=what, num_gpus=formulation.mesh.num_gpus, step_time_s=seconds, peak_bytes=peak)


def no_layout(solver: PointSolver, micro_batch: int, without: Mapping[int, NoLayoutError]) -> TpplanError:
    """The error where every tp degree has a decision without a strategy; names the pins at these decisions."""
    held = {tp: solver.pinned(micro_batch).pins_of(error.decision) for tp, error in without.items()}
    if not any(held.values()):
        return next(iter(without.values()))
    graph = solver.traces.traced(micro_batch).graph
    deciders = deciders_of(graph)
    reasons = "; ".join(
        f"tp {tp}: {_quoted(pins)} leave{'s' if len(pins) == 1 else ''} no layout to "
        f"{placed(graph, deciders[without[tp].decision])}"
        if pins
        else f"tp {tp}: {placed(graph, deciders[without[tp].decision])} has no layout"
        for tp, pins in held.items()
    )
    alone = set(without) == {1}
    hint = ". One rank has nothing to shard: pin a tp above 1, or leave it open" if alone else ""
    return InfeasibleError(f"no plan keeps the pins on {solver.request.cluster.gpus} GPUs: {reasons}{hint}.")


def unproven(solver: PointSolver, micro_batch: int, error: NoLayoutError) -> TpplanError:
    """The error where proofs have forbidden all strategies that the pins leave."""
    if not solver.request.pins:
        return error
    graph = solver.traces.traced(micro_batch).graph
    return VerificationError(
        f"no plan that keeps the pins {_quoted(solver.request.pins)} can be proven: no layout is left to "
        f"{placed(graph, deciders_of(graph)[error.decision])}. The last that was tried: {solver.cuts.messages[-1]}"
    )


def unkept(solvers: Solvers, points: Sequence[Point]) -> InfeasibleError | None:
    """The error where pins are why no mesh has a plan, with each pin to leave out; None where they are not."""
    request = solvers.request
    if not (pins := request.pins):
        return None
    limit, gpus = format_bytes(request.limit), request.cluster.gpus
    if not _fits(solvers, points, is_limited=False):
        obstacles = dict.fromkeys(filter(None, (_against_pins(solvers.of(point), point) for point in points)))
        return InfeasibleError(f"no plan keeps the pins on {gpus} GPUs: {'; '.join(obstacles)}.")
    none_keeps = f"no plan keeps the pins within {limit} per GPU on {gpus} GPUs; one does"
    guilty = [pin for pin in pins if _fits(_without(solvers, {pin}), points)]
    if guilty:
        verb = "it is" if len(guilty) == 1 else "any of these is"
        return InfeasibleError(f"{none_keeps} where {verb} left out: {_quoted(guilty)}.")
    if _fits(_without(solvers, set(pins)), points):
        return InfeasibleError(f"{none_keeps} without all of them: {_quoted(pins)}.")
    return None


def _without(solvers: Solvers, left_out: set[Pin]) -> Solvers:
    pins = tuple(pin for pin in solvers.request.pins if pin not in left_out)
    return solvers.changed(lambda solver: solver.changed(replace(solver.request, pins=pins)))


def _against_pins(solver: PointSolver, point: Point) -> str:
    """The first pin that cannot be kept at a point with those before it, and why; "" where all can be kept."""
    for number, pin in enumerate(solver.request.pins):
        later = solver.request.pins[number:]
        try:
            obstacles = Obstacles.of(solver, point.micro_batch, point.tp, without=later)
        except NoLayoutError:
            return ""
        space, pinned = obstacles.space, solver.pinned(point.micro_batch)
        wish = {
            name: frozenset(s for s in space.strategies[name] if all(keeps(s) for own, keeps in rows if own == pin))
            for name, rows in pinned.held.items()
            if name in space.members and pin in pinned.pins_of(name)
        }
        if against := obstacles.against(wish):
            return f"tp {point.tp}: '{pin}' cannot be kept: {against}"
    return ""


def _fits(solvers: Solvers, points: Sequence[Point], *, is_limited: bool = True) -> bool:
    """True where some mesh has any plan, by default within the limit."""
    for point in points:
        solver = solvers.of(point)
        try:
            formulation = solver.formulate(point)
        except NoLayoutError:
            continue
        problem = formulation.problem if is_limited else formulation.unlimited
        objective = problem.resources[0].terms if is_limited else ()
        if solver.solver_of(replace(problem, objective=objective)).choice is not None:
            return True
    return False


def _quoted(pins: Iterable[Pin]) -> str:
    return ", ".join(f"'{pin}'" for pin in pins)

"""The entry points solve and price: from a model and a cluster to a plan, each stage in a module of its own."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tpplan.core.errors import InfeasibleError, ModelError, SolverError, UsageError, first_line
from tpplan.core.gc_pause import rarely_collected
from tpplan.core.graph import ModelGraph
from tpplan.core.name_patterns import module_name
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.memory_replay import memory
from tpplan.costs.prediction.step_time import price as price_assignment
from tpplan.costs.step.formulate import Formulation
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import OpaquePlan, Plan, Precision, Recompute, SolverReport
from tpplan.search.branch_and_bound import search
from tpplan.search.expert_degrees import every_degree
from tpplan.search.models.model_spec import length_of, takes_batch_alone
from tpplan.search.models.subject import BuildModel, ExampleInputs, Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.points.mesh_points import Point, applicable, points_of
from tpplan.search.points.options import Allows, Batch, Cluster, Options, Progress
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.request import Request
from tpplan.search.points.unsearched import WITHOUT_UNITS_OVER_TP
from tpplan.search.rank_notes import Parts, notes_on_rows
from tpplan.search.tp_shares import counted_again
from tpplan.solvers.problem import Status
from tpplan.trace.trace import Loss

#: name of the solver in a plan that was only priced
PRICED = "none, only priced"


@rarely_collected()
def solve(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    cluster: Cluster,
    global_batch: int,
    seq_len: int | None = None,
    micro_batch: int | Literal["auto"] = "auto",
    loss: Loss | None = None,
    unused_outputs: Sequence[str] = (),
    tp: int | None = None,
    fsdp: int | None = None,
    ep: int | None = None,
    expert_imbalance: float = 1.0,
    precision: Precision | str | None = None,
    optimizer: str = "adamw",
    recompute: Recompute | str | None = None,
    reshard_after_forward: bool | None = None,
    fsdp_over_tp: bool | None = None,
    whole_gradients: bool = False,
    all_gpus: bool = False,
    compile: bool = False,
    memory_limit_bytes: float | None = None,
    solver: str | None = None,
    time_limit_s: float | None = None,
    allows: Callable[[ModelGraph], Allows] | None = None,
    pins: Mapping[str, str] | None = None,
    prove: bool = True,
    progress: Progress | None = None,
    reuse: Reuse | None = None,
) -> Plan:
    """The plan with the least predicted step time of those whose predicted peak memory fits.

    build_model() returns the model (on the meta device: it makes no weights), example_inputs(micro_batch, seq_len) its
    inputs; where samples have no length, example_inputs(micro_batch) does, and seq_len is left out. Decided together:
    the mesh, on at most the given GPUs; layouts; per layer what backward recomputes, and whether FSDP reshards it after
    forward; the micro-batch and so the accumulation, unless a number pins it. An option that is None is decided. `tp`
    and `fsdp` pin a degree; `ep` the number of ranks that divide experts (1: each has all), of which the busiest gets
    expert_imbalance times the rows of an even routing. all_gpus=True uses all GPUs, `recompute` ("none", "selective",
    "full") and reshard_after_forward (True is ZeRO-3, False ZeRO-2) hold for every layer. fsdp_over_tp=True shards each
    layer over shard and tp together wherever tp can replicate its weights, False none; None decides it where the
    fastest plan over shard alone has layers whose weights tp replicates, or none fits, and takes False elsewhere.
    whole_gradients=True keeps gradients whole between micro-batches and reduces them once a step, where FSDP else
    reduces each micro-batch's (tpplan.no_sync does what the plan says); in stages it is decided where it is not asked
    for, and units that are not resharded are then gathered once a step. `precision` defaults to bf16-mixed on a GPU
    profile and fp32 else. compile=True prices elementwise ops as torch.compile fuses them. time_limit_s holds for each
    ILP. `pins` hold modules to a style, {"model.layers.*.mlp": "megatron"} (tpplan.layouts.pins). `allows`, given the
    graph, says which strategies of a decision may be chosen. `reuse` is what several calls for one model share
    (tpplan.search.models.trace_cache). Raises ModelError, ProfileError, UsageError, SolverError, and InfeasibleError
    with what would fit.
    """
    options = Options(
        loss=loss,
        unused_outputs=tuple(unused_outputs),
        tp=tp,
        fsdp=fsdp,
        ep=ep,
        expert_imbalance=expert_imbalance,
        precision=precision,
        optimizer=optimizer,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        fsdp_over_tp=fsdp_over_tp,
        whole_gradients=whole_gradients,
        all_gpus=all_gpus,
        compile=compile,
        memory_limit_bytes=memory_limit_bytes,
        solver=solver,
        time_limit_s=time_limit_s,
        allows=allows,
        pins=pins or {},
    )
    length = length_of(seq_len, has_length=not takes_batch_alone(example_inputs), source="solve", option="seq_len")
    batch = Batch(global_batch, None if micro_batch == "auto" else micro_batch, length)
    request = Request.of(build_model, example_inputs, cluster, batch, options, progress)
    return solve_request(request, options, reuse, prove=prove)


def solve_request(request: Request, options: Options, reuse: Reuse | None, *, prove: bool) -> Plan:
    """The fastest plan of a request, as `solve` gives it.

    Where it is open whether FSDP shards layers over shard and tp together, the fastest plan without such layers comes
    first. Only where tp replicates all weights of one of its layers, or none fits, are all points looked at again with
    the choice open: their bounds are lower then, and many more would be solved each time. Elsewhere the plan says that
    it was not searched.
    """
    shared = reuse or Reuse()

    def searched(over_tp: bool | None) -> Plan:
        own = replace(request, fsdp_over_tp=over_tp)
        solvers, points, unsearched = every_degree(*prepare(own, options, shared), options)
        return search(solvers, points, unsearched, prove=prove)

    has_both = _has_shards_and_tp(request, options)
    if request.fsdp_over_tp and not has_both:
        pinned = ", ".join(f"{name}={own}" for name, own in (("tp", options.tp), ("fsdp", options.fsdp)) if own)
        on, other = (f" with {pinned}", ", or pin other degrees") if pinned else ("", "")
        raise UsageError(
            "fsdp_over_tp=True needs a mesh with several ranks on both axes, shard and tp; none of "
            f"{request.cluster.gpus} GPUs{on} has: leave it out{other}"
        )
    if request.fsdp_over_tp is not None or not has_both:
        return searched(request.fsdp_over_tp)
    try:
        plan = searched(False)
    except InfeasibleError:
        return searched(None)
    if not plan.may_have_units_over_tp():
        return _left_out(plan, WITHOUT_UNITS_OVER_TP)
    try:
        return min((searched(None), plan), key=lambda own: own.predicted.step_time_s)
    except SolverError as error:  # out of time, or of rounds of proof: what is found stays found
        return _left_out(plan, f"FSDP over shard x tp: {first_line(error)}")


def _left_out(plan: Plan, line: str) -> Plan:
    """The plan with one more line on what was not searched."""
    return replace(plan, solver=replace(plan.solver, unsearched=(*(plan.solver.unsearched or ()), line)))


def _has_shards_and_tp(request: Request, options: Options) -> bool:
    """True where some mesh has several ranks on the shard and on the tp axis."""
    points, _ = points_of(request, tp=options.tp, fsdp=options.fsdp)
    return any(point.shard > 1 < point.tp for point in points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The optimum of one mesh: its ILP and the choice."""

    formulation: Formulation
    choice: Mapping[str, int]

    @property
    def peak_bytes(self) -> float:
        """Predicted peak memory of a rank in bytes, without slack."""
        return memory(Lifetimes(self.formulation.assignment(self.choice), self.formulation.priced.executor)).num_bytes


@rarely_collected()
def price_mesh(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    micro_batch: int,
    options: Options,
) -> Priced:
    """The price of the best plan on one mesh, unproven, whether it fits or not; `options` pins both degrees."""
    batch = Batch(global_batch, micro_batch, seq_len)
    unlimited = replace(options, memory_limit_bytes=float("inf"), all_gpus=True)
    request = Request.of(build_model, example_inputs, cluster, batch, unlimited, None)
    solver, points, _ = prepare(request, unlimited)
    candidate = solver.solve_point(points[-1])
    if candidate.solution.choice is None:
        raise SolverError(f"no plan on {points[-1].mesh} with micro-batch {micro_batch}: {candidate.solution.status}")
    return Priced(formulation=candidate.formulation, choice=candidate.solution.choice)


def prepare(
    request: Request, options: Options, reuse: Reuse | None = None
) -> tuple[PointSolver, list[Point], tuple[str, ...]]:
    """The solver of a request, its points, and lines on meshes that are left out."""
    points, unsearched = points_of(request, tp=options.tp, fsdp=options.fsdp)
    traces = TraceCache(request.subject, reuse or Reuse())
    points, too_small = _traceable(points, traces)
    return PointSolver(request=request, traces=traces), applicable(points, request, traces), (*unsearched, *too_small)


def _traceable(points: list[Point], traces: TraceCache) -> tuple[list[Point], tuple[str, ...]]:
    """The points without the smallest micro-batches at which the model's code fails, as statistics over one row do; and
    a line on these. Raises what the smallest one raises where it fails at all."""
    failed: ModelError | None = None
    for size in sorted({point.micro_batch for point in points}):
        try:
            traces.traced(size)
        except ModelError as error:
            failed = failed or error
            continue
        lines = (f"micro-batches below {size}: {first_line(failed)}",) if failed is not None else ()
        return [point for point in points if point.micro_batch >= size], lines
    assert failed is not None
    raise failed


@rarely_collected()
def price(
    plan: Plan | str | os.PathLike[str],
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    profile: str | os.PathLike[str] | HardwareProfile,
    gpus_per_node: int | None = None,
    loss: Loss | None = None,
) -> Plan:
    """The plan with its predictions for another machine; its choices stay.

    build_model, example_inputs and loss are those the plan was made with; gpus_per_node is by default the plan's, at
    most the profile's. Needs no solver: the bound is 0. Raises ModelError, ProfileError, PlanError for a plan that
    cannot be read, and PlanMismatchError where it does not fit the model.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    machine = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
    per_node = gpus_per_node or min(loaded.cluster.gpus_per_node, machine.gpus_per_node)
    subject = Subject.of_plan(loaded, build_model, example_inputs, loss, profile=machine)
    traces = TraceCache(subject, Reuse())
    traced = traces.traced(loaded.batch.micro_batch)
    assignment = traced.fitting(loaded)
    priced = price_assignment(assignment, machine, per_node, traces.reuse.executor)
    seconds = priced.predicted.step_time_s
    return replace(
        loaded,
        cluster=replace(
            loaded.cluster, gpus_per_node=per_node, profile=machine.name, profile_fingerprint=machine.fingerprint
        ),
        collectives=priced.collectives,
        predicted=priced.predicted,
        solver=SolverReport(
            name=PRICED, status=Status.FEASIBLE, objective_s=seconds, bound_s=0.0, gap=1.0, meshes_tried=1, skipped={}
        ),
        unruled_ops=priced.unruled_ops,
        tp_shares=counted_again(loaded.tp_shares, assignment, traces.reuse.executor, priced.op_seconds),
        opaque=loaded.opaque and _repriced(loaded, priced.opaque_seconds),
        notes=(*traced.notes, *notes_on_rows(traced, Parts.of(assignment)), *priced.notes) or None,
    )


def _repriced(plan: Plan, seconds: Mapping[str, float]) -> dict[str, OpaquePlan]:
    """The plan's modules that run whole, with other seconds by module."""
    return {
        key: replace(whole, seconds=max(seconds.get(module_name(name), 0.0) for name, _ in plan.expand(key)))
        for key, whole in (plan.opaque or {}).items()
    }

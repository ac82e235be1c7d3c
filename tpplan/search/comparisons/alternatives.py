"""Alternatives to a plan and their cost: plans of other kinds, another style for some modules, a better machine.

Each alternative is an exact solve of a problem that differs from the plan's in one thing: no duals, no estimates. The
model is traced once for all of them (tpplan.search.models.trace_cache).

The *kind* of a plan is its mesh, its micro-batch, what it recomputes and reshards, and the set of styles that its
matrices and norms have (tpplan.layouts.pins.Style). A plan whose styles include all of a cheaper plan of its mesh is no
kind of its own.
"""

import heapq
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpplan.core.errors import InfeasibleError, UsageError, VerificationError
from tpplan.core.graph import ModelGraph
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.core.layout import R_STAR
from tpplan.core.mesh import Mesh, meshes
from tpplan.core.units import GIB, format_bytes
from tpplan.layouts.build_space import NoLayoutError
from tpplan.layouts.pins import matrix_ops
from tpplan.layouts.readings import has_partial_gradient
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Compile, Plan, Recompute
from tpplan.plan.styles import Style
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse, Traced
from tpplan.search.planner import solve
from tpplan.search.points.options import Allows, Cluster

_DEFAULTS = inspect.signature(solve).parameters
#: factor by which a link is made faster for its shadow price
FASTER = 1.1
#: errors that say that a problem has no plan
NO_PLAN = (InfeasibleError, NoLayoutError, VerificationError)
#: errors that say that a problem has no plan once its options are changed, which may leave no mesh
NO_CHANGED_PLAN = (*NO_PLAN, UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Arguments of solve that alternatives change: the model, the cluster, and the options."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    cluster: Cluster
    options: Mapping[str, Any]
    reuse: Reuse

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        model: ModelSpec,
        profile: HardwareProfile,
        reuse: Reuse,
        *,
        pins: Mapping[str, str] | None = None,
    ) -> "Problem":
        """The problem that a plan answers, on a machine with this profile. `pins` override the plan's own. Raises
        UsageError like options_of."""
        own = {"loss": model.loss, "unused_outputs": model.unused_outputs}
        planned = plan.request.pins if plan.request is not None else {}
        return cls(
            build_model=model.build_model,
            example_inputs=model.example_inputs,
            cluster=Cluster(gpus=plan.cluster.gpus, gpus_per_node=plan.cluster.gpus_per_node, profile=profile),
            options={**options_of(plan), **own, "pins": {**planned, **(pins or {})}},
            reuse=reuse,
        )

    def traced(self, plan: Plan) -> Traced:
        """The trace that a plan of this problem was made from."""
        traces = self.reuse.traces.values()
        return next(one for one in traces if graph_fingerprint(one.graph) == plan.fingerprints.graph)

    def solve(self, **changes: Any) -> Plan:
        """The plan with some options changed. Raises the errors of solve."""
        cluster = changes.pop("cluster", self.cluster)
        options = {**self.options, **changes}
        return solve(self.build_model, self.example_inputs, cluster=cluster, reuse=self.reuse, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A change and its plan; where there is none, `problem` says why."""

    name: str
    plan: Plan | None
    problem: str = ""


def options_of(plan: Plan) -> dict[str, Any]:
    """The options of solve that a plan was made with, without those that solve decides by default.

    Raises UsageError where layers are recomputed in several ways and solve takes one for all.
    """
    modes = sorted(set(plan.recomputed_modules().values())) or [Recompute.NONE]
    options = {
        "global_batch": plan.batch.global_batch,
        "seq_len": plan.batch.seq_len,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "compile": plan.compile is Compile.BLOCKS,
        "memory_limit_bytes": plan.predicted.memory_limit_bytes,
        "expert_imbalance": plan.experts.imbalance if plan.experts is not None else 1.0,
    }
    decisions = {
        "micro_batch": plan.batch.micro_batch,
        "recompute": modes[0],
        "reshard_after_forward": plan.fsdp.reshard_after_forward,
        "fsdp_over_tp": bool(plan.fsdp.over_tp),
    }
    told = {name: value for name, value in decisions.items() if _DEFAULTS[name].default is not None}
    if len(modes) > 1 and "recompute" in told:
        raise UsageError(f"the plan recomputes in several ways, {', '.join(modes)}: solve takes one for all layers")
    return options | told


def why_not(problem: Problem, plan: Plan, pattern: str, style: str) -> Alternative:
    """The best plan on the plan's mesh in which the modules of a name have a style; all else is decided again."""
    pins = {**problem.options.get("pins", {}), pattern: style}
    degrees, cluster = plan.mesh_degrees, replace(problem.cluster, gpus=plan.mesh.num_gpus)
    mesh = {"tp": degrees.tp, "fsdp": degrees.shard, "ep": plan.mesh.ep, "cluster": cluster, "all_gpus": True}
    try:
        return Alternative(name=style, plan=problem.solve(pins=pins, **mesh))
    except NO_PLAN as error:
        return Alternative(name=style, plan=None, problem=str(error))


def shadow_prices(problem: Problem) -> Iterator[Alternative]:
    """Yields the plan as it is, then plans with more memory, faster links, one more GPU or node, and twice the GPUs.

    Added GPUs stay idle where they would make the step slower, as when the batch does not divide well among them.
    """
    cluster = problem.cluster
    profile = cluster.load_profile()
    limit = problem.options.get("memory_limit_bytes")
    limit = profile.memory_bytes if limit is None else limit
    changes: list[tuple[str, dict[str, Any]]] = [
        ("as it is", {}),
        (f"1 GiB more memory per GPU ({format_bytes(limit + GIB)})", {"memory_limit_bytes": limit + GIB}),
    ]
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    if min(cluster.gpus, cluster.gpus_per_node) > 1:
        faster = replace(cluster, profile=with_links(profile, FASTER, across_nodes=False))
        changes.append(("links inside a node 10 % faster", {"cluster": faster}))
    if nodes > 1:
        faster = replace(cluster, profile=with_links(profile, FASTER, across_nodes=True))
        changes.append(("links across nodes 10 % faster", {"cluster": faster}))
        more = replace(cluster, gpus=cluster.gpus + cluster.gpus_per_node)
        changes.append((f"one more node ({more.gpus} GPUs)", {"cluster": more}))
    else:
        more = Cluster(
            gpus=cluster.gpus + 1,
            gpus_per_node=min(cluster.gpus + 1, profile.gpus_per_node),
            profile=cluster.profile,
        )
        changes.append((f"one more GPU ({more.gpus})", {"cluster": more}))
    twice = replace(cluster, gpus=2 * cluster.gpus)
    changes.append((f"twice the GPUs ({twice.gpus})", {"cluster": twice}))
    base: Plan | None = None
    for name, change in changes:
        own, why = None, ""
        try:
            own = problem.solve(prove=False, **change)
        except NO_CHANGED_PLAN as error:
            why = str(error)
        base = own if not change else base
        has_more = "cluster" in change and change["cluster"].gpus > cluster.gpus
        if has_more and base is not None and (own is None or own.predicted.step_time_s > base.predicted.step_time_s):
            own = base
        yield Alternative(name=name, plan=own, problem=why if own is None else "")


def with_links(profile: HardwareProfile, factor: float, *, across_nodes: bool) -> HardwareProfile:
    """The profile with links of `factor` times the bandwidth inside or across nodes: T' = L + (T - L) / factor, with
    the latency L."""

    def scaled(seconds: float, latency: float) -> float:
        return latency + (seconds - latency) / factor

    tables = tuple(
        replace(table, time_s=tuple(scaled(t, min(table.latency_s, t)) for t in table.time_s))
        if (table.group.nodes > 1) == across_nodes
        else table
        for table in profile.collectives
    )
    return replace(profile, collectives=tables)


# Kinds


@dataclass(frozen=True, slots=True)
class Without:
    """Forbids some styles everywhere, as solve's option `allows`."""

    styles: frozenset[Style]

    def __call__(self, graph: ModelGraph) -> Allows:
        matrices = matrix_ops(graph)

        def allows(decision: str, strategy: Strategy) -> bool:
            matrix = matrices.get(decision)
            if matrix is not None:
                return matrix.style(strategy) not in self.styles
            is_reading = "<-" in decision and len(strategy.operands) == 1
            return not (is_reading and Style.SLICES in self.styles and has_partial_gradient(strategy))

        return allows


def styles_of(graph: ModelGraph, plan: Plan) -> frozenset[Style]:
    """The styles of a plan's matrices, and SLICES where a whole weight is used on slices."""
    implied = implied_strategies(graph, plan)
    assert not isinstance(implied, Mistyped), implied
    found = {matrix.style(implied[name]) for name, matrix in matrix_ops(graph).items()}
    if any(R_STAR in parameter.reads.values() for parameter in plan.parameters.values()):
        found.add(Style.SLICES)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKind:
    """A plan and the set of its styles."""

    plan: Plan
    styles: frozenset[Style]

    @property
    def key(self) -> Hashable:
        """A key that is equal for plans of one kind."""
        plan = self.plan
        modes = tuple(sorted(plan.recompute.items()))
        return plan.mesh_degrees, plan.batch.micro_batch, modes, plan.fsdp, self.styles


def top(problem: Problem, count: int, *, prove: bool = True) -> list[PlanKind]:
    """The `count` fastest plans of different kinds, best first; fewer where there are no more.

    Solves each mesh, and then, from the best plan on, its mesh without each of the plan's styles in turn: the best plan
    of a kind is the best without the styles that it lacks, and forbidding a style never makes a plan faster. With
    `prove` the returned plans are proven, which may make one slower where a cut was needed.
    """
    waiting: list[tuple[float, int, Mesh, frozenset[Style], PlanKind]] = []
    numbers = itertools.count()
    seen: set[Hashable] = set()

    def push(mesh: Mesh, without: frozenset[Style]) -> None:
        if (mesh, without) in seen:
            return
        seen.add((mesh, without))
        kind = _solved(problem, mesh, without, prove=False)
        if kind is not None:
            heapq.heappush(waiting, (kind.plan.predicted.step_time_s, next(numbers), mesh, without, kind))

    cluster, pinned = problem.cluster, {"tp": problem.options.get("tp"), "fsdp": problem.options.get("fsdp")}
    across = not cluster.load_profile().unmeasured_across_nodes
    for mesh in meshes(cluster.gpus, cluster.gpus_per_node, **pinned, across_nodes=across):
        push(mesh, frozenset())
    found: dict[Hashable, PlanKind] = {}
    while waiting and len(found) < count:
        _, _, mesh, without, kind = heapq.heappop(waiting)
        if kind.key not in found:
            proven = _solved(problem, mesh, without, prove=True) if prove else kind
            if proven is not None:
                found[kind.key] = proven
        for style in sorted(kind.styles) if mesh.tp > 1 else ():
            push(mesh, without | {style})
    return sorted(found.values(), key=lambda kind: kind.plan.predicted.step_time_s)


def _solved(problem: Problem, mesh: Mesh, without: frozenset[Style], *, prove: bool) -> PlanKind | None:
    """The best plan on a mesh without some styles; None where there is none."""
    allows: Callable[[ModelGraph], Allows] | None = Without(without) if without else None
    try:
        plan = problem.solve(tp=mesh.tp, fsdp=mesh.shard, all_gpus=True, allows=allows, prove=prove)
    except NO_CHANGED_PLAN:
        return None
    return PlanKind(plan=plan, styles=styles_of(problem.traced(plan).graph, plan))

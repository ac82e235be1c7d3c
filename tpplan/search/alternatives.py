"""What else could be done, and what it would cost: plans of other kinds, a style instead, a machine that is better.

Everything here is an exact solve of a problem that differs from the plan's in one thing: no duals, no estimates. The
model is traced once for all of them (tpplan.search.points.trace_cache).

The *kind* of a plan is its mesh, its micro-batch, what it recomputes and reshards, and which styles its matrices and
norms have at all (tpplan.layouts.pins.Style). A plan that has the styles of a cheaper one of its mesh and others
besides is not counted as a kind of its own.
"""

import heapq
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpplan.core.errors import InfeasibleError, ModelError, UsageError, VerificationError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import R_STAR
from tpplan.core.mesh import Mesh, meshes
from tpplan.core.units import GIB, format_bytes
from tpplan.layouts.decision_space import NoLayoutError, has_partial_gradient
from tpplan.layouts.pins import matrix_ops
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Compile, Plan, Recompute
from tpplan.plan.styles import Style
from tpplan.search.planner import solve
from tpplan.search.points.options import Allows, BuildModel, Cluster, ExampleInputs
from tpplan.search.points.trace_cache import Reuse

_DEFAULTS = inspect.signature(solve).parameters
#: how much faster a link is made for its shadow price
FASTER = 1.1
#: what a problem may turn out to have no solution by
_NONE = (InfeasibleError, UsageError, NoLayoutError, VerificationError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is solved again and again with changes: the model, the cluster, and solve's options."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    cluster: Cluster
    options: Mapping[str, Any]
    reuse: Reuse

    def solve(self, **changes: Any) -> Plan:
        """The optimum with some options changed. Raises as solve does."""
        cluster = changes.pop("cluster", self.cluster)
        options = {**self.options, **changes}
        return solve(self.build_model, self.example_inputs, cluster=cluster, reuse=self.reuse, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A change and its plan; where there is none, why."""

    name: str
    plan: Plan | None
    problem: str = ""


def options_of(plan: Plan) -> dict[str, Any]:
    """The options of solve with which a plan was made, but for what was pinned: what solve chooses by itself, where it
    is not told, is left to it.

    Raises UsageError where layers are recomputed in several ways and solve has one for all.
    """
    modes = sorted(set(plan.recomputed_modules().values())) or [Recompute.NONE]
    options = {
        "global_batch": plan.batch.global_batch,
        "seq_len": plan.batch.seq_len,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "compile": plan.compile is Compile.BLOCKS,
        "memory_limit_bytes": plan.predicted.memory_limit_bytes,
    }
    decisions = {
        "micro_batch": plan.batch.micro_batch,
        "recompute": modes[0],
        "reshard_after_forward": plan.fsdp.reshard_after_forward,
    }
    told = {name: value for name, value in decisions.items() if _DEFAULTS[name].default is not None}
    if len(modes) > 1 and "recompute" in told:
        raise UsageError(f"the plan recomputes in several ways, {', '.join(modes)}: solve has one for all layers")
    return options | told


def why_not(problem: Problem, plan: Plan, pattern: str, style: str) -> Alternative:
    """The best plan of the same mesh in which the modules of that name have the style; all else is chosen anew."""
    pins = {**problem.options.get("pins", {}), pattern: style}
    degrees, cluster = plan.mesh_degrees, replace(problem.cluster, gpus=plan.mesh.num_gpus)
    mesh = {"tp": degrees.tp, "fsdp": degrees.shard, "cluster": cluster, "all_gpus": True}
    try:
        return Alternative(name=style, plan=problem.solve(pins=pins, **mesh))
    except (InfeasibleError, NoLayoutError, VerificationError) as error:
        return Alternative(name=style, plan=None, problem=str(error))


def shadow_prices(problem: Problem) -> Iterator[Alternative]:
    """The plan as it is, then those with one thing more each: memory, a link, a GPU or a node, all GPUs again.

    GPUs that would make the step slower, as those do among which the batch does not divide well, stay idle.
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
        faster = replace(cluster, profile=_with_links(profile, across_nodes=False))
        changes.append(("links inside a node 10 % faster", {"cluster": faster}))
    if nodes > 1:
        faster = replace(cluster, profile=_with_links(profile, across_nodes=True))
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
        except _NONE as error:
            why = str(error)
        base = own if not change else base
        has_more = "cluster" in change and change["cluster"].gpus > cluster.gpus
        if has_more and base is not None and (own is None or own.predicted.step_time_s > base.predicted.step_time_s):
            own = base
        yield Alternative(name=name, plan=own, problem=why if own is None else "")


def _with_links(profile: HardwareProfile, *, across_nodes: bool) -> HardwareProfile:
    """The profile with links of one sort faster: T' = L + (T - L) / 1.1, L the latency, which stays."""

    def faster(seconds: float, latency: float) -> float:
        return latency + (seconds - latency) / FASTER

    tables = tuple(
        replace(table, time_s=tuple(faster(t, min(table.latency_s, t)) for t in table.time_s))
        if (table.group.nodes > 1) == across_nodes
        else table
        for table in profile.collectives
    )
    return replace(profile, collectives=tables)


# Kinds


@dataclass(frozen=True, slots=True)
class Without:
    """Forbids styles everywhere: what solve takes as `allows`."""

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
    """The styles that a plan has: those of its matrices, and slices where any weight meets them."""
    implied = implied_strategies(graph, plan)
    assert not isinstance(implied, Mistyped), implied
    found = {matrix.style(implied[name]) for name, matrix in matrix_ops(graph).items()}
    if any(R_STAR in parameter.reads.values() for parameter in plan.parameters.values()):
        found.add(Style.SLICES)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKind:
    """A plan and the styles it has at all."""

    plan: Plan
    styles: frozenset[Style]

    @property
    def key(self) -> Hashable:
        """What two plans of one kind have in common."""
        plan = self.plan
        modes = tuple(sorted(plan.recompute.items()))
        return plan.mesh_degrees, plan.batch.micro_batch, modes, plan.fsdp, self.styles


def top(problem: Problem, count: int, *, prove: bool = True) -> list[PlanKind]:
    """The `count` plans of different kinds that take least, best first; fewer where there are no more.

    Each mesh is solved, and from the best plan on those without one of its styles in turn: every kind's best plan is
    the best without the styles it has not, and none of these costs less than what it is reached from. With `prove`
    those that are returned are proven, which may make one dearer where a cut was needed.
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
    """The best of a mesh without some styles; None where there is none."""
    allows: Callable[[ModelGraph], Allows] | None = Without(without) if without else None
    try:
        plan = problem.solve(tp=mesh.tp, fsdp=mesh.shard, all_gpus=True, allows=allows, prove=prove)
    except (*_NONE, ModelError) as error:
        if isinstance(error, ModelError) and not isinstance(error, NoLayoutError):
            raise
        return None
    graph = next(
        trace.graph for trace in problem.reuse.traces.values() if trace.graph.fingerprint == plan.fingerprints.graph
    )
    return PlanKind(plan=plan, styles=styles_of(graph, plan))


# Differences


def time_differences(plan: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part of the step, seconds in the plan, seconds in the other), the largest difference first."""
    return _differences(plan.predicted.time_s, other.predicted.time_s)


def memory_differences(plan: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part of the peak, bytes in the plan, bytes in the other), the largest difference first."""
    return _differences(plan.predicted.memory_bytes, other.predicted.memory_bytes)


def _differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[tuple[str, float, float]]:
    rows = [(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in {**ours, **theirs}]
    return sorted((row for row in rows if row[1] or row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0]))

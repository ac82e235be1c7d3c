"""The ILPs of points: priced, bounded and solved, each no further than its caller needs to know.

A point is a mesh and a micro-batch. Decisions and their costs depend on the micro-batch and the tp degree alone, and
are shared by the points that have both.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from tpplan import solvers
from tpplan.core.errors import SolverError
from tpplan.costs.best_rates import BestRates, seconds_of_a_sequence
from tpplan.costs.step.cost_table import PricedSpace, price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.decision_space import build_space
from tpplan.layouts.layer_treatments import Treatment
from tpplan.layouts.pins import Pinned
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Recompute
from tpplan.search.points.cuts import Cuts
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.request import Request
from tpplan.search.points.trace_cache import TraceCache, hashable
from tpplan.solvers.bounded_sums import LIMIT_TOLERANCE
from tpplan.solvers.problem import Problem, Solution, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point with its formulation and its solution."""

    point: Point
    formulation: Formulation
    solution: Solution


@dataclass(frozen=True, kw_only=True)
class PointSolver:
    """The points of a request, under the cuts that were found so far. What was priced is kept."""

    request: Request
    traces: TraceCache
    cuts: Cuts = field(default_factory=Cuts)
    _spaces: dict[tuple[int, int], PricedSpace] = field(default_factory=dict)
    _floors: dict[tuple[int, int], float] = field(default_factory=dict)

    def changed(self, request: Request) -> "PointSolver":
        """The points of another request for the same model, under the same cuts."""
        return replace(self, request=request, _spaces={}, _floors={})

    def without_guesses(self) -> "PointSolver":
        """The same points under the cuts that are sound."""
        return replace(self, cuts=self.cuts.without_guesses(), _spaces={}, _floors={})

    def forget(self, degrees: set[int] | None = None) -> None:
        """Prices anew what is asked for next, on some tp degrees or on all: cuts or graphs have changed. Bounds without
        a cut hold with it."""
        if degrees is None:
            self._floors.clear()
        for key in [key for key in self._spaces if degrees is None or key[1] in degrees]:
            del self._spaces[key]

    def run_whole(self, module: str, reason: str) -> None:
        """From now on a module runs whole: all is traced and priced anew, and nothing is forbidden."""
        self.traces.run_whole(module, reason)
        self.cuts.forget()
        self.cuts.messages.append(reason)
        self.forget()

    def distrust_grown(self) -> None:
        """From now on every micro-batch is traced."""
        self.traces.distrust_grown()
        self.forget()

    def pinned(self, micro_batch: int) -> Pinned:
        """What the pins hold. Raises UsageError for a pin that holds nothing of the model."""
        return Pinned(graph=self.traces.traced(micro_batch).graph, pins=self.request.pins)

    def priced(self, micro_batch: int, tp: int) -> PricedSpace:
        """Decisions and their costs for a micro-batch on tp ranks, under the cuts so far."""
        key = micro_batch, tp
        if key not in self._spaces:
            shared = self._space_key(micro_batch, tp)
            self._spaces[key] = self.traces.reuse.space(shared, lambda: self._price(micro_batch, tp))
        return self._spaces[key]

    def _space_key(self, micro_batch: int, tp: int) -> Hashable:
        """What decisions and their costs depend on."""
        machine = self.request.profile, self.request.cluster.gpus_per_node, self.request.cluster.gpus
        ways = self.request.is_compiled, self.request.unused_outputs, hashable(self.request.wishes), self.request.pins
        return self.traces.key(micro_batch), tp, machine, ways, self.cuts.of_degree(tp)

    def _price(self, micro_batch: int, tp: int) -> PricedSpace:
        space = build_space(
            self.traces.traced(micro_batch).graph,
            tp,
            unused_outputs=self.request.unused_outputs,
            cut=self.is_cut(micro_batch, tp),
            apart=self.pinned(micro_batch).pins_within,
        )
        return price_space(
            space,
            self.request.profile,
            self.request.cluster.gpus_per_node,
            self.traces.reuse.executor,
            is_compiled=self.request.is_compiled,
            num_gpus=self.request.cluster.gpus,
            others=[other for (_, degree), other in reversed(self._spaces.items()) if degree == tp],
        )

    def is_cut(self, micro_batch: int, tp: int) -> Callable[[str, Strategy], bool]:
        """Says of decisions on tp ranks which strategies they may not choose."""
        graph, pinned = self.traces.traced(micro_batch).graph, self.pinned(micro_batch)
        allows = self.request.wishes(graph) if self.request.wishes is not None else lambda name, strategy: True

        def is_cut(name: str, strategy: Strategy) -> bool:
            return self.cuts.forbids(tp, name, strategy) or not (allows(name, strategy) and pinned(name, strategy))

        return is_cut

    def pace(self, sizes: Sequence[int]) -> float:
        """GPU seconds of a step below which no plan comes, whatever its mesh and its micro-batch, from the traces of
        the two smallest micro-batches; 0 where there are none yet."""
        both = self.traces.first(sizes)
        if not both or any(traced.opaques.by_key() for traced in both):
            return 0.0
        first, second = both
        request, reuse = self.request, self.traces.reuse
        rates = BestRates(request.profile, request.is_compiled)
        key = first.graph.fingerprint, second.graph.fingerprint, request.profile.fingerprint, request.is_compiled
        own = sizes[0], sizes[1]
        return request.batch.global_batch * reuse.pace(
            key, lambda: seconds_of_a_sequence(first.graph, second.graph, own, rates, reuse.executor)
        )

    def formulate(self, point: Point, *, limit: float | None = None, treatment: Treatment | None = None) -> Formulation:
        """The problem of one point; with `treatment`, every layer gets that."""
        mesh, units = point.mesh, self.traces.traced(point.micro_batch).units
        priced = self.priced(point.micro_batch, mesh.tp)
        return Formulation(
            priced=priced,
            conflicts=self.cuts.conflicts_in(priced.space),
            mesh=mesh,
            setting=Setting(
                profile=self.request.profile,
                gpus_per_node=self.request.cluster.gpus_per_node,
                precision=self.request.precision,
                optimizer=self.request.optimizer,
                memory_limit_bytes=self.request.limit if limit is None else limit,
                slack_bytes=self.request.profile.slack_bytes,
                accumulation_steps=self.request.batch.accumulation_steps(mesh, point.micro_batch),
                units=units,
                recompute=self.request.recompute,
                reshard_after_forward=self.request.reshard_after_forward,
                treatments=dict.fromkeys(units, treatment) if treatment is not None else None,
            ),
        )

    def floor(self, point: Point) -> float:
        """Seconds below which no plan of the point comes: its micro-batches' least compute and tp collectives, FSDP and
        the optimizer left out, no layer recomputed, and no limit kept."""
        key = point.micro_batch, point.tp
        if key not in self._floors:
            formulation = self.formulate(replace(point, num_gpus=point.tp, shard=1))
            try:
                self._floors[key] = self.solver_of(formulation.alone).bound or 0.0
            except SolverError:
                if self.request.time_limit_s is None:
                    raise
                self._floors[key] = 0.0  # out of time: no time is below it
        return self._floors[key] * self.request.batch.accumulation_steps(point.mesh, point.micro_batch)

    @property
    def lightest(self) -> Treatment:
        """Of the treatments that may be given, the one that takes no more time than any other, whatever the layouts:
        recomputing adds compute, and more than it can hide; gathering again adds a collective and copies."""
        reshard = self.request.reshard_after_forward
        return Treatment(
            recompute=self.request.recompute or Recompute.NONE, reshard=False if reshard is None else reshard
        )

    def solver_of(self, problem: Problem, *, cutoff: float = math.inf, is_relaxed: bool = False) -> Solution:
        """The optimum of a problem, by the solver and in the time asked for."""
        return solvers.solve(
            problem,
            solver=self.request.solver,
            time_limit_s=self.request.time_limit_s,
            cutoff=cutoff,
            is_relaxed=is_relaxed,
        )

    def light(self, point: Point, *, cutoff: float = math.inf) -> Candidate | float:
        """The optimum of a point with the lightest treatment for every layer where that fits, which then nothing is
        faster than; else a bound: what it takes without a limit. Above the cutoff the bound is enough."""
        formulation = self.formulate(point, treatment=self.lightest)
        found = self.solver_of(formulation.unlimited, cutoff=cutoff)
        if found.bound is not None and found.bound > cutoff:
            return found.bound
        is_fitting = found.choice is not None and formulation.fits(found.choice, tolerance=LIMIT_TOLERANCE)
        if is_fitting or found.bound is None:
            return Candidate(point=point, formulation=formulation, solution=found)
        return found.bound

    def full(self, point: Point, *, cutoff: float = math.inf, is_relaxed: bool = False) -> Candidate | float:
        """The optimum of a point, or a bound on it: one that exceeds the cutoff, or that of a relaxation."""
        formulation = self.formulate(point)
        found = self.solver_of(formulation.problem, cutoff=cutoff, is_relaxed=is_relaxed)
        if found.status is Status.BOUNDED:
            assert found.bound is not None
            return found.bound
        return Candidate(point=point, formulation=formulation, solution=found)

    def solve_point(self, point: Point) -> Candidate:
        """The optimum of one point."""
        found = self.light(point)
        found = found if isinstance(found, Candidate) else self.full(point)
        assert isinstance(found, Candidate), "without a cutoff nothing is bounded away"
        return found

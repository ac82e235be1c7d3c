"""Prices, bounds and solves the ILPs of points, each no further than its caller needs.

A point is a mesh and a micro-batch. Points with the same micro-batch and tp degree share decisions and their costs.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

from tpplan import solvers
from tpplan.core.errors import SolverError
from tpplan.core.graph import Op
from tpplan.costs.runs.execute import whole_strategy
from tpplan.costs.step.cost_table import PricedSpace, price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.costs.strategy_times import Rates
from tpplan.layouts.build_space import build_space
from tpplan.layouts.layer_treatments import Treatment
from tpplan.layouts.pins import Pinned
from tpplan.layouts.plan_entries import crossing_layouts
from tpplan.layouts.rules import Call, Strategy
from tpplan.plan.plan import Recompute
from tpplan.search.models.subject import hashable
from tpplan.search.models.trace_cache import TraceCache
from tpplan.search.points.best_rates import BestRates, seconds_of_a_sequence
from tpplan.search.points.common_bound import common_problem, shape_of
from tpplan.search.points.cuts import Cuts
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.request import Request
from tpplan.solvers.presolve import is_solvable
from tpplan.solvers.problem import CUTOFF_TOLERANCE, LIMIT_TOLERANCE, Problem, Solution, Status
from tpplan.stages.whole_stubs import ops_in_stubs, results_read_in_stubs

#: points that are worth a relaxation that bounds them together, which takes longer than that of one
FEWEST_TOGETHER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point with its ILP and the solution."""

    point: Point
    formulation: Formulation
    solution: Solution


@dataclass(frozen=True, kw_only=True)
class PointSolver:
    """The points of a request under the cuts found so far; keeps the spaces that it has priced."""

    request: Request
    traces: TraceCache
    cuts: Cuts = field(default_factory=Cuts)
    _spaces: dict[tuple[int, int], PricedSpace] = field(default_factory=dict)
    _floors: dict[tuple[int, int], float] = field(default_factory=dict)
    #: bytes that a point's ILP must leave free, where its memory rows were below the peak of a plan
    _left_free: dict[Point, float] = field(default_factory=dict)
    #: ILPs of points that were looked at together, until each is looked at alone
    _formulations: dict[Point, Formulation] = field(default_factory=dict)

    def changed(self, request: Request) -> "PointSolver":
        """The solver of another request for the same model, under the same cuts."""
        return replace(self, request=request, _spaces={}, _floors={}, _left_free={}, _formulations={})

    def without_guesses(self) -> "PointSolver":
        """The solver of the same request under the cuts without guesses."""
        return replace(self, cuts=self.cuts.without_guesses(), _spaces={}, _floors={}, _left_free={}, _formulations={})

    def forget(self, degrees: set[int] | None = None) -> None:
        """Forgets prices of some tp degrees, for their cuts have changed; by default all prices and bounds, for graphs
        have. A bound stays one under more cuts."""
        self._formulations.clear()
        if degrees is None:
            self._floors.clear()
            self._left_free.clear()
        for key in [key for key in self._spaces if degrees is None or key[1] in degrees]:
            del self._spaces[key]

    def lower_limit(self, point: Point, num_bytes: float) -> None:
        """Lowers the memory limit of a point's ILP by some bytes more, each time at least twice as far."""
        self._formulations.pop(point, None)
        self._left_free[point] = 2 * self._left_free.get(point, 0.0) + num_bytes

    def run_whole(self, module: str, reason: str) -> None:
        """Makes a module run whole from now on; forgets all traces, prices and cuts."""
        self.traces.run_whole(module, reason)
        self.cuts.forget()
        self.cuts.messages.append(reason)
        self.forget()

    def has_grown_right(self, candidate: Candidate) -> bool:
        """True where a candidate's graph, and the executions of its choice, are those of the model that is really
        traced and of its ops that are really run."""
        formulation, choice = candidate.formulation, candidate.solution.choice
        grown, traced = formulation.space.graph, self.traces.really_traced(candidate.point.micro_batch).graph
        if grown is traced or choice is None:
            return True
        if grown != traced:
            return False
        execute = self.traces.reuse.executor.execute
        for name in formulation.space.members:
            if isinstance(op := formulation.space.deciders[name], Op):
                assumed, real = Call.of(grown, op), Call.of(traced, op)
                ways = ((formulation.strategy(choice, name), candidate.point.tp), (whole_strategy(real), 1))
                if any(execute(assumed, *way) != execute(real, *way) for way in ways):
                    return False
        return True

    def distrust_grown(self) -> None:
        """Traces every micro-batch from now on, instead of growing its graph and executions."""
        self.traces.distrust_grown()
        self.forget()

    def pinned(self, micro_batch: int) -> Pinned:
        """The pins at their decisions. Raises UsageError for a pin that matches nothing of the model."""
        graph, request = self.traces.traced(micro_batch).graph, self.request
        return Pinned(graph=graph, pins=request.pins, is_stage=request.stage is not None)

    def priced(self, micro_batch: int, tp: int) -> PricedSpace:
        """Decisions and their costs for a micro-batch on tp ranks, under the cuts so far."""
        key = micro_batch, tp
        if key not in self._spaces:
            shared = self._space_key(micro_batch, tp)
            self._spaces[key] = self.traces.reuse.space(shared, lambda: self._price(micro_batch, tp))
        return self._spaces[key]

    @cached_property
    def _fingerprint(self) -> str:
        return self.request.profile.fingerprint

    @cached_property
    def _rates(self) -> Rates:
        return self.traces.reuse.rates_of(self.request.profile)

    def _space_key(self, micro_batch: int, tp: int) -> Hashable:
        """Everything that decisions and their costs depend on."""
        request = self.request
        machine = request.profile, request.cluster.gpus_per_node, request.cluster.gpus
        stage = request.stage
        crossing = tuple(one.sliced for one in (*stage.receives, *stage.sends)) if stage is not None else ()
        ways = request.is_compiled, request.unused_outputs, hashable(request.wishes), request.pins, crossing
        return self.traces.key(micro_batch), tp, machine, ways, self.cuts.of_degree(tp)

    def _price(self, micro_batch: int, tp: int) -> PricedSpace:
        request = self.request
        space = build_space(
            self.traces.traced(micro_batch).graph,
            tp,
            unused_outputs=request.unused_outputs,
            cut=self.is_cut(micro_batch, tp),
            apart=self.pinned(micro_batch).pins_within,
            crossing=crossing_layouts(self.traces.traced(micro_batch).graph, request.stage),
        )
        return price_space(
            space,
            request.profile,
            request.cluster.gpus_per_node,
            self.traces.reuse.executor,
            is_compiled=request.is_compiled,
            num_gpus=request.cluster.gpus,
            rates=self._rates,
            others=[self._spaces[key] for key in sorted(self._spaces, key=lambda key: (key[1] != tp, -key[0]))],
        )

    def is_cut(self, micro_batch: int, tp: int) -> Callable[[str, Strategy], bool]:
        """A function that says of a decision on tp ranks whether it may not choose a strategy."""
        graph, pinned = self.traces.traced(micro_batch).graph, self.pinned(micro_batch)
        allows = self.request.wishes(graph) if self.request.wishes is not None else lambda name, strategy: True
        stage = self.request.subject.stage
        stubs = ops_in_stubs(graph, stage) if stage is not None else frozenset[str]()
        handed = results_read_in_stubs(graph)

        def is_sliced_there(name: str, strategy: Strategy) -> bool:
            layouts = [strategy.results[place] for place in handed.get(name, ())]
            if name in stubs:
                layouts += (*strategy.operands, *strategy.results)
            return not all(layout.is_whole for layout in layouts)

        def is_cut(name: str, strategy: Strategy) -> bool:
            if is_sliced_there(name, strategy):
                return True
            return self.cuts.forbids(tp, name, strategy) or not (allows(name, strategy) and pinned(name, strategy))

        return is_cut

    def pace(self, sizes: Sequence[int]) -> float:
        """A lower bound on the GPU seconds of a step of any plan, whatever its mesh and micro-batch, from the traces at
        the two smallest micro-batches; 0 where there are none yet."""
        both = self.traces.first(sizes)
        if not both or any(traced.opaques.by_key() for traced in both):
            return 0.0
        first, second = both
        request, reuse = self.request, self.traces.reuse
        rates = BestRates(request.profile, request.is_compiled)
        own = sizes[0], sizes[1]
        key = *map(self.traces.key, own), self._fingerprint, request.is_compiled
        return request.batch.global_batch * reuse.pace(
            key, lambda: seconds_of_a_sequence(first.graph, second.graph, own, rates, reuse.executor)
        )

    def formulate(self, point: Point, *, limit: float | None = None, treatment: Treatment | None = None) -> Formulation:
        """The ILP of one point; with `treatment`, every layer gets it."""
        mesh, units = point.mesh, self.traces.traced(point.micro_batch).units
        priced, request = self.priced(point.micro_batch, mesh.tp), self.request
        stage = request.stage
        return Formulation(
            priced=priced,
            conflicts=self.cuts.conflicts_in(priced.space),
            mesh=mesh,
            setting=Setting(
                profile=request.profile,
                gpus_per_node=request.cluster.gpus_per_node,
                precision=request.precision,
                optimizer=request.optimizer,
                memory_limit_bytes=request.limit - self._left_free.get(point, 0.0) if limit is None else limit,
                slack_bytes=request.profile.slack_bytes,
                accumulation_steps=request.batch.accumulation_steps(mesh, point.micro_batch),
                units=units,
                in_flight=stage.in_flight if stage is not None else 1,
                beside_bytes=(stage.beside_bytes if stage is not None else 0.0)
                + request.sharded_beside_bytes / mesh.shard,
                like_stages=request.like_stages,
                recompute=request.recompute,
                reshard_after_forward=request.reshard_after_forward,
                fsdp_over_tp=request.fsdp_over_tp,
                whole_gradients=request.whole_gradients,
                gathered_once=request.gathered_once,
                treatments=dict.fromkeys(units, treatment) if treatment is not None else None,
            ),
        )

    def floor(self, point: Point) -> float:
        """A lower bound on the step time of the point's plans in seconds: the least compute and tp collectives of its
        micro-batches, without FSDP, optimizer, recomputation and memory limit."""
        key = point.micro_batch, point.tp
        if key not in self._floors:
            try:
                self._floors[key] = self.solver_of(self.on_fewest(point).alone).bound or 0.0
            except SolverError:
                if self.request.time_limit_s is None:
                    raise
                self._floors[key] = 0.0  # out of time: no step takes less
        return self._floors[key] * self.request.batch.accumulation_steps(point.mesh, point.micro_batch)

    def on_fewest(self, point: Point) -> Formulation:
        """The ILP of a point's decisions on as few GPUs as have its tp degree and ranks that divide experts."""
        return self.formulate(replace(point, num_gpus=point.tp * point.ep, shard=point.ep))

    def has_floor(self, point: Point) -> bool:
        """True where the floor of points with the same decisions was computed before."""
        return (point.micro_batch, point.tp) in self._floors

    @property
    def lightest(self) -> Treatment:
        """The possible treatment that is slower than no other, whatever the layouts: recomputing adds more compute than
        it can hide, and gathering again adds a collective and copies."""
        reshard = self.request.reshard_after_forward
        return Treatment(
            recompute=self.request.recompute or Recompute.NONE, reshard=False if reshard is None else reshard
        )

    def solver_of(self, problem: Problem, *, cutoff: float = math.inf, is_relaxed: bool = False) -> Solution:
        """The optimum of a problem, by the requested solver and within the requested time."""
        return solvers.solve(
            problem,
            solver=self.request.solver,
            time_limit_s=self.request.time_limit_s,
            cutoff=cutoff,
            is_relaxed=is_relaxed,
        )

    def least(self, point: Point) -> Candidate | float:
        """A lower bound on the step time of the point's plans in seconds, with the least of each term beside kernels
        and tp collectives; a candidate without a plan where parameters alone are too large."""
        formulation = self.formulate(point, treatment=self.lightest)
        if formulation.is_too_large:
            solution = Solution(status=Status.INFEASIBLE, solver=self.request.solver or "")
            return Candidate(point=point, formulation=formulation, solution=solution)
        return self.floor(point) + formulation.beside_s

    def light(self, point: Point, *, cutoff: float = math.inf) -> Candidate | float:
        """The optimum of a point with the lightest treatment for every layer, which is the point's where it fits; else
        a bound: the optimum without a memory limit. A bound above the cutoff ends the solve."""
        formulation = self.formulate(point, treatment=self.lightest)
        least = self.floor(point) + formulation.beside_s
        if least > cutoff + CUTOFF_TOLERANCE * abs(cutoff):
            return least
        found = self.solver_of(formulation.unlimited, cutoff=cutoff)
        if found.bound is not None and found.bound > cutoff:
            return found.bound
        is_fitting = found.choice is not None and formulation.fits(found.choice, tolerance=LIMIT_TOLERANCE)
        if is_fitting or found.bound is None:
            return Candidate(point=point, formulation=formulation, solution=found)
        return found.bound

    def relaxed(self, point: Point, *, cutoff: float = math.inf, is_at_the_loss: bool = True) -> Candidate | float:
        """A lower bound on the optimum of a point, that of the linear relaxation with one memory row, or with all where
        not `is_at_the_loss`; the optimum where the relaxation's is a choice that fits. A bound above the cutoff ends
        the solve."""
        formulation = self._formulations.pop(point, None) or self.formulate(point)
        problem = formulation.limited_at_the_loss if is_at_the_loss else formulation.problem
        found = self.solver_of(problem, cutoff=cutoff, is_relaxed=True)
        is_bound = found.status is Status.BOUNDED
        if not is_bound and found.choice is not None:
            is_bound = not formulation.fits(found.choice, tolerance=LIMIT_TOLERANCE)
        if is_bound:
            assert found.bound is not None
            return found.bound
        return Candidate(point=point, formulation=formulation, solution=found)

    def relaxed_together(self, points: Sequence[Point], *, cutoff: float) -> dict[Point, float]:
        """Lower bounds above the cutoff on the optima of those points, of the same decisions, for which one relaxation
        that is below all of theirs gives them."""
        alike: dict[Hashable, dict[Point, Problem]] = {}
        for point in points if len(points) >= FEWEST_TOGETHER else ():
            self._formulations[point] = formulation = self.formulate(point)
            problem = formulation.limited_at_the_loss
            if is_solvable(problem):  # one that does not fit would weaken the others' bound
                alike.setdefault(shape_of(problem), {})[point] = problem
        found: dict[Point, float] = {}
        for own in alike.values():
            if len(own) >= FEWEST_TOGETHER:
                least = self.solver_of(common_problem(list(own.values())), cutoff=cutoff, is_relaxed=True)
                if least.bound is not None and least.bound > cutoff:
                    found |= dict.fromkeys(own, least.bound)
        for point in found:
            del self._formulations[point]
        return found

    def full(self, point: Point, *, cutoff: float = math.inf) -> Candidate | float:
        """The optimum of a point, or a lower bound on it that is above the cutoff."""
        formulation = self.formulate(point)
        found = self.solver_of(formulation.problem, cutoff=cutoff)
        if found.status is Status.BOUNDED:
            assert found.bound is not None
            return found.bound
        return Candidate(point=point, formulation=formulation, solution=found)

    def solve_point(self, point: Point) -> Candidate:
        """The optimum of one point, without a cutoff."""
        found = self.light(point)
        found = found if isinstance(found, Candidate) else self.full(point)
        assert isinstance(found, Candidate), "without a cutoff nothing is bounded away"
        return found


@final
@dataclass(frozen=True, slots=True)
class Solvers:
    """The solvers of one request by the number of ranks that divide experts: each number has graphs and cuts of its own
    (tpplan.search.expert_degrees)."""

    by_ep: Mapping[int, PointSolver]

    def of(self, point: Point) -> PointSolver:
        """The solver of a point."""
        return self.by_ep[point.ep]

    def assumed(self, points: Sequence[Point]) -> Iterator[str]:
        """Yields lines on graphs that were not traced: of which micro-batches, of how many ranks for experts."""
        grown: set[int] = set()
        likened: list[int] = []
        for ep, solver in self.by_ep.items():
            sizes = {point.micro_batch for point in points if point.ep == ep}
            grown.update(solver.traces.grown_sizes(sizes))
            if solver.traces.is_likened(sizes):
                likened.append(ep)
        if grown:
            shown = ", ".join(map(str, sorted(grown)))
            yield f"micro-batch {shown}: priced as if the code did what it does at smaller ones, on larger tensors"
        if likened:
            shown = ", ".join(map(str, sorted(likened)))
            yield f"experts over {shown} ranks: priced as if the code did what it does over other numbers of ranks"

    @property
    def request(self) -> Request:
        """The request, of which only the subject differs between the solvers."""
        return next(iter(self.by_ep.values())).request

    def split(self, points: Sequence[Point]) -> Iterator[tuple[PointSolver, list[Point]]]:
        """Yields each solver that has some of the points, with these."""
        for ep, solver in self.by_ep.items():
            if own := [point for point in points if point.ep == ep]:
                yield solver, own

    def changed(self, change: Callable[[PointSolver], PointSolver]) -> "Solvers":
        """Each solver changed."""
        return Solvers({ep: change(solver) for ep, solver in self.by_ep.items()})

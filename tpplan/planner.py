"""The glue: trace, price, solve over the meshes, check, assemble. Every stage stands in its own module."""

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tpplan import solvers
from tpplan.assemble import Expanded, blocks_table, by_pattern, expand, rename_parameter
from tpplan.costs.compute import Executor
from tpplan.costs.regions import Regions
from tpplan.errors import InfeasibleError, ModelError, SolverError, UsageError
from tpplan.formulate import Formulation, PricedSpace, Setting, price_space
from tpplan.graph import Direction, ModelGraph
from tpplan.mesh import Mesh, meshes
from tpplan.plan import (
    SCHEMA_VERSION,
    BatchPlan,
    BoundaryPlan,
    ClusterPlan,
    Fingerprints,
    MeshPlan,
    Plan,
    Precision,
    ProofReport,
    ProofStatus,
    Recompute,
    SolverReport,
    check_parameters,
    parameters_fingerprint,
)
from tpplan.pricing import price_plan, with_repeats
from tpplan.problem import Problem, Solution, Status, total
from tpplan.profile import HardwareProfile, load_profile
from tpplan.prove import Counterexample, check_structure
from tpplan.reader import path_of
from tpplan.reruns import rerun
from tpplan.rules import Strategy
from tpplan.space import build_space
from tpplan.trace import Inputs, Loss, assumptions, check_backward_hooks, repeated_children, trace
from tpplan.typecheck import Mistyped, typecheck
from tpplan.units import format_bytes

logger = logging.getLogger(__name__)

#: called with a stage ("trace", "costs", "solve", "prove"), how much of it is done, and how much there is
Progress = Callable[[str, int, int], None]
BuildModel = Callable[[], nn.Module]
ExampleInputs = Callable[[int, int], Inputs]
#: whether a decision may choose a strategy
Allows = Callable[[str, Strategy], bool]

#: counterexamples before giving up; each forbids at least one strategy of finitely many
MAX_ROUNDS = 50
#: the solver of a plan whose price alone was asked for
PRICED = "none, only priced"
#: how many times as many GPUs are tried when nothing fits
LARGER_CLUSTERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs to plan for: how many, how many share a node, and the profile of the machine (name, path or object)."""

    gpus: int
    gpus_per_node: int
    profile: str | os.PathLike[str] | HardwareProfile

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise UsageError(
                f"cluster: expected at least 1 GPU and 1 per node, got {self.gpus} and {self.gpus_per_node}"
            )

    def load_profile(self) -> HardwareProfile:
        """The profile. Raises ProfileError where it is unknown or malformed."""
        return self.profile if isinstance(self.profile, HardwareProfile) else load_profile(self.profile)


def solve(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    micro_batch: int = 1,
    loss: Loss | None = None,
    unused_outputs: Sequence[str] = (),
    tp: int | None = None,
    fsdp: int | None = None,
    precision: Precision | str | None = None,
    optimizer: str = "adamw",
    recompute: Recompute | str = Recompute.NONE,
    reshard_after_forward: bool = True,
    compile: bool = False,
    memory_limit_bytes: float | None = None,
    solver: str | None = None,
    time_limit_s: float | None = None,
    allows: Callable[[ModelGraph], Allows] | None = None,
    prove: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least predicted step time among those whose predicted peak memory fits.

    build_model() gives the model (it is called under the meta device: no weights are made), example_inputs(micro_batch,
    seq_len) its inputs. The mesh is enumerated, the layouts of each are an ILP. `tp` and `fsdp` pin a degree,
    `precision` defaults to bf16-mixed on a GPU profile and fp32 else. `recompute` says what of each repeated layer runs
    again in backward ("none", "selective", "full"), reshard_after_forward=False keeps FSDP's layers gathered until then
    (ZeRO-2), compile=True prices elementwise ops as torch.compile fuses them. time_limit_s holds for each mesh.
    `allows`, given the graph, says which strategies of a decision may be chosen: for plans that are to be compared.
    Raises ModelError, ProfileError, UsageError, SolverError, and InfeasibleError with what would fit.
    """
    options = Options(
        loss=loss,
        unused_outputs=tuple(unused_outputs),
        tp=tp,
        fsdp=fsdp,
        precision=precision,
        optimizer=optimizer,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        compile=compile,
        memory_limit_bytes=memory_limit_bytes,
        solver=solver,
        time_limit_s=time_limit_s,
        allows=allows,
    )
    batch = _Batch(global_batch, micro_batch, seq_len)
    job, candidates = _prepare(build_model, example_inputs, cluster, batch, options, progress)
    return job.search(candidates, prove=prove)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What solve takes besides the model, the cluster and the batch, under the same names."""

    loss: Loss | None = None
    unused_outputs: tuple[str, ...] = ()
    tp: int | None = None
    fsdp: int | None = None
    precision: Precision | str | None = None
    optimizer: str = "adamw"
    recompute: Recompute | str = Recompute.NONE
    reshard_after_forward: bool = True
    compile: bool = False
    memory_limit_bytes: float | None = None
    solver: str | None = None
    time_limit_s: float | None = None
    allows: Callable[[ModelGraph], Allows] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The optimum of one mesh as numbers: its problem, and what was chosen."""

    formulation: Formulation
    choice: Mapping[str, int]

    @property
    def peak_bytes(self) -> float:
        """Predicted peak memory of a rank."""
        return total(self.formulation.problem.resources[0].terms, self.choice)


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
    """What the best plan on one mesh costs, whether it fits or not; `options` pins both degrees. Nothing is proven."""
    batch = _Batch(global_batch, micro_batch, seq_len)
    unlimited = replace(options, memory_limit_bytes=float("inf"))
    job, candidates = _prepare(build_model, example_inputs, cluster, batch, unlimited, None)
    candidate = job.solve_mesh(candidates[0])
    if candidate.solution.choice is None:
        raise SolverError(f"{candidates[0]}: {candidate.solution.status}")
    return Priced(formulation=candidate.formulation, choice=candidate.solution.choice)


def _prepare(
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    cluster: Cluster,
    batch: "_Batch",
    options: Options,
    progress: Progress | None,
) -> tuple["_Job", list[Mesh]]:
    """The job, its model traced, and the meshes to try."""
    profile, precision, limit = cluster.load_profile(), options.precision, options.memory_limit_bytes
    if precision is None:
        precision = Precision.BF16_MIXED if profile.device_type == "cuda" else Precision.FP32
    job = _Job(
        build_model=build_model,
        example_inputs=example_inputs,
        loss=options.loss,
        unused_outputs=frozenset(options.unused_outputs),
        cluster=cluster,
        profile=profile,
        batch=batch,
        precision=_precision(precision),
        optimizer=options.optimizer,
        recompute=_recompute(options.recompute),
        reshard_after_forward=options.reshard_after_forward,
        is_compiled=options.compile,
        wishes=options.allows,
        limit=profile.usable_bytes if limit is None else limit,
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        report=progress or (lambda stage, done, total: None),
    )
    candidates = job.candidates(tp=options.tp, fsdp=options.fsdp)
    job.trace_model()
    return job, candidates


def price(
    plan: Plan | str | os.PathLike[str],
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    profile: str | os.PathLike[str] | HardwareProfile,
    gpus_per_node: int | None = None,
    loss: Loss | None = None,
) -> Plan:
    """The plan as it would be on another machine: the same choices, and what they cost there.

    build_model, example_inputs and loss are those the plan was made with; gpus_per_node is the plan's, as far as the
    profile has so many. Nothing is solved, and no solver need be installed: the bound is 0. What the plan names under
    `recompute` is priced, too. Raises ModelError, ProfileError, PlanError for a plan that cannot be read, and
    PlanMismatchError where it does not fit the model.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    machine = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
    per_node = gpus_per_node or min(loaded.cluster.gpus_per_node, machine.gpus_per_node)
    batch = loaded.batch
    job = _Job(
        build_model=build_model,
        example_inputs=example_inputs,
        loss=loss,
        unused_outputs=frozenset(),
        cluster=Cluster(gpus=loaded.cluster.gpus, gpus_per_node=per_node, profile=machine),
        profile=machine,
        batch=_Batch(batch.global_batch, batch.micro_batch, batch.seq_len),
        precision=loaded.precision,
        optimizer=loaded.optimizer,
        recompute=Recompute.NONE,
        reshard_after_forward=loaded.fsdp.reshard_after_forward,
        is_compiled=False,
        wishes=None,
        limit=machine.usable_bytes,
        solver=None,
        time_limit_s=None,
        report=lambda stage, done, total: None,
    )
    job.trace_model()
    named = job.model.named_parameters(remove_duplicate=False)
    check_parameters(loaded, {name: (tuple(weight.shape), weight.requires_grad) for name, weight in named})
    priced = price_plan(job.graph, loaded, machine, per_node)
    seconds = priced.predicted.step_time_s
    return replace(
        loaded,
        cluster=replace(
            loaded.cluster, gpus_per_node=per_node, profile=machine.name, profile_fingerprint=machine.fingerprint
        ),
        collectives=priced.collectives,
        predicted=priced.predicted,
        solver=SolverReport(
            name=PRICED, status=Status.FEASIBLE, objective_s=seconds, bound_s=0.0, gap=1.0, meshes_tried=1
        ),
        unruled_ops=priced.unruled_ops,
    )


def _precision(name: Precision | str) -> Precision:
    try:
        return Precision(name)
    except ValueError:
        raise UsageError(f"unknown precision {name!r}; known: {', '.join(Precision)}") from None


def _recompute(name: Recompute | str) -> Recompute:
    try:
        return Recompute(name)
    except ValueError:
        raise UsageError(f"unknown recomputation {name!r}; known: {', '.join(Recompute)}") from None


@dataclass(frozen=True, slots=True)
class _Batch:
    global_batch: int
    micro_batch: int
    seq_len: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch, self.seq_len) < 1:
            raise UsageError(
                f"expected a global batch, micro-batch and sequence length of at least 1, got "
                f"{self.global_batch}, {self.micro_batch} and {self.seq_len}"
            )

    def accumulation_steps(self, mesh: Mesh) -> int | None:
        """Micro-batches per step on each rank; None where they do not divide."""
        steps, rest = divmod(self.global_batch, self.micro_batch * mesh.data_parallel)
        return steps if steps and not rest else None


@dataclass
class _Candidate:
    """A mesh, its formulation and its solution; solved again when a cut removes what it chose."""

    formulation: Formulation
    solution: Solution


@dataclass
class _Job:
    """One call of solve: inputs, what has been computed of each tp degree, and the cuts found."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    loss: Loss | None
    unused_outputs: frozenset[str]
    cluster: Cluster
    profile: HardwareProfile
    batch: _Batch
    precision: Precision
    optimizer: str
    recompute: Recompute
    reshard_after_forward: bool
    is_compiled: bool
    wishes: Callable[[ModelGraph], Allows] | None
    limit: float
    solver: str | None
    time_limit_s: float | None
    report: Progress
    executor: Executor = field(default_factory=Executor)
    spaces: dict[int, PricedSpace] = field(default_factory=dict)
    cuts: dict[tuple[int, str], set[Strategy]] = field(default_factory=dict)
    cut_messages: list[str] = field(default_factory=list)
    model: nn.Module = field(init=False)
    inputs: Inputs = field(init=False)
    units: tuple[str, ...] = field(init=False)
    graph: ModelGraph = field(init=False)
    assumptions: tuple[str, ...] = ()

    def candidates(self, *, tp: int | None, fsdp: int | None) -> list[Mesh]:
        """Meshes whose data-parallel ranks divide the global batch. Raises UsageError where none does."""
        every = list(meshes(self.cluster.gpus, self.cluster.gpus_per_node, tp=tp, fsdp=fsdp))
        dividing = [mesh for mesh in every if self.batch.accumulation_steps(mesh) is not None]
        if not dividing:
            degrees = sorted({mesh.data_parallel for mesh in every})
            raise UsageError(
                f"global batch {self.batch.global_batch} does not divide into micro-batches of "
                f"{self.batch.micro_batch} on {' or '.join(map(str, degrees))} data-parallel ranks of "
                f"{self.cluster.gpus} GPUs; "
                f"change --global-batch, --micro-batch or --tp"
            )
        return dividing

    # Trace

    def trace_model(self) -> None:
        """Builds the model on the meta device and traces it at the micro-batch's shapes."""
        self.report("trace", 0, 1)
        with torch.device("meta"):
            self.model = self.build_model()
        if not isinstance(self.model, nn.Module):
            raise ModelError(f"the builder returned {type(self.model).__name__}, expected a torch.nn.Module")
        if next(self.model.parameters(), None) is None:
            raise ModelError(f"{type(self.model).__name__} has no parameters: there is nothing to train or to shard")
        self.units = repeated_children(self.model)
        if self.precision is not Precision.FP32:
            for parameter in self.model.parameters():
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(torch.bfloat16)
        self.inputs = self.example_inputs(self.batch.micro_batch, self.batch.seq_len)
        if self.precision is Precision.BF16:
            self.inputs = pytree.tree_map(_to_bfloat16, self.inputs)
        check_backward_hooks(self.model)
        # A forward may leave tensors of the trace on its module; the proof copies a model that has none.
        self.graph = trace(_copied(self.model), self.inputs, loss=self.loss, cast=self.cast)
        if self.graph.questions:
            model = _copied(self.model)
            self.assumptions = assumptions(self.graph, model, self.inputs, loss=self.loss, cast=self.cast)
        self.report("trace", 1, 1)

    def cast(self, tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
        """FSDP's mixed precision casts what enters the root and each unit; so does the trace."""
        enters_unit = direction is Direction.INPUT and (module == "" or module in self.units)
        casts = enters_unit and self.precision is Precision.BF16_MIXED
        return _to_bfloat16(tensor) if casts else tensor

    # Solve

    def priced(self, tp: int) -> PricedSpace:
        """Decisions and their costs on tp ranks, under the cuts so far."""
        if tp not in self.spaces:
            space = build_space(self.graph, tp, unused_outputs=self.unused_outputs, cut=self._is_cut(tp))
            self.spaces[tp] = price_space(
                space,
                self.profile,
                self.cluster.gpus_per_node,
                self.executor,
                self.regions,
                is_compiled=self.is_compiled,
            )
        return self.spaces[tp]

    @property
    def regions(self) -> Regions:
        """The repeated layers, if they are recomputed."""
        return Regions(self.units, self.recompute)

    def _is_cut(self, tp: int) -> Callable[[str, Strategy], bool]:
        allows = self.wishes(self.graph) if self.wishes is not None else lambda name, strategy: True
        return lambda name, strategy: strategy in self.cuts.get((tp, name), ()) or not allows(name, strategy)

    def formulate(self, mesh: Mesh, *, limit: float | None = None) -> Formulation:
        """The problem of one mesh."""
        return Formulation(
            priced=self.priced(mesh.tp),
            mesh=mesh,
            setting=Setting(
                profile=self.profile,
                gpus_per_node=self.cluster.gpus_per_node,
                precision=self.precision,
                optimizer=self.optimizer,
                memory_limit_bytes=self.limit if limit is None else limit,
                accumulation_steps=self.batch.accumulation_steps(mesh) or 1,
                units=self.units,
                recompute=self.recompute,
                reshard_after_forward=self.reshard_after_forward,
            ),
        )

    def solve_mesh(self, mesh: Mesh) -> _Candidate:
        """The optimum of one mesh."""
        formulation = self.formulate(mesh)
        solution = solvers.solve(formulation.problem, solver=self.solver, time_limit_s=self.time_limit_s)
        return _Candidate(formulation, solution)

    def search(self, candidates: list[Mesh], *, prove: bool) -> Plan:
        """Solves every mesh; checks the best; a counterexample is cut away wherever it was chosen, until one holds."""
        solved: dict[Mesh, _Candidate] = {}
        degrees = sorted({mesh.tp for mesh in candidates})
        for done, tp in enumerate(degrees):
            self.report("costs", done, len(degrees))
            self.priced(tp)
        self.report("costs", len(degrees), len(degrees))
        for done, mesh in enumerate(candidates):
            self.report("solve", done, len(candidates))
            solved[mesh] = self.solve_mesh(mesh)
        self.report("solve", len(candidates), len(candidates))
        for rounds in range(1, MAX_ROUNDS + 1):
            best = self._settled(self._best(solved))
            solved[best.formulation.mesh] = best
            choice = best.solution.choice
            assert choice is not None
            expanded = Expanded(formulation=expand(best.formulation, choice))
            if not prove:
                return self.assemble(expanded, best, solved, ProofStatus.UNPROVEN, rounds)
            self.report("prove", rounds - 1, rounds)
            plan = self.assemble(expanded, best, solved, ProofStatus.PROVEN, rounds)
            checked = check_structure(self.model, self.inputs, expanded, plan, loss=self.loss, cast=self.cast)
            problem = checked if isinstance(checked, Counterexample) else self._mistyped(checked, expanded)
            if problem is None:
                assert isinstance(checked, Plan)
                self.report("prove", rounds, rounds)
                return checked
            self._forbid(problem, expanded, best.formulation)
            self._solve_again(solved)
        raise SolverError(f"no plan could be proven in {MAX_ROUNDS} rounds; the last: {self.cut_messages[-1]}")

    def _best(self, solved: dict[Mesh, _Candidate]) -> _Candidate:
        feasible = [candidate for candidate in solved.values() if candidate.solution.objective is not None]
        if not feasible:
            raise self._infeasible(list(solved))

        def order(candidate: _Candidate) -> tuple[float, int, int]:
            mesh = candidate.formulation.mesh
            return candidate.solution.objective or 0.0, mesh.tp, mesh.shard

        return min(feasible, key=order)

    def _settled(self, best: _Candidate) -> _Candidate:
        """The best mesh with its ties broken; as it was where that does not come out within the time limit."""
        formulation, solution = best.formulation, best.solution
        assert solution.objective is not None
        problem = formulation.tie_break(solution.objective)
        try:
            chosen = solvers.solve(problem, solver=self.solver, time_limit_s=self.time_limit_s).choice
        except SolverError as error:
            logger.info("ties stay unbroken: %s", error)
            return best
        if chosen is None:
            return best
        price = formulation.problem.price(chosen)
        return _Candidate(formulation, replace(solution, choice=chosen, objective=price))

    def _mistyped(self, plan: Plan, expanded: Expanded) -> Mistyped | None:
        """Derives every layout from the plan as its file says it."""
        return typecheck(self.graph, Plan.from_dict(plan.to_dict()), local_shapes=expanded.local_shapes())

    def _forbid(self, found: Counterexample | Mistyped, expanded: Expanded, formulation: Formulation) -> None:
        """Cuts away what was chosen at the blamed decisions, in all like blocks."""
        tp, space = formulation.mesh.tp, formulation.space
        chosen = {(name, expanded.strategy(name)) for name in found.blamed}
        if not chosen:
            raise ModelError(f"the plan cannot be proven, and no sharding explains it: {found.message}")
        logger.info("counterexample on tp %d: %s", tp, found.message)
        self.cut_messages.append(found.message)
        for name, strategy in chosen:
            for member in space.members[space.classes[name]]:
                self.cuts.setdefault((tp, member), set()).add(strategy)

    def _solve_again(self, solved: dict[Mesh, _Candidate]) -> None:
        """A cut changes only the optima that chose what it forbids."""
        cut_degrees = {tp for tp, _ in self.cuts}
        self.spaces = {tp: entry for tp, entry in self.spaces.items() if tp not in cut_degrees}
        for mesh, candidate in solved.items():
            choice, formulation = candidate.solution.choice, candidate.formulation
            if choice is None:
                continue
            is_cut = self._is_cut(mesh.tp)
            if any(is_cut(name, formulation.strategy(choice, name)) for name in formulation.space.deciders):
                solved[mesh] = self.solve_mesh(mesh)

    # Nothing fits

    def _infeasible(self, candidates: list[Mesh]) -> InfeasibleError:
        """The smallest peak on these GPUs by part, and how many GPUs would do."""
        smallest, formulation, solution = min((self._least_memory(mesh) for mesh in candidates), key=lambda row: row[0])
        assert solution.choice is not None
        parts: dict[str, float] = {}
        for term in formulation.problem.resources[0].terms:
            parts[term.name] = parts.get(term.name, 0.0) + term.value(solution.choice)
        shown = ", ".join(
            f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda row: -row[1]) if n
        )
        return InfeasibleError(
            f"no plan fits {format_bytes(self.limit)} per GPU on {self.cluster.gpus} GPUs: the smallest needs "
            f"{format_bytes(smallest)}, {format_bytes(smallest - self.limit)} too much, on {formulation.mesh} "
            f"({shown}). " + self._what_would_fit(formulation.mesh)
        )

    def _least_memory(self, mesh: Mesh) -> tuple[float, Formulation, Solution]:
        formulation = self.formulate(mesh, limit=float("inf"))
        problem = formulation.problem
        memory = problem.resources[0].terms
        solution = solvers.solve(
            Problem(nodes=problem.nodes, edges=problem.edges, objective=memory), solver=self.solver
        )
        if solution.choice is None:
            raise SolverError(f"{mesh}: the decisions contradict each other")
        return total(memory, solution.choice), formulation, solution

    def _what_would_fit(self, mesh: Mesh) -> str:
        for factor in LARGER_CLUSTERS:
            larger = Mesh(replicate=1, shard=mesh.shard * mesh.replicate * factor, tp=mesh.tp)
            needed = self._least_memory(larger)[0]
            if needed <= self.limit:
                hint = f"{larger.num_gpus} GPUs would do ({format_bytes(needed)} with {larger})"
                fits_batch = self.batch.accumulation_steps(larger) is not None
                return hint + ("." if fits_batch else f", with a global batch that {larger.data_parallel} divides.")
        if self.batch.micro_batch > 1:
            return f"More GPUs alone would not do; try a micro-batch below {self.batch.micro_batch}."
        return "More GPUs alone would not do; try a shorter sequence, --precision bf16-mixed or a smaller model."

    # Plan

    def assemble(
        self,
        expanded: Expanded,
        best: _Candidate,
        solved: dict[Mesh, _Candidate],
        status: ProofStatus,
        rounds: int,
    ) -> Plan:
        """The plan of the best mesh, certified over all of them."""
        mesh, graph = best.formulation.mesh, self.graph
        empty = BoundaryPlan(inputs={}, outputs={})
        parameters = expanded.parameter_plans()
        rows = {
            name: (plan.shape, plan.trainable) for label, plan in parameters.items() for name in (label, *plan.aliases)
        }
        plan = Plan(
            schema_version=SCHEMA_VERSION,
            tpplan_version=_version(),
            torch_version=torch.__version__.partition("+")[0],
            cluster=ClusterPlan(
                gpus=self.cluster.gpus,
                gpus_per_node=self.cluster.gpus_per_node,
                profile=self.profile.name,
                profile_fingerprint=self.profile.fingerprint,
            ),
            mesh_degrees=MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp),
            batch=BatchPlan(
                global_batch=self.batch.global_batch,
                micro_batch=self.batch.micro_batch,
                accumulation_steps=best.formulation.setting.accumulation_steps,
                seq_len=self.batch.seq_len,
            ),
            precision=self.precision,
            optimizer=self.optimizer,
            blocks=blocks_table(graph),
            parameters=by_pattern(graph, parameters, rename_parameter),
            boundaries=by_pattern(graph, expanded.boundary_plans(), lambda plan, rename: plan, empty),
            outputs=expanded.outputs(),
            sizes={},
            losses=by_pattern(graph, expanded.sharded_losses(), lambda count, rename: count),
            draws=tuple(by_pattern(graph, dict.fromkeys(expanded.drawing_modules(), ""), lambda own, rename: own)),
            recompute=by_pattern(graph, dict.fromkeys(self.regions.modules, self.recompute), lambda own, rename: own)
            if self.recompute is not Recompute.NONE
            else {},
            fsdp=expanded.fsdp_plan(),
            collectives=expanded.collectives(),
            predicted=expanded.prediction(),
            solver=_certificate(best, solved),
            fingerprints=Fingerprints(
                parameters=parameters_fingerprint(rows), graph=graph.fingerprint, inputs=_input_shapes(self.inputs)
            ),
            proof=ProofReport(
                status=status, rounds=rounds, cuts=tuple(self.cut_messages), assumptions=self.assumptions
            ),
            unruled_ops=expanded.unruled_ops(),
        )
        if self.recompute is Recompute.NONE:
            return plan
        again = rerun(expanded.formulation, plan.recomputed_modules())
        return replace(plan, collectives=with_repeats(plan.collectives, again, plan))


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise ModelError(
            "the model cannot be copied: a module holds a tensor that was computed from a weight when it was built (a "
            f"view, torch.nn.utils.weight_norm); compute it in forward\n{str(error).splitlines()[0]}"
        ) from error


def _certificate(best: _Candidate, solved: dict[Mesh, _Candidate]) -> SolverReport:
    """The best objective against the least bound of any mesh."""
    objective = best.solution.objective or 0.0
    bound = min([objective, *(c.solution.bound for c in solved.values() if c.solution.bound is not None)])
    everywhere = all(c.solution.status in (Status.OPTIMAL, Status.INFEASIBLE) for c in solved.values())
    return SolverReport(
        name=best.solution.solver,
        status=Status.OPTIMAL if everywhere else Status.FEASIBLE,
        objective_s=objective,
        bound_s=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        meshes_tried=len(solved),
    )


def _to_bfloat16(leaf: Any) -> Any:
    is_float32 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.to(torch.bfloat16) if is_float32 else leaf


def _input_shapes(inputs: Any) -> dict[str, str]:
    """Shapes of the traced inputs: {"tokens": "int64[1, 4096]"}."""
    leaves = pytree.tree_flatten_with_path(inputs)[0]
    return {
        path_of(path): f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _version() -> str:
    try:
        return version("tpplan")
    except PackageNotFoundError:
        return "0+checkout"

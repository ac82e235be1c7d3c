"""Over all meshes: each is solved, the best is checked, and a counterexample is cut away wherever it was chosen."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from tpplan import solvers
from tpplan.assemble import Expanded, expand
from tpplan.errors import ModelError, SolverError
from tpplan.formulate import Formulation
from tpplan.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op
from tpplan.infeasible import infeasible
from tpplan.job import Candidate, Job
from tpplan.mesh import Mesh
from tpplan.outcome import plan_of
from tpplan.patterns import ROOT
from tpplan.plan import Plan, ProofStatus
from tpplan.prove import Counterexample, check_structure
from tpplan.rules import Strategy
from tpplan.space import NoLayoutError
from tpplan.typecheck import Mistyped, typecheck
from tpplan.unkept import no_layout, unkept, unproven
from tpplan.visible import given_nodes, parent, shards_in

logger = logging.getLogger(__name__)

#: counterexamples before giving up; each forbids at least one strategy of finitely many
MAX_ROUNDS = 50
#: counterexamples in the code of one class before what its modules' own code sees is no longer sharded: code that
#: compares sizes, say, differs by another line for each way to shard it
PATIENCE = 4


def search(job: Job, candidates: list[Mesh], *, prove: bool) -> Plan:
    """Solves every mesh; checks the best; a counterexample is cut away wherever it was chosen, until one holds."""
    solved: dict[Mesh, Candidate] = {}
    candidates = _with_layouts(job, candidates)
    for done, mesh in enumerate(candidates):
        job.report("solve", done, len(candidates))
        solved[mesh] = job.solve_mesh(mesh)
    job.report("solve", len(candidates), len(candidates))
    for rounds in range(1, MAX_ROUNDS + 1):
        best = _settled(job, _best(job, solved))
        solved[best.formulation.mesh] = best
        choice = best.solution.choice
        assert choice is not None
        expanded = Expanded(formulation=expand(best.formulation, choice))
        if not prove:
            return plan_of(job, expanded, best, solved, ProofStatus.UNPROVEN, rounds)
        job.report("prove", rounds - 1, rounds)
        plan = plan_of(job, expanded, best, solved, ProofStatus.PROVEN, rounds)
        checked = check_structure(
            job.model, job.inputs, expanded, plan, loss=job.loss, cast=job.cast, opaques=job.opaques
        )
        problem = checked if isinstance(checked, Counterexample) else _mistyped(job, checked, expanded)
        if problem is None:
            assert isinstance(checked, Plan)
            job.report("prove", rounds, rounds)
            return checked
        _forbid(job, problem, expanded, best.formulation)
        _solve_again(job, solved)
    raise SolverError(f"no plan could be proven in {MAX_ROUNDS} rounds; the last: {job.cut_messages[-1]}")


def _with_layouts(job: Job, candidates: list[Mesh]) -> list[Mesh]:
    """The meshes on whose tp ranks every decision has a strategy that the pins leave. Raises where none has."""
    degrees = sorted({mesh.tp for mesh in candidates})
    without: dict[int, NoLayoutError] = {}
    for done, tp in enumerate(degrees):
        job.report("costs", done, len(degrees))
        try:
            job.priced(tp)
        except NoLayoutError as error:
            without[tp] = error
    job.report("costs", len(degrees), len(degrees))
    if len(without) == len(degrees):
        raise no_layout(job, without)
    return [mesh for mesh in candidates if mesh.tp not in without]


def _best(job: Job, solved: dict[Mesh, Candidate]) -> Candidate:
    feasible = [candidate for candidate in solved.values() if candidate.solution.objective is not None]
    if not feasible:
        raise unkept(job, list(solved)) or infeasible(job, list(solved))

    def order(candidate: Candidate) -> tuple[float, int, int]:
        mesh = candidate.formulation.mesh
        return candidate.solution.objective or 0.0, mesh.tp, mesh.shard

    return min(feasible, key=order)


def _settled(job: Job, best: Candidate) -> Candidate:
    """The best mesh with its ties broken; as it was where that does not come out within the time limit."""
    formulation, solution = best.formulation, best.solution
    assert solution.objective is not None
    problem = formulation.tie_break(solution.objective)
    try:
        chosen = solvers.solve(problem, solver=job.solver, time_limit_s=job.time_limit_s).choice
    except SolverError as error:
        logger.info("ties stay unbroken: %s", error)
        return best
    if chosen is None:
        return best
    price = formulation.problem.price(chosen)
    return Candidate(formulation, replace(solution, choice=chosen, objective=price))


def _mistyped(job: Job, plan: Plan, expanded: Expanded) -> Mistyped | None:
    """Derives every layout from the plan as its file says it."""
    return typecheck(job.graph, Plan.from_dict(plan.to_dict()), local_shapes=expanded.local_shapes())


def _forbid(job: Job, found: Counterexample | Mistyped, expanded: Expanded, formulation: Formulation) -> None:
    """Cuts away what was chosen at the blamed decisions, in all like blocks."""
    tp, space = formulation.mesh.tp, formulation.space
    chosen = {(name, expanded.strategy(name)) for name in found.blamed}
    if not chosen:
        raise ModelError(f"the plan cannot be proven, and no sharding explains it: {found.message}")
    logger.info("counterexample on tp %d: %s", tp, found.message)
    job.cut_messages.append(found.message)
    module = _whose_code(job.graph, found.node) if isinstance(found, Counterexample) and found.node else LOSS_SCOPE
    if module != LOSS_SCOPE:
        code = type(job.model.get_submodule(module))
        job.counterexamples[tp, code] += 1
        if job.counterexamples[tp, code] >= PATIENCE:
            logger.info("tp %d: the own code of %s runs whole", tp, module or ROOT)
            chosen |= set(_sharding_in(module, formulation))
    for name, strategy in chosen:
        for member in space.members[space.classes[name]]:
            job.cuts.setdefault((tp, member), set()).add(strategy)


def _whose_code(graph: ModelGraph, node: Op | Boundary) -> str:
    """The module whose code ran an op, or called the module that an input enters."""
    is_call = isinstance(node, Boundary) and node.direction is Direction.INPUT
    return parent(graph, node.module) if is_call else node.module


def _sharding_in(module: str, formulation: Formulation) -> Iterator[tuple[str, Strategy]]:
    """Every strategy that shows a module's own code a slice, by decision."""
    space = formulation.space
    return (
        (node.name, strategy)
        for node in given_nodes(space.graph, module)
        for strategy in space.strategies[space.classes[node.name]]
        if shards_in(module, node, strategy)
    )


def _solve_again(job: Job, solved: dict[Mesh, Candidate]) -> None:
    """A cut changes only the optima that chose what it forbids."""
    cut_degrees = {tp for tp, _ in job.cuts}
    job.spaces = {tp: entry for tp, entry in job.spaces.items() if tp not in cut_degrees}
    for mesh, candidate in list(solved.items()):
        choice, formulation = candidate.solution.choice, candidate.formulation
        if choice is None:
            continue
        is_cut = job.is_cut(mesh.tp)
        if any(is_cut(name, formulation.strategy(choice, name)) for name in formulation.space.deciders):
            try:
                solved[mesh] = job.solve_mesh(mesh)
            except NoLayoutError as error:
                del solved[mesh]
                if not solved:
                    raise unproven(job, error) from None

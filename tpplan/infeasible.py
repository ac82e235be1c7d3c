"""When nothing fits: how much is missing, and what would fit."""

from tpplan import solvers
from tpplan.errors import InfeasibleError, SolverError
from tpplan.formulate import Formulation
from tpplan.job import Job
from tpplan.mesh import Mesh
from tpplan.problem import Problem, Solution, total
from tpplan.units import format_bytes

#: how many times as many GPUs are tried when nothing fits
LARGER_CLUSTERS = (2, 4, 8, 16, 32, 64)


def infeasible(job: Job, candidates: list[Mesh]) -> InfeasibleError:
    """The smallest peak on these GPUs by part, and how many GPUs would do."""
    smallest, formulation, solution = min((_least_memory(job, mesh) for mesh in candidates), key=lambda row: row[0])
    assert solution.choice is not None
    parts: dict[str, float] = {}
    for term in formulation.problem.resources[0].terms:
        parts[term.name] = parts.get(term.name, 0.0) + term.value(solution.choice)
    shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda row: -row[1]) if n)
    return InfeasibleError(
        f"no plan fits {format_bytes(job.limit)} per GPU on {job.cluster.gpus} GPUs: the smallest needs "
        f"{format_bytes(smallest)}, {format_bytes(smallest - job.limit)} too much, on {formulation.mesh} "
        f"({shown}). " + _what_would_fit(job, formulation.mesh)
    )


def _least_memory(job: Job, mesh: Mesh) -> tuple[float, Formulation, Solution]:
    formulation = job.formulate(mesh, limit=float("inf"))
    problem = formulation.problem
    memory = problem.resources[0].terms
    solution = solvers.solve(Problem(nodes=problem.nodes, edges=problem.edges, objective=memory), solver=job.solver)
    if solution.choice is None:
        raise SolverError(f"{mesh}: the decisions contradict each other")
    return total(memory, solution.choice), formulation, solution


def _what_would_fit(job: Job, mesh: Mesh) -> str:
    for factor in LARGER_CLUSTERS:
        larger = Mesh(replicate=1, shard=mesh.shard * mesh.replicate * factor, tp=mesh.tp)
        needed = _least_memory(job, larger)[0]
        if needed <= job.limit:
            hint = f"{larger.num_gpus} GPUs would do ({format_bytes(needed)} with {larger})"
            fits_batch = job.batch.accumulation_steps(larger) is not None
            return hint + ("." if fits_batch else f", with a global batch that {larger.data_parallel} divides.")
    if job.batch.micro_batch > 1:
        return f"More GPUs alone would not do; try a micro-batch below {job.batch.micro_batch}."
    return "More GPUs alone would not do; try a shorter sequence, --precision bf16-mixed or a smaller model."

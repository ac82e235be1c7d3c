"""Build and solve seconds of each installed solver on growing chains of nodes, with and without a memory limit.

    python scripts/bench/solvers.py [--nodes 50 100 ...] [--strategies 30] [--time-limit-s 60]

A node stands for an op: strategies name a layout for its input and one for its output, edges make neighbours agree,
every tenth node also agrees with the node ten before it (a residual). Each strategy has a time and a memory.

- free: time only.
- peaks: each tenth node adds max(0, gather - compute of the node before).
- memory: as free, with a limit of MEMORY_SHARE of what the fastest choice needs.
"""

import argparse
import random
import time

from rich.console import Console
from rich.table import Table

from tpplan import solvers
from tpplan.core.errors import TpplanError
from tpplan.solvers import milp
from tpplan.solvers.presolve import reduce
from tpplan.solvers.problem import Edge, Expression, Node, Problem, Resource, Solution, Term

SHAPES = ("free", "peaks", "memory")
NUM_LAYOUTS = 6
RESIDUAL_SPAN = 10

#: of the memory that the fastest choice needs, and how long to look for that
MEMORY_SHARE = 0.7
REFERENCE_TIME_LIMIT_S = 20.0


def chain(num_nodes: int, num_strategies: int, *, shape: str, seed: int = 0) -> Problem:
    """The problem described above."""
    rng = random.Random(seed)
    nodes = tuple(
        Node(name=f"op{i}", strategies=tuple(f"s{s}" for s in range(num_strategies))) for i in range(num_nodes)
    )
    inputs = [[f"L{s % NUM_LAYOUTS}" for s in range(num_strategies)] for _ in nodes]
    outputs = [[f"L{rng.randrange(NUM_LAYOUTS)}" for _ in range(num_strategies)] for _ in nodes]
    for layouts in outputs:
        layouts[0] = "L0"  # L0 -> L0 is always there, so that the chain can close
    pairs = [(i, i + 1) for i in range(num_nodes - 1)]
    edges = [_edge(nodes[i], nodes[j], outputs[i], inputs[j]) for i, j in pairs]
    residuals = range(RESIDUAL_SPAN, num_nodes, RESIDUAL_SPAN)
    edges += [_edge(nodes[i - RESIDUAL_SPAN], nodes[i], outputs[i - RESIDUAL_SPAN], outputs[i]) for i in residuals]
    seconds = [tuple(rng.uniform(1e-5, 1e-3) for _ in range(num_strategies)) for _ in nodes]
    gathers = [tuple(rng.uniform(0, 1e-3) for _ in range(num_strategies)) for _ in nodes]
    # What is fast needs memory.
    sizes = [tuple(1e6 * rng.uniform(0.5, 1.5) / s for s in vector) for vector in seconds]
    objective = [_linear("compute", nodes[i], seconds[i]) for i in range(num_nodes)]
    if shape == "peaks":
        objective += [_exposed(nodes[i], gathers[i], nodes[i - 1], seconds[i - 1]) for i in residuals]
    memory = tuple(_linear("memory", nodes[i], sizes[i]) for i in range(num_nodes))
    problem = Problem(nodes=nodes, edges=tuple(edges), objective=tuple(objective))
    if shape != "memory":
        return problem
    fast = solvers.solve(problem, time_limit_s=REFERENCE_TIME_LIMIT_S)
    assert fast.choice is not None
    limit = MEMORY_SHARE * sum(term.value(fast.choice) for term in memory)
    return Problem(
        nodes=nodes,
        edges=problem.edges,
        objective=problem.objective,
        resources=(Resource(name="memory", terms=memory, limit=limit),),
    )


def _edge(source: Node, target: Node, source_layouts: list[str], target_layouts: list[str]) -> Edge:
    return Edge(
        source=source.name,
        target=target.name,
        source_layouts=tuple(source_layouts),
        target_layouts=tuple(target_layouts),
    )


def _linear(name: str, node: Node, vector: tuple[float, ...]) -> Term:
    return Term(name=name, expressions=(Expression(terms=((node.name, vector),)),))


def _exposed(node: Node, gather: tuple[float, ...], previous: Node, compute: tuple[float, ...]) -> Term:
    hidden = tuple(-seconds for seconds in compute)
    return Term(
        name="exposed",
        expressions=(Expression(), Expression(terms=((node.name, gather), (previous.name, hidden)))),
    )


def _timed_build(problem: Problem) -> tuple[float, int, int]:
    """(seconds to reduce and build, binaries, rows)."""
    started = time.perf_counter()
    reduced = reduce(problem)
    assert reduced is not None
    model = milp.build(reduced)
    seconds = time.perf_counter() - started
    return seconds, int((model.binaries >= 0).sum()), model.program.num_rows


def _timed_solve(problem: Problem, solver: str, time_limit_s: float) -> tuple[float, Solution | TpplanError]:
    """(seconds of the whole call, its answer)."""
    started = time.perf_counter()
    try:
        answer: Solution | TpplanError = solvers.solve(problem, solver=solver, time_limit_s=time_limit_s)
    except TpplanError as error:
        answer = error
    return time.perf_counter() - started, answer


def _report(answer: Solution | TpplanError) -> tuple[str, str]:
    """Status and gap, for the table."""
    if isinstance(answer, TpplanError):
        return "none", "-"
    return answer.status.value, "-" if answer.gap is None else f"{answer.gap:.1e}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 100, 200, 500, 1000, 2000])
    parser.add_argument("--strategies", type=int, default=30)
    parser.add_argument("--time-limit-s", type=float, default=60.0)
    arguments = parser.parse_args()
    columns = ("nodes", "shape", "binaries", "rows", "build s", "solver", "call s", "status", "gap")
    table = Table(*columns, title=f"{arguments.strategies} strategies per node")
    for num_nodes in arguments.nodes:
        for shape in SHAPES:
            problem = chain(num_nodes, arguments.strategies, shape=shape)
            build_s, num_binaries, num_rows = _timed_build(problem)
            for solver in (name for name in solvers.available() if name != "brute-force"):
                call_s, answer = _timed_solve(problem, solver, arguments.time_limit_s)
                sizes = (str(num_nodes), shape, str(num_binaries), str(num_rows))
                table.add_row(*sizes, f"{build_s:.2f}", solver, f"{call_s:.2f}", *_report(answer))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

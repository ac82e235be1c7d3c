"""What solving takes, by stage, from importing torch to the proven plan.

    python scripts/bench/solve.py [8b 70b 405b] [--runs 3]
    python scripts/bench/solve.py 8b --untied [--time-limit-s 60]

Each run is a process of its own. CPU seconds: `import` is torch and tpplan, `trace` building the model and tracing it,
`costs` pricing its strategies, `build` making the ILPs, `solve` HiGHS in them, `prove` the proof, `rest` what stands
between (the plan's tables and collectives). Printed are the medians of the runs, the wall seconds and the peak memory
of the process, the ILPs solved, and the variables of the largest. Exit code 1 where a bar is missed.

Bars on 2 cores, total CPU seconds: Llama 3 8B on 64 GPUs 8, 70B on 512 GPUs 10, 405B on 16,384 GPUs 15; 1 GB.

--untied says what it costs that like layers share their layouts. On the mesh that solve picks, and on the best one with
the most tensor-parallel ranks, it solves the problem tied and with every layer on its own: without a
memory limit, with the machine's, and with limits below what the fastest plan needs, where memory binds. `gap` is how
far the tied optimum may be above the untied one, by the bound on that. Exit code 1 where they differ without a limit.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpplan.costs.step.formulate import Formulation
    from tpplan.search.points.mesh_points import Point
    from tpplan.search.points.point_solver import PointSolver

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STAGES = ("import", "trace", "costs", "build", "solve", "prove", "rest")
MOST_GB = 1.0
#: limits on memory as shares of what the fastest plan needs
TIGHTER = (0.95, 0.9, 0.7, 0.5)
#: relative difference between two optima that are one: tpplan.solvers.milp.PRICE_TOLERANCE
SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of scripts/examples, the GPUs it is planned for, and the CPU seconds that may take."""

    builder: str
    gpus: int
    global_batch: int
    bar_s: float
    seq_len: int = 4096
    gpus_per_node: int = 8


CASES = {
    "toy": Case(builder="llama.py:build_model", gpus=4, global_batch=8, seq_len=64, bar_s=60.0),
    "8b": Case(builder="llama.py:llama3_8b", gpus=64, global_batch=512, bar_s=8.0),
    "70b": Case(builder="llama.py:llama3_70b", gpus=512, global_batch=1024, bar_s=10.0),
    "405b": Case(builder="llama.py:llama3_405b", gpus=16_384, global_batch=16_384, bar_s=15.0),
}


class _Clock:
    """CPU seconds by stage: those since the last mark belong to the stage that was running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stage = "import"
        self.last = 0.0

    def enter(self, stage: str) -> str:
        """Begins a stage; gives the one before."""
        now, before = time.process_time(), self.stage
        self.seconds[before] += now - self.last
        self.last, self.stage = now, stage
        return before

    def within(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return timed


def measure(case: Case) -> dict[str, float]:
    """One run in this process, which should be fresh: seconds by stage, `wall`, `gb`, `programs` and `variables`."""
    started, clock = time.monotonic(), _Clock()
    import tpplan

    assert tpplan.solve  # what it needs is imported now, as for anyone who calls it
    from tpplan.search.models.user_model import load_model_file
    from tpplan.solvers import highs, milp

    sizes: list[int] = []
    build, run = milp.build, highs._run

    def counted(reduced: Any) -> Any:
        model = build(reduced)
        sizes.append(model.program.num_columns)
        return model

    milp.build, milp.reduce = clock.within("build", counted), clock.within("build", milp.reduce)
    highs._run = clock.within("solve", run)

    def report(stage: str, done: int, total: int) -> None:
        clock.enter("rest" if done == total else "build" if stage == "solve" else stage)

    spec = load_model_file(str(EXAMPLES / case.builder))
    clock.enter("trace")
    tpplan.solve(
        spec.build_model,
        spec.example_inputs,
        cluster=tpplan.Cluster(gpus=case.gpus, gpus_per_node=case.gpus_per_node, profile="h100-sxm"),
        global_batch=case.global_batch,
        seq_len=case.seq_len,
        loss=spec.loss,
        unused_outputs=spec.unused_outputs,
        progress=report,
    )
    clock.enter("rest")
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts KiB
    return {
        **{stage: clock.seconds[stage] for stage in STAGES},
        "total": time.process_time(),
        "wall": time.monotonic() - started,
        "gb": peak_gb,
        "programs": len(sizes),
        "variables": max(sizes, default=0),
    }


def medians(name: str, runs: int) -> dict[str, float]:
    """Of the runs of a case, each in a process of its own."""
    found = []
    for _ in range(runs):
        child = subprocess.run(
            [sys.executable, __file__, "--child", name], stdout=subprocess.PIPE, check=True, text=True
        )
        found.append(json.loads(child.stdout))
    return {key: statistics.median(run[key] for run in found) for key in found[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Optima of one mesh in seconds of a step, None where nothing fits or was found in time, and a bound on the untied
    one. `limit` in bytes; CPU seconds of both."""

    limit: float
    tied: float | None
    untied: float | None
    bound: float | None
    tied_s: float
    untied_s: float

    @property
    def gap(self) -> float:
        """How far the tied optimum may be above the untied one, of the tied one; nan where that is not known."""
        if self.tied is None or self.bound is None:
            return math.nan
        return max(0.0, self.tied - self.bound) / self.tied


def compare(solver: "PointSolver", point: "Point", time_limit_s: float) -> Iterator[Comparison]:
    """Tied and untied optima of a point under each limit."""
    from tpplan.solvers.problem import total

    tied = solver.formulate(point, limit=math.inf)
    apart = _untied(solver, tied, point)
    fastest = _solved(tied, math.inf, time_limit_s)[0]
    assert fastest is not None
    assert fastest.choice is not None, "without a limit everything fits"
    needed = max(total(row.terms, fastest.choice) for row in tied.problem.resources)
    for limit in (math.inf, solver.request.limit, *(share * needed for share in TIGHTER)):
        first, tied_s = _solved(tied, limit, time_limit_s)
        other, untied_s = _solved(apart, limit, time_limit_s)
        yield Comparison(
            limit=limit,
            tied=first and first.objective,
            untied=other and other.objective,
            bound=other and other.bound,
            tied_s=tied_s,
            untied_s=untied_s,
        )


def _untied(solver: "PointSolver", tied: "Formulation", point: "Point") -> "Formulation":
    """The same problem with every layer apart; in the memory constraint layers are alike still."""
    from tpplan.costs.step.cost_table import price_space
    from tpplan.layouts.build_space import build_space

    space = build_space(
        solver.traces.traced(point.micro_batch).graph,
        point.tp,
        unused_outputs=solver.request.unused_outputs,
        apart=lambda name: name,
    )
    priced = price_space(
        space, solver.request.profile, solver.request.cluster.gpus_per_node, solver.traces.reuse.executor
    )
    kin = {unit.name: kind.unit.name for kind in tied.kinds for unit in kind.units}
    return replace(tied, priced=priced, setting=replace(tied.setting, kin=kin))


def _solved(formulation: "Formulation", limit: float, time_limit_s: float) -> tuple[Any, float]:
    """The solution, None where the time was too short for any, and the CPU seconds it took."""
    from tpplan import solvers
    from tpplan.core.errors import SolverError

    limited = tuple(replace(row, limit=limit) for row in formulation.problem.resources)
    problem, before = replace(formulation.problem, resources=limited), time.process_time()
    try:
        found = solvers.solve(problem, time_limit_s=time_limit_s)
    except SolverError:
        found = None
    return found, time.process_time() - before


def print_untied(name: str, time_limit_s: float) -> bool:
    """The table of a case; whether both optima are one where nothing limits memory."""
    import tpplan
    from tpplan.search.branch_and_bound import search
    from tpplan.search.models.user_model import load_model_file
    from tpplan.search.planner import prepare
    from tpplan.search.points.mesh_points import Point
    from tpplan.search.points.options import Batch, Options
    from tpplan.search.points.point_solver import Solvers
    from tpplan.search.points.request import Request

    case = CASES[name]
    spec = load_model_file(str(EXAMPLES / case.builder))
    cluster = tpplan.Cluster(gpus=case.gpus, gpus_per_node=case.gpus_per_node, profile="h100-sxm")
    options = Options(loss=spec.loss, unused_outputs=tuple(spec.unused_outputs))
    batch = Batch(case.global_batch, 1, case.seq_len)
    request = Request.of(spec.build_model, spec.example_inputs, cluster, batch, options, None)
    solver, points, unsearched = prepare(request, options)
    columns = ("GiB", "tied s", "untied s", "bound s", "gap", "tied CPU", "untied CPU")
    is_same = True
    most = max(point.tp for point in points)
    for own in (points, [point for point in points if point.tp == most]):
        mesh = search(Solvers({1: solver}), own, unsearched, prove=False).mesh
        print(f"{name} on {mesh}\n" + "".join(f"{column:>12}" for column in columns))
        for row in compare(solver, Point.of(mesh, 1), time_limit_s):
            seconds = ("-" if s is None else f"{s:.6f}" for s in (row.tied, row.untied, row.bound))
            shown = (f"{row.limit / 2**30:.1f}", *seconds, f"{row.gap:.1e}", f"{row.tied_s:.1f}", f"{row.untied_s:.1f}")
            print("".join(f"{text:>12}" for text in shown), flush=True)
            is_same &= row.limit < math.inf or row.gap <= SAME
    return is_same


def main() -> int:
    """Runs the cases, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["8b", "70b", "405b"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=3, help="processes per case (default: 3)")
    parser.add_argument("--untied", action="store_true", help="like layers tied and each on its own (default: time)")
    parser.add_argument("--time-limit-s", type=float, default=60.0, help="of each ILP of --untied (default: 60)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(CASES[arguments.child])))
        return 0
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    if arguments.untied:
        are_same = [print_untied(name, arguments.time_limit_s) for name in arguments.cases]
        return int(not all(are_same))
    columns = (*STAGES, "total", "bar", "wall", "GB", "ILPs", "variables")
    print(f"{'':6}" + "".join(f"{column:>10}" for column in columns))
    is_kept = True
    for name in arguments.cases:
        row, bar_s = medians(name, arguments.runs), CASES[name].bar_s
        seconds = [row[stage] for stage in (*STAGES, "total")]
        shown = [f"{s:.2f}" for s in (*seconds, bar_s, row["wall"], row["gb"])]
        shown += [f"{row['programs']:.0f}", f"{row['variables']:.0f}"]
        print(f"{name:6}" + "".join(f"{text:>10}" for text in shown), flush=True)
        is_kept &= row["total"] <= bar_s and row["gb"] <= MOST_GB
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())

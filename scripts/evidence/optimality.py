"""Looks for proven plans that are faster than what solve calls its bound: the oracle of "optimal".

    python scripts/evidence/optimality.py [--model hf-llama-long] [--samples 60] [--results optimality.json]

A sample is a plan on the mesh that solve chose, and takes no account of what solve forbade: half of them are optima
under perturbed prices with some decisions forced, half local edits of the best plan (one decision forced to another
strategy, the rest as good as it can be), or the best plan found where that takes longer than SOLVE_LIMIT_S. Each is
priced under the true prices. One that is below the bound is proven as solve proves; what cannot be is changed at one of
the decisions that are blamed, drawn at random, until it can or is no longer below.

Prints a row per model. Exit code 4 where a proven plan is more than TOLERANCE below the bound. With --results a file
keeps the rows, and models that are in it are left out.
"""

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from optimality_parts.models import SUBJECTS, Subject
from rich.console import Console
from rich.table import Table

import tpplan
from tpplan import solvers
from tpplan.core.errors import SolverError
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.plan.plan import Plan
from tpplan.search.build_plan import laid_out_as
from tpplan.search.counterexamples import put_to_proof
from tpplan.search.planner import prepare
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.options import Batch, Options
from tpplan.search.points.point_solver import PointSolver
from tpplan.search.points.request import Request
from tpplan.solvers.problem import Choice, Resource, Term, linear_term

#: how far below the bound, relative, a proven plan may be
TOLERANCE = 1e-3
#: columns of the table that is printed
WIDTH = 160
#: exit code
FASTER_FOUND = 4
#: standard deviations of the logarithms of what prices are multiplied by
NOISE = (0.01, 0.1, 0.5)
#: draws for each sample that is asked for: what was drawn may contradict itself, or not fit
MOST_DRAWS = 4
#: counterexamples of one sample before it is given up
MOST_CHANGES = 8
#: seconds for solving a draw: where memory binds, knowing that a plan is the optimum may take minutes
SOLVE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found of a model: solve's answer, how many plans were sampled, how many of them were below the bound
    before they were put to the proof, and the best that was proven."""

    model: str
    status: str
    objective_s: float
    bound_s: float
    cuts: int
    samples: int
    different: int
    put_to_proof: int
    proven: int
    unproven_s: float
    best_proven_s: float
    seconds: float

    @property
    def excess(self) -> float:
        """How far the best proven sample is below the bound, relative; not above 0 where solve is right."""
        return 1 - self.best_proven_s / self.bound_s


@dataclass(slots=True)
class Sampler:
    """Samples plans of a subject on one mesh."""

    solver: PointSolver
    plan: Plan
    formulation: Formulation
    rng: random.Random
    tried: int = 0
    put_to_proof: int = 0
    proven: int = 0
    unproven_s: float = math.inf
    best_s: float = math.inf

    def sample(self, number: int) -> Choice | None:
        """One plan: the optimum under perturbed prices, or an edit of the true one."""
        forced = self._forced(1 if number % 2 else self.rng.choice((0, 1, 2, 3)))
        noise = 0.0 if number % 2 else self.rng.choice(NOISE)
        removed: dict[str, set[int]] = {}
        first: Choice | None = None
        for _ in range(MOST_CHANGES):
            choice = self._solved(forced, removed, noise)
            if choice is None:
                return first
            first = first or choice
            price = self.formulation.problem.price(choice)
            if price >= self.plan.solver.bound_s * (1 - TOLERANCE / 2):
                return first
            self.unproven_s = min(self.unproven_s, price)
            blamed = self._blamed(self.formulation.assignment(choice))
            if not blamed:
                self.proven += 1
                self.best_s = min(self.best_s, price)
                return first
            name = self.formulation.space.classes[self.rng.choice(blamed)]
            removed.setdefault(name, set()).add(choice[name])
        return first

    def _blamed(self, trial: Assignment) -> Sequence[str]:
        """What is to blame where a plan cannot be proven."""
        self.put_to_proof += 1
        traced = self.solver.traces.traced(self.plan.batch.micro_batch)
        found = put_to_proof(self.solver, traced, laid_out_as(self.plan, trial), trial)
        if isinstance(found, Plan):
            return ()
        return found.blamed or tuple(self.formulation.space.members)

    def _forced(self, count: int) -> dict[str, set[int]]:
        """Some decisions, each with one strategy."""
        open_ones = [node for node in self.formulation.problem.nodes if len(node.strategies) > 1]
        nodes = self.rng.sample(open_ones, min(count, len(open_ones)))
        return {node.name: {self.rng.randrange(len(node.strategies))} for node in nodes}

    def _solved(self, forced: Mapping[str, set[int]], removed: Mapping[str, set[int]], noise: float) -> Choice | None:
        """The optimum under perturbed prices with forced and without removed strategies, if there is one."""
        problem = self.formulation.problem
        sizes = {node.name: len(node.strategies) for node in problem.nodes}
        wrong = [
            linear_term("forced", name, [float(i not in own) for i in range(sizes[name])], 1.0)
            for name, own in forced.items()
        ]
        wrong += [
            linear_term("removed", name, [float(i in own) for i in range(sizes[name])], 1.0)
            for name, own in removed.items()
        ]
        rows = problem.resources
        if wrong:
            rows = (*rows, Resource(name="drawn", terms=tuple(wrong), limit=0.0))
        objective = tuple(self._perturbed(term, noise) for term in problem.objective)
        try:
            return solvers.solve(
                replace(problem, objective=objective, resources=rows), time_limit_s=SOLVE_LIMIT_S
            ).choice
        except SolverError:  # none was found in time
            return None

    def _perturbed(self, term: Term, noise: float) -> Term:
        return replace(term, weight=term.weight * math.exp(self.rng.gauss(0.0, noise))) if noise else term


def sampled(subject: Subject, samples: int, seed: int) -> Row:
    """Solves, samples, and compares."""
    started = time.perf_counter()
    reuse = tpplan.Reuse()
    options = dict(subject.options)
    common = {"loss": subject.loss, "unused_outputs": subject.unused_outputs}

    def solve(**more: object) -> Plan:
        return tpplan.solve(
            subject.build_model,
            subject.example_inputs,
            cluster=subject.cluster,
            reuse=reuse,
            **common | options | more,  # type: ignore[arg-type]
        )

    if subject.limit is not None:
        peak = solve(prove=False).predicted
        options["memory_limit_bytes"] = (peak.peak_memory_bytes + peak.slack_bytes) * subject.limit
    plan = solve()
    batch = Batch(options["global_batch"], options["micro_batch"], options["seq_len"])
    asked = {name: value for name, value in (common | options).items() if name in Options.__dataclass_fields__}
    request = Request.of(subject.build_model, subject.example_inputs, subject.cluster, batch, Options(**asked), None)
    solver, _, _ = prepare(request, Options(**asked), reuse)
    formulation = solver.formulate(Point.of(plan.mesh, plan.batch.micro_batch))
    sampler = Sampler(solver=solver, plan=plan, formulation=formulation, rng=random.Random(seed))
    different = set()
    for number in range(MOST_DRAWS * samples):
        choice = sampler.sample(number)
        if choice is not None:
            sampler.tried += 1
            different.add(tuple(sorted(choice.items())))
        if sampler.tried == samples:
            break
    return Row(
        model=subject.name,
        status=str(plan.solver.status),
        objective_s=plan.solver.objective_s,
        bound_s=plan.solver.bound_s,
        cuts=len(plan.proof.cuts),
        samples=sampler.tried,
        different=len(different),
        put_to_proof=sampler.put_to_proof,
        proven=sampler.proven,
        unproven_s=min(sampler.unproven_s, plan.solver.bound_s),
        best_proven_s=min(sampler.best_s, plan.solver.objective_s),
        seconds=time.perf_counter() - started,
    )


def rows_of(names: Sequence[str], samples: int, seed: int, results: Path | None) -> Iterator[Row]:
    """A row for each model; those that the file has are not made again."""
    known = {}
    if results is not None and results.exists():
        known = {row["model"]: Row(**row) for row in json.loads(results.read_text())}
    for name in names:
        if name not in known:
            print(f"{name}: {samples} samples ...", file=sys.stderr)
            known[name] = sampled(SUBJECTS[name](), samples, seed)
            if results is not None:
                results.write_text(json.dumps([asdict(row) for row in known.values()], indent=2) + "\n")
        yield known[name]


def table_of(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    columns = ("model", "status", "objective", "bound", "cuts", "samples", "unlike", "proofs", "proven")
    table = Table(*columns, "least unproven", "least proven", "below bound", "s")
    for row in rows:
        table.add_row(
            row.model,
            row.status,
            *(f"{value * 1e3:.4g} ms" for value in (row.objective_s, row.bound_s)),
            *map(str, (row.cuts, row.samples, row.different, row.put_to_proof, row.proven)),
            *(f"{value * 1e3:.4g} ms" for value in (row.unproven_s, row.best_proven_s)),
            f"{max(0.0, row.excess):.2%}",
            f"{row.seconds:.0f}",
        )
    return table


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[*SUBJECTS], help="one of them (default: all)")
    parser.add_argument("--samples", type=int, default=60, metavar="N", help="plans of each model (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows here, and go on from them")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = list(rows_of(args.model or [*SUBJECTS], args.samples, args.seed, args.results))
    Console(width=WIDTH).print(table_of(rows))
    faster = [row for row in rows if row.excess > TOLERANCE]
    for row in faster:
        print(f"{row.model}: a proven plan takes {row.best_proven_s} s, below the bound of {row.bound_s} s")
    return FASTER_FOUND if faster else 0


if __name__ == "__main__":
    sys.exit(main())

"""Looks for plans that are proven and wrong: random models, mutated plans and traps, on two real ranks.

    python scripts/evidence/adversary.py --models 500 --plans 1000 --seed 0 --traps --out found.json

A random model (adversary_parts/models.py) is solved on two tensor-parallel ranks of a machine where sharding pays, with
what its number draws: less memory, other prices, wishes, recomputation. The proven plan is applied on two gloo ranks,
and loss and every gradient are held against one process, at the planned shape, another batch and another length. A
mutated plan is a proven plan, of a random model or of scripts/examples, whose JSON was changed
(adversary_parts/plans.py); where prove_plan takes it, it is applied and compared alike. Traps
(adversary_parts/traps.py) are modules written to be wrong.

    right       loss and gradients as in one process; at another shape so, or an error on all ranks
    whole       right, and nothing is sharded
    refused     tpplan raised an error of its own: while solving, reading, proving, or on all ranks
    WRONG       other numbers, or an error on one rank alone
    hang        ranks that did not finish
    crash       another exception than tpplan's own, or tpplan's for a fault of its own
    slow        solving or proving was not done in its CPU seconds
    invalid     one process does not run it either

What was found is kept in --out, where the same command goes on. --only 17 runs one model and prints what it is made of,
--only-plan 17 one mutant, --only-trap NAME one trap; --shrink makes what was wrong smaller. Exit code 4 if anything
that was accepted is wrong or hangs, 1 if anything crashed, else 0.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks: DTensor imports it when first used, and each rank would
import torch.distributed.fsdp
import torch.distributed.tensor
from adversary_parts.models import Spec, Subject, draw, simpler, subject_of
from adversary_parts.ranks import Child, DiedError, LateError, Ranks, first_error
from adversary_parts.solver import TP, Mutant, Solved, Solver
from adversary_parts.steps import SHOWN_CHARACTERS, Key, Outcome, Shape, Task, judged, on_rank, raises
from adversary_parts.subjects import EXAMPLES, TRAPS
from adversary_parts.table import VERDICTS, Row, exit_code, summary

from tpplan.core.files import write_atomically

#: mutants of one proven plan; numbers of the models whose plans they are begin here
MUTANTS_OF_A_PLAN, FIRST_BASE = 20, 100_000
#: models that are tried for a base until one has a proven plan that shards
BASE_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A subject to solve and run, or with `mutant` that mutant of its plan."""

    key: Key
    mutant: int | None = None

    @property
    def name(self) -> str:
        """Under which it is kept."""
        own = f"{self.key.kind} {self.key.name or self.key.number}"
        return own if self.mutant is None else f"plan {self.mutant} of {own}"


class Keeper:
    """Runs cases one after the other; ends and replaces what does not answer."""

    def __init__(self, seed: int, solve_timeout_s: float, ranks_timeout_s: float) -> None:
        self.seed, self.solve_timeout_s, self.ranks_timeout_s = seed, solve_timeout_s, ranks_timeout_s
        self.solver: Child | None = None
        self.ranks = Ranks(TP, on_rank)
        self.expected: dict[Key, list[Outcome | None]] = {}

    def ask_solver(self, *message: Any) -> Any:
        if self.solver is None:
            self.solver = Child(Solver())
        try:
            return self.solver.ask(message, self.solve_timeout_s)
        except (LateError, DiedError):
            self.solver.end()
            self.solver = None
            raise

    def end(self) -> None:
        if self.solver is not None:
            self.solver.end()
            self.solver = None
        self.ranks.end()

    def __call__(self, case: Case) -> Row:
        begun = time.monotonic()
        try:
            row = self.row_of_mutant(case) if case.mutant is not None else self.row_of(case)
        except LateError as error:
            row = Row(name=case.name, verdict="slow", detail=str(error))
        except (DiedError, RuntimeError) as error:
            row = Row(name=case.name, verdict="crash", detail=f"{type(error).__name__}: {str(error).strip()[-300:]}")
        return replace(row, seconds=round(time.monotonic() - begun, 2))

    def row_of(self, case: Case) -> Row:
        subject = case.key.subject()
        solved: Solved = self.ask_solver("solve", case.key)
        row = Row(name=case.name, verdict=solved.verdict, detail=solved.detail, group=subject.solve)
        if not solved.plan:
            return row
        return self.compared(row, case.key, subject, solved.plan, solved.expected)

    def row_of_mutant(self, case: Case) -> Row:
        """Of the first model, from this key on, that has a plan to mutate."""
        key = case.key
        for attempt in range(BASE_TRIES):
            key = replace(case.key, number=case.key.number + 1000 * attempt)
            mutant: Mutant | None = self.ask_solver("mutant", key, self.seed, case.mutant)
            if mutant is not None:
                break
            if key.kind != "model":
                break
        if mutant is None:
            return Row(name=case.name, verdict="invalid", detail="no plan to mutate")
        row = Row(name=case.name, verdict=mutant.verdict, detail=mutant.detail, group=mutant.kinds)
        if mutant.verdict != "right":
            return row
        if key not in self.expected:
            self.expected = {key: self.ask_solver("solve", key).expected}
        subject, expected = key.subject(), self.expected[key]
        # What a plan says of other shapes was looked at if it was proven as solved.
        expected = expected if mutant.is_as_solved else expected[:1]
        return self.compared(row, key, subject, mutant.plan, expected)

    def compared(self, row: Row, key: Key, subject: Subject, plan: str, expected: Sequence[Outcome | None]) -> Row:
        """The row with what ranks found at each shape that one process runs."""
        shapes = ((subject.batch, subject.seq_len), *subject.others)
        todo = [(shape, there) for shape, there in zip(shapes, expected, strict=False) if there is not None]
        found: list[tuple[str, str]] = []
        while len(found) < len(todo):
            rest = todo[len(found) :]
            found += self.at_shapes(key, plan, rest, in_double=False)
        for number, (verdict, detail) in enumerate(found):
            if verdict == "WRONG" and detail.startswith("error"):
                found[number] = self.in_double(key, plan, todo[number][0], shapes, detail)
        labels = tuple(f"{b} x {t}: {v}: {d}" for ((b, t), _), (v, d) in zip(todo, found, strict=True))
        counted = [found[0], *((v, d) for v, d in found[1:] if v in ("WRONG", "hang"))]
        verdict, detail = min(counted, key=lambda each: VERDICTS.index(each[0]))
        verdict = row.verdict if verdict == "right" else verdict
        return replace(row, verdict=verdict, detail=detail, shapes=labels)

    def at_shapes(
        self, key: Key, plan: str, todo: Sequence[tuple[Shape, Outcome]], *, in_double: bool
    ) -> list[tuple[str, str]]:
        """Verdicts of the first shapes, up to one that raises or hangs; one at least."""
        task = Task(
            key=key,
            plan=plan,
            shapes=tuple(shape for shape, _ in todo),
            expected=tuple(expected for _, expected in todo),
            in_double=in_double,
        )
        answers = self.ranks.ask(task, self.ranks_timeout_s, raises)
        if all(isinstance(each, Exception) for each in answers):
            late = any(isinstance(each, LateError) for each in answers)
            return [("hang" if late else "crash", first_error(answers))]
        lists = [each if isinstance(each, list) else [] for each in answers]
        return [judged([each[at] if at < len(each) else None for each in lists]) for at in range(max(map(len, lists)))]

    def in_double(self, key: Key, plan: str, shape: Shape, shapes: Sequence[Shape], detail: str) -> tuple[str, str]:
        """What was wrong in 32 bits, in 64: rounding, which a sum of little or a choice of the largest makes large, is
        not there then."""
        there = self.ask_solver("double", key)[list(shapes).index(shape)]
        if there is None:
            return "WRONG", detail
        verdict, said = self.at_shapes(key, plan, [(shape, there)], in_double=True)[0]
        return ("right" if verdict == "right" else "WRONG"), f"{detail}; in 64 bits {verdict}: {said}"


# ---- the cases


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    """All that the command asks for."""
    seed = arguments.seed
    only = arguments.only or arguments.only_plan or arguments.only_trap
    numbers = arguments.only if only else range(arguments.models)
    for number in numbers or ():
        yield Case(key=Key(kind="model", seed=seed, number=number))
    for number in (arguments.only_plan if only else range(arguments.plans)) or ():
        yield Case(key=base_of(seed, number // MUTANTS_OF_A_PLAN), mutant=number)
    for name in arguments.only_trap or (TRAPS if arguments.traps and not only else ()):
        yield Case(key=Key(kind="trap", name=name))


def base_of(seed: int, number: int) -> Key:
    """Whose plan is mutated: one in five is an example."""
    if number % 5 == 0:
        return Key(kind="example", name=EXAMPLES[number // 5 % len(EXAMPLES)], number=number)
    return Key(kind="model", seed=seed, number=FIRST_BASE + number)


def run(cases: Sequence[Case], arguments: argparse.Namespace, report: Callable[[Row], None]) -> None:
    """Each case by one of so many keepers; in a process of its own each, if there are more than one.

    Cases of one base go to one keeper, which keeps its plan.
    """
    settings = (arguments.seed, arguments.solve_timeout, arguments.ranks_timeout)
    if arguments.jobs == 1:
        keeper = Keeper(*settings)
        try:
            for case in cases:
                report(keeper(case))
        finally:
            keeper.end()
        return
    groups: dict[Key, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.key, []).append(case)
    run_groups(list(groups.values()), settings, arguments.jobs, report)


def run_groups(
    groups: list[list[Case]], settings: tuple[int, float, float], jobs: int, report: Callable[[Row], None]
) -> None:
    """Each group in turn to the keeper that is free."""
    groups.reverse()
    keepers: dict[Any, tuple[Child, list[Case]]] = {}
    try:
        for _ in range(min(jobs, len(groups))):
            child = Child(Keeper(*settings), has_children=True)
            keepers[child.connection] = (child, groups.pop()[::-1])
            child.send(keepers[child.connection][1].pop())
        while keepers:
            for connection in wait(list(keepers)):
                child, rest = keepers[connection]
                report(child.receive(math.inf))
                if not rest and groups:
                    rest += groups.pop()[::-1]
                if rest:
                    child.send(rest.pop())
                else:
                    child.end()
                    del keepers[connection]
    finally:
        for child, _ in keepers.values():
            child.end()


def shrunk(row: Row, key: Key, keeper: Keeper, report: Callable[[str], None]) -> Spec:
    """The simplest spec found that ends alike: one thing less at a time."""
    spec = key.spec or draw(key.seed, key.number)
    progressed = True
    while progressed:
        progressed = False
        for simple in simpler(spec):
            found = keeper(Case(key=Key(kind="spec", number=key.number, spec=simple)))
            if found.verdict == row.verdict:
                spec, progressed = simple, True
                report(f"still {found.verdict}: {found.detail[:SHOWN_CHARACTERS]}\n  {spec}")
                break
    return spec


# ---- the command


def kept(path: Path | None, seed: int) -> dict[str, Row]:
    """What an earlier run with this seed has found."""
    if path is None or not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["seed"] != seed:
        raise SystemExit(f"{path}: that is of seed {data['seed']}, not {seed}: name another file")
    return {row["name"]: Row(**{**row, "shapes": tuple(row["shapes"])}) for row in data["rows"]}


def keep(path: Path | None, seed: int, rows: Mapping[str, Row]) -> None:
    if path is not None:
        data = {"seed": seed, "rows": [asdict(row) for row in rows.values()]}
        write_atomically(path, json.dumps(data, indent=1) + "\n")


def parsed(texts: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=0, metavar="N")
    parser.add_argument("--plans", type=int, default=0, metavar="N", help="mutated plans")
    parser.add_argument("--traps", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--only-plan", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--only-trap", nargs="+", metavar="NAME", choices=TRAPS)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--solve-timeout", type=float, default=60.0, metavar="SECONDS", help="of CPU, each case")
    parser.add_argument("--ranks-timeout", type=float, default=30.0, metavar="SECONDS", help="of CPU, each case")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="what was found; an interrupted run goes on there"
    )
    return parser.parse_args(texts)


def main(texts: Sequence[str] | None = None) -> int:
    """Runs what has not been run, prints the tables."""
    arguments = parsed(texts)
    torch.set_num_threads(1)
    rows = kept(arguments.out, arguments.seed)
    cases = {case.name: case for case in cases_of(arguments)}
    done = {name: row for name, row in rows.items() if name in cases and not arguments.shrink}

    def report(row: Row) -> None:
        rows[row.name] = done[row.name] = row
        keep(arguments.out, arguments.seed, rows)
        if row.verdict in ("WRONG", "hang", "crash", "slow", "invalid") or len(cases) <= 20:
            said = "".join(f"\n    {shape[:SHOWN_CHARACTERS]}" for shape in row.shapes)
            print(f"{row.name}: {row.verdict}: {row.group} {row.detail[:SHOWN_CHARACTERS]}{said}", flush=True)
        if len(done) % 50 == 0:
            print(f"{len(done)} of {len(cases)}: {dict(Counter(r.verdict for r in done.values()))}", file=sys.stderr)

    for number in arguments.only or ():
        print(subject_of(draw(arguments.seed, number)).text)
    begun = time.monotonic()
    run([case for name, case in cases.items() if name not in done], arguments, report)
    print("", *summary(done), f"{len(done)} cases, {time.monotonic() - begun:.0f} s", sep="\n")
    if arguments.shrink:
        keeper = Keeper(arguments.seed, arguments.solve_timeout, arguments.ranks_timeout)
        for name, row in done.items():
            if cases[name].key.kind == "model" and cases[name].mutant is None and exit_code([row]):
                shrunk(row, cases[name].key, keeper, lambda text: print(text, flush=True))
        keeper.end()
    return exit_code(done.values())


if __name__ == "__main__":
    sys.exit(main())

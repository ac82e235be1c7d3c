"""Looks for plans that are proven and wrong: random models, mutated plans and traps, on two real ranks.

    python scripts/adversary.py --models 500 --plans 1000 --seed 0 --traps --out found.json

A random model (adversary_models.py) is solved on two tensor-parallel ranks of a machine where sharding pays, with what
its number draws: less memory, other prices, wishes, recomputation. The proven plan is applied on two gloo ranks, and
loss and every gradient are held against one process, at the planned shape, another batch and another length. A mutated
plan is a proven plan, of a random model or of scripts/examples, whose JSON was changed (adversary_plans.py); where
prove_plan takes it, it is applied and compared alike. Traps (adversary_traps.py) are modules written to be wrong.

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
import logging
import math
import os
import random
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks: DTensor imports it when first used, and each rank would
import torch.distributed.fsdp
import torch.distributed.tensor
from adversary_models import Inputs, Spec, Subject, draw, simpler, subject_of
from adversary_plans import mutated
from adversary_ranks import Child, DiedError, LateError, Ranks, first_error
from adversary_subjects import EXAMPLES, TRAPS, example_subject, trap_subject
from coverage_machine import machine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply import apply_plan
from tpplan.errors import InternalError, TpplanError
from tpplan.files import write_atomically
from tpplan.fitting import plan_name
from tpplan.graph import ModelGraph
from tpplan.options import Allows, Cluster
from tpplan.plan import Plan, ProofStatus
from tpplan.planner import solve
from tpplan.proof import prove_plan
from tpplan.reuse import Reuse
from tpplan.rules import Strategy
from tpplan.trace import forward_inputs

TP = 2
#: of the loss, and of a gradient relative to its largest element or to this share of the model's largest
TOLERANCE, GRADIENT_NOISE = 1e-4, 1e-3
#: mutants of one proven plan; numbers of the models whose plans they are begin here
MUTANTS_OF_A_PLAN, FIRST_BASE = 20, 100_000
#: models that are tried for a base until one has a proven plan that shards
BASE_TRIES = 4
#: bad ends first: the first that holds of any shape is the case's
VERDICTS = ("WRONG", "hang", "crash", "slow", "refused", "invalid", "whole", "same", "right")
SHOWN_CHARACTERS = 300

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What names a subject: a random model by number, an example, a trap, or a spec itself."""

    kind: str
    seed: int = 0
    number: int = 0
    name: str = ""
    spec: Spec | None = None

    def subject(self) -> Subject:
        match self.kind:
            case "model":
                return subject_of(draw(self.seed, self.number))
            case "spec":
                assert self.spec is not None
                return subject_of(self.spec)
            case "trap":
                return trap_subject(self.name)
        return example_subject(self.name)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a case. `shapes` says it for each shape, the planned one first."""

    name: str
    verdict: str
    detail: str = ""
    group: str = ""
    shapes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A loss and every gradient, whole; None of what a model has none."""

    loss: float
    gradients: Mapping[str, Tensor | None]


# ---- a step


def whole(gradient: Tensor | None) -> Tensor | None:
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def step(model: nn.Module, subject: Subject, shape: Shape, *, in_double: bool) -> Outcome:
    """One forward and backward; chance is the same in each process."""
    torch.manual_seed(1)
    inputs: Inputs = subject.inputs(*shape)
    if in_double:
        inputs = {name: widened(value) for name, value in inputs.items()}
    model.zero_grad()
    loss = subject.loss(model(**forward_inputs(model, inputs)), inputs)
    loss.backward()
    weights = model.named_parameters()
    return Outcome(loss.item(), {plan_name(name): whole(weight.grad) for name, weight in weights})


def built(subject: Subject, *, in_double: bool) -> nn.Module:
    model = subject.build()
    return model.double() if in_double else model


def worst_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest relative error of the loss and of any gradient, and whose it is; infinite for one that is missing."""
    present = [gradient.abs().max().item() for gradient in expected.gradients.values() if gradient is not None]
    floor = GRADIENT_NOISE * max(present, default=0.0)
    errors = {"loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-30)}
    for name in {*expected.gradients, *found.gradients}:
        theirs, ours = expected.gradients.get(name), found.gradients.get(name)
        if theirs is not None and ours is not None and theirs.shape == ours.shape:
            scale = max(theirs.abs().max().item(), floor, 1e-30)
            errors[name] = (ours - theirs).abs().max().item() / scale
        elif theirs is not None or ours is not None:
            only = theirs if theirs is not None else ours
            errors[name] = 0.0 if only is not None and not only.any() else math.inf
    errors = {name: math.inf if math.isnan(error) else error for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


# ---- the process that solves and proves


@dataclass(slots=True)
class Solved:
    """A subject's plan, and what one process gives at each shape (None where it raises)."""

    verdict: str
    detail: str = ""
    plan: str = ""
    expected: list[Outcome | None] = field(default_factory=list)


@dataclass(slots=True)
class Mutant:
    """A changed plan, and what reading or proving it said; a plan where it was accepted."""

    kinds: str
    verdict: str
    detail: str = ""
    plan: str = ""
    is_as_solved: bool = True


class Solver:
    """Answers ("solve", key), ("double", key) and ("mutant", key, seed, number); the last subject is kept."""

    def __init__(self) -> None:
        self.key: Key | None = None
        self.subject: Subject | None = None
        self.reuse = Reuse()
        self.plans: list[Plan] = []

    def __call__(self, message: tuple[Any, ...]) -> Any:
        quiet()
        match message:
            case ("solve", key):
                return self.solved(key)
            case ("double", key):
                return expected_of(key.subject(), in_double=True)
            case ("mutant", key, seed, number):
                return self.mutant(key, seed, number)
        raise AssertionError(message)

    def solved(self, key: Key) -> Solved:
        self.key, self.subject, self.reuse, self.plans = key, key.subject(), Reuse(), []
        expected = expected_of(self.subject, in_double=False)
        if expected[0] is None:
            return Solved("invalid", "one process does not run it")
        try:
            plan = planned(self.subject, self.subject.solve, key.number, self.reuse)
        except Exception as error:
            return Solved(*_refusal(error))
        self.plans = [plan]
        if plan.proof.status is not ProofStatus.PROVEN:
            return Solved("refused", "unproven")
        return Solved("whole" if is_whole(plan) else "right", "", plan.dumps(), expected)

    def mutant(self, key: Key, seed: int, number: int) -> Mutant | None:
        """None where there is no plan to mutate."""
        if self.key != key:
            self.solved(key)
        if not self.plans or is_whole(self.plans[0]) or self.plans[0].proof.status is not ProofStatus.PROVEN:
            return None
        assert self.subject is not None
        if len(self.plans) == 1:  # sections are taken from another plan of the model
            self.plans.append(planned(self.subject, "wishes", key.number + 1, self.reuse))
        base, other = (json.loads(plan.dumps()) for plan in self.plans)
        rng = random.Random(f"{seed}/{number}/mutant")
        kinds, data = mutated(base, other, rng)
        is_as_solved = rng.random() < 0.4
        try:
            plan = Plan.from_dict(data)
            proven = prove_plan(
                plan,
                self.subject.build,
                self.subject.inputs,
                loss=self.subject.loss,
                is_as_solved=is_as_solved,
                profile=machine(),
                reuse=self.reuse,
            ).plan
        except Exception as error:
            verdict, detail = _refusal(error)
            return Mutant(kinds, verdict, detail, json.dumps(data), is_as_solved)
        same = what_is_applied(proven) == what_is_applied(self.plans[0])
        return Mutant(kinds, "same" if same else "right", "", proven.dumps(), is_as_solved)


def _refusal(error: Exception) -> tuple[str, str]:
    """Verdict and detail of what was raised while solving, reading or proving."""
    text = f"{type(error).__name__}: {(str(error).strip() or '-')}"
    if isinstance(error, TpplanError) and not isinstance(error, InternalError):
        return "refused", text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return "crash", text.splitlines()[0] + where


def expected_of(subject: Subject, *, in_double: bool) -> list[Outcome | None]:
    """What one process gives at the planned and the other shapes."""
    found: list[Outcome | None] = []
    for shape in ((subject.batch, subject.seq_len), *subject.others):
        try:
            found.append(step(built(subject, in_double=in_double), subject, shape, in_double=in_double))
        except Exception:
            found.append(None)
    return found


def what_is_applied(plan: Plan) -> dict[str, object]:
    """The plan's data without what only informs."""
    data = plan.to_dict()
    return {key: value for key, value in data.items() if key not in ("solver", "predicted", "notes", "proof")}


def is_whole(plan: Plan) -> bool:
    """No parameter and no activation is cut."""
    return not any(mark in str(plan.to_dict()[key]) for key in ("parameters", "boundaries") for mark in ("S(", "P ->"))


def planned(subject: Subject, how: str, salt: int, reuse: Reuse) -> Plan:
    """The subject's plan, solved as `how` says; without that where nothing fits it."""

    def solved(**options: Any) -> Plan:
        profile = options.pop("profile", None) or machine()
        return solve(
            subject.build,
            subject.inputs,
            cluster=Cluster(gpus=TP, gpus_per_node=TP, profile=profile),
            global_batch=subject.batch,
            micro_batch=subject.batch,
            seq_len=subject.seq_len,
            loss=subject.loss,
            unused_outputs=subject.unused,
            tp=TP,
            precision="fp32",
            reuse=reuse,
            **options,
        )

    rng = random.Random(f"{salt}/{how}")
    match how:
        case "memory":
            plain = solved()
            limit = rng.uniform(0.6, 0.97) * plain.predicted.peak_memory_bytes
            return _or(lambda: solved(memory_limit_bytes=limit), lambda: plain)
        case "prices":
            flop, bandwidth = 10 ** rng.uniform(8, 11), 10 ** rng.uniform(8, 10)
            rates = machine(flop_per_s=flop, bytes_per_s=bandwidth, link_bytes_per_s=10 ** rng.uniform(8, 10))
            return solved(profile=rates)
        case "slow links":
            return solved(profile=machine(link_bytes_per_s=1e8, latency_s=1e-6))
        case "recompute":
            return solved(recompute=rng.choice(("full", "selective")))
        case "wishes":
            share = rng.choice((0.1, 0.2, 0.4))
            return _or(lambda: solved(allows=wishes(str(salt), share)), solved)
    return solved()


def _or(attempt: Callable[[], Plan], otherwise: Callable[[], Plan]) -> Plan:
    try:
        return attempt()
    except InternalError:
        raise
    except TpplanError:
        return otherwise()


def wishes(salt: str, share: float) -> Callable[[ModelGraph], Allows]:
    """Forbids so large a share of all strategies, the same ones for the same salt."""

    def allows(name: str, strategy: Strategy) -> bool:
        return zlib.crc32(f"{salt} {name} {strategy}".encode()) % 1000 >= 1000 * share

    return lambda graph: allows


# ---- the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A plan to apply to a subject, and what each of these shapes should give."""

    key: Key
    plan: str
    shapes: tuple[Shape, ...]
    expected: tuple[Outcome, ...]
    in_double: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AtShape:
    """What a rank found at a shape: an error against one process, or what was raised."""

    error: float = 0.0
    worst: str = ""
    raised: str = ""
    is_own: bool = False


def on_rank(task: Task) -> list[AtShape]:
    """One step per shape on the model with the plan applied, up to the first that raises. Runs on every rank."""
    quiet()
    subject = task.key.subject()
    found: list[AtShape] = []
    try:
        model = apply_plan(built(subject, in_double=task.in_double), Plan.from_dict(json.loads(task.plan)))
        for shape, expected in zip(task.shapes, task.expected, strict=True):
            error, worst = worst_error(step(model, subject, shape, in_double=task.in_double), expected)
            found.append(AtShape(error=error, worst=worst))
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).strip() or '-')}"
        is_own = isinstance(error, TpplanError) and not isinstance(error, InternalError)
        if not is_own:
            frames = traceback.extract_tb(error.__traceback__)
            text = f"{text.splitlines()[0]} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        found.append(AtShape(raised=text[:SHOWN_CHARACTERS], is_own=is_own))
    return found


def raises(found: Sequence[AtShape]) -> bool:
    return any(each.raised for each in found)


def judged(found: Sequence[AtShape | None]) -> tuple[str, str]:
    """Verdict and detail of what all ranks found at one shape; None of one that did not come so far."""
    raised = [each for each in found if each is not None and each.raised]
    if raised and len(raised) < len(found):
        return "WRONG", f"one rank alone raises: {raised[0].raised}"
    if raised:
        return ("refused" if all(each.is_own for each in raised) else "crash"), f"on ranks: {raised[0].raised}"
    there = [each for each in found if each is not None]
    if len(there) < len(found):
        return "hang", "a rank did not come to this shape"
    worst = max(there, key=lambda each: each.error)
    said = f"error {worst.error:.1e} in {worst.worst}"
    return ("right" if worst.error <= TOLERANCE else "WRONG"), said


# ---- the keeper of a solver and of ranks


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


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


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


# ---- what is printed


def table(title: str, rows: Iterable[Row], groups: Callable[[Row], Iterable[str]]) -> Iterator[str]:
    """How many of each group came to which end."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for group in (*groups(row), "all"):
            counts.setdefault(group, Counter())[row.verdict] += 1
    if not counts:
        return
    shown = [verdict for verdict in reversed(VERDICTS) if counts["all"][verdict] or verdict in ("right", "WRONG")]
    width = max(len(title), *map(len, counts))
    yield f"{title:{width}}  " + "  ".join(f"{verdict:>7}" for verdict in shown)
    for group in sorted(counts, key=lambda name: (name == "all", name)):
        yield f"{group:{width}}  " + "  ".join(f"{counts[group][verdict]:>7}" for verdict in shown)


def first_class(detail: str) -> str:
    """The exception's name in a row's detail."""
    return next((word for word in detail.replace(":", " ").split() if word.endswith("Error")), detail[:40])


def summary(rows: Mapping[str, Row]) -> Iterator[str]:
    """Tables of models, of mutants and of traps, and all that went wrong."""
    models = [row for name, row in rows.items() if name.startswith("model")]
    plans = [row for name, row in rows.items() if name.startswith("plan")]
    traps = [row for name, row in rows.items() if name.startswith("trap")]
    yield from table("models by how they are solved", models, lambda row: (row.group,) if row.group else ())
    others = Counter(shape.split(": ")[1] for row in models for shape in row.shapes[1:])
    if models:
        yield "other batches and lengths: " + ", ".join(f"{n} {verdict}" for verdict, n in others.most_common())
    refused = Counter(first_class(row.detail) for row in models if row.verdict == "refused")
    if refused:
        yield "models refused: " + ", ".join(f"{n} {name}" for name, n in refused.most_common())
    yield from ("", *table("mutated plans by kind", plans, lambda row: sorted(set(row.group.split("+")) - {""})))
    yield from ("", *table("traps", traps, lambda row: ()))
    for row in traps:
        yield f"    {row.name.removeprefix('trap ')}: {row.verdict}: {row.detail[:SHOWN_CHARACTERS]}"
    for row in rows.values():
        if row.verdict in ("WRONG", "hang", "crash", "slow"):
            yield f"{row.verdict}: {row.name}: {row.group}: {row.detail[:SHOWN_CHARACTERS]}"
            yield from (f"    {shape[:SHOWN_CHARACTERS]}" for shape in row.shapes)


def exit_code(rows: Iterable[Row]) -> int:
    verdicts = {row.verdict for row in rows}
    return 4 if verdicts & {"WRONG", "hang"} else 1 if "crash" in verdicts else 0


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

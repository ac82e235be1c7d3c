"""The process of scripts/evidence/adversary.py that solves, mutates and proves."""

import json
import random
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_up_machine import machine

from adversary_parts.models import Subject
from adversary_parts.plans import mutated
from adversary_parts.steps import Key, Outcome, expected_of, quiet
from tpplan.core.errors import InternalError, TpplanError
from tpplan.core.graph import ModelGraph
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.planner import solve
from tpplan.search.points.options import Allows, Cluster
from tpplan.verify.prove_plan import prove_plan

TP = 2


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

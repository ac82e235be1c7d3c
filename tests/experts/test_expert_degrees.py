"""The number of ranks that divide experts is decided: held against a search of each degree alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from moe_models import LENGTH, OwnMoe, hugging_face, loss, text
from torch import nn

import tpplan
from profiles import synthetic_profile
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, ProofStatus, SolverReport
from tpplan.prove.counterexample import Counterexample
from tpplan.search import best_first, branch_and_bound
from tpplan.search.branch_and_bound import NO_LAYOUT, SAME
from tpplan.search.models.trace_cache import Reuse, Traced
from tpplan.search.points.point_solver import Candidate, PointSolver
from tpplan.solvers.problem import Status

GPUS = 4
#: every degree that four experts, or a multiple of four, allow in a node of GPUS
DEGREES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model and a machine, solved under several limits and degrees with the same traces."""

    build: Callable[[], nn.Module]
    latency_s: float = 1e-6
    options: dict[str, Any]
    reuse: Reuse = field(default_factory=Reuse)
    known: dict[int, float] = field(default_factory=dict)

    def solved(self, ep: int | None, limit: float | None = None, **options: Any) -> Plan:
        machine = synthetic_profile(latency_s=self.latency_s, launch_s=1e-7, intra_bytes_per_s=3e10)
        profile = HardwareProfile.from_dict({**machine, "device_type": "cpu"}, origin="synthetic")
        return tpplan.solve(
            self.build,
            text,
            cluster=tpplan.Cluster(gpus=GPUS, gpus_per_node=GPUS, profile=profile),
            global_batch=4,
            seq_len=LENGTH,
            loss=loss,
            ep=ep,
            precision="fp32",
            memory_limit_bytes=limit,
            reuse=self.reuse,
            **{"prove": False, **self.options, **options},
        )

    def needed(self, ep: int) -> float:
        """The least bytes that any plan with this degree takes."""
        if ep not in self.known:
            with pytest.raises(InfeasibleError) as error:
                self.solved(ep, 1.0)
            self.known[ep] = error.value.needed_bytes
        return self.known[ep]


def tiny_mixtral() -> nn.Module:
    pytest.importorskip("transformers")
    return hugging_face("Mixtral")()


CASES = {
    "large experts": Case(build=partial(OwnMoe, experts=16, dim=128), options={"all_gpus": True, "tp": 1}),
    "on fewer GPUs too": Case(build=partial(OwnMoe, experts=8, dim=128, layers=1), options={}),
    "slow collectives": Case(
        build=OwnMoe,
        latency_s=1e-3,
        options={"all_gpus": True, "micro_batch": 1, "recompute": "none", "reshard_after_forward": True},
    ),
    "Mixtral": Case(build=tiny_mixtral, options={"fsdp": 4, "all_gpus": True}),
}


def num_points(report: SolverReport) -> int:
    return report.meshes_tried + sum(report.skipped.values())


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_fastest_of_all_degrees(name: str) -> None:
    """Without a limit, and with limits within which one degree has plans, then two, then all."""
    case = CASES[name]
    needed = {ep: case.needed(ep) for ep in DEGREES}
    num_of_all = sum(num_points(case.solved(ep).solver) for ep in DEGREES)
    for limit in (math.inf, *(least * 1.01 for least in needed.values())):
        fitting = [ep for ep in DEGREES if needed[ep] <= limit]
        fastest = min(case.solved(ep, limit).solver.objective_s for ep in fitting)
        report = case.solved(None, limit).solver
        assert report.objective_s == pytest.approx(fastest, rel=SAME)
        assert report.status is Status.OPTIMAL
        assert 0.0 <= report.gap <= SAME
        assert num_points(report) == num_of_all


@pytest.mark.parametrize("name", ["large experts", "Mixtral"])
def test_the_first_plan_that_is_looked_at_is_about_the_fastest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those on all GPUs, where memory binds too."""
    case, look, found = CASES[name], best_first._looked_at, list[float]()

    def noted(*arguments: Any) -> Candidate | float:
        seen = look(*arguments)
        if isinstance(seen, Candidate) and seen.solution.objective is not None:
            found.append(seen.solution.objective)
        return seen

    monkeypatch.setattr(best_first, "_looked_at", noted)
    for limit in (math.inf, case.needed(4) * 1.1):
        found.clear()
        fastest = case.solved(None, limit).solver.objective_s
        assert fastest <= found[0] <= 1.05 * fastest


@pytest.mark.parametrize("name", ["large experts", "slow collectives"])
def test_where_no_degree_fits_the_error_is_of_the_one_that_needs_least(name: str) -> None:
    case = CASES[name]
    needed = {ep: case.needed(ep) for ep in DEGREES}
    least = min(needed, key=lambda ep: needed[ep])
    limit = needed[least] * 0.98
    with pytest.raises(InfeasibleError, match="no plan fits") as error:
        case.solved(None, limit)
    with pytest.raises(InfeasibleError) as alone:
        case.solved(least, limit)
    assert str(error.value) == str(alone.value)
    assert error.value.needed_bytes == needed[least]
    assert error.value.remedies
    assert all(remedy.peak_bytes <= limit for remedy in error.value.remedies)


def test_where_nothing_of_a_degree_can_be_proven_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["large experts"]
    fastest = {ep: case.solved(ep).solver.objective_s for ep in DEGREES}
    prove = branch_and_bound.put_to_proof
    assert fastest[4] < fastest[2] < fastest[1]

    def refute(solver: PointSolver, traced: Traced, plan: Plan, assignment: Assignment) -> object:
        return (
            Counterexample(message="made up", blamed=())
            if plan.mesh.ep == 4
            else prove(solver, traced, plan, assignment)
        )

    def forbid(
        solver: PointSolver, found: Counterexample, _: Assignment, formulation: Formulation, *__: object
    ) -> None:
        name = next(iter(formulation.space.deciders))
        solver.cuts.cut(formulation.space, name, formulation.space.strategies[name])
        solver.cuts.messages.append(found.message)

    monkeypatch.setattr(branch_and_bound, "put_to_proof", refute)
    monkeypatch.setattr(branch_and_bound, "culprit_of", lambda _: None)
    monkeypatch.setattr(branch_and_bound, "forbid", forbid)
    plan = case.solved(None, prove=True)
    assert plan.mesh.ep == 2
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.rounds == 2
    assert plan.solver.objective_s == pytest.approx(fastest[2], rel=SAME)
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.skipped[NO_LAYOUT] == 1
    assert num_points(plan.solver) == 6


class Sparse(OwnMoe):
    """Gradients of the embedding are sparse, and FSDP2, which shards divided experts, takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16, sparse=True)


@pytest.mark.filterwarnings("ignore:aten.embedding")
def test_where_no_division_can_be_laid_out_experts_stay_whole() -> None:
    case = Case(build=Sparse, options={"all_gpus": True, "micro_batch": 1, "optimizer": "sgd"})
    plan = case.solved(None)
    assert plan.experts is None
    assert plan.mesh.shard == 1
    with pytest.raises(UsageError, match="at most 1 ranks shard the model here"):
        case.solved(2)

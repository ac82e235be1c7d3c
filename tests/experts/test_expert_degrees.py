"""The number of ranks that divide experts is decided: held against a search of each degree alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
from moe_models import LENGTH, OwnMoe, hugging_face, loss, text
from torch import nn

import tpplan
from profiles import synthetic_profile
from tpplan.core.errors import InfeasibleError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, SolverReport
from tpplan.search.branch_and_bound import SAME
from tpplan.search.points.trace_cache import Reuse
from tpplan.solvers.problem import Status

GPUS = 4
#: every degree that four experts, or a multiple of four, allow in a node of GPUS
DEGREES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a machine, solved under several limits and degrees with the same traces."""

    build: Callable[[], nn.Module]
    latency_s: float
    options: dict[str, Any] = field(default_factory=dict)
    reuse: Reuse = field(default_factory=Reuse)

    def solved(self, ep: int | None, limit: float | None, **options: Any) -> Plan:
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

    @cache  # noqa: B019
    def needed(self, ep: int) -> float:
        """The least bytes that any plan with this degree takes."""
        with pytest.raises(InfeasibleError) as error:
            self.solved(ep, 1.0)
        return error.value.needed_bytes

    def __hash__(self) -> int:
        return id(self)


CASES = {
    "few large experts": Case(
        build=partial(OwnMoe, experts=4, dim=256), latency_s=1e-6, options={"all_gpus": True, "tp": 1}
    ),
    "more experts, on fewer GPUs too": Case(build=partial(OwnMoe, experts=8, dim=128, layers=1), latency_s=1e-6),
    "slow collectives": Case(
        build=partial(OwnMoe, layers=1), latency_s=1e-3, options={"all_gpus": True, "micro_batch": 1}
    ),
    "Mixtral": Case(build=lambda: hugging_face("Mixtral")(), latency_s=1e-6, options={"fsdp": 4, "all_gpus": True}),
}


def num_points(report: SolverReport) -> int:
    return report.meshes_tried + sum(report.skipped.values())


def assert_optimal_over(case: Case, limit: float | None) -> None:
    each: dict[int, Plan] = {}
    for ep in DEGREES:
        try:
            each[ep] = case.solved(ep, limit)
        except InfeasibleError:
            assert limit is not None
            assert case.needed(ep) > limit
    plan = case.solved(None, limit)
    fastest = min(each.values(), key=lambda own: own.solver.objective_s)
    report = plan.solver
    assert report.objective_s == pytest.approx(fastest.solver.objective_s, rel=SAME)
    assert report.status is Status.OPTIMAL
    assert report.gap <= SAME
    assert report.bound_s <= report.objective_s
    assert all(count > 0 for count in report.skipped.values())


@pytest.mark.parametrize("name", CASES)
def test_the_fastest_of_all_degrees_is_found(name: str) -> None:
    case = CASES[name]
    if name == "Mixtral":
        pytest.importorskip("transformers")
    every = num_points(case.solved(None, None).solver)
    assert every == sum(num_points(case.solved(ep, None).solver) for ep in DEGREES)
    least = sorted(case.needed(ep) for ep in DEGREES)
    for limit in (None, *(needed * factor for needed in least for factor in (1.01, 1.2))):
        assert_optimal_over(case, limit)
        assert num_points(case.solved(None, limit).solver) == every


@pytest.mark.parametrize("name", ["few large experts", "more experts, on fewer GPUs too"])
def test_where_no_degree_fits_the_error_is_of_the_one_that_needs_least(name: str) -> None:
    case = CASES[name]
    least = min(case.needed(ep) for ep in DEGREES)
    with pytest.raises(InfeasibleError, match="no plan fits") as error:
        case.solved(None, least * 0.99)
    assert error.value.needed_bytes == pytest.approx(least, rel=1e-2)
    assert error.value.remedies
    assert min(remedy.peak_bytes for remedy in error.value.remedies) <= least * 0.99

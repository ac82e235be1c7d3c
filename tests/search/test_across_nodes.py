"""Tensor parallelism across nodes: groups as the network sees them, and where it wins without being asked for."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import machine, solve_example
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import SolverError, UsageError
from tpplan.core.mesh import AXES, Axis, Mesh, divisors, tp_degrees
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.plan.report import render
from tpplan.search import planner
from tpplan.search.best_first import Progress, _explore_size
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.point_solver import Candidate
from tpplan.search.points.unsearched import WITHOUT_UNITS_OVER_TP
from tpplan.solvers.problem import Solution, Status

NUM_TABLES, ROWS, WIDTH = 4, 2**22, 128


def groups_of(mesh: Mesh, axis: Axis) -> list[list[int]]:
    """The ranks of each group of an axis, from the numbers of ranks alone."""
    ranks = torch.arange(mesh.num_gpus).reshape(mesh.replicate, mesh.shard, mesh.tp)
    return ranks.movedim(list(AXES).index(axis), -1).reshape(-1, mesh.size(axis)).tolist()


@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("gpus", [6, 8, 12, 16, 24, 36, 48])
def test_a_group_is_priced_by_the_node_that_has_fewest_of_it(gpus: int, gpus_per_node: int) -> None:
    """Counted over every group of every mesh: also those whose groups lie across the borders of nodes unevenly."""
    for tp in divisors(gpus):
        for shard in divisors(gpus // tp):
            mesh = Mesh(replicate=gpus // tp // shard, shard=shard, tp=tp)
            for axis in AXES:
                nodes = [Counter(rank // gpus_per_node for rank in group) for group in groups_of(mesh, axis)]
                found = mesh.group(axis, gpus_per_node)
                assert found.ranks == mesh.size(axis)
                assert (found.nodes > 1) == any(len(own) > 1 for own in nodes), (mesh, axis)
                fewest = min(count for own in nodes for count in own.values())
                # A stride may pass over nodes between: what lies there is at most one rank more or less than counted.
                assert fewest - 1 <= found.ranks_per_node <= fewest, (mesh, axis)


def test_degrees_fill_whole_nodes() -> None:
    assert tp_degrees(24, 8, across_nodes=True) == (1, 2, 4, 8, 24)
    assert tp_degrees(24, 8, across_nodes=False) == (1, 2, 4, 8)
    assert tp_degrees(64, 8, across_nodes=True) == (1, 2, 4, 8, 16, 32, 64)


class Recommender(nn.Module):
    """Tables of many rows, of which a sample reads one each, and a small MLP on what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(NUM_TABLES))
        self.hidden = nn.Linear(NUM_TABLES * WIDTH, 256)
        self.head = nn.Linear(256, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=-1)
        return self.head(torch.relu(self.hidden(rows))).square().mean()


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, ROWS, (batch, NUM_TABLES))}


def solved(profile: HardwareProfile, **options: object) -> Plan:
    return tpplan.solve(
        Recommender,
        inputs,
        cluster=tpplan.Cluster(gpus=16, gpus_per_node=4, profile=profile),
        global_batch=64,
        seq_len=1,
        **{"micro_batch": 4, "all_gpus": True, **options},  # type: ignore[arg-type]
    )


def test_tables_are_spread_over_all_nodes_without_being_told() -> None:
    """Rows are read where they lie: gathering the tables, or reducing their gradients, moves far more."""
    profile = machine(gpus_per_node=4)
    plan = solved(profile)
    assert plan.solver.status is Status.OPTIMAL
    assert plan.mesh_degrees.tp == 16
    assert plan.mesh.group(Axis.TP, 4).nodes == 4
    tables = [own for name, own in plan.parameter_plans().items() if name.startswith("tables.")]
    assert all(str(own.placement).startswith("S(") for own in tables)
    seconds = {tp: solved(profile, tp=tp, prove=False).predicted.step_time_s for tp in divisors(16)}
    assert plan.predicted.step_time_s == pytest.approx(min(seconds.values()), rel=1e-9)
    assert plan.predicted.step_time_s < 0.8 * min(seconds[tp] for tp in (1, 2, 4))
    # Of all meshes at once: what stands for a degree is its best one.
    assert min(seconds, key=lambda tp: seconds[tp]) == 16


def test_conversions_across_nodes_take_the_time_of_links_between_nodes() -> None:
    """The same plan on machines that differ in nothing but the links across nodes: those of tp count."""
    slow, fast = (machine(gpus_per_node=4, inter_bytes_per_s=rate) for rate in (1e8, 1e11))
    seconds = [
        solved(profile, tp=16, prove=False).predicted.time_s["tensor-parallel collectives"] for profile in (slow, fast)
    ]
    assert seconds[0] > 2 * seconds[1]


def test_looked_at_again_no_wider_groups_are_tried() -> None:
    """tp 16 is too slow from the first look on, by its bound; tp 32 was left out for that, and stays so."""
    every = inside, _, wide = [Point(32, tp, 1, 1) for tp in (8, 16, 32)]
    floors, tried = {8: 1.0, 16: 3.0, 32: 2.0}, list[int]()
    solver: Any = SimpleNamespace(
        request=SimpleNamespace(cluster=SimpleNamespace(gpus_per_node=8), report=lambda *_: None),
        priced=lambda micro_batch, tp: tried.append(tp),
        has_floor=lambda point: True,
        floor=lambda point: floors[point.tp],
    )
    solution = Solution(status=Status.OPTIMAL, solver="none", choice={}, objective=2.5, bound=2.5)
    formulation: Any = None
    known = Progress(solved={inside: Candidate(point=inside, formulation=formulation, solution=solution)})
    _explore_size(solver, [inside, wide], every, known, 0, len(every))
    assert tried == [8]
    assert known.too_wide == {wide}


def test_a_profile_of_one_node_says_that_tp_across_nodes_was_not_searched() -> None:
    """Without all-to-all across nodes no such mesh can be priced: the plan names the profile and what it lacks."""
    whole = machine(gpus_per_node=4)
    kept = tuple(t for t in whole.collectives if t.kind is not Collective.ALL_TO_ALL or t.group.nodes == 1)
    plan = solved(replace(whole, name="half", collectives=kept))
    assert plan.mesh_degrees.tp <= 4
    reason, *others = plan.solver.unsearched or ()
    assert set(others) <= {WITHOUT_UNITS_OVER_TP}
    assert reason == "tp across nodes: profile half has no all_to_all across nodes"
    assert reason in " ".join(render(plan, width=200).split())
    assert Plan.from_dict(plan.to_dict()) == plan


def test_nothing_is_left_out_where_a_node_is_all() -> None:
    plan = solve_example("mlp", machine(), gpus=4, fsdp_over_tp=False)
    assert plan.solver.unsearched is None


def test_layers_over_shard_and_tp_that_no_mesh_can_have_are_refused() -> None:
    with pytest.raises(UsageError, match=r"fsdp_over_tp=True needs .* 4 GPUs with tp=4 has: leave it out, or pin"):
        solve_example("mlp", machine(), gpus=4, tp=4, fsdp_over_tp=True)


@pytest.mark.parametrize(("is_wanted", "lines"), [(None, (WITHOUT_UNITS_OVER_TP,)), (False, None)])
def test_a_plan_says_that_no_layer_over_shard_and_tp_was_searched(
    is_wanted: bool | None, lines: tuple[str, ...] | None
) -> None:
    """Where the fastest plan cuts all layers on tp, unless such layers were not to be searched."""
    plan = solve_example("mlp", machine(), gpus=4, fsdp_over_tp=is_wanted)
    assert not plan.may_have_units_over_tp()
    assert plan.solver.unsearched == lines


def test_a_plan_is_kept_where_the_search_over_shard_and_tp_ends_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search is asked for by a plan whose layers tp replicates, and fails."""
    first, searches = planner.search, []

    def search(*args: Any, **options: Any) -> Plan:
        searches.append(args)
        if len(searches) > 1:
            raise SolverError("no plan could be proven in 50 rounds\nof many words")
        return first(*args, **options)

    monkeypatch.setattr(planner, "search", search)
    monkeypatch.setattr(Plan, "may_have_units_over_tp", lambda self: True)
    plan = solve_example("mlp", machine(), gpus=4)
    assert len(searches) == 2
    assert plan.proof.status == "proven"
    assert plan.solver.unsearched == ("FSDP over shard x tp: no plan could be proven in 50 rounds",)

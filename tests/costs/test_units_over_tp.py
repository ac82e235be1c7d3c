"""Layers that FSDP shards over the shard and tp axes together: decided in the ILP, priced, said, and pinned."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from examples import FOLDER, eager_to_shard, example, machine, solve_example
from test_peaks import EXECUTOR, chosen, excesses, formulated, llama

import tpplan
from tpplan import solvers
from tpplan.commands import main
from tpplan.core.errors import ExportError, InfeasibleError
from tpplan.core.layout import R
from tpplan.core.mesh import GroupShape, Mesh
from tpplan.costs.step.cost_table import price_space
from tpplan.machine.profile import Collective
from tpplan.plan.parts import STATES, TP_REDUCTION
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.report import render
from tpplan.plan.report.sentences import sentences
from tpplan.verify.checks import Outcome
from tpplan.verify.shrink import on_mesh
from tpplan.verify.verify import verify_plan

MESH = {"gpus": 4, "tp": 2, "fsdp": 2, "global_batch": 8, "micro_batch": 2}


def solved(*, over_tp: bool | None, name: str = "gpt", **options: object) -> Plan:
    return solve_example(name, eager_to_shard(), fsdp_over_tp=over_tp, **{**MESH, **options})


@pytest.fixture(scope="module")
def wide() -> Plan:
    return solved(over_tp=True)


# ---- the ILP


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation_steps": 1},
        {"accumulation_steps": 3},
        {"accumulation_steps": 3, "whole_gradients": True},
        {"precision": Precision.BF16_MIXED, "optimizer": "adamw-foreach"},
    ],
    ids=["one", "three", "whole", "mixed"],
)
@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize("mesh", [Mesh(shard=2, tp=2), Mesh(shard=4, tp=2, replicate=2)], ids=str)
def test_a_choice_costs_its_assignment_and_needs_no_more_memory(
    mesh: Mesh, size: int, settings: dict[str, object]
) -> None:
    """`excesses` compares prices, and the memory rows with the step gone through."""
    formulation = formulated(llama(batch=1, hidden_dim=size), mesh, fsdp_over_tp=True, **settings)
    assert min(excesses(formulation, random.Random(size), 2)) >= -1e-9


def test_the_optimum_is_the_better_of_both_treatments() -> None:
    """All layers of the model are alike: they are over both axes, or over shard. Where sharding pays they are divided
    by tp, unless memory binds."""
    chosen_over_tp = set()
    for batch, profile, limit in itertools.product((1, 8), (machine(), eager_to_shard()), (1.2e6, 1.6e6, 1e9)):
        formulation = formulated(llama(batch=batch), Mesh(shard=2, tp=2))
        found = {}
        for wanted in (None, True, False):
            setting = replace(formulation.setting, fsdp_over_tp=wanted, memory_limit_bytes=limit)
            priced = price_space(formulation.space, profile, 4, EXECUTOR)
            own = replace(formulation, priced=priced, setting=replace(setting, profile=profile))
            found[wanted] = solvers.solve(own.problem).objective or math.inf
        assert found[None] == pytest.approx(min(found[True], found[False]), rel=1e-6)
        if found[True] != found[False]:
            chosen_over_tp.add(found[True] < found[False])
    assert chosen_over_tp == {True, False}


def test_a_layer_over_both_axes_is_whole_on_tp() -> None:
    formulation = formulated(llama(batch=1), Mesh(shard=2, tp=2), fsdp_over_tp=True)
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    assignment = formulation.assignment(choice)
    assert assignment.over_tp == {"layers.0", "layers.1", "layers.2"}
    for source in assignment.graph.parameters:
        assert assignment.placement(source) == R or source.label not in assignment.sources_over_tp


def test_a_gather_takes_what_the_profile_says_of_all_ranks() -> None:
    """On nodes of two GPUs: tp inside a node, shard and both together across two of them."""
    formulation = formulated(llama(batch=1), Mesh(shard=2, tp=2), fsdp_over_tp=True)
    formulation = replace(formulation, setting=replace(formulation.setting, gpus_per_node=2))
    choice = solvers.solve(formulation.problem).choice
    unit = formulation.groups.units[0]
    elements = sum(formulation.space.graph.values[source.result].num_elements for source in unit.parameters)
    gather, scatter, reduce = (e.value(choice) for e in formulation.objective.fsdp_communication.collectives_of(unit))
    profile, group = formulation.setting.profile, GroupShape(ranks=4, ranks_per_node=2)
    assert gather == pytest.approx(profile.collective(Collective.ALL_GATHER, group, 4 * elements).seconds)
    assert scatter == pytest.approx(profile.collective(Collective.REDUCE_SCATTER, group, 4 * elements).seconds)
    assert reduce == 0


@pytest.mark.parametrize("mesh", [Mesh(shard=4), Mesh(tp=2), Mesh(replicate=2, tp=2)], ids=str)
def test_it_needs_both_axes(mesh: Mesh) -> None:
    formulation = formulated(llama(batch=1), mesh, fsdp_over_tp=True)
    assert not formulation.groups.over_tp.is_possible
    assert formulation.problem.nodes is formulation.priced.nodes()


def test_bounds_beside_kernels_are_below_every_choice() -> None:
    formulation = formulated(llama(batch=1), Mesh(shard=2, tp=2))
    narrow, wide = (
        replace(formulation, setting=replace(formulation.setting, fsdp_over_tp=own)) for own in (False, True)
    )
    assert formulation.beside_s <= min(narrow.beside_s, wide.beside_s) * (1 + 1e-9)
    rng = random.Random(0)
    for _ in range(20):
        choice = chosen(formulation, rng)
        beside = sum(term.value(choice) for term in formulation.objective.beside)
        assert formulation.beside_s <= beside * (1 + 1e-9)


# ---- plans


def test_ranks_issue_what_the_plan_lists_and_equal_one_process(wide: Plan) -> None:
    """Loss, gradients, collectives and memory, on real ranks and on fakes."""
    assert wide.fsdp.over_tp == ("layers.*",)
    checks = verify_plan(wide, str(FOLDER / "gpt.py"))
    assert {check.name: check.outcome for check in checks.checks} == dict.fromkeys(
        ("proof", "parameters", "loss", "gradients", "collectives", "memory"), Outcome.PASS
    )


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"precision": "bf16-mixed"}], ids=str)
def test_a_plan_costs_what_its_solver_said(options: dict[str, object]) -> None:
    plan = solved(over_tp=True, prove=False, **options)
    module = example("gpt")
    priced = tpplan.price(plan, module.build_model, module.example_inputs, profile=eager_to_shard(), loss=module.loss)
    assert priced.predicted == plan.predicted
    assert priced.collectives == plan.collectives
    assert priced.predicted.step_time_s == pytest.approx(plan.solver.objective_s)


def test_it_gathers_over_both_axes_and_sums_nothing_over_tp(wide: Plan) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for row in wide.collectives:
        if row.where.startswith("layers"):
            found[row.kind, str(row.axis)] += row.count
    assert {axis for kind, axis in found if kind in ("all_gather", "reduce_scatter")} == {"shard_tp", "tp"}
    layers, steps = 2, wide.batch.accumulation_steps
    assert found["all_gather", "shard_tp"] == 2 * layers * steps
    assert found["reduce_scatter", "shard_tp"] == layers * steps
    narrow = replace(wide, fsdp=replace(wide.fsdp, over_tp=None))
    module = example("gpt")
    arguments = module.build_model, module.example_inputs
    other = tpplan.price(narrow, *arguments, profile=eager_to_shard(), loss=module.loss)
    own = wide.predicted
    assert own.time_s[TP_REDUCTION] < 0.1 * other.predicted.time_s[TP_REDUCTION]
    assert own.memory_bytes[STATES] < 0.8 * other.predicted.memory_bytes[STATES]


def test_it_is_chosen_where_memory_binds_and_can_be_forbidden() -> None:
    """Layers on slices of tokens are pinned, so that tp replicates their weights: their states do not fit."""
    pins = {"layers.*": "sequence"}
    plain = solved(over_tp=False, pins=pins, prove=False)
    assert plain.fsdp.over_tp is None
    limit = 0.9 * (plain.predicted.peak_memory_bytes + plain.predicted.slack_bytes)
    assert solved(over_tp=None, pins=pins, memory_limit_bytes=limit, prove=False).fsdp.over_tp == ("layers.*",)
    with pytest.raises(InfeasibleError):
        solved(over_tp=False, pins=pins, memory_limit_bytes=limit, prove=False)


def test_it_is_decided_where_tp_replicates_the_weights_of_layers() -> None:
    """Layers on slices of tokens are pinned; else tp divides the layers, and nothing is looked at again."""
    pins = {"layers.*": "sequence"}
    seconds = {
        wanted: solved(over_tp=wanted, pins=pins, prove=False).predicted.step_time_s for wanted in (None, True, False)
    }
    assert seconds[True] != pytest.approx(seconds[False], rel=1e-6)
    assert seconds[None] == pytest.approx(min(seconds[True], seconds[False]))
    assert solved(over_tp=None, pins={"layers.*": "megatron"}, prove=False).fsdp.over_tp is None


def test_it_is_said(wide: Plan) -> None:
    text = render(wide, width=200)
    assert "over shard x tp: layers.0-1" in text
    assert "shard_tp: 4 ranks of shard and tp together" in text
    said = " ".join(sentences(wide, lambda key: key.startswith("layers"), lambda entry: None))
    assert "FSDP: each of 4 ranks, of shard and tp together, keeps 1/4 of the weights of layers.*" in said


def test_other_forms_refuse_it(wide: Plan) -> None:
    module = example("gpt")
    for form in ("pytorch", "sharding-specs"):
        with pytest.raises(ExportError, match="sharded over the shard and tp axes together"):
            tpplan.export(wide, module.build_model, module.example_inputs, loss=module.loss, to=form)


def test_fewer_ranks_without_shards_have_none(wide: Plan) -> None:
    assert on_mesh(wide, Mesh(shard=2, tp=2)).fsdp.over_tp
    smaller = on_mesh(wide, Mesh(tp=2))
    assert smaller.fsdp.over_tp is None
    assert Plan.from_dict(smaller.to_dict()) == smaller


@pytest.mark.parametrize(("word", "expected"), [("yes", ("layers.*",)), ("no", None)])
def test_the_command_line_pins_it(tmp_path: Path, word: str, expected: tuple[str, ...] | None) -> None:
    file = tmp_path / "plan.json"
    degrees = ["--gpus", "4", "--tp", "2", "--fsdp", "2", "--profile", "cpu-gloo"]
    options = [*degrees, "--global-batch", "8", "--seq-len", "32", "--no-prove", "--fsdp-over-tp", word]
    assert main(["solve", str(FOLDER / "gpt.py"), *options, "-o", str(file)]) == 0
    assert Plan.load(file).fsdp.over_tp == expected

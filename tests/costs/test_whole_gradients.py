"""Gradients kept whole between micro-batches: the plan says so, ranks do so, and price and collectives follow."""

import json
from collections import Counter

import pytest
from examples import FOLDER, eager_to_shard, example, solve_example

import tpplan
from tpplan.plan.parts import ACCUMULATION, DATA_PARALLEL, FSDP_COPIES
from tpplan.plan.plan import Plan
from tpplan.plan.report import render
from tpplan.search.points.options import Options
from tpplan.verify.checks import Outcome
from tpplan.verify.verify import verify_plan

STEPS = 3
MESH = {"gpus": 4, "tp": 2, "fsdp": 2, "global_batch": 2 * 2 * STEPS, "micro_batch": 2}


def solved(*, whole: bool, **options: object) -> Plan:
    return solve_example("gpt", eager_to_shard(), whole_gradients=whole, **{**MESH, **options})


@pytest.fixture(scope="module")
def whole() -> Plan:
    return solved(whole=True)


def counts(plan: Plan) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in plan.collectives:
        found[f"{row.axis} {row.kind}"] += row.count
    return found


def test_ranks_reduce_once_a_step_and_equal_one_process(whole: Plan) -> None:
    """Loss, gradients, collectives and memory, on real ranks."""
    assert whole.batch.accumulation_steps == STEPS
    checks = verify_plan(whole, str(FOLDER / "gpt.py"))
    assert {check.name: check.outcome for check in checks.checks} == dict.fromkeys(
        ("proof", "parameters", "loss", "gradients", "collectives", "memory"), Outcome.PASS
    )
    sharded = solved(whole=False, prove=False)
    ours, theirs = counts(whole), counts(sharded)
    assert ours.pop("shard reduce_scatter") * STEPS == theirs.pop("shard reduce_scatter")
    assert ours == theirs


def test_it_is_in_plan_and_report_where_it_is_asked_for(whole: Plan) -> None:
    assert Plan.from_dict(json.loads(whole.dumps())).fsdp.whole_gradients
    words = "gradients whole between micro-batches, reduced once a step"
    assert words in render(whole, width=200)
    sharded = solved(whole=False, prove=False)
    assert sharded.fsdp.whole_gradients is None
    assert words not in render(sharded, width=200)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"precision": "bf16-mixed"}], ids=str)
def test_a_plan_costs_what_its_solver_said(options: dict[str, object]) -> None:
    plan = solved(whole=True, prove=False, **options)
    module = example("gpt")
    priced = tpplan.price(plan, module.build_model, module.example_inputs, profile=eager_to_shard(), loss=module.loss)
    assert priced.predicted == plan.predicted
    assert priced.collectives == plan.collectives
    assert priced.predicted.step_time_s == pytest.approx(plan.solver.objective_s)


def test_fewer_reductions_take_less_time_and_adding_more() -> None:
    """Of one micro-batch, nothing changes."""
    whole, sharded = (solved(whole=own, prove=False).predicted.time_s for own in (True, False))
    assert whole[DATA_PARALLEL] < sharded[DATA_PARALLEL]
    assert whole[FSDP_COPIES] < sharded[FSDP_COPIES]
    assert whole[ACCUMULATION] == pytest.approx(2 * sharded[ACCUMULATION])
    one, other = (solved(whole=own, prove=False, global_batch=4) for own in (True, False))
    assert one.predicted == other.predicted
    assert one.collectives == other.collectives


def test_it_is_off_unless_asked_for() -> None:
    assert not Options().whole_gradients

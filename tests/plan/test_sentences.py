"""Sentences on modules of a plan: each number in them is one of the plan's."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from test_report import BOUNDARIES, DIM, HIDDEN, PARAMETERS, boundary, make_plan, parameter

from tpplan.core.layout import P, R, S
from tpplan.core.mesh import Axis
from tpplan.core.units import MIB
from tpplan.plan.plan import CollectivePlan, Pass, Plan, Recompute
from tpplan.plan.report.glossary import GLOSSARY, glossary_lines
from tpplan.plan.report.sentences import sentences
from tpplan.plan.styles import Style
from tpplan.plan.tp_shares import TpShares


def collective(where: str, kind: str, axis: Axis, during: Pass, count: int = 32) -> CollectivePlan:
    return CollectivePlan(
        where=where, kind=kind, axis=axis, during=during, dtype="bfloat16", num_bytes=64 * MIB, count=count
    )


COLLECTIVES = (
    collective("layers.*.feed_forward.down_proj", "reduce_scatter", Axis.TP, Pass.FORWARD),
    collective("layers.*.feed_forward.down_proj", "all_gather", Axis.TP, Pass.BACKWARD),
    collective("layers.*", "all_gather", Axis.SHARD, Pass.FORWARD),
    collective("<root>", "all_gather", Axis.SHARD, Pass.FORWARD, 1),
)
MORE = {f"layers.*.attention.{name}_proj.weight": parameter(S(0), DIM, DIM) for name in "qkv"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return replace(make_plan(parameters=PARAMETERS | MORE), collectives=COLLECTIVES)


def said(plan: Plan, prefix: str) -> list[str]:
    return list(sentences(plan, lambda module: module.startswith(prefix), lambda entry: 2.1e-4))


def test_columns_talk_to_no_one_and_rows_add_up(plan: Plan) -> None:
    """Of 4 ranks each has a quarter of the outputs by columns, of the inputs by rows."""
    assert said(plan, "layers.*.attention.")[0] == (
        f"layers.*.attention.k_proj, q_proj and v_proj: split by columns: from the whole input each of 4 GPUs computes "
        f"{DIM // 4} of {DIM} outputs, and sends nothing."
    )
    assert said(plan, "layers.*.feed_forward.down_proj")[0] == (
        f"layers.*.feed_forward.down_proj: split by rows: each of 4 GPUs has {HIDDEN // 4} of {HIDDEN} inputs, and "
        "what it computes from them is a summand of the whole output; forward, one reduce-scatter of 64.0 MiB, 210 us "
        "(32 in a step); backward, one all-gather of 64.0 MiB, 210 us (32 in a step)."
    )


def test_a_fused_weight_is_split_by_columns_though_a_module_inside_gives_summands(plan: Plan) -> None:
    """What the module returns are summands of its child's rows."""
    fused = parameter(S(0), 3 * DIM, DIM, read=replace(S(0), parts=(DIM, DIM, DIM)))
    inside = parameter(S(1), DIM, DIM)
    own = replace(
        plan,
        parameters={"attention.in_proj_weight": fused, "attention.out_proj.weight": inside},
        boundaries={"attention": boundary(outputs={"output": (P, R)})},
        collectives=(),
    )
    assert said(own, "attention")[0].startswith("attention: split by columns")


def test_heads_are_counted_where_the_plan_knows_them(plan: Plan) -> None:
    """32 query heads and 8 of keys and values on 4 GPUs, of which a fused weight has all in three parts."""
    heads = {f"layers.*.attention.{name}_proj.weight": (32,) for name in "qkv"}
    assert said(with_heads(plan, heads), "layers.*.attention.")[0] == (
        f"layers.*.attention.k_proj, q_proj and v_proj: split by columns: from the whole input each of 4 GPUs computes "
        f"8 of 32 heads ({DIM // 4} of {DIM} outputs), and sends nothing."
    )
    down = "layers.*.feed_forward.down_proj"
    for counts, words in {
        (32, 8, 8): "8 of 32, 2 of 8 and 2 of 8 heads (",
        (12, 12, 12): "3 of 12 heads of each of 3 parts (",
        (6,): f"{HIDDEN // 4} of {HIDDEN} inputs",  # six heads are not divided among four
    }.items():
        assert f"each of 4 GPUs has {words}" in said(with_heads(plan, {f"{down}.weight": counts}), down)[0]


def with_heads(plan: Plan, heads: Mapping[str, tuple[int, ...]]) -> Plan:
    return replace(plan, tp_shares=TpShares(flops_share=1.0, parameters_share=1.0, modules={}, heads=heads))


def test_fsdp_is_told_of_the_unit_that_a_module_is_in(plan: Plan) -> None:
    assert said(plan, "layers.*.attention.")[-1].startswith(
        "FSDP: each of 2 ranks keeps 1/2 of the weights of layers.*; "
    )
    assert said(plan, "lm_head")[-1] == (
        "FSDP: each of 2 ranks keeps 1/2 of the weights of <root>; forward, one all-gather of 64.0 MiB, 210 us."
    )


def test_an_exception_s_collectives_are_told_of_it_alone(plan: Plan) -> None:
    own = collective("layers.*", "all_to_all", Axis.TP, Pass.FORWARD, 1)
    told = said(replace(plan, collectives=(own,)), "layers.")
    assert [line for line in told if "all-to-all" in line] == ["layers.0: forward, one all-to-all of 64.0 MiB, 210 us."]
    assert BOUNDARIES["layers.0"].inputs


def test_without_tensor_parallelism_modules_run_whole() -> None:
    plan = replace(make_plan(mesh=(1, 16, 1)), recompute={"layers.*": Recompute.FULL, "layers.3": Recompute.NONE})
    told = said(plan, "layers.*.feed_forward")
    assert (
        told[0] == "No layer is split (tp 1): each of 16 GPUs runs these modules whole, on its own part of the batch."
    )
    assert told[-1] == "To save memory, in layers.0-2,4-31 forward runs again in backward."


@pytest.mark.parametrize("width", [60, 120])
def test_the_glossary_fits_and_explains_the_styles(width: int) -> None:
    assert max(map(len, glossary_lines(width))) <= width
    assert {Style.COLUMN, Style.ROW, Style.VOCABULARY, Style.SLICES, Style.REPLICATED} <= GLOSSARY.keys()


def test_without_a_machine_sentences_have_no_times(plan: Plan) -> None:
    place = "layers.*.feed_forward.down_proj"
    timed = said(plan, place)
    plain = list(sentences(plan, lambda module: module.startswith(place), lambda entry: None))
    assert "210 us" in timed[0]
    assert [text.replace(", 210 us", "") for text in timed] == plain

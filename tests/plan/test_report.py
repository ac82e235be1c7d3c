"""The report of hand-made plans: what it claims follows from the plan, fits its columns, and is plain text."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tpplan.core.errors import PlanError
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, S
from tpplan.core.mesh import Axis
from tpplan.core.units import GIB
from tpplan.plan.pipeline_plan import PipelinePlan, PipelinePrediction, Schedule
from tpplan.plan.plan import (
    BatchPlan,
    BoundaryPlan,
    ClusterPlan,
    CollectivePlan,
    Compile,
    CrossingPlan,
    Fingerprints,
    FsdpPlan,
    MeshPlan,
    ParameterPlan,
    Pass,
    Plan,
    Precision,
    Prediction,
    ProofReport,
    ProofStatus,
    Recompute,
    SolverReport,
)
from tpplan.plan.proof_hash import as_proven
from tpplan.plan.report import as_data, render
from tpplan.plan.report.stages import stage_facts
from tpplan.solvers.problem import Status

DIM, HIDDEN, VOCABULARY, LAYERS = 4096, 14336, 128_000, 32


def parameter(
    placement: Layout, *shape: int, read: Layout | None = None, aliases: tuple[str, ...] = ()
) -> ParameterPlan:
    reads = {"reader": placement if read is None else read}
    return ParameterPlan(
        placement=placement, reads=reads, shape=shape, dtype="float32", trainable=True, aliases=aliases
    )


def boundary(
    inputs: Mapping[str, tuple[Layout, Layout]] | None = None,
    outputs: Mapping[str, tuple[Layout, Layout]] | None = None,
) -> BoundaryPlan:
    return BoundaryPlan(
        inputs={path: CrossingPlan(Conversion(*pair), "bfloat16") for path, pair in (inputs or {}).items()},
        outputs={path: CrossingPlan(Conversion(*pair), "bfloat16") for path, pair in (outputs or {}).items()},
    )


PARAMETERS = {
    "tok_embeddings.weight": parameter(S(0), VOCABULARY, DIM),
    "layers.*.attention_norm.weight": parameter(R, DIM, read=R_STAR),
    "layers.*.feed_forward.up_proj.weight": parameter(S(0), HIDDEN, DIM),
    "layers.*.feed_forward.down_proj.weight": parameter(S(1), DIM, HIDDEN),
    "layers.*.feed_forward.down_proj.bias": parameter(R, DIM, read=P),
    "lm_head.weight": parameter(S(0), VOCABULARY, DIM),
}
BOUNDARIES = {
    "tok_embeddings": boundary({"input": (R, ROWS)}, {"output": (ROWS, R)}),
    "layers.0": boundary({"x": (R, S(1))}),
    "layers.*.feed_forward": boundary({"x": (S(1), R_STAR)}),
    "layers.*.feed_forward.down_proj": boundary(outputs={"output": (P, S(1))}),
}


def make_plan(
    *,
    parameters: Mapping[str, ParameterPlan] = PARAMETERS,
    boundaries: Mapping[str, BoundaryPlan] = BOUNDARIES,
    mesh: tuple[int, int, int] = (2, 2, 4),
) -> Plan:
    """A Llama-like plan for 16 GPUs, its numbers round: 0.5 s a step, 40 of 80 GiB."""
    return Plan(
        schema_version=1,
        tpplan_version="0.1.0",
        torch_version="2.13.0",
        cluster=ClusterPlan(gpus=16, gpus_per_node=8, profile="h100-sxm", profile_fingerprint="0123456789abcdef"),
        mesh_degrees=MeshPlan(replicate=mesh[0], shard=mesh[1], tp=mesh[2]),
        batch=BatchPlan(
            global_batch=128, micro_batch=1, accumulation_steps=128 // (mesh[0] * mesh[1]), seq_len=4096
        ),
        precision=Precision.BF16_MIXED,
        optimizer="adamw",
        blocks={"layers.*": f"0-{LAYERS - 1}"},
        parameters=parameters,
        boundaries=boundaries,
        outputs={"logits": S(2)},
        sizes={},
        losses={},
        draws=(),
        recompute={},
        compile=Compile.NONE,
        fsdp=FsdpPlan(units=("layers.*", "<root>"), reshard_after_forward=True, exceptions=()),
        collectives=(
            CollectivePlan(
                where="layers.*", kind="all_gather", axis=Axis.TP, during=Pass.FORWARD, dtype="bfloat16",
                num_bytes=GIB, count=3,
            ),
            CollectivePlan(
                where="lm_head", kind="all_gather", axis=Axis.TP, during=Pass.FORWARD, dtype="bfloat16",
                num_bytes=2 * GIB, count=1,
            ),
            CollectivePlan(
                where="<root>", kind="all_reduce", axis=Axis.REPLICATE, during=Pass.STEP, dtype="float32",
                num_bytes=GIB, count=7,
            ),
        ),
        predicted=Prediction(
            step_time_s=0.5,
            step_time_error_s=0.05,
            is_extrapolated=False,
            time_s={"compute": 0.4, "tensor-parallel collectives": 0.1, "fsdp": 0.0},
            peak_memory_bytes=40.0 * GIB,
            slack_bytes=2.0 * GIB,
            memory_limit_bytes=80.0 * GIB,
            memory_bytes={"parameters": 10.0 * GIB, "saved activations": 30.0 * GIB},
            peak_during=Pass.BACKWARD,
            peak_module="<root>",
        ),
        solver=SolverReport(
            name="highs",
            status=Status.OPTIMAL,
            objective_s=0.5,
            bound_s=0.495,
            gap=0.01,
            meshes_tried=12,
            skipped={"slow": 3},
        ),
        fingerprints=Fingerprints(parameters="sha256:1", graph="sha256:2", inputs={"tokens": "int64[1, 4096]"}),
        proof=ProofReport(
            status=ProofStatus.PROVEN,
            rounds=2,
            cuts=("attention: view [1, 4096, 32, 128]",),
            assumptions=("masks.py:7: if mask.all(): is True",),
        ),
        unruled_ops={"aten.foo.default": 0.02},
    )  # fmt: skip


def row_of(plan: Plan, module: str, *, width: int = 120) -> str:
    """The line of the layers' table that begins with this module, its blanks joined."""
    lines = (" ".join(line.split()) for line in render(plan, width=width).splitlines())
    return next(line for line in lines if line.startswith(module))


def test_recomputation_is_told_by_ranges_of_layers() -> None:
    modes = {"layers.*": Recompute.FULL, "layers.3": Recompute.NONE, "layers.4": Recompute.NONE, "head": Recompute.FULL}
    line = row_of(replace(make_plan(), recompute=modes), "recompute")
    assert line == "recompute layers.0-2,5-31, head: forward runs again in backward"
    assert "recompute" not in render(make_plan())


def test_a_prediction_for_compiled_layers_says_so() -> None:
    text = " ".join(render(replace(make_plan(), compile=Compile.BLOCKS)).split())
    assert "compile blocks: predicted as torch.compile fuses elementwise ops within each layer" in text
    assert "applying the plan compiles nothing" in text
    assert "compile" not in render(make_plan())


def test_an_unusual_dtype_is_named_where_it_crosses() -> None:
    odd = BoundaryPlan(inputs={"x": CrossingPlan(Conversion(S(1), R_STAR), "float32")}, outputs={})
    text = render(make_plan(boundaries={**BOUNDARIES, "layers.*.feed_forward": odd}), width=120)
    assert [line for line in text.splitlines() if "float32" in line and "->" in line] == [
        line for line in text.splitlines() if "in x: S(1) -> R* as float32" in line
    ]
    assert "Tensors cross as bfloat16 where no other dtype is named." in text
    assert "Tensors cross as bfloat16." in render(make_plan(), width=120)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_lines_fit_the_columns_and_are_plain_ascii(width: int) -> None:
    text = render(make_plan(), width=width)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.endswith("\n")


def test_rows_of_long_names_say_the_style_below() -> None:
    long = "layers_of_a_model_whose_author_likes_names_that_say_it_all."
    plan = Plan.from_dict(json.loads(make_plan().dumps().replace("layers.", long)))
    lines = render(plan, width=80).splitlines()
    table = lines[lines.index("Layers") + 1 : lines.index("Setting")]
    assert any(re.fullmatch(r" +column parallel +S\(0\)", line) for line in table)
    names = [line for line in table if "feed_forward" in line]
    assert names
    assert not any("parallel" in line for line in names)


@pytest.mark.parametrize("width", [80, 100])
def test_module_names_are_not_broken(width: int) -> None:
    text = render(make_plan(), width=width)
    for name in PARAMETERS:
        assert name.rpartition(".")[0].removeprefix("layers.*.") in text


def test_colour_is_for_terminals_and_changes_no_word() -> None:
    plain = render(make_plan(), width=100)
    assert "\x1b[" in render(make_plan(), width=100, color=True)
    assert "\x1b[" not in plain


def test_the_order_of_a_plan_s_mappings_does_not_show() -> None:
    plan = make_plan()
    assert render(Plan.from_dict(plan.to_dict())) == render(plan)
    backwards = make_plan(parameters=dict(reversed(PARAMETERS.items())), boundaries=dict(reversed(BOUNDARIES.items())))
    assert render(backwards) == render(plan)


def test_a_report_opens_with_the_answer_and_what_to_know_of_it() -> None:
    """0.5 s a step of 0.4 s compute; 1e15 FLOP on 16 GPUs of 1e15 FLOP/s: an MFU of 1 / (0.5 * 16)."""
    plan = make_plan()
    predicted = replace(plan.predicted, model_flop=1e15, peak_flop_per_s=1e15)
    noted = as_proven(replace(plan, predicted=predicted, notes=("a cache is whole",)))
    text = " ".join(render(noted, width=200).split())
    assert text.startswith("Plan mesh 2 replicas x 2 FSDP shards x 4 tensor-parallel ranks: 16 GPUs, 8 per node")
    order = ("step 500 ms", "MFU 12 %", "a step is 80% compute, 20% tensor-parallel", "memory does not bind")
    order += ("Before you train no rule for aten.foo.default", "note a cache is whole", "Layers", "How it was found")
    assert sorted(map(text.index, order)) == [text.index(part) for part in order]
    assert as_data(noted)["derived"]["mfu"] == 1 / 8  # type: ignore[index]


def test_a_full_memory_is_named_with_what_recomputation_pays_for_it() -> None:
    plan = make_plan()
    time_s = {"compute": 0.4, "recomputation": 0.1}
    full = replace(plan.predicted, peak_memory_bytes=77.0 * GIB, time_s=time_s)
    text = " ".join(render(replace(plan, predicted=full), width=200).split())
    assert "memory is nearly full, for which 100 ms go to recomputation" in text


def test_siblings_that_say_the_same_are_one_row() -> None:
    more = {f"layers.*.attention.{name}_proj.weight": parameter(S(0), 64, 64) for name in "qkv"}
    plan = make_plan(parameters=PARAMETERS | more)
    assert row_of(plan, "attention.{k,q,v}_proj") == "attention.{k,q,v}_proj column parallel S(0)"
    assert "attention.{k,q,v}_proj" in render(plan, width=80)
    assert row_of(plan, "layers.0 ").startswith("layers.0 in x")


def test_eighty_columns_hold_a_row_in_a_line() -> None:
    narrow = render(make_plan(), width=80)
    assert "AG all-gather; RS reduce-scatter" in narrow
    (row,) = [line for line in narrow.splitlines() if "feed_forward.down_proj" in line]
    assert row.split() == ["feed_forward.down_proj", "row", "S(1)", "out:", "P", "->", "S(1)", "RS", "/", "AG"]


# The choice


def test_styles_are_said_in_the_field_s_words() -> None:
    plan = make_plan()
    assert row_of(plan, "tok_embeddings").startswith("tok_embeddings vocabulary parallel S(0) in input: R -> rows")
    assert row_of(plan, "feed_forward.up_proj") == "feed_forward.up_proj column parallel S(0)"
    assert row_of(plan, "feed_forward.down_proj").startswith("feed_forward.down_proj row parallel S(1) out:")
    assert row_of(plan, "attention_norm") == "attention_norm on slices R as R*"
    assert row_of(plan, "lm_head") == "lm_head column parallel S(0)"


@pytest.mark.parametrize(
    ("parameters", "style"),
    [
        # An embedding's columns and a linear's inputs are both S(1); without a summand leaving, neither is claimed.
        ({"m.weight": parameter(S(1), 64, 64)}, "split dim 1"),
        # Of two matrices, which one the module's output comes from is unknown.
        ({"m.a": parameter(S(0), 64, 64), "m.b": parameter(S(0), 32, 64)}, "split dim 0"),
        ({"m.weight": parameter(S(0), 64, 64, 3, 3)}, "split dim 0"),
        ({"m.weight": parameter(S(0), 64)}, "split dim 0"),
    ],
)
def test_no_style_is_claimed_that_the_plan_does_not_say(parameters: dict[str, ParameterPlan], style: str) -> None:
    assert f" {style} " in row_of(make_plan(parameters=parameters, boundaries={}), "m ")


def test_transposed_weights_that_give_summands_are_row_parallel() -> None:
    """GPT-2's Conv1D holds (input, output): its rows are dim 0."""
    plan = make_plan(
        parameters={"m.weight": parameter(S(0), 64, 64)}, boundaries={"m": boundary(outputs={"output": (P, R)})}
    )
    assert "row parallel S(0)" in row_of(plan, "m ")


def test_conversions_name_their_steps_forward_and_backward() -> None:
    text = " ".join(render(make_plan(), width=120).split())
    assert "in x: S(1) -> R* all-gather / reduce-scatter" in text
    assert "out: P -> S(1) reduce-scatter / all-gather" in text
    assert "in input: R -> rows local-rows / none" in text
    assert "out: rows -> R mask + all-reduce / mask" in text


def test_layers_stand_once_with_their_count_and_exceptions_apart() -> None:
    plan = make_plan()
    text = render(plan)
    assert text.count("feed_forward.up_proj") == 1
    assert row_of(plan, "layers.* x32") == "layers.* x32"
    assert row_of(plan, "layers.0 ") == "layers.0 in x: R -> S(1) slice / all-gather"


def test_an_exception_inherits_parameters_and_is_counted_off() -> None:
    key = "layers.31.feed_forward.down_proj"
    plan = make_plan(boundaries=BOUNDARIES | {key: boundary(outputs={"output": (P, R)})})
    assert row_of(plan, "31.feed_forward.down_proj") == (
        "31.feed_forward.down_proj row parallel S(1) out: P -> R all-reduce / none"
    )
    assert row_of(plan, "feed_forward.down_proj").startswith("feed_forward.down_proj x31 row parallel")


def test_an_exception_that_converts_nothing_says_so() -> None:
    plan = make_plan(boundaries=BOUNDARIES | {"layers.3.feed_forward": boundary()})
    assert row_of(plan, "3.feed_forward") == "3.feed_forward none"


def test_tied_weights_are_one_parameter() -> None:
    tied = {"emb.weight": parameter(S(0), 1000, 10, aliases=("lm_head.weight",))}
    plan = make_plan(parameters=tied, boundaries={"lm_head": boundary({"input": (R, R_STAR)})})
    assert row_of(plan, "lm_head").startswith("lm_head tied to emb.weight in input: R -> R*")
    assert "10 k parameters" in render(plan)


def test_without_tensor_parallelism_the_table_says_what_fsdp_does() -> None:
    whole = {name: replace(entry, placement=R, reads={"reader": R}) for name, entry in PARAMETERS.items()}
    text = render(make_plan(parameters=whole, boundaries={}, mesh=(2, 8, 1)))
    assert "tp 1: every module computes whole" in text
    assert "FSDP over 8 ranks holds 1/8 of each weight on a rank" in text
    assert "feed_forward" not in text, "a row for every module that says the same"
    assert "S(0)" not in text


# The numbers


def test_tokens_per_second_come_from_the_batch_and_the_step() -> None:
    derived = as_data(make_plan())["derived"]
    assert isinstance(derived, dict)
    assert derived["tokens_per_step"] == 128 * 4096
    assert derived["tokens_per_s"] == 128 * 4096 / 0.5
    assert derived["tokens_per_s_per_gpu"] == 128 * 4096 / 0.5 / 16
    text = render(make_plan())
    assert "1.05 M tokens/s, 65.5 k per GPU; 128 sequences of 4096 tokens a step" in text


def test_as_data_is_the_plan_and_what_follows_from_it() -> None:
    plan = make_plan()
    data = as_data(plan)
    derived = data.pop("derived")
    assert data == plan.to_dict()
    assert isinstance(derived, dict)
    per_layer = DIM + 2 * DIM * HIDDEN + DIM
    assert derived["num_parameters"] == 2 * VOCABULARY * DIM + LAYERS * per_layer
    assert derived["parameter_bytes"] == 4 * derived["num_parameters"]
    assert derived["hash"] == plan.hash


def test_parts_are_largest_first_with_their_share_and_zeros_left_out() -> None:
    text = " ".join(render(make_plan(), width=120).split())
    assert "500 ms +/- 50 ms" in text
    assert "compute 400 ms 80.0% ################ tensor-parallel collectives 100 ms 20.0% #### Predicted peak" in text
    assert "memory 42.00 GiB of 80.00 GiB per GPU (52 %), 2.00 GiB of it slack" in text
    assert "most during backward, in <root>" in text
    assert "slack 2.00 GiB 2.5% of limit" in text
    assert "saved activations 30.00 GiB 37.5% of limit" in text


def test_collectives_add_up_by_axis_and_kind() -> None:
    assert "tp forward all-gather 4 5.00 GiB" in row_of(make_plan(), "tp forward")
    assert "replicate step all-reduce 7 7.00 GiB" in row_of(make_plan(), "replicate step")


def test_header_says_what_each_axis_does_and_where() -> None:
    text = " ".join(render(make_plan(), width=120).split())
    assert "replicate 2 x shard 2 x tp 4" in text
    assert "replicate: 2 replicas split the batch; gradients are all-reduced (across 2 nodes)" in text
    assert "tp: 4 ranks read the same batch and split the layers (within a node)" in text
    assert "profile h100-sxm (0123456789ab)" in text
    assert "128 sequences of 4096 tokens = micro-batch 1 x 32 accumulation steps x 4 data ranks" in text
    assert "loss the mean, over micro-batches and data ranks, of the model's on each; where these hold" in text
    assert "layers.* x32, <root>; resharded after forward (ZeRO-3)" in text
    assert "logits: S(2); others whole" in text


def test_a_mesh_of_fewer_gpus_than_there_are_says_so() -> None:
    assert "8 of 16 GPUs" in render(make_plan(mesh=(1, 2, 4)))


def test_provenance_gives_bound_gap_proof_and_unruled_ops() -> None:
    text = " ".join(render(as_proven(make_plan()), width=120).split())
    assert "highs: optimal, 500 ms, bound 495 ms, gap 1.00%, 12 points tried, 3 slow" in text
    assert "proven: run as applied on the first and last rank" in text
    assert "masks.py:7: if mask.all(): is True, as for the example inputs" in text
    assert "forbidden on the way: attention: view [1, 4096, 32, 128]" in text
    assert "no rule for aten.foo.default" in text


def test_extrapolation_is_said() -> None:
    plan = make_plan()
    assert "extrapolated" not in render(plan)
    assert "extrapolated" in render(replace(plan, predicted=replace(plan.predicted, is_extrapolated=True)))


def test_frozen_parameters_are_counted() -> None:
    frozen = PARAMETERS | {"lm_head.weight": replace(PARAMETERS["lm_head.weight"], trainable=False)}
    assert f"of which {VOCABULARY * DIM / 1e6:.0f} M frozen" in render(make_plan(parameters=frozen))


def test_an_unknown_dtype_is_named() -> None:
    odd = {"m.weight": replace(parameter(R, 4), dtype="int4")}
    with pytest.raises(PlanError, match=r"parameters\.m\.weight\.dtype: expected one of .* got 'int4'"):
        render(make_plan(parameters=odd, boundaries={}))


def test_a_parameter_that_lies_otherwise_than_its_weight_has_its_own_line() -> None:
    lines = render(make_plan(), width=120).splitlines()
    row = next(i for i, line in enumerate(lines) if "feed_forward.down_proj" in line)
    assert lines[row + 1].strip() == "bias R as P"


def test_throughput_of_stages_counts_samples_without_a_length_and_needs_a_time() -> None:
    whole = make_plan()
    batch = replace(whole.batch, global_batch=8, seq_len=1)
    stage = replace(whole, batch=batch, mesh_degrees=MeshPlan(replicate=1, shard=1, tp=1))
    plan = PipelinePlan(
        schema_version=1,
        schedule=Schedule.ONE_F_ONE_B,
        predicted=PipelinePrediction(step_time_s=0.5, stage_s=0.5, bubble_s=0.0, send_s=0.0),
        solver=whole.solver,
        stages=(stage, stage),
    )
    assert dict(stage_facts(plan))["speed"] == "16 samples/s, 8 per GPU"  # 8 samples in 0.5 s, on 2 GPUs
    untimed = replace(plan, predicted=replace(plan.predicted, step_time_s=0.0))
    assert "speed" not in dict(stage_facts(untimed))

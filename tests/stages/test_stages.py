"""A model in stages on real ranks against one process: losses, gradients, training, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from stage_models import (
    LENGTH,
    Checkpointed,
    Deep,
    Stack,
    Vision,
    hugging_face,
    loss,
    text,
    with_own_loss,
)
from stage_runs import (
    assert_as_one_process,
    assert_loads,
    assert_trains,
    given,
    in_one_stage,
    on_ranks,
    one_process,
    solved,
)
from torch import Tensor, nn

import tpplan
from tpplan.apply.collectives.tp_gradients import Reducer
from tpplan.commands import main
from tpplan.core.errors import PlanError, UsageError
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.stages import stage_lines


@pytest.mark.parametrize(
    ("stages", "gpus", "options"),
    [
        (2, 2, {"virtual": 2}),
        (2, 8, {"virtual": 2, "fsdp": 2, "tp": 2, "recompute": "full"}),
        (4, 4, {"recompute": "full"}),
        (3, 3, {}),
        (2, 4, {"tp": 2}),
        (2, 4, {"fsdp": 2, "tp": 1}),
        (2, 4, {"fsdp": 1, "tp": 1}),
        (2, 8, {"fsdp": 2, "tp": 2, "whole_gradients": True, "recompute": "full"}),
        (2, 8, {"virtual": 2, "fsdp": 2, "tp": 1, "whole_gradients": True}),
        (2, 8, {"virtual": 2, "fsdp": 2, "tp": 2, "fsdp_over_tp": True}),
    ],
)
def test_own_model(stages: int, gpus: int, options: dict[str, Any]) -> None:
    plan = solved(Stack, stages=stages, gpus=gpus, **options)
    assert plan.parts == stages
    assert [bool(own.fsdp.over_tp) for own in plan.stages] == [bool(options.get("fsdp_over_tp"))] * len(plan.stages)
    assert_as_one_process(Stack, plan)


def test_the_layer_that_sends_is_compared_where_like_ones_are_left_out() -> None:
    plan = solved(Deep, stages=2, gpus=4, tp=2)
    assert [stage.stage.last for stage in plan.stages if stage.stage is not None] == ["layers.3", None]
    assert not any(map(why_unproven, plan.stages))


@pytest.mark.parametrize(
    "options", [{"stages": 6, "gpus": 6}, {"stages": 3, "gpus": 6, "virtual": 2, "tp": 2}], ids=str
)
def test_more_stages_than_layers(options: dict[str, Any]) -> None:
    """The embedding and the head are stages of their own."""
    plan = solved(Stack, **options)
    assert [own.layers() for own in (plan.stages[0], plan.stages[-1])] == [("",), ("",)]
    assert_as_one_process(Stack, plan)


def test_stages_of_a_rank_recompute_as_much_as_its_memory_asks_for() -> None:
    """Of two like stages of a rank one keeps what the other makes again."""
    shape = {"stages": 2, "gpus": 2, "virtual": 4, "batch": 8}
    ends = [solved(Deep, **shape, recompute=mode, prove=False) for mode in ("none", "full")]  # type: ignore[arg-type]
    most, least = (max(own.predicted.peak_memory_bytes for own in plan.stages) for plan in ends)
    plan = solved(Deep, **shape, recompute=None, memory_limit_bytes=(most + least) / 2)  # type: ignore[arg-type]
    assert all(own.predicted.held_bytes <= (most + least) / 2 for own in plan.stages)
    for rank in range(2):
        modes = [bool(own.recomputed_modules()) for own in plan.stages[rank::2]]
        assert True in modes
        assert False in modes
    fast, slow = (end.predicted.step_time_s for end in ends)
    assert fast < plan.predicted.step_time_s < slow
    assert_as_one_process(Deep, plan)


def test_layers_in_reentrant_checkpoints() -> None:
    assert_as_one_process(Checkpointed, solved(Checkpointed, stages=2, gpus=2))


def test_images() -> None:
    """A class token and positions that the root holds are read by the first stage alone."""
    plan = solved(Vision, stages=2, gpus=2)
    assert "positions" in (plan.stages[1].stage.blank if plan.stages[1].stage is not None else ())
    assert_as_one_process(Vision, plan)


#: whose layers are written as one of the others'
LONG = ("Mistral", "Olmo2", "StableLm", "Starcoder2")


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "GPTNeoX", "Phi3", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    build = hugging_face(name)
    assert_as_one_process(build, solved(build, stages=2, gpus=2))


def test_loss_that_the_model_itself_computes() -> None:
    """The last stage computes it, from labels among the inputs; what earlier stages make of stubs is dropped."""
    pytest.importorskip("transformers")
    assert_as_one_process(with_own_loss, solved(with_own_loss, stages=2, gpus=2))


def test_model_without_a_loss_is_told_so() -> None:
    with pytest.raises(UsageError, match="the last stage computes the loss, and there is none"):
        solved(Stack, stages=2, gpus=2, loss=None)


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
def test_stubs_give_the_dtype_that_is_computed_with(precision: Precision) -> None:
    """Rotary tables are made in the dtype of the embedding, which other stages do not have."""
    pytest.importorskip("transformers")
    build = hugging_face("Llama")
    plan = solved(build, stages=2, gpus=2, precision=precision)
    assert not any(map(why_unproven, plan.stages))
    if precision is Precision.BF16_MIXED:
        expected, _ = run_ranks(1, one_process, build)[0]
        found = run_ranks(2, on_ranks, build, plan, timeout_s=120)
        assert [value for value, _, _ in found] == pytest.approx([expected] * 2, rel=1e-2)


def test_what_stubs_are_given_and_give_is_whole() -> None:
    """Slices of what is dropped would save nothing, and a stub's code makes none: the first plan is the proven one."""
    pytest.importorskip("transformers")
    plan = solved(hugging_face("Llama"), stages=2, gpus=4, tp=2, pins={"model.layers.*.mlp": "on slices"})
    assert [stage.proof.rounds for stage in plan.stages] == [1, 1]


def test_mixed_precision_sends_half_as_many_bytes() -> None:
    plan = solved(Stack, stages=2, gpus=2, precision=Precision.BF16_MIXED)
    stage = plan.stages[0].stage
    assert stage is not None
    assert [tensor.dtype for tensor in stage.sends] == ["bfloat16"]
    expected, _ = run_ranks(1, one_process, Stack)[0]
    for value, again, found in run_ranks(2, on_ranks, Stack, plan, timeout_s=120):
        assert value == pytest.approx(expected, rel=2e-2)
        assert again == pytest.approx(expected, rel=2e-2)
        assert found


@pytest.mark.parametrize("virtual", [1, 2])
def test_twenty_steps(virtual: int) -> None:
    assert_trains(Stack, solved(Stack, stages=2, gpus=4, tp=2, virtual=virtual))


@pytest.mark.parametrize("virtual", [1, 2])
def test_checkpoints_of_two_stages_load_in_one_and_in_three(tmp_path: Path, virtual: int) -> None:
    plan = solved(Stack, stages=2, gpus=2, virtual=virtual)
    assert_loads(Stack, plan, (solved(Stack, stages=3, gpus=3), in_one_stage(Stack)), tmp_path)


def wrong_number(plan: PipelinePlan) -> str:
    model = tpplan.apply_plan(Stack(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(text(8, LENGTH)))
    with pytest.raises(UsageError, match="8 micro-batches, and 7 are given") as error:
        model.step(micro_batches[:-1], loss)  # type: ignore[operator]
    return str(error.value)


def other_rows(plan: PipelinePlan) -> str:
    model = tpplan.apply_plan(Stack(), plan)
    torch.manual_seed(dist.get_rank())
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(text(8, LENGTH)))
    with pytest.raises(UsageError, match="stages 0 and 1 were given other micro-batches") as error:
        model.step(micro_batches, loss)  # type: ignore[operator]
    return str(error.value)


def test_stages_that_read_other_rows_are_told_before_anything_runs() -> None:
    assert len(set(run_ranks(2, other_rows, solved(Stack, stages=2, gpus=2)))) == 1


class Centred(Stack):
    """A model that keeps statistics of its tokens in buffers, which each stage computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.BatchNorm1d(1, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        scale = self.counts(tokens.float().unsqueeze(1)).squeeze(1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)) * (1 + 0 * scale.unsqueeze(-1))
        return logits


def test_a_buffer_that_several_stages_of_a_rank_write_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stages 0 and 2 .* write buffer counts\..*--virtual-stages 1"):
        solved(Centred, stages=2, gpus=2, virtual=2)


def together(plan: PipelinePlan) -> tuple[list[str], list[bool], str]:
    """Names in a rank's state_dict, whether its modules and the copies of the root evaluate after eval(), and what
    a call of the model says."""
    model = tpplan.apply_plan(Stack(), plan)
    names = list(model.state_dict())
    model.eval()
    copies = [runner.model for runner in model.step.__self__.runners]  # type: ignore[union-attr]
    with pytest.raises(UsageError) as error:
        model(**tpplan.forward_inputs(model, text(1, LENGTH)))
    return names, [one.training for copy in (model, *copies) for one in copy.modules()], str(error.value)


def test_stages_of_a_rank_are_one_model_to_all_but_forward() -> None:
    plan = solved(Stack, stages=2, gpus=2, virtual=2)
    found = run_ranks(2, together, plan)
    assert sorted((*found[0][0], *found[1][0])) == sorted(Stack().state_dict())
    for names, training, said in found:
        assert {name.split(".")[1] for name in names if name.startswith("layers.")} in ({"0", "2"}, {"1", "3"})
        assert not any(training)
        assert "model.step(micro_batches, loss)" in said


def longer(plan: PipelinePlan) -> str:
    model = tpplan.apply_plan(Stack(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(text(8, LENGTH + 1)))
    with pytest.raises(UsageError, match=rf"of shape \[1, {LENGTH + 1}\], and the stages are planned") as error:
        model.step(micro_batches, loss)  # type: ignore[operator]
    return str(error.value)


def test_another_length_is_refused_before_anything_runs() -> None:
    assert len(set(run_ranks(2, longer, solved(Stack, stages=2, gpus=2)))) == 1


def without_loss(plan: PipelinePlan) -> str:
    model = tpplan.apply_plan(Stack(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)))
    with pytest.raises(UsageError, match=r"must be a function of \(outputs, inputs\), and is None") as error:
        model.step(micro_batches, None)  # type: ignore[operator]
    return str(error.value)


def test_a_step_without_a_loss_is_refused_before_anything_runs() -> None:
    assert len(set(run_ranks(2, without_loss, solved(Stack, stages=2, gpus=2)))) == 1


def reductions(plan: PipelinePlan) -> int:
    """How often a step sums gradients over tp ranks."""
    calls = []
    torch.manual_seed(0)
    model = tpplan.apply_plan(Stack(), plan)
    with pytest.MonkeyPatch.context() as patched:
        reduce = Reducer.reduce
        patched.setattr(Reducer, "reduce", lambda own: (calls.append(own), reduce(own)))
        model.step(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)), loss)  # type: ignore[operator]
    return len(calls)


def test_gradients_are_summed_over_tensor_parallel_ranks_once_a_step() -> None:
    plan = solved(Stack, stages=2, gpus=4, tp=2, pins={"layers.*.norm": "sequence"})
    assert plan.batch.accumulation_steps == 8
    assert run_ranks(4, reductions, plan, timeout_s=120) == [1, 1, 1, 1]
    assert_as_one_process(Stack, plan)


def test_another_number_of_micro_batches_is_refused_before_anything_runs() -> None:
    assert len(set(run_ranks(2, wrong_number, solved(Stack, stages=2, gpus=2)))) == 1


def test_file_is_read_as_it_was_written_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = solved(Stack, stages=2, gpus=2), tmp_path / "plan.json"
    plan.dump(path)
    assert load_plan(path) == plan
    assert main(["show", str(path), "--stage", "1"]) == 0
    shown = capsys.readouterr().out
    assert "layers.3" in shown or "layers.* x2" in shown
    assert "embedding" not in shown  # which the first stage has
    plan.stages[0].dump(tmp_path / "whole.json")
    for name, number, told in ((path, "2", "has stages 0 to 1"), (tmp_path / "whole.json", "0", "without stages")):
        assert main(["show", str(name), "--stage", number]) == UsageError.exit_code
        assert told in capsys.readouterr().err
    with pytest.raises(PlanError, match="a plan of stages"):
        Plan.load(path)
    text_of = path.read_text()
    path.write_text(text_of.replace('"last": "layers.1"', '"last": "layers.0"'))
    with pytest.raises(PlanError, match=r"stages\[1\]\.stage\.receives"):
        load_plan(path)


def test_plans_of_stages_are_explained_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage's sentences are those of its own plan; the parts of both steps add up to their difference."""
    one, other = solved(Stack, stages=2, gpus=2, prove=False), solved(Stack, stages=4, gpus=4, prove=False)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for plan, path in zip((one, other), paths, strict=True):
        plan.dump(path)
    assert main(["explain", paths[0], "layers.*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["stages"]
    assert [own["stage"] for own in told] == [0, 1]
    assert told[0]["does"].startswith(
        "Stage 0 of 2 runs layers 0-1, and keeps what 2 micro-batches need for backward. "
    )
    assert "sends" not in told[1]["does"]
    assert main(["explain", paths[0], "nowhere"]) == UsageError.exit_code
    assert main(["explain", paths[0], "layers.*", "--why-not", "megatron", "gpt.py"]) == UsageError.exit_code
    assert "take a plan of a whole model" in capsys.readouterr().err
    assert main(["diff", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [plan.predicted.step_time_s for plan in (one, other)]
    assert sum(theirs - ours for _, ours, theirs in found["time_s"]) == pytest.approx(steps[1] - steps[0])
    assert [name for name, *_ in found["settings"]] == ["stages"]
    one.stages[0].dump(paths[1])
    assert main(["diff", *paths]) == 0
    assert "filling and draining" in capsys.readouterr().out


def test_unproven_each_stage_has_a_plan_of_its_own(tmp_path: Path) -> None:
    plan, path = solved(Stack, stages=4, gpus=4, prove=False), tmp_path / "plan.json"
    plan.dump(path)
    assert load_plan(path) == plan
    rows = [line.split("  ") for line in stage_lines(plan) if line.startswith("  ")]
    named = [next(part.strip() for part in row[2:] if part.strip()) for row in rows[1:]]
    assert named == ["layers.0", "layers.1", "layers.2", "after layers.2"]
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(page.count(f"{i}: {name}<") == 2 for i, name in enumerate(named))  # in the table and beside its bar
    held = [{name for name in stage.parameter_plans() if name.startswith("layers.")} for stage in plan.stages]
    assert all({name.split(".")[1] for name in names} == {str(i)} for i, names in enumerate(held))

"""A model in stages on real ranks against one process: losses, gradients, training, checkpoints."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import gradients, relative_errors, whole
from ranks import run_ranks
from stage_models import (
    LENGTH,
    VOCABULARY,
    Stack,
    Vision,
    hugging_face,
    images,
    labelled,
    loss,
    own_loss,
    text,
    vision_loss,
    with_own_loss,
)
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from profiles import synthetic_profile
from tpplan.apply.collectives.tp_gradients import Reducer
from tpplan.commands import main
from tpplan.core.errors import PlanError, UsageError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.stages import stage_lines
from tpplan.search.pipelines.rank_memory import num_bytes
from tpplan.search.points.options import Options
from tpplan.stages.schedule import orders

TOLERANCE = 2e-5
MACHINE = HardwareProfile.from_dict({**synthetic_profile(), "device_type": "cpu"}, origin="synthetic")


def solved(
    build: Callable[[], nn.Module],
    *,
    stages: int,
    gpus: int,
    batch: int = 8,
    virtual: int = 1,
    prove: bool = True,
    **options: object,
) -> PipelinePlan:
    is_vision = build is Vision
    losses = {Vision: vision_loss, with_own_loss: None}
    own = {"loss": losses.get(build, loss), "precision": Precision.FP32, "recompute": "none", **options}
    return tpplan.solve_stages(
        build,
        images if is_vision else labelled if build is with_own_loss else text,
        stages=stages,
        virtual_stages=virtual,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=MACHINE),
        global_batch=batch,
        seq_len=1 if is_vision else LENGTH,
        micro_batch=1,
        options=Options(**own),  # type: ignore[arg-type]
        prove=prove,
    )


def given(build: Callable[[], nn.Module], batch: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if build is Vision:
        return images(batch)
    return labelled(batch, LENGTH) if build is with_own_loss else text(batch, LENGTH)


def loss_of(build: Callable[[], nn.Module]) -> Callable[[object, dict[str, Tensor]], Tensor]:
    return {Vision: vision_loss, with_own_loss: own_loss}.get(build, loss)  # type: ignore[call-overload]


def one_process(build: Callable[[], nn.Module]) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), given(build)
    value = loss_of(build)(model(**tpplan.forward_inputs(model, inputs)), inputs)
    value.backward()
    return value.item(), gradients(model)


def on_ranks(build: Callable[[], nn.Module], plan: PipelinePlan) -> tuple[float, float, dict[str, Tensor]]:
    """(loss of a step, loss without a backward, gradients of this rank's stage)."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(build(), plan)
    share = plan.batch_for(dist.get_rank())
    value = model.step(share.micro_batches(given(build)), loss_of(build))  # type: ignore[operator]
    again = model.evaluate(share.micro_batches(given(build)), loss_of(build))  # type: ignore[operator]
    return value.item(), again.item(), gradients(model)


def assert_as_one_process(build: Callable[[], nn.Module], plan: PipelinePlan) -> None:
    assert not any(map(why_unproven, plan.stages))
    expected_loss, expected = run_ranks(1, one_process, build)[0]
    results = run_ranks(plan.num_gpus, on_ranks, build, plan, timeout_s=120)
    losses = {found[0] for found in results}
    assert sum(found[0] for found in results) / len(results) == pytest.approx(expected_loss, rel=1e-5)
    assert sum(found[1] for found in results) / len(results) == pytest.approx(expected_loss, rel=1e-5)
    assert len(losses) <= plan.stages[0].mesh.data_parallel  # every stage is told the loss of its replica
    everything: dict[str, Tensor] = {}
    for number, (_, _, found) in enumerate(results):
        if number % plan.ranks_per_stage == 0:
            assert not everything.keys() & found.keys()
        everything |= found
    assert everything.keys() == expected.keys()
    errors = relative_errors(everything, expected)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize(
    ("stages", "gpus", "options"),
    [
        (2, 2, {}),
        (2, 2, {"virtual": 2}),
        (2, 4, {"virtual": 2, "tp": 2}),
        (2, 4, {"virtual": 2, "fsdp": 2, "tp": 1}),
        (2, 8, {"virtual": 2, "fsdp": 2, "tp": 2, "recompute": "full"}),
        (4, 4, {"recompute": "full"}),
        (3, 3, {}),
        (2, 4, {"tp": 2}),
        (2, 4, {"fsdp": 2, "tp": 1}),
        (2, 4, {"fsdp": 1, "tp": 1}),
        (2, 8, {"fsdp": 2, "tp": 2}),
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


def test_images() -> None:
    """A class token and positions that the root holds are read by the first stage alone."""
    plan = solved(Vision, stages=2, gpus=2)
    assert "positions" in (plan.stages[1].stage.blank if plan.stages[1].stage is not None else ())
    assert_as_one_process(Vision, plan)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPTNeoX", "Olmo2", "Phi3", "StableLm", "Starcoder2"])
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


def trained(plan: PipelinePlan | None, steps: int = 20) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of AdamW steps with clipping, and the parameters after them."""
    torch.manual_seed(0)
    model: nn.Module = Stack()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
        inputs = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}
        if plan is not None:
            share = plan.batch_for(dist.get_rank())
            value = model.step(share.micro_batches(inputs), loss)  # type: ignore[operator]
        else:
            value = loss(model(inputs["tokens"]), inputs)
            value.backward()
        norm = tpplan.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [value.item(), norm.item()]
    return seen, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("virtual", [1, 2])
def test_twenty_steps(virtual: int) -> None:
    plan = solved(Stack, stages=2, gpus=4, tp=2, virtual=virtual)
    expected, parameters = run_ranks(1, trained, None)[0]
    found: dict[str, Tensor] = {}
    for seen, own in run_ranks(4, trained, plan, timeout_s=120):
        assert seen == pytest.approx(expected, rel=1e-3)
        found |= own
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.allclose(found[name], value, atol=2e-3), name


def saved(plan: PipelinePlan, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(Stack(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)), loss)  # type: ignore[operator]
    optimizer.step()
    tpplan.save_checkpoint(folder, model, optimizer, step=1)
    return held(model, optimizer)


def loaded(plan: PipelinePlan | Plan, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = tpplan.apply_plan(Stack(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tpplan.load_checkpoint(folder, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return held(model, optimizer)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, and the optimizer's first moments of them."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter.detach()).clone()
        found[f"moment of {name}"] = whole(optimizer.state[parameter]["exp_avg"]).clone()
    return found


@pytest.mark.parametrize("virtual", [1, 2])
def test_checkpoints_of_two_stages_load_in_one_and_in_three(tmp_path: Path, virtual: int) -> None:
    folder = str(tmp_path / "saved")
    expected: dict[str, Tensor] = {}
    for own in run_ranks(2, saved, solved(Stack, stages=2, gpus=2, virtual=virtual), folder):
        expected |= own
    found: dict[str, Tensor] = {}
    for own in run_ranks(3, loaded, solved(Stack, stages=3, gpus=3), folder):
        found |= own
    plain = tpplan.solve(
        Stack,
        text,
        cluster=tpplan.Cluster(gpus=1, profile=MACHINE),
        global_batch=8,
        seq_len=LENGTH,
        loss=loss,
    )
    for result in (found, run_ranks(1, loaded, plain, folder)[0]):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], value) for name, value in expected.items())


class Tracker(MemTracker):
    """Torch's tracker of memory, without its statistics of modules, which may not be called several times."""

    def _pre_fw_hook(self, *_: object) -> None: ...

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook  # type: ignore[assignment]


def traffic(plan: PipelinePlan) -> tuple[list[tuple[int, bool, int]], list[int], float]:
    """Of a rank's second step what it runs, in order, the bytes of each send, and the most bytes that it holds."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Stack(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)))
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(micro_batches, loss)  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    ran: list[tuple[int, bool, int]] = []
    sent: list[int] = []

    def noted(name: str, note: Callable[[Any, Any, Any], object]) -> None:
        own = getattr(PipelineStage, name)

        def run(stage: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            found = own(stage, index, *args, **kwargs)
            note(stage.stage_index, index, found)
            return found

        patched.setattr(PipelineStage, name, run)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            noted(name, lambda stage, index, found: sent.extend(one.tensor.nbytes for one in found))
        noted("forward_one_chunk", lambda stage, index, found: ran.append((stage, True, index)))
        noted("backward_one_chunk", lambda stage, index, found: ran.append((stage, False, index)))
        tracker = Tracker()
        tracker.track_external(model, optimizer)
        with tracker:
            model.step(micro_batches, loss)  # type: ignore[operator]
    return ran, sent, float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize("virtual", [1, 2])
def test_ranks_run_send_and_hold_what_the_plan_counts(virtual: int) -> None:
    plan = solved(Stack, stages=2, gpus=2, virtual=virtual)
    steps = plan.batch.accumulation_steps
    every = orders(plan.schedule, plan.parts, plan.virtual_stages, steps)
    for rank, (ran, sent, peak) in enumerate(run_ranks(2, traffic, plan, timeout_s=120)):
        assert [tuple(action) for action in every[rank]] == ran
        plans, tp = plan.stages_of(rank), plan.stages[0].mesh.tp
        stages = [own.stage for own in plans if own.stage is not None]
        assert sum(sent) == steps * sum(num_bytes((*stage.sends, *stage.receives), tp) for stage in stages)
        assert len(sent) == steps * sum(len(stage.sends) + len(stage.receives) for stage in stages)
        predicted = max(own.predicted.peak_memory_bytes for own in plans)
        # Gloo does not say that a send has arrived before it is waited for: gradients stay until the step ends.
        kept = steps * sum(num_bytes(stage.receives, tp) for stage in stages) if virtual > 1 else 0
        assert 0.97 * predicted < peak < (1.03 if virtual == 1 else 1.05) * predicted + kept


@pytest.mark.parametrize("virtual", [1, 2])
def test_ranks_hold_what_fsdp_keeps_from_one_micro_batch_to_the_next(virtual: int) -> None:
    """Weights and gradients that are gathered and reduced once a step are whole until then."""
    plan = solved(Stack, stages=2, gpus=4, virtual=virtual, tp=1, fsdp=2, whole_gradients=True, prove=False)
    assert all(stage.fsdp.gathered_once for stage in plan.stages)
    assert not any(any(stage.resharded_units().values()) for stage in plan.stages)
    for rank, (_, _, peak) in enumerate(run_ranks(4, traffic, plan, timeout_s=120)):
        predicted = max(own.predicted.peak_memory_bytes for own in plan.stages_of(rank))
        assert 0.97 * predicted < peak < 1.03 * predicted


class Counted(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        kinds = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
        self.found[kinds.get(name, "")] += name in kinds
        return func(*args, **(kwargs or {}))


def of_fsdp(plan: PipelinePlan) -> Counter[str]:
    """How often FSDP gathers and scatters in a rank's second step, by kind."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Stack(), plan)
    micro_batches = list(plan.batch_for(dist.get_rank()).micro_batches(given(Stack)))
    model.step(micro_batches, loss)  # type: ignore[operator]
    with Counted() as counted:
        model.step(micro_batches, loss)  # type: ignore[operator]
    return +counted.found


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize(("reshard", "is_once"), [(False, True), (True, True), (False, False)])
def test_fsdp_gathers_and_reduces_as_often_as_listed(virtual: int, reshard: bool, is_once: bool) -> None:
    """Once a step where a rank keeps both; else units that are not resharded once a micro-batch."""
    mesh = {"stages": 2, "gpus": 4, "tp": 1, "fsdp": 2, "virtual": virtual}
    plan = solved(Stack, **mesh, reshard_after_forward=reshard, whole_gradients=True)  # type: ignore[arg-type]
    assert all(stage.fsdp.whole_gradients and stage.fsdp.gathered_once for stage in plan.stages)
    if not is_once:
        stages = (replace(own, fsdp=replace(own.fsdp, gathered_once=None)) for own in plan.stages)
        plan = replace(plan, stages=tuple(stages))
    for rank, found in enumerate(run_ranks(4, of_fsdp, plan, timeout_s=120)):
        listed: Counter[str] = Counter()
        for stage in plan.stages_of(rank):
            for one in stage.collectives:
                listed[one.kind] += one.count if one.axis == "shard" else 0
        if is_once:
            assert found == listed
        else:  # the list is that of gathering once
            assert found["all_gather"] > listed["all_gather"]
            assert found["reduce_scatter"] == listed["reduce_scatter"]


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

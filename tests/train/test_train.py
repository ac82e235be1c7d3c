"""scripts/train.py: on real text, plans that shard train as one process does, in losses and every first gradient."""

import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from examples import eager_to_shard, solve_example
from one_process import relative_errors
from ranks import run_ranks
from test_readmes import run_command

import tpplan
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan, Precision
from tpplan.search.models.user_model import load_model_file
from tpplan.search.points.options import Options

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
LLAMA = ROOT / "scripts" / "examples" / "llama.py"
STEPS, BATCH, SEQ_LEN, LEARNING_RATE = 20, 8, 32, 1e-3
#: of a plan in the default suite, and after how many of them a run is resumed under another plan
FEWER_STEPS, RESUMED_AFTER = 8, 4

#: what the two may differ by after 20 steps, and a gradient relative to its parameter's largest; seen are 1e-6 and 1e-6
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-5
#: cross entropy of bytes drawn at random
LOSS_OF_NO_IDEA = math.log(256)


def script() -> ModuleType:
    """scripts/train.py as a module."""
    spec = importlib.util.spec_from_file_location("train_script", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


train = script()


def trained(plan: Plan | PipelinePlan | None, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and first gradients of the small Llama, on this process or as a rank of the plan."""
    model_file = train.load_model_file(str(LLAMA))
    torch.manual_seed(0)
    model = model_file.build_model()
    share = tpplan.BatchShare(global_batch=BATCH, seq_len=SEQ_LEN, micro_batch=BATCH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        share = plan.batch_for(dist.get_rank())
    history = train.train(
        model,
        model_file,
        share,
        steps=steps,
        lr=LEARNING_RATE,
        device=torch.device("cpu"),
        report=lambda _step, _loss: None,
        keep_gradients=True,
    )
    return history.losses, history.first_gradients


def interrupted(plan: Plan, checkpoints: Any, steps: int) -> tuple[int, list[float]]:
    """Where a run begins, and its losses. One that is resumed is built with other weights, which must not count."""
    model_file = train.load_model_file(str(LLAMA))
    torch.manual_seed(17 if checkpoints.resume else 0)
    model = tpplan.apply_plan(model_file.build_model(), plan)
    history = train.train(
        model,
        model_file,
        plan.batch_for(dist.get_rank()),
        steps=steps,
        lr=LEARNING_RATE,
        device=torch.device("cpu"),
        report=lambda _step, _loss: None,
        checkpoints=checkpoints,
    )
    return history.first_step, history.losses


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(None, STEPS)


def sharded_part(plan: Plan) -> float:
    """The part of the parameter elements that lie sharded on the tp axis."""
    sizes = {name: math.prod(parameter.shape) for name, parameter in plan.parameter_plans().items()}
    cut = [name for name, parameter in plan.parameter_plans().items() if str(parameter.placement).startswith("S")]
    return sum(sizes[name] for name in cut) / sum(sizes.values())


@pytest.mark.parametrize(
    ("tp", "fsdp", "micro_batch", "accumulation_steps", "steps"),
    [
        pytest.param(2, 1, 4, 2, FEWER_STEPS, id="tp2"),
        pytest.param(4, 1, 8, 1, STEPS, id="tp4", marks=pytest.mark.long),
        pytest.param(1, 4, 2, 1, STEPS, id="fsdp4", marks=pytest.mark.long),
        pytest.param(2, 2, 2, 2, FEWER_STEPS, id="tp2-fsdp2"),
        pytest.param(2, 2, 2, 2, STEPS, id="tp2-fsdp2 in 20 steps", marks=pytest.mark.long),
    ],
)
def test_plans_train_as_one_process_does(
    one_process: tuple[list[float], dict[str, torch.Tensor]],
    tp: int,
    fsdp: int,
    micro_batch: int,
    accumulation_steps: int,
    steps: int,
) -> None:
    batch = {"global_batch": BATCH, "micro_batch": micro_batch, "seq_len": SEQ_LEN}
    plan = solve_example("llama", eager_to_shard(), gpus=tp * fsdp, tp=tp, fsdp=fsdp, prove=False, **batch)
    assert plan.batch.accumulation_steps == accumulation_steps
    assert sharded_part(plan) > 0.9 if tp > 1 else plan.fsdp_units()
    expected_losses, expected = one_process
    for losses, gradients in run_ranks(plan.mesh.num_gpus, trained, plan, steps):
        differences = [abs(a - b) for a, b in zip(losses, expected_losses[:steps], strict=True)]
        assert max(differences) < LOSS_TOLERANCE
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error < GRADIENT_TOLERANCE, name


def test_a_model_in_interleaved_stages_trains_as_one_process_does(
    one_process: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    model_file = train.load_model_file(str(LLAMA))
    plan = tpplan.solve_stages(
        model_file.build_model,
        model_file.example_inputs,
        stages=2,
        virtual_stages=2,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=4,
        seq_len=SEQ_LEN,
        options=Options(loss=model_file.loss, precision=Precision.FP32),
        prove=False,
    )
    expected_losses, expected = one_process
    for losses, gradients in run_ranks(2, trained, plan, FEWER_STEPS):
        assert max(abs(a - b) for a, b in zip(losses, expected_losses[:FEWER_STEPS], strict=True)) < LOSS_TOLERANCE
        errors = relative_errors(gradients, expected)
        assert errors.keys() == expected.keys()
        assert max(errors.values()) < GRADIENT_TOLERANCE, max(errors, key=lambda name: errors[name])


@pytest.mark.slow
def test_resumed_under_another_plan_it_trains_as_one_process_does(
    one_process: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """The first steps on tp 2 x FSDP 2, the rest on FSDP 2."""
    expected, _ = one_process
    for tp, fsdp, first, last in ((2, 2, 0, RESUMED_AFTER), (1, 2, RESUMED_AFTER, FEWER_STEPS)):
        micro_batch = BATCH // 4
        batch = {"global_batch": BATCH, "micro_batch": micro_batch, "seq_len": SEQ_LEN}
        plan = solve_example("llama", eager_to_shard(), gpus=tp * fsdp, tp=tp, fsdp=fsdp, prove=False, **batch)
        checkpoints = train.Checkpoints(folder=tmp_path, every=3, resume=first > 0)
        for begun, losses in run_ranks(tp * fsdp, interrupted, plan, checkpoints, last):
            assert begun == first
            assert losses == pytest.approx(expected[first:last], abs=LOSS_TOLERANCE)
        assert tpplan.latest_checkpoint(tmp_path) == tmp_path / f"step-{last:08}"


def test_the_text_is_learned(one_process: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, _ = one_process
    assert abs(losses[0] - LOSS_OF_NO_IDEA) < 0.2
    assert losses[-1] < losses[0] - 1


def test_targets_are_the_bytes_after_the_tokens() -> None:
    text = train.train_text()
    assert b"import " in bytes(text.numpy())
    inputs = train.text_batch(text, 3, 16, seed=5)
    assert torch.equal(inputs["tokens"][:, 1:], inputs["targets"][:, :-1])
    again, other = train.text_batch(text, 3, 16, seed=5), train.text_batch(text, 3, 16, seed=6)
    assert torch.equal(inputs["tokens"], again["tokens"])
    assert not torch.equal(inputs["tokens"], other["tokens"])


@pytest.mark.parametrize(
    ("losses", "gradients", "message"),
    [
        ([2.0, 1.0002], {"w": [1.0, 0.5]}, r"losses: 2.0e-04 at step 1"),
        ([2.0, math.nan], {"w": [1.0, 0.5]}, r"losses: nan at step 1"),
        ([2.0, 1.0], {"w": [1.0, 0.5001]}, r"gradients of step 0, relative: 1.0e-04 at w"),
        ([2.0, 1.0], {"w": [1.0, 0.5], "v": [0.0]}, r"only one of them has gradients of v"),
    ],
)
def test_runs_that_differ_are_found(losses: list[float], gradients: dict[str, list[float]], message: str) -> None:
    reference = train.History(losses=[2.0, 1.0], first_gradients={"w": torch.tensor([1.0, 0.5])})
    tensors = {name: torch.tensor(values) for name, values in gradients.items()}
    with pytest.raises(SystemExit, match=message):
        train.compare(train.History(losses=losses, first_gradients=tensors), reference)


@pytest.mark.long
def test_torchrun_compares_a_plan_with_a_recorded_run(tmp_path: Path) -> None:
    batch = {"global_batch": BATCH, "micro_batch": 4, "seq_len": SEQ_LEN}
    plan, recorded = tmp_path / "plan.json", tmp_path / "alone.pt"
    solve_example("llama", eager_to_shard(), gpus=2, tp=2, prove=False, **batch).dump(plan)
    options = [str(LLAMA), "--steps", "3", "--device", "cpu"]
    train.main([*options, "--batch", str(BATCH), "--seq-len", str(SEQ_LEN), "--record", str(recorded)])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(TRAIN), *options, "--plan", str(plan), "--against", str(recorded)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["step", "0"], ["step", "1"], ["step", "2"]]
    assert lines[3].startswith("median step")
    assert lines[4].startswith("losses: largest difference")
    assert lines[5].startswith("gradients of step 0, relative: largest difference")


def test_a_run_of_one_process_is_interrupted_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(LLAMA), "--device", "cpu", "--batch", "4", "--seq-len", "8"]
    folder, recorded = tmp_path / "checkpoints", tmp_path / "alone.pt"
    train.main([*options, "--steps", "5", "--record", str(recorded)])
    train.main([*options, "--steps", "3", "--checkpoints", str(folder), "--save-every", "2"])
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000003"]
    capsys.readouterr()
    resumed = [*options, "--checkpoints", str(folder), "--resume"]
    train.main([*resumed, "--steps", "5", "--against", str(recorded)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["step", "3"], ["step", "4"]]
    assert lines[3].startswith("losses: largest difference 0.0e+00 (step 3)")
    assert len(lines) == 4
    with pytest.raises(SystemExit, match="is at step 5: nothing is left to do up to --steps 5"):
        train.main([*resumed, "--steps", "5"])
    with pytest.raises(SystemExit, match="give both the same batch"):
        train.main([*resumed, "--steps", "6", "--batch", "2"])
    with pytest.raises(SystemExit):
        train.main([*options, "--resume"])
    assert "--resume and --save-every need --checkpoints" in capsys.readouterr().err


def test_a_hugging_face_model_trains_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source = f"hf:{tmp_path / 'config.json'}"
    plan, recorded = tmp_path / "plan.json", tmp_path / "alone.pt"
    spec = load_model_file(source)
    tpplan.solve(
        spec.build_model,
        spec.example_inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        unused_outputs=spec.unused_outputs,
        global_batch=4,
        micro_batch=4,
        seq_len=16,
        tp=2,
        precision="fp32",
    ).dump(plan)
    options = [source, "--steps", "2", "--device", "cpu"]
    train.main([*options, "--batch", "4", "--seq-len", "16", "--record", str(recorded)])
    sharded = ["torchrun", "--nproc-per-node", "2", str(TRAIN), *options, "--plan", str(plan)]
    output = run_command([*sharded, "--against", str(recorded)], tmp_path)
    assert "gradients of step 0, relative: largest difference" in output

"""Recipes for other libraries' loops: on two ranks each trains as one process does. Skipped where a library is not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import eager_to_shard, example, solve_example
from torch import Tensor, nn

import tpplan
from tpplan.plan.batch_share import BatchShare
from tpplan.search.models.user_model import load_model_file

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "scripts" / "examples"
STEPS, BATCH, SEQ_LEN = 3, 8, 16
MESHES = {"tensor parallel": {"tp": 2, "fsdp": 1}, "FSDP": {"tp": 1, "fsdp": 2}}
CONFIG = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
CONFIG |= {"bos_token_id": 1, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"no {name} here")
    for name in ("accelerate", "lightning", "transformers", "trl")
}


def losses_of(command: list[str]) -> list[float]:
    """The losses that a script prints, by step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", ran.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(STEPS)), ran.stdout
    return [float(loss) for _, loss in found]


def on_two_ranks(script: str, *arguments: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / script), *arguments]


def rows_by_step(num_samples: int) -> Iterable[list[int]]:
    """The samples of each global batch, as one process reads them."""
    return tpplan.PlanSampler(BatchShare(global_batch=BATCH, seq_len=SEQ_LEN, micro_batch=BATCH), num_samples)


def trained(model: nn.Module, loss_of: Any, *, clip: bool) -> list[float]:
    """Losses of one process's steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for rows in rows_by_step(STEPS * BATCH):
        loss = loss_of(model, rows)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_llama(*, clip: bool) -> list[float]:
    """The losses of our own Llama in one process."""
    module = example("llama")
    data = module.example_inputs(STEPS * BATCH, SEQ_LEN)

    def loss_of(model: nn.Module, rows: list[int]) -> Tensor:
        inputs = {name: tensor[rows] for name, tensor in data.items()}
        return module.loss(model(inputs["tokens"]), inputs)

    torch.manual_seed(0)
    return trained(module.build_model(), loss_of, clip=clip)


def planned(folder: Path, mesh: str) -> str:
    """A plan of our Llama for two ranks in micro-batches of 2: it accumulates."""
    options = {"global_batch": BATCH, "micro_batch": 2, "seq_len": SEQ_LEN, **MESHES[mesh]}
    solve_example("llama", eager_to_shard(), gpus=2, **options).dump(folder / "plan.json")
    return str(folder / "plan.json")


@needs["accelerate"]
@pytest.mark.parametrize("mesh", MESHES)
def test_in_accelerate(mesh: str, tmp_path: Path) -> None:
    found = losses_of(on_two_ranks("in_accelerate.py", planned(tmp_path, mesh)))
    assert found == pytest.approx(of_llama(clip=True), rel=1e-5)


@needs["lightning"]
@pytest.mark.parametrize("mesh", MESHES)
def test_in_lightning(mesh: str, tmp_path: Path) -> None:
    found = losses_of([str(EXAMPLES / "in_lightning.py"), planned(tmp_path, mesh)])
    assert found == pytest.approx(of_llama(clip=False), rel=1e-5)


def planned_config(folder: Path, mesh: str) -> tuple[str, str]:
    """A plan of transformers' Llama for two ranks, and its config."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    spec = load_model_file(f"hf:{config}")
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    options = {"global_batch": BATCH, "micro_batch": 2, "seq_len": SEQ_LEN, "precision": "fp32", "all_gpus": True}
    plan = tpplan.solve(
        spec.build_model, spec.example_inputs, loss=spec.loss, cluster=cluster, **options, **MESHES[mesh]
    )
    assert any(str(own.placement) != "R" for own in plan.parameters.values()) or mesh == "FSDP"
    plan.dump(folder / "plan.json")
    return str(folder / "plan.json"), str(config)


@needs["accelerate"]
@needs["transformers"]
@pytest.mark.parametrize("mesh", MESHES)
def test_in_the_trainer_of_transformers(mesh: str, tmp_path: Path) -> None:
    plan, config = planned_config(tmp_path, mesh)
    found = losses_of(on_two_ranks("in_hf_trainer.py", plan, config))
    assert found == pytest.approx(of_config(config), rel=1e-4)


@needs["accelerate"]
@needs["trl"]
@pytest.mark.parametrize("mesh", MESHES)
def test_in_the_sft_trainer_of_trl(mesh: str, tmp_path: Path) -> None:
    plan, config = planned_config(tmp_path, mesh)
    found = losses_of(on_two_ranks("in_trl_sft.py", plan, config))
    assert found == pytest.approx(of_config(config), rel=1e-4)


def of_config(config: str) -> list[float]:
    """The losses of transformers' model of a config in one process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = torch.randint(CONFIG["vocab_size"], (STEPS * BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    return trained(model, lambda own, rows: own(input_ids=tokens[rows], labels=tokens[rows]).loss, clip=True)

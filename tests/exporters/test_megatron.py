"""Plans as flags of Megatron-LM: what they say, and the comments on what they do not."""

import re

import pytest
import torch
from examples import eager_to_shard, example, solve_example
from torch import Tensor, nn

import tpplan
from tpplan.exporters import export
from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Plan

MEGATRON = {"layers.*": "megatron", "tok_embeddings": "vocabulary", "lm_head": "column"}
WHOLE = {"layers.*.*_norm": "replicated", "norm": "replicated"}
SLICED = {"layers.*.*_norm": "sequence", "norm": "sequence"}


class Layer(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


class Single(nn.Module):
    """Layers of one linear layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def numbers(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, 16)}


def mean(outputs: Tensor, _inputs: object) -> Tensor:
    return outputs.square().mean()


def flags_of(plan: Plan) -> tuple[list[str], list[str]]:
    """The flags, and the comments."""
    module = example("llama")
    lines = export(plan, module.build_model, module.example_inputs, loss=module.loss, to="megatron").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert lines == [line for line in lines if line not in comments] + comments
    return [line for line in lines if line not in comments], comments


@pytest.mark.parametrize("norms", [WHOLE, SLICED])
def test_a_plan_as_megatron_lm_would_run_it_is_said_whole(norms: dict[str, str]) -> None:
    degrees = {"gpus": 4, "tp": 2, "fsdp": 2, "micro_batch": 1}
    machine = eager_to_shard() if norms is SLICED else load_profile("cpu-gloo")
    plan = solve_example("llama", machine, pins=MEGATRON | norms, recompute="full", **degrees)
    flags, comments = flags_of(plan)
    assert comments == []
    assert ("--sequence-parallel" in flags) == (norms is SLICED)
    assert set(flags) - {"--sequence-parallel"} == {
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 1",
        "--micro-batch-size 1",
        "--global-batch-size 8",
        "--seq-length 32",
        "--optimizer adam",
        "--use-megatron-fsdp",
        "--use-distributed-optimizer",
        "--no-gradient-accumulation-fusion",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"layers.*": "replicated"}, "layers.0.attention.q_proj, .* more: replicated"),
        ({"tok_embeddings": "replicated"}, "tok_embeddings: replicated"),
        ({"lm_head": "slices"}, "lm_head: on slices"),
    ],
)
def test_what_the_plan_does_otherwise_is_named(changed: dict[str, str], told: str) -> None:
    plan = solve_example("llama", eager_to_shard(), gpus=2, tp=2, fsdp=1, pins=MEGATRON | changed)
    comments = "\n".join(flags_of(plan)[1])
    assert comments.startswith("# not said: ")
    assert re.search(told, comments), comments


def test_layers_without_a_pair_of_matrices_are_named() -> None:
    """No matrix leads to another, so that there is nothing that Megatron-LM would split by columns, then by rows."""
    profile, pins = eager_to_shard(), {"layers.*.linear": "column"}
    plan = tpplan.solve(
        Single,
        numbers,
        loss=mean,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=profile),
        global_batch=4,
        seq_len=8,
        tp=2,
        precision="fp32",
        pins=pins,
    )
    text = export(plan, Single, numbers, loss=mean, to="megatron")
    assert "# not said: layers.0.linear, layers.1.linear: column parallel" in text


def test_copies_and_gathered_parameters_are_said() -> None:
    plan = solve_example("llama", eager_to_shard(), gpus=4, tp=1, fsdp=2, reshard_after_forward=False, micro_batch=2)
    flags, comments = flags_of(plan)
    assert plan.mesh.replicate == 2
    assert {"--data-parallel-sharding-strategy optim_grads", "--num-distributed-optimizer-instances 2"} <= set(flags)
    assert comments == []

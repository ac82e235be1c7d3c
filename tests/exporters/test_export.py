"""Exported plans: what is written runs without tpplan, and trains as one process does; the rest is refused by name."""

import contextlib
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import eager_to_shard, example, solve_example
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from tpplan.commands import main
from tpplan.core.errors import ExportError, UsageError
from tpplan.exporters import export, exporters
from tpplan.plan.plan import Plan

#: links fast enough to shard, and dear enough to convert once
LINKS = {"intra_bytes_per_s": 1e8, "latency_s": 1e-4}
MEGATRON = {"layers.*.attention": "megatron", "layers.*.feed_forward": "megatron", "tok_embeddings": "vocabulary"}
GPT = MEGATRON | dict.fromkeys(("tok_embeddings", "pos_embeddings"), "replicated")
NORMS = dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm", "norm"), "sequence")
BATCH, SEQ_LEN = 8, 32


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


class Tuned(Tied):
    """Of which only the feed-forward is trained, its head on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        for module in (self.embed, self.norm, self.head):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


class Head(nn.Module):
    """A head whose bias has a name in it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(32, 64)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


class Named(Tied):
    """Whose head's bias has two names, the first of which belongs to no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.head.decoder.weight = self.embed.weight


class Sized(nn.Module):
    """Has numbers of heads in its code, which a rank's own would replace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (own(x).view(*tokens.shape, 4, 8).transpose(1, 2) for own in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*tokens.shape, 32)
        return self.head(x + self.o(y))


BUILDERS = {"tied": Tied, "tuned": Tuned, "named": Named, "sized": Sized}


@functools.cache
def planned(name: str, gpus: int, options: tuple[tuple[str, Any], ...]) -> Plan:
    settings = {"micro_batch": BATCH * dict(options)["tp"] // gpus, "seq_len": SEQ_LEN, "global_batch": BATCH}
    return solve_example(
        base_of(name),
        eager_to_shard(**LINKS),
        gpus=gpus,
        builder=BUILDERS.get(name),
        **settings,
        **dict(options, pins=pins_of(options)),
    )


def pins_of(options: tuple[tuple[str, Any], ...]) -> dict[str, str]:
    return dict(dict(options).get("pins", ()))


def base_of(name: str) -> str:
    """The example whose inputs and loss a model has."""
    return "llama" if name in BUILDERS else name


def exported(name: str, plan: Plan) -> str:
    module = example(base_of(name))
    return export(plan, BUILDERS.get(name, module.build_model), module.example_inputs, loss=module.loss)


def load(text: str) -> Any:
    """The file's parallelize, out of a file: its classes want their sources."""
    namespace: dict[str, Any] = {"__name__": "parallelize"}
    exec(compile(text, "parallelize.py", "exec"), namespace)
    return namespace["parallelize"]


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter, of a step in two micro-batches."""
    losses = []
    for half in range(2):
        part = {key: value.chunk(2)[half] for key, value in inputs.items()}
        given = {key: part[key] for key in part if key != "targets"}
        output = model(**given)
        classes = output.shape[-1]
        is_split = isinstance(output, DTensor)
        with loss_parallel() if is_split else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(output.reshape(-1, classes), part["targets"].reshape(-1)) / 2
            loss.backward()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach())
    found = {key: parameter.grad for key, parameter in model.named_parameters()}
    whole = {key: grad.full_tensor() if isinstance(grad, DTensor) else grad for key, grad in found.items()}
    return {"loss": sum(losses), **{key: grad for key, grad in whole.items() if grad is not None}}


def built(name: str) -> nn.Module:
    torch.manual_seed(1)
    return BUILDERS[name]() if name in BUILDERS else example(name).build_model()


def batch(name: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    made = example(base_of(name)).example_inputs(BATCH, SEQ_LEN)
    high = 10
    return {
        k: torch.randint(high, v.shape) if v.dtype == torch.int64 else torch.randn(v.shape) for k, v in made.items()
    }


def on_rank(name: str, plan: Plan, text: str) -> dict[str, Tensor]:
    model = load(text)(built(name), "cpu")
    data_rank, ranks = plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel
    share = {key: value.chunk(ranks)[data_rank] for key, value in batch(name).items()}
    found = gradients(model, share)
    dist.all_reduce(found["loss"])
    found["loss"] /= dist.get_world_size()
    return {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in found.items()}


CASES = {
    "Megatron": ("llama", 2, {"tp": 2, "pins": MEGATRON}),
    "sequence": ("llama", 2, {"tp": 2, "pins": MEGATRON | NORMS}),
    "with FSDP": ("llama", 4, {"tp": 2, "pins": MEGATRON | NORMS, "fsdp": 2}),
    "with replicas": ("llama", 4, {"tp": 2, "pins": MEGATRON, "fsdp": 1}),
    "FSDP alone": ("llama", 4, {"tp": 1, "fsdp": 4, "recompute": "full"}),
    "recomputed": ("llama", 2, {"tp": 2, "pins": MEGATRON | NORMS, "recompute": "selective"}),
    "biases": ("gpt", 2, {"tp": 2, "pins": GPT | NORMS}),
    "four ranks": ("gpt", 4, {"tp": 4, "pins": GPT}),
    "tied": ("tied", 2, {"tp": 2, "pins": {"embed": "vocabulary"}}),
    "two names": ("named", 2, {"tp": 2, "pins": {"embed": "vocabulary"}}),
    "two names, whole": ("named", 2, {"tp": 2, "pins": {"embed": "replicated", "up": "columns", "down": "rows"}}),
    "frozen": ("tuned", 2, {"tp": 2, "pins": {"embed": "vocabulary"}}),
    "no boundary between": ("mlp", 2, {"tp": 2}),
    "sizes in code": ("sized", 2, {"tp": 2, "pins": dict.fromkeys("qkv", "columns") | {"o": "rows"}}),
    "whole between layers": ("gpt", 2, {"tp": 2, "pins": MEGATRON}),
}


def frozen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, tuple(value.items()) if isinstance(value, dict) else value) for key, value in options.items())


LONG = ("sequence", "with replicas", "four ranks", "recomputed", "FSDP alone")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES])
def test_it_trains_as_one_process_does(case: str) -> None:
    name, gpus, options = CASES[case]
    plan = planned(name, gpus, frozen(options))
    text = exported(name, plan)
    assert not re.search(r"^(import|from) tpplan", text, re.MULTILINE)
    expected = gradients(built(name), batch(name))
    for found in run_ranks(gpus, on_rank, name, plan, text):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # A bias of keys has no gradient but noise: it adds the same to all scores of a query.
            torch.testing.assert_close(
                found[key], value, rtol=1e-4, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_megatron_reads_as_one_would_write_it() -> None:
    text = exported("llama", planned("llama", 2, frozen(CASES["sequence"][2])))
    for line in (
        'entering[f"layers.{i}.attention"] = Entering(x=(Shard(1), Replicate(), True))',
        'layers[f"layers.{i}.attention_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)',
        'layers[f"layers.{i}.attention.q_proj"] = ColwiseParallel(output_layouts=Shard(2))',
        'layers[f"layers.{i}.attention.o_proj"] = RowwiseParallel(output_layouts=Shard(1))',
    ):
        assert text.count(line) == 1, line
    assert "fully_shard" not in text
    assert "OnDTensors" not in text


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("nanogpt", {"tp": 2, "pins": {"transformer.h.*.attn": "megatron"}}, r"weight as S\(0; 64, 64, 64\)"),
        ("vit", {"tp": 2}, "parameters of its own beside other modules"),
    ],
)
def test_what_torch_has_no_words_for_is_refused_by_name(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExportError, match=f"module .*: .*{reason}"):
        exported(name, planned(name, 2, frozen(options)))


def test_an_unknown_form_is_an_error_that_lists_what_there_is() -> None:
    module, plan = example("mlp"), planned("mlp", 2, (("tp", 2),))
    with pytest.raises(
        UsageError, match="'jax': expected one of accelerate, huggingface, megatron, pytorch, sharding_specs"
    ):
        export(plan, module.build_model, module.example_inputs, to="jax")
    assert exporters()["pytorch"].startswith("Plain PyTorch")


def test_the_command_writes_a_file_that_imports_without_tpplan(tmp_path: Path) -> None:
    plan, model = tmp_path / "plan.json", tmp_path / "parallelize.py"
    planned("mlp", 2, (("tp", 2),)).dump(plan)
    source = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "mlp.py"
    assert main(["export", str(plan), str(source), "-o", str(model)]) == 0
    code = "import sys, parallelize; assert not any(name.startswith('tpplan') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)

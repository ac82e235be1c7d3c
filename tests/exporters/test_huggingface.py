"""Plans of transformers' models, as its tp_plan and in plain torch: on two ranks they train as one process does."""

import functools
import importlib.util
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard, example, solve_example
from ranks import run_ranks
from test_export import load
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import tpplan
from tpplan.core.errors import ExportError
from tpplan.exporters import export
from tpplan.exporters._own_layers import Style
from tpplan.exporters.huggingface import by_pattern
from tpplan.plan.plan import Plan

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"*.self_attn.[qkv]_proj": "columns", "*.self_attn.o_proj": "rows"}
MEGATRON = {f"model.layers.{name}": style for name, style in ATTENTION.items()} | {"model.layers.*.mlp": "megatron"}
NORMS = ("model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm")
WHOLE_NORMS = dict.fromkeys(NORMS, "replicated")
CUT_VOCABULARY = {"model.embed_tokens": "vocabulary", "lm_head": "columns"}
WHOLE_VOCABULARY = {"model.embed_tokens": "replicated"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"attention.self.*": "columns", "attention.output.dense": "rows"}
BERT |= {"intermediate.dense": "columns", "output.dense": "rows"}
T5_ATTENTION = ("encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.0.SelfAttention")
T5_ATTENTION += ("decoder.block.*.layer.1.EncDecAttention",)
T5 = {f"{name}.[qkv]": "columns" for name in T5_ATTENTION} | {f"{name}.o": "rows" for name in T5_ATTENTION}
GPT2 = {"transformer.h.*.attn": "megatron", "transformer.h.*.mlp": "megatron", "transformer.wte": "replicated"}
NANOGPT = {"transformer.h.*.attn": "megatron"}
#: by case: the model type, what its config adds, and pins
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Megatron": ("llama", {}, MEGATRON | WHOLE_NORMS | CUT_VOCABULARY),
    "norms of heads, tied": ("qwen3", {"tie_word_embeddings": True}, MEGATRON | WHOLE_NORMS | WHOLE_VOCABULARY),
    "two names of a bias": (
        "bert",
        {"is_decoder": True, **NO_DROPOUT},
        {f"bert.encoder.layer.*.{name}": style for name, style in BERT.items()} | {"cls.predictions": "replicated"},
    ),
    # heads that a bias and a mask have, too: these are whole, and so is what reads them
    # weights that are not nn.Linear's, q, k and v among them in one
    "dims in the other order": ("gpt2", {f"{part}_pdrop": 0.0 for part in ("attn", "embd", "resid")}, GPT2),
    "encoder and decoder": ("t5", {"d_kv": 8, "d_ff": 64, "dropout_rate": 0.0, "decoder_start_token_id": 0}, T5),
}
LONG = pytest.mark.long
SHORT = ("Megatron", "dims in the other order", "encoder and decoder")
GATHERED = SHORT[1:]
BATCH, SEQ_LEN = 4, 16


def config_of(name: str, more: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(name, **SIZES, **more)


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    tokens = torch.arange(batch * seq_len).reshape(batch, seq_len) * 7 % SIZES["vocab_size"]
    return {"input_ids": tokens, "labels": tokens}


def built(case: str) -> nn.Module:
    name, more, _ = CASES[case]
    config = config_of(name, more)
    family = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return family.from_config(config)


def loss_of(output: Any, _inputs: object) -> Tensor:
    return output.loss


@functools.cache
def planned(case: str) -> Plan:
    """The plan of a case on two ranks."""
    return tpplan.solve(
        functools.partial(built, case),
        inputs,
        loss=loss_of,
        unused_outputs=("logits",),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=SEQ_LEN,
        tp=2,
        precision="fp32",
        recompute="none",
        pins=CASES[case][2],
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard(latency_s=1e-4)),
    )


@functools.cache
def exported(case: str, to: str) -> str:
    return export(planned(case), functools.partial(built, case), inputs, loss=loss_of, to=to)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The loss, and the whole gradient of every parameter."""
    loss = model(**inputs(BATCH, SEQ_LEN)).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}
    return {"loss": loss.detach(), **whole}


def on_rank(folder: str, styles: dict[str, str]) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients, and the names of parameters that transformers has cut."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    distributed = transformers.distributed.DistributedConfig(tp_size=2, tp_plan=styles)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)
    cut = [n for n, p in model.named_parameters() if isinstance(p, DTensor) and isinstance(p.placements[0], Shard)]
    return gradients(model), cut


def takes_tp_plan() -> bool:
    """True for a transformers whose DistributedConfig has a tp_plan; its from_pretrained then needs accelerate."""
    if importlib.util.find_spec("accelerate") is None:
        return False
    found = getattr(getattr(transformers, "distributed", None), "DistributedConfig", None)
    return found is not None and "tp_plan" in inspect.signature(found).parameters


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: key + text)


@pytest.mark.skipif(not takes_tp_plan(), reason="needs accelerate, and a transformers that takes one's own tp_plan")
@pytest.mark.parametrize("case", ["Megatron", pytest.param("norms of heads, tied", marks=LONG)])
def test_transformers_trains_with_it_as_one_process_does(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = built(case)
    model.save_pretrained(tmp_path)
    expected = gradients(model)
    planned_cut = sorted(key for key, found in planned(case).parameter_plans().items() if str(found.placement) != "R")
    for found, cut in run_ranks(2, on_rank, str(tmp_path), json.loads(exported(case, "huggingface"))):
        assert sorted(cut) == planned_cut
        assert_same(found, expected)


def in_plain_torch(case: str, text: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return gradients(load(text)(built(case), "cpu"))


@pytest.mark.parametrize("case", [case if case in SHORT else pytest.param(case, marks=LONG) for case in CASES])
def test_plain_torch_trains_with_it_as_one_process_does(case: str) -> None:
    text = exported(case, "pytorch")
    is_followed = "Weights are cut as planned, and tensors between the cut layers are whole" not in text
    assert is_followed == (case == "two names of a bias")
    assert ("are gathered, and what reads them runs whole" in " ".join(text.split())) == (case in GATHERED)
    torch.manual_seed(0)
    expected = gradients(built(case))
    for found in run_ranks(2, in_plain_torch, case, text):
        assert_same(found, expected)


def test_megatron_is_what_transformers_itself_has_for_the_model() -> None:
    text = json.loads(exported("Megatron", "huggingface"))
    own = config_of("llama", {}).base_model_tp_plan
    assert {f"model.{name}": style for name, style in own.items()}.items() <= text.items()
    assert text["lm_head"] == "colwise_gather_output"
    assert text["model.norm"] == "replicate"


def test_what_a_dict_cannot_say_is_refused_by_name() -> None:
    module = example("nanogpt")
    plan = solve_example("nanogpt", eager_to_shard(), gpus=2, tp=2, micro_batch=8, pins=NANOGPT)
    with pytest.raises(
        ExportError, match=r"module transformer.h.0.attn.c_attn: Linear with .*S\(0; 64, 64, 64\).*: use apply_plan"
    ):
        export(plan, module.build_model, module.example_inputs, loss=module.loss, to="huggingface")
    styles = {"layers.0.up": Style.COLUMNS, "layers.1.up": Style.WHOLE}
    with pytest.raises(
        ExportError, match=r"layers.0.up is colwise and layers.1.up is replicate: .* for all of layers.\*"
    ):
        by_pattern(styles)

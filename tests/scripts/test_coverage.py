"""scripts/evidence/coverage.py: widths, shares and errors are what its table says they are."""

import importlib.util
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import in_fork
from torch import nn

from tpplan.core.layout import S
from tpplan.plan.plan import SizePlan

pytest.importorskip("transformers")
EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/evidence/coverage.py."""
    return loaded()


def loaded() -> ModuleType:
    """scripts/evidence/coverage.py, under a name that is not that of the package `coverage`."""
    spec = importlib.util.spec_from_file_location("coverage_script", EVIDENCE / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # rows are pickled
    sys.path.append(str(EVIDENCE))  # for what stands beside it
    spec.loader.exec_module(module)
    sys.path.remove(str(EVIDENCE))
    return module


@pytest.fixture(scope="module")
def models(script: ModuleType) -> ModuleType:
    """scripts/evidence/hugging_face.py."""
    return sys.modules["hugging_face"]


def test_one_layer_of_each_kind_is_kept(models: ModuleType) -> None:
    assert models.config_of("gemma3_text", tiny=False).layer_types == ["sliding_attention", "full_attention"]
    assert models.config_of("smollm3", tiny=False).no_rope_layers == [1, 0]
    assert models.config_of("llama", tiny=False).num_hidden_layers == 2


def test_the_published_width_is_kept_and_the_twins_is_small(models: ModuleType) -> None:
    wide, twin = (models.config_of("llama", tiny=tiny) for tiny in (False, True))
    assert (wide.hidden_size, wide.num_key_value_heads) == (4096, 32)
    assert (twin.hidden_size, twin.num_key_value_heads) == (64, 8)  # as many as heads, as in the wide one
    assert models.config_of("mistral", tiny=True).num_key_value_heads == 4
    assert models.config_of("gpt2", tiny=True).resid_pdrop == 0.0


@pytest.mark.parametrize(
    ("model_type", "built"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert:CAUSAL_LM", "BertLMHeadModel"),
        ("vit", "ViTForImageClassification"),
        ("bart", "BartForCausalLM"),
        ("bart:SEQ2SEQ_LM", "BartForConditionalGeneration"),
    ],
)
def test_a_type_is_built_for_the_task_that_is_named(models: ModuleType, model_type: str, built: str) -> None:
    with torch.device("meta"):
        assert type(models.model_of(model_type, tiny=True).build_model()).__name__ == built


def test_a_star_is_every_type_of_a_task(models: ModuleType) -> None:
    types = models.types_of("*:CTC")
    assert "wav2vec2:CTC" in types
    assert "bert:CTC" not in types
    assert models.types_of("llama") == ["llama"]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "clip", "resnet", "t5"])
def test_a_twin_has_the_names_of_the_wide_model(models: ModuleType, model_type: str) -> None:
    with torch.device("meta"):
        wide, twin = (models.model_of(model_type, tiny=tiny).build_model() for tiny in (False, True))
    assert {name for name, _ in wide.named_parameters()} == {name for name, _ in twin.named_parameters()}


class Attention(nn.Module):
    """As many key-value heads of as many elements as queries, in one projection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.width = width
        self.is_causal = True
        self.qkv = nn.Linear(width, 3 * width)


class Block(nn.Module):
    """Attention, and sizes in lists."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.sizes = [5 * width, "any", 7 * num_heads]
        self.window = width


def correspondence(models: ModuleType, wide: nn.Module, twin: nn.Module, **changes: object) -> object:
    """Of two models at sequences of 100 and 10."""
    return models.Correspondence(wide=wide, twin=twin, wide_seq_len=100, twin_seq_len=10, **changes)


def test_sizes_correspond_by_name(models: ModuleType) -> None:
    numbers = correspondence(models, Block(64, 16), Block(8, 4))
    assert numbers.in_twin("attention", 16) == 4  # num_heads
    assert numbers.in_twin("attention", 64) == 8  # width, and dims
    assert numbers.in_twin("attention.qkv", 192) == 24  # a dim, and out_features
    assert numbers.in_twin("attention.qkv", 16) == 4  # of the module around it
    assert numbers.in_twin("", 5 * 64) == 5 * 8
    assert numbers.in_twin("attention.qkv", 7 * 16) == 7 * 4
    assert numbers.in_twin("attention", 100) == 10  # the sequence


def test_sizes_without_one_counterpart_are_refused(models: ModuleType) -> None:
    numbers = correspondence(models, Block(64, 64), Block(8, 4))
    with pytest.raises(ValueError, match="what 64 in attention is in the twin is 4 or 8"):
        numbers.in_twin("attention", 64)
    assert numbers.in_twin("attention.qkv", 64) == 8  # the nearest decides
    with pytest.raises(ValueError, match="what 128 in attention is in the twin is unknown"):
        numbers.in_twin("attention", 128)
    with pytest.raises(ValueError, match="what 1 in attention is"):  # is_causal is no size
        numbers.in_twin("attention", 1)


def test_sums_of_parts_correspond_in_the_modules_around_them(models: ModuleType) -> None:
    parts = (("attention.qkv", (64, 64, 64), (8, 8, 8)),)
    numbers = correspondence(models, Block(64, 16), Block(8, 4), parts=parts)
    assert numbers.in_twin("attention", 128) == 16


def test_sizes_of_configurations_correspond(models: ModuleType) -> None:
    with torch.device("meta"):
        wide, twin = (models.model_of("llama", tiny=tiny).build_model() for tiny in (False, True))
    numbers = models.Correspondence(wide=wide, twin=twin)
    assert numbers.in_twin("", 32000) == models.VOCABULARY
    assert numbers.in_twin("model.layers.1.mlp", 11008) == 128  # intermediate_size


def test_a_written_size_keeps_its_share(script: ModuleType, models: ModuleType) -> None:
    numbers = correspondence(models, Block(64, 16), Block(8, 4))
    size = SizePlan(call="view", of=(0, 0, 64), count=4, position=2, written=16, local=2)  # on 8 ranks
    assert script._local_size(size, "attention", numbers, 8, 4) == replace(size, of=(0, 0, 0), written=4, local=1)
    with pytest.raises(ValueError, match="16 in attention is 4 in the twin, which 8 does not divide"):
        script._local_size(size, "attention", numbers, 8, 8)


def test_parts_correspond(script: ModuleType, models: ModuleType) -> None:
    numbers = correspondence(models, Block(64, 16), Block(8, 4))
    assert script._with_parts_of(S(2, 64, 64, 64), "attention.qkv", numbers) == S(2, 8, 8, 8)
    assert script._with_parts_of(S(0, 64, 16), "attention", numbers, 12) == S(0, 8, 4)
    assert script._with_parts_of(S(1), "attention", numbers) == S(1)
    with pytest.raises(ValueError, match=re.escape("parts of S(0; 64, 16) in attention are [8, 4] in the twin")):
        script._with_parts_of(S(0, 64, 16), "attention", numbers, 13)
    with pytest.raises(ValueError, match=re.escape("parts of S(0; 80, 80): what 160 in attention")):
        script._with_parts_of(S(0, 80, 80), "attention", numbers)


SHIPPED = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
}


@pytest.mark.parametrize(
    ("name", "num_dims", "sharded"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.layers.12.self_attn.q_proj.bias", 1, True),
        ("model.layers.0.self_attn.o_proj.bias", 1, False),
        ("model.layers.0.self_attn.q_norm.weight", 1, False),
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("model.layers.0.mlp.experts.down_proj", 3, False),
        ("model.layers.0.mlp.gate.weight", 2, False),
    ],
)
def test_what_a_shipped_plan_shards(script: ModuleType, name: str, num_dims: int, sharded: bool) -> None:
    assert script.expert_shards(SHIPPED, name, num_dims) is sharded


def test_errors_are_relative_and_what_is_missing_is_infinite(script: ModuleType) -> None:
    reference = script.Outcome(2.0, {"large": torch.tensor([10.0]), "small": torch.tensor([1e-6]), "frozen": None})

    def expect(error: float, of: str, **changes: torch.Tensor | None) -> None:
        found, name = script.worst_error(script.Outcome(2.0, {**reference.gradients, **changes}), reference)
        assert name == of
        assert found == pytest.approx(error)

    expect(0.1, "large", large=torch.tensor([11.0]))
    # Below the noise of 1e-3 x 10, twice as much is no error of 1 but of 1e-6 / 1e-2.
    expect(1e-4, "small", small=torch.tensor([2e-6]))
    expect(math.inf, "large", large=torch.tensor([math.nan]))
    expect(math.inf, "small", small=None)
    expect(math.inf, "frozen", frozen=torch.tensor([0.0]))
    assert script.worst_error(reference, reference)[0] == 0.0
    assert script.worst_error(replace(reference, loss=2.2), reference) == (pytest.approx(0.1), "loss")


def test_the_bars(script: ModuleType) -> None:
    good = script.TypeRow(model="m", sharded={2: 0.9}, expert=0.9, proven={2: True}, errors={2: 1e-6})
    assert good.is_right_and_sharded
    assert good.status == "proven"
    assert replace(good, errors={2: 1e-3}).status == "wrong"
    assert not replace(good, sharded={2: 0.9, 8: 0.5}).is_sharded_enough
    assert replace(good, sharded={2: 0.1}, expert=None).is_sharded_enough
    assert not replace(good, failed="trace").is_proven
    assert not script.TypeRow(model="m").is_right_and_sharded


def row_of_llama() -> object:
    script = loaded()
    options = script.Options(
        degrees=(2,), numeric_degrees=(2,), profile=script.machine(), precision="bf16-mixed", budget_s=240.0
    )
    return script.run("llama", options)


@pytest.mark.long
def test_llama_meets_all_bars(script: ModuleType) -> None:
    row = in_fork(row_of_llama)
    assert row.is_right_and_sharded, row
    assert row.choices == {2: "same"}

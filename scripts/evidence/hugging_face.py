"""Of a Hugging Face model type its published width, a tiny twin of it, inputs, and what a size of the one is in the
other. For the scripts beside this file.

A model type is a row of data: what to change in its default configuration. Most need no row: sizes are found by the
names that configurations share. Both widths have the same few layers, one or more of each kind, and so the same
parameter names.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import transformers

from tpplan.core.graph import within
from tpplan.core.part_intervals import Parts

if TYPE_CHECKING:
    from torch import Tensor, nn

Values = Mapping[str, object]

LANGUAGE_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "gpt_neox", "olmo2", "cohere2", "deepseek_v2", "deepseek_v3", "granite", "glm4", "starcoder2"),
    *("jamba", "nemotron_h", "smollm3", "minimax", "exaone4"),
)
OTHER_TYPES = ("gpt2", "bert", "t5", "whisper", "vit", "convnext", "resnet", "clip")

#: layers, by whatever name a configuration counts them
LEAST_LAYERS = 2
STAGE_DEPTHS = ("depths", "depth", "num_block_repeats")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")

#: sizes of a tiny twin where its configuration has them; no two dims that a weight may have are equal by accident
HEADS, KEY_VALUE_HEADS, VOCABULARY = 8, 4, 256
TINY: Values = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "projection_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 128),
    "num_key_value_heads": KEY_VALUE_HEADS,
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
    "rotary_dim": 4,
    "qk_nope_head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "moe_intermediate_size": 96,
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 80),
    "image_size": 64,
    "patch_size": 8,
    "query_pre_attn_scalar": 8,
}
#: where the configuration does not say
IMAGE_SIZE, TINY_IMAGE_SIZE = 224, 128
SEQ_LEN, TINY_SEQ_LEN = 256, 32
NUM_CLASSES, TINY_NUM_CLASSES = 1000, 16
NUM_CHANNELS = 3
#: ids below are padding and other marks
FIRST_TOKEN = 4

#: what the models return besides their loss
UNUSED_OUTPUTS = (
    *("logits", "encoder_last_hidden_state", "logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
    *(
        f"{tower}_model_output.{name}"
        for tower in ("text", "vision")
        for name in ("last_hidden_state", "pooler_output")
    ),
)


class Task(StrEnum):
    """What a model is trained for: the auto class that builds it, in the order in which they are looked through."""

    CAUSAL_LM = "AutoModelForCausalLM"
    SEQ2SEQ_LM = "AutoModelForSeq2SeqLM"
    SPEECH = "AutoModelForSpeechSeq2Seq"
    MASKED_LM = "AutoModelForMaskedLM"
    IMAGE = "AutoModelForImageClassification"
    CONTRASTIVE = "AutoModelForZeroShotImageClassification"
    CTC = "AutoModelForCTC"
    AUDIO = "AutoModelForAudioClassification"
    IMAGE_TEXT = "AutoModelForImageTextToText"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """A row: changes to both widths, further ones to the twin. seq_len is short where the graph grows with it."""

    both: Values = field(default_factory=dict)
    tiny: Values = field(default_factory=dict)
    task: Task | None = None
    seq_len: int = SEQ_LEN
    tiny_seq_len: int = TINY_SEQ_LEN
    batch: int = 1
    #: where it must be one
    precision: str | None = None
    #: how many tokens of a text stand for an image, where there must be one
    num_image_tokens: int = 0


MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt_neox": ModelType(
        tiny={"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    # The published models have 6 experts per token, of 1408 in the smaller: the default names none, and 1407, which no
    # grouped product takes.
    "deepseek_v2": ModelType(
        both={"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        tiny={"num_experts_per_tok": 2},
    ),
    "deepseek_v3": ModelType(both={"first_k_dense_replace": 1}),
    # Three layers: a scan with an MLP, a scan with experts, attention. Its scan is a Python loop over the sequence.
    "jamba": ModelType(
        both={"num_hidden_layers": 3, "attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False},
        tiny={"mamba_d_state": 8, "mamba_dt_rank": 12},
        seq_len=16,
        tiny_seq_len=16,
    ),
    "nemotron_h": ModelType(
        both={"use_mamba_kernels": False},
        tiny={"ssm_state_size": 8, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 4, "chunk_size": 16},
    ),
    # Its float32 buffers meet no bfloat16 weights, in transformers as here.
    "minimax": ModelType(tiny={"block_size": 16}, precision="fp32"),
    "bert": ModelType(task=Task.MASKED_LM),
    **dict.fromkeys(("t5", "longt5", "switch_transformers"), ModelType(both={"decoder_start_token_id": 0})),
    # Its configuration has another size of 256, of a classifier that this model has not.
    "whisper": ModelType(task=Task.SPEECH, tiny={"max_source_positions": 32, "num_mel_bins": 16}, seq_len=192),
    "convnext": ModelType(tiny={"hidden_sizes": [16, 32, 48, 64], "patch_size": 4}),
    "resnet": ModelType(tiny={"hidden_sizes": [32, 64, 96, 128], "embedding_size": 16}),
    # Scans that are Python loops over the sequence.
    **dict.fromkeys(("mamba", "falcon_mamba"), ModelType(seq_len=16, tiny_seq_len=16)),
    # Its constructor looks up a stage's rate of dropped paths at the stage's number: a stage must have more layers.
    "cvt": ModelType(both={"depth": [1, 2, 3]}),
    # The default has no base of its rotary frequencies and no bound to clip at, and its names are its own.
    "dbrx": ModelType(
        both={"n_layers": LEAST_LAYERS, "attn_config": {"rope_theta": 5e5, "clip_qkv": 8.0}},
        tiny={
            "n_heads": HEADS,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": KEY_VALUE_HEADS},
            "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
        },
    ),
    # The defaults leave to the checkpoint how many experts there are, and how wide a head is.
    "dots1": ModelType(
        both={"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408},
        tiny={"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_group": 1},
    ),
    "hunyuan_v1_moe": ModelType(both={"head_dim": 128, "moe_topk": 2}, tiny={"head_dim": 8}),
    # A head's rotated dims are shared out to time, height and width, by default as the published heads have them.
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl"),
        ModelType(
            tiny={
                "text_config": {
                    "rope_parameters": {
                        "rope_theta": 1e4,
                        "rope_type": "default",
                        "partial_rotary_factor": 1.0,
                        "mrope_section": [2, 1, 1],
                    }
                }
            }
        ),
    ),
    # Its queries stand where the text has the image's token.
    "blip-2": ModelType(
        task=Task.IMAGE_TEXT,
        both={"image_token_index": 3, "num_query_tokens": 8},
        tiny={"vision_config": {"image_size": 32}, "text_config": {"word_embed_proj_dim": 64, "ffn_dim": 128}},
        num_image_tokens=8,
    ),
    # The loss contrasts the members of a batch.
    "clip": ModelType(task=Task.CONTRASTIVE, batch=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model at one width, and what trains it: arguments of tpplan.solve."""

    build_model: "Callable[[], nn.Module]"
    example_inputs: "Callable[[int, int], dict[str, Tensor | bool]]"
    batch: int
    seq_len: int
    precision: str | None


def types_of(name: str) -> list[str]:
    """`*:TASK` is every type that transformers has for a task; any other name is itself."""
    if not name.startswith("*:"):
        return [name]
    task = name.removeprefix("*:")
    types = getattr(transformers, Task[task])._model_mapping._model_mapping
    return [f"{model_type}:{task}" for model_type in sorted(types)]


def model_of(model_type: str, *, tiny: bool) -> Model:
    """The model of a type (or TYPE:TASK) at its published width, or its twin. Raises what transformers raises."""
    row, task = _row(model_type), _task(model_type)
    config = config_of(model_type, tiny=tiny)
    auto_class = getattr(transformers, task)

    def build_model() -> "nn.Module":
        model: nn.Module = auto_class.from_config(config, dtype=torch.float32)
        return model

    return Model(
        build_model=build_model,
        example_inputs=lambda batch, seq_len: _inputs(config, task, batch, seq_len, row.num_image_tokens, tiny=tiny),
        batch=row.batch,
        seq_len=row.tiny_seq_len if tiny else row.seq_len,
        precision=row.precision,
    )


def config_of(model_type: str, *, tiny: bool) -> transformers.PretrainedConfig:
    """The default configuration of a type with few layers; of a twin also with small sizes and without dropout."""
    name, row, task = model_type.partition(":")[0], _row(model_type), _task(model_type)
    default = transformers.AutoConfig.for_model(name)
    twin = (_tiny_sizes(default), row.tiny) if tiny else ()
    changes = _merged(_few_layers(default), row.both, *twin)
    if task in (Task.IMAGE, Task.AUDIO):
        changes["num_labels"] = TINY_NUM_CLASSES if tiny else NUM_CLASSES
    config = transformers.AutoConfig.for_model(name, **changes)
    for part in (config, config.get_text_config()):
        part.use_cache = False
    return config


def _row(model_type: str) -> ModelType:
    return MODEL_TYPES.get(model_type.partition(":")[0], ModelType())


def _task(model_type: str) -> Task:
    """The task that is named behind the type, else the row's, else the first for which there is a class."""
    name, _, task = model_type.partition(":")
    if task or (row := _row(model_type)).task is None:
        return Task[task] if task else _first_task(transformers.AutoConfig.for_model(name))
    return row.task


def _first_task(config: transformers.PretrainedConfig) -> Task:
    for task in Task:
        if type(config) in getattr(transformers, task)._model_mapping:
            return task
    raise ValueError(f"{config.model_type}: no class of {', '.join(Task)} takes it")


def _few_layers(config: transformers.PretrainedConfig) -> dict[str, object]:
    """Counts of layers set to a few, and lists with an entry per layer cut to one or more of each kind."""
    values = config.to_dict()
    num_layers = getattr(config, "num_hidden_layers", None)
    per_layer = {
        key: value for key, value in values.items() if isinstance(value, list) and len(value) == num_layers and value
    }
    kept = _one_of_each(list(zip(*per_layer.values(), strict=True))) if per_layer else list(range(LEAST_LAYERS))
    changes: dict[str, object] = {key: len(kept) for key in DEPTHS if isinstance(values.get(key), int)}
    changes |= {key: [value[index] for index in kept] for key, value in per_layer.items()}
    stages = {key: values[key] for key in STAGE_DEPTHS if isinstance(values.get(key), list | tuple)}
    changes |= {key: [min(count, LEAST_LAYERS) for count in counts] for key, counts in stages.items()}
    return changes | {name: _few_layers(part) for name, part in _parts(config).items()}


def _one_of_each(kinds: list[tuple[object, ...]]) -> list[int]:
    """Indices of the first layer of each kind, filled up to LEAST_LAYERS, ascending."""
    firsts = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    others = [index for index in range(len(kinds)) if index not in firsts]
    return sorted(firsts + others[: max(0, LEAST_LAYERS - len(firsts))])


def _tiny_sizes(config: transformers.PretrainedConfig) -> dict[str, object]:
    """The twin's sizes under the names this configuration has; what it leaves unset stays so."""
    values = config.to_dict()
    changes = {key: size for key, size in TINY.items() if values.get(key) is not None}
    changes = {key: size for key, size in changes.items() if not isinstance(values[key], list)}
    if "num_key_value_heads" in changes and values["num_key_value_heads"] == values.get("num_attention_heads"):
        changes["num_key_value_heads"] = HEADS
    for key, value in values.items():
        if "drop" in key and isinstance(value, float):
            changes[key] = 0.0
        if "drop" in key and isinstance(value, list | tuple) and all(isinstance(rate, float) for rate in value):
            changes[key] = [0.0 for _ in value]
        if key.endswith("_token_id") and isinstance(value, int | list):
            changes[key] = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}.get(key, 2)
    return changes | {name: _tiny_sizes(part) for name, part in _parts(config).items()}


def _merged(*changes: Values) -> dict[str, object]:
    """Later changes win; those to a part of a configuration are merged."""
    merged: dict[str, object] = {}
    for values in changes:
        for key, value in values.items():
            earlier = merged.get(key)
            merged[key] = _merged(earlier, value) if isinstance(earlier, dict) and isinstance(value, dict) else value
    return merged


def _parts(config: transformers.PretrainedConfig) -> dict[str, transformers.PretrainedConfig]:
    """Configurations inside this one: the towers of a model that has several."""
    return {name: value for name, value in vars(config).items() if isinstance(value, transformers.PretrainedConfig)}


def _inputs(
    config: transformers.PretrainedConfig, task: Task, batch: int, seq_len: int, num_image_tokens: int, *, tiny: bool
) -> "dict[str, Tensor | bool]":
    """Keyword arguments of the model's forward that give a loss; the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    image_size = getattr(vision, "image_size", TINY_IMAGE_SIZE if tiny else IMAGE_SIZE)

    def tokens() -> "Tensor":
        length = min(seq_len, getattr(text, "max_position_embeddings", seq_len))
        return torch.randint(FIRST_TOKEN, text.vocab_size, (batch, length), generator=generator)

    def image() -> "Tensor":
        num_channels = getattr(vision, "num_channels", NUM_CHANNELS)
        return torch.randn(batch, num_channels, image_size, image_size, generator=generator)

    match task:
        case Task.CAUSAL_LM | Task.MASKED_LM:
            ids = tokens()
            return {"input_ids": ids, "labels": ids.clone()}
        case Task.SEQ2SEQ_LM:
            return {"input_ids": tokens(), "labels": tokens()}
        case Task.SPEECH:
            frames = 2 * config.max_source_positions  # the second convolution halves them
            features = torch.randn(batch, config.num_mel_bins, frames, generator=generator)
            return {"input_features": features, "labels": tokens()}
        case Task.IMAGE:
            classes = torch.randint(TINY_NUM_CLASSES, (batch,), generator=generator)
            return {"pixel_values": image(), "labels": classes}
        case Task.CTC | Task.AUDIO:
            name = "input_features" if hasattr(config, "num_mel_bins") else "input_values"
            labels = tokens()[:, :2] if task is Task.CTC else torch.zeros(batch, dtype=torch.long)
            if name == "input_values":
                return {name: torch.randn(batch, 4000, generator=generator), "labels": labels}
            return {name: torch.randn(batch, 64, config.num_mel_bins, generator=generator), "labels": labels}
        case Task.IMAGE_TEXT:
            ids = tokens()
            if not num_image_tokens:
                return {"input_ids": ids, "labels": ids.clone()}
            ids[:, :num_image_tokens] = config.image_token_id
            return {"input_ids": ids, "labels": ids.clone(), "pixel_values": image()}
        case Task.CONTRASTIVE:
            return {"input_ids": tokens(), "pixel_values": image(), "return_loss": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correspondence:
    """What a size of the wide model is in its twin, found by the names of what has that size in both.

    These are the dims of parameters, integers that are attributes of a module or are in its configuration, the length
    of the sequence, and sums of the first few `parts` of a dim: (module, in the wide model, in the twin).
    """

    wide: "nn.Module"
    twin: "nn.Module"
    wide_seq_len: int = SEQ_LEN
    twin_seq_len: int = TINY_SEQ_LEN
    parts: tuple[tuple[str, Parts, Parts], ...] = ()

    def in_twin(self, module: str, size: int) -> int:
        """The size as the twin's module has it. The nearest of the modules around it in which there is one decides.

        Raises ValueError where no module has it, and where names disagree.
        """
        scopes = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)] if module else []
        pairs = map(self._pairs, (*scopes, ""))
        found = next(filter(None, ({ours for theirs, ours in near if theirs == size} for near in pairs)), set())
        if len(found) != 1:
            what = " or ".join(map(str, sorted(found))) or "unknown: nothing with a name has it"
            raise ValueError(f"what {size} in {module or 'the root'} is in the twin is {what}")
        return found.pop()

    def _pairs(self, scope: str) -> Iterator[tuple[int, int]]:
        """Sizes of the same name in both models' module."""
        wide, twin = (model.get_submodule(scope) for model in (self.wide, self.twin))
        dims, twin_dims = (
            {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
            for model in (wide, twin)
        )
        for name in dims.keys() & twin_dims.keys():
            yield from zip(dims[name], twin_dims[name], strict=False)
        integers, twin_integers = (dict(_integers(vars(model))) for model in (wide, twin))
        yield from ((integers[name], twin_integers[name]) for name in integers.keys() & twin_integers.keys())
        for module, parts, twin_parts in self.parts:
            if within(module, scope):
                yield from zip(itertools.accumulate(parts), itertools.accumulate(twin_parts), strict=True)
        if not scope:
            yield self.wide_seq_len, self.twin_seq_len


def _integers(attributes: Values, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Integers by name, also those in lists and in configurations."""
    for name, value in attributes.items():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _integers(vars(value), f"{prefix}{name}.")
        for index, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(item, int) and not isinstance(item, bool):
                yield f"{prefix}{name}[{index}]", item

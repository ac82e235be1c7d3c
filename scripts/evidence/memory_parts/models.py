"""The models whose memory is looked at: the examples, widened, and Hugging Face's at full width with few layers."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import llama
import mlp
import nanogpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and its micro-batch; `loss` None where the model gives it itself, beside outputs that are not used."""

    build_model: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor] | None
    batch: int
    seq_len: int
    unused_outputs: tuple[str, ...] = ("output",)


def _example(module: ModuleType, build_model: Callable[[], nn.Module], batch: int, seq_len: int) -> Subject:
    return Subject(
        build_model=build_model,
        example_inputs=module.example_inputs,
        loss=module.loss,
        batch=batch,
        seq_len=seq_len,
    )


def _llama() -> Subject:
    """A quarter of Llama 3 8B's width, four layers."""
    config = llama.Config(
        model_dim=1024, hidden_dim=3584, num_heads=16, num_kv_heads=8, vocab_size=32_000, max_seq_len=2048
    )
    return _example(llama, lambda: llama.Llama(config), batch=2, seq_len=1024)


def _long() -> Subject:
    """The same width, two layers, and so many tokens that logits are most of the memory."""
    config = llama.Config(
        num_layers=2, model_dim=1024, hidden_dim=3584, num_heads=16, num_kv_heads=8, vocab_size=32_000,
        max_seq_len=8192,
    )  # fmt: skip
    return _example(llama, lambda: llama.Llama(config), batch=1, seq_len=8192)


def _gpt() -> Subject:
    config = gpt.Config(num_layers=4, model_dim=768, hidden_dim=3072, num_heads=12, vocab_size=8192)
    return _example(gpt, lambda: gpt.GPT(config), batch=4, seq_len=512)


def _nanogpt() -> Subject:
    """GPT-2 XL's width."""
    config = nanogpt.Config(num_layers=3, model_dim=1536, num_heads=24, vocab_size=50_304, block_size=1024)
    return _example(nanogpt, lambda: nanogpt.NanoGPT(config), batch=1, seq_len=1024)


def _mlp() -> Subject:
    return _example(mlp, lambda: mlp.MLP(mlp.MODEL_DIM, 1024, mlp.NUM_BLOCKS, 16), batch=8192, seq_len=1)


def _hugging_face(model_type: str, batch: int, seq_len: int) -> Subject:
    """A type's default configuration, which is that of a published model, with a few layers. Needs transformers."""
    from hugging_face import UNUSED_OUTPUTS, model_of

    model = model_of(model_type, tiny=False)
    return Subject(
        build_model=model.build_model,
        example_inputs=model.example_inputs,
        loss=None,
        batch=batch,
        seq_len=seq_len,
        unused_outputs=UNUSED_OUTPUTS,
    )


#: by name; Hugging Face's by their type
MODELS: Mapping[str, Callable[[], Subject]] = {
    "llama example": _llama,
    "long sequences": _long,
    "gpt example": _gpt,
    "nanogpt example": _nanogpt,
    "mlp example": _mlp,
    **{
        name: partial(_hugging_face, name, batch, seq_len)
        for name, batch, seq_len in (
            ("llama", 1, 1024),
            ("qwen3", 1, 1024),
            ("gemma2", 1, 1024),
            ("phi3", 1, 1024),
            ("gpt_neox", 1, 1024),
            ("mixtral", 1, 512),
            ("bert", 8, 512),
            ("vit", 16, 256),
        )
    },
}
#: those with modules of experts that ranks may divide
EXPERT_MODELS: Mapping[str, Callable[[], Subject]] = {
    name: partial(_hugging_face, name, 1, 512) for name in ("mixtral", "qwen3_moe", "deepseek_v3")
}

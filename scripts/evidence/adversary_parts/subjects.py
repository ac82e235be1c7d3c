"""Subjects of scripts/evidence/adversary.py that are not random: scripts/examples at tiny size, and the traps."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from adversary_parts import odd_computations, traps
from adversary_parts.models import Subject

#: by name; importing odd_computations adds its own
TRAPS = tuple(traps.TRAPS)
assert odd_computations
EXAMPLES = ("gpt", "llama", "nanogpt", "vit", "mlp")
_FOLDER = Path(__file__).resolve().parents[2] / "examples"
_TINY: dict[str, Any] = {"num_layers": 2, "model_dim": 32, "num_heads": 4, "vocab_size": 64}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {**_TINY, "hidden_dim": 64},
    "llama": {**_TINY, "hidden_dim": 64, "num_kv_heads": 2},
    "nanogpt": _TINY,
    "vit": {"num_layers": 2, "model_dim": 32, "hidden_dim": 64, "num_heads": 4},
}
_CLASSES = {"gpt": "GPT", "llama": "Llama", "nanogpt": "NanoGPT", "vit": "ViT"}


@functools.cache
def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"adversary_example_{name}", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _example(name: str) -> nn.Module:
    module = _module(name)
    torch.manual_seed(0)
    model: nn.Module
    if name == "mlp":
        model = module.MLP(32, 64, 2, 10)
    else:
        model = getattr(module, _CLASSES[name])(module.Config(**_CONFIGS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _example_inputs(name: str, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = _module(name).example_inputs(batch, seq_len)
    if name == "mlp":
        return {"features": found["features"][:, :32].contiguous(), "targets": found["targets"]}
    if name == "vit":
        return found
    return {key: value % _TINY["vocab_size"] for key, value in found.items()}


def example_subject(name: str) -> Subject:
    """An example at tiny size."""
    module = _module(name)
    has_length = name not in ("mlp", "vit")
    return Subject(
        build=lambda: _example(name),
        inputs=lambda batch, seq_len: _example_inputs(name, batch, seq_len),
        loss=module.loss,
        unused=tuple(getattr(module, "unused_outputs", ())),
        batch=4,
        seq_len=8,
        others=((8, 8), (4, 16)) if has_length else ((8, 8),),
        text=name,
    )


def trap_subject(name: str) -> Subject:
    """A trap by name."""
    batch, length = traps.BATCH, traps.LENGTH
    return Subject(
        build=lambda: traps.build(name),
        inputs=traps.inputs,
        loss=traps.loss_of(name),
        unused=(),
        batch=batch,
        seq_len=length,
        others=((2 * batch, length), (batch, length // 2), (batch, 2 * length)),
        text=name,
    )

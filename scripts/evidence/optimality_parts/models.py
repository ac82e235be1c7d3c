"""The models on which scripts/evidence/optimality.py looks for faster plans: transformers' and plain, with few layers;
long and short sequences; tp 2 to 8; with memory to spare and without."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from made_up_machine import GPUS_PER_NODE, machine
from torch import Tensor, nn

import tpplan
from tpplan.search.models.user_model import load_model_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import llama
import nanogpt
import vit

#: of `limit`, what of the memory that the fastest plan without a limit needs is granted
BINDING = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a mesh. `limit`: the share of what the fastest plan needs that it may have; None: all of a GPU."""

    name: str
    build_model: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor] | None
    cluster: tpplan.Cluster
    options: Mapping[str, Any]
    unused_outputs: tuple[str, ...] = ()
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    gpus: int
    tp: int
    batch: int
    seq_len: int
    profile: str = "h100-sxm"
    micro_batch: int = 1
    limit: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def cluster(self) -> tpplan.Cluster:
        per_node = min(self.gpus, GPUS_PER_NODE)
        profile = machine() if self.profile == "made-up" else self.profile
        return tpplan.Cluster(gpus=self.gpus, gpus_per_node=per_node, profile=profile)

    def options(self) -> dict[str, Any]:
        return {
            "global_batch": self.batch,
            "micro_batch": self.micro_batch,
            "seq_len": self.seq_len,
            "tp": self.tp,
            "all_gpus": True,
            **self.more,
        }


def _hugging_face(name: str, mesh: _Mesh, **config: Any) -> Callable[[], Subject]:
    def subject() -> Subject:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            spec = load_model_file(f"hf:{path}")
        return Subject(
            name=name,
            build_model=spec.build_model,
            example_inputs=spec.example_inputs,
            loss=spec.loss,
            cluster=mesh.cluster(),
            options=mesh.options(),
            unused_outputs=spec.unused_outputs,
            limit=mesh.limit,
        )

    return subject


def _plain(name: str, mesh: _Mesh, module: ModuleType, build: Callable[[], nn.Module]) -> Callable[[], Subject]:
    return lambda: Subject(
        name=name,
        build_model=build,
        example_inputs=module.example_inputs,
        loss=module.loss,
        cluster=mesh.cluster(),
        options=mesh.options(),
        unused_outputs=tuple(getattr(module, "unused_outputs", ())),
        limit=mesh.limit,
    )


_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip

#: by name; what is wide is planned for a measured machine, what is tiny for a made-up one on which sharding pays
SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    name: make(name)
    for name, make in {
        "hf-llama-short": lambda n: _hugging_face(n, _Mesh(gpus=16, tp=8, batch=64, seq_len=4096), **_LLAMA),
        "hf-llama-long": lambda n: _hugging_face(
            n, _Mesh(gpus=64, tp=8, batch=32, seq_len=131072, more={"fsdp": 8}), **_LLAMA
        ),
        "hf-llama-memory": lambda n: _hugging_face(
            n, _Mesh(gpus=8, tp=4, batch=8, seq_len=8192, limit=BINDING), **_LLAMA
        ),
        "hf-qwen3": lambda n: _hugging_face(
            n,
            _Mesh(gpus=2, tp=2, batch=4, micro_batch=4, seq_len=64, profile="made-up"),
            **_TINY | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
        ),
        "hf-gpt2": lambda n: _hugging_face(
            n,
            _Mesh(gpus=4, tp=4, batch=2, seq_len=128, profile="made-up"),
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
            n_embd=64,
            n_layer=2,
            n_head=8,
            vocab_size=256,
            n_positions=512,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "hf-gpt-neox": lambda n: _hugging_face(
            n,
            _Mesh(gpus=8, tp=4, batch=8, micro_batch=2, seq_len=256, profile="made-up"),
            **_TINY | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
        ),
        "hf-gemma2": lambda n: _hugging_face(
            n,
            _Mesh(gpus=8, tp=2, batch=16, micro_batch=2, seq_len=64, profile="made-up", limit=BINDING),
            **_TINY | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8},
        ),
        "hf-bert": lambda n: _hugging_face(
            n,
            _Mesh(gpus=8, tp=8, batch=8, micro_batch=8, seq_len=64, profile="made-up"),
            **_TINY | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        ),
        "llama": lambda n: _plain(
            n,
            _Mesh(gpus=16, tp=8, batch=32, seq_len=8192),
            llama,
            lambda: llama.Llama(
                llama.Config(
                    num_layers=3,
                    model_dim=4096,
                    hidden_dim=14336,
                    num_heads=32,
                    num_kv_heads=8,
                    vocab_size=128256,
                    max_seq_len=8192,
                )
            ),
        ),
        "gpt-memory": lambda n: _plain(
            n,
            _Mesh(gpus=4, tp=4, batch=8, micro_batch=4, seq_len=256, profile="made-up", limit=BINDING),
            gpt,
            gpt.build_model,
        ),
        "nanogpt": lambda n: _plain(
            n, _Mesh(gpus=4, tp=4, batch=4, micro_batch=4, seq_len=64, profile="made-up"), nanogpt, nanogpt.build_model
        ),
        "vit": lambda n: _plain(
            n, _Mesh(gpus=4, tp=2, batch=16, micro_batch=8, seq_len=16, profile="made-up"), vit, vit.build_model
        ),
    }.items()
}

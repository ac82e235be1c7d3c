"""What solving takes for large models with experts, and what the plans are.

    python scripts/bench/experts.py [qwen3-235b qwen3-235b-wide qwen3-235b-stages mixtral deepseek-v3] [--runs 1]

Each run is a process of its own that plans a model of transformers, by its published sizes, for a cluster of the
profile h100-sxm, from importing torch to the proven plan: CPU seconds, peak memory of the process, predicted tokens per
second and GPU, and the mesh. Printed are the medians of the runs beside the bars; exit code 1 where one is missed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planning_runs import Bars, main, numbers

SEQ_LEN = 4096
PROFILE, GPUS_PER_NODE = "h100-sxm", 8

QWEN3_235B: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: Mapping[str, object] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: Mapping[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Bars):
    """A model by its configuration, the GPUs and batch it is planned for, in how many pipeline stages and whether for
    torch.compile, and the bars."""

    config: Mapping[str, object]
    gpus: int
    global_batch: int
    stages: int = 1
    compile: bool = False


CASES = {
    "qwen3-235b": Case(config=QWEN3_235B, gpus=256, global_batch=512, most_s=20.0),
    "qwen3-235b-wide": Case(config=QWEN3_235B, gpus=256, global_batch=2048, most_s=20.0, least_tokens_per_s=1500.0),
    "qwen3-235b-stages": Case(
        config=QWEN3_235B, gpus=256, global_batch=2048, most_s=20.0, least_tokens_per_s=1500.0, stages=16, compile=True
    ),
    "mixtral": Case(config=MIXTRAL, gpus=64, global_batch=512, most_s=10.0),
    "deepseek-v3": Case(config=DEEPSEEK_V3, gpus=2048, global_batch=8192, most_s=30.0),
}


def measure(name: str) -> dict[str, float | str]:
    """One run of a case in this process, which should be fresh."""
    case, started = CASES[name], time.monotonic()
    import tpplan
    from tpplan.search.models.user_model import load_model_file
    from tpplan.search.points.options import Options

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        spec = load_model_file(f"hf:{folder}")
        cluster = tpplan.Cluster(gpus=case.gpus, gpus_per_node=GPUS_PER_NODE, profile=PROFILE)
        asked = {"loss": spec.loss, "unused_outputs": tuple(spec.unused_outputs), "compile": case.compile}
        batch = {"global_batch": case.global_batch, "seq_len": SEQ_LEN}
        plan: tpplan.Plan | tpplan.PipelinePlan
        if case.stages > 1:
            options = Options(**asked)
            made = spec.build_model, spec.example_inputs
            plan = tpplan.solve_stages(*made, stages=case.stages, cluster=cluster, options=options, **batch)
        else:
            plan = tpplan.solve(spec.build_model, spec.example_inputs, cluster=cluster, **batch, **asked)
    return numbers(started, plan)


if __name__ == "__main__":
    sys.exit(main(__doc__, __file__, CASES, measure))

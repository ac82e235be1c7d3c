"""What solving takes for large models with experts, and what the plans are.

    python scripts/bench/experts.py [qwen3-235b qwen3-235b-wide qwen3-235b-stages mixtral deepseek-v3] [--runs 1]

Each run is a process of its own that plans a model of transformers, by its published sizes, for a cluster of the
profile h100-sxm, from importing torch to the proven plan: CPU seconds, peak memory of the process, predicted tokens per
second and GPU, and the mesh. Printed are the medians of the runs beside the bars; exit code 1 where one is missed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
class Case:
    """A model by its configuration, the GPUs and batch it is planned for, in how many pipeline stages and whether for
    torch.compile, and the bars: CPU seconds, GB of memory, and tokens per second and GPU (0: none)."""

    config: Mapping[str, object]
    gpus: int
    global_batch: int
    most_s: float
    most_gb: float = 3.0
    least_tokens_per_s: float = 0.0
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
NUMBERS = ("CPU s", "wall s", "GB", "tokens/s")


def measure(case: Case) -> dict[str, float | str]:
    """One run in this process, which should be fresh: NUMBERS, and the plan in words."""
    started = time.monotonic()
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
    parts = plan.stages if isinstance(plan, tpplan.PipelinePlan) else (plan,)
    mesh = parts[-1].mesh
    recomputed = {str(how) for part in parts for how in part.recomputed_modules().values()} or {"none"}
    in_stages = f"{case.stages} stages, " if case.stages > 1 else ""
    return {
        "CPU s": time.process_time(),
        "wall s": time.monotonic() - started,
        "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,  # Linux counts KiB
        "tokens/s": case.global_batch * SEQ_LEN / plan.predicted.step_time_s / mesh.num_gpus / case.stages,
        "plan": f"{in_stages}{mesh}; micro-batch {plan.batch.micro_batch}, recomputes {', '.join(sorted(recomputed))}",
    }


def medians(name: str, runs: int) -> dict[str, float | str]:
    """Of the runs of a case, each in a process of its own; the plan is the last run's."""
    found = []
    for _ in range(runs):
        child = subprocess.run(
            [sys.executable, __file__, "--child", name], stdout=subprocess.PIPE, check=True, text=True
        )
        found.append(json.loads(child.stdout))
    return {**found[-1], **{key: statistics.median(run[key] for run in found) for key in NUMBERS}}


def main() -> int:
    """Runs the cases, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=1, help="processes per case (default: 1)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(CASES[arguments.child])))
        return 0
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    columns = (*NUMBERS[:1], "bar", *NUMBERS[1:3], "bar", NUMBERS[3], "bar")
    print(f"{'':18}" + "".join(f"{column:>9}" for column in columns) + "  plan")
    is_kept = True
    for name in arguments.cases:
        case, row = CASES[name], medians(name, arguments.runs)
        seconds, wall, gigabytes, tokens = (float(row[key]) for key in NUMBERS)
        shown = (seconds, case.most_s, wall, gigabytes, case.most_gb, tokens, case.least_tokens_per_s)
        print(f"{name:18}" + "".join(f"{number:9.1f}" for number in shown) + f"  {row['plan']}", flush=True)
        is_kept &= seconds <= case.most_s and gigabytes <= case.most_gb and tokens >= case.least_tokens_per_s
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())

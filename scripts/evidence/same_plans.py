"""Do two checkouts of tpplan make the same plans, and at what cost? For changes that are to leave plans as they are.

    python scripts/evidence/same_plans.py OTHER_CHECKOUT [SETTING ...] [--but-counts] [--out table.json]

Solves each setting below with this checkout and with the other one, each in a process of its own, and compares the plan
files byte for byte, versions and the seconds that solving took left out; with --but-counts also how many points were
tried and skipped, for changes to the search. Printed are CPU seconds and peak memory of
both. Exit code 1 where a plan differs; the first line that does is printed.

Settings: examples, Hugging Face models, experts, images; tp 1 to 16; memory binding and not; pins; micro-batch decided
and given.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
NODE = ("--gpus", "8", "--profile", "h100-sxm")
TWO_NODES = ("--gpus", "16", "--profile", "h100-sxm")

#: small models of transformers, by the name of their folder
CONFIGS: dict[str, dict[str, Any]] = {
    "hf-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
                 "vocab_size": 32000, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
                 "num_key_value_heads": 4},
    "hf-mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512,
                   "vocab_size": 8000, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "num_local_experts": 4},
    "hf-gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def _of(model: str, batch: int, length: int, *more: str, machine: tuple[str, ...] = NODE) -> tuple[str, ...]:
    """Arguments of `tpplan solve`."""
    return (model, *machine, "--global-batch", str(batch), "--seq-len", str(length), *more)


SETTINGS: dict[str, tuple[str, ...]] = {
    "gpt": _of("gpt.py", 32, 128),
    "gpt, tp 2 x fsdp 2": _of("gpt.py", 32, 128, "--tp", "2", "--fsdp", "2"),
    "mlp, tp 4": _of("mlp.py", 64, 64, "--tp", "4"),
    "mlp on CPUs": _of("mlp.py", 64, 64, machine=("--gpus", "4", "--profile", "cpu-gloo")),
    "nanogpt": _of("nanogpt.py", 64, 256, "--micro-batch", "4"),
    "GPT-2 XL, recomputed": _of("nanogpt.py:gpt2_xl", 64, 1024, "--recompute", "full"),
    "GPT-3 13B, 40 GB": _of("nanogpt.py:gpt3_13b", 64, 2048, machine=("--gpus", "16", "--profile", "a100-sxm-40gb")),
    "ViT": _of("vit.py", 64, 64),
    "ViT, tp 4": _of("vit.py", 64, 64, "--tp", "4"),
    "Llama": _of("llama.py", 8, 64),
    "Llama 8B": _of("llama.py:llama3_8b", 64, 4096, "--micro-batch", "1", machine=TWO_NODES),
    "Llama 8B, batch decided": _of("llama.py:llama3_8b", 64, 4096, machine=TWO_NODES),
    "Llama 8B, tp 2": _of("llama.py:llama3_8b", 16, 8192, "--tp", "2", machine=TWO_NODES),
    "Llama 8B, tp 4": _of("llama.py:llama3_8b", 16, 8192, "--tp", "4", machine=TWO_NODES),
    "Llama 8B, tp 8": _of("llama.py:llama3_8b", 16, 8192, "--tp", "8", machine=TWO_NODES),
    "Llama 8B, tp 16": _of("llama.py:llama3_8b", 16, 8192, "--tp", "16", machine=TWO_NODES),
    "Llama 8B, 40 GiB": _of("llama.py:llama3_8b", 32, 8192, "--memory-limit", "40GiB", machine=TWO_NODES),
    "Llama 8B, ZeRO-2": _of("llama.py:llama3_8b", 32, 4096, "--zero", "2", "--no-recompute", machine=TWO_NODES),
    "Llama 8B, compiled": _of("llama.py:llama3_8b", 32, 4096, "--compile", machine=TWO_NODES),
    "Llama 8B, pinned": _of(
        "llama.py:llama3_8b", 32, 4096, "--tp", "4", "--pin", "layers.*.feed_forward=megatron", machine=TWO_NODES
    ),
    "Hugging Face Llama": _of("hf:hf-llama/config.json", 32, 1024),
    "Hugging Face Llama, tp 4": _of("hf:hf-llama/config.json", 32, 1024, "--tp", "4"),
    "Hugging Face GPT-2, tp 4": _of("hf:hf-gpt2/config.json", 32, 512, "--tp", "4"),
    "experts, tp 2": _of("hf:hf-mixtral/config.json", 16, 256, "--tp", "2"),
}


#: what a plan's certificate says of the search and not of the plan
_COUNTS = ("meshes_tried", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one checkout made of a setting: the lines of its plan, or what it said instead; CPU seconds, peak GB."""

    lines: tuple[str, ...]
    cpu_s: float
    gb: float


def solve(checkout: Path, arguments: tuple[str, ...], folder: Path, *, with_counts: bool) -> Made:
    """Solves one setting with one checkout, in a process of its own."""
    model, *options = arguments
    place = f"hf:{folder / model.removeprefix('hf:')}" if model.startswith("hf:") else str(EXAMPLES / model)
    out = folder / "plan.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", place, *options, "-o", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    *said, used = ran.stdout.splitlines()
    cpu_s, gb = map(float, used.split())
    lines = (
        _lines(json.loads(out.read_text()), with_counts=with_counts)
        if out.exists()
        else (*said, *ran.stderr.splitlines())
    )
    return Made(lines=lines, cpu_s=cpu_s, gb=gb)


def _lines(plan: dict[str, Any], *, with_counts: bool) -> tuple[str, ...]:
    """A plan's text without its versions."""
    if not with_counts:
        plan["solver"] = {key: value for key, value in plan["solver"].items() if key not in _COUNTS}
    return tuple(json.dumps({key: plan[key] for key in plan if key != "versions"}, indent=1).splitlines())


def run_child(arguments: list[str]) -> int:
    """`tpplan solve`, and a last line with the CPU seconds and GB that this process took."""
    from tpplan.commands import main

    code = main(["solve", *arguments])
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"\n{used.ru_utime + used.ru_stime} {used.ru_maxrss / 1e6}")  # Linux counts KiB
    return code


def main() -> int:
    """Compares the settings, prints the table."""
    if sys.argv[1:2] == ["--child"]:
        return run_child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of tpplan to compare with")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="default: all")
    parser.add_argument("--but-counts", action="store_true", help="points that were tried and skipped may differ")
    parser.add_argument("--out", type=Path, help="write the table here as JSON")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.settings if name not in SETTINGS]:
        parser.error(f"unknown setting {unknown[0]!r}; known: {', '.join(SETTINGS)}")
    rows, num_unlike = {}, 0
    print(f"{'':26}{'plan':10}{'CPU s':>8}{'before':>8}{'GB':>7}{'before':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, config in CONFIGS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        for name in arguments.settings or SETTINGS:
            now, before = (
                solve(root, SETTINGS[name], folder, with_counts=not arguments.but_counts)
                for root in (ROOT, arguments.other.resolve())
            )
            is_like = now.lines == before.lines
            num_unlike += not is_like
            sums = f"{now.cpu_s:8.1f}{before.cpu_s:8.1f}{now.gb:7.2f}{before.gb:8.2f}"
            print(f"{name:26}{'the same' if is_like else 'DIFFERS':10}{sums}", flush=True)
            if not is_like:
                pairs = zip((*now.lines, "<end>"), (*before.lines, "<end>"), strict=False)
                print("\n".join(next((f"  now    {a}", f"  before {b}") for a, b in pairs if a != b)))
            rows[name] = {
                "is_like": is_like,
                "now": asdict(now) | {"lines": len(now.lines)},
                "before_cpu_s": before.cpu_s,
            }
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    return int(num_unlike > 0)


if __name__ == "__main__":
    sys.exit(main())

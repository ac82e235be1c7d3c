"""CPU seconds to price every strategy of a whole model at each tp degree: ops executed on meta tensors, and looked up.

    python scripts/bench/costs.py [--model scripts/examples/llama.py:llama3_8b] [--seq-len 4096] [--tp 1 2 4 8]

The model is traced and its decisions are listed once, unmeasured. Then, each time with nothing remembered, all degrees
are priced as `tpplan solve` does it, times and activations; printed are the CPU seconds of each repeat by degree, and
their median. The bar is 1 CPU s for Llama 3 8B at tp 1, 2, 4 and 8.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tpplan.costs.runs.execute import Executor
from tpplan.costs.step.cost_table import price_space
from tpplan.layouts.build_space import build_space
from tpplan.layouts.decision_space import Space
from tpplan.machine.profile import load_profile
from tpplan.search.models.user_model import load_model_file
from tpplan.trace.trace import trace

BAR_S = 1.0
LLAMA = Path(__file__).resolve().parent.parent / "examples" / "llama.py"


def decisions(model: str, seq_len: int, degrees: Sequence[int]) -> list[Space]:
    """The decisions of a model file's model, in bfloat16 on one sequence, at each degree."""
    spec = load_model_file(model)
    with torch.device("meta"):
        built = spec.build_model().to(torch.bfloat16)
    graph = trace(built, spec.example_inputs(1, seq_len), loss=spec.loss)
    return [build_space(graph, tp, unused_outputs=frozenset(spec.unused_outputs)) for tp in degrees]


def pricing_s(spaces: Sequence[Space], profile: str) -> list[float]:
    """CPU seconds that each space takes, in order, with one executor for all."""
    machine, executor, seconds = load_profile(profile), Executor(), []
    for space in spaces:
        start = time.process_time()
        price_space(space, machine, machine.gpus_per_node, executor)
        seconds.append(time.process_time() - start)
    return seconds


def main() -> int:
    """Trace, price, print; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"{LLAMA}:llama3_8b", help="model.py or model.py:BUILDER")
    parser.add_argument("--profile", default="h100-sxm", help="a shipped profile, or the path of one")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of the sequence (default: 4096)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    arguments = parser.parse_args()
    spaces = decisions(arguments.model, arguments.seq_len, arguments.tp)
    totals = []
    for _ in range(arguments.repeats):
        seconds = pricing_s(spaces, arguments.profile)
        totals.append(sum(seconds))
        shown = ", ".join(f"tp {space.tp} {own:.2f}" for space, own in zip(spaces, seconds, strict=True))
        print(f"{totals[-1]:.2f} CPU s: {shown}")
    median = statistics.median(totals)
    print(f"{len(spaces[0].graph.nodes)} nodes, median of {arguments.repeats}: {median:.2f} CPU s (bar {BAR_S:g})")
    return int(median > BAR_S)


if __name__ == "__main__":
    sys.exit(main())

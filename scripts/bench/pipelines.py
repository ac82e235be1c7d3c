"""What solving takes where the model may be cut into pipeline stages, and what the plans are.

    python scripts/bench/pipelines.py [toy 8b 70b 405b 405b-virtual] [--runs 1]

Each run is a process of its own that plans a Llama 3 of scripts/examples for a cluster of the profile h100-sxm, from
importing torch to the proven plan. For 8B and 70B the number of stages is decided, for 405B it is 16 parts with tensor
parallelism over a node, of one stage each, or of eight. Printed are the medians of the runs beside the bars; exit code
1 where one is missed.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from planning_runs import Bars, main, numbers

LLAMA = Path(__file__).resolve().parent.parent / "examples" / "llama.py"
PROFILE, GPUS_PER_NODE = "h100-sxm", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Bars):
    """A model by its builder, the GPUs and batch it is planned for, how many parts have stages (0: decided) and how
    many each, the tensor-parallel degree (0: decided), and the bars."""

    builder: str
    gpus: int
    global_batch: int
    seq_len: int
    parts: int = 0
    virtual_stages: int = 1
    tp: int = 0


CASES = {
    "toy": Case(builder="build_model", gpus=4, global_batch=8, seq_len=64, parts=2, most_s=60.0),
    "8b": Case(builder="llama3_8b", gpus=64, global_batch=512, seq_len=4096, most_s=8.0),
    "70b": Case(builder="llama3_70b", gpus=512, global_batch=1024, seq_len=4096, most_s=12.0),
    "405b": Case(
        builder="llama3_405b", gpus=16_384, global_batch=2048, seq_len=8192, parts=16, tp=8, most_s=20.0
    ),
    "405b-virtual": Case(
        builder="llama3_405b", gpus=16_384, global_batch=2048, seq_len=8192, parts=16, tp=8, virtual_stages=8,
        most_s=20.0, least_tokens_per_s=140.0,
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, float | str]:
    """One run of a case in this process, which should be fresh."""
    case, started = CASES[name], time.monotonic()
    import tpplan
    from tpplan.search.models.user_model import load_model_file
    from tpplan.search.pipelines.any_pipeline import solve_any
    from tpplan.search.points.options import Options

    spec = load_model_file(f"{LLAMA}:{case.builder}")
    cluster = tpplan.Cluster(gpus=case.gpus, gpus_per_node=GPUS_PER_NODE, profile=PROFILE)
    options = Options(loss=spec.loss, unused_outputs=tuple(spec.unused_outputs), tp=case.tp or None)
    made = spec.build_model, spec.example_inputs
    batch = {"global_batch": case.global_batch, "seq_len": case.seq_len}
    plan: tpplan.Plan | tpplan.PipelinePlan
    if case.parts:
        shape = {"stages": case.parts, "virtual_stages": case.virtual_stages}
        plan = tpplan.solve_stages(*made, **shape, cluster=cluster, options=options, **batch)
    else:
        plan = solve_any(*made, cluster=cluster, options=options, **batch)
    return numbers(started, plan)


if __name__ == "__main__":
    sys.exit(main(__doc__, __file__, CASES, measure))

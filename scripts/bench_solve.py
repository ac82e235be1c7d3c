"""What solving takes, by stage, from importing torch to the proven plan.

    python scripts/bench_solve.py [8b 70b 405b] [--runs 3]

Each run is a process of its own. CPU seconds: `import` is torch and tpplan, `trace` building the model and tracing it,
`costs` pricing its strategies, `build` making the ILPs, `solve` HiGHS in them, `prove` the proof, `rest` what stands
between (the plan's tables and collectives). Printed are the medians of the runs, the wall seconds and the peak memory
of the process, the ILPs solved, and the variables of the largest. Exit code 1 where a bar is missed.

Bars on 2 cores, total CPU seconds: Llama 3 8B on 64 GPUs 8, 70B on 512 GPUs 10, 405B on 16,384 GPUs 15; 1 GB.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent / "examples"
STAGES = ("import", "trace", "costs", "build", "solve", "prove", "rest")
MOST_GB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of scripts/examples, the GPUs it is planned for, and the CPU seconds that may take."""

    builder: str
    gpus: int
    global_batch: int
    bar_s: float
    seq_len: int = 4096
    gpus_per_node: int = 8


CASES = {
    "toy": Case(builder="llama.py:build_model", gpus=4, global_batch=8, seq_len=64, bar_s=60.0),
    "8b": Case(builder="llama.py:llama3_8b", gpus=64, global_batch=512, bar_s=8.0),
    "70b": Case(builder="llama.py:llama3_70b", gpus=512, global_batch=1024, bar_s=10.0),
    "405b": Case(builder="llama.py:llama3_405b", gpus=16_384, global_batch=16_384, bar_s=15.0),
}


class _Clock:
    """CPU seconds by stage: those since the last mark belong to the stage that was running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stage = "import"
        self.last = 0.0

    def enter(self, stage: str) -> str:
        """Begins a stage; gives the one before."""
        now, before = time.process_time(), self.stage
        self.seconds[before] += now - self.last
        self.last, self.stage = now, stage
        return before

    def within(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return timed


def measure(case: Case) -> dict[str, float]:
    """One run in this process, which should be fresh: seconds by stage, `wall`, `gb`, `programs` and `variables`."""
    started, clock = time.monotonic(), _Clock()
    import tpplan
    import tpplan.planner
    from tpplan.load import load_model_file
    from tpplan.solvers import highs, milp

    sizes: list[int] = []
    build, run = milp.build, highs._run

    def counted(reduced: Any) -> Any:
        model = build(reduced)
        sizes.append(model.program.num_columns)
        return model

    milp.build, milp.reduce = clock.within("build", counted), clock.within("build", milp.reduce)
    highs._run = clock.within("solve", run)

    def report(stage: str, done: int, total: int) -> None:
        clock.enter("rest" if done == total else "build" if stage == "solve" else stage)

    spec = load_model_file(str(EXAMPLES / case.builder))
    clock.enter("trace")
    tpplan.solve(
        spec.build_model,
        spec.example_inputs,
        cluster=tpplan.Cluster(gpus=case.gpus, gpus_per_node=case.gpus_per_node, profile="h100-sxm"),
        global_batch=case.global_batch,
        seq_len=case.seq_len,
        loss=spec.loss,
        unused_outputs=spec.unused_outputs,
        progress=report,
    )
    clock.enter("rest")
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts KiB
    return {
        **{stage: clock.seconds[stage] for stage in STAGES},
        "total": time.process_time(),
        "wall": time.monotonic() - started,
        "gb": peak_gb,
        "programs": len(sizes),
        "variables": max(sizes, default=0),
    }


def medians(name: str, runs: int) -> dict[str, float]:
    """Of the runs of a case, each in a process of its own."""
    found = []
    for _ in range(runs):
        child = subprocess.run(
            [sys.executable, __file__, "--child", name], stdout=subprocess.PIPE, check=True, text=True
        )
        found.append(json.loads(child.stdout))
    return {key: statistics.median(run[key] for run in found) for key in found[0]}


def main() -> int:
    """Runs the cases, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["8b", "70b", "405b"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=3, help="processes per case (default: 3)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(CASES[arguments.child])))
        return 0
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    columns = (*STAGES, "total", "bar", "wall", "GB", "ILPs", "variables")
    print(f"{'':6}" + "".join(f"{column:>10}" for column in columns))
    is_kept = True
    for name in arguments.cases:
        row, bar_s = medians(name, arguments.runs), CASES[name].bar_s
        seconds = [row[stage] for stage in (*STAGES, "total")]
        shown = [f"{s:.2f}" for s in (*seconds, bar_s, row["wall"], row["gb"])]
        shown += [f"{row['programs']:.0f}", f"{row['variables']:.0f}"]
        print(f"{name:6}" + "".join(f"{text:>10}" for text in shown), flush=True)
        is_kept &= row["total"] <= bar_s and row["gb"] <= MOST_GB
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())

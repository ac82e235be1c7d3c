"""Cases of a benchmark of planning: each run is a process of its own, and the medians stand beside the bars."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tpplan

NUMBERS = ("CPU s", "wall s", "GB", "tokens/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What a run may take at most, CPU seconds and GB of memory, and the least that it must predict, tokens per second
    and GPU (0: nothing)."""

    most_s: float
    most_gb: float = 3.0
    least_tokens_per_s: float = 0.0


def numbers(started: float, plan: "tpplan.Plan | tpplan.PipelinePlan") -> dict[str, float | str]:
    """NUMBERS of this process, which `started` by time.monotonic and has found a plan; and the plan in words."""
    import tpplan

    is_staged = isinstance(plan, tpplan.PipelinePlan)
    parts = plan.stages if isinstance(plan, tpplan.PipelinePlan) else (plan,)
    batch, mesh = parts[-1].batch, parts[-1].mesh
    gpus = plan.num_gpus if isinstance(plan, tpplan.PipelinePlan) else mesh.num_gpus
    recomputed = {str(how) for part in parts for how in part.recomputed_modules().values()} or {"none"}
    return {
        "CPU s": time.process_time(),
        "wall s": time.monotonic() - started,
        "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,  # Linux counts KiB
        "tokens/s": batch.global_batch * batch.seq_len / plan.predicted.step_time_s / gpus,
        "plan": f"{f'{len(parts)} stages, ' if is_staged else ''}{mesh}; micro-batch {batch.micro_batch}, "
        f"recomputes {', '.join(sorted(recomputed))}",
    }


def main(
    doc: str | None, script: str, bars: Mapping[str, Bars], measure: Callable[[str], dict[str, float | str]]
) -> int:
    """Runs the cases that the command line names, all by default, and prints their table. `measure` runs a case in a
    fresh process of `script`. Returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(bars), metavar="CASE", help=", ".join(bars))
    parser.add_argument("--runs", type=int, default=1, help="processes per case (default: 1)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child)))
        return 0
    if unknown := [name for name in arguments.cases if name not in bars]:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(bars)}")
    columns = (*NUMBERS[:1], "bar", *NUMBERS[1:3], "bar", NUMBERS[3], "bar")
    width = max(map(len, bars)) + 1
    print(f"{'':{width}}" + "".join(f"{column:>9}" for column in columns) + "  plan")
    is_kept = True
    for name in arguments.cases:
        bar, row = bars[name], _medians(script, name, arguments.runs)
        seconds, wall, gigabytes, tokens = (float(row[key]) for key in NUMBERS)
        shown = (seconds, bar.most_s, wall, gigabytes, bar.most_gb, tokens, bar.least_tokens_per_s)
        print(f"{name:{width}}" + "".join(f"{number:9.1f}" for number in shown) + f"  {row['plan']}", flush=True)
        is_kept &= seconds <= bar.most_s and gigabytes <= bar.most_gb and tokens >= bar.least_tokens_per_s
    return int(not is_kept)


def _medians(script: str, name: str, runs: int) -> dict[str, float | str]:
    """Of the runs of a case, each in a process of its own; the plan is the last run's."""
    found = []
    for _ in range(runs):
        child = subprocess.run([sys.executable, script, "--child", name], stdout=subprocess.PIPE, check=True, text=True)
        found.append(json.loads(child.stdout))
    return {**found[-1], **{key: statistics.median(run[key] for run in found) for key in NUMBERS}}

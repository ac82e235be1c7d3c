"""Makes the plans of scripts/gpu.py, which runs where no solver is: solved for an H100, written to scripts/gpu_plans.

    python scripts/make_gpu_plans.py [--output scripts/gpu_plans]

On that machine the optimum of this model shards no sequence. It does where memory binds: plans called -sp are the
optima under the mildest limit that makes them do it. Recomputation is added to what was solved.
"""

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu import FULL, GPUS_PER_NODE, PLANS, llama
from gpu_results import splits_sequence

import tpplan
from tpplan.plan import Plan, Recompute

PROFILE = "h100-sxm"
#: two micro-batches: gradients of the first are there while the second runs, as predictions assume
NUM_MICRO_BATCHES = 2
LAYERS = "layers.*"
#: of what the optimum needs
MEMORY_SHARES = tuple(1 - percent / 100 for percent in range(1, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to make: its degree, whether the sequence must be sharded, what is recomputed."""

    name: str
    tp: int
    splits_sequence: bool = False
    recompute: Recompute = Recompute.NONE


CASES = (
    Case(name="tp1", tp=1),
    Case(name="tp1-recompute", tp=1, recompute=Recompute.FULL),
    Case(name="tp2", tp=2),
    Case(name="tp4-sp", tp=4, splits_sequence=True),
    Case(name="tp8", tp=8),
    Case(name="tp8-sp-recompute", tp=8, splits_sequence=True, recompute=Recompute.FULL),
)


def make(case: Case) -> Plan:
    """The plan, solved and proven, with its recomputation priced."""
    plan = solve_split(case.tp) if case.splits_sequence else solve(case.tp)
    if case.recompute is Recompute.NONE:
        return plan
    again = dataclasses.replace(plan, recompute={LAYERS: case.recompute})
    priced = tpplan.price(again, FULL.build_model, llama.example_inputs, profile=PROFILE, loss=llama.loss)
    return dataclasses.replace(priced, solver=plan.solver)


def solve_split(tp: int) -> Plan:
    """The optimum under the first of the limits under which a slice of the sequence enters the attentions. Raises
    InfeasibleError where there is none."""
    peak_bytes = solve(tp).predicted.peak_memory_bytes
    plans = (solve(tp, share * peak_bytes) for share in MEMORY_SHARES)
    return next(plan for plan in plans if splits_sequence(plan))


def solve(tp: int, memory_limit_bytes: float | None = None) -> Plan:
    """The optimum on tp GPUs of a node, without an optimizer's states: none runs."""
    return tpplan.solve(
        FULL.build_model,
        llama.example_inputs,
        cluster=tpplan.Cluster(gpus=tp, gpus_per_node=GPUS_PER_NODE, profile=PROFILE),
        global_batch=NUM_MICRO_BATCHES,
        seq_len=FULL.seq_len,
        loss=llama.loss,
        unused_outputs=("output",),
        tp=tp,
        precision=FULL.precision,
        optimizer="sgd",
        memory_limit_bytes=memory_limit_bytes,
    )


def main() -> int:
    """Makes and writes every plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PLANS)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        make(case).dump(folder / f"{case.name}.json")
        print(f"wrote {folder / case.name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

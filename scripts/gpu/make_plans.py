"""Makes the plans of scripts/gpu/gpu.py, which runs where no solver is: for an H100, written to scripts/gpu/plans.

    python scripts/gpu/make_plans.py [--output scripts/gpu/plans]

On tensor-parallel ranks they are Megatron's, those called -sp with sequence parallelism. Recomputation is added to what
was solved.
"""

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu import FULL, GPUS_PER_NODE, PLANS, llama

import tpplan
from tpplan.plan.plan import Plan, Recompute
from tpplan.verify.prove_plan import prove_plan

sys.path.append(str(Path(__file__).resolve().parent.parent / "evidence"))

from megatron_pins import megatron_pins

PROFILE = "h100-sxm"
#: two micro-batches: gradients of the first are there while the second runs, as predictions assume
NUM_MICRO_BATCHES = 2
LAYERS = "layers.*"


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
    """The plan, solved among Megatron's layouts and proven, with its recomputation priced. No optimizer runs."""
    plan = tpplan.solve(
        FULL.build_model,
        llama.example_inputs,
        cluster=tpplan.Cluster(gpus=case.tp, gpus_per_node=GPUS_PER_NODE, profile=PROFILE),
        global_batch=NUM_MICRO_BATCHES,
        seq_len=FULL.seq_len,
        loss=llama.loss,
        unused_outputs=("output",),
        tp=case.tp,
        precision=FULL.precision,
        optimizer="sgd",
        pins=megatron_pins("sequence" if case.splits_sequence else "replicate") if case.tp > 1 else None,
        micro_batch=1,
    )
    if case.recompute is Recompute.NONE:
        return plan
    again = dataclasses.replace(plan, recompute={LAYERS: case.recompute})
    priced = tpplan.price(again, FULL.build_model, llama.example_inputs, profile=PROFILE, loss=llama.loss)
    edited = dataclasses.replace(priced, solver=plan.solver)
    return prove_plan(edited, FULL.build_model, llama.example_inputs, loss=llama.loss).plan


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

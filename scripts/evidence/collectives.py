"""Holds every plan's list of collectives against those that a step issues, one by one.

    python scripts/evidence/collectives.py [MODEL ...] [--plans NAME ...]

Each example model is planned in all the ways below for a made-up machine on which sharding pays, and one rank's step of
the applied model runs on fake tensors. Module, kind, axis, pass, dtype, bytes and count of each collective must be as
the plan lists them. Exit code 0 if all are.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_up_machine import GPUS_PER_NODE, machine
from memory import keeps_sequences_whole
from rich.console import Console
from rich.table import Table

import tpplan
from tpplan.core.errors import TpplanError
from tpplan.plan.plan import Plan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.user_model import load_model_file
from tpplan.verify.collective_log import differences, listed
from tpplan.verify.fake_step import fake_step

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODELS = ("llama", "gpt", "mlp", "vit", "nanogpt")
SEQ_LEN, MICRO_BATCH = 32, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is planned: the mesh, micro-batches a step, and other arguments of tpplan.solve."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    micro_batches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Of the mesh."""
        return self.replicate * self.shard * self.tp


ZERO2 = {"reshard_after_forward": False}
MIXED, BF16 = {"precision": "bf16-mixed"}, {"precision": "bf16"}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
WAYS: Mapping[str, Way] = {
    "tp2": Way(tp=2),
    "tp4": Way(tp=4, options=BF16),
    "tp2-whole-sequences": Way(tp=2, micro_batches=2, options={"allows": keeps_sequences_whole}),
    "tp2-full": Way(tp=2, micro_batches=2, options=FULL),
    "tp2-selective": Way(tp=2, options=SELECTIVE),
    "tp4-full": Way(tp=4, options=BF16 | FULL),
    "zero3": Way(shard=4, micro_batches=2, options=MIXED),
    "zero2": Way(shard=4, micro_batches=2, options=ZERO2),
    "zero3-of-3": Way(shard=3, options=FULL),
    "replicas": Way(replicate=4, micro_batches=2),
    "hsdp": Way(replicate=2, shard=2, micro_batches=2, options=MIXED),
    "hsdp-zero2": Way(replicate=2, shard=2, options=ZERO2 | SELECTIVE),
    "tp2-zero3": Way(shard=2, tp=2, micro_batches=2, options=MIXED),
    "tp2-zero2-full": Way(shard=2, tp=2, options=ZERO2 | FULL),
    "tp2-zero3-of-3": Way(shard=3, tp=2, options=MIXED | SELECTIVE),
    "tp2-replicas": Way(replicate=2, tp=2, micro_batches=2, options=FULL),
    "tp2-hsdp": Way(replicate=2, shard=2, tp=2, micro_batches=2, options=MIXED | FULL),
    "tp2-mixed": Way(tp=2, options=MIXED | SELECTIVE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan: how many collectives a step issues, and what differs."""

    model: str
    way: str
    num_listed: int
    num_kinds: int
    differences: tuple[str, ...]
    seconds: float


def planned(spec: ModelSpec, way: Way) -> Plan:
    """A proven plan of that way."""
    ranks = way.replicate * way.shard
    options: dict[str, Any] = {
        "precision": "fp32",
        "recompute": "none",
        "reshard_after_forward": True,
        **way.options,
    }
    return tpplan.solve(
        spec.build_model,
        spec.example_inputs,
        loss=spec.loss,
        unused_outputs=spec.unused_outputs,
        cluster=tpplan.Cluster(gpus=way.gpus, gpus_per_node=GPUS_PER_NODE, profile=machine()),
        global_batch=MICRO_BATCH * way.micro_batches * ranks,
        micro_batch=MICRO_BATCH,
        seq_len=SEQ_LEN,
        tp=way.tp,
        fsdp=way.shard,
        all_gpus=True,
        **options,
    )


def compared(model: str, way_name: str) -> Row:
    """Plans, runs a step, and compares. Raises what planning or running raises."""
    start = time.perf_counter()
    spec, way = load_model_file(str(EXAMPLES / f"{model}.py")), WAYS[way_name]
    plan = planned(spec, way)
    inputs = spec.example_inputs(plan.batch.micro_batch, plan.batch.seq_len)
    assert spec.loss is not None
    issued = fake_step(spec.build_model, inputs, spec.loss, plan, is_tracked=False).issued
    wanted = listed(plan)
    return Row(
        model=model,
        way=way_name,
        num_listed=sum(wanted.values()),
        num_kinds=len(wanted),
        differences=tuple(map(str, differences(plan, wanted, issued))),
        seconds=time.perf_counter() - start,
    )


def table(rows: Sequence[Row]) -> Table:
    """A line a plan, what differs below."""
    found = Table(box=None, pad_edge=False)
    for title in ("model", "plan"):
        found.add_column(title, no_wrap=True)
    for title in ("a step's collectives", "of so many kinds and sizes", "not as listed"):
        found.add_column(title, justify="right")
    for row in rows:
        found.add_row(row.model, row.way, str(row.num_listed), str(row.num_kinds), str(len(row.differences)))
    return found


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--plans", nargs="+", choices=WAYS, default=tuple(WAYS), metavar="NAME", help=", ".join(WAYS))
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: there are {', '.join(MODELS)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows, failures = [], 0
    for model in arguments.models or MODELS:
        for way in arguments.plans:
            try:
                row = compared(model, way)
            except TpplanError as error:
                failures += 1
                print(f"collectives: {model} {way}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            rows.append(row)
            print(f"collectives: {model} {way}: {len(row.differences)} differ, {row.seconds:.1f} s", file=sys.stderr)
            for difference in row.differences:
                print(f"    {difference}", file=sys.stderr)
    Console(width=150).print(table(rows))
    num_right = sum(not row.differences for row in rows)
    print(f"{num_right} of {len(rows)} plans list exactly what is issued; {failures} could not be planned or run")
    return 0 if num_right == len(rows) and not failures else 1


if __name__ == "__main__":
    sys.exit(main())

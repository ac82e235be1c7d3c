"""Holds predicted peak memory against torch's own tracker, on one rank of the applied model; nothing is computed.

    python scripts/evidence/memory.py [MODEL ...] [--plans NAME ...] [--out FILE.csv]

Every model is planned eight ways: tensor parallelism, the same with the sequence sharded, FSDP that keeps layers
gathered (ZeRO-2) and that does not (ZeRO-3), recomputation in full and, on 4 tensor-parallel ranks, selectively, two
dimensions at once over two micro-batches, and whole gradients; models with experts also three ways that divide these
among ranks. Plans are solved for a made-up machine on which sharding pays. One rank's step runs on fake tensors under
FSDPMemTracker (tpplan/verify/fake_step.py), the optimizer's included. Predictions are without slack. Exit code 0 if
the bars are kept.
"""

import argparse
import csv
import itertools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_up_machine import GPUS_PER_NODE, machine
from memory_parts.models import EXPERT_MODELS, MODELS, Subject
from rich.console import Console
from rich.table import Table

import tpplan
from tpplan.core.errors import TpplanError
from tpplan.core.graph import Boundary, ModelGraph
from tpplan.core.layout import S
from tpplan.core.units import format_bytes
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan
from tpplan.verify.fake_step import Tracked, track

#: predicted / tracked - 1: of every plan at least, of half of them at most, of nine tenths at most
NEVER_BELOW, MEDIAN_BAR, NINE_TENTHS_BAR = 0.0, 0.05, 0.10
#: a tracker counts to the byte what a plan counts in bytes per part; a few scalars (a loss, a step count) are less
ROUNDING = 1e-4
SEQUENCE_DIM = 1


def keeps_sequences_whole(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
    """Forbids slices of the sequence of x [B, T, D] at modules' boundaries."""
    crossing = {node.name for node in graph.nodes if isinstance(node, Boundary)}
    return lambda decision, strategy: decision not in crossing or strategy.results[0] != S(SEQUENCE_DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is planned: arguments of tpplan.solve."""

    gpus: int
    micro_batches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


FSDP = {"tp": 1, "fsdp": 4, "precision": "bf16-mixed"}
WAYS: Mapping[str, Way] = {
    "tp": Way(gpus=2, options={"tp": 2, "precision": "bf16", "allows": keeps_sequences_whole}),
    "tp-sp": Way(gpus=2, options={"tp": 2, "precision": "bf16", "optimizer": "sgd-momentum"}),
    "zero2": Way(gpus=4, options={**FSDP, "reshard_after_forward": False}),
    "zero3": Way(gpus=4, options=FSDP),
    "recompute": Way(gpus=4, options={**FSDP, "recompute": "full", "optimizer": "sgd"}),
    "selective": Way(gpus=4, options={"tp": 4, "precision": "bf16", "recompute": "selective", "optimizer": "sgd"}),
    "2d": Way(gpus=8, micro_batches=2, options={"tp": 2, "fsdp": 2, "precision": "bf16-mixed"}),
    "whole": Way(gpus=4, micro_batches=3, options={**FSDP, "whole_gradients": True}),
}
#: ways of EXPERT_MODELS: experts divided among ranks that shard, also beside tensor parallelism
EXPERT_WAYS: Mapping[str, Way] = {
    "ep": Way(gpus=4, options={**FSDP, "ep": 2}),
    "ep-all": Way(gpus=4, options={**FSDP, "ep": 4, "recompute": "full"}),
    "ep-tp": Way(gpus=4, micro_batches=2, options={"tp": 2, "fsdp": 2, "ep": 2, "precision": "bf16-mixed"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model's plan with its prediction, and what was tracked."""

    model: str
    way: str
    plan: Plan
    tracked: Tracked
    seconds: float

    @property
    def error(self) -> float:
        """Relative; above 0 where less was tracked than predicted."""
        return self.plan.predicted.peak_memory_bytes / self.tracked.peak_bytes - 1

    def to_dict(self) -> dict[str, object]:
        """A line of the CSV."""
        predicted = self.plan.predicted
        return {
            "model": self.model,
            "plan": self.way,
            "predicted_bytes": round(predicted.peak_memory_bytes),
            "tracked_bytes": self.tracked.peak_bytes,
            "tracker_as_it_is_bytes": self.tracked.as_it_is_bytes,
            "relative_error": self.error,
            "peak_during": str(predicted.peak_during),
            "peak_module": predicted.peak_module,
            "predicted_by_part": {name: round(count) for name, count in predicted.memory_bytes.items()},
            "tracked_by_part": dict(self.tracked.parts),
        }


def planned(subject: Subject, way: Way, *, prove: bool = True) -> Plan:
    """The plan, which need not fit anywhere. Unproven, it lacks the sizes to replace in a model's code."""
    micro_batch = subject.batch
    ranks = way.gpus // way.options["tp"]
    options: dict[str, Any] = {
        "unused_outputs": subject.unused_outputs,
        "precision": "bf16-mixed",
        "all_gpus": True,
        "recompute": "none",
        "reshard_after_forward": True,
        **way.options,
    }
    return tpplan.solve(
        subject.build_model,
        subject.example_inputs,
        loss=subject.loss,
        cluster=tpplan.Cluster(gpus=way.gpus, gpus_per_node=GPUS_PER_NODE, profile=machine()),
        global_batch=way.micro_batches * micro_batch * ranks,
        micro_batch=micro_batch,
        seq_len=subject.seq_len,
        prove=prove,
        **options,
    )


def compare(name: str, way_name: str) -> Row:
    """Plans, runs, and puts both numbers side by side. Raises what solving or running raises."""
    start = time.perf_counter()
    subject, way = {**EXPERT_MODELS, **MODELS}[name](), {**WAYS, **EXPERT_WAYS}[way_name]
    plan = planned(subject, way)
    inputs = subject.example_inputs(subject.batch, subject.seq_len)
    tracked = track(subject.build_model, inputs, subject.loss or _own_loss, plan)
    return Row(model=name, way=way_name, plan=plan, tracked=tracked, seconds=time.perf_counter() - start)


def _own_loss(outputs: Any, _inputs: object) -> Any:
    return outputs.loss


def table(rows: Sequence[Row]) -> Table:
    """A line a plan."""
    found = Table(box=None, pad_edge=False)
    for title in ("model", "plan"):
        found.add_column(title, no_wrap=True)
    for title in ("predicted", "tracked", "error", "FSDPMemTracker as it is"):
        found.add_column(title, justify="right")
    found.add_column("peak", no_wrap=True)
    for row in rows:
        predicted = row.plan.predicted
        as_it_is = row.tracked.as_it_is_bytes
        found.add_row(
            row.model,
            row.way,
            format_bytes(predicted.peak_memory_bytes),
            format_bytes(row.tracked.peak_bytes),
            f"{row.error:+.2%}",
            "" if as_it_is is None else f"{as_it_is / row.tracked.peak_bytes - 1:+.2%}",
            f"{predicted.peak_during}: {predicted.peak_module}",
        )
    return found


def summary(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """The errors beside their bars, and whether all are kept."""
    errors = sorted(row.error for row in rows)
    nine_tenths = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    checks = (
        ("least", errors[0], errors[0] >= NEVER_BELOW - ROUNDING, "never below"),
        ("median", statistics.median(errors), statistics.median(errors) <= MEDIAN_BAR, f"{MEDIAN_BAR:.0%}"),
        ("90th percentile", nine_tenths, nine_tenths <= NINE_TENTHS_BAR, f"{NINE_TENTHS_BAR:.0%}"),
    )
    lines = [f"{name}: {error:+.2%} (bar: {bar}: {'kept' if ok else 'missed'})" for name, error, ok, bar in checks]
    return [f"{len(rows)} plans, predicted against tracked", *lines], all(ok for _, _, ok, _ in checks)


def asked(models: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the models with their ways: where both are named each with each, else those of a table."""
    if models and ways:
        yield from itertools.product(models, ways)
        return
    for known, own in ((MODELS, WAYS), (EXPERT_MODELS, EXPERT_WAYS)):
        yield from ((m, way) for m in models or known if m in known for way in ways or own if way in own)


def compared(pairs: Iterable[tuple[str, str]]) -> Iterator[Row | str]:
    """Rows as they come, or why there is none."""
    for model, way in pairs:
        try:
            row = compare(model, way)
        except (
            TpplanError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            problem = f"{model} {way}: {type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"memory: {problem}", file=sys.stderr)
            yield problem
        else:
            print(f"memory: {model} {way}: {row.error:+.2%}, {row.seconds:.1f} s", file=sys.stderr)
            yield row


def main() -> int:
    """Compare, print, write."""
    every_model, every_way = {**EXPERT_MODELS, **MODELS}, {**WAYS, **EXPERT_WAYS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(every_model)} (default: all)")
    parser.add_argument("--plans", nargs="+", choices=every_way, default=(), metavar="NAME", help=", ".join(every_way))
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in every_model]:
        parser.error(f"no model {unknown[0]!r}: there are {', '.join(every_model)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = list(compared(asked(arguments.models, arguments.plans)))
    rows = [row for row in found if isinstance(row, Row)]
    Console(width=150).print(table(rows))
    lines, is_kept = summary(rows) if rows else ([], False)
    problems = [entry for entry in found if isinstance(entry, str)]
    print("\n".join([*problems, *lines]))
    if arguments.out is not None and rows:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0].to_dict()))
            writer.writeheader()
            writer.writerows(row.to_dict() for row in rows)
    return 0 if is_kept and not problems else 1


if __name__ == "__main__":
    sys.exit(main())

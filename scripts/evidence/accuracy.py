"""Holds predictions against training runs that others published.

    python scripts/evidence/accuracy.py published --data RUNS.csv [--out FILE.csv] [--refit PROFILES_FOLDER]

RUNS.csv has a row per run: model sizes, GPUs, mesh, what is recomputed, tokens per second and GPU, peak memory (README
names the columns). Each run is traced and priced as tpplan prices a plan, at its own mesh, micro-batch, recomputation
and ZeRO stage. A machine's profile may hold two numbers that no benchmark gave (`fitted`): by how much matmuls in
training are slower than alone, and how much FSDP's collectives slow what they run beside. Where a table has runs enough
they are fitted again for every model, to the other models' runs on that machine, or else on the one it is most like;
where it has not, the profile's serve.

Prints errors by source, GPU, size and number of GPUs, beside those of a plain lookup: the median MFU of the other
models' runs on that GPU with the same recomputation; the bias is the mean error. --out writes the table with
predictions and 90 % error bars. A run without measured tokens per second is predicted all the same. One that cannot be
(pipelines, FP8, an unknown GPU) is named, with the reason, and has no prediction; the exit code is 2 if none has one.
--refit writes the numbers fitted to all runs into the profiles of a folder.
"""

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy_parts.models import Sizes, Software, architecture, example_inputs, software
from rich.console import Console
from rich.progress import track

from tpplan.core.errors import TpplanError
from tpplan.core.files import write_atomically
from tpplan.core.units import GIB
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.machine.fit_tables import UNKNOWN_RELATIVE_ERROR, rms
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.machine.tables import Fitted
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, OPTIMIZER, RECOMPUTATION
from tpplan.plan.plan import Precision, Recompute
from tpplan.search.planner import Priced, price_mesh
from tpplan.search.points.options import Cluster, Options

#: a profile -> the machine that it is most like
LIKE = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a100-sxm-80gb": "a100-sxm-40gb",
    "h100-sxm": "h100-96gb-hbm2e",
    "h100-96gb-hbm2e": "h100-sxm",
    "h200-sxm": "h100-sxm",
    "b200": "h100-sxm",
}
#: what a table's name of a GPU has in it -> the profile; the first that fits. Parts on PCIe are others
MACHINES = {
    r"\bA100.*40 ?GB": "a100-sxm-40gb",
    r"\bA100": "a100-sxm-80gb",
    r"\bH100.*96 ?GB": "h100-96gb-hbm2e",
    r"\bH100": "h100-sxm",
    r"\bH200": "h200-sxm",
    r"\bB200": "b200",
}
OTHER_PARTS = r"PCIE|NVL\b|CNX"
#: dense bfloat16 FLOP/s that published MFU is relative to
PEAK_FLOP_PER_S = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
SECOND_OVER_FIRST_FLASH_ATTENTION = 2.0
#: torchtitan's "selective op" keeps every second matmul, and attention [torchtitan, models/llama/parallelize_llama.py]
EVERY_OTHER_MATMUL = "selective op"
#: of a normal distribution
WITHIN_90_PERCENT = 1.645
KERNELS = (COMPUTE, OPTIMIZER, RECOMPUTATION)
#: two runs that differ by less (log of tokens per second) are as fast as each other
SPREAD = 0.02
#: what is fitted to fewer runs is no property of a machine
FEWEST_RUNS = 10
#: root mean square of the log error of the 8 peaks in the table of published runs that the README speaks of
PEAK_ERROR = 0.2
FITTED = {
    "matmul_slowdown": "matmuls in training against alone, in benchmarks: clocks under load, real data",
    "overlap_slowdown": "seconds that kernels take longer for each second of an FSDP collective beside them",
}
#: numbers tried, coarse to fine
MATMUL_SLOWDOWNS, OVERLAP_SLOWDOWNS = np.linspace(0.8, 2.0, 25), np.linspace(0.0, 1.0, 21)
REFINEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. tokens_per_s is per GPU; it, and peak_bytes, are None where nobody says."""

    row: int
    source: str
    model: str
    machine: str
    gpus: int
    gpus_per_node: int
    sizes: Sizes
    micro_batch: int
    global_batch: int
    tp: int
    shard: int
    reshard: bool
    recompute: Recompute
    is_compiled: bool
    precision: Precision
    software: Software
    recomputes_every_other_matmul: bool
    tokens_per_s: float | None
    peak_bytes: float | None

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on each GPU."""
        return self.global_batch * self.sizes.seq_len / self.gpus

    @property
    def flop_per_token(self) -> float:
        """6 N + 12 L H T, as MFU is counted."""
        return 6 * self.sizes.num_parameters + 12 * self.sizes.layers * self.sizes.hidden * self.sizes.seq_len

    @property
    def peak_flop_per_s(self) -> float:
        """Of the tensor cores, in dense bfloat16."""
        return PEAK_FLOP_PER_S[self.machine[:4]]

    @property
    def measured_s(self) -> float:
        """Of a step, where tokens per second are said."""
        assert self.tokens_per_s is not None
        return self.step_tokens / self.tokens_per_s

    @property
    def mfu(self) -> float:
        """Of the tensor cores' peak, where tokens per second are said."""
        return self.step_tokens / self.measured_s * self.flop_per_token / self.peak_flop_per_s


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds of kernels as benchmarks have them: matmuls, and the others."""

    matmuls: float
    others: float

    def seconds(self, matmul_slowdown: float) -> float:
        """In training."""
        return matmul_slowdown * self.matmuls + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run's step: its kernels, seconds of what runs beside none, and FSDP's collectives, as (seconds, kernels beside
    it, times per step)."""

    kernels: Kernels
    alone: float
    beside: tuple[tuple[float, Kernels, float], ...]
    peak_bytes: float

    def seconds(self, matmul_slowdown: float, overlap_slowdown: float) -> float:
        """The step, as tpplan prices it on a profile with these two numbers."""
        fixed, slope = self.line(matmul_slowdown)
        return fixed + slope * overlap_slowdown

    def line(self, matmul_slowdown: float) -> tuple[float, float]:
        """Seconds at no overlap slowdown, and how they grow with it."""
        fixed, slope = self.kernels.seconds(matmul_slowdown) + self.alone, 0.0
        for transfer, kernels, weight in self.beside:
            exposed = max(0.0, transfer - kernels.seconds(matmul_slowdown))
            fixed, slope = fixed + weight * exposed, slope + weight * (transfer - exposed)
        return fixed, slope


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens per second and GPU, and its relative 90 % error bar."""

    tokens_per_s: float
    bar: float


# --- reading -------------------------------------------------------------------------------------------------------


def read_runs(table: pd.DataFrame) -> tuple[list[Run], list[str]]:
    """The runs in the rows of a table, and what cannot be read in its other rows. Raises ValueError where a column is
    missing."""
    runs, problems = [], []
    for row, entry in table.iterrows():
        try:
            runs.append(_run(int(str(row)), entry))
        except KeyError as error:
            raise ValueError(f"no column {error}; it has {', '.join(map(str, table.columns))}") from error
        except ValueError as error:
            problems.append(f"row {int(str(row)) + 2}: {error}")
    return runs, problems


def machine_of(gpu: str) -> str:
    """The profile of a GPU as a table names it. Raises ValueError for one that has none."""
    found = next((name for pattern, name in MACHINES.items() if re.search(pattern, gpu, re.IGNORECASE)), None)
    if found is None or re.search(OTHER_PARTS, gpu, re.IGNORECASE):
        raise ValueError(f"gpu {gpu!r}: expected an SXM part with a profile, of {', '.join(LIKE)}")
    return found


def _whole(entry: "pd.Series[object]", name: str, default: int | None = None) -> int:
    """A whole number of a row. Raises ValueError where there is none and nothing stands for it."""
    value = entry[name]
    if pd.isna(value):
        if default is None:
            raise ValueError(f"no {name}")
        return default
    number = float(str(value))
    if number != int(number) or number < 1:
        raise ValueError(f"{name} {value}: expected a whole number, 1 or more")
    return int(number)


def _is_yes(entry: "pd.Series[object]", name: str) -> bool:
    """Yes or no; no where a row says nothing. Raises ValueError for any other word."""
    text = str(entry[name]).lower()
    if text not in ("yes", "true", "1", "no", "false", "0", "nan"):
        raise ValueError(f"{name} {entry[name]!r}: expected yes or no")
    return text in ("yes", "true", "1")


def _measured(entry: "pd.Series[object]", name: str) -> float | None:
    """A number of a row; None where it, or its column, is not there."""
    value = entry.get(name)
    return None if pd.isna(value) else float(str(value))


def _run(row: int, entry: "pd.Series[object]") -> Run:
    gpus, tp, notes = _whole(entry, "n_gpus"), _whole(entry, "tp", 1), str(entry["notes"])
    if _whole(entry, "pp", 1) != 1:
        raise ValueError(f"pp {entry['pp']}: pipeline parallelism is not planned")
    micro_batch = _whole(entry, "micro_batch_per_gpu")
    sizes = {name: _whole(entry, name) for name in ("layers", "hidden", "ffn", "heads", "vocab", "seq_len")}
    mode = "none" if pd.isna(entry["dp_mode"]) else str(entry["dp_mode"]).lower()
    is_replicated = mode.split()[0] in ("none", "ddp", "dp")
    if not is_replicated and not any(word in mode for word in ("fsdp", "hsdp", "zero2", "zero3")):
        raise ValueError(f"dp_mode {entry['dp_mode']!r}: expected none, ddp, fsdp, hsdp, zero2 or zero3")
    return Run(
        row=row,
        source=str(entry["source_id"]),
        model=str(entry["model"]),
        machine=machine_of(str(entry["gpu"])),
        gpus=gpus,
        gpus_per_node=min(gpus, 4 if "4 per node" in str(entry["gpu"]) else 8),
        sizes=Sizes(
            **sizes,
            kv_heads=_whole(entry, "kv_heads", sizes["heads"]),
            num_parameters=float(str(entry["n_params"])),
        ),
        micro_batch=micro_batch,
        global_batch=_whole(entry, "global_batch", micro_batch * gpus // tp),
        tp=tp,
        shard=1 if is_replicated else _whole(entry, "fsdp_degree", gpus // tp),
        reshard="zero2" not in mode,
        recompute=_recompute(str(entry["activation_checkpointing"])),
        is_compiled=_is_yes(entry, "compile"),
        precision=_precision(str(entry["precision"])),
        software=software(notes),
        recomputes_every_other_matmul=str(entry["activation_checkpointing"]) == EVERY_OTHER_MATMUL,
        tokens_per_s=_measured(entry, "tokens_per_s_per_gpu"),
        peak_bytes=None if (peak_gib := _measured(entry, "peak_mem_gib")) is None else peak_gib * GIB,
    )


def _recompute(text: str) -> Recompute:
    return Recompute(text.split()[0]) if text != "nan" else Recompute.NONE


def _precision(text: str) -> Precision:
    if "fp8" in text.lower() or not any(name in text.lower() for name in ("bf16", "bfloat16", "fp16", "nan")):
        raise ValueError(f"precision {text!r}: expected 16 bits; others are not priced here")
    is_pure = "PURE" in text or "params+states" in text
    return Precision.BF16 if is_pure else Precision.BF16_MIXED


# --- pricing -------------------------------------------------------------------------------------------------------


@cache
def benchmark(machine: str, has_first_flash_attention: bool) -> HardwareProfile:
    """A profile without its fitted numbers, and with the attention of a run's software."""
    profile = load_profile(machine)
    rates = tuple(
        replace(
            rate,
            forward_flop_per_s=rate.forward_flop_per_s / SECOND_OVER_FIRST_FLASH_ATTENTION,
            backward_flop_per_s=rate.backward_flop_per_s / SECOND_OVER_FIRST_FLASH_ATTENTION,
        )
        for rate in profile.attention_rates
    )
    profile = replace(profile, fitted=None, overlap=None)
    return replace(profile, attention_rates=rates, attention_tables=None) if has_first_flash_attention else profile


def price(run: Run) -> Parts:
    """The run's step."""
    if not run.recomputes_every_other_matmul:
        return _price(run, run.recompute)
    selective, full = (_price(run, mode) for mode in (Recompute.SELECTIVE, Recompute.FULL))
    return halfway(selective, full)


def halfway(selective: Parts, full: Parts) -> Parts:
    """Half of the matmuls that full recomputation repeats, and of the memory that it saves."""

    def between(one: Kernels, other: Kernels) -> Kernels:
        return Kernels((one.matmuls + other.matmuls) / 2, one.others)

    return Parts(
        kernels=between(selective.kernels, full.kernels),
        alone=selective.alone,
        beside=tuple(
            (transfer, between(kernels, other), weight)
            for (transfer, kernels, weight), (_, other, _) in zip(selective.beside, full.beside, strict=True)
        ),
        peak_bytes=(selective.peak_bytes + full.peak_bytes) / 2,
    )


def _price(run: Run, recompute: Recompute) -> Parts:
    """With Megatron's layouts and sequence parallelism on the tp axis, as all of these runs have it."""
    model, has_whole_logits = architecture(run.sizes, run.software), run.tp == 1 or run.software.gathers_logits
    priced = price_mesh(
        lambda: model.build(run.sizes),
        example_inputs,
        cluster=Cluster(
            gpus=run.gpus,
            gpus_per_node=run.gpus_per_node,
            profile=benchmark(run.machine, run.software.has_first_flash_attention),
        ),
        global_batch=run.global_batch,
        micro_batch=run.micro_batch,
        seq_len=run.sizes.seq_len,
        options=Options(
            loss=model.loss if has_whole_logits else model.sharded_loss,
            unused_outputs=() if has_whole_logits else ("output",),
            tp=run.tp,
            fsdp=run.shard,
            precision=run.precision,
            recompute=recompute,
            reshard_after_forward=run.reshard,
            compile=run.is_compiled,
            pins=model.pins if run.tp > 1 else {},
        ),
    )
    return parts(priced)


def parts(priced: Priced) -> Parts:
    """What of a priced step is matmuls, other kernels, collectives: a price is linear in the matmuls' slowdown."""
    plain, slow = (_at(priced.formulation, slowdown) for slowdown in (1.0, 2.0))
    choice = priced.choice
    beside, alone = [], sum(t.value(choice) for t in plain.problem.objective if t.name not in (*KERNELS, DATA_PARALLEL))
    if plain.mesh.data_parallel > 1:
        for overlap, slower in zip(*(f.fsdp_communication.collectives() for f in (plain, slow)), strict=True):
            transfer = overlap.transfer.value(choice)
            if overlap.compute is None or slower.compute is None:
                alone += transfer * overlap.weight * overlap.count.constant
            else:
                one, two = overlap.compute.value(choice), slower.compute.value(choice)
                beside.append((transfer, Kernels(two - one, 2 * one - two), overlap.weight * overlap.count.constant))
    one, two = (sum(t.value(choice) for t in f.problem.objective if t.name in KERNELS) for f in (plain, slow))
    return Parts(
        kernels=Kernels(two - one, 2 * one - two), alone=alone, beside=tuple(beside), peak_bytes=priced.peak_bytes
    )


def _at(formulation: Formulation, matmul_slowdown: float) -> Formulation:
    """The same on a machine whose matmuls are slower, with the same choices to make."""
    setting, priced = formulation.setting, formulation.priced
    number = Fitted(name="matmul_slowdown", value=matmul_slowdown, residual=0.0, runs=1, what="tried")
    profile = replace(setting.profile, fitted=(number,))
    again = price_space(priced.space, profile, setting.gpus_per_node, priced.executor, is_compiled=priced.is_compiled)
    return replace(formulation, priced=again, setting=replace(setting, profile=profile))


# --- fitting -------------------------------------------------------------------------------------------------------


def fit(runs: Sequence[Run], priced: Mapping[int, Parts]) -> tuple[tuple[float, float], float]:
    """The two numbers of least squared log error, and the root of its mean."""
    measured = np.array([run.measured_s for run in runs])
    slowdowns, overlaps = MATMUL_SLOWDOWNS, OVERLAP_SLOWDOWNS
    best = (math.inf, 0.0, 0.0)
    for _ in range(REFINEMENTS):
        for slowdown in slowdowns:
            fixed, slope = np.array([priced[run.row].line(slowdown) for run in runs]).T
            errors = np.log((fixed + np.outer(overlaps, slope)) / measured)
            squares = np.square(errors).mean(axis=1)
            place = int(squares.argmin())
            best = min(best, (float(squares[place]), float(slowdown), float(overlaps[place])))
        slowdowns, overlaps = _around(best[1], slowdowns), _around(best[2], overlaps)
    return (best[1], best[2]), math.sqrt(best[0])


def _around(value: float, grid: np.ndarray) -> np.ndarray:
    """Finer numbers between the neighbours of one, none outside of the grid."""
    step = grid[1] - grid[0]
    return np.clip(np.linspace(value - step, value + step, 11), grid[0], grid[-1])


def log_errors(runs: Sequence[Run], priced: Mapping[int, Parts], numbers: tuple[float, float]) -> list[float]:
    """ln(predicted / measured) of each run."""
    return [math.log(priced[run.row].seconds(*numbers) / run.measured_s) for run in runs]


def left_out(runs: Sequence[Run], priced: Mapping[int, Parts]) -> list[float]:
    """Log errors of runs, each model's predicted by numbers fitted to the others'; none where there is one model."""
    errors: list[float] = []
    for model in sorted({run.model for run in runs}):
        own, others = ([run for run in runs if (run.model == model) is is_own] for is_own in (True, False))
        if others:
            errors += log_errors(own, priced, fit(others, priced)[0])
    return errors


def transferred(runs: Sequence[Run], priced: Mapping[int, Parts]) -> list[float]:
    """Log errors of each machine's runs, predicted by numbers fitted to those of the machine it is most like."""
    errors: list[float] = []
    for machine, like in LIKE.items():
        own, others = ([run for run in runs if run.machine == name] for name in (machine, like))
        if own and others:
            errors += log_errors(own, priced, fit(others, priced)[0])
    return errors


def predict(run: Run, runs: Sequence[Run], priced: Mapping[int, Parts]) -> Prediction:
    """From measured runs of other models on this machine, or else on the one it is most like, where there are enough.
    Else the numbers in the machine's profile serve.

    The bar is that of predicting those runs in the same way: each model from the others, or each machine from its like.
    """
    others = [other for other in runs if other.model != run.model]
    on_it, on_like = (
        [other for other in others if other.machine == machine] for machine in (run.machine, LIKE[run.machine])
    )
    if len(on_it) >= FEWEST_RUNS:
        numbers, errors = fit(on_it, priced)[0], left_out(on_it, priced)
    elif len(on_like) >= FEWEST_RUNS:
        numbers, errors = fit(on_like, priced)[0], [*transferred(others, priced), *left_out(on_like, priced)]
    else:
        profile = load_profile(run.machine)
        numbers = (profile.matmul_slowdown, profile.overlap_slowdown)
        errors = [max((number.residual for number in profile.fitted or ()), default=UNKNOWN_RELATIVE_ERROR)]
    bar = WITHIN_90_PERCENT * (rms(errors) if errors else UNKNOWN_RELATIVE_ERROR)
    return Prediction(tokens_per_s=run.step_tokens / priced[run.row].seconds(*numbers), bar=bar)


def memory_bar(run: Run, runs: Sequence[Run], priced: Mapping[int, Parts]) -> float:
    """Relative 90 % error of a peak, from the published peaks of other models."""
    errors = [
        math.log(priced[other.row].peak_bytes / other.peak_bytes)
        for other in runs
        if other.peak_bytes is not None and other.model != run.model
    ]
    return WITHIN_90_PERCENT * (rms(errors) if errors else PEAK_ERROR)


def lookup(run: Run, runs: Sequence[Run]) -> float | None:
    """Tokens per second by the median MFU of other models with this GPU and recomputation."""
    alike = [r.mfu for r in runs if (r.machine, r.recompute) == (run.machine, run.recompute) and r.model != run.model]
    return float(np.median(alike)) * run.peak_flop_per_s / run.flop_per_token if alike else None


# --- the report ----------------------------------------------------------------------------------------------------


def with_predictions(table: pd.DataFrame, runs: Sequence[Run], priced: Mapping[int, Parts]) -> pd.DataFrame:
    """The table with what is predicted for each run, each from measured runs of other models; empty for other rows."""
    measured = measured_of(runs)
    rows = {}
    for run in runs:
        found, peak_gib = predict(run, measured, priced), priced[run.row].peak_bytes / GIB
        rows[run.row] = {
            "predicted_tokens_per_s_per_gpu": found.tokens_per_s,
            "predicted_tokens_per_s_error": found.tokens_per_s * found.bar,
            "predicted_peak_mem_gib": peak_gib,
            "predicted_peak_mem_error": memory_bar(run, measured, priced) * peak_gib,
        }
    return table.join(pd.DataFrame.from_dict(rows, orient="index"))


def measured_of(runs: Sequence[Run]) -> list[Run]:
    """Those whose tokens per second are said."""
    return [run for run in runs if run.tokens_per_s is not None]


def report(table: pd.DataFrame, runs: Sequence[Run]) -> Iterator[str]:
    """Lines: errors by group, the bars, the lookup beside them, the order of plans, memory; of the runs, which are
    measured, and their rows of the table."""
    error = table.predicted_tokens_per_s_per_gpu / table.tokens_per_s_per_gpu - 1
    looked = pd.Series([lookup(run, runs) for run in runs], index=table.index, dtype=float)
    lookup_error = looked / table.tokens_per_s_per_gpu - 1
    sizes = pd.cut(
        table.n_params / 1e9, [0, 0.5, 2, 10, 40, 1000], labels=["<0.5B", "0.5-2B", "2-10B", "10-40B", ">40B"]
    )
    groups = {
        "source": table.source_id,
        "GPU": [run.machine for run in runs],
        "size": sizes,
        "GPUs": table.n_gpus,
        "recomputed": [str(run.recompute) for run in runs],
    }
    errors = f"{'median |error|':>16}{'90th pct':>10}{'mean error':>12}{'median':>8}"
    yield f"{'':32}{'runs':>6}{errors}   lookup: median, 90th pct"
    yield _line("all", error, lookup_error)
    for title, key in groups.items():
        for name, rows in error.groupby(key, observed=True):
            yield _line(f"{title} {name}", rows, lookup_error[rows.index])
    inside = (error.abs() <= table.predicted_tokens_per_s_error / table.predicted_tokens_per_s_per_gpu).mean()
    yield f"within their 90 % bar: {inside:.0%}"
    right, pairs = _ordered(table, runs)
    yield f"pairs of runs of one model on one machine in the right order: {right} of {pairs}"
    for run in runs:
        if run.peak_bytes is not None:
            peak_gib, predicted_gib = run.peak_bytes / GIB, table.predicted_peak_mem_gib[run.row]
            yield (
                f"peak memory {run.model} on {run.gpus} x {run.machine}, tp {run.tp}: measured {peak_gib:.1f} GiB, "
                f"predicted {predicted_gib:.1f} ({predicted_gib / peak_gib - 1:+.0%})"
            )


def _line(title: str, error: "pd.Series[float]", looked: "pd.Series[float]") -> str:
    size, other = error.abs(), looked.abs().dropna()
    beside = f"{other.median():11.1%}{other.quantile(0.9):11.1%} ({len(other)})" if len(other) else ""
    spread = f"{size.median():16.1%}{size.quantile(0.9):10.1%}{error.mean():+12.1%}{error.median():+8.1%}"
    return f"{title:32}{len(error):6}{spread}   {beside}"


def _ordered(table: pd.DataFrame, runs: Sequence[Run]) -> tuple[int, int]:
    """Of pairs that share model, machine, number of GPUs and sequence length and differ by more than their spread, how
    many are predicted in the order measured."""
    right = pairs = 0
    for one, other in itertools.combinations(range(len(runs)), 2):
        first, second = runs[one], runs[other]
        alike = (first.model, first.machine, first.gpus, first.sizes.seq_len)
        if alike != (second.model, second.machine, second.gpus, second.sizes.seq_len):
            continue
        measured = math.log(first.tokens_per_s / second.tokens_per_s)
        predicted = table.predicted_tokens_per_s_per_gpu
        if abs(measured) > SPREAD:
            pairs += 1
            right += measured * math.log(predicted.iloc[one] / predicted.iloc[other]) > 0
    return right, pairs


def fitted(runs: Sequence[Run], priced: Mapping[int, Parts]) -> dict[str, tuple[Fitted, ...]]:
    """The two numbers of each machine with runs enough, fitted to all of them, and of machines that are like those.

    The residual is that of models left out of the fit, and of machines that have another's numbers.
    """
    far = rms([*transferred(runs, priced), 0.0])
    found = {}
    for machine in sorted({run.machine for run in runs}):
        own = [run for run in runs if run.machine == machine]
        if len(own) >= FEWEST_RUNS:
            numbers, _ = fit(own, priced)
            residual = rms(left_out(own, priced) or [UNKNOWN_RELATIVE_ERROR])
            found[machine] = tuple(
                Fitted(name=name, value=round(value, 3), residual=round(residual, 3), runs=len(own), what=what)
                for (name, what), value in zip(FITTED.items(), numbers, strict=True)
            )
    for machine, like in LIKE.items():
        if machine not in found and like in found:
            found[machine] = tuple(
                replace(n, what=f"{n.what}; fitted to runs on {like}", residual=round(max(n.residual, far), 3))
                for n in found[like]
            )
    return found


def write_fitted(folder: Path, numbers: Mapping[str, tuple[Fitted, ...]]) -> None:
    """Puts the numbers into the profiles of a folder."""
    for machine, found in numbers.items():
        path = folder / f"{machine}.json"
        write_atomically(path, replace(load_profile(path), fitted=found).dumps())


def main() -> int:
    """Read, price, fit, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["published"], help="runs that others published")
    parser.add_argument("--data", type=Path, required=True, help="the table of runs")
    parser.add_argument("--out", type=Path, help="write the table with predictions here")
    parser.add_argument("--refit", type=Path, metavar="FOLDER", help="write the fitted numbers into these profiles")
    arguments = parser.parse_args()
    table = pd.read_csv(arguments.data)
    try:
        runs, problems = read_runs(table)
    except ValueError as error:
        print(f"accuracy: {arguments.data}: {error}", file=sys.stderr)
        return 2
    priced = {}
    for run in track(runs, description="price", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        try:
            priced[run.row] = price(run)
            if off := architecture(run.sizes, run.software).relative_excess(run.sizes):
                how = f"{abs(off):.1%} {'more' if off > 0 else 'fewer'} parameters"
                print(f"accuracy: {arguments.data}: row {run.row + 2}: priced as a model with {how}", file=sys.stderr)
        except (ValueError, TpplanError) as error:
            problems.append(f"row {run.row + 2}: {error}")
    for problem in problems:
        print(f"accuracy: {arguments.data}: not predicted: {problem}", file=sys.stderr)
    runs = [run for run in runs if run.row in priced]
    print(f"predicted: {len(runs)} of {len(table)} runs")
    if not runs:
        return 2
    predicted, measured = with_predictions(table, runs, priced), measured_of(runs)
    if measured:
        print("\n".join(report(predicted.loc[[run.row for run in measured]], measured)))
    numbers = fitted(measured, priced)
    for machine, pair in numbers.items():
        print(machine, ", ".join(f"{n.name} {n.value} (residual {n.residual:.1%} of {n.runs} runs)" for n in pair))
    if arguments.out is not None:
        write_atomically(arguments.out, predicted.to_csv(index=False))
    if arguments.refit is not None:
        write_fitted(arguments.refit, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

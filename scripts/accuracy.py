"""Holds predictions against training runs that others published.

    python scripts/accuracy.py published --data RUNS.csv [--out FILE.csv] [--refit PROFILES_FOLDER]

RUNS.csv has a row per run: model sizes, GPUs, mesh, what is recomputed, tokens per second and GPU, peak memory (README
names the columns). Each run is traced and priced as tpplan prices a plan, at its own mesh, micro-batch, recomputation
and ZeRO stage. A machine's profile may hold two numbers that no benchmark gave (`fitted`): by how much matmuls in
training are slower than alone, and how much FSDP's collectives slow what they run beside. Here each is fitted again for
every model, to the runs of the machine's other models; a machine without others has those of the one it is most like.

Prints errors by source, GPU, size and number of GPUs, beside those of a plain lookup: the median MFU of the other
models' runs on that GPU with the same recomputation; the bias is the mean error. --out writes the table with
predictions and 90 % error bars.
--refit writes the numbers fitted to all runs into the profiles of a folder.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy_models import Sizes, Software, architecture, example_inputs, software
from rich.console import Console
from rich.progress import track

from tpplan.errors import TpplanError
from tpplan.fit import UNKNOWN_RELATIVE_ERROR, rms
from tpplan.formulate import COMPUTE, DATA_PARALLEL, OPTIMIZER, Formulation, price_space
from tpplan.options import Cluster, Options
from tpplan.plan import Precision, Recompute, write_atomically
from tpplan.planner import Priced, price_mesh
from tpplan.profile import HardwareProfile, load_profile
from tpplan.profile_tables import Fitted
from tpplan.units import GIB

#: a GPU as tables name it -> the profile, and the machine that it is most like
MACHINES = {
    "A100 SXM 40GB": ("a100-sxm-40gb", "a100-sxm-80gb"),
    "A100 SXM 80GB": ("a100-sxm-80gb", "a100-sxm-40gb"),
    "H100 SXM 80GB": ("h100-sxm", "h100-96gb-hbm2e"),
    "H100 SXM 96GB HBM2e 500W": ("h100-96gb-hbm2e", "h100-sxm"),
    "H200 SXM": ("h200-sxm", "h100-sxm"),
}
#: machines without published runs, and the one each is most like
UNPUBLISHED = {"b200": "h100-sxm"}
#: dense bfloat16 FLOP/s that published MFU is relative to
PEAK_FLOP_PER_S = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
SECOND_OVER_FIRST_FLASH_ATTENTION = 2.0
#: torchtitan's "selective op" keeps every second matmul, and attention [torchtitan, models/llama/parallelize_llama.py]
EVERY_OTHER_MATMUL = "selective op"
#: of a normal distribution
WITHIN_90_PERCENT = 1.645
KERNELS = (COMPUTE, OPTIMIZER)
#: two runs that differ by less (log of tokens per second) are as fast as each other
SPREAD = 0.02
#: what is fitted to fewer runs is no property of a machine
FEWEST_RUNS = 10
FITTED = {
    "matmul_slowdown": "matmuls in training against alone, in benchmarks: clocks under load, real data",
    "overlap_slowdown": "seconds that kernels take longer for each second of an FSDP collective beside them",
}
#: numbers tried, coarse to fine
MATMUL_SLOWDOWNS, OVERLAP_SLOWDOWNS = np.linspace(0.8, 2.0, 25), np.linspace(0.0, 1.0, 21)
REFINEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. tokens_per_s is per GPU; peak_bytes None where nobody says."""

    row: int
    source: str
    model: str
    gpu: str
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
    tokens_per_s: float
    peak_bytes: float | None

    @property
    def machine(self) -> str:
        """The name of its profile."""
        return MACHINES[self.gpu][0]

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on each GPU."""
        return self.global_batch * self.sizes.seq_len / self.gpus

    @property
    def flop_per_token(self) -> float:
        """6 N + 12 L H T, as MFU is counted."""
        return 6 * self.sizes.num_parameters + 12 * self.sizes.layers * self.sizes.hidden * self.sizes.seq_len

    @property
    def mfu(self) -> float:
        """Of the tensor cores' peak."""
        return self.tokens_per_s * self.flop_per_token / PEAK_FLOP_PER_S[self.gpu[:4]]


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


def read_runs(table: pd.DataFrame) -> list[Run]:
    """The rows of a table. Raises ValueError with the row for what cannot be read."""
    runs = []
    for row, entry in table.iterrows():
        try:
            runs.append(_run(int(str(row)), entry))
        except (KeyError, ValueError) as error:
            raise ValueError(f"row {int(str(row)) + 2}: {error}") from error
    return runs


def _run(row: int, entry: "pd.Series[object]") -> Run:
    gpu = next((name for name in MACHINES if str(entry["gpu"]).startswith(name)), None)
    if gpu is None:
        raise ValueError(f"gpu {entry['gpu']!r}: expected one of {', '.join(MACHINES)}")
    gpus, tp, notes = int(entry["n_gpus"]), int(entry["tp"]), str(entry["notes"])
    if int(entry["pp"]) != 1:
        raise ValueError(f"pp {entry['pp']}: pipeline parallelism is not planned")
    return Run(
        row=row,
        source=str(entry["source_id"]),
        model=str(entry["model"]),
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=min(gpus, 4 if "4 per node" in str(entry["gpu"]) else 8),
        sizes=Sizes(
            **{name: int(entry[name]) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len")},
            num_parameters=float(entry["n_params"]),
        ),
        micro_batch=int(entry["micro_batch_per_gpu"]),
        global_batch=int(entry["global_batch"]),
        tp=tp,
        shard=1 if str(entry["dp_mode"]) in ("none", "nan") else int(entry["fsdp_degree"]),
        reshard="zero2" not in str(entry["dp_mode"]),
        recompute=_recompute(str(entry["activation_checkpointing"])),
        is_compiled=str(entry["compile"]) == "yes",
        precision=_precision(str(entry["precision"])),
        software=software(notes),
        recomputes_every_other_matmul=str(entry["activation_checkpointing"]) == EVERY_OTHER_MATMUL,
        tokens_per_s=float(entry["tokens_per_s_per_gpu"]),
        peak_bytes=float(entry["peak_mem_gib"]) * GIB if pd.notna(entry["peak_mem_gib"]) else None,
    )


def _recompute(text: str) -> Recompute:
    return Recompute(text.split()[0]) if text != "nan" else Recompute.NONE


def _precision(text: str) -> Precision:
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
        for overlap, slower in zip(plain.overlaps(), slow.overlaps(), strict=True):
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
    measured = np.array([run.step_tokens / run.tokens_per_s for run in runs])
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
    return [math.log(priced[run.row].seconds(*numbers) * run.tokens_per_s / run.step_tokens) for run in runs]


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
    for machine, like in MACHINES.values():
        own, others = ([run for run in runs if run.machine == name] for name in (machine, like))
        if own and others:
            errors += log_errors(own, priced, fit(others, priced)[0])
    return errors


def predict(run: Run, runs: Sequence[Run], priced: Mapping[int, Parts]) -> Prediction:
    """From runs of other models, on this machine or else on the one it is most like, or else on any. Without any, the
    numbers in the machine's profile serve.

    The bar is that of predicting those runs in the same way: each model from the others, or each machine from its like.
    """
    others = [other for other in runs if other.model != run.model]
    like = MACHINES[run.gpu][1]
    on_it, on_like = ([other for other in others if other.machine == machine] for machine in (run.machine, like))
    if len(on_it) >= 2:
        numbers, errors = fit(on_it, priced)[0], left_out(on_it, priced)
    elif len(chosen := on_like if len(on_like) >= 2 else others) >= 2:
        numbers, errors = fit(chosen, priced)[0], [*transferred(others, priced), *left_out(chosen, priced)]
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
    return WITHIN_90_PERCENT * (rms(errors) if errors else UNKNOWN_RELATIVE_ERROR)


def lookup(run: Run, runs: Sequence[Run]) -> float | None:
    """Tokens per second by the median MFU of other models with this GPU and recomputation."""
    alike = [r.mfu for r in runs if (r.gpu, r.recompute) == (run.gpu, run.recompute) and r.model != run.model]
    return float(np.median(alike)) * PEAK_FLOP_PER_S[run.gpu[:4]] / run.flop_per_token if alike else None


# --- the report ----------------------------------------------------------------------------------------------------


def with_predictions(table: pd.DataFrame, runs: Sequence[Run], priced: Mapping[int, Parts]) -> pd.DataFrame:
    """The table with what is predicted for each run, each from runs of other models."""
    predictions = {run.row: predict(run, runs, priced) for run in runs}
    found = table.copy()
    found["predicted_tokens_per_s_per_gpu"] = [predictions[run.row].tokens_per_s for run in runs]
    found["predicted_tokens_per_s_error"] = [
        predictions[run.row].tokens_per_s * predictions[run.row].bar for run in runs
    ]
    found["predicted_peak_mem_gib"] = [priced[run.row].peak_bytes / GIB for run in runs]
    found["predicted_peak_mem_error"] = [
        memory_bar(run, runs, priced) * priced[run.row].peak_bytes / GIB for run in runs
    ]
    return found


def report(table: pd.DataFrame, runs: Sequence[Run]) -> Iterator[str]:
    """Lines: errors by group, the bars, the lookup beside them, the order of plans, memory."""
    error = table.predicted_tokens_per_s_per_gpu / table.tokens_per_s_per_gpu - 1
    looked = pd.Series([lookup(run, runs) for run in runs], index=table.index, dtype=float)
    lookup_error = looked / table.tokens_per_s_per_gpu - 1
    sizes = pd.cut(
        table.n_params / 1e9, [0, 0.5, 2, 10, 40, 1000], labels=["<0.5B", "0.5-2B", "2-10B", "10-40B", ">40B"]
    )
    groups = {
        "source": table.source_id,
        "GPU": [run.gpu for run in runs],
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
    memory = table[table.peak_mem_gib.notna()]
    for _, row in memory.iterrows():
        yield (
            f"peak memory {row.model} on {row.n_gpus} x {row.gpu}, tp {row.tp}: measured {row.peak_mem_gib:.1f} GiB, "
            f"predicted {row.predicted_peak_mem_gib:.1f} ({row.predicted_peak_mem_gib / row.peak_mem_gib - 1:+.0%})"
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
    for machine, like in (*MACHINES.values(), *UNPUBLISHED.items()):
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
        runs = read_runs(table)
        priced = {}
        for run in track(runs, description="price", console=Console(stderr=True), disable=not sys.stderr.isatty()):
            try:
                priced[run.row] = price(run)
            except (ValueError, TpplanError) as error:
                raise ValueError(f"row {run.row + 2}: {error}") from error
    except ValueError as error:
        print(f"accuracy: {arguments.data}: {error}", file=sys.stderr)
        return 2
    predicted = with_predictions(table, runs, priced)
    print("\n".join(report(predicted, runs)))
    numbers = fitted(runs, priced)
    for machine, pair in numbers.items():
        print(machine, ", ".join(f"{n.name} {n.value} (residual {n.residual:.1%} of {n.runs} runs)" for n in pair))
    if arguments.out is not None:
        write_atomically(arguments.out, predicted.to_csv(index=False))
    if arguments.refit is not None:
        write_fitted(arguments.refit, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

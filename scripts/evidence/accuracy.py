"""Holds predictions against training runs that others published.

    python scripts/evidence/accuracy.py published --data RUNS.csv [--versions FILE.csv] [--leave model source]
        [--no-refit] [--out FILE.csv] [--refit PROFILES_FOLDER]
    python scripts/evidence/accuracy.py parallel --data RUNS.csv [--only GROUP] [--rows ID ...] [--out FILE.csv]

`parallel` prices runs with pipelines and experts, in their layouts, by the profiles as they ship
(accuracy_parts/parallel_price.py), and exits with 1 where a bar of accuracy_parts/parallel_report.py is missed. All
below is of `published`.

RUNS.csv has a row per run: model sizes, GPUs, mesh, what is recomputed, tokens per second and GPU, peak memory (README
names the columns). A row is read as it says or refused by column and word (accuracy_parts/read.py); what its code does
stands in a table of versions by source_id (accuracy_parts/versions.csv). Each run is traced and priced as tpplan prices
a plan, at its own mesh, micro-batch, recomputation, ZeRO stage, and with gradients whole between micro-batches or not.
A machine's profile may hold two numbers that no benchmark gave (`fitted`): by how much matmuls in training are slower
than alone, and how much FSDP's collectives slow what they run beside. They are fitted again for every model, or every
source, that is left out: to the other runs on that machine where these are enough, or else on the one it is most like;
where these are not, the profile's serve. The last table has the numbers that ship, as they are; --no-refit prints it
alone.

Prints errors by source, GPU, size, tp, recomputation, sequence length and number of GPUs, each with the share of runs
within their 90 % bar, beside two baselines from the same runs with the same ones left out: a lookup, the median MFU on
that GPU with the same recomputation, and a ridge regression of log MFU on 17 columns of the table; the bias is the mean
error. A run whose predicted peak is more than its GPU has is listed. --out writes the table with the first table's
predictions and 90 % error bars. A run without measured tokens per second is predicted all the same. One that cannot be
is named, with the reason, and has no prediction; the exit code is 2 if none has one. --refit writes the numbers fitted
to all runs into the profiles of a folder.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from accuracy_parts.models import architecture
from accuracy_parts.parallel_report import add_arguments, run_parallel
from accuracy_parts.predict import KEYS, Prediction, fitted, lookup, memory_bar, of_profile, predict, ridge
from accuracy_parts.price import Parts, price
from accuracy_parts.read import Run, read_runs
from accuracy_parts.versions import VERSIONS, read_versions
from rich.console import Console
from rich.progress import track

from tpplan.core.errors import TpplanError
from tpplan.core.files import write_atomically
from tpplan.core.units import GIB
from tpplan.machine.profile import load_profile
from tpplan.machine.tables import Fitted

#: two runs that differ by less (log of tokens per second) are as fast as each other
SPREAD = 0.02
#: predictions that differ by less (log) are a tie
TIED = 1e-9


@dataclass(frozen=True, slots=True)
class Way:
    """How runs are predicted: numbers fitted without the runs of the same `leave`, or those that ship."""

    leave: str
    refit: bool

    @property
    def says(self) -> str:
        """A title of the table."""
        if not self.refit:
            return f"the numbers that ship; baselines without the runs of the same {self.leave}"
        return f"numbers fitted without the runs of the same {self.leave}"

    def predict(self, run: Run, runs: Sequence[Run], priced: Mapping[int, Parts]) -> Prediction:
        """Predicts a run from the measured ones."""
        return predict(run, runs, priced, key=KEYS[self.leave], refit=self.refit)


def with_predictions(table: pd.DataFrame, runs: Sequence[Run], priced: Mapping[int, Parts], way: Way) -> pd.DataFrame:
    """The table with what is predicted for each run, from measured runs; empty for other rows."""
    measured, key = measured_of(runs), KEYS[way.leave]
    rows = {}
    for run in runs:
        found, peak_gib = way.predict(run, measured, priced), priced[run.row].peak_bytes / GIB
        rows[run.row] = {
            "predicted_tokens_per_s_per_gpu": found.tokens_per_s,
            "predicted_tokens_per_s_error": found.tokens_per_s * found.bar,
            "predicted_peak_mem_gib": peak_gib,
            "predicted_peak_mem_error": memory_bar(run, measured, priced, key) * peak_gib,
        }
    return table.join(pd.DataFrame.from_dict(rows, orient="index"))


def measured_of(runs: Sequence[Run]) -> list[Run]:
    """Those whose tokens per second are said."""
    return [run for run in runs if run.tokens_per_s is not None]


def report(table: pd.DataFrame, runs: Sequence[Run], way: Way) -> Iterator[str]:
    """Lines: errors by group with the share within the bars, the baselines beside them, the order of plans; of the
    runs, which are measured, and their rows of the table."""
    measured, key = table.tokens_per_s_per_gpu, KEYS[way.leave]
    found = pd.DataFrame(
        {
            "error": table.predicted_tokens_per_s_per_gpu / measured - 1,
            "bar": table.predicted_tokens_per_s_error / table.predicted_tokens_per_s_per_gpu,
            "lookup": pd.Series([lookup(run, runs, key) for run in runs], table.index, dtype=float) / measured - 1,
            "ridge": pd.Series([ridge(run, runs, key) for run in runs], table.index, dtype=float) / measured - 1,
        }
    )
    sizes = pd.cut(
        table.n_params / 1e9, [0, 0.5, 2, 10, 40, 1000], labels=["<0.5B", "0.5-2B", "2-10B", "10-40B", ">40B"]
    )
    groups = {
        "source": table.source_id,
        "GPU": [run.machine for run in runs],
        "size": sizes,
        "tp": [run.tp for run in runs],
        "recomputed": [str(run.recompute) for run in runs],
        "length": [run.sizes.seq_len for run in runs],
        "GPUs": [run.gpus for run in runs],
    }
    errors = f"{'median |error|':>16}{'90th pct':>10}{'mean error':>12}{'median':>8}{'in 90 % bar':>13}"
    yield way.says
    yield f"{'':32}{'runs':>6}{errors}   lookup: median, 90th pct   ridge: median, 90th pct"
    yield _line("all", found)
    for title, own in groups.items():
        for name, rows in found.groupby(pd.Series(list(own), table.index), observed=True, sort=True):
            yield _line(f"{title} {name}", rows)
    right, tied, pairs = _ordered(table, runs)
    ties = f", {tied} of them predicted equal" if tied else ""
    yield f"pairs of runs of one model on one machine in the right order: {right} of {pairs}{ties}"


def _line(title: str, found: pd.DataFrame) -> str:
    size, inside = found.error.abs(), (found.error.abs() <= found.bar).mean()
    spread = f"{size.median():16.1%}{size.quantile(0.9):10.1%}{found.error.mean():+12.1%}{found.error.median():+8.1%}"
    return f"{title:32}{len(found):6}{spread}{inside:13.0%}   {_baseline(found.lookup)}   {_baseline(found.ridge)}"


def _baseline(error: "pd.Series[float]") -> str:
    known = error.abs().dropna()
    return f"{known.median():8.1%}{known.quantile(0.9):8.1%} ({len(known)})".ljust(24) if len(known) else " " * 24


def _ordered(table: pd.DataFrame, runs: Sequence[Run]) -> tuple[int, int, int]:
    """Of pairs that share model, machine, number of GPUs and sequence length and differ by more than their spread, how
    many are predicted in the order measured, how many as equally fast, and how many there are."""
    right = tied = pairs = 0
    for one, other in itertools.combinations(range(len(runs)), 2):
        first, second = runs[one], runs[other]
        alike = (first.model, first.machine, first.gpus, first.sizes.seq_len)
        if alike != (second.model, second.machine, second.gpus, second.sizes.seq_len):
            continue
        assert first.tokens_per_s is not None
        assert second.tokens_per_s is not None
        measured = math.log(first.tokens_per_s / second.tokens_per_s)
        predicted = table.predicted_tokens_per_s_per_gpu
        difference = math.log(predicted.iloc[one] / predicted.iloc[other])
        if abs(measured) > SPREAD:
            pairs += 1
            tied += abs(difference) <= TIED
            right += abs(difference) > TIED and measured * difference > 0
    return right, tied, pairs


def memory_report(runs: Sequence[Run], priced: Mapping[int, Parts]) -> Iterator[str]:
    """Lines: measured peaks beside predicted ones, without and with the profile's slack, and the runs whose predicted
    peak is more than their GPU has."""
    errors = []
    for run in runs:
        if run.peak_bytes is None:
            continue
        peak, slack = priced[run.row].peak_bytes, load_profile(run.machine).slack_bytes
        errors.append((peak / run.peak_bytes - 1, (peak + slack) / run.peak_bytes - 1))
        yield (
            f"peak memory {run.model} on {run.gpus} x {run.machine}, tp {run.tp}: measured "
            f"{run.peak_bytes / GIB:.1f} GiB, predicted {peak / GIB:.1f} ({errors[-1][0]:+.0%}), "
            f"with slack {errors[-1][1]:+.0%}"
        )
    if errors:
        off = pd.Series([abs(own) for own, _ in errors])
        below = sum(with_slack < 0 for _, with_slack in errors)
        yield f"peaks: median |error| {off.median():.1%}; below the measured with slack: {below} of {len(errors)}"
    for run in runs:
        peak, profile = priced[run.row].peak_bytes, load_profile(run.machine)
        if peak > profile.memory_bytes:
            yield (
                f"row {run.row + 2}: {run.model} ran on {run.gpus} x {run.machine}, and {peak / GIB:.1f} GiB are "
                f"predicted of {profile.memory_bytes / GIB:.1f}: the memory or the reading of the row is wrong"
            )


def write_fitted(folder: Path, numbers: Mapping[str, tuple[Fitted, ...]]) -> None:
    """Puts the numbers into the profiles of a folder."""
    for machine, found in numbers.items():
        path = folder / f"{machine}.json"
        write_atomically(path, replace(load_profile(path), fitted=found).dumps())


def prices(runs: Sequence[Run], data: Path) -> tuple[dict[int, Parts], list[str]]:
    """The step of each run by row, and why others have none."""
    priced, problems = {}, []
    for run in track(runs, description="price", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        try:
            priced[run.row] = price(run)
            if off := architecture(run.sizes, run.software).relative_excess(run.sizes):
                how = f"{abs(off):.1%} {'more' if off > 0 else 'fewer'} parameters"
                print(f"accuracy: {data}: row {run.row + 2}: priced as a model with {how}", file=sys.stderr)
        except (ValueError, TpplanError) as error:
            problems.append(f"row {run.row + 2}: {error}")
    return priced, problems


def _arguments() -> argparse.Namespace:
    every = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = every.add_subparsers(dest="what", required=True)
    add_arguments(verbs.add_parser("parallel", help="runs with pipelines and experts that others published"))
    parser = verbs.add_parser("published", help="runs that others published")
    parser.add_argument("--data", type=Path, required=True, help="the table of runs")
    parser.add_argument("--versions", type=Path, default=VERSIONS, help="the table of versions of the runs' code")
    parser.add_argument(
        "--leave", nargs="+", choices=[*KEYS], default=[*KEYS], help="what of a run is in no run it is predicted from"
    )
    parser.add_argument("--no-refit", action="store_true", help="the profiles' own numbers alone, as they are")
    parser.add_argument("--out", type=Path, help="write the table with predictions here")
    parser.add_argument("--refit", type=Path, metavar="FOLDER", help="write the fitted numbers into these profiles")
    arguments = every.parse_args()
    if arguments.what == "published" and arguments.no_refit and arguments.refit is not None:
        parser.error("--no-refit fits nothing that --refit could write")
    return arguments


def main() -> int:
    """Read, price, fit, report."""
    arguments = _arguments()
    if arguments.what == "parallel":
        return run_parallel(arguments)
    table = pd.read_csv(arguments.data)
    try:
        runs, problems = read_runs(table, read_versions(arguments.versions))
    except ValueError as error:
        print(f"accuracy: {arguments.data}: {error}", file=sys.stderr)
        return 2
    priced, unpriced = prices(runs, arguments.data)
    for problem in (*problems, *unpriced):
        print(f"accuracy: {arguments.data}: not predicted: {problem}", file=sys.stderr)
    runs = [run for run in runs if run.row in priced]
    print(f"predicted: {len(runs)} of {len(table)} runs")
    if not runs:
        return 2
    measured, rows = measured_of(runs), [run.row for run in measured_of(runs)]
    shipped = Way(arguments.leave[0], refit=False)
    ways = [shipped] if arguments.no_refit else [*(Way(own, refit=True) for own in arguments.leave), shipped]
    for way in ways if measured else ():
        print("\n".join(report(with_predictions(table, runs, priced, way).loc[rows], measured, way)))
    print("\n".join(memory_report(runs, priced)))
    if arguments.out is not None:
        write_atomically(arguments.out, with_predictions(table, runs, priced, ways[0]).to_csv(index=False))
    _print_numbers(measured, priced, arguments)
    return 0


def _print_numbers(measured: Sequence[Run], priced: Mapping[int, Parts], arguments: argparse.Namespace) -> None:
    """Prints the numbers of each machine, and writes fitted ones where that is asked for."""
    if arguments.no_refit:
        for machine in sorted({run.machine for run in measured}):
            (matmuls, overlap), residual = of_profile(machine)
            print(f"{machine} ships matmul_slowdown {matmuls}, overlap_slowdown {overlap} (residual {residual:.1%})")
        return
    numbers = fitted(measured, priced)
    for machine, pair in numbers.items():
        print(machine, ", ".join(f"{n.name} {n.value} (residual {n.residual:.1%} of {n.runs} runs)" for n in pair))
    if arguments.refit is not None:
        write_fitted(arguments.refit, numbers)


if __name__ == "__main__":
    sys.exit(main())

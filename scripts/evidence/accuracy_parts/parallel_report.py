"""Predictions of published runs with pipelines and experts against what was measured: refusals, rows, errors, order."""

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from accuracy_parts.parallel_code import CODE, read_code
from accuracy_parts.parallel_price import ParallelPrice, price_parallel
from accuracy_parts.parallel_read import ParallelRun, RefusalError, read_parallel
from tpplan.core.errors import TpplanError
from tpplan.core.files import write_atomically

GROUPS = ("dense pp", "dense no pp", "MoE")
#: the most that median and 90th percentile of |error| may be, by group
BARS: Mapping[str, tuple[float, float]] = {"dense pp": (0.10, 0.25), "MoE": (0.15, 0.35)}
#: of a plan group, how much slower than the fastest measured the predicted best may have been, and the share of groups
WITHIN, LEAST_SHARE = 0.05, 0.8
#: predictions that differ by less, as a part, are equal
TIED = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run and its price."""

    run: ParallelRun
    price: ParallelPrice

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.price.step_s / self.run.measured_s - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--data", type=Path, required=True, help="the table of runs")
    parser.add_argument("--code", type=Path, default=CODE, help="the table of what is known of the runs' code")
    parser.add_argument("--only", choices=GROUPS, help="price this group alone")
    parser.add_argument("--rows", nargs="+", metavar="ID", help="price these rows alone, by row_id")
    parser.add_argument("--out", type=Path, help="write rows with predictions by part here, as CSV")


def run_parallel(arguments: argparse.Namespace) -> int:
    """Read, price, report. Returns 0, 1 where a bar is missed, or 2 where nothing is priced."""
    try:
        with arguments.data.open(newline="") as file:
            rows = list(csv.DictReader(file))
        runs, refused = read_parallel(rows, read_code(arguments.code))
    except KeyError as error:
        print(f"accuracy: {arguments.data}: no column {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    asked = [
        run
        for run in runs
        if arguments.only in (None, run.group) and (not arguments.rows or run.row_id in arguments.rows)
    ]
    found, unpriced = priced(asked)
    wanted = set(arguments.rows or [row["row_id"] for row in rows])
    refused = [entry for entry in (*refused, *unpriced) if entry[0] in wanted]
    print("\n".join(refusals(refused)))
    if not found:
        print("accuracy: no run is priced", file=sys.stderr)
        return 2
    print("\n".join((*row_lines(found), *caveats(found), *error_lines(found), *order_lines(found))))
    if arguments.out is not None:
        write_atomically(arguments.out, as_csv(found))
    missed = missed_bars(found)
    print("\n".join(f"missed: {line}" for line in missed) or "all bars are met")
    return 1 if missed else 0


def priced(runs: Sequence[ParallelRun]) -> tuple[list[Found], list[tuple[str, RefusalError]]]:
    """The runs with their prices, and why others have none."""
    found, unpriced = [], []
    for run in runs:
        try:
            found.append(Found(run=run, price=price_parallel(run)))
        except (ValueError, TpplanError) as error:
            unpriced.append((run.row_id, RefusalError("tpplan does not price it", str(error))))
    return found, unpriced


def refusals(refused: Sequence[tuple[str, RefusalError]]) -> Iterator[str]:
    """Lines: how many rows are refused for each reason, with the first row and what it has."""
    counts = Counter(error.reason for _, error in refused)
    first = {error.reason: (row_id, error) for row_id, error in reversed(refused)}
    yield f"refused: {len(refused)} rows"
    for reason, count in counts.most_common():
        row_id, error = first[reason]
        yield (
            f"{count:6}  {reason}  ({row_id}: {error})" if str(error) != reason else f"{count:6}  {reason}  ({row_id})"
        )


def layout(run: ParallelRun) -> str:
    """A run's layout in a few words."""
    experts = f" ep{run.ep}" if run.shape.experts else ""
    chunks = f" vpp{run.vpp}" if run.vpp > 1 else ""
    return f"dp{run.dp} tp{run.tp} pp{run.pp}{chunks}{experts} zero{run.zero} mb{run.micro_batch}x{run.micro_batches}"


def row_lines(found: Sequence[Found]) -> Iterator[str]:
    """A line per run: measured and predicted seconds of a step, the error, the largest parts."""
    titles = f"{'row':12}{'model':24}{'GPUs':>20}  {'layout':44}{'measured':>10}{'predicted':>11}{'error':>8}"
    yield f"{titles}  largest parts, in seconds"
    for one in found:
        run, parts = one.run, sorted(one.price.time_s.items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts)
        gpus = f"{run.gpus} {run.machine}"
        yield (
            f"{run.row_id:12}{run.model:24}{gpus:>20}  {layout(run):44}{run.measured_s:10.2f}{one.price.step_s:11.2f}"
            f"{one.error:+8.1%}  {shown}"
        )


def caveats(found: Sequence[Found]) -> Iterator[str]:
    """Lines: what is neglected, of how many runs."""
    counts = Counter(caveat for one in found for caveat in one.run.caveats)
    for caveat, count in counts.most_common():
        yield f"neglected in {count} runs: {caveat}"


KEYS: Mapping[str, Callable[[ParallelRun], object]] = {
    "source": lambda run: run.source,
    "GPU": lambda run: run.machine,
    "pp": lambda run: run.pp,
    "tp": lambda run: run.tp,
    "vpp": lambda run: run.vpp,
}


def error_lines(found: Sequence[Found]) -> Iterator[str]:
    """Lines: errors by group, and within each by source, GPU and degrees."""
    yield f"{'':32}{'runs':>6}{'median |error|':>16}{'90th pct':>10}{'mean error':>12}"
    for group in GROUPS:
        own = [one for one in found if one.run.group == group]
        if not own:
            continue
        yield _error_line(group, own)
        for title, key in KEYS.items():
            for value in sorted({key(one.run) for one in own}, key=lambda value: (str(type(value)), value)):
                yield _error_line(f"  {title} {value}", [one for one in own if key(one.run) == value])


def _error_line(title: str, found: Sequence[Found]) -> str:
    median, high = spread(found)
    return f"{title:32}{len(found):6}{median:16.1%}{high:10.1%}{mean(one.error for one in found):+12.1%}"


def spread(found: Sequence[Found]) -> tuple[float, float]:
    """Median and 90th percentile of |error|."""
    errors = [abs(one.error) for one in found]
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


def regrets(found: Sequence[Found]) -> dict[str, float]:
    """By plan group with two priced runs or more: the measured time of a token of the predicted best over that of the
    fastest measured, less 1. Of runs with equal predictions the slowest measured counts."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        if one.run.plan_group:
            groups.setdefault(one.run.plan_group, []).append(one)
    regret = {}
    for name, own in sorted(groups.items()):
        if len(own) > 1:
            least = min(one.price.step_s / one.run.step_tokens for one in own)
            best = [one for one in own if one.price.step_s / one.run.step_tokens <= least * (1 + TIED)]
            measured = [one.run.measured_s / one.run.step_tokens for one in own]
            regret[name] = max(one.run.measured_s / one.run.step_tokens for one in best) / min(measured) - 1
    return regret


def order_lines(found: Sequence[Found]) -> Iterator[str]:
    """Lines: the regret of each plan group, and the share of groups where it is small."""
    every = regrets(found)
    for name, regret in every.items():
        count = sum(one.run.plan_group == name for one in found)
        yield f"plan group {name}: the predicted best of {count} runs was {regret:.1%} slower than the fastest measured"
    if every:
        right = sum(regret <= WITHIN for regret in every.values())
        yield f"predicted best within {WITHIN:.0%} of the fastest measured: {right} of {len(every)} plan groups"


def missed_bars(found: Sequence[Found]) -> list[str]:
    """Lines on the bars that are missed; groups without runs have none."""
    missed = []
    for group, (most_median, most_high) in BARS.items():
        own = [one for one in found if one.run.group == group]
        if own:
            median, high = spread(own)
            if median > most_median:
                missed.append(f"{group}: median {median:.1%}, at most {most_median:.0%}")
            if high > most_high:
                missed.append(f"{group}: 90th percentile {high:.1%}, at most {most_high:.0%}")
    every = regrets(found).values()
    if every and (share := mean(regret <= WITHIN for regret in every)) < LEAST_SHARE:
        missed.append(f"order: {share:.0%} of plan groups, at least {LEAST_SHARE:.0%}")
    return missed


def as_csv(found: Sequence[Found]) -> str:
    """A table with a row per run, seconds by part in the last columns."""
    names = sorted({name for one in found for name in one.price.time_s})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = ("row_id", "source_id", "model", "group", "machine", "gpus", "layout", "plan_group", "measured_s")
    writer.writerow((*columns, "predicted_s", "error", *(f"{name}_s" for name in names)))
    for one in found:
        run = one.run
        told = (run.row_id, run.source, run.model, run.group, run.machine, run.gpus, layout(run), run.plan_group)
        parts = (f"{one.price.time_s.get(name, 0.0):.6g}" for name in names)
        writer.writerow((*told, run.measured_s, f"{one.price.step_s:.6g}", f"{one.error:.4f}", *parts))
    return file.getvalue()

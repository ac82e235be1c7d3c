"""Predictions of published runs from other runs: two numbers of a machine, and baselines that know no model.

Runs are left out by a key: that of a run, its model's name or its source, is nowhere in what it is predicted from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from accuracy_parts.price import Parts
from accuracy_parts.read import Run
from tpplan.machine.fit_tables import UNKNOWN_RELATIVE_ERROR, rms
from tpplan.machine.profile import load_profile
from tpplan.machine.tables import Fitted
from tpplan.plan.plan import Precision, Recompute

#: a profile -> the machine that it is most like
LIKE = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a100-sxm-80gb": "a100-sxm-40gb",
    "h100-sxm": "h100-96gb-hbm2e",
    "h100-96gb-hbm2e": "h100-sxm",
    "h200-sxm": "h100-sxm",
    "b200": "h100-sxm",
}
#: of a normal distribution
WITHIN_90_PERCENT = 1.645
#: what is fitted to fewer runs is no property of a machine
FEWEST_RUNS = 10
#: root mean square of the log error of the 8 peaks in the table of published runs that the README speaks of
PEAK_ERROR = 0.1
FITTED = {
    "matmul_slowdown": "matmuls in training against alone, in benchmarks: clocks under load, real data",
    "overlap_slowdown": "seconds that kernels take longer for each second of an FSDP collective beside them",
}
#: numbers tried, coarse to fine
MATMUL_SLOWDOWNS, OVERLAP_SLOWDOWNS = np.linspace(0.8, 2.0, 25), np.linspace(0.0, 1.0, 21)
REFINEMENTS = 3
#: weight of the squares of a ridge regression's coefficients, of standardized columns, beside squared log errors
RIDGE = 1.0
#: names the group of runs that is left out together
Key = Callable[[Run], str]
KEYS: Mapping[str, Key] = {"model": lambda run: run.model, "source": lambda run: run.source}
BY_MODEL = KEYS["model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens per second and GPU, and its relative 90 % error bar."""

    tokens_per_s: float
    bar: float


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


def left_out(runs: Sequence[Run], priced: Mapping[int, Parts], key: Key = BY_MODEL) -> list[float]:
    """Log errors of runs, each key's predicted by numbers fitted to the others'; none where there is one key."""
    errors: list[float] = []
    for name in sorted({key(run) for run in runs}):
        own, others = ([run for run in runs if (key(run) == name) is is_own] for is_own in (True, False))
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


def predict(
    run: Run, runs: Sequence[Run], priced: Mapping[int, Parts], *, key: Key = BY_MODEL, refit: bool = True
) -> Prediction:
    """From measured runs of other keys on this machine, or else on the one it is most like, where there are enough.
    Else, and without refit, the numbers in the machine's profile serve.

    The bar is that of predicting those runs in the same way: each key from the others, or each machine from its like.
    That of a profile's numbers is their residual.
    """
    others = [other for other in runs if key(other) != key(run)]
    on_it, on_like = (
        [other for other in others if other.machine == machine] for machine in (run.machine, LIKE[run.machine])
    )
    if refit and len(on_it) >= FEWEST_RUNS:
        numbers, errors = fit(on_it, priced)[0], left_out(on_it, priced, key) or left_out(on_it, priced)
    elif refit and len(on_like) >= FEWEST_RUNS:
        own = left_out(on_like, priced, key) or left_out(on_like, priced)
        numbers, errors = fit(on_like, priced)[0], [*transferred(others, priced), *own]
    else:
        numbers, residual = of_profile(run.machine)
        errors = [residual]
    bar = WITHIN_90_PERCENT * (rms(errors) if errors else UNKNOWN_RELATIVE_ERROR)
    return Prediction(tokens_per_s=run.step_tokens / priced[run.row].seconds(*numbers), bar=bar)


def of_profile(machine: str) -> tuple[tuple[float, float], float]:
    """The two numbers that a machine's profile ships with, and their residual."""
    profile = load_profile(machine)
    residual = max((number.residual for number in profile.fitted or ()), default=UNKNOWN_RELATIVE_ERROR)
    return (profile.matmul_slowdown, profile.overlap_slowdown), residual


def memory_bar(run: Run, runs: Sequence[Run], priced: Mapping[int, Parts], key: Key = BY_MODEL) -> float:
    """Relative 90 % error of a peak, from the published peaks of other keys."""
    errors = [
        math.log(priced[other.row].peak_bytes / other.peak_bytes)
        for other in runs
        if other.peak_bytes is not None and key(other) != key(run)
    ]
    return WITHIN_90_PERCENT * (rms(errors) if errors else PEAK_ERROR)


def lookup(run: Run, runs: Sequence[Run], key: Key = BY_MODEL) -> float | None:
    """Tokens per second by the median MFU of other keys with this GPU and recomputation."""
    alike = [
        own.mfu for own in runs if (own.machine, own.recompute) == (run.machine, run.recompute) and key(own) != key(run)
    ]
    return float(np.median(alike)) * run.peak_flop_per_s / run.flop_per_token if alike else None


def columns(run: Run) -> tuple[float, ...]:
    """The 17 columns of the table that the regression reads, sizes and degrees as logarithms."""
    sizes = run.sizes
    counts = (
        *(sizes.num_parameters, sizes.layers, sizes.hidden, sizes.heads, sizes.vocab, sizes.seq_len),
        *(run.micro_batch, run.global_batch, run.gpus, run.tp, run.shard, run.peak_flop_per_s),
    )
    flags = (
        *(run.reshard, run.is_compiled, run.precision is Precision.BF16),
        *(run.recompute is Recompute.FULL, run.recompute is Recompute.SELECTIVE),
    )
    return (*map(math.log, counts), *map(float, flags))


def ridge(run: Run, runs: Sequence[Run], key: Key = BY_MODEL) -> float | None:
    """Tokens per second by ridge regression of log MFU on the columns, of the runs of other keys.

    w = argmin |Z w + b - y|^2 + RIDGE |w|^2, Z the columns less their means over their deviations; a column that is the
    same in all of these runs has no part. None where there are no others.
    """
    others = [other for other in runs if key(other) != key(run)]
    if not others:
        return None
    x, y = np.array([columns(other) for other in others]), np.log([other.mfu for other in others])
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    varies = deviation > 1e-9 * np.maximum(1.0, np.abs(mean))
    z = (x[:, varies] - mean[varies]) / deviation[varies]
    weights = np.linalg.solve(z.T @ z + RIDGE * np.eye(z.shape[1]), z.T @ (y - y.mean()))
    own = (np.array(columns(run))[varies] - mean[varies]) / deviation[varies]
    return math.exp(y.mean() + float(own @ weights)) * run.peak_flop_per_s / run.flop_per_token


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

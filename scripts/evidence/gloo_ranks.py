"""Steps on gloo ranks that are forked, and how far the loss and gradients are from those of one process."""

import logging
import math
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: a gradient's error is relative to its largest element, or to this share of the model's largest: what is smaller
#: than that is rounding
GRADIENT_NOISE = 1e-3
TOLERANCE = 1e-4
RANKS_TIMEOUT_S = 120.0
#: added to parameters, so that none starts at a value (0, 1) that hides an error
PERTURBATION = 0.02

#: a relative error, and whose it is
Error = tuple[float, str]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A loss and every gradient, whole."""

    loss: float
    gradients: Mapping[str, Tensor | None]


def perturbed(module: nn.Module) -> nn.Module:
    """The module, with normal numbers of PERTURBATION added to its parameters in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(PERTURBATION * torch.randn_like(parameter))
    return module


def worst_error(outcome: Outcome, reference: Outcome, noise: Mapping[str, float] = MappingProxyType({})) -> Error:
    """The largest relative error of the loss and of any gradient, and whose it is; infinite for one that is missing.

    noise: by gradient, an absolute error that is rounding: it counts as one of TOLERANCE.
    """
    present = [gradient for gradient in reference.gradients.values() if gradient is not None]
    floor = GRADIENT_NOISE * max(gradient.abs().max().item() for gradient in present)
    errors = {"loss": abs(outcome.loss - reference.loss) / abs(reference.loss)}
    for name, expected in reference.gradients.items():
        found = outcome.gradients.get(name)
        if expected is not None and found is not None:
            scale = max(expected.abs().max().item(), floor, noise.get(name, 0.0) / TOLERANCE)
            errors[name] = (found - expected).abs().max().item() / scale
        elif (expected is None) != (found is None):
            errors[name] = math.inf
    errors = {name: math.inf if math.isnan(error) else error for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def on_ranks(num_ranks: int, function: Callable[[], Found]) -> list[Found]:
    """function(), which must not return None, on each rank of a gloo group of forked processes. Raises RuntimeError for
    a rank that fails or hangs.

    All are killed on the way out: a rank that fails leaves its peers waiting.
    """
    context = multiprocessing.get_context("fork")
    outcomes: Queue[tuple[str, Found | None]] = context.Queue()
    deadline = time.monotonic() + RANKS_TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(target=_rank_main, args=(number, num_ranks, store, function, outcomes), daemon=True)
            for number in range(num_ranks)
        ]
        try:
            for process in processes:
                process.start()
            return [_next(outcomes, deadline) for _ in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _next(outcomes: "Queue[tuple[str, Found | None]]", deadline: float) -> Found:
    try:
        problem, outcome = outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise RuntimeError(f"the ranks did not finish in {RANKS_TIMEOUT_S:.0f} s") from None
    if outcome is None:
        raise RuntimeError(problem)
    return outcome


def _rank_main(
    number: int,
    num_ranks: int,
    path: Path,
    function: Callable[[], Found],
    outcomes: "Queue[tuple[str, Found | None]]",
) -> None:
    try:
        timeout = timedelta(seconds=RANKS_TIMEOUT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=number, world_size=num_ranks, timeout=timeout
        )
        outcomes.put(("", function()))
    except Exception as error:
        outcomes.put((f"rank {number}: {described(error)}", None))
    signal.pause()  # open sockets keep the peers from failing for an early exit


def described(error: Exception) -> str:
    """An error's class and first line, and the last line of code it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}{where}"


def quiet() -> None:
    """Tables only: no warnings of libraries, no threads, in forks either (torch makes a pool of threads anew in each:
    the first thread has to make it, before others look for it)."""
    warnings.simplefilter("ignore")
    for library in ("torch", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

"""What each rank of the testbed runs, under torchrun: training steps under plans, in turns.

torchrun ... testbed_parts/ranks.py FILE --workload NAME --budget 40 --plans PLAN.json ...
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tpplan
from tpplan.core.errors import TpplanError
from tpplan.core.files import write_atomically
from tpplan.core.units import KIB
from tpplan.machine.profile import Collective
from tpplan.measure.collectives import measure_collectives
from tpplan.measure.grid import default_grid
from tpplan.measure.matmuls import measure_matmuls
from tpplan.measure.timer import slowest
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan

sys.path.append(str(Path(__file__).resolve().parents[1]))  # torchrun runs this file, and puts its own folder there

from testbed_parts.models import OPTIMIZER, Workload, gpt, workload_named

CPU = torch.device("cpu")
SEED = 0
LEARNING_RATE = 1e-4
#: steps of a plan in a round, the first of which is not counted: caches hold another plan's weights
STEPS_PER_ROUND = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 12
#: of a plan, with the one that its loss is taken from
FEWEST_STEPS = 1 + MIN_ROUNDS * STEPS_PER_ROUND
PARTS = ("forward", "backward", "schedule of stages", "optimizer")
#: what tells how busy the machine is: a matmul (M = N = K) and a message, both points of the profile's tables
REFERENCE_SIZE, REFERENCE_BYTES = 256, KIB * 4**5
REFERENCE_BUDGET_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What was measured under a plan: seconds of each counted step of the slowest rank, by round; medians of its parts
    on this rank; and the loss of the first step, the same under every plan."""

    rounds: tuple[tuple[float, ...], ...]
    parts: dict[str, float]
    first_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What was measured under each plan, and beside it what the profile had measured once: seconds by name."""

    steps: tuple[Steps, ...]
    references: dict[str, float]


# --- train


class Trainee:
    """A workload's model under a plan, with its optimizer and this rank's micro-batches."""

    def __init__(self, workload: Workload, plan: Plan | PipelinePlan, rank: int) -> None:
        torch.manual_seed(SEED)
        self.model: nn.Module = tpplan.apply_plan(workload.build_model(), plan)
        self.is_in_stages = isinstance(plan, PipelinePlan)
        optimizer = (plan.stages[0] if isinstance(plan, PipelinePlan) else plan).optimizer
        assert optimizer == OPTIMIZER, optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        batch = gpt.example_inputs(workload.global_batch, workload.seq_len, seed=SEED)
        self.micro_batches = list(plan.batch_for(rank).micro_batches(batch))

    def step(self) -> tuple[dict[str, float], float]:
        """One training step: seconds of its parts, and this rank's mean loss."""
        losses, seconds = [], dict.fromkeys(PARTS, 0.0)
        count = len(self.micro_batches)
        if self.is_in_stages:
            with timed(seconds, "schedule of stages"):
                losses.append(self.model.step(self.micro_batches, gpt.loss))  # type: ignore[operator]
        for i, inputs in enumerate(self.micro_batches if not self.is_in_stages else ()):
            with contextlib.nullcontext() if i + 1 == count else tpplan.no_sync(self.model):
                with timed(seconds, "forward"):
                    loss = gpt.loss(self.model(**tpplan.forward_inputs(self.model, inputs)), inputs) / count
                with timed(seconds, "backward"):
                    loss.backward()
            losses.append(loss.detach())
        with timed(seconds, "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seconds, float(torch.stack(losses).sum())


@contextlib.contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the time inside to a part."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


def references() -> dict[str, float]:
    """Seconds of the matmul and of an all-reduce over all ranks, now."""
    grid = dataclasses.replace(default_grid("cpu"), matmul_batches=(1,), matmul_sizes=(REFERENCE_SIZE,))
    matmuls = measure_matmuls(CPU, torch.float32, grid, REFERENCE_BUDGET_S, launch_s=0.0)
    tables = measure_collectives(
        [dist.get_world_size()],
        [REFERENCE_BYTES],
        device=CPU,
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        budget_s=REFERENCE_BUDGET_S,
    )
    all_reduce = next(table for table in tables if table.kind is Collective.ALL_REDUCE)
    return {"matmul": matmuls.time_s[0], "all_reduce": all_reduce.time_s[0]}


def train(workload: Workload, plans: Sequence[Plan | PipelinePlan], budget_s: float) -> Training:
    """Rounds of some steps under each plan in turn, so that what changes on the machine changes for all of them.

    As many rounds as fit in budget_s, at least MIN_ROUNDS. Every rank must call this.
    """
    rank = dist.get_rank()
    trainees = [Trainee(workload, plan, rank) for plan in plans]
    before = references()
    first_losses = [mean_over_ranks(trainee.step()[1]) for trainee in trainees]
    rounds: list[list[list[float]]] = [[] for _ in plans]
    parts: list[list[dict[str, float]]] = [[] for _ in plans]
    start = time.perf_counter()
    for done in range(1, MAX_ROUNDS + 1):
        for i, trainee in enumerate(trainees):
            counted = [timed_step(trainee) for _ in range(STEPS_PER_ROUND)][1:]
            rounds[i].append(slowest(CPU, [sum(seconds.values()) for seconds in counted]))
            parts[i] += counted
        (spent_s,) = slowest(CPU, [time.perf_counter() - start])
        if done >= MIN_ROUNDS and spent_s * (done + 1) / done > budget_s:
            break
    after = references()
    return Training(
        steps=tuple(
            Steps(
                rounds=tuple(map(tuple, rounds[i])),
                parts={part: statistics.median(step[part] for step in parts[i]) for part in PARTS},
                first_loss=first_losses[i],
            )
            for i in range(len(plans))
        ),
        references={name: math.sqrt(before[name] * after[name]) for name in before},
    )


def timed_step(trainee: Trainee) -> dict[str, float]:
    """A step from a common start."""
    dist.barrier()
    return trainee.step()[0]


def mean_over_ranks(value: float) -> float:
    """The mean; tensor-parallel peers hold the same."""
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- the command


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--plans", type=Path, nargs="+", required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds")
    return parser.parse_args()


def main() -> int:
    """Joins the group, trains, and rank 0 writes the file."""
    options = parse()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    try:
        plans = [load_plan(path) for path in options.plans]
        found = train(workload_named(options.workload), plans, options.budget)
        if rank == 0:
            write_atomically(options.output, json.dumps(dataclasses.asdict(found)))
        dist.barrier()  # whoever is done first would close the connections of the others
    except TpplanError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

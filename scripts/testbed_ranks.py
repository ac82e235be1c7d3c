"""What each rank of the testbed runs, under torchrun: a measurement of its groups, or training steps under plans.

torchrun ... testbed_ranks.py profile FILE --name NAME --budget 60
torchrun ... testbed_ranks.py train CASE.json FILE [--offline]
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
from testbed_models import Workload, gpt, workload_named
from torch import nn

import tpplan
from tpplan.errors import TpplanError
from tpplan.fit import group_extrapolation
from tpplan.measure import default_grid, make_profile, measure_collectives, measure_compute
from tpplan.mesh import divisors
from tpplan.plan import Plan, write_atomically
from tpplan.profile import Collective, HardwareProfile
from tpplan.stopwatch import Stopwatch, slowest
from tpplan.units import KIB

CPU = torch.device("cpu")
#: of the time to measure: compute, groups of neighbours, groups across nodes
COMPUTE_SHARE, NEIGHBOURS_SHARE, ACROSS_SHARE = 0.6, 0.28, 0.12
#: M, N and K of the models' matmuls lie between these, and have no batch. They are few, so that each is timed for long
#: against a scheduler's time slice: ranks that share a core else take turns, and each seems to have it alone.
MATMUL_SIZES = (64, 256, 1024)
#: sizes of whole values that collectives are measured at
MESSAGE_BYTES = tuple(KIB * 4**i for i in range(8))
#: behind the port where torchrun meets
SECOND_STORE_PORT = 1
SEED = 0
LEARNING_RATE = 1e-4
#: steps of a plan in a round, the first of which is not counted: caches hold another plan's weights
STEPS_PER_ROUND = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 12
#: of a plan, with the one that its loss is taken from
FEWEST_STEPS = 1 + MIN_ROUNDS * STEPS_PER_ROUND
PARTS = ("forward", "backward", "optimizer")
#: what tells how busy the machine is: a matmul (M = N = K) and a message, both points of the profile's tables
REFERENCE_SIZE, REFERENCE_BYTES = 256, KIB * 4**5
REFERENCE_WINDOW_S, REFERENCE_BUDGET_S = 0.1, 2.0


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


# --- profile


def measure(name: str, budget_s: float) -> HardwareProfile:
    """Every group that a mesh of these ranks can have. The default process group is there, and is not afterwards."""
    world, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    grid = dataclasses.replace(default_grid("cpu"), matmul_batches=(1,), matmul_sizes=MATMUL_SIZES)
    compute = measure_compute(CPU, dtypes=["float32"], budget_s=budget_s * COMPUTE_SHARE, grid=grid)
    neighbours = measure_collectives(
        divisors(world)[1:],
        MESSAGE_BYTES,
        device=CPU,
        ranks_per_node=per_node,
        budget_s=budget_s * NEIGHBOURS_SHARE,
    )
    profile = make_profile(name=name, device=CPU, compute=compute, collectives=neighbours, gpus_per_node=per_node)
    rank = renumbered(dist.get_rank(), world, per_node)
    dist.destroy_process_group()
    join_renumbered(rank, world)
    across = measure_collectives(
        divisors(world // per_node)[1:],
        MESSAGE_BYTES,
        device=CPU,
        ranks_per_node=1,
        budget_s=budget_s * ACROSS_SHARE,
    )
    profile = dataclasses.replace(profile, collectives=(*profile.collectives, *across))
    return dataclasses.replace(profile, group_extrapolation=group_extrapolation(profile))


def renumbered(rank: int, world: int, stride: int) -> int:
    """Ranks 0, stride, 2 stride, .. become 0, 1, 2, ..; then come 1, 1 + stride, .., and so on."""
    return rank % stride * (world // stride) + rank // stride


def join_renumbered(rank: int, world: int) -> None:
    """A default process group in which neighbours stand on different nodes, met at a store of its own."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + SECOND_STORE_PORT
    store = dist.TCPStore(host, port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


# --- train


class Trainee:
    """A workload's model under a plan, with its optimizer and this rank's micro-batches."""

    def __init__(self, workload: Workload, plan: Plan, rank: int) -> None:
        torch.manual_seed(SEED)
        self.model: nn.Module = tpplan.apply_plan(workload.build_model(), plan)
        # Fused: one kernel for a group of parameters. A loop of small kernels is what the profile does not time.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        batch = gpt.example_inputs(workload.global_batch, workload.seq_len, seed=SEED)
        size, steps = plan.batch.micro_batch, plan.batch.accumulation_steps
        first = plan.mesh.data_rank(rank) * steps * size
        starts = range(first, first + steps * size, size)
        self.micro_batches = [{name: value[i : i + size] for name, value in batch.items()} for i in starts]

    def step(self) -> tuple[dict[str, float], float]:
        """One training step: seconds of its parts, and this rank's mean loss."""
        losses, seconds = [], dict.fromkeys(PARTS, 0.0)
        count = len(self.micro_batches)
        for i, inputs in enumerate(self.micro_batches):
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
    left, right = torch.ones(2, REFERENCE_SIZE, REFERENCE_SIZE)
    matmul = Stopwatch(device=CPU, window_s=REFERENCE_WINDOW_S).samples(lambda: left @ right)
    tables = measure_collectives(
        [dist.get_world_size()],
        [REFERENCE_BYTES],
        device=CPU,
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        budget_s=REFERENCE_BUDGET_S,
    )
    all_reduce = next(table for table in tables if table.kind is Collective.ALL_REDUCE)
    return {"matmul": statistics.median(matmul), "all_reduce": all_reduce.time_s[0]}


def train(workload: Workload, plans: Sequence[Plan], budget_s: float) -> Training:
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
    verbs = parser.add_subparsers(dest="verb", required=True)
    profiling = verbs.add_parser("profile")
    profiling.add_argument("output", type=Path)
    profiling.add_argument("--name", required=True)
    profiling.add_argument("--budget", type=float, required=True, help="seconds")
    training = verbs.add_parser("train")
    training.add_argument("output", type=Path)
    training.add_argument("--workload", required=True)
    training.add_argument("--plans", type=Path, nargs="+", required=True)
    training.add_argument("--budget", type=float, required=True, help="seconds")
    return parser.parse_args()


def main() -> int:
    """Joins the group, does what was asked, and rank 0 writes the file."""
    options = parse()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    try:
        if options.verb == "profile":
            text = measure(options.name, options.budget).dumps()
        else:
            plans = [Plan.load(path) for path in options.plans]
            found = train(workload_named(options.workload), plans, options.budget)
            text = json.dumps(dataclasses.asdict(found))
        if rank == 0:
            write_atomically(options.output, text)
        dist.barrier()  # whoever is done first would close the connections of the others
    except TpplanError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

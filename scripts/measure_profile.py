"""Measures this machine and writes its profile.

    torchrun --nproc-per-node 4 scripts/measure_profile.py --name cpu-gloo -o profiles/cpu-gloo.json --budget 4m
    python scripts/measure_profile.py --name my-gpu -o my-gpu.json                  compute only, one device

Under torchrun every rank does the same work at the same time. On a CPU a rank has one thread.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from make_profiles import render
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tpplan.errors import TpplanError
from tpplan.measure import default_grid, make_profile, measure_collectives, measure_compute
from tpplan.mesh import divisors
from tpplan.plan import write_atomically
from tpplan.profile import HardwareProfile, load_profile
from tpplan.profile_tables import CollectiveTable
from tpplan.units import GIB, KIB, MIB, format_seconds

#: of the budget, where there are collectives to measure
COMPUTE_SHARE = 0.6
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}
#: bytes of the whole value
MESSAGE_BYTES = {"cpu": [KIB * 4**i for i in range(8)], "cuda": [KIB * 4**i for i in range(11)]}
DTYPES = {"cpu": ["float32"], "cuda": ["bfloat16", "float16", "float32"]}


def duration(text: str) -> float:
    """Seconds of 90, 90s, 4m or 1h."""
    unit = SECONDS_PER_UNIT.get(text[-1:])
    seconds = float(text[:-1]) * unit if unit else float(text)
    if not seconds > 0:
        raise ValueError(text)
    return seconds


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="the profile's name")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the profile's file")
    parser.add_argument("--budget", type=duration, default="4m", help="about how long: 90s, 4m (default)")
    parser.add_argument("--device", choices=sorted(DTYPES), help="default: cuda where there is one")
    parser.add_argument("--dtypes", nargs="+", help="torch's names (default: float32 on a CPU; also half on a GPU)")
    parser.add_argument("--note", action="append", default=[], help="a line for the profile's notes")
    return parser.parse_args()


@contextmanager
def joined_group(device_type: str) -> Iterator[torch.device]:
    """This rank's device, in the default process group if torchrun started it."""
    if device_type == "cpu":
        torch.set_num_threads(1)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_torchelastic_launched():
        yield device
        return
    if device_type == "cpu":
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def progress_bars(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per section on a terminal's stderr, else nothing."""
    if not (shown and sys.stderr.isatty()):
        yield lambda section, done, total: None
        return
    columns = TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(section: str, done: int, total: int) -> None:
            if section not in tasks:
                tasks[section] = bars.add_task(section, total=total)
            bars.update(tasks[section], completed=done)

        yield show


def measure(arguments: argparse.Namespace, device: torch.device) -> HardwareProfile:
    """Compute, then collectives on 2, 4, .. ranks, up to all."""
    world, per_node = (dist.get_world_size(), local_world_size()) if dist.is_initialized() else (1, 1)
    with progress_bars(shown=not dist.is_initialized() or dist.get_rank() == 0) as progress:
        compute = measure_compute(
            device,
            dtypes=arguments.dtypes or DTYPES[device.type],
            budget_s=arguments.budget * (COMPUTE_SHARE if world > 1 else 1.0),
            grid=default_grid(device.type),
            progress=progress,
        )
        collectives: tuple[CollectiveTable, ...] = ()
        if world > 1:
            collectives = measure_collectives(
                [ranks for ranks in divisors(world) if ranks > 1],
                MESSAGE_BYTES[device.type],
                device=device,
                ranks_per_node=per_node,
                budget_s=arguments.budget * (1 - COMPUTE_SHARE),
                progress=progress,
            )
    return make_profile(
        name=arguments.name,
        device=device,
        compute=compute,
        collectives=collectives,
        gpus_per_node=per_node,
        notes=arguments.note,
    )


def local_world_size() -> int:
    """Ranks on this machine, as torchrun counts them."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def summary(profile: HardwareProfile) -> str:
    """The numbers that tell at a glance whether the measurement makes sense."""
    lines = [
        f"{profile.name}: {profile.device}, {profile.gpus_per_node} ranks per machine,"
        f" {profile.memory_bytes / GIB:.1f} GiB each",
        f"launch {format_seconds(profile.launch_s)}, memory {profile.bandwidth.hbm_bytes_per_s / 1e9:.1f} GB/s"
        f" +- {profile.bandwidth.relative_error:.0%}",
    ]
    for table in profile.matmuls:
        m, n, k = table.m[-1], table.n[-1], table.k[-1]
        rate = 2.0 * m * n * k / profile.matmul(m=m, n=n, k=k, dtype=table.dtype).seconds
        lines.append(f"matmul {table.dtype} {m} x {n} x {k}: {rate / 1e9:.1f} GFLOP/s +- {table.relative_error:.0%}")
    for rate in profile.attention_rates:
        forward, backward = rate.forward_flop_per_s / 1e9, rate.backward_flop_per_s / 1e9
        lines.append(
            f"attention {rate.dtype}: forward {forward:.1f}, backward {backward:.1f} GFLOP/s"
            f" +- {rate.relative_error:.0%}"
        )
    for table in profile.collectives:
        last = table.bytes[-1]
        lines.append(
            f"{table.kind:15}{table.ranks:3} ranks: latency {format_seconds(table.latency_s)},"
            f" {last // MIB} MiB {format_seconds(table.time_s[-1])} +- {max(table.relative_error):.0%} at most"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, write, read back, report."""
    arguments = parse()
    device_type = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with joined_group(device_type) as device:
            profile = measure(arguments, device)
            if dist.is_initialized() and dist.get_rank() != 0:
                return 0
            write_atomically(arguments.output, render(profile.to_dict()))
            print(summary(load_profile(arguments.output)))
    except TpplanError as error:
        print(f"measure_profile: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

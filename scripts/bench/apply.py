"""What applying a plan costs a step: CPU time of forward and backward beside the plain model and beside torch's styles.

    python scripts/bench/apply.py [--rounds 15] [--steps 10]

On one rank, four tiny layers of the example Llama, where little but Python runs:

    plain             the model as it is written
    applied           under a plan for one rank
    applied as tp     under Megatron's plan on a mesh of one rank: parameters are DTensors, each module reads its own
    applied at tp 2   the same plan for two ranks, of which the other is not there: conversions issue their collectives,
                      which return at once. Matmuls are half as large; at these sizes they take a few percent of a step.
    stock             parallelize_module with ColwiseParallel and RowwiseParallel on the mesh of one rank

On two ranks (gloo on the loopback interface), wider layers: the plan at tp 2 beside parallelize_module, wall time.
All kinds take turns; printed are medians over rounds. Bars: 2x the plain model for what is applied (the goal is 1.5x),
and at two ranks no slower than stock. Exit code 1 where one is missed.
"""

import argparse
import dataclasses
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpplan
from tpplan.apply.parallel_style import module_styles

LLAMA = Path(__file__).resolve().parent.parent / "examples" / "llama.py"
BAR, GOAL, STOCK_BAR = 2.0, 1.5, 1.0
#: by the width of a layer: sequences and tokens of each
TINY = {"model_dim": 64, "hidden_dim": 192}, (1, 32)
WIDE = (
    ({"model_dim": 512, "hidden_dim": 1536}, (4, 128)),
    ({"model_dim": 256, "hidden_dim": 768}, (4, 512)),
)
PINS = {
    "layers.*.attention": "megatron",
    "layers.*.feed_forward": "megatron",
    "layers.*.attention_norm": "replicated",
    "layers.*.ffn_norm": "replicated",
    "tok_embeddings": "replicated",
    "norm": "replicated",
    "lm_head": "replicated",
}
Sizes = Mapping[str, int]
Shape = tuple[int, int]
Step = Callable[[], None]


def llama() -> ModuleType:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("llama", LLAMA)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXAMPLE = llama()


def build(sizes: Sizes) -> nn.Module:
    """The example of four layers."""
    torch.manual_seed(0)
    model: nn.Module = EXAMPLE.Llama(EXAMPLE.Config(**sizes))
    return model


def megatron(sizes: Sizes, shape: Shape) -> tpplan.Plan:
    """Columns, then rows, in attention and feed-forward; everything else replicated."""
    return tpplan.solve(
        lambda: build(sizes),
        EXAMPLE.example_inputs,
        loss=EXAMPLE.loss,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile="cpu-gloo"),
        global_batch=shape[0],
        micro_batch=shape[0],
        seq_len=shape[1],
        tp=2,
        recompute="none",
        pins=PINS,
    )


def stock(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """torch's own styles for the same matrices."""
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "feed_forward.gate_proj")
    styles = {f"layers.*.{name}": ColwiseParallel() for name in (*columns, "feed_forward.up_proj")}
    styles |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.o_proj", "feed_forward.down_proj")}
    return parallelize_module(model, mesh, styles)


def for_one_rank(plan: tpplan.Plan) -> tpplan.Plan:
    """The same layouts on one rank, where each is the whole."""
    return dataclasses.replace(plan, mesh_degrees=dataclasses.replace(plan.mesh_degrees, tp=1), sizes={})


def on_one_rank(model: nn.Module, alone: tpplan.Plan, mesh: DeviceMesh) -> nn.Module:
    """What apply_plan would do at several ranks to each module, on a mesh of one."""
    modules = dict(model.named_modules())
    for name, style in module_styles(alone, even_alone=True).items():
        style._apply(modules[name], mesh)
    return model


def stepper(model: nn.Module, shape: Shape) -> Step:
    """Forward and backward of one batch."""
    inputs: dict[str, Tensor] = EXAMPLE.example_inputs(*shape)

    def step() -> None:
        EXAMPLE.loss(model(inputs["tokens"]), inputs).backward()
        model.zero_grad(set_to_none=True)

    return step


def in_turns(steps: Mapping[str, Step], rounds: int, num_steps: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of one step of each kind: rounds of num_steps steps, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            for _ in range(num_steps):
                step()
            if number:
                seconds[name].append((clock() - start) / num_steps)
    return {name: statistics.median(found) for name, found in seconds.items()}


@contextmanager
def absent_peers(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many, of which no other is there."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_this_process(rounds: int, num_steps: int) -> dict[str, float]:
    """CPU seconds of a step by kind, on one rank."""
    sizes, shape = TINY
    plan = megatron(sizes, shape)
    with absent_peers(1):
        steps = {"plain": stepper(build(sizes), shape)}
        mesh = init_device_mesh("cpu", (1,))
        alone = for_one_rank(plan)
        steps["applied"] = stepper(tpplan.apply_plan(build(sizes), alone), shape)
        steps["applied as tp"] = stepper(on_one_rank(build(sizes), alone, mesh), shape)
        steps["stock"] = stepper(stock(build(sizes), mesh), shape)
        found = in_turns(steps, rounds, num_steps, time.process_time)
    with absent_peers(2):
        steps = {"plain": stepper(build(sizes), shape)}
        steps["applied at tp 2"] = stepper(tpplan.apply_plan(build(sizes), plan), shape)
        again = in_turns(steps, rounds, num_steps, time.process_time)
    found["applied at tp 2"] = again["applied at tp 2"] * found["plain"] / again["plain"]
    return found


def rank_main(rank: int, plans: list[tpplan.Plan], store: str, out: str, rounds: int, num_steps: int) -> None:
    """One of two ranks: seconds of a step by width and kind; rank 0 writes them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = []
    for (sizes, shape), plan in zip(WIDE, plans, strict=True):
        mesh = init_device_mesh("cpu", (2,))
        steps = {"applied": stepper(tpplan.apply_plan(build(sizes), plan), shape)}
        steps["stock"] = stepper(stock(build(sizes), mesh), shape)
        found.append(in_turns(steps, rounds, num_steps, time.perf_counter))
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(rounds: int, num_steps: int) -> list[dict[str, float]]:
    """Wall seconds of a step by kind, for each width."""
    plans = [megatron(*wide) for wide in WIDE]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        arguments = (plans, f"{folder}/store", out, rounds, num_steps)
        multiprocessing.start_processes(rank_main, args=arguments, nprocs=2, start_method="spawn")
        found: list[dict[str, float]] = torch.load(out)
    return found


def main() -> int:
    """Measure, print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="steps in a row of each kind (default: %(default)s)")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only this part")
    options = parser.parse_args()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    missed = False
    if options.ranks != 1:
        for (sizes, shape), found in zip(WIDE, on_two_ranks(options.rounds, options.steps), strict=True):
            print(f"two ranks, width {sizes['model_dim']}, {shape[0]} x {shape[1]} tokens, ms of a step")
            for name, seconds in found.items():
                print(f"  {name:16} {1e3 * seconds:8.2f}  {seconds / found['stock']:5.2f}x")
            missed |= found["applied"] > STOCK_BAR * found["stock"]
    if options.ranks != 2:
        found = on_this_process(options.rounds, options.steps)
        sizes, shape = TINY
        print(f"one rank, width {sizes['model_dim']}, {shape[0]} x {shape[1]} tokens, CPU ms of a step")
        for name, seconds in found.items():
            print(f"  {name:16} {1e3 * seconds:8.2f}  {seconds / found['plain']:5.2f}x")
        worst = max(seconds / found["plain"] for name, seconds in found.items() if name.startswith("applied"))
        print(f"  applied: {worst:.2f}x at most, bar {BAR:g}x, goal {GOAL:g}x")
        missed |= worst > BAR
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

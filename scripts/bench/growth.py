"""How solving grows with the model: CPU seconds against ops, modules and storages, with the fitted exponent.

    python scripts/bench/growth.py [MODEL ...] [--sizes 8,16,32,64]

Models, each of N layers: `tied` like layers; `untied` layers of different width; `deep` calls in one module, without
layers; `wide` branches that are added up; `u-net` layers with a skip to each from its mirror image. Each is solved on 2
GPUs with tp 2, and proven, in a process of its own that has solved a small model before: imports do not count.

The exponent is the slope of log(CPU seconds) over log(ops), by least squares over the sizes. Exit code 1 where it is
above 1.2.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.graph import ModelGraph

BAR = 1.2
SIZES = (8, 16, 32, 64)
WIDTH, LENGTH = 64, 32


class Layer(nn.Module):
    """x + down(silu(up(norm(x)))); x [B, T, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(nn.functional.silu(self.up(self.norm(x))))
        return x + change


class Layers(nn.Module):
    """Layers in a row, those of `hiddens`."""

    def __init__(self, hiddens: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, hiddens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Deep(nn.Module):
    """Products and nonlinear ops in the forward of one module."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(WIDTH, WIDTH) for _ in range(2 * number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = iter(self.weights)
        for up, down in zip(pairs, pairs, strict=True):
            x = x + nn.functional.silu(x @ up) @ down
        return x.square().mean()


class Wide(nn.Module):
    """Branches of different width beside each other."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({f"b{i}": Layer(WIDTH + 4 * i) for i in range(number)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for branch in self.branches.values():
            total = total + branch(x)
        return total.square().mean()


class UNet(nn.Module):
    """Each layer of the second half also reads what its mirror image in the first half gave."""

    def __init__(self, number: int) -> None:
        super().__init__()
        hiddens = [WIDTH + 4 * i for i in range(number // 2)]
        self.down = nn.ModuleList(map(Layer, hiddens))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in hiddens)
        self.up = nn.ModuleList(map(Layer, reversed(hiddens)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for join, layer in zip(self.joins, self.up, strict=True):
            x = layer(join(torch.cat((x, skips.pop()), dim=-1)))
        return x.square().mean()


MODELS: "dict[str, Callable[[int], nn.Module]]" = {
    "tied": lambda number: Layers([4 * WIDTH] * number),
    "untied": lambda number: Layers([WIDTH + 4 * i for i in range(number)]),
    "deep": Deep,
    "wide": Wide,
    "u-net": UNet,
}


def solved(build: "Callable[[], nn.Module]") -> "ModelGraph":
    """Solves and proves a model; its graph."""
    import tpplan
    from tpplan.search.models.trace_cache import Reuse

    reuse = Reuse()
    tpplan.solve(
        build,
        lambda batch, length: {"x": torch.empty(batch, length, WIDTH, device="meta")},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile="h100-sxm"),
        global_batch=2,
        seq_len=LENGTH,
        micro_batch=2,
        tp=2,
        precision="fp32",
        reuse=reuse,
    )
    return next(iter(reuse.traces.values())).graph


def measure(model: str, number: int) -> dict[str, float]:
    """One run in this process, which should be fresh."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return MODELS[model](number)

    solved(lambda: Layers([WIDTH]).to("meta"))
    before = time.process_time()
    graph = solved(build)
    return {
        "ops": len(graph.ops),
        "modules": len({node.module for node in graph.nodes}),
        "storages": len({value.storage for value in graph.values.values()}),
        "cpu_s": time.process_time() - before,
    }


def exponent(rows: list[dict[str, float]]) -> float:
    """The slope of log(CPU seconds) over log(ops)."""
    points = [(math.log(row["ops"]), math.log(row["cpu_s"])) for row in rows]
    x_mean, y_mean = (sum(column) / len(points) for column in zip(*points, strict=True))
    slope: float = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)
    return slope


def main() -> int:
    """Runs the models, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of layers, at least two")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child[0], int(arguments.child[1]))))
        return 0
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    sizes = sorted({int(text) for text in arguments.sizes.split(",")})
    if len(sizes) < 2:
        parser.error("--sizes: an exponent takes at least two numbers")
    print(f"{'':10}{'layers':>8}{'ops':>8}{'modules':>9}{'storages':>10}{'CPU s':>9}{'exponent':>10}")
    is_kept = True
    for name in arguments.models:
        rows = []
        for number in sizes:
            command = [sys.executable, __file__, "--child", name, str(number)]
            child = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            rows.append(row := json.loads(child.stdout))
            counts = f"{number:8d}{row['ops']:8d}{row['modules']:9d}{row['storages']:10d}{row['cpu_s']:9.2f}"
            print(f"{name:10}{counts}", flush=True)
        is_kept &= (slope := exponent(rows)) <= BAR
        print(f"{name:10}{'':44}{slope:10.2f}{'' if slope <= BAR else f'  above {BAR}'}", flush=True)
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())

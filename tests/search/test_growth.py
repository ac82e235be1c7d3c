"""What a solve takes as a model gets deeper, in counts, and that its answer depends on nothing but its inputs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import machine
from torch import Tensor, nn

import tpplan
from tpplan.plan.plan import Plan
from tpplan.solvers import milp
from tpplan.solvers.presolve import Reduced
from tpplan.trace import trace
from tpplan.trace.record_fx import Program

WIDTH = 8


class Layer(nn.Module):
    """Two products and a residual; `ran` counts how often its code ran."""

    ran = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        Layer.ran += 1
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    """Like layers and a mean."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def solve(num_layers: int, **options: object) -> Plan:
    """On up to 4 GPUs of a machine on which layouts, recomputation and resharding all cost something."""
    profile = machine(flop_per_s=1e9, hbm_bytes_per_s=1e10, launch_s=1e-9, intra_bytes_per_s=1e7, latency_s=1e-9)
    return tpplan.solve(
        lambda: Layers(num_layers),
        lambda batch, seq_len: {"x": torch.zeros(batch, seq_len, WIDTH)},
        cluster=tpplan.Cluster(gpus=4, gpus_per_node=4, profile=profile),
        global_batch=4,
        seq_len=16,
        precision="fp32",
        **{"micro_batch": 1, **options},  # type: ignore[arg-type]
    )


def binding_limit(num_layers: int) -> float:
    """Bytes with which some layers, and not all, have to be treated otherwise than is fastest."""
    ample = solve(num_layers, prove=False).predicted.peak_memory_bytes
    return 0.8 * ample


def test_neither_traces_nor_ilps_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 times the layers: as many products are written down, each layer runs once in each trace, and as many ILPs are
    solved, of the same size."""
    sizes: list[int] = []
    products: list[int] = []
    build, record = milp.build, trace.record

    def counted(reduced: Reduced) -> milp.Model:
        model = build(reduced)
        sizes.append(model.program.num_columns)
        return model

    def recorded(*args: Any) -> Program:
        program = record(*args)
        nodes = program.graph_module.graph.nodes
        products.append(sum(node.target is torch.ops.aten.linear.default for node in nodes))
        return program

    monkeypatch.setattr(milp, "build", counted)
    monkeypatch.setattr(trace, "record", recorded)
    seen = {}
    for num_layers in (4, 64):
        limit = binding_limit(num_layers)
        sizes.clear()
        products.clear()
        Layer.ran = 0
        solve(num_layers, memory_limit_bytes=limit, prove=False)
        assert Layer.ran == num_layers * len(products)
        seen[num_layers] = (products.copy(), len(sizes), max(sizes))
    (written, programs, columns), (written_deep, programs_deep, columns_deep) = seen[4], seen[64]
    # The first layer is given no gradient: it is of a kind of its own.
    assert written_deep == written == [4] * len(written)
    assert programs_deep <= 1.5 * programs
    assert columns_deep <= 1.5 * columns


PROGRAM = """
import sys
from test_growth import binding_limit, solve
solve(3, memory_limit_bytes=float(sys.argv[2]), micro_batch="auto").dump(sys.argv[1])
"""


@pytest.mark.long
def test_a_plan_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    """Everything free, memory binding, in two processes that hash otherwise."""
    limit = binding_limit(3)
    files = [tmp_path / name for name in ("1.json", "2.json")]
    for seed, file in enumerate(files, start=1):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM, str(file), str(limit)]
        subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True, timeout=300)
    assert files[0].read_bytes() == files[1].read_bytes()

"""What a solve takes as a model gets deeper, in counts, and that its answer depends on nothing but its inputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples import machine
from torch import Tensor, nn

import tpplan
from tpplan.plan import Plan
from tpplan.solvers import milp
from tpplan.solvers.reduction import Reduced

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
    """16 times the layers: the same code is traced, and as many ILPs are solved, of the same size."""
    sizes: list[int] = []
    build = milp.build

    def counted(reduced: Reduced) -> milp.Model:
        model = build(reduced)
        sizes.append(model.program.num_columns)
        return model

    monkeypatch.setattr(milp, "build", counted)
    seen = {}
    for num_layers in (8, 128):
        limit = binding_limit(num_layers)
        sizes.clear()
        Layer.ran = 0
        solve(num_layers, memory_limit_bytes=limit, prove=False)
        seen[num_layers] = (Layer.ran, len(sizes), max(sizes))
    (ran, programs, columns), (ran_deep, programs_deep, columns_deep) = seen[8], seen[128]
    assert ran_deep == ran
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

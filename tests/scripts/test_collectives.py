"""The plan's list of tensor-parallel collectives against those that real ranks issue, one by one."""

import importlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import NAMES, eager_to_shard, example, machine, solve_example
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from tpplan.core.mesh import Axis
from tpplan.machine.profile import Collective, HardwareProfile
from tpplan.plan.parts import DATA_PARALLEL
from tpplan.plan.plan import Pass, Plan
from tpplan.verify.collective_log import differences
from tpplan.verify.collective_log import listed as listed_anywhere
from tpplan.verify.fake_step import fake_step

EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"

#: (kind, bytes of the whole value, dtype)
Issued = Counter[tuple[str, int, str]]

KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
}
#: kinds whose argument is one rank's part of the value
LOCAL_ARGUMENT = {Collective.ALL_GATHER, Collective.ALL_TO_ALL}


class CollectiveLog(TorchDispatchMode):
    """Counts functional collectives by kind, bytes and dtype."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.issued: Issued = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, _ = str(func).split(".")
        if namespace == "_c10d_functional" and name in KINDS:
            kind, x = KINDS[name], args[0]
            parts = self.ranks if kind in LOCAL_ARGUMENT else 1
            self.issued[str(kind), x.nbytes * parts, str(x.dtype).removeprefix("torch.")] += 1
        return func(*args, **(kwargs or {}))


def issued(name: str, plan: Plan) -> Issued:
    """What one optimizer step of an applied model issues on this rank."""
    torch.manual_seed(0)
    module = example(name)
    model = tpplan.apply_plan(module.build_model(), plan)
    with CollectiveLog(plan.mesh.tp) as log:
        for step in range(plan.batch.accumulation_steps):
            inputs = module.example_inputs(plan.batch.micro_batch, plan.batch.seq_len)
            loss = module.loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
            if step < plan.batch.accumulation_steps - 1:
                with tpplan.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
    return log.issued


def listed(plan: Plan) -> Issued:
    """What the plan lists on the tp axis."""
    found: Issued = Counter()
    for row in plan.collectives:
        if row.axis is Axis.TP:
            found[row.kind, row.num_bytes, row.dtype] += row.count
    return found


@pytest.mark.parametrize(("name", "links", "ranks"), [*((name, "free", 4) for name in NAMES), ("llama", "slow", 2)])
def test_listed_collectives_are_those_issued(name: str, links: str, ranks: int) -> None:
    """Kind, bytes, dtype and count over a step of two micro-batches, reduction of R* gradients included."""
    slow = machine(flop_per_s=1e9, hbm_bytes_per_s=1e9, launch_s=1e-9, intra_bytes_per_s=1e9, latency_s=1e-5)
    profile: HardwareProfile = eager_to_shard() if links == "free" else slow
    plan = solve_example(name, profile, gpus=ranks, tp=ranks, global_batch=8, micro_batch=4, seq_len=32)
    expected = listed(plan)
    assert expected
    for found in run_ranks(ranks, issued, name, plan):
        assert found == expected


# ---- every axis, on a fake group


def swept() -> Any:
    """scripts/evidence/collectives.py as a module."""
    sys.path.insert(0, str(EVIDENCE))
    try:
        return importlib.import_module("collectives")
    finally:
        sys.path.remove(str(EVIDENCE))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("mlp", "tp2-zero3-of-3"),
        ("mlp", "tp2-hsdp"),
        *(pytest.param(name, way, marks=pytest.mark.long) for name in NAMES for way in swept().WAYS),
    ],
)
def test_everything_listed_is_issued(name: str, way: str) -> None:
    """FSDP's gathers and reductions, padding and recomputation included."""
    row = swept().compared(name, way)
    assert row.num_listed
    assert row.differences == ()


class Scaled(nn.Module):
    """Two layers of odd widths, each with a parameter without dims, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.unread = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_what_fsdp_fills_up_or_cannot_hold_is_listed_as_issued() -> None:
    plan = tpplan.solve(
        Scaled,
        lambda batch, seq_len: {"x": torch.zeros(batch, 7)},
        cluster=tpplan.Cluster(gpus=6, gpus_per_node=6, profile=eager_to_shard()),
        global_batch=24,
        micro_batch=2,
        seq_len=1,
        tp=1,
        fsdp=3,
        precision="fp32",
        all_gpus=True,
        prove=False,
    )
    step = fake_step(Scaled, {"x": torch.zeros(2, 7)}, lambda loss, _: loss, plan, is_tracked=False)
    assert [str(found) for found in differences(plan, listed_anywhere(plan), step.issued)] == []
    of_layer = 3 * (3 * 7 + 3)  # 7 rows on 3 ranks are 3 on each in FSDP's buffers, and so are 7 entries
    rows = [row for row in plan.collectives if row.where.startswith("layers.") and row.during is Pass.BACKWARD]
    assert {row.num_bytes for row in rows if row.axis is Axis.SHARD} == {4 * of_layer}


class Odd(nn.Module):
    """Two layers of odd widths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("shard", [1, 3])
def test_what_fsdp_fills_up_is_priced_as_issued(shard: int) -> None:
    """On a device where nothing hides, each collective counted takes its time."""
    profile = replace(eager_to_shard(latency_s=1e-5, intra_bytes_per_s=1e6), device_type="cpu")
    plan = tpplan.solve(
        Odd,
        lambda batch, seq_len: {"x": torch.zeros(batch, 7)},
        cluster=tpplan.Cluster(gpus=6, gpus_per_node=6, profile=profile),
        global_batch=24,
        micro_batch=2,
        seq_len=1,
        tp=1,
        fsdp=shard,
        precision="fp32",
        all_gpus=True,
        prove=False,
    )
    step = fake_step(Odd, {"x": torch.zeros(2, 7)}, lambda loss, _: loss, plan, is_tracked=False)
    assert [str(found) for found in differences(plan, listed_anywhere(plan), step.issued)] == []
    seconds = sum(
        row.count * profile.collective(Collective(row.kind), plan.mesh.group(row.axis, 6), row.num_bytes).seconds
        for row in plan.collectives
    )
    assert plan.predicted.time_s[DATA_PARALLEL] == pytest.approx(seconds, rel=1e-9)

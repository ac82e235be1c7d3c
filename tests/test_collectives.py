"""The plan's list of tensor-parallel collectives against those that real ranks issue, one by one."""

from collections import Counter
from typing import Any

import pytest
import torch
from examples import NAMES, eager_to_shard, example, machine, solve_example
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from tpplan.mesh import Axis
from tpplan.plan import Plan
from tpplan.profile import Collective, HardwareProfile

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

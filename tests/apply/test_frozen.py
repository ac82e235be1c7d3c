"""Frozen weights and adapters on real ranks: gradients of what trains, and no collective for what does not."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from examples import eager_to_shard, example
from one_process import TOLERANCE, gradients, relative_errors
from ranks import run_ranks
from test_collectives import CollectiveLog, listed
from torch import Tensor, nn

import tpplan
from tpplan.core.mesh import Axis, Mesh
from tpplan.machine.profile import Collective
from tpplan.plan.plan import Plan, ProofStatus

BATCH, SEQ_LEN, RANK = 4, 16, 4


class Adapted(nn.Module):
    """A frozen projection beside a trainable one of low rank. [Hu et al. 2021]"""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def build() -> nn.Module:
    """A small Llama, frozen, with adapters of its queries and of what leads back; its last norm trains too."""
    llama = example("llama")
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(num_layers=2)).requires_grad_(False)
    for layer in model.layers:
        layer.attention.q_proj = Adapted(layer.attention.q_proj)
        layer.feed_forward.down_proj = Adapted(layer.feed_forward.down_proj)
    model.norm.requires_grad_(True)
    return model


def solved(mesh: Mesh, **options: Any) -> Plan:
    llama = example("llama")
    return tpplan.solve(
        build,
        llama.example_inputs,
        loss=llama.loss,
        cluster=tpplan.Cluster(gpus=mesh.num_gpus, gpus_per_node=mesh.num_gpus, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH // mesh.data_parallel,
        seq_len=SEQ_LEN,
        tp=mesh.tp,
        fsdp=mesh.shard,
        precision="fp32",
        recompute="none",
        all_gpus=True,
        **options,
    )


def reduced_elements(parameter: Tensor, mesh: Mesh) -> int:
    """What FSDP reduces of a gradient: of this tp rank's part, filled up along dim 0 to a multiple of the shards."""
    shape = list(parameter.shape)
    tp = parameter.placements[-1]
    if mesh.tp > 1 and tp.is_shard():
        shape[tp.dim] //= mesh.tp
    return math.prod(shape[1:]) * -(-shape[0] // mesh.shard) * mesh.shard if mesh.shard > 1 else 0


SCATTER = str(Collective.REDUCE_SCATTER)


class Reductions(CollectiveLog):
    """Also the gradients that FSDP reduces: their elements, by collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d._reduce_scatter_base_"):
            self.elements["reduce_scatter"] += args[1].numel()
        if name.startswith("c10d.allreduce_"):
            self.elements["all_reduce"] += sum(tensor.numel() for tensor in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def train_adapters(plan: Plan) -> None:
    llama = example("llama")
    inputs = llama.example_inputs(BATCH, SEQ_LEN)
    reference, model = build(), tpplan.apply_plan(build(), plan)
    llama.loss(reference(inputs["tokens"]), inputs).backward()
    micro = plan.batch_for(dist.get_rank()).micro_batches(inputs)[0]
    with Reductions(plan.mesh.tp) as log:
        llama.loss(model(micro["tokens"]), micro).backward()
    found, expected = gradients(model), gradients(reference)
    assert found.keys() == expected.keys()
    assert max(relative_errors(found, expected).values()) < TOLERANCE
    assert log.issued == listed(plan)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    in_plan = sum(
        row.num_bytes * row.count for row in plan.collectives if row.axis is Axis.SHARD and row.kind == SCATTER
    )
    assert log.elements["reduce_scatter"] == in_plan // trainable[0].element_size()
    assert log.elements["reduce_scatter"] == sum(reduced_elements(p, plan.mesh) for p in trainable)
    assert not log.elements["all_reduce"]
    optimizer = torch.optim.AdamW(trainable)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(tp=2), marks=pytest.mark.long),
        pytest.param(Mesh(shard=2), marks=pytest.mark.long),
        Mesh(shard=2, tp=2),
    ],
    ids=str,
)
def test_adapters_train_with_the_planned_collectives(mesh: Mesh) -> None:
    plan = solved(mesh)
    assert plan.proof.status is ProofStatus.PROVEN
    run_ranks(mesh.num_gpus, train_adapters, plan)

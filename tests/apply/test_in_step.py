"""Ranks of a tensor-parallel group that do not go in step are named by the first training forward, on all ranks."""

import copy
import pickle
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from plans import handmade_plan
from ranks import run_ranks
from tiny_llama import build, loss_of, my_part, sequence_parallel
from torch import Tensor, nn

from tpplan.apply.apply import apply_plan
from tpplan.apply.modules.first_step_check import checksum
from tpplan.apply.modules.weights_at_rest import OwnWeights
from tpplan.core.errors import UsageError
from tpplan.core.mesh import Mesh

MESH = Mesh(shard=2, tp=2)


class Dropping(nn.Module):
    """Dropout on what every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.up(x)).sum()


def complaint(step: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as raised:
        step()
    return str(raised.value)


def batches_that_differ() -> str:
    model = build()
    apply_plan(model, sequence_parallel(model, MESH))
    ids, targets = my_part(MESH)
    return complaint(lambda: loss_of(model, ids.roll(int(dist.get_rank() == 3), 1), targets))


def random_states_that_differ() -> str:
    """Found once they are used: seeds differ between data ranks in any training script."""
    torch.manual_seed(dist.get_rank())
    model = Dropping()
    apply_plan(model, handmade_plan(model, MESH))
    model.eval()
    model(torch.ones(2, 8)).backward()
    model = Dropping()
    apply_plan(model, handmade_plan(model, MESH))
    return complaint(lambda: model(torch.ones(2, 8)))


class Drawing(nn.Module):
    """Chance from outside torch scales what every rank holds whole."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.up, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum() * self.draw()


def draws_outside_torch_that_differ(draw: Callable[[], float]) -> str:
    """Processes are seeded differently unless told; that is an error for a forward that draws, and for no other."""
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    constant, drawing = Drawing(lambda: 0.5), Drawing(draw)
    for model in (constant, drawing):
        apply_plan(model, handmade_plan(model, MESH))
    constant(torch.ones(2, 8)).backward()
    return complaint(lambda: drawing(torch.ones(2, 8)))


def numpys_draws_that_differ() -> str:
    return draws_outside_torch_that_differ(np.random.rand)


def pythons_draws_that_differ() -> str:
    return draws_outside_torch_that_differ(random.random)


def parameters_that_differ() -> str:
    model = build()
    apply_plan(model, sequence_parallel(model, MESH))
    with torch.no_grad():
        for name in ("norm", "embedding"):
            getattr(model, name).weight.to_local()[0] += dist.get_rank() == 1
    return complaint(lambda: loss_of(model, *my_part(MESH)))


class Branches(nn.Module):
    """Two alike, column- and row-parallel, in the order of a set of strings: another in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleDict({name: nn.Linear(8, 16) for name in ("a", "b")})
        self.down = nn.ModuleDict({name: nn.Linear(16, 8, bias=False) for name in ("a", "b")})

    def forward(self, x: Tensor) -> Tensor:
        names = ("a", "b") if dist.get_rank() % 2 == 0 else ("b", "a")
        found = {name: self.down[name](self.up[name](x).relu()) for name in names}
        return (found["a"] * found["b"].sigmoid()).sum()


def orders_that_differ() -> str:
    model = Branches()
    sharded = {f"up.{name}.{kind}": ("S(0)", "S(0)") for name in "ab" for kind in ("weight", "bias")}
    sharded |= {f"down.{name}.weight": ("S(1)", "S(1)") for name in "ab"}
    outputs = {f"down.{name}": ({}, {"output": "P -> R"}) for name in "ab"}
    apply_plan(model, handmade_plan(model, MESH, parameters=sharded, boundaries=outputs))
    return complaint(lambda: model(torch.ones(2, 8))).replace("ranks 2 and 3", "ranks 0 and 1")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (orders_that_differ, r"ranks 0 and 1 .* at module down.a, output output, the other at module down.b, output"),
        (batches_that_differ, r"ranks 2 and 3 are of one tensor-parallel group and differ in their batch \(ids\): .*"),
        (random_states_that_differ, r"ranks 0 and 1 .* differ in their random state \(cpu\), and so do 1 more pairs"),
        (numpys_draws_that_differ, r"ranks 0 and 1 .* in their random state of NumPy .*: call numpy.random.seed"),
        (pythons_draws_that_differ, r"ranks 0 and 1 .* in their random state of Python .*: call random.seed"),
        (parameters_that_differ, r"ranks 0 and 1 .* in their parameters \(embedding.weight, norm.weight\): load the"),
    ],
)
def test_ranks_out_of_step_are_named_on_every_rank(step: Callable[[], str], message: str) -> None:
    found = run_ranks(MESH.num_gpus, step)
    assert len(set(found)) == 1
    assert re.search(message, found[0]), found[0]


def compare_once() -> None:
    mesh = Mesh(tp=2)
    model = build()
    apply_plan(model, sequence_parallel(model, mesh))
    ids, targets = my_part(mesh)
    with torch.no_grad():
        loss_of(model, ids.roll(dist.get_rank(), 1), targets)  # compares nothing
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        complaint(lambda twin=twin: loss_of(twin, ids.roll(dist.get_rank(), 1), targets))
        loss_of(twin, ids, targets)
        assert [type(hook) for hook in twin._forward_pre_hooks.values()] == [OwnWeights]
        assert not twin._forward_hooks
        loss_of(twin, ids.roll(dist.get_rank(), 1), targets)  # nor does a later step


def test_the_first_training_forward_compares_and_no_other() -> None:
    run_ranks(2, compare_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_every_element_its_place_and_the_shape(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {checksum(x), checksum(x.flatten()), checksum(x.mT)}
    for i in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[i] = not bool(x.view(-1)[i])
        seen.add(checksum(changed))
    assert len(seen) == 3 + x.numel()
    assert checksum(x) == checksum(x.clone())
    assert checksum(torch.empty(0, 3)) != checksum(torch.empty(3, 0))

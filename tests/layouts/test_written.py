"""Parameters that a forward writes to, or puts others in the place of: on ranks against one process, or refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.errors import UsageError
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.plan import MeshPlan, Plan, ProofStatus, Recompute
from tpplan.trace.trace import trace

ROWS, LENGTH, VOCABULARY, DIM, HIDDEN = 4, 6, 16, 8, 32


class MLP(nn.Module):
    """What can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A table, layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, DIM), nn.Sequential(MLP(), MLP())

    def looked_up(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.looked_up(tokens)).square().mean()


class MaxNorm(Model):
    """Rows that are looked up are made shorter first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM, max_norm=1.0)


class Tied(MaxNorm):
    """The head has the table."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layers(self.looked_up(tokens)), self.embedding.weight).square().mean()


class Bag(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, DIM, max_norm=1.0)


class Functional(Model):
    def looked_up(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding.weight, max_norm=0.5)


class Clamps(Model):
    """A layer's weight, in that layer or where it runs whole."""

    is_whole = False

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.layers[1].up.weight
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        loss = super().forward(tokens)
        return loss * weight.mean().item() if self.is_whole else loss


class ClampsWhole(Clamps):
    is_whole = True


class Replaces(Model):
    """A parameter is wrapped anew: one that no optimizer knows trains."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.layers[1].up.weight = nn.Parameter(0.9 * self.layers[1].up.weight.detach())
        return super().forward(tokens)


class ReplacesOnce(Model):
    is_first = True

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_first:
            self.layers[1].up.weight = nn.Parameter(0.5 * self.layers[1].up.weight.detach())
            self.is_first = False
        return super().forward(tokens)


class AssignsData(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        self.layers[1].up.weight.data = 0.9 * self.layers[1].up.weight.data
        return super().forward(tokens)


class ClampsItself(MLP):
    """A layer that writes to a weight of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Layers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(ClampsItself(), ClampsItself())


def tokens(seed: int = 0) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))}


def solve(build: Callable[[], nn.Module], **options: object) -> Plan:
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    given = {"global_batch": ROWS, "micro_batch": ROWS, "seq_len": LENGTH, "precision": "fp32", "tp": 2} | options
    return tpplan.solve(build, lambda _rows, _length: tokens(), cluster=cluster, **{"micro_batch": 1, **given})  # type: ignore[arg-type]


def whole(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(())
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(build: Callable[[], nn.Module], plan: Plan | None) -> dict[str, Tensor]:
    """Losses and gradients of three steps of an optimizer that is made once, and all parameters after them."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    model = model if plan is None else tpplan.apply_plan(model, plan)
    weights = dict(model.named_parameters())
    optimizer = torch.optim.SGD(weights.values(), lr=0.05, momentum=0.9)
    found = {}
    for step in range(3):
        loss = model(**tokens(step))
        loss.backward()
        found |= {f"loss {step}": loss.detach()} | {f"{name} {step}": whole(w.grad) for name, w in weights.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: whole(weight) for name, weight in model.named_parameters()}


def assert_like_one_process(build: Callable[[], nn.Module], plan: Plan) -> None:
    assert plan.proof.status is ProofStatus.PROVEN
    expected = train(build, None)
    for found in run_ranks(2, train, build, plan):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}"
            )


@pytest.mark.parametrize("build", [MaxNorm, Tied, Bag, Functional, Clamps])
def test_what_is_written_to_is_written_on_every_rank_and_layers_are_sharded(build: type[nn.Module]) -> None:
    plan = solve(build)
    assert "layers.0.up.weight" in [
        name for name, own in plan.parameter_plans().items() if own.placement.dim is not None
    ]
    assert_like_one_process(build, plan)


@pytest.mark.parametrize("build", [ClampsWhole, Replaces, ReplacesOnce, AssignsData])
def test_where_code_is_not_seen_through_what_it_writes_or_replaces_is_that_of_one_process(
    build: type[nn.Module],
) -> None:
    assert_like_one_process(build, solve(build))


@pytest.mark.parametrize("build", [MaxNorm, ClampsWhole, Replaces, AssignsData])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tp": 1, "all_gpus": True}, "on 2 data-parallel ranks each would write to its own copy"),
        ({"tp": 1, "fsdp": 2}, "on 2 data-parallel ranks each would write to its own copy"),
        ({"tp": 2, "precision": "bf16-mixed"}, "bf16-mixed computes with a copy"),
    ],
)
def test_copies_are_refused_by_name(build: type[nn.Module], options: dict[str, object], why: str) -> None:
    name = "embedding.weight" if build is MaxNorm else "layers.1.up.weight"
    with pytest.raises(UsageError, match=rf"the forward writes to parameter {name} .*{why}"):
        solve(build, global_batch=2 * ROWS, **options)


def test_of_several_meshes_one_that_writes_to_no_copy_is_taken() -> None:
    assert solve(MaxNorm, tp=None, global_batch=2 * ROWS).mesh.data_parallel == 1


def test_layers_that_write_to_their_weights_are_not_recomputed() -> None:
    with pytest.raises(UsageError, match=r"layers.0.up.weight .*again where that layer is recomputed"):
        solve(Layers, recompute="full")
    assert not solve(Layers, memory_limit_bytes=2**40).recomputed_modules()


def test_plans_that_would_write_to_copies_or_twice_do_not_type() -> None:
    plan = solve(Layers)
    with torch.device("meta"):
        model = Layers()
    graph = trace(model, tokens())
    assert typecheck(graph, plan) is None
    apart = replace(plan, mesh_degrees=MeshPlan(replicate=2, shard=1, tp=2))
    again = replace(plan, recompute={"layers.1": Recompute.FULL})
    for edited, why in ((apart, "2 data-parallel ranks"), (again, "would write twice where layers.1 is recomputed")):
        problem = typecheck(graph, edited)
        assert isinstance(problem, Mistyped)
        assert why in problem.message

"""Sizes that code takes from a tensor in another layout: replaced by the tensor's own, at every batch and length."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.apply.modules.local_sizes import LocalSizes
from tpplan.core.errors import PlanMismatchError
from tpplan.core.graph import Direction, ModelGraph, Value
from tpplan.core.layout import S
from tpplan.layouts.rules import Call, Strategy
from tpplan.layouts.size_dims import dims_of_sizes
from tpplan.plan.plan import Plan, ProofStatus, SizePlan
from tpplan.search.points.options import Allows

BATCH, LENGTH, DIM, HEADS = 2, 8, 32, 4
#: another batch, other lengths
OTHERS = ((BATCH, LENGTH), (4, LENGTH), (BATCH, 4), (4, 16))


class Attention(nn.Module):
    """The idiom of transformers: queries, keys and values are viewed with the lengths of what comes in, and what is
    attended to is reshaped with them."""

    heads = -1

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, DIM // HEADS)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(y.reshape(*x.shape[:-1], -1).contiguous())


class Baked(Attention):
    """Heads are written into the code, too: two sizes of one call are replaced."""

    heads = HEADS


class Flat(nn.Module):
    """Batch and length become one dim, in numbers that the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.q_proj(x).reshape(x.shape[0] * x.shape[1], DIM)
        return self.o_proj(rows.relu()).view(-1, x.shape[-1])


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(DIM), attention(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.attention(x)
        return self.last(x + y if x.dim() == y.dim() else y).square().mean()


def on_slices(graph: ModelGraph) -> Allows:
    """Attention's input is on slices of the sequence, the output of each projection on heads: all-to-all between."""
    boundaries = {boundary.name: boundary for boundary in graph.boundaries}

    def allowed(name: str, strategy: Strategy) -> bool:
        boundary = boundaries.get(name)
        if boundary is None:
            return True
        if (boundary.module, boundary.direction) == ("attention", Direction.INPUT):
            return strategy.results == (S(1),)
        is_projected = boundary.module.endswith(("q_proj", "k_proj", "v_proj"))
        return strategy.results == (S(2),) or not (is_projected and boundary.direction is Direction.OUTPUT)

    return allowed


def solve(build: Callable[[], nn.Module], **options: Any) -> Plan:
    return tpplan.solve(
        build,
        lambda batch, length: {"x": torch.randn(batch, length, DIM)},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
        **options,
    )


def run(build: Callable[[], nn.Module], plan: Plan | None) -> list[dict[str, Tensor]]:
    """Loss and gradients at every batch and length."""
    found = []
    for batch, length in OTHERS:
        torch.manual_seed(0)
        model = build() if plan is None else tpplan.apply_plan(build(), plan)
        loss = model(torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(length)))
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items() if g is not None}
        found.append({"loss": loss.detach(), **whole})
    return found


def assert_like_one_process(build: Callable[[], nn.Module], plan: Plan) -> None:
    expected = run(build, None)
    for of_rank in run_ranks(2, run, build, plan):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("attention", [Attention, Baked])
def test_all_to_all_around_attention_needs_no_cut_and_is_right_at_every_length(attention: type[Attention]) -> None:
    build = lambda: Model(attention)  # noqa: E731
    plan = solve(build, allows=on_slices)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert {(size.written, size.local) for size in plan.sizes["attention"] if size.dims} == {(LENGTH // 2, LENGTH)}
    assert_like_one_process(build, plan)


def test_batch_and_length_in_one_dim_are_replaced_as_their_product() -> None:
    """What is gathered is counted by the slices that came in."""
    build = lambda: Model(Flat)  # noqa: E731
    plan = solve(build, allows=on_slices)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.cuts == ()
    assert (0, 1) in {size.dims for size in plan.sizes["attention"]}
    assert_like_one_process(build, plan)


LENGTH_OF = SizePlan(call="view", of=(0, 0, 16), count=4, position=1, written=8, local=16, dims=(1,))
SLICE_OF = SizePlan(call="view", of=(0, 0, 16), count=4, position=1, written=16, local=8, dims=(1,))


@pytest.mark.parametrize(
    ("planned", "length", "given", "made"),
    [
        (LENGTH_OF, 16, 8, 16),
        (LENGTH_OF, 16, 16, 16),
        (LENGTH_OF, 6, 3, 6),  # another length, in the planned proportion
        (SLICE_OF, 8, 16, 8),
        (SLICE_OF, 3, 6, 3),
    ],
)
def test_a_size_is_the_tensors_own(planned: SizePlan, length: int, given: int, made: int) -> None:
    replaced = LocalSizes((planned,))
    assert replaced(Tensor.view, (torch.zeros(1, length, 16), 1, given, -1, 4), {}).shape == (1, made, 4, 4)


@pytest.mark.parametrize(("planned", "given"), [(LENGTH_OF, 4), (LENGTH_OF, 32), (SLICE_OF, 8), (SLICE_OF, 64)])
def test_a_size_in_another_proportion_is_an_error(planned: SizePlan, given: int) -> None:
    """view(1, 4, -1, 4) of [1, 16, 16] runs, and is another model."""
    message = f"view of a tensor of shape [1, 16, 16] with size {given} in place 1: the plan knows 16 there"
    with pytest.raises(PlanMismatchError, match=re.escape(message)):
        LocalSizes((planned,))(Tensor.view, (torch.zeros(1, 16, 16), 1, given, -1, 4), {})


@pytest.mark.parametrize("args", [(1, 4, -1), (2, 4, 2, 4), (1, 8, 2, 4)])
def test_other_calls_are_left_alone(args: tuple[int, ...]) -> None:
    """Of another number of sizes, of a tensor of another width, or of another number of dims."""
    x = torch.zeros(1, 8, 8) if len(args) == 4 else torch.zeros(1, 8, 16)
    assert LocalSizes((LENGTH_OF,))(Tensor.view, (x, *args), {}).shape == x.view(*args).shape


def view_of(shape: tuple[int, ...], *sizes: int, target: str = "aten.view.default") -> dict[int, tuple[int, ...]]:
    make = torch.empty(shape, device="meta")
    made = make.expand(sizes) if "expand" in target else make.view(sizes)
    values = [
        Value(name=name, shape=tuple(tensor.shape), dtype="float32", carries_gradient=True, storage=name)
        for name, tensor in (("x", make), ("y", made))
    ]
    call = Call(target=target, args=(None, sizes), kwargs=(), operands=(values[0],), results=(values[1],))
    return dict(dims_of_sizes(call))


def test_which_sizes_are_dims_of_the_tensor() -> None:
    assert view_of((2, 8, 32), 2, 8, 4, 8) == {0: (0,), 1: (1,)}
    assert view_of((2, 8, 32), 2, 8, -1, 8) == {0: (0,), 1: (1,)}
    assert view_of((2, 8, 4, 8), 2, 8, 32) == {0: (0,), 1: (1,), 2: (2, 3)}
    assert view_of((2, 8, 32), 16, 32) == {0: (0, 1), 1: (2,)}
    assert view_of((2, 8, 32), -1, 32) == {1: (2,)}
    assert view_of((1, 8, 32), 1, 8, 32) == {1: (1,), 2: (2,)}  # one may stand for any dim
    assert view_of((16, 32), 2, 8, 32) == {2: (1,)}
    assert view_of((1, 8, 1), 2, 8, 4, target="aten.expand.default") == {1: (1,)}
    assert view_of((8, 1), 2, 8, 4, target="aten.expand.default") == {1: (0,)}


def test_a_call_that_looks_like_two_planned_calls_is_refused() -> None:
    """Scores (heads * batch, length, length) and queries (batch, length, width) are told apart by 8 and by 16; where
    queries of 8 sequences come, both match, and the two sizes differ."""
    scores = SizePlan(call="view", of=(8, 0, 0), count=4, position=2, written=2, local=4, dims=(1,))
    queries = SizePlan(call="view", of=(0, 0, 16), count=4, position=2, written=4, local=2)
    replaced = LocalSizes((scores, queries))
    assert replaced(Tensor.view, (torch.zeros(6, 4, 16), 6, 4, 4, 8), {}).shape == (6, 4, 2, 8)
    assert replaced(Tensor.view, (torch.zeros(8, 5, 5), 4, 2, 5, 5), {}).shape == (4, 2, 5, 5)
    with pytest.raises(PlanMismatchError, match=r"cannot tell which is meant; solve again"):
        replaced(Tensor.view, (torch.zeros(8, 4, 16), 8, 4, 4, 8), {})

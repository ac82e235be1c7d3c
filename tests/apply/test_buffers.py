"""Buffers that attention joins with weights or multiplies into scores, read as each rank's slice of heads."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import RankError, run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import ExportError, VerificationError
from tpplan.core.layout import Layout, P, R, S
from tpplan.plan.plan import BufferPlan, Plan
from tpplan.verify.prove_plan import prove_plan

DIM, VOCAB, HEADS, LENGTH = 32, 64, 4, 7


class Attention(nn.Module):
    """Heads out of one packed weight; subclasses add buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def joined(self) -> Tensor | None:
        """The bias of the packed weight."""
        return None

    def scores(self, scores: Tensor) -> Tensor:
        """[B, H, T, T], with what the buffers say of heads."""
        return scores

    def forward(self, x: Tensor) -> Tensor:
        qkv = nn.functional.linear(x, self.qkv.weight, self.joined())
        q, k, v = qkv.reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.scores(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))


class JoinedBias(Attention):
    """The bias of keys is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_bias, self.v_bias = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))
        self.register_buffer("k_bias", torch.rand(DIM), persistent=False)

    def joined(self) -> Tensor:
        return torch.cat((self.q_bias, self.k_bias, self.v_bias))


class Slopes(Attention):
    """Each head has a slope of its own, by which distance counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(HEADS))

    def scores(self, scores: Tensor) -> Tensor:
        place = torch.arange(scores.shape[-1], device=scores.device)
        return scores - self.slopes.view(-1, 1, 1) * (place[:, None] - place).abs()


class Table(Attention):
    """A constant of every pair of places, for each head; and a mask of all heads, which has no dim of heads to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(1, HEADS, LENGTH, LENGTH))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def scores(self, scores: Tensor) -> Tensor:
        return (scores + self.table).masked_fill(~self.mask, float("-inf"))


class Counted(Slopes):
    """Forward writes to the slopes: a rank that wrote to its slice would lose it."""

    def scores(self, scores: Tensor) -> Tensor:
        self.slopes.mul_(0.5)
        return super().scores(scores)


class Renewed(Slopes):
    """Forward puts another tensor in the buffer's place."""

    def scores(self, scores: Tensor) -> Tensor:
        found = super().scores(scores)
        self.slopes = self.slopes * 0.5
        return found


class Seen(Attention):
    """Forward keeps the mean of what the columns of a weight give: on slices, a rank would keep those of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.register_buffer("seen_table", torch.zeros(4 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        raised = self.up(super().forward(x))
        self.seen_table = raised.detach().mean((0, 1))
        return self.down(raised.relu())


class Averaged(Seen):
    """The same, over steps."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen_table
        found = super().forward(x)
        self.seen_table = 0.9 * before + 0.1 * self.seen_table
        return found


class Remembered(Seen):
    """What forward keeps in a plain attribute, the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        raised = self.up(Attention.forward(self, x))
        scale = 1 + self.last.mean()
        self.last = raised.detach().mean((0, 1))
        return self.down(raised.relu()) * scale


class Begun(Remembered):
    """The first forward has none."""

    def __init__(self) -> None:
        super().__init__()
        del self.last

    def forward(self, x: Tensor) -> Tensor:
        raised = self.up(Attention.forward(self, x))
        scale = 1 + self.last.mean() if hasattr(self, "last") else 1
        self.last = raised.detach().mean((0, 1))
        return self.down(raised.relu()) * scale


class Viewed(Slopes):
    """Forward writes to a view of the buffer."""

    def scores(self, scores: Tensor) -> Tensor:
        self.slopes.view(-1)[:1].add_(1.0)
        return super().scores(scores)


def around(attention: type[Attention]) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, DIM), attention(), attention(), nn.Linear(DIM, VOCAB))


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("input", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def planned(attention: type[Attention], tp: int, **options: object) -> Plan:
    """A plan at a batch of one and an odd length, where nothing but heads divides."""
    build = functools.partial(around, attention)
    return solve_eagerly(build, text, loss=loss, batch=1, seq_len=LENGTH, tp=tp, precision="fp32", **options)


def stepped(
    build: Callable[[], nn.Module], plan: Plan | None, batch: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """Losses of two steps, gradients, buffers by name, and the FLOPs of products of two activations in the second."""
    torch.manual_seed(0)
    model, inputs = build(), text(batch, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    losses = []
    counted = Products()
    for _ in range(2):
        model.zero_grad()
        with counted:
            value = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
        value.backward()
        losses.append(value.item())
    buffers = {name: value for name, value in model.state_dict().items() if "slopes" in name or "table" in name}
    return losses, gradients(model), buffers, counted.elements


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of batched products, which only attention has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.elements += found.numel()
        return found


def same_on_ranks(attention: type[Attention], plan: Plan, batch: int = 1) -> list[float]:
    """Holds real ranks against one process. Gives each rank's share of attention's products."""
    build = functools.partial(around, attention)
    losses, expected, buffers, whole = stepped(build, None, batch)
    shares = []
    for found in run_ranks(plan.mesh.tp, stepped, build, plan, batch):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert max(relative_errors(found[1], expected).values()) < 1e-4
        assert found[2].keys() == buffers.keys()
        assert all(torch.allclose(found[2][name], value, atol=1e-6) for name, value in buffers.items())
        shares.append(found[3] / whole)
    return shares


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("attention", "buffer", "layout"),
    [(JoinedBias, "k_bias", S(0)), (Slopes, "slopes", S(0)), (Table, "table", S(1))],
)
def test_attention_with_a_buffer_of_heads_is_divided(
    attention: type[Attention], buffer: str, layout: object, tp: int
) -> None:
    plan = planned(attention, tp)
    assert {name: set(own.reads.values()) for name, own in plan.buffer_plans().items()} == {
        f"{layer}.{buffer}": {layout} for layer in (1, 2)
    }
    for batch in (1, 3):
        assert same_on_ranks(attention, plan, batch) == [1 / tp] * tp


@pytest.mark.parametrize("attention", [Counted, Renewed, Viewed])
def test_a_buffer_that_forward_changes_is_read_whole(attention: type[Attention]) -> None:
    plan = planned(attention, 2)
    assert plan.buffers is None
    same_on_ranks(attention, plan)


def test_what_forward_keeps_in_an_attribute_for_the_next_is_whole() -> None:
    plan = planned(Remembered, 2, pins={"*": "megatron"})
    assert plan.parameters["*.up.weight"].placement == S(0)
    same_on_ranks(Remembered, plan)


def test_a_module_whose_next_forward_runs_other_code_for_what_it_has_kept_runs_whole() -> None:
    plan = planned(Begun, 2)
    (reason,) = {own.reason for own in (plan.opaque or {}).values()}
    assert "the forward keeps a tensor at 1.last, which the next forward reads and the first one does not" in reason
    same_on_ranks(Begun, plan)


@pytest.mark.parametrize("attention", [Seen, Averaged])
def test_what_forward_puts_in_a_buffers_place_is_whole(attention: type[Attention]) -> None:
    plan = planned(attention, 2, pins={"*": "megatron"})
    assert plan.parameters["*.up.weight"].placement == S(0)
    assert plan.buffers is None
    same_on_ranks(attention, plan)


@pytest.mark.parametrize(
    ("attention", "reads", "problem"),
    [
        (Slopes, {"*": R}, "reads .*; its rule allows"),
        (Slopes, {"*": S(1)}, r"cannot be read as S\(1\)"),
        (Slopes, {"*": P}, "cannot be read as P"),
        (Slopes, {"*": S(0), "0": S(0)}, "0 reads it in the plan or in the model, and not in both"),
        (Counted, {"*": S(0)}, "an op may write to it"),
        (Viewed, {"*": S(0)}, "an op may write to it"),
        (Renewed, {"*": S(0)}, "an op may write to it"),
    ],
)
def test_a_plan_that_reads_a_buffer_wrong_is_refused(
    attention: type[Attention], reads: dict[str, Layout], problem: str
) -> None:
    plan = planned(attention, 2)
    edited = replace(plan, buffers={"*.slopes": BufferPlan(reads=reads, shape=(HEADS,))})
    with pytest.raises(VerificationError, match=problem):
        prove_plan(edited, functools.partial(around, attention), text, loss=loss)


def test_a_plan_for_another_buffer_is_refused() -> None:
    plan, wider = planned(Slopes, 2), around(Slopes)
    for layer in (wider[1], wider[2]):
        layer.slopes = torch.rand(2 * HEADS)
    with pytest.raises(RankError, match=r"buffer 1.slopes: the plan is for shape \[4\], and the model has shape \[8\]"):
        run_ranks(2, lambda: tpplan.apply_plan(wider, plan))
    with pytest.raises(ExportError, match=r"buffer 1.slopes: a module reads this rank's slice of it"):
        tpplan.export(plan, functools.partial(around, Slopes), text, loss=loss)


def test_a_plan_with_buffers_is_read_as_it_was_written() -> None:
    plan = planned(Slopes, 2)
    assert plan.buffers
    assert Plan.from_dict(plan.to_dict()) == plan
    assert prove_plan(plan, functools.partial(around, Slopes), text, loss=loss)


class Lending(nn.Module):
    """Its layers hold one buffer, each under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Slopes() for _ in range(3))
        for layer in self.layers:
            layer.slopes = self.layers[0].slopes

    def forward(self, input: Tensor) -> Tensor:
        x = self.embedding(input)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_buffer_that_layers_share_is_one_and_read_whole() -> None:
    plan = solve_eagerly(Lending, text, loss=loss, batch=1, seq_len=LENGTH, tp=2, precision="fp32")
    assert plan.buffers is None
    losses, expected, *_ = stepped(Lending, None, 1)
    for found in run_ranks(2, stepped, Lending, plan, 1):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert max(relative_errors(found[1], expected).values()) < 1e-4

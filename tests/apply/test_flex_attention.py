"""torch's flex_attention, divided by heads where no function of it tells heads apart, on ranks against one process."""

from collections.abc import Callable

import pytest
import torch
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tpplan
from tpplan.core.layout import S
from tpplan.layouts.rules.attention import FLEX_ATTENTION
from tpplan.plan.plan import Plan
from tpplan.torch_internals.fakes import flex_attention_anywhere
from tpplan.trace.trace import trace

DIM, VOCAB, HEADS, LENGTH, BATCH = 32, 64, 4, 7, 2


class Attending(nn.Module):
    """Queries of HEADS heads and keys and values of fewer, around a flex_attention that subclasses call."""

    def __init__(self, num_key_heads: int = HEADS) -> None:
        super().__init__()
        size = DIM // HEADS
        self.to_q, self.to_out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.to_k, self.to_v = nn.Linear(DIM, num_key_heads * size), nn.Linear(DIM, num_key_heads * size)
        self.bias, self.slopes = nn.Parameter(torch.rand(LENGTH, LENGTH)), nn.Buffer(torch.rand(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.to_q, self.to_k, self.to_v)
        split = (layer(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in layers)
        return self.to_out(self.attend(x, *split).transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value)


compiled_attention = torch.compile(flex_attention, backend="eager")


class Compiled(Attending):
    """As users call it: compiled by itself."""

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled_attention(query, key, value)


class Causal(Attending):
    """A mask of blocks made in the forward, and fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__(2)

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device=x.device)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


class Biased(Attending):
    """A learned bias by positions, and a mask that differs along the batch, which positive features decide."""

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen, bias = x.detach().mean(-1) > -1.0, self.bias
        mask = create_block_mask(lambda b, h, i, j: seen[b, j], len(x), None, x.shape[1], x.shape[1], device=x.device)
        return flex_attention(query, key, value, lambda score, b, h, i, j: score + bias[i, j], mask)


class Sloped(Attending):
    """A bias that differs by head, and along the batch."""

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slopes = self.slopes
        return flex_attention(query, key, value, lambda score, b, h, i, j: score + slopes[h] * (j - i + b))


def around(attention: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(VOCAB, DIM), attention(), nn.Linear(DIM, VOCAB))


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("input", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(build: Callable[[], nn.Module], **options: object) -> Plan:
    return solve_eagerly(build, text, loss=loss, batch=BATCH, seq_len=LENGTH, **options)


def loss_and_gradients(build: Callable[[], nn.Module], plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), text(BATCH, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    with flex_attention_anywhere():
        found = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
        found.backward()
    return found.item(), gradients(model)


def check_ranks(build: Callable[[], nn.Module], plan: Plan) -> None:
    trained, expected = loss_and_gradients(build, None)
    for found, gradients_found in run_ranks(2, loss_and_gradients, build, plan):
        assert found == pytest.approx(trained, rel=1e-5)
        assert max(relative_errors(gradients_found, expected).values()) < 1e-4


@pytest.mark.parametrize("attention", [Compiled, Causal, Biased])
def test_flex_attention_is_divided_by_heads(attention: Callable[[], nn.Module]) -> None:
    build = around(attention)
    plan = solved(build, pins={"1.to_q": "columns", "1.to_out": "rows"})
    assert plan.parameters["1.to_q.weight"].placement == S(0)
    assert plan.parameters["1.to_out.weight"].placement == S(1)
    assert any("flex_attention is priced as full attention" in note for note in plan.notes or ())
    check_ranks(build, plan)


def test_a_function_that_names_head_and_batch_keeps_attention_whole() -> None:
    build = around(Sloped)
    plan = solved(build)
    assert plan.tp_shares is not None
    assert "whose functions or mask name the batch and the head" in str(plan.tp_shares.modules["1"].reason)
    check_ranks(build, plan)


def written_into(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    changed = torch.zeros_like(score)
    changed[...] = h
    return score + changed * (j - i)


def written_through_a_view(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    changed = torch.zeros_like(h)
    changed.view(()).copy_(h)
    return score + changed * (j - i)


def largest(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + torch.stack([h, i]).max(0).values


#: functions whose result depends on the head, by ways around an operator that takes it and returns one tensor
HIDDEN: tuple[Callable[..., Tensor], ...] = (
    lambda score, b, h, i, j: score + torch.stack([h, h]).unbind()[0] * (j - i),
    lambda score, b, h, i, j: score + score.new_tensor(h) * (j - i),
    lambda score, b, h, i, j: score + torch.stack([h, h]).chunk(2)[1].reshape(()),
    lambda score, b, h, i, j: score + torch.broadcast_tensors(h, i)[0] * (j - i),
    lambda score, b, h, i, j: score + torch.mul(h, (j - i).float(), out=torch.zeros_like(score)),
    largest,
    written_into,
    written_through_a_view,
)


@pytest.mark.parametrize("function", HIDDEN)
def test_a_function_that_hides_the_head_is_not_divided_by_heads(function: Callable[..., Tensor]) -> None:
    class Hiding(Attending):
        def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flex_attention(query, key, value, function)

    with torch.device("meta"):
        graph = trace(around(Hiding)(), {"input": torch.zeros(BATCH, LENGTH, dtype=torch.long)})
    (op,) = (op for op in graph.ops if op.target == FLEX_ATTENTION)
    assert op.args[6] is False

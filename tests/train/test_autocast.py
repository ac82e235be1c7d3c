"""The precision bf16-autocast: traced and priced as what runs, and on ranks the loss and gradients of one process."""

import pytest
import torch
import torch.nn.functional as F
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.layout import S
from tpplan.plan.plan import Plan
from tpplan.trace.answers.autocast import autocast_on

DIM, VOCAB, HEADS, LENGTH = 32, 64, 4, 7


class Layer(nn.Module):
    """Attention and a layer of two products, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in self.qkv)
        scores = (q @ k.transpose(-2, -1) / 3.0).softmax(-1)
        x = x + self.out((scores.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, DIM), Layer(), Layer(), nn.Linear(DIM, VOCAB))


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("input", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(precision: str, pins: dict[str, str] | None = None) -> Plan:
    return solve_eagerly(build, text, loss=loss, batch=1, seq_len=LENGTH, precision=precision, pins=pins)


def ran(plan: Plan, *, is_applied: bool) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = build(), text(1, LENGTH)
    if is_applied:
        model = tpplan.apply_plan(model, plan)
    with tpplan.autocast_of(plan, "cpu"):
        value = loss(model(inputs["input"]), inputs)
    value.backward()
    return value.item(), gradients(model)


def test_a_plan_in_autocast_equals_one_process_under_autocast() -> None:
    plan, in_float32 = solved("bf16-autocast"), solved("fp32")
    assert plan.parameter_plans()["1.up.weight"].placement == S(0)
    assert plan.parameter_plans()["1.up.weight"].dtype == "float32"
    dtypes = {own.dtype for b in plan.boundaries.values() for own in (*b.inputs.values(), *b.outputs.values())}
    assert "bfloat16" in dtypes
    assert plan.predicted.step_time_s != in_float32.predicted.step_time_s
    value, expected = ran(plan, is_applied=False)
    for found, applied in run_ranks(2, lambda: ran(plan, is_applied=True)):
        assert found == pytest.approx(value, rel=1e-2)
        assert all(gradient.dtype == torch.float32 for gradient in applied.values())
        errors = relative_errors(applied, expected)
        # A bias of keys changes no softmax: its gradient is rounding alone.
        assert max(error for name, error in errors.items() if "qkv.1.bias" not in name) < 0.03


def test_pins_hold_for_weights_that_autocast_casts() -> None:
    plan = solved("bf16-autocast", {"1.up": "rows", "2.up": "split dim 0", "2.down": "columns"}).parameter_plans()
    assert [plan[f"{name}.weight"].placement for name in ("1.up", "2.up", "2.down")] == [S(1), S(0), S(0)]


CALLS = {
    "linear": lambda x, y: F.linear(x, y),
    "matmul": lambda x, y: x @ y.T,
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
    "norm": lambda x, y: F.layer_norm(F.linear(x, y), (4,)),
    "softmax": lambda x, y: F.linear(x, y).softmax(-1),
    "sum": lambda x, y: F.linear(x, y).sum(),
    "loss": lambda x, y: F.cross_entropy(F.linear(x, y), torch.zeros(4, dtype=torch.int64, device=x.device)),
    "squares": lambda x, y: F.mse_loss(F.linear(x, y), F.linear(y, x)),
    "added": lambda x, y: F.linear(x, y) + x,
    "power": lambda x, y: F.linear(x, y) ** 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_trace_casts_as_autocast_does_on_a_cpu(name: str) -> None:
    given = torch.rand(4, 4), torch.rand(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = CALLS[name](*given).dtype
    with autocast_on("cpu"):
        assert CALLS[name](*(x.to("meta") for x in given)).dtype == expected

"""Masks with a row for each head of each sample, [B * H, T, J], where attention is divided by heads: proven, and equal
to one process."""

import pytest
import torch
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.layout import S, parse_conversion, parse_layout
from tpplan.plan.plan import Plan, ProofStatus

#: B batch, T sequence, D model, H heads
BATCH, LENGTH, DIM, HEADS = 4, 8, 32, 4


class Masked(nn.Module):
    """torch's attention with a mask that its caller makes in some form: x [B, T, D] -> []."""

    def __init__(self, form: str, need_weights: bool = False) -> None:
        super().__init__()
        self.form, self.need_weights = form, need_weights
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def mask(self, seen: Tensor) -> Tensor:
        """[B, T, J] -> [B * H, T, J]."""
        match self.form:
            case "repeat_interleave":
                return torch.repeat_interleave(seen, HEADS, 0)
            case "expand":
                return seen[:, None].expand(-1, HEADS, -1, -1).reshape(-1, *seen.shape[1:])
            case "repeat":
                return seen.repeat(HEADS, 1, 1)
            case "stack":
                return torch.stack([seen * (1 + head) for head in range(HEADS)], 1).flatten(0, 1)
            case _:
                return seen.repeat_interleave(HEADS, 0) < -1

    def forward(self, x: Tensor) -> Tensor:
        seen = (x[..., :1] > 0).mT | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        mask = self.mask(torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -9.0))
        found, _ = self.attention(x, x, x, attn_mask=mask, need_weights=self.need_weights)
        return found.square().mean()


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1))}


def step(form: str, need_weights: bool, batch: int, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients."""
    torch.manual_seed(0)
    model: nn.Module = Masked(form, need_weights)
    model = model if plan is None else tpplan.apply_plan(model, plan)
    loss = model(**inputs(batch, LENGTH))
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("form", ["repeat_interleave", "expand", "repeat", "stack", "booleans"])
def test_attention_with_a_mask_of_each_head_is_divided_by_heads(form: str, tp: int) -> None:
    need_weights = form == "stack"
    plan = solve_eagerly(
        lambda: Masked(form, need_weights),
        inputs,
        batch=BATCH,
        seq_len=LENGTH,
        tp=tp,
        pins={"attention": "megatron"},
    )
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.parameter_plans()["attention.out_proj.weight"].placement == S(1)
    # Torch 2.11 views such masks by a number like the batch, so that the plan holds for the planned one alone.
    for batch in (BATCH,) if torch.__version__.startswith("2.11.") else (BATCH, 2):
        loss, expected = step(form, need_weights, batch, None)
        for own_loss, own in run_ranks(tp, step, form, need_weights, batch, plan):
            assert own_loss == pytest.approx(loss, rel=1e-5)
            assert max(relative_errors(own, expected).values()) < 1e-5


def test_a_plan_names_the_size_of_the_parts_of_which_the_batch_tells_the_number() -> None:
    conversion = parse_conversion("R -> S(0; each 4)")
    assert str(conversion) == "R -> S(0; each 4)"
    assert conversion.of((12, 8)).target == S(0, 4, 4, 4)
    assert conversion.of((4, 8)).target == S(0)
    assert not parse_layout("S(0; each 4)").is_plain

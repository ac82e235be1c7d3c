"""What a plan says tensor parallelism divides: shares against formulas, and the reason of what stays whole against
models made to have one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import InfeasibleError
from tpplan.plan.plan import Plan
from tpplan.plan.report import render
from tpplan.verify.prove_plan import prove_plan

BATCH, WIDTH, HIDDEN = 6, 32, 128


class Up(nn.Module):
    """Two products with an activation between: 3 x 2 x BATCH x WIDTH x HIDDEN FLOP each, forward and backward."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.relu(self.up(x))))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class Model(nn.Module):
    """A block that a test is about behind one that is always divided."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = Up()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x)).pow(2).mean()


def solved(block: nn.Module, *, tp: int = 2, pins: Mapping[str, str] | None = None, **links: float) -> Plan:
    """The plan on tp ranks of a machine on which sharding pays unless `links` are slow."""
    return tpplan.solve(
        lambda: Model(block),
        inputs,
        cluster=tpplan.Cluster(gpus=tp, gpus_per_node=tp, profile=eager_to_shard(**links)),
        global_batch=BATCH,
        micro_batch=BATCH,
        tp=tp,
        precision="fp32",
        pins=pins or {},
    )


def inputs(batch: int) -> dict[str, Tensor]:
    """Samples without a length."""
    return {"x": torch.zeros(batch, WIDTH)}


def shares_of(plan: Plan) -> Any:
    assert plan.tp_shares is not None
    return plan.tp_shares


class Returning(Model):
    """Returns a cache beside the loss."""

    def forward(self, x: Tensor) -> Any:
        cache = self.block(self.first(x))
        return {"loss": cache.pow(2).mean(), "cache": cache}


def test_what_a_model_returns_beside_its_loss_is_noted_as_whole() -> None:
    """BATCH x WIDTH float32 numbers; nothing is said where the output is declared unused, or nothing is split."""

    def notes(tp: int, unused: tuple[str, ...] = ()) -> tuple[str, ...]:
        plan = tpplan.solve(
            lambda: Returning(Up()),
            inputs,
            cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
            global_batch=BATCH,
            tp=tp,
            precision="fp32",
            unused_outputs=unused,
            prove=False,
        )
        return plan.notes or ()

    (note,) = notes(2)
    assert note.startswith(f"the model returns cache: {BATCH * WIDTH * 4} B for a micro-batch, whole on every rank")
    assert not notes(2, ("cache",))
    assert not notes(1)


def test_a_block_that_a_pin_keeps_whole_is_its_part_of_the_flops() -> None:
    plan = solved(Up(), pins={"block": "replicated"})
    shares = shares_of(plan)
    # the first layer of all has no gradient for its input: 2 products instead of 3
    products = {"first.up": 2, "first.down": 3, "block.up": 3, "block.down": 3}
    whole = sum(products.values())
    assert shares.flops_share == pytest.approx(5 / whole)
    assert {name: own.flops_share for name, own in shares.modules.items() if own.flops_share} == pytest.approx(
        {name: count / whole for name, count in products.items()}
    )
    assert shares.parameters_share == pytest.approx(0.5, abs=0.01)
    assert shares.modules["first.up"].reason is None
    assert shares.modules["block.up"].reason == "the pin 'block=replicated' stands against it"
    text = " ".join(render(plan, width=200).split())
    assert "tp divides 45 % of FLOPs, 50 % of parameters" in text
    assert "not divided block.up: 27 % of FLOPs, " in text
    assert "6 samples = micro-batch 6" in text
    assert "samples/s" in text
    assert Plan.from_dict(plan.to_dict()) == plan


def test_on_one_rank_nothing_is_said_of_tp() -> None:
    plan = solved(Up(), tp=1)
    assert plan.tp_shares is None
    assert "tp divides" not in render(plan)


def test_all_is_divided_where_all_can_be() -> None:
    shares = shares_of(solved(Up()))
    assert shares.flops_share == 1.0
    assert not list(shares.listed(1.0))


class Turned(Up):
    """Up, whose hidden values are looked at the other way round: views, which run no kernel."""

    def between(self, hidden: Tensor) -> Tensor:
        turned = hidden.transpose(0, 1)
        return (turned * 2 + F.relu(turned)).transpose(0, 1)


def test_a_view_is_not_said_to_run_whole() -> None:
    """Although its gradients are added, which takes time: of slices, too."""
    assert "block" not in shares_of(solved(Turned(), pins={"block": "megatron"})).modules


def test_what_is_faster_whole_says_by_how_much() -> None:
    plan = solved(Up(), intra_bytes_per_s=1e3, latency_s=1.0)
    assert shares_of(plan).flops_share < 1
    reasons = [own.reason for _, own in shares_of(plan).listed(plan.predicted.step_time_s)]
    assert reasons
    assert all(
        reason.startswith("faster so by the prices: divided, a step takes at least ") for reason in reasons if reason
    )


class Cumulated(nn.Module):
    """An op without a rule between products."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logcumsumexp(x[:, :, None] * self.cell(x)[:, None, :], -1).sum(-1)


class ByValues(Up):
    """Code that looks at values, which a trace does not have."""

    def between(self, hidden: Tensor) -> Tensor:
        self.seen = len(hidden.argmax(-1, keepdim=True).tolist())
        return hidden


class Checked(Up):
    """Code that counts the elements of all that it sees: counts, other than shapes, are not told as of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up.weight, self.down.weight
        hidden = x @ up.T
        if [seen.numel() for seen in (x, hidden, up, down)] != [
            BATCH * WIDTH,
            BATCH * HIDDEN,
            HIDDEN * WIDTH,
            WIDTH * HIDDEN,
        ]:
            raise ValueError("other sizes than written")
        return torch.relu(hidden) @ down.T


@pytest.mark.parametrize(
    ("block", "module", "reason"),
    [
        (Cumulated, "block", "no rule for aten.logcumsumexp.default in block (of ["),
        (ByValues, "block", "its code runs whole: the code asks a tensor for its values"),
        (Checked, "block", "other sizes than written"),
    ],
)
def test_what_cannot_be_divided_says_why_and_where(block: type[nn.Module], module: str, reason: str) -> None:
    plan = solved(block())
    said = shares_of(plan).modules[module].reason
    assert reason in said
    assert "test_tp_shares.py:" in said


def test_sizes_that_do_not_divide_are_named() -> None:
    """A batch of 7 samples and widths of 33 and 35, on 2 ranks."""
    plan = tpplan.solve(
        lambda: nn.Sequential(nn.Linear(33, 35), Mean()),
        lambda batch: (torch.zeros(batch, 33),),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=7,
        micro_batch=7,
        tp=2,
        precision="fp32",
    )
    reason = shares_of(plan).modules["0"].reason
    assert reason == "its sizes cannot be cut into 2: aten.linear.default in 0 (of [7, 33], [35, 33], [35])"


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_pin_that_cannot_be_kept_names_what_stands_against_it() -> None:
    with pytest.raises(InfeasibleError, match=r"'block=replicated' cannot be kept: the pin 'block.up=column parallel'"):
        solved(Up(), pins={"block.up": "columns", "block": "replicated"})
    with pytest.raises(InfeasibleError, match=r"no layout to aten.linear.default in block.up \(of \[6, 32\], "):
        solved(Up(hidden=129), pins={"block.up": "columns"})


def test_a_plan_that_is_edited_and_proven_again_is_counted_again() -> None:
    whole, divided = solved(Up(), pins={"block": "replicated"}), solved(Up())
    assert shares_of(prove_plan(whole, lambda: Model(Up()), inputs).plan) == shares_of(whole)
    data = divided.to_dict() | {"tp_shares": whole.to_dict()["tp_shares"]}
    assert shares_of(prove_plan(Plan.from_dict(data), lambda: Model(Up()), inputs).plan).flops_share == 1.0


class OneHead(nn.Module):
    """Causal attention of rows that takes another path where it sees one head alone: x [B, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).view(1, len(x), -1, WIDTH // 4).transpose(1, 2) for own in (self.q, self.k, self.v))
        if q[:, :, 0, 0].numel() == 1:
            found = F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], is_causal=True).unsqueeze(1)
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(len(x), WIDTH))


def test_where_one_head_would_be_left_a_smaller_degree_is_named_as_what_helps() -> None:
    reason = shares_of(solved(OneHead(), tp=4)).modules["block"].reason
    assert "became aten.select.int" in reason
    assert "at test_tp_shares.py:" in reason
    assert "a rank would have 1 of 4, for which code may take another path: a smaller tp leaves more" in reason
    assert shares_of(solved(OneHead(), tp=2)).modules["block"].reason is None

"""Attention as libraries write it, divided by heads: every size in code, packed weights, weights read from outside."""

import functools
from collections.abc import Callable

import pytest
import torch
from examples import solve_eagerly
from one_process import gradients, relative_errors
from ranks import RankError, run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.apply.modules.dropout_rng import WithoutDropout
from tpplan.core.layout import Layout, S
from tpplan.plan.plan import Plan

DIM, VOCAB, HEADS, LENGTH, BATCH = 32, 64, 4, 7, 2
PACKED = S(0, DIM, DIM, DIM)


class Attending(nn.Module):
    """torch's attention: of tokens to themselves, from one packed weight, or to others, which splits the weight."""

    def __init__(self, *, to_others: bool, **options: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.to_others, self.options = to_others, options

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        others = x.roll(1, 1) if self.to_others else x
        return self.head(x + self.attention(x, others, others, **self.options)[0])


def encoder() -> nn.Module:
    """torch's own encoder, which in evaluation hands all weights of a layer to one kernel."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCAB, DIM), encoder, nn.Linear(DIM, VOCAB))


class Processor:
    """Attention's code outside of the module, as a user may replace it; the size of a head follows from a slice."""

    def __call__(self, attention: "Processed", x: Tensor) -> Tensor:
        query, key, value = attention.to_q(x), attention.to_k(x), attention.to_v(x)
        size = key.shape[-1] // attention.heads
        query, key, value = (t.view(len(x), -1, attention.heads, size).transpose(1, 2) for t in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return attention.to_out(attended.transpose(1, 2).reshape(len(x), -1, attention.heads * size))


class Processed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.heads, self.processor = HEADS, Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class JoinedBias(nn.Module):
    """A packed weight with a bias that is joined from parts; the size of a head is what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.q_bias, self.v_bias = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = nn.functional.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))


class Joint(Processed):
    """Attends to what it is given and to a second stream, and takes the first apart by the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.to_second, self.inner_dim = nn.Linear(DIM, DIM), DIM

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat((self.to_q(x), self.to_second(x)), dim=1)
        size = joined.shape[-1] // self.heads
        query, key = (t.view(len(t), -1, self.heads, size).transpose(1, 2) for t in (joined, self.to_k(x)))
        value = self.to_v(x).view(len(x), -1, self.heads, size).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        attended = attended.transpose(1, 2).reshape(len(x), -1, self.heads * size)
        first, second = attended[:, : x.shape[1]], attended[:, x.shape[1] :]
        return self.to_out(first) + self.to_out(second)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Joint()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def around(attention: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(VOCAB, DIM), attention(), nn.Linear(DIM, VOCAB))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "to itself": (lambda: Attending(to_others=False, need_weights=False), "attention"),
    "to others": (lambda: Attending(to_others=True, need_weights=False), "attention"),
    "with weights": (lambda: Attending(to_others=False), "attention"),
    "in an encoder": (encoder, "1.layers.*.self_attn"),
}


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("tokens", "input", "targets")
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in names}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def losses_and_gradients(
    build: Callable[[], nn.Module], plan: Plan | None, batch: int
) -> tuple[float, float, dict[str, Tensor]]:
    """Losses in training and in evaluation, and gradients."""
    torch.manual_seed(0)
    model, inputs = build(), text(batch, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    given = tpplan.forward_inputs(model, inputs)
    trained = loss(model(**given), inputs)
    trained.backward()
    model.eval()
    with torch.no_grad():
        return trained.item(), loss(model(**given), inputs).item(), gradients(model)


def by_heads(build: Callable[[], nn.Module], tp: int, batch: int = 1, **options: object) -> Plan:
    """A plan; at a batch of one and an odd length nothing but heads divides."""
    return solve_eagerly(build, text, loss=loss, batch=batch, **({"seq_len": LENGTH} | options), tp=tp)


@pytest.mark.parametrize(("name", "tp"), [*((name, 2) for name in MODELS), ("with weights", 4)])
def test_torchs_attention_is_divided_by_heads(name: str, tp: int) -> None:
    build, module = MODELS[name]
    plan = by_heads(build, tp, BATCH, pins={module: "megatron"})
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert read[f"{module}.in_proj_weight"] == PACKED
    assert read[f"{module}.out_proj.weight"] == S(1)
    assert plan.proof.other_shapes is not None
    assert plan.proof.other_shapes.batch.multiple
    for batch in (BATCH, 3 * BATCH):
        trained, evaluated, expected = losses_and_gradients(build, None, batch)
        for found in run_ranks(tp, losses_and_gradients, build, plan, batch):
            assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
            assert max(relative_errors(found[2], expected).values()) < 1e-4


class Dropping(nn.Module):
    """torch's attention between embedding and head, dropping half of the weights of each head."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.5, batch_first=True)
        self.need_weights = need_weights

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=self.need_weights)[0])


def heads_of_equal_inputs(build: Callable[[], nn.Module], plan: Plan) -> Tensor:
    """What each head gives, [B, T, H, E], where all would give the same without dropout."""
    torch.manual_seed(0)
    model = build()
    seen: list[Tensor] = []
    with torch.no_grad():
        size = DIM // HEADS
        packed = model.attention.in_proj_weight.view(3, HEADS, size, DIM)
        packed.copy_(packed[:, :1].clone().expand_as(packed))
        model.attention.out_proj.weight.copy_(torch.eye(DIM))
    model = tpplan.apply_plan(model, plan)
    model.attention.register_forward_hook(lambda module, args, output: seen.append(output[0].detach()))
    model(**tpplan.forward_inputs(model, text(BATCH, LENGTH)))
    return seen[0].unflatten(-1, (HEADS, size))


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_attention_drops_other_weights_in_each_head(need_weights: bool) -> None:
    build = functools.partial(Dropping, need_weights=need_weights)
    plan = by_heads(build, 2, BATCH, pins={"attention": "megatron"})
    assert plan.parameters["attention.out_proj.weight"].placement == S(1)
    assert plan.draws == ("attention",)
    for heads in run_ranks(2, heads_of_equal_inputs, build, plan):
        for i in range(HEADS):
            assert all(not torch.equal(heads[:, :, i], heads[:, :, j]) for j in range(i))


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_inside_torchs_attention_is_turned_off(need_weights: bool) -> None:
    model, tokens = Dropping(need_weights=need_weights), text(BATCH, LENGTH)["tokens"]
    with WithoutDropout():
        found = model(tokens)
    assert torch.allclose(found, model.eval()(tokens), atol=1e-6)


def without_dropout(build: Callable[[], nn.Module], plan: Plan | None) -> tuple[float, float, dict[str, Tensor]]:
    with WithoutDropout():
        return losses_and_gradients(build, plan, BATCH)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_inside_torchs_attention_is_turned_off_on_ranks(need_weights: bool) -> None:
    build = functools.partial(Dropping, need_weights=need_weights)
    plan = by_heads(build, 2, BATCH, pins={"attention": "megatron"})
    *losses, expected = without_dropout(build, None)
    assert losses[0] == pytest.approx(losses[1])  # in training and in evaluation
    for *found, own in run_ranks(2, without_dropout, build, plan):
        assert found == pytest.approx(losses, rel=1e-5)
        assert max(relative_errors(own, expected).values()) < 1e-4


@pytest.mark.parametrize(
    ("attention", "sharded", "sizes"),
    [
        (Processed, {"1.to_q.weight": S(0), "1.to_out.weight": S(1)}, {"self.heads"}),
        (JoinedBias, {"1.qkv.weight": PACKED, "1.q_bias": S(0), "1.proj.weight": S(1)}, {"view"}),
    ],
)
def test_attention_whose_code_computes_with_sizes_is_divided_by_heads(
    attention: Callable[[], nn.Module], sharded: dict[str, Layout], sizes: set[str]
) -> None:
    build = around(attention)
    plan = by_heads(build, 2)
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert {name: read[name] for name in sharded} == sharded
    assert {size.call for size in plan.sizes["1"]} == sizes
    for batch in (1, 3):
        trained, evaluated, expected = losses_and_gradients(build, None, batch)
        for found in run_ranks(2, losses_and_gradients, build, plan, batch):
            assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
            assert max(relative_errors(found[2], expected).values()) < 1e-4


def test_code_that_cannot_run_on_slices_is_blamed_where_a_rank_comes_furthest() -> None:
    """The length of a slice of the sequence stands against it. The sizes of heads are mended by an attribute: tried
    with another one, the code differs there before it comes to the length."""
    plan = by_heads(around(Normed), 2, seq_len=2 * LENGTH)
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert {read[f"1.attention.to_{name}.weight"] for name in ("q", "k", "v", "second")} == {S(0)}
    assert read["1.attention.to_out.weight"] == S(1)
    assert ["aten.slice.Tensor in 1.attention: the number 14 became 7" in cut for cut in plan.proof.cuts] == [True]


class Twice(nn.Module):
    """Two attentions of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Processed(), Processed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def test_code_that_ran_as_it_must_keeps_its_sizes() -> None:
    """The first attention runs on slices of a sequence that is as long as there are heads; the second is divided by
    heads, and its code alone reads another number of them."""
    pins = {"1.first": "sequence", "1.second": "megatron"}
    plan = by_heads(around(Twice), 2, seq_len=HEADS, pins=pins)
    assert plan.proof.rounds == 1
    assert {name: {size.call for size in sizes} for name, sizes in plan.sizes.items()} == {"1.second": {"self.heads"}}


class Masked(nn.Module):
    """torch's attention with padded keys, whose mask torch gives a dim by unsqueeze where there is one head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def test_views_that_give_the_same_are_the_same() -> None:
    """With one head on a rank, and a batch of one, code takes another path to the same view."""
    build = around(Masked)
    plan = by_heads(build, HEADS, pins={"1.attention": "megatron"})
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert read["1.attention.in_proj_weight"] == PACKED
    trained, evaluated, expected = losses_and_gradients(build, None, 1)
    for found in run_ranks(HEADS, losses_and_gradients, build, plan, 1):
        assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
        assert max(relative_errors(found[2], expected).values()) < 1e-4


class Rows(nn.Module):
    """A module without weights that reads its input as rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class Shared(nn.Module):
    """One module is given both the whole stream and what attention gives, which by heads is a summand."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.rows = Processed(), Rows()

    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        stream = self.rows(x)
        return (stream.sigmoid() + self.rows(self.attention(x)).sigmoid()).unflatten(0, x.shape[:2])


def test_what_a_module_of_several_calls_is_given_is_converted_before_it() -> None:
    """It converts in all its calls or in none, and the stream is no summand."""
    plan = by_heads(around(Shared), 2, pins={"1.attention": "megatron"})
    read = {name: layout for name, p in plan.parameters.items() for layout in p.reads.values()}
    assert {read[f"1.attention.to_{name}.weight"] for name in ("q", "k", "v")} == {S(0)}
    assert read["1.attention.to_out.weight"] == S(1)


class Counting(Processed):
    """Counts its calls from the number of heads on, and doubles what it gives after three."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = HEADS

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < HEADS + 3 else 2.0)


def test_an_attribute_that_a_forward_sets_is_no_size() -> None:
    plan = by_heads(around(Counting), 2)
    assert "self.calls" not in {size.call for sizes in plan.sizes.values() for size in sizes}


def changed_between_steps(build: Callable[[], nn.Module], plan: Plan) -> None:
    model, inputs = tpplan.apply_plan(build(), plan), text(1, LENGTH)
    model(**tpplan.forward_inputs(model, inputs))
    model[1].heads = 2 * HEADS
    model(**tpplan.forward_inputs(model, inputs))


def test_an_attribute_that_is_another_later_raises() -> None:
    build = around(Processed)
    with pytest.raises(RankError, match=r"Processed\.heads is 8, and was 4 when the plan was made"):
        run_ranks(2, changed_between_steps, build, by_heads(build, 2))


def test_a_plan_refuses_a_model_with_another_attribute() -> None:
    plan = by_heads(around(Processed), 2)
    other = around(Processed)()
    other[1].heads = 2
    with pytest.raises(RankError, match=r"the plan was made for self.heads = 4, and here it is 2"):
        run_ranks(2, lambda: tpplan.apply_plan(other, plan))

"""Models written as people write them, not for us: fused and baked attention, tied heads, torch's own encoder, convs.

Each is solved for two ranks on a machine that is eager to shard, applied, and compared with one process.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard, solve_eagerly
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

import tpplan
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import LayoutKind, S
from tpplan.layouts.readings import reading_name
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan, ProofStatus

DIM, VOCAB, HEADS, LENGTH, BATCH = 32, 64, 4, 16, 2


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder: its attention reads out_proj's weight without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class Convolutions(nn.Module):
    """Batch norm, which no rule covers, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(images)))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


class FusedAttention(nn.Module):
    """Fused q, k, v and every size baked in."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.projection = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, dim // HEADS).transpose(1, 2) for part in self.qkv(x).split(DIM, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).contiguous().view(batch, length, dim))


class OwnLoss(nn.Module):
    """Computes its loss in its own forward, over a vocabulary written into the code, as Hugging Face's models do."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], num_classes: int = 16 * VOCAB) -> None:
        super().__init__()
        self.loss = loss
        self.embedding, self.up = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, num_classes, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.head(F.relu(self.up(self.embedding(tokens))))
        return {"loss": self.loss(logits.float(), targets), "logits": logits}


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch's": lambda z, y: F.cross_entropy(z.view(-1, 16 * VOCAB), y.view(-1)),
    "torch's module": lambda z, y: nn.CrossEntropyLoss(ignore_index=3)(z.flatten(0, 1), y.flatten()),
    "ours": tpplan.cross_entropy,
    "smoothed": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
}


def own_loss_plan(build: Callable[[], nn.Module]) -> Plan:
    return tpplan.solve(
        build,
        text,
        loss=lambda outputs, _: outputs["loss"],
        unused_outputs=("logits",),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        seq_len=LENGTH - 1,
        tp=2,
        precision="fp32",
        micro_batch=1,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_the_model_runs_on_a_sharded_vocabulary(loss: str) -> None:
    """Small targets all lie on the first rank: taken as classes of a slice they would be silently wrong."""

    def build() -> nn.Module:
        return OwnLoss(LOSSES[loss])

    def run_once(on: Plan | None) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = build() if on is None else tpplan.apply_plan(build(), on)
        value = model(**text(1, LENGTH - 1))["loss"]
        value.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        return value.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}

    plan = own_loss_plan(build)
    assert plan.losses == ({} if loss == "smoothed" else {"<root>": 16 * VOCAB})
    value, gradients = run_once(None)
    for applied_value, applied in run_ranks(2, run_once, plan):
        torch.testing.assert_close(applied_value, value)
        assert max(relative_errors(applied, gradients).values()) < 1e-5


def test_a_loss_on_a_whole_vocabulary_is_not_said_to_be_sharded() -> None:
    """An odd number of classes: the logits are whole on both ranks, or split along tokens."""
    plan = own_loss_plan(lambda: OwnLoss(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), 16 * VOCAB + 1))
    assert plan.losses == {}


class NanoGPT(nn.Module):
    """Positions from a length, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.attention = nn.ModuleList(FusedAttention() for _ in range(2))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for attention in self.attention:
            x = x + attention(x)
        return self.head(x + self.down(F.gelu(self.up(x))))


class OneBlock(nn.Module):
    """One block under three names, its layers called again and again, and a dropout that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([FeedForward(nn.Dropout(0.0))] * 3)
        self.closing = self.blocks[0]
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.closing(x))


class TwoKinds(nn.Module):
    """Layers of two kinds by turns, under one name: what stands in one place of both is not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        kinds = (lambda: FeedForward(nn.Dropout(0.0)), lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)))
        self.layers = nn.ModuleList(kinds[i % 2]() for i in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Reparametrized(nn.Module):
    """Weights computed from others by modules of torch's, which get them as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.up = parametrizations.weight_norm(nn.Linear(DIM, 4 * DIM))
        self.down = parametrizations.spectral_norm(nn.Linear(4 * DIM, DIM))
        self.convolution = parametrizations.weight_norm(nn.Conv1d(DIM, DIM, 3, padding=1, groups=2), dim=2)
        self.score = Score()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.score(self.head(x), self.head.bias)


class Score(nn.Module):
    """Is given a parameter of another module's, which that one reads too."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.tanh()


class Choosing(nn.Module):
    """What happens to a value depends on it; sizes of heads are written into the code, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.feed_forward = FeedForward(nn.Dropout(0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scale = x.square().mean()
        x = torch.cond(x.sum() > 0, lambda y: (y.sin() * scale).view(y.shape[0], -1, DIM), lambda y: y.cos(), (x,))
        heads = self.up(x).view(x.shape[0], -1, 4, DIM)
        x = x + self.down(F.gelu(heads).flatten(2))
        x = torch.cond(x.sum() < 0, lambda y: y.tanh(), lambda y: y * scale, (x,))
        return self.head(self.feed_forward(x))


class Experts(nn.Module):
    """A mixture of experts as it is first written: each gets the rows that are routed to it, and one gets none. Which
    rows are used in the end, the inputs say."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(FeedForward(nn.Dropout(0.0)) for _ in range(4))
        with torch.no_grad():
            self.router.bias[2] = -100

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        result = (x + result).view(*tokens.shape, DIM)
        return self.head(torch.where((tokens > 8)[..., None], result, 0.0) + result[tokens > 8].mean(0))


class FeedForward(nn.Module):
    """Up and down with a dropout between."""

    def __init__(self, dropout: nn.Dropout) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(DIM, 4 * DIM), dropout, nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x))))


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, seq_len), generator=generator) for name in ("tokens", "targets")}


def pictures(batch: int, seq_len: int) -> dict[str, Tensor]:
    del seq_len
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(VOCAB, (batch,), generator=generator)
    return {"images": torch.randn(batch, 3, 8, 8, generator=generator), "targets": targets}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def run(
    build: Callable[[], nn.Module], inputs: dict[str, Tensor], plan: Plan | None, is_compiled: bool = False
) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build()
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    forward = torch.compile(model, backend="aot_eager") if is_compiled else model
    value = loss(forward(**tpplan.forward_inputs(model, inputs)), inputs)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return value.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def solve_for_two(
    build: Callable[[], nn.Module], inputs: Callable[[int, int], dict[str, Tensor]], **options: object
) -> Plan:
    return solve_eagerly(build, inputs, loss=loss, batch=BATCH, seq_len=LENGTH, **options)


@pytest.mark.parametrize(
    ("build", "inputs", "sharded"),
    [
        (TorchEncoder, text, {"encoder.layers.*.linear1.weight", "encoder.layers.*.linear2.weight", "head.weight"}),
        (Convolutions, pictures, {"second.weight", "head.weight"}),
        (NanoGPT, text, {"up.weight", "down.weight", "embedding.weight"}),
        (OneBlock, text, {"blocks.0.up.weight", "blocks.0.down.weight"}),
        (TwoKinds, text, {"layers.0.up.weight", "layers.2.down.weight"}),
        (Choosing, text, {"up.weight", "down.weight", "feed_forward.up.weight", "head.weight"}),
        (Experts, text, {"experts.*.up.weight", "experts.*.down.weight", "head.weight"}),
        (Reparametrized, text, {f"up.parametrizations.weight.original{i}" for i in range(2)} | {"head.weight"}),
    ],
)
def test_plans_of_ordinary_models_equal_one_process(
    build: Callable[[], nn.Module], inputs: Callable[[int, int], dict[str, Tensor]], sharded: set[str]
) -> None:
    plan = solve_for_two(build, inputs)
    assert plan.proof.status is ProofStatus.PROVEN
    assert sharded <= {name for name, p in plan.parameters.items() if p.placement.kind is LayoutKind.SHARD}
    value, gradients = run(build, inputs(BATCH, LENGTH), None)
    for applied_value, applied in run_ranks(2, run, build, inputs(BATCH, LENGTH), plan):
        assert applied_value == pytest.approx(value, rel=1e-5)
        assert applied.keys() == gradients.keys()
        assert max(relative_errors(applied, gradients).values()) < 1e-4


def split_heads(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
    """Attention splits its heads: rows of queries, keys and values, then columns of what follows."""
    labels = {source.result: source.label for source in graph.parameters}
    wanted = {"qkv.weight": S(0, DIM, DIM, DIM), "projection.weight": S(1)}
    found = {
        reading_name(op, i): layout
        for op in graph.ops
        for i, operand in enumerate(op.operands)
        for name, layout in wanted.items()
        if labels.get(operand, "").endswith(name)
    }
    return lambda decision, strategy: decision not in found or strategy.results == (found[decision],)


@pytest.mark.long
@pytest.mark.slow
def test_sizes_and_fused_weights_under_torch_compile() -> None:
    plan = solve_for_two(NanoGPT, text, allows=split_heads)
    assert plan.sizes
    value, gradients = run(NanoGPT, text(BATCH, LENGTH), None)
    for applied_value, applied in run_ranks(2, run, NanoGPT, text(BATCH, LENGTH), plan, True, timeout_s=300):
        assert applied_value == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-4

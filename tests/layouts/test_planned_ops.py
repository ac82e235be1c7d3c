"""Ops that a plan must divide in whole models: planned on two ranks, proven, and equal to one process."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.layout import R_STAR, S
from tpplan.plan.plan import Plan, ProofStatus

#: B batch, T sequence, D model, H heads, E head size, F hidden
BATCH, LENGTH, DIM, HEADS, SIZE, HIDDEN, VOCABULARY = 4, 8, 16, 4, 8, 64, 64
Inputs = dict[str, Tensor]


def vectors(batch: int, length: int) -> Inputs:
    """The same random x [B, T, D] in each process."""
    return {"x": torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1))}


def tokens(batch: int, length: int) -> Inputs:
    """The same random ids [B, T] in each process, also as labels."""
    ids = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def solve(build: Callable[[], nn.Module], inputs: Callable[[int, int], Inputs], **options: object) -> Plan:
    """On two ranks that shard what they can."""
    return tpplan.solve(
        build,
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
        **options,  # type: ignore[arg-type]
    )


def step(build: Callable[[], nn.Module], inputs: Inputs, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients."""
    torch.manual_seed(0)
    model = build()
    model = model if plan is None else tpplan.apply_plan(model, plan)
    found = model(**inputs)
    loss = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    return loss.item(), gradients(model)


def assert_divided(
    build: Callable[[], nn.Module],
    inputs: Callable[[int, int], Inputs],
    sharded: Iterable[str],
    sizes: Iterable[tuple[int, int]] = ((BATCH, LENGTH),),
    **options: object,
) -> Plan:
    """The plan, which is proven, shards these parameters, and gives the loss and gradients of one process."""
    plan = solve(build, inputs, **options)
    assert plan.proof.status is ProofStatus.PROVEN
    placements = {name: own.placement for name, own in plan.parameter_plans().items()}
    assert not [name for name in sharded if placements[name].dim is None]
    for size in sizes:
        loss, expected = step(build, inputs(*size), None)
        for applied_loss, applied in run_ranks(2, step, build, inputs(*size), plan):
            assert applied_loss == pytest.approx(loss, rel=1e-5)
            assert applied.keys() == expected.keys()
            assert max(relative_errors(applied, expected).values()) < 1e-5
    return plan


class Written(nn.Module):
    """Attention whose keys are written into a new tensor: one half for each head, the other shared by all heads."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, HEADS * n * SIZE, bias=False) for n in (2, 1, 1))
        self.shared = nn.Linear(DIM, SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE, DIM, bias=False)

    def keys(self, own: Tensor, shared: Tensor) -> Tensor:
        """[B, H, T, E], [B, 1, T, E] -> [B, H, T, 2 E]."""
        match self.form:
            case "new_empty":
                keys = own.new_empty(*own.shape[:-1], 2 * SIZE)
                keys[..., :SIZE].copy_(own)
                keys[..., SIZE:].copy_(shared.expand_as(own))
            case "zeros of numbers":
                keys = torch.zeros(own.shape[0], HEADS, own.shape[2], 2 * SIZE, device=own.device)
                keys[..., :SIZE] = own
                keys[..., SIZE:] += shared
            case "empty of a list":
                keys = torch.empty((own.shape[0], HEADS, own.shape[2], 2 * SIZE), device=own.device)
                keys[..., SIZE:], keys[..., :SIZE] = shared, own
            case "new_full of numbers":
                keys = shared.new_full((shared.shape[0], HEADS, shared.shape[2], 2 * SIZE), 0.5)
                keys.narrow(-1, 0, SIZE).copy_(own)
                keys[..., SIZE:].mul_(shared)
            case "zeros_like":
                keys = torch.zeros_like(own).repeat(1, 1, 1, 2)
                keys[..., :SIZE] = own
                keys[..., SIZE:] = shared
            case _:
                keys = torch.cat([own, own], -1).slice_scatter(shared.expand_as(own), -1, SIZE)
        return keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, size)).transpose(1, 2)
            for p, size in ((self.q_proj, 2 * SIZE), (self.k_proj, SIZE), (self.v_proj, SIZE))
        )
        k = self.keys(k, self.shared(x)[:, None])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return (x + self.o_proj(y)).square().mean()


WAYS = ("new_empty", "zeros of numbers", "empty of a list", "new_full of numbers", "zeros_like", "slice_scatter")


class AllWays(nn.Module):
    """Each way with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(map(Written, WAYS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([way(x) for way in self.ways]).sum()


def test_attention_whose_keys_are_written_into_a_new_tensor_is_divided_by_heads() -> None:
    heads = [f"ways.{i}.{name}_proj.weight" for i in range(len(WAYS)) for name in ("q", "k", "v", "o")]
    assert_divided(AllWays, vectors, heads, sizes=((BATCH, LENGTH), (2, 6)))


def test_latent_attention_of_transformers_is_divided_by_heads() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 24}
    config = transformers.DeepseekV3Config(
        **sizes, **heads, **ranks, num_key_value_heads=4, first_k_dense_replace=2, n_routed_experts=4, n_group=1
    )
    names = ("q_b_proj", "kv_b_proj", "o_proj")
    plan = assert_divided(
        lambda: transformers.AutoModelForCausalLM.from_config(config),
        lambda batch, length: {**tokens(batch, length), "use_cache": False},
        [f"model.layers.0.self_attn.{name}.weight" for name in names],
        unused_outputs=("logits",),
    )
    placements = plan.parameter_plans()
    assert [placements[f"model.layers.0.self_attn.{name}.weight"].placement.dim for name in names] == [0, 0, 1]


class Softened(nn.Module):
    """Attention over two heads whose probabilities take the dtype of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).view(x.shape[0], x.shape[1], -1, SIZE).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        scores = torch.softmax((q @ k.transpose(2, 3)).float(), -1).type_as(q)
        return (self.out((scores @ v).transpose(1, 2).flatten(2)) - x).square().mean()


def test_attention_that_takes_the_dtype_of_its_queries_is_divided_by_heads() -> None:
    plan = assert_divided(Softened, vectors, [f"{name}.weight" for name in ("q", "k", "v", "out")])
    assert {name: str(own.placement) for name, own in plan.parameter_plans().items()} == {
        **dict.fromkeys(("q.weight", "k.weight", "v.weight"), "S(0)"),
        "out.weight": "S(1)",
    }


class Block(nn.Module):
    """Two layers with something between them: x [B, T, D] -> [B, T, D]."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x), self.gate(x)))


#: (x, y) [B, T, F] -> [B, T, F]: ops between two layers, which are divided by columns and by rows
BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.max,
    "min in place": lambda x, y: (2 * x).copysign_(torch.min(x, y)),
    "bessel": lambda x, y: torch.special.i0e(x) * torch.fmax(x, y).asinh() + torch.hypot(x, y),
}


class Blocks(nn.Module):
    """Every op of a table in a block of its own."""

    def __init__(self, table: Mapping[str, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, table.values()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x).square().mean() for block in self.blocks]).sum()


def test_layers_around_ops_that_torch_tags_as_pointwise_are_divided() -> None:
    weights = [f"blocks.{i}.{name}.weight" for i in range(len(BETWEEN)) for name in ("up", "gate", "down")]
    assert_divided(lambda: Blocks(BETWEEN), vectors, weights)


class Around(nn.Module):
    """A module between a layer that is divided by columns and one that is divided by rows: x [B, T, D] -> [].

    `between`: [B, F, T] -> [B, F, ...], where F is divided.
    """

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.up(x).transpose(1, 2)).flatten(2).transpose(1, 2)
        return self.down(y).square().mean()


class NormOfAFunction(nn.Module):
    """Without weights, its number of groups as a keyword and computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups=x.shape[1] // 4)


class InstanceNorm(nn.InstanceNorm1d):
    """torch's own compares the number of features with an attribute."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=self.weight, bias=self.bias)


class Writes(nn.Module):
    """Columns, elements and places of [B, F, T] are overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        x[:, :, torch.tensor([1, 3], device=x.device)] = x[:, :, :2] * 2
        x[x > 0.5] = 0.25
        places = torch.tensor([0, 2], device=x.device)
        x = x.index_copy(2, places, x[:, :, 4:6].cos()).index_fill(2, places[1:], 0.5)
        index = x.argsort(-1)
        return x.scatter(2, index, x * 3).scatter_reduce(2, index, x, "amax")


class Solves(nn.Module):
    """Systems of equations for each feature of [B, F, T]."""

    def forward(self, x: Tensor) -> Tensor:
        matrices = x.unfold(2, 4, 2)
        square = matrices.mT @ matrices + torch.eye(4, device=x.device)
        return torch.linalg.solve(square, matrices.mT) + torch.linalg.cholesky(square)[..., :3]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(HIDDEN, track_running_stats=False),
    "instance norm": InstanceNorm,
    "group norm": lambda: nn.GroupNorm(4, HIDDEN),
    "group norm of a function": NormOfAFunction,
    "slopes": lambda: nn.Sequential(nn.PReLU(HIDDEN), nn.PReLU()),
    "convolutions": lambda: nn.Sequential(
        nn.ConvTranspose1d(HIDDEN, HIDDEN, 3, groups=HIDDEN // 4),
        nn.Unflatten(1, (HIDDEN, 1)),
        nn.Unfold((1, 2)),
        nn.Fold((1, LENGTH + 2), (1, 2)),
    ),
    "writes": Writes,
    "solves": Solves,
}


class Modules(nn.Module):
    """Each module of a table between layers of its own."""

    def __init__(self, table: Mapping[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(Around(make()) for make in table.values())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in self.modules_]).sum()


def test_layers_around_norms_convolutions_writes_and_solves_are_divided() -> None:
    weights = [f"modules_.{i}.{name}.weight" for i in range(len(MODULES)) for name in ("up", "down")]
    plan = assert_divided(lambda: Modules(MODULES), vectors, weights)
    first = plan.parameter_plans()
    assert [first[f"modules_.{i}.up.weight"].placement.dim for i in range(len(MODULES))] == [0] * len(MODULES)


class Residual(nn.Module):
    """Convolutions around a group norm, as a U-Net has them."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(DIM, HIDDEN, 3, padding=1, bias=False)
        self.norm, self.last = nn.GroupNorm(groups, HIDDEN), nn.Conv1d(HIDDEN, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(F.silu(self.norm(self.first(x.mT)))).mT).square().mean()


@pytest.mark.parametrize(("groups", "is_divided"), [(HIDDEN, True), (4, True), (2, True), (1, False)])
def test_group_norms_are_divided_where_each_rank_has_whole_groups(groups: int, is_divided: bool) -> None:
    plan = assert_divided(lambda: Residual(groups), vectors, ["first.weight", "last.weight"])
    placed = {name: own.placement.dim for name, own in plan.parameter_plans().items() if name.endswith("weight")}
    expected = {"first.weight": 0, "norm.weight": 0, "last.weight": 1}
    assert (placed == expected) is is_divided
    sizes = [own.local for sizes in plan.size_plans().values() for own in sizes]
    assert sizes == ([groups // 2] if is_divided else [])


class Bags(nn.Module):
    """Tables that are looked up in bags, and a recurrent layer over what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = nn.EmbeddingBag(VOCABULARY, DIM), nn.EmbeddingBag(VOCABULARY, DIM, mode="sum")
        self.head = nn.Linear(DIM, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.mean(input_ids) * self.sum(labels)).square().mean()


def test_tables_of_bags_are_divided_by_columns() -> None:
    plan = assert_divided(Bags, tokens, ["mean.weight", "sum.weight"])
    assert plan.parameter_plans()["mean.weight"].placement == S(1)


class Recurrent(nn.Module):
    """A recurrent layer, and cells called step by step: x [B, T, D] -> []."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.lstm, self.gru = nn.LSTM(DIM, DIM, batch_first=True), nn.GRUCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.down(self.up(x).relu()))
        state = x[:, 0].new_zeros(x.shape[0], DIM)
        for step in range(2):
            state = self.gru(x[:, step], state)
        return state.square().mean()


def test_recurrent_layers_are_divided_by_the_batch() -> None:
    plan = assert_divided(Recurrent, vectors, (), pins={"lstm": "slices", "gru": "slices"})
    assert plan.boundary_plans()["lstm"].inputs["input"].conversion.target == S(0)
    assert plan.parameter_plans()["gru.weight_hh"].reads == {"gru": R_STAR}

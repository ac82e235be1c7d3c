"""A Llama in small, with biases in its row-parallel layers, and its plans by hand.

B batch, T sequence, D model, F hidden, V vocabulary, H heads.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plans import handmade_plan
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpplan.apply.collectives.cross_entropy import cross_entropy
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan

B, T, D, HEAD_DIM, HIDDEN, V = 4, 8, 32, 8, 48, 64
NUM_LAYERS = 2

#: makes a plan for a model on a mesh
Style = Callable[..., Plan]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.o = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyLlama(nn.Module):
    def __init__(self, *, is_tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(D, V, bias=False)
        self.recomputes = recomputes
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.norm(x))


def build(seed: int = 0, *, is_tied: bool = False, recomputes: bool = False) -> TinyLlama:
    torch.manual_seed(seed)
    return TinyLlama(is_tied=is_tied, recomputes=recomputes)


def batch(step: int = 0, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, V, (size, T), generator=generator)
    return ids, ids.roll(-1, 1)


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(ids), targets)


_COLUMN, _ROW = ("S(0)", "S(0)"), ("S(1)", "S(1)")


def my_part(mesh: Mesh, step: int = 0) -> tuple[Tensor, Tensor]:
    ids, targets = batch(step)
    rank, parts = mesh.data_rank(dist.get_rank()), mesh.data_parallel
    return ids.chunk(parts)[rank], targets.chunk(parts)[rank]


def layer_parameters() -> dict[str, tuple[str, str]]:
    """Megatron's: q, k, v, gate and up by columns, o and down by rows with their biases added once."""
    found = {}
    for layer in range(NUM_LAYERS):
        prefix = f"layers.{layer}"
        columns = ("attention.q.weight", "attention.k.weight", "attention.v.weight", "mlp.gate.weight", "mlp.gate.bias")
        found |= {f"{prefix}.{name}": _COLUMN for name in (*columns, "mlp.up.weight")}
        found |= {f"{prefix}.{name}": _ROW for name in ("attention.o.weight", "mlp.down.weight")}
        found |= {f"{prefix}.{name}": ("R", "P") for name in ("attention.o.bias", "mlp.down.bias")}
    return found


def partial_norms() -> dict[str, tuple[str, str]]:
    """Norms that see a part of the tokens: their gradients are summands."""
    inner = [f"layers.{layer}.{norm}" for layer in range(NUM_LAYERS) for norm in ("norm1", "norm2")]
    return {f"{name}.weight": ("R", "R*") for name in ("norm", *inner)}


def tensor_parallel(model: nn.Module, mesh: Mesh, **options: object) -> Plan:
    """Megatron: f at the inputs of attention and MLP, g at their outputs."""
    pair = ({"x": "R -> R*"}, {"output": "P -> R"})
    boundaries = {f"layers.{layer}.{name}": pair for layer in range(NUM_LAYERS) for name in ("attention", "mlp")}
    return handmade_plan(model, mesh, parameters=layer_parameters(), boundaries=boundaries, **_units(mesh), **options)


def sequence_parallel(model: nn.Module, mesh: Mesh, **options: object) -> Plan:
    """The residual stream is sharded in T between embedding and head; norms see a part of the tokens."""
    pair = ({"x": "S(1) -> R*"}, {"output": "P -> S(1)"})
    boundaries = {f"layers.{layer}.{name}": pair for layer in range(NUM_LAYERS) for name in ("attention", "mlp")}
    boundaries |= {"layers.0": ({"x": "R -> S(1)"}, {}), "norm": ({}, {"output": "S(1) -> R"})}
    parameters = layer_parameters() | partial_norms()
    return handmade_plan(model, mesh, parameters=parameters, boundaries=boundaries, **_units(mesh), **options)


def vocabulary_parallel(model: nn.Module, mesh: Mesh, **options: object) -> Plan:
    """sequence_parallel, with rows of the embedding and classes of the head sharded too: logits are never whole."""
    pair = ({"x": "S(1) -> R*"}, {"output": "P -> S(1)"})
    boundaries = {f"layers.{layer}.{name}": pair for layer in range(NUM_LAYERS) for name in ("attention", "mlp")}
    boundaries |= {
        "embedding": ({"input": "R -> rows"}, {"output": "rows -> S(1)"}),
        "head": ({"input": "S(1) -> R*"}, {}),
    }
    parameters = layer_parameters() | partial_norms() | {"embedding.weight": _COLUMN, "head.weight": _COLUMN}
    outputs = {"output": "S(2)"}
    return handmade_plan(
        model, mesh, parameters=parameters, boundaries=boundaries, outputs=outputs, **_units(mesh), **options
    )


def data_parallel(model: nn.Module, mesh: Mesh, **options: object) -> Plan:
    """No tensor parallelism."""
    return handmade_plan(model, mesh, **_units(mesh), **options)


def _units(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    return {"units": tuple(f"layers.{layer}" for layer in range(NUM_LAYERS))} if mesh.data_parallel > 1 else {}

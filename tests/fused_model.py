"""A model with fused projections, fewer heads of keys and values than of queries, and a head tied to its embedding.

B batch, T sequence, D model, H query heads, K heads of keys and values, E head size, F hidden, V vocabulary. Nothing
divides evenly by 3 or 4 that need not: FSDP's shards are uneven, some empty, and on 2 x 2 so are the embedding's.
"""

import torch
import torch.nn.functional as F
from plans import handmade_plan
from torch import Tensor, nn

from tpplan.apply.collectives.cross_entropy import cross_entropy
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan

B, T, D, H, K, E, HIDDEN, V = 12, 6, 10, 8, 4, 4, 12, 26
NUM_LAYERS = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, (H + 2 * K) * E)
        self.out = nn.Linear(H * E, D)
        self.register_buffer("angles", torch.outer(torch.arange(T), 10.0 ** -torch.arange(E)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        part = fused.shape[-1] // (H // K + 2)  # a rank has so many of keys, of values, and twice that of queries
        heads = (y.unflatten(-1, (-1, E)).transpose(1, 2) for y in fused.split((H // K * part, part, part), -1))
        q, k, v = heads
        scales = self.angles.cos().to(q.dtype)
        q, k = q * scales, k * scales
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = Attention()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(D, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_tokens", torch.tensor(7.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model() -> FusedModel:
    return FusedModel()


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(100 + step))
    return ids, ids.roll(-1, 1)


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(ids), targets)


def plan_for(model: nn.Module, mesh: Mesh) -> Plan:
    """Megatron's pairs with the fused weights read part by part; where V divides, the vocabulary is sharded too."""
    parameters: dict[str, tuple[str, str | dict[str, str]]] = {}
    boundaries: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    outputs = {}
    if mesh.tp > 1:
        fused, pair = f"S(0; {H * E}, {K * E}, {K * E})", f"S(0; {HIDDEN}, {HIDDEN})"
        for layer in (f"layers.{number}" for number in range(NUM_LAYERS)):
            parameters |= {f"{layer}.attention.qkv.{name}": ("S(0)", fused) for name in ("weight", "bias")}
            parameters |= {f"{layer}.mlp.gate_up.weight": ("S(0)", pair)}
            parameters |= {f"{layer}.{name}.weight": ("S(1)", "S(1)") for name in ("attention.out", "mlp.down")}
            parameters |= {f"{layer}.{name}.bias": ("R", "P") for name in ("attention.out", "mlp.down")}
            boundaries |= {f"{layer}.{name}": ({"x": "R -> R*"}, {"output": "P -> R"}) for name in ("attention", "mlp")}
        if V % mesh.tp == 0:
            parameters |= {"embedding.weight": ("S(0)", "S(0)")}
            boundaries |= {
                "embedding": ({"input": "R -> rows"}, {"output": "rows -> R"}),
                "head": ({"input": "R -> R*"}, {}),
            }
            outputs = {"output": "S(2)"}
    units = tuple(f"layers.{number}" for number in range(NUM_LAYERS)) if mesh.data_parallel > 1 else ()
    return handmade_plan(model, mesh, parameters=parameters, boundaries=boundaries, outputs=outputs, units=units)

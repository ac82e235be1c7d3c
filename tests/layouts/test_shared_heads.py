"""Attention with fewer heads of keys and values than ranks: planned by heads, applied, and compared with one process.

B batch, T sequence, D model, H query heads, K key and value heads, E head size.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import TOLERANCE, part, relative_errors
from plans import Boundaries, Parameters, handmade_plan
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.apply.modules.parameter_reads import check_reads
from tpplan.core.errors import PlanError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import S, copied
from tpplan.core.mesh import Mesh
from tpplan.layouts.typecheck import typecheck
from tpplan.plan.plan import Plan, SizePlan
from tpplan.trace.trace import trace

D, H, E, V = 64, 8, 8, 64
BATCH, SEQ_LEN = 4, 16

#: a machine on which collectives cost their latency, so that the fewest are best
DISTANT = eager_to_shard(latency_s=1e-4)

Outcome = tuple[float, dict[str, Tensor]]


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[B, K, T, E] -> [B, K * times, T, E], as transformers does it."""
    batch, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of [B, H, T, E]."""
    frequencies = 10.0 ** -torch.arange(x.shape[3] // 2, device=x.device).repeat(2)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Attention(nn.Module):
    """Causal; `form` is how keys and values meet the queries that share them."""

    def __init__(self, form: str, num_kv_heads: int) -> None:
        super().__init__()
        self.form, self.num_kv_heads = form, num_kv_heads
        self.q_proj = nn.Linear(D, H * E)
        self.k_proj, self.v_proj = (nn.Linear(D, num_kv_heads * E) for _ in range(2))
        if form == "normed":
            self.q_norm, self.k_norm = nn.RMSNorm(E), nn.RMSNorm(E)
        self.o_proj = nn.Linear(H * E, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # Written out: a rank has one of these heads.
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, E)
        q = self.q_proj(x).view(batch, length, -1, E)
        if self.form == "normed":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, E)).transpose(1, 2)
        match self.form:
            case "stretched":
                k, v = (repeat_heads(y, H // self.num_kv_heads) for y in (k, v))
            case "stretched and copied":
                k, v = (
                    y.unsqueeze(2).expand(-1, -1, H // self.num_kv_heads, -1, -1).contiguous().flatten(1, 2)
                    for y in (k, v)
                )
            case "repeated":
                k = k.repeat_interleave(H // self.num_kv_heads, dim=1)
                v = torch.repeat_interleave(v, repeats=H // self.num_kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.form in ("grouped", "normed"))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, form: str, num_kv_heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.attention = Attention(form, num_kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self, form: str, num_kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block(form, num_kv_heads) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


FORMS = ("grouped", "normed", "stretched", "stretched and copied", "repeated")


def build(form: str, num_kv_heads: int) -> Model:
    torch.manual_seed(5)
    return Model(form, num_kv_heads)


def example_inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    ids = torch.randint(V, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def loss_of(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solve(form: str, num_kv_heads: int, *, gpus: int = 4, **options: Any) -> Plan:
    return tpplan.solve(
        functools.partial(build, form, num_kv_heads),
        example_inputs,
        loss=loss_of,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=DISTANT),
        **{"global_batch": BATCH, "micro_batch": 1, "seq_len": SEQ_LEN, "precision": "fp32", **options},
    )


def run(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> float:
    """Forward and backward in micro-batches; the mean loss."""
    total = 0.0
    for step in range(steps):
        micro = part(inputs, step, steps)
        loss = loss_of(model(**tpplan.forward_inputs(model, micro)), micro) / steps
        loss.backward()
        total += loss.item()
    return total


def one_process(form: str, num_kv_heads: int) -> Outcome:
    model = build(form, num_kv_heads)
    loss = run(model, example_inputs(BATCH, SEQ_LEN), 1)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def applied(form: str, num_kv_heads: int, plan: Plan) -> Outcome:
    model = tpplan.apply_plan(build(form, num_kv_heads), plan)
    inputs = part(example_inputs(BATCH, SEQ_LEN), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
    loss = torch.tensor(run(model, inputs, plan.batch.accumulation_steps))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def reads(plan: Plan, name: str) -> str:
    """How the one reader of a parameter of every attention reads it."""
    (layout,) = plan.parameters[f"layers.*.attention.{name}"].reads.values()
    return str(layout)


TP, TP_AND_FSDP = {"tp": 4, "fsdp": 1}, {"tp": 2, "fsdp": 2}
CASES = [(form, 2, TP) for form in FORMS] + [("repeated", 1, TP)]


@pytest.mark.parametrize(("form", "num_kv_heads", "mesh"), [*CASES, ("stretched", 1, TP_AND_FSDP)], ids=str)
def test_heads_are_shared_by_ranks_as_in_one_process(form: str, num_kv_heads: int, mesh: dict[str, int]) -> None:
    plan = solve(form, num_kv_heads, **mesh)
    assert plan.proof.status == "proven"
    assert Plan.from_dict(plan.to_dict()) == plan
    assert (reads(plan, "q_proj.weight"), reads(plan, "o_proj.weight")) == ("S(0)", "S(1)")
    names = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
    assert {reads(plan, name) for name in names} == {"S(0)/2" if num_kv_heads == 2 else "R*"}
    assert {str(plan.parameters[f"layers.*.attention.{name}"].placement) for name in names} == {"R"}
    loss, gradients = one_process(form, num_kv_heads)
    for applied_loss, applied_gradients in run_ranks(4, applied, form, num_kv_heads, plan):
        assert abs(applied_loss - loss) < 1e-5 * abs(loss)
        errors = relative_errors(applied_gradients, gradients)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, (worst, errors[worst])


# ---- wrong plans


def by_hand(
    form: str = "grouped",
    num_kv_heads: int = 2,
    *,
    tp: int = 4,
    read: str = "S(0)/2",
    sizes: int = 0,
    changes: Parameters | None = None,
    boundary: Boundaries | None = None,
) -> Plan:
    """Megatron's, with `read` for keys and values; `sizes` replaces the number of their heads in the code."""
    attentions = [f"layers.{i}.attention" for i in range(2)]
    column, row, shared = ("S(0)", "S(0)"), ("S(1)", "S(1)"), ("R", read)
    weights = {"q_proj.weight": column, "q_proj.bias": column, "o_proj.weight": row, "o_proj.bias": ("R", "P")}
    weights |= {f"{name}_proj.{kind}": shared for name in "kv" for kind in ("weight", "bias")}
    if form == "normed":
        weights |= {"q_norm.weight": ("R", "R*"), "k_norm.weight": ("R", "R*")}
    plan = handmade_plan(
        build(form, num_kv_heads),
        Mesh(tp=tp),
        parameters={f"{a}.{name}": plan for a in attentions for name, plan in (weights | dict(changes or {})).items()},
        boundaries={a: ({"x": "R -> R*"}, {"output": "P -> R"}) for a in attentions} | dict(boundary or {}),
    )
    places = (("view", 4, 2), ("unflatten", 2, 0))
    local = tuple(
        SizePlan(call=call, of=(0, 0, 0), count=count, position=position, written=num_kv_heads, local=sizes)
        for call, count, position in places
    )
    return dataclasses.replace(plan, sizes=dict.fromkeys(attentions, local) if sizes else {})


def graph_of(form: str, num_kv_heads: int) -> ModelGraph:
    return trace(build(form, num_kv_heads), example_inputs(1, SEQ_LEN), loss=loss_of)


@pytest.mark.parametrize("form", FORMS)
def test_plans_by_hand_type(form: str) -> None:
    graph = graph_of(form, 2)
    assert typecheck(graph, by_hand(form)) is None
    assert typecheck(graph, by_hand(form, tp=8)) is None
    assert typecheck(graph_of(form, 4), by_hand(form, 4, tp=8, read="S(0)/4")) is None
    assert typecheck(graph_of(form, 1), by_hand(form, 1, read="R*")) is None
    assert typecheck(graph_of(form, 4), by_hand(form, 4, read="S(0)/2")) is not None


OUTSIDE: Boundaries = {"layers.0.attention": ({}, {"output": "P -> R"})}
KV = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
#: by name: form, heads of keys and values, and what differs; the op or the parameter that is refused
REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "two heads on each rank": ("grouped", 4, {}, "aten.scaled_dot_product_attention.default"),
    "more slices than heads": ("grouped", 2, {"tp": 8, "read": "S(0)/4"}, "aten.view.default"),
    "keys in two slices, values in four": (
        "grouped", 4, {"tp": 8, "read": "S(0)/4", "changes": dict.fromkeys(KV[:2], ("R", "S(0)/2"))},
        "aten.scaled_dot_product_attention.default"),
    "keys shared, values whole": (
        "grouped", 2, {"changes": dict.fromkeys(KV[2:], ("R", "R*"))},
        "aten.scaled_dot_product_attention.default"),
    "a weight shared, its bias whole": (
        "grouped", 2, {"changes": {"k_proj.bias": ("R", "R*")}}, "aten.linear.default"),
    "a weight that rests in slices": (
        "grouped", 2, {"changes": {"k_proj.weight": ("S(0)", "S(0)/2")}}, "parameter layers.0.attention.k_proj.weight"),
    "slices that do not divide the ranks": (
        "grouped", 2, {"read": "S(0)/3"}, "parameter layers.0.attention.k_proj.weight"),
    "as many slices as ranks": ("grouped", 4, {"read": "S(0)/4"}, "parameter layers.0.attention.k_proj.weight"),
    "stretched with two heads on each rank": ("stretched", 4, {}, "aten.scaled_dot_product_attention.default"),
    "the input's gradient taken whole": (
        "grouped", 2, {"boundary": OUTSIDE}, "aten.linear.default"),
    "a norm's weight with a whole gradient": (
        "normed", 2, {"changes": {"k_norm.weight": ("R", "R")}}, "aten.rms_norm.default"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sharing_is_refused(name: str) -> None:
    form, num_kv_heads, changes, title = REFUSED[name]
    found = typecheck(graph_of(form, num_kv_heads), by_hand(form, num_kv_heads, **changes))
    assert found is not None
    assert found.message.startswith(f"{title} in layers.0.attention" if title.startswith("aten") else title)


def test_what_rests_in_slices_is_not_read_in_fewer() -> None:
    with pytest.raises(PlanError, match=r"what rests as S\(0\) cannot be read as S\(0\)/2"):
        check_reads("k_proj.weight", S(0), {"k_proj": copied(0, 2)})


#: those of them that run on every rank, with sizes to suit
RUNNING = {
    "two heads on each rank": 2,
    "the input's gradient taken whole": 1,
    "a norm's weight with a whole gradient": 1,
}


def test_what_is_refused_is_wrong() -> None:
    """The checker would prove nothing if it were right; beside each, the right plan is."""
    for name, sizes in RUNNING.items():
        form, num_kv_heads, changes, _ = REFUSED[name]
        loss, gradients = one_process(form, num_kv_heads)
        found_loss, found = run_ranks(
            4, applied, form, num_kv_heads, by_hand(form, num_kv_heads, sizes=sizes, **changes)
        )[0]
        errors = (abs(found_loss / loss - 1), *relative_errors(found, gradients).values())
        assert max(errors) > 1e-3, name
    loss, gradients = one_process("normed", 2)
    _, found = run_ranks(4, applied, "normed", 2, by_hand("normed", 2, sizes=1))[0]
    assert max(relative_errors(found, gradients).values()) < TOLERANCE

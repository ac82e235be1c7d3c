"""The first training forward on ranks calls what was called while the plan was made, or raises on every rank."""

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.calls import digest, first_difference
from tpplan.errors import PlanMismatchError
from tpplan.plan import Plan

DIM, HIDDEN, TEXTS, SEQ = 32, 64, 4, 8
VARIABLE = "TPPLAN_TEST_OTHER_WAY"


class Layer(nn.Module):
    """What is between may go another way."""

    def __init__(self, between: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.between, self.num_calls = between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.down(self.between(self, self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, between: Callable[[Layer, Tensor], Tensor], *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Layer(between)) for _ in range(2))
        self.dropout, self.recomputes = nn.Dropout(0.0), recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.dropout(x).square().mean()


def plain(_: Layer, h: Tensor) -> Tensor:
    return F.gelu(h)


def by_variable(_: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if VARIABLE in os.environ else F.gelu(h)


def by_count(layer: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if layer.num_calls > 1 else F.gelu(h)


def by_length(_: Layer, h: Tensor) -> Tensor:
    return h.cumsum(1) if h.shape[1] > 2 * SEQ else F.gelu(h)


def by_threads(_: Layer, h: Tensor) -> Tensor:
    """Of a world that no trace has."""
    return F.gelu(h, approximate="tanh" if VARIABLE in os.environ else "none")


def inputs(batch: int = TEXTS, length: int = SEQ) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(length))}


def solve(between: Callable[[Layer, Tensor], Tensor], *, tp: int = 2, **options: bool) -> Plan:
    profile = replace(eager_to_shard(), device_type="cpu")
    return tpplan.solve(
        lambda: Model(between, **options),
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=profile),
        global_batch=2 * TEXTS // tp,
        micro_batch=TEXTS if tp == 2 else TEXTS // 2,
        seq_len=SEQ,
        tp=tp,
        precision="fp32",
    )


def step(model: nn.Module, shape: tuple[int, int] = (TEXTS, SEQ)) -> None:
    model(**inputs(*shape)).backward()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("between", [by_variable, by_threads, by_count, by_length])
def test_another_way_is_an_error_on_every_rank(between: Callable[[Layer, Tensor], Tensor], tp: int) -> None:
    plan = solve(between, tp=tp)

    def run() -> str:
        os.environ[VARIABLE] = "1"
        model = Model(between)
        if between is by_count:
            model.layers[1][1].num_calls = 1  # type: ignore[union-attr]
        model = tpplan.apply_plan(model, plan)
        with pytest.raises(PlanMismatchError) as raised:
            step(model, (TEXTS // 2 if tp == 1 else TEXTS, 4 * SEQ if between is by_length else SEQ))
        return str(raised.value)

    messages = run_ranks(2, run)
    assert len(set(messages)) == 1
    wanted = {by_variable: "softmax", by_threads: "gelu\\(tanh\\)", by_count: "softmax", by_length: "cumsum"}[between]
    assert f"module layers.{int(between is by_count)}.1 calls here" in messages[0]
    assert wanted.replace("\\", "") in messages[0]


def test_a_check_may_warn_or_be_left_out() -> None:
    plan = solve(by_variable)

    def run(check: bool | str) -> int:
        os.environ[VARIABLE] = "1"
        model = tpplan.apply_plan(Model(by_variable), plan, check=check)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model)
            step(model)
        return sum("calls here" in str(warning.message) for warning in caught)

    assert run_ranks(2, run, "warn") == [1, 1]
    assert run_ranks(2, run, False) == [0, 0]


def test_a_plan_for_another_kind_of_device_says_that_nothing_is_compared() -> None:
    plan = solve(plain)
    elsewhere = dataclasses.replace(plan, proof=dataclasses.replace(plan.proof, device="cuda 9.0"))

    def said(plan: Plan) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpplan.apply_plan(Model(plain), plan)
        return sum("told that it runs on cuda, and runs on cpu" in str(warning.message) for warning in caught)

    assert run_ranks(2, said, elsewhere) == [1, 0]
    assert run_ranks(2, said, plan) == [0, 0]


def no_cries(plan: Plan, recomputing: Plan) -> None:
    """What goes the proven way under other names: other batches, backends, modes, hooks."""
    call = nn.Module.__call__
    for shape in ((TEXTS, SEQ), (2, SEQ), (TEXTS, 2 * SEQ)):
        step(tpplan.apply_plan(Model(plain), plan), shape)
    model = tpplan.apply_plan(Model(plain), plan)
    model.eval()
    step(model)
    model.train()
    model.layers[0].register_forward_hook(lambda _m, _args, out: out.detach().float().std() and None)
    model.layers[0].register_forward_pre_hook(lambda _m, args: (args[0] + 0,))
    with sdpa_kernel(SDPBackend.MATH):
        step(model)
    with torch.autocast("cpu", torch.bfloat16):
        step(tpplan.apply_plan(Model(plain), plan))
    step(tpplan.apply_plan(Model(plain, recomputes=True), recomputing))
    model = tpplan.apply_plan(Model(plain), plan)
    with pytest.raises(TypeError):
        model(nothing=1)
    step(model)
    assert nn.Module.__call__ is call


def test_there_is_no_crying_wolf() -> None:
    run_ranks(2, no_cries, solve(plain), solve(plain, recomputes=True))


def test_a_plan_carries_what_its_modules_call() -> None:
    plan = solve(plain)
    assert plan.proof.calls is not None
    called = plan.called()
    assert {"layers.0.0", "layers.0.1", "layers.1.1.norm", "<root>"} <= called.keys()
    assert called["layers.0.1"] == called["layers.1.1"] == (digest(("gelu()", "add()")),)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_the_first_call_that_differs_is_found() -> None:
    planned = ("linear()", "gelu(none)", "linear()")
    assert first_difference(("linear()", "softmax()", "linear()"), digest(planned)) == 1
    assert first_difference(planned[:2], digest(planned)) == 2
    assert first_difference((*planned, "add()"), digest(planned)) == 3
